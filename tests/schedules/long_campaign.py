"""A campaign that goes on from night to night: what it has played so far, in a file.

Its sources have a name, a digest of all modules that a schedule runs (`benchmarks.lib.kept_parts`). A changed page, test or
command line leaves the campaign as it is; a changed driver is another campaign. After every part of `PART` schedules the file
is written anew, so that a machine that dies costs minutes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import msgspec

from atoll.base.files import write_whole
from atoll.base.parsing import parsed
from benchmarks.lib.kept_parts import source_digest
from schedules.faults import Beside
from schedules.schedule import Outcome

PART: Final = 1000
Count = Annotated[int, msgspec.Meta(ge=0)]


class MixedSources(Exception):
    """The campaign in a file is of other sources, or the file is no campaign."""


class Failure(msgspec.Struct, frozen=True):
    """A schedule that failed."""

    seed: int
    kind: str
    what: str


class Campaign(msgspec.Struct, kw_only=True):
    """What was played: so many schedules from seed `first` on, in how much time of a core, what happened, what failed.

    `beside`: what all of them have.
    """

    sources: str
    first: Count
    beside: Beside = ""
    schedules: Count = 0
    core_s: float = 0.0
    tally: dict[str, int] = {}
    failures: list[Failure] = []

    @property
    def next(self) -> int:
        """Return the first seed that is not played yet."""
        return self.first + self.schedules

    def add(self, schedules: int, core_s: float, tally: Counter[str], failures: list[Outcome]) -> None:
        """Add what was played from `next` on."""
        self.schedules += schedules
        self.core_s += core_s
        self.tally = dict(Counter(self.tally) + tally)
        self.failures += [Failure(each.seed, each.kind, each.what) for each in failures]


def begun(first: int, *, beside: Beside = "") -> Campaign:
    """Return a campaign of the present sources that has played nothing."""
    return Campaign(sources=source_digest(["schedules.schedule"]), first=first, beside=beside)


def resumed(path: Path, first: int, *, beside: Beside = "") -> Campaign:
    """Return the campaign in a file, a new one where there is none; raise `MixedSources` for another one."""
    new = begun(first, beside=beside)
    if not path.exists():
        return new
    try:
        known = parsed(path.read_bytes(), Campaign)
    except (OSError, msgspec.MsgspecError) as error:
        raise MixedSources(f"{path} holds no campaign ({error}): give another file, or remove it") from error
    if known.sources != new.sources:
        raise MixedSources(
            f"{path} is of sources {known.sources}, these are {new.sources}: give another file, or remove it"
        )
    if known.beside != beside:
        was = f"with --{known.beside}" if known.beside else "without --hostile and --replicated"
        raise MixedSources(f"{path} is a campaign {was}: give another file")
    return known


def save(path: Path, campaign: Campaign) -> None:
    """Write a campaign, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(campaign), indent=2) + b"\n")
