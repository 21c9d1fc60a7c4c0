"""The memory of a synchronizer and the streams of the broker that a run needs.

A shard holds its fragments as float32 with their outer state. An open round adds its sum and the contributions that
wait for it, at most as large as a sum (`atoll.merge.fold`). A commit adds the new values and state. Up to eight
contributions are read at once (`atoll_synchronizer.aggregator`), and the pool keeps the last released vectors
(`atoll.base.buffer_pool`). Arrays of a gibibyte and more are in scratch files, except those of an optimizer from optax.
Memory then holds a sum for each open round, as much again of mapped pages (`make bench-memory`), and smaller
contributions and deltas. A stream of frames holds two of each fragment, since the one before stays until the next
commit, or two keyframes and the deltas since. The stream of states holds one, and the next while it is written; that of
contributions holds all that no commit has settled yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec

from atoll.base.buffer_pool import KEPT, KEPT_ELEMENTS, KEPT_ELEMENTS_MAX
from atoll.codec import KEYFRAME
from atoll.run.delta_chain import DELTAS_BEHIND
from atoll_simulator.planner.question import Question
from atoll_simulator.planner.traffic import Traffic

READS_AT_ONCE = 8
FLOAT_BYTES = 4
SPILL_BYTES = 1 << 30
SPILLED = 2.0


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes: of one shard's process, and of the broker's streams of frames, states and contributions."""

    shard: float
    frames: float
    states: float
    contributions: float

    @property
    def stream(self) -> float:
        """Return the bytes of the largest stream."""
        return max(self.frames, self.states, self.contributions)


def shards_enough(question: Question, moved: Traffic, journey_s: float) -> int | None:
    """Return the fewest shards that fit the memory of their machines; None if not even one fragment each fits."""
    for shards in range(question.protocol.shards, question.protocol.fragments + 1):
        protocol = msgspec.structs.replace(question.protocol, shards=shards)
        if room(replace(question, protocol=protocol), moved, journey_s).shard <= question.shard_memory_bytes:
            return shards
    return None


def room(question: Question, moved: Traffic, journey_s: float) -> Room:
    """Return the room needed when a round takes `journey_s` at most."""
    protocol = question.protocol
    held = 1 + question.state_numbers
    fragment = FLOAT_BYTES * question.fragment_elements
    at_once = min(protocol.fragments, 1 + math.floor(journey_s / question.round_every_s))
    open_here = min(-(-protocol.fragments // protocol.shards), -(-at_once // protocol.shards))
    reading = min(READS_AT_ONCE, question.senders) * moved.up
    here = -(-protocol.fragments // protocol.shards)
    waiting = 0.0 if protocol.codec_up == KEYFRAME else min(fragment, question.senders * moved.up)
    kept = KEPT * fragment if KEPT_ELEMENTS <= question.fragment_elements <= KEPT_ELEMENTS_MAX else 0
    shard = held * fragment * (here + open_here) + open_here * (fragment + waiting) + reading + kept
    if fragment >= SPILL_BYTES:
        small_up, small_down = (size if size < SPILL_BYTES else 0 for size in (moved.up, moved.down))
        reading = min(READS_AT_ONCE, question.senders) * small_up
        shard = open_here * (SPILLED * fragment + (waiting if small_up else 0.0) + small_down) + reading
        if protocol.outer != "nesterov":
            shard += held * fragment * (here + open_here)
    frames = (2 * protocol.fragments + at_once) * moved.down
    if not question.exact_down:
        deltas = (protocol.keyframe_versions + DELTAS_BEHIND) * protocol.fragments + at_once
        frames = 2 * protocol.fragments * fragment + deltas * moved.down
    return Room(
        shard=shard,
        frames=frames,
        states=(protocol.fragments + at_once) * moved.state_kept,
        contributions=at_once * moved.hub_in,
    )
