"""What cannot work in a plan or wastes something, and which changes would end it.

The planner first finds a trouble, then follows its remedies (`atoll_simulator.planner.ways`) one by one. It reports a
remedy only if a run would accept it, if this trouble vanishes and if no other appears. If remedies differ only in
degree, it reports one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from atoll.base.errors import SettingsError
from atoll.base.units import as_bytes, as_rate, as_share, as_time
from atoll.base.wording import counted
from atoll.bus.options import DEFAULTS
from atoll_simulator.planner import limits, ways
from atoll_simulator.planner.failures import goodput
from atoll_simulator.planner.links import ONE_CONNECTION, Region, average, regions, stream
from atoll_simulator.planner.memory import Room, room
from atoll_simulator.planner.question import Question
from atoll_simulator.planner.traffic import Traffic, traffic
from atoll_simulator.planner.utilisation import LINK_BITS_PER_S_MAX
from atoll_simulator.planner.ways import BLOB_BYTES_MAX, Remedy

GOODPUT_LOW = 0.5
MERGED_LOW = 0.5
ROUNDING = 1e-9
SILENT_STEPS = 10.0  # as in `atoll.protocol.shard`: a learner may be silent for ten of its steps
STREAM_ROOM = 1.1
NO_WAY = "nothing that the settings accept; change more than one thing"


@dataclass(frozen=True, slots=True)
class Caution:
    """A thing that cannot work, or (not `grave`) a waste: a stable word for it, a description, and what to do.

    `to` holds flags to add to the command, with ", or " between alternatives, each of which is enough.
    """

    kind: str
    what: str
    change: str
    to: str
    grave: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything computed that the cautions judge."""

    question: Question
    moved: Traffic
    regions: tuple[Region, ...]
    goodput: float
    room: Room


@dataclass(frozen=True, slots=True)
class Trouble:
    """A trouble: as in `Caution`, with its possible remedies; `one`: it is enough to report one of them."""

    kind: str
    what: str
    change: str
    ways: Callable[[], Iterator[Remedy]] = field(compare=False)
    grave: bool = True
    one: bool = False


def cautions(found: Findings) -> tuple[Caution, ...]:
    """Return every caution, the gravest kinds first."""
    troubles = _troubles(found)
    kinds = {trouble.kind for trouble in troubles}
    return tuple(Caution(each.kind, each.what, each.change, _told(each, kinds), each.grave) for each in troubles)


def findings(question: Question) -> Findings:
    """Return everything that the cautions judge in a checked question."""
    moved = traffic(question)
    links = regions(question, moved)
    unmerged_s = question.protocol.interval_steps * question.step_s / 2.0
    useful = goodput(question.failures, question.learners, question.chips, unmerged_s).atoll
    return Findings(question, moved, links, useful, room(question, moved, max(region.journey_s for region in links)))


def _told(trouble: Trouble, kinds: set[str]) -> str:
    """Return the remedies that a run accepts and that end the trouble and add none besides those `kinds` there were."""
    told = []
    for way in trouble.ways():
        try:
            way.question.check()
        except SettingsError:
            continue
        if {each.kind for each in _troubles(findings(way.question))} <= kinds - {trouble.kind}:
            told.append(way.flags)
            if trouble.one:
                break
    return ", or ".join(told) or NO_WAY


def _troubles(found: Findings) -> tuple[Trouble, ...]:
    return (
        *_agreement(found),
        *_missed(found),
        *_links(found),
        *_starved(found),
        *_hub(found),
        *_sizes(found),
        *_machines(found),
    )


