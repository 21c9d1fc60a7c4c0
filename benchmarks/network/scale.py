"""What a run costs as it grows, and whether large fragments leave memory flat: `make bench-scale`.

One machine, real processes: an embedded nats-server, a process for each shard, the monitor, and hosts that hold many learners
each (`scale_host`), which train nothing but push and adopt as any learner does.

    crowds   8, 32 and 128 learners, 96 fragments of 4 kB, four shards; every round waits for all learners. All have the same
             interval. *Busy* learners are 8 with an interval so short that as many contributions come in a second as from 128:
             what is beside the rounds then counts sixteen times less. Which process would fill a core first is computed.
    rounds   two learners, 96 fragments, one shard: what a round costs when there is next to nothing to move.
    large    three of the 96 fragments of a model of 12 billion parameters, 125 million float32 each, two learners, for MINUTES.
             Large arrays lie in scratch files. Memory of every process is sampled each second.

Each run ends in good order: its learners leave, its shards drain, and then its ledgers are read. All processes share this
machine's cores, so clock times are those of a busy machine; processor time is what is compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.bus.streams import GIB
from atoll.protocol.settings import ProtocolSettings
from benchmarks.lib.arguments import natural, positive
from benchmarks.lib.results import Figure, write
from benchmarks.network.scale_figures import (
    CrowdUse,
    crowd_figures,
    fate_figures,
    flat_figures,
    growth_figures,
    round_figures,
)
from benchmarks.network.scale_fleet import ROLES, Fleet, FleetMoment, FleetPlan, played
from benchmarks.network.scale_host import HostRequest

MINUTES: Final = 30.0
LEARNERS_MAX: Final = 128
CROWDS: Final = ((8, False), (8, True), (32, False), (LEARNERS_MAX, False))
"""How many learners, and whether they are busy."""
FRAGMENTS: Final = 96
ELEMENTS: Final = 1024
SHARDS: Final = 4
HOSTS: Final = 4
INTERVAL_STEPS: Final = 24
INTERVAL_S: Final = 192.0
"""Of 128 learners, this is 64 contributions a second."""
MEASURED_S: Final = 90.0
WARM_S: Final = 15.0
ROUNDS_S: Final = 8.0
"""The interval of the two learners: twelve rounds a second."""
LARGE_FRAGMENTS: Final = 3
LARGE_ELEMENTS: Final = 125_000_000
LARGE_INTERVAL_S: Final = 60.0
LARGE_SPILL_BYTES: Final = 64 << 20
LARGE_STEP_S: Final = 1.0
STREAM_BYTES: Final = 24 * GIB
PARTS: Final = ("crowds", "rounds", "large")


def main() -> int:
    """Play all parts and write `build/results/bench-scale.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=positive, default=MINUTES, help="of the large fragments; the rest shrinks with it"
    )
    parser.add_argument("--only", choices=PARTS, default="", help="one part alone, for a look")
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    measured_s = MEASURED_S * min(1.0, max(0.4, 2.0 * options.minutes / MINUTES))
    figures = []
    if options.only in ("", "crowds"):
        figures += crowds(measured_s)
    if options.only in ("", "rounds"):
        figures += rounds(measured_s)
    if options.only in ("", "large"):
        figures += large(60.0 * options.minutes)
    return write("bench-scale" if not options.only else f"bench-scale-{options.only}", options.seed, figures)


# -- the parts --------------------------------------------------------------------------------------------------------


def crowds(measured_s: float) -> list[Figure]:
    """Return what crowds of learners cost."""
    figures, uses = list[Figure](), list[CrowdUse]()
    for learners, busy in CROWDS:
        name = f"{learners} busy learners" if busy else f"{learners} learners"
        interval_s = learners * INTERVAL_S / LEARNERS_MAX if busy else INTERVAL_S
        plan = small_plan(learners, interval_s, shards=SHARDS, hosts=min(HOSTS, learners))
        use, fates = crowd(name, plan, measured_s)
        uses.append(use)
        figures += [*crowd_figures(use), *fates]
    few, busy_few, *_, many = uses
    return [*figures, *growth_figures(few, many), *growth_figures(busy_few, many, None)]


def rounds(measured_s: float) -> list[Figure]:
    """Return what a round costs that moves next to nothing."""
    plan = small_plan(2, ROUNDS_S, shards=1, hosts=2)
    use, fates = crowd("2 learners", plan, measured_s)
    return [*round_figures(use), *fates]


def large(lasting_s: float) -> list[Figure]:
    """Return how memory goes while large fragments are merged."""
    interval_steps = max(2, int(LARGE_INTERVAL_S / LARGE_STEP_S))
    protocol = ProtocolSettings(fragments=LARGE_FRAGMENTS, shards=1, interval_steps=interval_steps, quorum=2).check()
    request = HostRequest(
        broker="",
        run="large",
        learners=[],
        elements=LARGE_ELEMENTS,
        step_s=LARGE_STEP_S,
        protocol=protocol,
        spill_bytes=LARGE_SPILL_BYTES,
        stream_bytes_max=STREAM_BYTES,
    )
    plan = FleetPlan(learners=2, hosts=2, request=request, spill_bytes=LARGE_SPILL_BYTES)
    say = sayer("large fragments")
    with tempfile.TemporaryDirectory() as folder, played(plan, Path(folder), say) as fleet:
        began_s = fleet.lived_s()
        watch(fleet, lasting_s, say)
        ended_s, ended_at_s = fleet.lived_s(), time.time()
        fleet.close(say)
        history, memory = fleet.history(), fleet.samples.by_name()
        # What a process keeps of a fragment it has after the first commit of it.
        firsts = [line.at_s for line in history.rounds if line.round.version == 1]
        warm_s = ended_s - (ended_at_s - max(firsts, default=ended_at_s))
    commits = [line for line in history.rounds if line.round.version > 0]
    how = (
        f"{LARGE_FRAGMENTS} fragments of {4 * LARGE_ELEMENTS / 1e6:.0f} MB, 2 learners, {lasting_s / 60.0:.0f} minutes"
    )
    took = sorted(line.round.merge_s + line.round.commit_s for line in commits)
    figures = [
        Figure("large fragments: commits", float(len(commits)), "commits", "", None, how),
        Figure("large fragments: merging and storing", took[len(took) // 2], "s", "", None, "median of a commit"),
        *flat_figures(memory, began_s, ended_s, warm_s),
    ]
    return figures + fate_figures(
        "large fragments", (each.ledger for each in history.ledgers.values()), history.rounds, LARGE_FRAGMENTS
    )


# -- what they share --------------------------------------------------------------------------------------------------


def small_plan(learners: int, interval_s: float, *, shards: int, hosts: int) -> FleetPlan:
    """Return a run of many tiny fragments, of which each is called once per interval."""
    protocol = ProtocolSettings(fragments=FRAGMENTS, shards=shards, interval_steps=INTERVAL_STEPS, quorum=learners)
    step_s = interval_s / INTERVAL_STEPS
    request = HostRequest("", "scale", [], elements=ELEMENTS, step_s=step_s, protocol=protocol.check())
    return FleetPlan(learners=learners, hosts=hosts, request=request)


def crowd(name: str, plan: FleetPlan, measured_s: float) -> tuple[CrowdUse, list[Figure]]:
    """Play a run of small fragments; return what it used in the measured time, and figures of its fates."""
    say = sayer(name)
    with tempfile.TemporaryDirectory() as folder, played(plan, Path(folder), say) as fleet:
        watch(fleet, WARM_S, say)
        first_s, before = fleet.lived_s(), fleet.moment()
        watch(fleet, measured_s, say)
        last_s, after = fleet.lived_s(), fleet.moment()
        fleet.close(say)
        history, samples = fleet.history(), fleet.samples
    made = [line for line in history.rounds if before.at_s <= line.at_s < after.at_s]
    waiting = [(queue, oldest_s) for at_s, queue, oldest_s in samples.waiting if first_s <= at_s <= last_s]
    use = CrowdUse(
        name=name,
        learners=plan.learners,
        lasted_s=after.at_s - before.at_s,
        commits=len(made),
        contributions=sum(len(line.round.contributors) for line in made),
        cpu_s={role: after.role_s(before, role) for role in ROLES},
        memory={role: samples.peaks(role) for role in ROLES},
        broker=counted(before, after),
        queue=max((queue for queue, _ in waiting), default=0),
        oldest_s=max((oldest_s for _, oldest_s in waiting), default=0.0),
    )
    say(f"{use.commits} commits of {use.contributions} contributions in {use.lasted_s:.0f} s")
    fragments = plan.request.protocol.fragments
    return use, fate_figures(name, (each.ledger for each in history.ledgers.values()), history.rounds, fragments)


def counted(before: FleetMoment, after: FleetMoment) -> dict[str, float]:
    """Return what the broker counted between two moments."""
    return {name: after.broker[name] - former for name, former in before.broker.items()}


def watch(fleet: Fleet, for_s: float, say: Callable[[str], None]) -> None:
    """Let time pass, and say now and then how it goes; end the benchmark if a process ends."""
    until_s = time.monotonic() + for_s
    while (left_s := until_s - time.monotonic()) > 0.0:
        time.sleep(min(left_s, 15.0))
        fleet.check()
        say(f"{max(0.0, until_s - time.monotonic()):.0f} s left; {fleet.samples.told()}")


def sayer(name: str) -> Callable[[str], None]:
    """Return what prints progress under a name."""

    def say(text: str) -> None:
        print(f"{name}: {text}", flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
