"""`reference/settings.md`: every setting with its default, what is allowed, what it means and what its default follows from.

The settings and their descriptions come from `atoll.settings.catalogue`. What a default follows from is written by hand in
`docs/reference/defaults-follow-from.toml`: a page and half a sentence for a setting, or for a whole section.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from atoll.base.docstrings import summary
from atoll.settings import Settings, load
from atoll.settings.catalogue import Setting, carried_sections, every_setting

ORIGINS = Path("docs/reference/defaults-follow-from.toml")


def origins(root: Path) -> dict[str, tuple[str, str]]:
    """Return by setting, or by `section.*`, the page its default follows from (or none) and half a sentence."""
    told = tomllib.loads((root / ORIGINS).read_text(encoding="utf-8"))
    return {name: (entry.get("page", ""), entry.get("why", "")) for name, entry in told.items()}


def origin_of(setting: str, known: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the origin of one setting: its own, else that of the nearest section.

    Raises:
        KeyError: nothing is written about it.
    """
    if setting in known:
        return known[setting]
    section = setting
    while section:
        section = section.rpartition(".")[0]
        if f"{section}.*" in known:
            return known[f"{section}.*"]
    return known[setting]


def page(root: Path) -> str:
    """Return the page of all settings, with links as a file in `docs/reference` has them."""
    known, services = origins(root), carried_sections()
    sections: dict[str, list[Setting]] = {}
    for setting in every_setting():
        sections.setdefault(setting.section, []).append(setting)
    parts = ["# Settings", INTRODUCTION]
    for section, settings in sections.items():
        kind = type(getattr(load(environment={}).settings, section, None)) if section else Settings
        kind = services.get(section, kind)
        parts += [
            f"## {section or 'top of the file'}",
            summary(kind.__doc__) if kind.__module__.startswith("atoll") else "",
        ]
        parts.append("\n".join([HEADER, *(_row(setting, *origin_of(setting.name, known)) for setting in settings)]))
    return "\n\n".join(part for part in parts if part) + "\n"


INTRODUCTION = """\
A value comes from the first of these that has it: a flag of the verb, `--set a.b=c`, the environment variable, the TOML file
given with `--config`, the default below. `atoll config` prints every value and where it came from, `atoll config --describe`
what stands here. `atoll up` has some defaults of its own for short runs, which `atoll config --up` shows. *Follows from* names
the table or the page that a default was chosen by.
[Change a setting](../how-to/configure.md) shows how."""
HEADER = "| setting, environment variable | default | allowed | meaning | follows from |\n|---|---|---|---|---|"


def _row(setting: Setting, origin: str, why: str) -> str:
    link = f"[{why}]({origin})" if origin else why
    cells = [
        f'<span id="{setting.name}"></span>`{setting.name}`<br>`{setting.variable}`',
        f"`{setting.default}`",
        setting.allowed,
        setting.meaning,
        link,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