def _agreement(found: Findings) -> Iterator[Trouble]:
    question, protocol = found.question, found.question.protocol
    if protocol.quorum > question.learners:
        learners = counted(question.learners, "learner")
        yield Trouble(
            "quorum above M",
            f"a quorum of {protocol.quorum} can never be met by {learners}: nothing is ever merged",
            "protocol.quorum (--quorum); 1 with grace is the default",
            lambda: iter((ways.agree(question, quorum=question.learners), ways.agree(question, quorum=1))),
        )
    if protocol.interval_steps < protocol.fragments:
        yield Trouble(
            "H below P",
            f"{protocol.fragments / protocol.interval_steps:.3g} fragments leave in one step, so traffic comes in bursts",
            "protocol.interval_steps or protocol.fragments",
            lambda: iter(
                (
                    ways.agree(question, interval_steps=protocol.fragments),
                    ways.agree(question, fragments=protocol.interval_steps),
                )
            ),
            grave=False,
        )
    if question.learners == 1:
        yield Trouble(
            "one learner",
            "one learner merges with nobody",
            "--learners",
            lambda: iter((Remedy("--learners 2", replace(question, learners=2)),)),
            grave=False,
        )


def _missed(found: Findings) -> Iterator[Trouble]:
    """A quorum that is rarely there while learners are away: rounds wait, and work trained meanwhile is overwritten."""
    question, quorum = found.question, found.question.protocol.quorum
    if not 1 < quorum <= question.learners:
        return
    alone = ways.agree(question, quorum=1)
    share, could = (min(region.merged for region in regions(q, found.moved)) for q in (question, alone.question))
    if share < MERGED_LOW <= could:
        yield Trouble(
            "quorum rarely met",
            f"rounds wait for {quorum} learners while some are away: {as_share(share)} of what is trained is merged, and "
            f"{as_share(could)} with a quorum of one",
            "protocol.quorum (--quorum); 1 with grace is the default",
            lambda: iter((alone,)),
        )


def _links(found: Findings) -> Iterator[Trouble]:
    question, moved, protocol = found.question, found.moved, found.question.protocol
    crowded = [r for r in found.regions if protocol.interval_steps * (1 + ROUNDING) < r.interval < math.inf]
    if crowded:
        worst = max(crowded, key=lambda region: (region.busy, region.interval))
        yield Trouble(
            "does not fit the interval",
            f"{_named(found, worst, crowded)} is busy {as_share(worst.busy)} of the time: a fragment comes round every "
            f"{worst.interval:.0f} steps, not every {protocol.interval_steps}, and much of what is trained is never merged",
            "protocol.interval_steps, a smaller codec, or the link",
            lambda: ways.for_the_interval(question, moved, worst),
        )
    slow = [r for r in found.regions if r.journey_s > question.hidden_s * (1 + ROUNDING)]
    if slow:
        slowest = max(slow, key=lambda region: region.journey_s)
        cause = _delay(question, moved, slowest)
        because = f", since {limits.told(question, cause)}" if cause else ""
        yield Trouble(
            "not within the overlap",
            f"{_named(found, slowest, slow)} has rounds of {as_time(slowest.journey_s)}, and overlap gives them "
            f"{as_time(question.hidden_s)}{because}; what comes after its round enters a later one, damped",
            limits.remedy(cause) if cause else "protocol.overlap_steps (tau), or smaller fragments",
            lambda: ways.for_the_overlap(question, moved, slowest),
            grave=False,
        )
    bound = [r for r in found.regions if r.bound_by == ONE_CONNECTION]
    if bound:
        yield Trouble(
            "bound by loss",
            f"{_named(found, bound[0], bound)} has a link of {as_rate(min(bound[0].up, bound[0].down))}, but one TCP "
            f"connection carries less at {1000 * question.links.rtt_s:g} ms and {as_share(question.links.loss)} loss",
            "a link without loss, a hub nearer by, or congestion control that bears loss (BBR)",
            lambda: ways.for_one_connection(question, bound),
            grave=False,
        )


def _delay(question: Question, moved: Traffic, region: Region) -> str:
    """Return what makes a region's rounds too long for their overlap; empty if its link is the cause."""

    def in_time(other: Question, up: float, down: float) -> bool:
        way = stream(other, moved, up, down)
        return way.send_s + way.after_s <= question.hidden_s * (1 + ROUNDING)

    if in_time(limits.unwindowed(question), region.up_usable, region.down_usable):
        return limits.WINDOW
    widest = LINK_BITS_PER_S_MAX
    if in_time(question, widest, widest):
        return ""
    return limits.limit(question, lambda other: in_time(other, widest, widest))


