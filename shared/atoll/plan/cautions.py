"""What cannot work in a plan, and what to change to which value so that it would."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.bus.claims import CHUNKS_MAX
from atoll.bus.interface import CHUNK_BYTES
from atoll.bus.options import DEFAULTS
from atoll.codecs import ENCODINGS
from atoll.plan.links import ONE_CONNECTION, Region, average
from atoll.plan.memory import Room, shards_enough
from atoll.plan.quantities import as_bytes, as_rate, as_share, as_time
from atoll.plan.question import CODEC_DOWN, Question
from atoll.plan.systems import System
from atoll.plan.traffic import Traffic
from atoll.protocol.settings import FRAGMENTS_MAX

GOODPUT_LOW = 0.5
ROUNDING = 1e-9
SILENT_STEPS = 10.0  # as in `atoll.protocol.shard`: a learner may be silent for ten of its steps
BLOB_BYTES_MAX = CHUNKS_MAX * CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Caution:
    """One thing that will not work: a stable word for it, what happens, what to change, and to which value."""

    kind: str
    what: str
    change: str
    to: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What was computed, for those who judge it."""

    question: Question
    moved: Traffic
    regions: tuple[Region, ...]
    systems: tuple[System, ...]
    room: Room


def cautions(found: Findings) -> tuple[Caution, ...]:
    """Return every caution, the gravest kinds first."""
    return (*_agreement(found), *_links(found), *_starved(found), *_hub(found), *_sizes(found), *_machines(found))


def _agreement(found: Findings) -> Iterator[Caution]:
    question, protocol = found.question, found.question.protocol
    if protocol.quorum > question.learners:
        yield Caution(
            "quorum above M",
            f"a quorum of {protocol.quorum} can never be met by {question.learners} learners: nothing is ever merged",
            "protocol.quorum (--quorum)",
            f"at most {question.learners}; 1 with grace is the default",
        )
    if protocol.interval_steps < protocol.fragments:
        yield Caution(
            "H below P",
            f"{protocol.fragments / protocol.interval_steps:.3g} fragments leave in one step, so traffic comes in bursts",
            "protocol.interval_steps (--interval)",
            f"{protocol.fragments} or more, or --fragments {protocol.interval_steps}",
        )
    if question.learners == 1:
        yield Caution("one learner", "one learner merges with nobody", "--learners", "2 or more")
    foreign = [
        f"{flag} {codec}"
        for flag, codec, there in (
            ("--up", protocol.codec_up, protocol.codec_up in ENCODINGS),
            ("--down", question.codec_down, question.codec_down == CODEC_DOWN),
        )
        if not there
    ]
    if foreign:
        yield Caution(
            "codec not there",
            f"this version of Atoll does not send {' and '.join(foreign)}; the figures are what it would be",
            "--up, --down",
            f"one of {', '.join(ENCODINGS)} up and {CODEC_DOWN} down for what it sends today",
        )


def _links(found: Findings) -> Iterator[Caution]:
    question, moved, protocol = found.question, found.moved, found.question.protocol
    crowded = [r for r in found.regions if r.interval > protocol.interval_steps * (1 + ROUNDING)]
    if crowded:
        worst = max(crowded, key=lambda region: region.interval)
        fits = as_rate(8.0 * max(moved.up, moved.down) / question.round_every_s)
        yield Caution(
            "does not fit the interval",
            f"{_named(found, worst, crowded)} is busy {as_share(worst.busy)} of the time: a fragment comes round every "
            f"{worst.interval:.0f} steps, not every {protocol.interval_steps}",
            "--interval, a smaller codec, or the link",
            f"--interval {math.ceil(worst.interval)}, or {fits} each way",
        )
    slow = [r for r in found.regions if r.journey_s > question.hidden_s * (1 + ROUNDING)]
    if slow:
        worst = max(slow, key=lambda region: region.journey_s)
        steps = math.ceil(worst.journey_s / question.step_s)
        able = f"--overlap {steps}" if steps <= protocol.interval_steps else f"--interval {steps} --overlap {steps}"
        yield Caution(
            "not within the overlap",
            f"{_named(found, worst, slow)} has rounds of {as_time(worst.journey_s)}, and overlap gives them "
            f"{as_time(question.hidden_s)}; what comes after its round enters a later one, damped",
            "--overlap (tau), or smaller fragments",
            f"{able}, or more than {protocol.fragments} fragments",
        )
    bound = [r for r in found.regions if r.bound_by == ONE_CONNECTION]
    if bound:
        worst = bound[0]
        usable, has = min(worst.up_usable, worst.down_usable), min(worst.up, worst.down)
        yield Caution(
            "bound by loss",
            f"{_named(found, worst, bound)} has a link of {as_rate(has)}, but one TCP connection carries less at "
            f"{1000 * question.links.rtt_s:g} ms and {as_share(question.links.loss)} loss",
            "a link without loss, a hub nearer by, or congestion control that bears loss (BBR)",
            f"loss below {question.links.loss * (usable / has) ** 2:.2g}, or a round trip below "
            f"{1000 * question.links.rtt_s * usable / has:.2g} ms",
        )


