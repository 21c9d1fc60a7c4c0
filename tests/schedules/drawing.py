"""The run of a schedule: its agreement, its sizes and its company, drawn from the seed so that every rule is used somewhere."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from atoll.protocol.settings import ProtocolSettings

STORMS_S = (6.0, 10.0, 20.0)
WHOLE = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """What is drawn beside the protocol's settings: sizes of tensors and pieces, of the corpus, and who is there."""

    storm_s: float
    chunk_bytes: int
    rows: int
    data_blocks: int
    lease_blocks: int
    learners: int
    hosts: int
    archive_every_s: int
    slow_threads: float
    regional: bool = False
    """Whether two of the learners are in a region whose synchronizer folds what they send."""
    retains: bool = False
    """Whether shards retain their rounds where they archive; no seed draws it."""
    tokenless: bool = False
    """Whether the second learner reports steps of 0 tokens, and it is asked what `atoll status` says; no seed draws it."""


def settings_of(dice: random.Random, *, hostile: bool = False) -> ProtocolSettings:
    """Draw the agreement of a run: small, so that everything happens often; with `hostile` peers some merge robustly."""
    shards = dice.choice((1, 2))
    chosen: dict[str, object] = {
        "shards": shards,
        "fragments": dice.choice((2, 2, 3)),
        "interval_steps": dice.choice((2, 4)),
        "quorum": dice.choice((1, 1, 2)),
        "adoption": dice.choice(("overwrite", "overwrite", "carry", "blend")),
        "age_max": dice.randint(0, 2),
        "age_law": dice.choice(("power", "gate")),
        "grace_gamma": dice.choice((0.0, 0.8)),
        "merge": dice.choice(("mean", "rda")),
        "correction": dice.choice(("none", "heloco")),
        "outer_momentum": dice.choice((0.3, 0.3, 0.0)),
        "average_versions": dice.choice((0, 0, 4)),
        "codec_up": dice.choice(("f32", "bf16", "int8", "int4")),
        "codec_down": dice.choice(("f32", "int4", "int4", "bf16")),
        "keyframe_versions": dice.choice((1, 2, 3, 5)),
        "error_feedback": dice.choice((False, True)),
        "ending": dice.choice(("apart", "apart", "together")),
        "lease_s": 3.0,
        "silence_s": 4.0,
    }
    if hostile:
        chosen["share_max"] = dice.choice((1.0, 0.5, 0.3))
        chosen["robust"] = dice.choice(("none", "none", "clip", "gate"))
        if chosen["robust"] != "none":
            chosen["quorum"] = 3
    if chosen["outer_momentum"] == 0.0:
        chosen["correction"] = "none"
    return msgspec.convert(chosen, ProtocolSettings).check()


def plan_of(dice: random.Random) -> Plan:
    return Plan(
        storm_s=dice.choice(STORMS_S),
        chunk_bytes=dice.choice((WHOLE, 1024, 1024)),
        rows=dice.choice((6, 24, 60)),
        data_blocks=dice.choice((12, 40)),
        lease_blocks=dice.choice((1, 3)),
        learners=dice.randint(1, 3),
        hosts=dice.choice((2, 2, 3)),
        archive_every_s=dice.choice((0, 0, 2)),
        slow_threads=dice.choice((0.0, 0.3)),
    )
