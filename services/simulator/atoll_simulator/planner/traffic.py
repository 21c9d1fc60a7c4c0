"""Bytes: the traffic of one round, leg by leg, as the production codecs frame it and the broker carries it.

    learner  ── contribution ──►  broker  ── M contributions ──►  shard
    learner  ◄── frame ─────────  broker  ◄── frame, outer state ──  shard

Everything goes through the broker; if it stands with the shards in one hub, only contributions in and frames out cross the wide
area. Where regions add up (`atoll.merge.partial`), a region stands in the place of a learner; manifests come from each learner
all the same. Sizes come from the functions of the production code; zstd is not counted.

**Room** is the memory of a synchronizer and the streams of the broker that a run needs. A shard holds its fragments as float32
with their outer state; an open round adds its sum and the contributions that wait for it; a commit the new values and state;
the reader up to eight contributions, the pool the last released vectors. Arrays of a gibibyte and more are in scratch files,
except an optax optimizer's: then memory holds a sum for each open round and as much again of mapped pages (`make
bench-memory`). A stream of frames holds two of each fragment, or two keyframes and the deltas since; that of states one, and
the next while it is written; that of contributions all that no commit has settled yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec

from atoll.base.large_arrays import KEPT, KEPT_ELEMENTS, KEPT_ELEMENTS_MAX
from atoll.codec import KEYFRAME, Framing, format_of
from atoll.codec.formats.interface import BLOCK
from atoll.merge.outer import derivable
from atoll.merge.partial import partial_codec
from atoll.run.delta_chain import DELTAS_BEHIND, fits_manifest
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Contribution, Delta, Head, Included, encode
from atoll_simulator.planner.question import Question

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
        if not protocol.outer_is_native:
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


_SLICES = 8
_STEM = "atoll.run-0123.gl.c.12.345678.1.0123456789ab"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one round of one fragment.

    Attributes:
        up: one learner's contribution, or a region's sum, with the manifests.
        down: what one learner reads, or a region, with its head.
        state: outer state that a commit stores beside the frame; where it is stored with keyframes alone, its share of one.
        state_kept: the outer state of a fragment, as the broker keeps it.
        chunks_up, chunks_down: the number of their messages.
        hub_in, hub_out: traffic over the hub's link to all M learners.
        broker_in, broker_out: traffic of the broker's network card, shards included.
        shard_in, shard_out: the fragment's shard reads and writes; its share of a keyframe, read by newcomers, counts.
    """

    up: int
    down: int
    state: int
    state_kept: int
    chunks_up: int
    chunks_down: int
    hub_in: int
    hub_out: int
    broker_in: int
    broker_out: int
    shard_in: int
    shard_out: int


def bits_per_number(codec: str) -> float:
    """Return the bits of a number in `codec`, block scales counted."""
    return 8.0 * format_of(codec).size(BLOCK) / BLOCK


def traffic(question: Question) -> Traffic:
    """Return the bytes of one round."""
    elements, protocol, senders = question.fragment_elements, question.protocol, question.senders
    codec_up = protocol.codec_up if question.per_region == 1 else partial_codec(protocol)
    frame_up, frame_down = Framing(elements, codec_up), Framing(elements, protocol.codec_down)
    up, down = frame_up.size_bytes, frame_down.size_bytes
    state = kept = 4.0 * elements * question.state_numbers
    if derivable(protocol):  # the residue stays with its shard
        kept = state - 2.0 * elements
        state = kept / protocol.keyframe_versions
    keyframe = 0 if question.exact_down else Framing(elements, KEYFRAME).size_bytes
    inline = question.per_region == 1 and fits_manifest(frame_up)
    manifest = len(_manifest(_blob(frame_up), bytes(up) if inline else b""))
    if inline:
        up = 0
    sent, collected = up + question.per_region * manifest, senders * up + question.learners * manifest
    read = down + len(_head(question, _blob(frame_down)))
    commit = read + round(state) + keyframe // protocol.keyframe_versions
    return Traffic(
        up=sent,
        down=read,
        state=round(state),
        state_kept=round(kept),
        chunks_up=0 if inline else frame_up.segments,
        chunks_down=frame_down.segments,
        hub_in=collected,
        hub_out=senders * read,
        broker_in=collected + commit,
        broker_out=senders * read + collected,
        shard_in=collected,
        shard_out=commit,
    )


def _blob(framing: Framing) -> BlobRef:
    return BlobRef(_STEM, framing.segments, framing.size_bytes, "0" * 32)


def _manifest(blob: BlobRef, frame: bytes) -> bytes:
    """Return a manifest like those that learners send, for its length."""
    return encode(
        Contribution(
            learner="learner-12",
            incarnation=1,
            fragment=12,
            push=123456,
            base_version=123456,
            tokens=123456789,
            steps=123,
            trained_tokens=123456789012,
            loss=2.3456789012345678,
            norms=(0.12345678901234567,) * _SLICES,
            layout="0" * 16,
            run_nonce="0" * 12,
            blob=blob,
            frame=frame,
            cause_id="call-12-123456-1",
            sent_at_s=1234567890.1234567,
        )
    )


def _head(question: Question, frame: BlobRef) -> bytes:
    """Return a head that lists all learners, and deltas to half the next keyframe, for its length."""
    learners = question.learners
    deltas = 0 if question.exact_down else DELTAS_BEHIND + question.protocol.keyframe_versions // 2
    delta = Delta(123456, "0" * 14, frame.chunks, frame.size_bytes, frame.digest)
    included = Included("learner-12", 1, 123456, 123456, 123456789, 123, 12345678901.234567, 0)
    return encode(
        Head(
            fragment=12,
            version=123456,
            epoch=1,
            nonce="0" * 14,
            layout="0" * 16,
            keyframe=frame,
            key_version=123456,
            digest="0" * 32,
            deltas=(delta,) * deltas,
            state=frame,
            fragment_ledger=BlobRef(_STEM, 1, 4096, "0" * 32),
            included=(included,) * learners,
            tokens_merged=123456789012,
            superseded=(frame,),
        )
    )
