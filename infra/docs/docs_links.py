"""From paths in the repository to paths in the site: where each file lands, and the links of a page after it has moved.

Pages under `docs/` keep their places. The four pages at the root of the repository become pages of the site. Any other
file that a page links to (a module, a configuration file) is copied as plain text, so that the site needs no network and
names no host. A link that leads nowhere raises `BrokenLinks`, with every one of them in the message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SOURCES = "source"
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^(`{3,}|~{3,})")
_CODE = re.compile(r"`[^`]*`")


class BrokenLinks(Exception):
    """Links that lead nowhere, each as `page: target`."""


@dataclass
class Linker:
    """Rewrites the links of pages, and remembers which other files they need.

    `root` is the repository, `generated` are pages of the site that no file of the repository stands for.
    """

    root: Path
    generated: frozenset[str]
    needed: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def place(self, path: str) -> str | None:
        """Return where a file of the repository lands in the site, or None if it is no page of it."""
        if path in ROOT_PAGES:
            return ROOT_PAGES[path]
        if path.startswith("docs/"):
            inside = PurePosixPath(path).relative_to("docs")
            return str(inside.with_name("index.md") if inside.name == "README.md" else inside)
        return None

    def site_path(self, path: str) -> str:
        """Return where a page of the repository lands; raise `KeyError` if it is no page of the site."""
        found = self.place(path)
        if found is None:
            raise KeyError(path)
        return found

    def page(self, path: str, text: str) -> str:
        """Return the text of the page at `path` (in the repository) with links that hold in the site."""
        here = self.site_path(path)
        lines = []
        for line, is_prose in prose(text):
            lines.append(self._line(path, here, line) if is_prose else line)
        return "\n".join(lines)

    def _line(self, path: str, here: str, line: str) -> str:
        code = [match.span() for match in _CODE.finditer(line)]

        def fixed(match: re.Match[str]) -> str:
            if any(start <= match.start() < end for start, end in code):
                return match[0]
            target = self._target(path, here, match["target"])
            return match["text"] if target is None else f"{match['image']}[{match['text']}]({target})"

        return _LINK.sub(fixed, line)

    def _target(self, path: str, here: str, target: str) -> str | None:
        """Return the target of a link as the site has it; None where only its text can stay."""
        name, mark, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not name:
            return target
        wanted = os.path.normpath(PurePosixPath(path).parent / name)
        inside = self.place(wanted)
        if inside is not None and inside in self.generated:
            return self._relative(here, inside) + mark + anchor
        if not (self.root / wanted).exists() or wanted.startswith(".."):
            self.broken.append(f"{path}: {target}")
            return target
        if (self.root / wanted).is_dir():
            return self._folder(here, wanted)
        if inside is None:
            inside = f"{SOURCES}/{wanted}.txt"
            self.needed[wanted] = inside
        return self._relative(here, inside) + mark + anchor

    def _folder(self, here: str, wanted: str) -> str | None:
        """Return the page of a folder of documents; folders of code have none."""
        inside = self.place(f"{wanted}/README.md")
        exists = inside is not None and (inside in self.generated or (self.root / wanted / "README.md").exists())
        return self._relative(here, inside) if exists and inside is not None else None

    @staticmethod
    def _relative(here: str, there: str) -> str:
        return os.path.relpath(there, PurePosixPath(here).parent)

    def check(self) -> None:
        """Raise `BrokenLinks` if any link led nowhere."""
        if self.broken:
            raise BrokenLinks("\n".join(sorted(self.broken)))


def prose(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line and whether it is prose, not the inside of a fenced block."""
    fence = ""
    for line in text.split("\n"):
        mark = _FENCE.match(line.strip())
        if fence:
            yield line, False
            if mark and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif mark:
            fence = mark[1]
            yield line, False
        else:
            yield line, True
