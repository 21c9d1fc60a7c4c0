"""The page of a run as one file, which loads nothing and opens from a disk: the dashboard's page with the run's frames inside.

A monitor serves the files of `static/` and sends frames as the run goes on (`atoll_monitor.dashboard`). Here scripts are
`data:` modules behind an import map, because a page of `file://` may import no neighbour, and the frames are JSON in the page.
The policy allows these scripts by their digests, and no other: what a peer has written stays text.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec

STATIC: Final = Path(__file__).parent / "static"
_ENTRY: Final = 'import "main.js";'


def page_with(frames: Mapping[str, Any]) -> str:
    """Return the page that shows these frames, by kind as the feed of a monitor sends them."""
    imports = {name: _data("text/javascript", _with_bare_imports(text)) for name, text in _scripts().items()}
    import_map = msgspec.json.encode({"imports": imports}).decode()
    # No tag can begin inside of it, whatever the run's processes are called.
    data = msgspec.json.encode(frames).decode().replace("<", "\\u003c")
    styles: list[str] = []

    def inline_style(link: re.Match[str]) -> str:
        styles.append(_read(link[1]))
        return f"<style>{styles[-1]}</style>"

    page = re.sub(r'<link rel="stylesheet" href="static/([^"]+)">', inline_style, _read("index.html"))
    policy = (
        f"default-src 'none'; script-src {_digest(import_map)} {_digest(_ENTRY)} data:; "
        f"style-src {' '.join(map(_digest, styles))}; img-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'"
    )
    replacements = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "static/icon.svg": _data("image/svg+xml", _read("icon.svg")),
        '<a href="data.json">data.json</a>': '<a href="report.json">report.json</a>',
        "<title>Atoll</title>": f"<title>{escape(str(frames['state']['run']))} · Atoll</title>",
        '<script type="module" src="static/main.js"></script>': f'<script type="importmap">{import_map}</script>\n'
        f'<script type="application/json" id="frames">{data}</script>\n<script type="module">{_ENTRY}</script>',
    }
    for former, latter in replacements.items():
        page = page.replace(former, latter, 1)
    return page


def _scripts() -> dict[str, str]:
    return {path.relative_to(STATIC).as_posix(): path.read_text(encoding="utf-8") for path in STATIC.rglob("*.js")}


def _with_bare_imports(script: str) -> str:
    """Return a script that names its neighbours as the import map does: a `data:` module has no place to count from."""
    return re.sub(r'\b(from|import) "\./', r'\1 "', script)


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _data(kind: str, text: str) -> str:
    return f"data:{kind};base64,{b64encode(text.encode()).decode()}"


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
