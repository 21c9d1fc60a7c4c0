"""The status of a run as a program reads it: the facts of `atoll top` in one struct, whose JSON schema is made from it.

Seconds and bytes are named in the fields. None stands for what is not known. Fields may be added; none is renamed or removed
as long as `schema` stays the same.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from atoll.run.standing import StandingWord

SCHEMA: Final = 1


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A learner: `state` is joining, training, draining, silent, left or ended; `heard_s` is how long ago it was heard."""

    learner: str
    state: str
    incarnation: int
    tokens: int
    step: int | None = None
    step_s: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    overhead: float | None = None
    lag_versions: int | None = None
    heard_s: float | None = None


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A shard: whether a process that is heard owns it, and how long ago that one was heard."""

    shard: int
    served: bool
    heard_s: float | None = None


class FragmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment: its newest version, and how many learners contributed to that."""

    fragment: int
    version: int
    contributors: int


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run: what it does, all that it waits for, and its parts.

    Attributes:
        standing: training, waiting, ending, stopped or over (`atoll.run.standing`).
        waits_for: in words; empty unless it is waiting.
        unheard: learners that have not left and are not heard, each with for how long, in words; empty when the run has ended.
        broker: the address that answered.
        tokens_target: 0 for a run without an end.
        goodput: the share of learner-seconds spent stepping while this command listened, as far as merges follow.
        lag_versions_max: the most that a learner that trains is behind.
        faults: processes that were lost, as far as the event log tells.
        clipped: learners of which contributions were clipped lately, with the newest, in words.
    """

    run: str
    standing: StandingWord
    waits_for: tuple[str, ...]
    broker: str
    tokens: int
    tokens_target: int
    tokens_per_s: float
    commits: int
    quorum: int
    bits_per_byte: float | None
    goodput: float | None
    bytes_per_token: float | None
    lag_versions_max: int | None
    faults: int
    learners: tuple[LearnerStatus, ...]
    shards: tuple[ShardStatus, ...]
    fragments: tuple[FragmentStatus, ...]
    quarantined: tuple[str, ...]
    unheard: tuple[str, ...]
    clipped: tuple[str, ...]
    schema: int = SCHEMA


def status_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of `RunStatus`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(RunStatus)}
