"""What is said in the simulated world besides records: manifests and farewells, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.events import LearnerBeat, PushKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A manifest: what a push says of itself, and the stem of its chunks; `flaw`: what a shard will find in them."""

    key: PushKey
    base_version: int
    tokens: int
    steps: int
    trained_tokens: int
    final: bool
    stem: str
    flaw: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """A learner's last word to one shard, with its final report."""

    learner: str
    incarnation: int
    beat: LearnerBeat
