"""Remedies for a trouble: flags as a user would add them to the command, and the question with them.

The planner reports a remedy only after following it: a run would accept the changed question, and the trouble is gone
from it (`cautions`). So a remedy generated here may be a guess; a reported one is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from atoll.base.quantities import FRAGMENTS_MAX, LEARNERS_MAX
from atoll.base.units import DAY_S, rate, rate_flag
from atoll.wire.blobs import CHUNKS_MAX
from atoll.wire.limits import CHUNK_BYTES
from atoll_simulator.planner.links import ROUND_TRIPS, Region, average
from atoll_simulator.planner.memory import shards_enough
from atoll_simulator.planner.question import Question
from atoll_simulator.planner.traffic import Traffic

DOUBLINGS = 24
BLOB_BYTES_MAX = CHUNKS_MAX * CHUNK_BYTES
JUST_BELOW = 0.99


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
