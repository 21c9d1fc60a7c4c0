"""Cautions: what cannot work in a plan or wastes something, and which changes would end it.

The planner first finds a trouble, then follows its remedies one by one: flags as a user would add them to the command, and
the question with them. A remedy may be a guess. It is reported only if a run would accept it, if this trouble vanishes and if
no other appears. If remedies differ only in degree, one is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.quantities import FRAGMENTS_MAX, LEARNERS_MAX
from atoll.base.wording import DAY_S, as_bytes, as_rate, as_share, as_time, counted, rate, rate_flag
from atoll.bus.options import DEFAULTS
from atoll.wire.blobs import CHUNKS_MAX
from atoll.wire.limits import CHUNK_BYTES
from atoll_simulator.planner.failures import goodput
from atoll_simulator.planner.links import (
    ONE_CONNECTION,
    ROUND_TRIPS,
    WINDOW,
    Region,
    average,
    cause_remedy,
    describe_cause,
    limiting_cause,
    regions,
    stream,
    without_window,
)
from atoll_simulator.planner.question import Question
from atoll_simulator.planner.traffic import Room, Traffic, room, shards_enough, traffic
from atoll_simulator.planner.utilisation import LINK_BITS_PER_S_MAX

GOODPUT_LOW = 0.5
MERGED_LOW = 0.5
ROUNDING = 1e-9
SILENT_STEPS = 10.0  # as in `atoll.protocol.shard`: a learner may be silent for ten of its steps
STREAM_ROOM = 1.1
NO_WAY = "nothing that the settings accept; change more than one thing"
DOUBLINGS = 24
BLOB_BYTES_MAX = CHUNKS_MAX * CHUNK_BYTES
JUST_BELOW = 0.99


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
    return tuple(Caution(each.kind, each.what, each.change, _as_caution(each, kinds), each.grave) for each in troubles)


def findings(question: Question) -> Findings:
    """Return everything that the cautions judge in a checked question."""
    moved = traffic(question)
    links = regions(question, moved)
    unmerged_s = question.protocol.interval_steps * question.step_s / 2.0
    useful = goodput(question.failures, question.learners, question.chips, unmerged_s).atoll
    return Findings(question, moved, links, useful, room(question, moved, max(region.journey_s for region in links)))


def _as_caution(trouble: Trouble, kinds: set[str]) -> str:
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
        *_missed_utilisation(found),
        *_links(found),
        *_starved_streams(found),
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
            lambda: iter((agree(question, quorum=question.learners), agree(question, quorum=1))),
        )
    if protocol.interval_steps < protocol.fragments:
        yield Trouble(
            "H below P",
            f"{protocol.fragments / protocol.interval_steps:.3g} fragments leave in one step, so traffic comes in bursts",
            "protocol.interval_steps or protocol.fragments",
            lambda: iter(
                (
                    agree(question, interval_steps=protocol.fragments),
                    agree(question, fragments=protocol.interval_steps),
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


def _missed_utilisation(found: Findings) -> Iterator[Trouble]:
    """A quorum that is rarely there while learners are away: rounds wait, and work trained meanwhile is overwritten."""
    question, quorum = found.question, found.question.protocol.quorum
    if not 1 < quorum <= question.learners:
        return
    alone = agree(question, quorum=1)
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
            lambda: for_the_interval(question, moved, worst),
        )
    slow = [r for r in found.regions if r.journey_s > question.hidden_s * (1 + ROUNDING)]
    if slow:
        slowest = max(slow, key=lambda region: region.journey_s)
        cause = _delay(question, moved, slowest)
        because = f", since {describe_cause(question, cause)}" if cause else ""
        yield Trouble(
            "not within the overlap",
            f"{_named(found, slowest, slow)} has rounds of {as_time(slowest.journey_s)}, and overlap gives them "
            f"{as_time(question.hidden_s)}{because}; what comes after its round enters a later one, damped",
            cause_remedy(cause) if cause else "protocol.overlap_steps (tau), or smaller fragments",
            lambda: for_the_overlap(question, moved, slowest),
            grave=False,
        )
    bound = [r for r in found.regions if r.bound_by == ONE_CONNECTION]
    if bound:
        yield Trouble(
            "bound by loss",
            f"{_named(found, bound[0], bound)} has a link of {as_rate(min(bound[0].up, bound[0].down))}, but one TCP "
            f"connection carries less at {1000 * question.links.rtt_s:g} ms and {as_share(question.links.loss)} loss",
            "a link without loss, a hub nearer by, or congestion control that bears loss (BBR)",
            lambda: for_one_connection(question, bound),
            grave=False,
        )


def _delay(question: Question, moved: Traffic, region: Region) -> str:
    """Return what makes a region's rounds too long for their overlap; empty if its link is the cause."""

    def in_time(other: Question, up: float, down: float) -> bool:
        way = stream(other, moved, up, down)
        return way.send_s + way.after_s <= question.hidden_s * (1 + ROUNDING)

    if in_time(without_window(question), region.up_usable, region.down_usable):
        return WINDOW
    widest = LINK_BITS_PER_S_MAX
    if in_time(question, widest, widest):
        return ""
    return limiting_cause(question, lambda other: in_time(other, widest, widest))