def _starved(found: Findings) -> Iterator[Trouble]:
    """Messages that wait behind the chunks in flight on the same connection: an acknowledgement, a heartbeat."""
    question = found.question
    patience_s = min(DEFAULTS.try_s, max(question.protocol.silence_s, SILENT_STEPS * question.step_s))
    worst = min(found.regions, key=lambda region: region.up_usable)
    waits_s = 8.0 * question.links.window_bytes / worst.up_usable
    if waits_s > patience_s:
        yield Trouble(
            "control starves",
            f"{_named(found, worst, [worst])} needs {as_time(waits_s)} for the chunks in flight, and what waits behind them is "
            f"given up after {as_time(patience_s)}: chunks are sent again, or a learner that trains counts as silent",
            "the link up, from wherever it is bound (or protocol.silence_s, if that is what is short)",
            lambda: iter((ways.wider(question, 8.0 * question.links.window_bytes / patience_s, 0.0),)),
        )


def _named(found: Findings, worst: Region, all_of_them: Sequence[Region]) -> str:
    """Return the name of the region, and how many others share its trouble."""
    more = f" (and {len(all_of_them) - 1} more)" if len(all_of_them) > 1 else ""
    rate = as_rate(min(worst.up_usable, worst.down_usable))
    return f"region {found.regions.index(worst) + 1}{more}, with {rate},"


def _hub(found: Findings) -> Iterator[Trouble]:
    question, moved, links = found.question, found.moved, found.question.links
    for flag, has, size in (("--hub-in", links.hub_in, moved.hub_in), ("--hub-out", links.hub_out, moved.hub_out)):
        needs = average(question, size)
        if has is not None and needs > has * (1 + ROUNDING):
            yield Trouble(
                f"hub saturated, {flag[6:]}",
                f"the hub must carry {as_rate(needs)} in the mean for {_those(question)} and has {as_rate(has)}",
                f"{flag}, fewer learners, a smaller codec or a longer interval",
                partial(ways.for_the_hub, question, flag, needs, has),
            )


def _sizes(found: Findings) -> Iterator[Trouble]:
    question, moved, space = found.question, found.moved, found.room
    size = max(moved.up, moved.down)
    if size > BLOB_BYTES_MAX:
        yield Trouble(
            "fragment too large",
            f"a fragment of {as_bytes(size)} is more than a blob may have ({as_bytes(BLOB_BYTES_MAX)})",
            "protocol.fragments",
            lambda: ways.for_blobs(question, size),
            one=True,
        )
    if question.stream_bytes_max is not None and space.stream > question.stream_bytes_max:
        enough = math.ceil(space.stream * STREAM_ROOM)
        way = Remedy(f"--set broker.stream_bytes_max={enough}", replace(question, stream_bytes_max=enough))
        yield Trouble(
            "stream too small",
            f"the broker must keep {as_bytes(space.frames)} of frames, {as_bytes(space.states)} of states and "
            f"{as_bytes(space.contributions)} of contributions, and a stream holds {as_bytes(question.stream_bytes_max)}",
            "broker.stream_bytes_max (and the broker's disk)",
            lambda: iter((way,)),
        )


def _machines(found: Findings) -> Iterator[Trouble]:
    question, space = found.question, found.room
    if space.shard > question.shard_memory_bytes:
        journey_s = max(region.journey_s for region in found.regions)
        yield Trouble(
            "synchronizer's memory",
            f"a shard needs {as_bytes(space.shard)} and has {as_bytes(question.shard_memory_bytes)}",
            "protocol.shards, on as many machines, or their memory",
            lambda: ways.for_memory(question, found.moved, space.shard, journey_s),
        )
    if found.goodput < GOODPUT_LOW:
        yield Trouble(
            "goodput low",
            f"failures leave {as_share(found.goodput)} of the machines' time",
            "the same chips in more learners, how long what failed stays away, or how often something fails",
            lambda: ways.for_goodput(question),
            grave=False,
            one=True,
        )


def _those(question: Question) -> str:
    """Say who sends to the hub."""
    learners = counted(question.learners, "learner")
    return learners if question.per_region == 1 else f"{learners} in {question.senders} regions"
