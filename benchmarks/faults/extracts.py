"""What is kept of one run of the chaos harness: small enough for the repository, enough to recompute every figure.

An extract holds what was done to the run and what its event log, its ledger and its heartbeats say, nothing that a process
says of itself afterwards. Times are seconds since `began_s`, when every learner had taken a step; the measured window
ends `seconds` later. A *life* is one incarnation of a learner (for the synchronous baseline: one generation of the whole
group), as rows (time, steps, tokens, seconds per step).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from atoll.base.atomic_files import write_whole
from atoll.protocol.ledger import Ledger
from benchmarks.faults.storm import Fault

LEVEL = 19
SCHEMA = 2
EXTRACT_BYTES_MAX = 256 << 20
Row = tuple[float, int, int, float]
Ranges = list[list[int]]


class ExtractShare(msgspec.Struct, array_like=True, frozen=True):
    """One contribution in a commit."""

    learner: str
    incarnation: int
    push: int
    age: int
    tokens: int


class ExtractRound(msgspec.Struct, array_like=True, frozen=True):
    """One commit, as the event log tells of it."""

    at_s: float
    shard: str
    fragment: int
    version: int
    shares: list[ExtractShare]


class Made(msgspec.Struct, array_like=True, frozen=True):
    """One version as its head told of it, while it was the newest; `digest` is that of its frame."""

    fragment: int
    version: int
    digest: str
    shares: list[ExtractShare]


FORMER = "former"
"""What `Extract.booked` calls the lives that the ledgers have folded: `former/fragment`."""


class Booked(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one incarnation and fragment by fate, as the ledgers have them at the end."""

    merged: int
    merged_late: int
    refused: int


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """One refused contribution, as the event log tells of it."""

    at_s: float
    learner: str
    incarnation: int
    fragment: int
    push: int
    reason: str


class Course(msgspec.Struct, frozen=True):
    """What makes a run the run it is; a kept extract of the same course and sources is not measured again.

    `kills_min` is what a gauntlet must kill; 0 for the runs that are compared with each other, all of the same length.
    """

    name: str
    system: str
    per_minute: float
    seed: int
    seconds: float
    partition_s: float
    learners: int
    kills_min: int = 0


class Extract(msgspec.Struct, kw_only=True):
    """See the module docstring.

    Attributes:
        faults: what was done; `missed` counts the forecast's faults that found nobody.
        rounds, refusals: the event log; versions by fragment in `heads` are the last ones visible.
        acknowledged: push numbers, by learner/incarnation/fragment, whose manifests the broker said it had stored.
        settled: the same, of those that have a fate by the ledgers at the end.
        stored: pairs (push, tokens) of the same keys, of what was heard of as stored.
        booked: tokens by fate of the same keys, by the ledgers at the end.
        made: versions whose head was read when it was announced, whether or not the event log has a line for them.
        merged: tokens merged by fragment, as the last heads count them.
        age_damping: how fresh what is late is, per version of age.
        ledger: what the shards closed with.
        tenures: how many began in the storm, by shard.
        report: fates and validation of `report.json`; of the baseline what corresponds to them.
        schema: which of these were recorded; an extract of another schema is measured again.
        step_tokens: tokens of one step of the whole group (the baseline only).
    """

    course: Course
    sources: str
    machine: str
    commit: str
    began_s: float
    fragments: int = 1
    faults: list[Fault] = []
    missed: int = 0
    lives: dict[str, list[Row]] = {}
    rounds: list[ExtractRound] = []
    refusals: list[Refusal] = []
    heads: dict[int, int] = {}
    acknowledged: dict[str, Ranges] = {}
    settled: dict[str, Ranges] = {}
    stored: dict[str, list[tuple[int, int]]] = {}
    booked: dict[str, Booked] = {}
    made: list[Made] = []
    merged: dict[int, int] = {}
    age_damping: float = 1.0
    schema: int = 1
    tenures: dict[int, int] = {}
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    report: dict[str, Any] = {}
    step_tokens: int = 0

    @property
    def storm(self) -> list[Fault]:
        """Return the faults with their times counted from `began_s`, as everything else is."""
        began_s = self.began_s
        return [
            msgspec.structs.replace(
                fault, at_s=fault.at_s - began_s, over_at_s=fault.over_at_s - began_s if fault.over_at_s else 0.0
            )
            for fault in self.faults
        ]


def save(extract: Extract, path: Path) -> None:
    """Write an extract; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, zstandard.compress(msgspec.json.encode(extract), LEVEL))


def load(path: Path) -> Extract:
    data = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=EXTRACT_BYTES_MAX)
    return msgspec.json.decode(data, type=Extract)


def ranges(numbers: Iterable[int]) -> Ranges:
    found: Ranges = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def numbers(found: Ranges) -> set[int]:
    return {number for first, last in found for number in range(first, last + 1)}