def _starved(found: Findings) -> Iterator[Caution]:
    """What waits behind the chunks in flight: an acknowledgement, a heartbeat; both travel on the same connection."""
    question = found.question
    patience_s = min(DEFAULTS.try_s, max(question.protocol.silence_s, SILENT_STEPS * question.step_s))
    worst = min(found.regions, key=lambda region: region.up_usable)
    waits_s = 8.0 * question.links.window_bytes / worst.up_usable
    if waits_s > patience_s:
        yield Caution(
            "control starves",
            f"{_named(found, worst, [worst])} needs {as_time(waits_s)} for the chunks in flight, and what waits behind them is "
            f"given up after {as_time(patience_s)}: chunks are sent again, or a learner that trains counts as silent",
            "the link up (or protocol.silence_s, if that is what is short)",
            f"{as_rate(8.0 * question.links.window_bytes / patience_s)} or more",
        )


def _named(found: Findings, worst: Region, all_of_them: Sequence[Region]) -> str:
    """Return which region is meant, and how many others share its trouble."""
    more = f" (and {len(all_of_them) - 1} more)" if len(all_of_them) > 1 else ""
    rate = as_rate(min(worst.up_usable, worst.down_usable))
    return f"region {found.regions.index(worst) + 1}{more}, with {rate},"


def _hub(found: Findings) -> Iterator[Caution]:
    question, moved, links = found.question, found.moved, found.question.links
    for flag, has, size in (("--hub-in", links.hub_in, moved.hub_in), ("--hub-out", links.hub_out, moved.hub_out)):
        needs = average(question, size)
        if has is not None and needs > has:
            fits = math.floor(question.learners * has / needs)
            yield Caution(
                "hub saturated",
                f"the hub must carry {as_rate(needs)} in the mean for {question.learners} learners and has {as_rate(has)}",
                f"{flag}, fewer learners, a smaller codec or a longer --interval",
                f"{as_rate(needs)}, or {max(fits, 1)} learners, "
                f"or --interval {math.ceil(question.protocol.interval_steps * needs / has)}",
            )


def _sizes(found: Findings) -> Iterator[Caution]:
    question, moved, room = found.question, found.moved, found.room
    size = max(moved.up, moved.down)
    if size > BLOB_BYTES_MAX:
        least = math.ceil(question.protocol.fragments * size / BLOB_BYTES_MAX)
        yield Caution(
            "fragment too large",
            f"a fragment of {as_bytes(size)} is more than a blob may have ({as_bytes(BLOB_BYTES_MAX)})",
            "protocol.fragments (--fragments)",
            str(least) if least <= FRAGMENTS_MAX else f"{FRAGMENTS_MAX} (the most) and a smaller codec",
        )
    if room.stream > question.stream_bytes_max:
        yield Caution(
            "stream too small",
            f"the broker must keep {as_bytes(room.frames)} of frames, {as_bytes(room.states)} of states and "
            f"{as_bytes(room.contributions)} of contributions, and a stream holds {as_bytes(question.stream_bytes_max)}",
            "broker.stream_bytes_max (and the broker's disk)",
            str(math.ceil(room.stream * 1.1)),
        )


def _machines(found: Findings) -> Iterator[Caution]:
    question, room = found.question, found.room
    if room.shard > question.shard_memory_bytes:
        shards = shards_enough(question, found.moved, max(region.journey_s for region in found.regions))
        yield Caution(
            "synchronizer's memory",
            f"a shard needs {as_bytes(room.shard)} and has {as_bytes(question.shard_memory_bytes)}",
            "protocol.shards (--shards), on as many machines, or their memory (--shard-memory-gb)",
            f"--shards {shards}" if shards else f"--shard-memory-gb {math.ceil(room.shard / 1e9)}, or more fragments",
        )
    atoll = found.systems[0]
    if atoll.goodput < GOODPUT_LOW:
        yield Caution(
            "goodput low",
            f"failures leave {as_share(atoll.goodput)} of the machines' time",
            "--learners (the same chips in more learners), or how long what failed stays away",
            f"--learners {2 * question.learners}",
        )
