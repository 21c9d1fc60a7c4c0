"""Trees as YAML, by PyYAML, for files that people read and other programs load.

A text of YAML is quoted unless no reader, of YAML 1.1 or 1.2, could take it for anything else ("no", 0o17, 1:30 and y are no
texts in one of them). No anchors: what two places share is written in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from yaml import SafeDumper, dump_all
from yaml.nodes import ScalarNode

_PLAIN: Final = re.compile(r"[A-Za-z/.][A-Za-z0-9_./-]*[A-Za-z0-9/]")
_WIDTH: Final = 1 << 20
"""Lines are not folded: a reader searches for a command as it is typed."""


class _PlainDumper(SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def _represent_text(dumper: _PlainDumper, text: str) -> ScalarNode:
    style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_PlainDumper.add_representer(str, _represent_text)


def yaml(*documents: Mapping[str, Any], head: str = "") -> str:
    """Return documents as YAML in blocks, after lines of comment."""
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    text: str = dump_all(
        documents, Dumper=_PlainDumper, sort_keys=False, default_flow_style=False, width=_WIDTH, allow_unicode=True
    )
    return comment + text
