"""Builds the documentation as a site, without network: `make docs-build`, and `make docs` to read it while you write.

    python infra/docs/docs_site.py [--serve]

Pages are put together in `build/docs/pages`: those of `docs/`, the four of the root, and the reference, which is generated
from the code. Zensical turns them into `build/docs/site`. A link that leads nowhere fails the build, twice: here for
everything in the repository, and in Zensical (`--strict`) for pages and headings.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import docs_api
import docs_claims
import docs_commands
import docs_messages
import docs_settings
from docs_links import ROOT_PAGES, Linker

from atoll.base.docstrings import summary

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "docs"
PAGES, SITE, CONFIG = BUILD / "pages", BUILD / "site", BUILD / "zensical.toml"
ASSETS = {".svg", ".png"}
LOOK_AGAIN_S = 1.0
SECTIONS = {
    "Tutorial": "tutorial",
    "How-to": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Decisions": "adr",
    "Results": "results",
    "Lab": "lab",
}


def generated(root: Path) -> dict[str, str]:
    """Return the text of every generated page by its path in the repository, as if it had been written there."""
    api = {f"docs/reference/api/{name}": text for name, text in docs_api.pages(root).items()}
    schemas = {f"docs/reference/schemas/{name}": text for name, text in docs_messages.schemas().items()}
    return {
        "docs/reference/settings.md": docs_settings.page(root),
        "docs/reference/claims.md": docs_claims.page(),
        "docs/reference/commands.md": docs_commands.page(),
        "docs/reference/subjects.md": docs_messages.subjects_page(),
        "docs/reference/messages.md": docs_messages.page(),
        "docs/reference/log-events.md": docs_api.log_events_page(root),
        "docs/results/README.md": results_page(root),
        **{f"docs/reference/{name}": text for name, text in docs_messages.taps().items()},
        **schemas,
        **api,
    }


def results_page(root: Path) -> str:
    """Return the index of all published results, with the first paragraph of each."""
    lines = []
    for path in sorted((root / "docs" / "results").glob("*.md")):
        title, first = _opening(path.read_text(encoding="utf-8"))
        lines.append(f"- [{title}]({path.name}): {first}")
    return "\n".join(["# Results", "", RESULTS, "", *lines, ""])


RESULTS = """\
Every page is written by `make results` from what a command measured; the command is on the page, and each page names the
machine and the commit. [How to ask a question of your own](../how-to/experiments.md)."""


def _opening(text: str) -> tuple[str, str]:
    lines = text.split("\n")
    return lines[0].removeprefix("# "), summary("\n".join(lines[1:]).strip())


def stage(root: Path, pages: Path) -> None:
    """Put all pages of the site into the folder `pages`.

    Raises:
        BrokenLinks: a page links to something that is not there.
    """
    made = generated(root)
    linker = Linker(root, frozenset())
    linker.generated = frozenset(place for path in made if (place := linker.place(path)))
    shutil.rmtree(pages, ignore_errors=True)
    written = {path: (root / path).read_text(encoding="utf-8") for path in _written(root)}
    for path, text in {**written, **made}.items():
        _write(pages / linker.site_path(path), linker.page(path, text) if path.endswith(".md") else text)
    for asset in (root / "docs").rglob("*"):
        if asset.suffix in ASSETS and "raw" not in asset.parts:
            _copy(asset, pages / asset.relative_to(root / "docs"))
    for wanted, place in linker.needed.items():
        _copy(root / wanted, pages / place)
    linker.check()


def _written(root: Path) -> list[str]:
    inside = sorted(str(path.relative_to(root)) for path in (root / "docs").rglob("*.md"))
    return [*ROOT_PAGES, *inside]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def configure(pages: Path, config: Path) -> None:
    """Write the configuration of the site: what stands in `zensical.toml` here, and the order of the pages."""
    entries = ['{ "Atoll" = "index.md" }']
    for title, folder in SECTIONS.items():
        inside = ", ".join(json.dumps(str(page)) for page in _in_order(pages, folder))
        entries.append(f"{{ {json.dumps(title)} = [{inside}] }}")
    entries += ['{ "Contributing" = "contributing.md" }', '{ "Changes" = "changelog.md" }']
    shipped = (Path(__file__).parent / "zensical.toml").read_text(encoding="utf-8")
    navigation = "nav = [\n" + "".join(f"  {entry},\n" for entry in entries) + "]\n"
    config.write_text(shipped.replace("# nav: made by docs_site.py\n", navigation), encoding="utf-8")


def _in_order(pages: Path, folder: str) -> list[Path]:
    """Return the pages of a section: its index, then those the index links to in that order, then the others."""
    found = sorted(path.relative_to(pages) for path in (pages / folder).rglob("*.md"))
    index = pages / folder / "index.md"
    text = index.read_text(encoding="utf-8") if index.exists() else ""

    def rank(path: Path) -> tuple[bool, int, str]:
        at = text.find(f"({path.relative_to(folder)}")
        return path.name != "index.md" or path.parent != Path(folder), at if at >= 0 else len(text), str(path)

    return sorted(found, key=rank)


def build() -> int:
    """Stage and build the site; return the exit code."""
    stage(ROOT, PAGES)
    configure(PAGES, CONFIG)
    return subprocess.run([*_zensical(), "build", "--strict", "--clean", "-f", str(CONFIG)], check=False).returncode


def serve() -> int:
    """Serve the site on the loopback and stage again whenever a page changes."""
    stage(ROOT, PAGES)
    configure(PAGES, CONFIG)
    server = subprocess.Popen([*_zensical(), "serve", "-f", str(CONFIG)])
    try:
        seen = _newest()
        while server.poll() is None:
            time.sleep(LOOK_AGAIN_S)
            if (now := _newest()) != seen:
                seen = now
                subprocess.run([sys.executable, __file__, "--stage"], check=False)
    except KeyboardInterrupt:
        return 0
    finally:
        ended = server.poll()
        server.terminate()
        server.wait()
    return ended or 0


def _newest() -> float:
    watched = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ROOT_PAGES)]
    return max(path.stat().st_mtime for path in watched)


def _zensical() -> list[str]:
    return [str(Path(sys.executable).parent / "zensical")]


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description="Build the documentation as a site, without network.")
    parser.add_argument("--serve", action="store_true", help="serve it and follow changes, until Ctrl-C")
    parser.add_argument("--stage", action="store_true", help="only put the pages together")
    options = parser.parse_args()
    if options.stage:
        stage(ROOT, PAGES)
        return 0
    return serve() if options.serve else build()


if __name__ == "__main__":
    sys.exit(main())