def _starved_streams(found: Findings) -> Iterator[Trouble]:
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
            lambda: iter((wider(question, 8.0 * question.links.window_bytes / patience_s, 0.0),)),
        )


def _named(found: Findings, worst: Region, all_of_them: Sequence[Region]) -> str:
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
                partial(for_the_hub, question, flag, needs, has),
            )


def _sizes(found: Findings) -> Iterator[Trouble]:
    question, moved, space = found.question, found.moved, found.room
    size = max(moved.up, moved.down)
    if size > BLOB_BYTES_MAX:
        yield Trouble(
            "fragment too large",
            f"a fragment of {as_bytes(size)} is more than a blob may have ({as_bytes(BLOB_BYTES_MAX)})",
            "protocol.fragments",
            lambda: for_blobs(question, size),
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
            lambda: for_memory(question, found.moved, space.shard, journey_s),
        )
    if found.goodput < GOODPUT_LOW:
        yield Trouble(
            "goodput low",
            f"failures leave {as_share(found.goodput)} of the machines' time",
            "the same chips in more learners, how long what failed stays away, or how often something fails",
            lambda: for_goodput(question),
            grave=False,
            one=True,
        )


def _those(question: Question) -> str:
    learners = counted(question.learners, "learner")
    return learners if question.per_region == 1 else f"{learners} in {question.senders} regions"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Flags to add, and the question with them."""

    flags: str
    question: Question


def agree(question: Question, **values: int | str) -> Remedy:
    """Return the remedy of other values in the agreement of the run."""
    names = {"codec_up": "--up"}
    flags = " ".join(f"{names.get(name, '--' + name.replace('_', '-'))} {value}" for name, value in values.items())
    return Remedy(flags, replace(question, protocol=msgspec.structs.replace(question.protocol, **values)))


def cleaner(question: Question, loss: float) -> Remedy:
    """Return the remedy of links that lose less than `loss`."""
    words = f"{JUST_BELOW * loss:.2e}"
    return Remedy(f"--loss {float(words):g}", replace(question, links=replace(question.links, loss=float(words))))


def nearer(question: Question, rtt_s: float) -> Remedy:
    """Return the remedy of round trips below `rtt_s`."""
    words = f"{JUST_BELOW * rtt_s * 1000.0:.2e}"
    return Remedy(
        f"--rtt-ms {float(words):g}", replace(question, links=replace(question.links, rtt_s=float(words) / 1000.0))
    )


def wider(question: Question, up: float, down: float) -> Remedy:
    """Return the remedy of regions with at least so many bits per second; wider regions keep theirs."""
    texts = [
        [rate_flag(max(has, least)) for has in each]
        for each, least in ((question.links.up, up), (question.links.down, down))
    ]
    ups, downs = (tuple(rate(word, "") for word in words) for words in texts)
    flags = f"--bandwidth {','.join(texts[0])} --bandwidth-down {','.join(texts[1])}"
    return Remedy(flags, replace(question, links=replace(question.links, up=ups, down=downs)))


def for_the_interval(question: Question, moved: Traffic, worst: Region) -> Iterator[Remedy]:
    """Yield remedies that make room for a round: fewer of them, or wider links."""
    if math.isfinite(worst.interval):
        yield agree(question, interval_steps=math.ceil(worst.interval))
    yield wider(question, average(question, moved.up), average(question, moved.down))


def for_the_overlap(question: Question, moved: Traffic, worst: Region) -> Iterator[Remedy]:
    """Yield remedies that let a round end within tau steps: more steps, smaller fragments or codec up, a nearer hub."""
    protocol = question.protocol
    steps = math.ceil(worst.journey_s / question.step_s)
    longer = {"interval_steps": steps} if steps > protocol.interval_steps else {}
    yield agree(question, **longer, overlap_steps=steps)
    fixed_s = ROUND_TRIPS * question.links.rtt_s + question.links.merge_s
    if question.hidden_s > fixed_s:
        times = (worst.journey_s - fixed_s) / (question.hidden_s - fixed_s)
        more = math.ceil(protocol.fragments * times) + 1
        if more <= FRAGMENTS_MAX:
            yield agree(question, fragments=more)
    windowed = moved.up / question.links.window_bytes if worst.up_usable > question.links.window_bits_per_s else 0.0
    rtt_s = question.links.rtt_s - (worst.journey_s - question.hidden_s) / (ROUND_TRIPS + windowed)
    if rtt_s > 0.0:
        yield nearer(question, rtt_s)
    if windowed:
        yield agree(question, codec_up="int8")


def for_one_connection(question: Question, bound: list[Region]) -> Iterator[Remedy]:
    """Yield the loss, or the round trip, with which one connection carries what the links have."""
    least = min(question.links.connection_bits_per_s / max(region.up, region.down) for region in bound)
    yield cleaner(question, question.links.loss * least**2)
    yield nearer(question, question.links.rtt_s * least)


def for_the_hub(question: Question, flag: str, needs: float, has: float) -> Iterator[Remedy]:
    """Yield a wider hub, fewer learners, fewer rounds."""
    words = rate_flag(needs)
    wide = rate(words, flag)
    hub = replace(question.links, hub_in=wide) if flag == "--hub-in" else replace(question.links, hub_out=wide)
    yield Remedy(f"{flag} {words}", replace(question, links=hub))
    fits = math.floor(question.learners * has / needs)
    if fits >= 1:
        yield Remedy(f"--learners {fits}", replace(question, learners=fits))
    yield agree(question, interval_steps=math.ceil(question.protocol.interval_steps * needs / has))


def for_blobs(question: Question, size: int) -> Iterator[Remedy]:
    """Yield smaller fragments, or a smaller codec with them."""
    least = math.ceil(question.protocol.fragments * size / BLOB_BYTES_MAX) + 1
    yield agree(question, fragments=min(least, FRAGMENTS_MAX))
    yield agree(question, codec_up="int8", codec_down="int8", fragments=min(least, FRAGMENTS_MAX))


def for_memory(question: Question, moved: Traffic, needs: float, journey_s: float) -> Iterator[Remedy]:
    """Yield more shards, or more memory for each."""
    shards = shards_enough(question, moved, journey_s)
    if shards is not None:
        yield agree(question, shards=shards)
    gigabytes = math.ceil(needs / 1e9)
    yield Remedy(f"--shard-memory-gb {gigabytes}", replace(question, shard_memory_bytes=gigabytes * 1e9))


def for_goodput(question: Question) -> Iterator[Remedy]:
    """Yield the same chips in more learners, quicker returns, rarer failures: twice as many, half as long, again and again."""
    machines, broken = question.learners * question.chips, question.failures
    for factor in (2**power for power in range(1, DOUBLINGS)):
        learners = question.learners * factor
        if learners <= LEARNERS_MAX and machines >= learners:
            chips = machines // learners
            yield Remedy(f"--learners {learners} --chips {chips}", replace(question, learners=learners, chips=chips))
    for factor in (2**power for power in range(1, DOUBLINGS)):
        back_s = float(f"{broken.return_s / factor:.3g}")
        yield Remedy(f"--return-s {back_s:g}", replace(question, failures=replace(broken, return_s=back_s)))
    for factor in (2**power for power in range(1, DOUBLINGS)):
        if broken.loss_per_hour:
            rarer = float(f"{broken.loss_per_hour / factor:.3g}")
            yield Remedy(f"--loss-per-hour {rarer:g}", replace(question, failures=replace(broken, loss_per_hour=rarer)))
        else:
            days = float(f"{broken.mtbi_s / DAY_S * factor:.3g}")
            yield Remedy(f"--mtbi-days {days:g}", replace(question, failures=replace(broken, mtbi_s=days * DAY_S)))
