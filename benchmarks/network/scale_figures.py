"""The arithmetic of `make bench-scale`: what a crowd cost, what fills a core first, whether memory is flat. Pure.

*Per contribution* is the processor time of all processes of a role over the contributions that entered a commit
meanwhile; with a quorum of all learners this is also the cost of a round per learner. A role is *full at* so many
contributions per second of the whole run: its busiest process would use a whole core, if it went on as it did; the
role with the least of these saturates first. Memory is *flat* by what a process holds *at rest* in the second half of a
run over the same of the first half, after a warm-up: what is never given back is there between rounds, too, while the most
depends on how many large rounds meet by chance. *Without exactly one fate* are token-fragments that learners trained and no
fate claims, or that two fates claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.protocol.ledger import Ledger
from atoll.run.history import RoundLine
from benchmarks.lib.results import Figure

RATIO_MAX: Final = 1.25
FLAT_MAX: Final = 1.05
WARM_SHARE: Final = 0.2
"""Of the time of a run: in this beginning, memory may grow."""
REST_SHARE: Final = 0.1
"""Of a process's samples so many are taken as below its memory at rest."""
ROUND_MS_MAX: Final = {"shard": 5.0, "learners": 3.0}
OWN_CORE: Final = ("broker", "shard", "monitor")
"""Of these a run has few, however many learners there are; a learner has a machine of its own."""


@dataclass(frozen=True, slots=True)
class CrowdUse:
    """What a crowd of learners used in a measured time: `cpu_s` has the processor seconds of each process, by role."""

    name: str
    learners: int
    lasted_s: float
    commits: int
    contributions: int
    cpu_s: Mapping[str, Sequence[float]]
    memory: Mapping[str, Sequence[int]]
    broker: Mapping[str, float]
    queue: int
    oldest_s: float

    def each_ms(self, role: str) -> float:
        """Return the processor time of a role per contribution, in milliseconds."""
        return 1e3 * sum(self.cpu_s.get(role, ())) / max(1, self.contributions)

    def busiest(self, role: str) -> float:
        """Return the share of a core that the busiest process of a role used."""
        return max(self.cpu_s.get(role, ()), default=0.0) / self.lasted_s

    def full_at(self, role: str) -> float:
        """Return the contributions per second at which the busiest process of a role would use a whole core."""
        return self.contributions / self.lasted_s / max(1e-9, self.busiest(role))

    def first_full(self) -> str:
        """Return the role that saturates first."""
        return min(OWN_CORE, key=self.full_at)


def crowd_figures(use: CrowdUse) -> list[Figure]:
    """Return what a crowd cost."""
    name, first = use.name, use.first_full()
    how = f"{use.contributions} contributions in {use.commits} commits in {use.lasted_s:.0f} s"
    made = Figure(f"{name}: commits", use.commits / use.lasted_s, "1/s", "", None, how)
    figures = [made, Figure(f"{name}: contributions", use.contributions / use.lasted_s, "1/s", "", None, how)]
    for role in use.cpu_s:
        spent = ", ".join(f"{seconds:.1f}" for seconds in use.cpu_s[role])
        told = f"{spent} s of its processes, in {use.lasted_s:.0f} s"
        figures.append(
            Figure(f"{name}: {role}, processor time a contribution", use.each_ms(role), "ms", "", None, told)
        )
        most = max(use.memory.get(role, ()), default=0)
        told = f"the largest of {len(use.memory.get(role, ()))}, proportional, joining and leaving included"
        figures.append(Figure(f"{name}: {role}, memory", most / 1e6, "MB", "", None, told))
    for key, unit in (("in_msgs", "messages"), ("out_msgs", "messages"), ("in_bytes", "B"), ("out_bytes", "B")):
        way = f"{unit if unit != 'B' else 'bytes'} {'received' if key.startswith('in') else 'sent'}"
        each = use.broker.get(key, 0.0) / max(1, use.contributions)
        figures.append(Figure(f"{name}: broker, {way} a contribution", each, unit, "", None, how))
    capacity = ", ".join(f"{role} {use.full_at(role):.0f}" for role in OWN_CORE if use.cpu_s.get(role))
    told = f"contributions a second that fill a core of the busiest process: {capacity}; {first} is first"
    figures.append(Figure(f"{name}: first process to fill a core", use.full_at(first), "1/s", "", None, told))
    told = f"the oldest in the work queue, of at most {use.queue}"
    figures.append(Figure(f"{name}: longest wait for a fate", use.oldest_s, "s", "", None, told))
    return figures


def growth_figures(small: CrowdUse, large: CrowdUse, most: float | None = RATIO_MAX) -> list[Figure]:
    """Return how much dearer a learner is in a large crowd than in a small one; at most `most` times, if that is a goal."""
    figures = []
    for role in ("broker", "shard"):
        here, there = small.each_ms(role), large.each_ms(role)
        ratio = there / max(here, 1e-9)
        how = f"processor time of a round: {there:.2f} ms a learner beside {here:.2f} ms"
        name, goal = f"{role}: one of {large.name} beside one of {small.name}", "" if most is None else f"<= {most:g}"
        figures.append(Figure(name, ratio, "ratio", goal, None if most is None else ratio <= most, how))
    return figures


def round_figures(use: CrowdUse) -> list[Figure]:
    """Return the fixed cost of a round of one tiny fragment, from a run of two learners."""
    figures = []
    for role, most_ms in ROUND_MS_MAX.items():
        processes = 1 if role == "shard" else use.learners
        each_ms = 1e3 * sum(use.cpu_s[role]) / processes / max(1, use.commits)
        how = f"{use.learners} learners, {use.commits} rounds in {use.lasted_s:.0f} s; heartbeats and steps included"
        name = f"a round of a tiny fragment: {'the shard' if role == 'shard' else 'a learner'}"
        figures.append(Figure(name, each_ms, "ms", f"<= {most_ms:g}", each_ms <= most_ms, how))
    each_ms = 1e3 * sum(use.cpu_s["broker"]) / max(1, use.commits)
    figures.append(Figure("a round of a tiny fragment: the broker", each_ms, "ms", "", None, "of the same rounds"))
    received = use.broker.get("in_msgs", 0.0) / max(1, use.commits)
    figures.append(
        Figure("a round of a tiny fragment: requests", received, "messages", "", None, "that the broker received")
    )
    return figures


def flat_figures(
    memory: Mapping[str, Iterable[tuple[float, int]]], began_s: float, ended_s: float, warm_s: float
) -> list[Figure]:
    """Return whether memory stayed what it was, by process, and the most of each; samples are (moment, bytes).

    The warm-up lasts until `warm_s`, but at least for `WARM_SHARE` of the time.
    """
    warm_s = max(warm_s, began_s + WARM_SHARE * (ended_s - began_s))
    figures = []
    for name, samples in memory.items():
        first, second = halves(samples, warm_s, ended_s)
        before, after = at_rest(first), at_rest(second)
        ratio = after / max(1, before)
        how = f"at rest {after / 1e6:.0f} MB in the second half, {before / 1e6:.0f} MB in the first, after a warm-up"
        goal = f"<= {FLAT_MAX:g}"
        figures.append(Figure(f"large fragments: {name}, memory", ratio, "ratio", goal, ratio <= FLAT_MAX, how))
        how = f"in the second half; {max(first, default=0) / 1e6:.0f} MB in the first"
        most = max(second, default=0) / 1e6
        figures.append(Figure(f"large fragments: {name}, most memory", most, "MB", "", None, how))
    return figures


def halves(samples: Iterable[tuple[float, int]], warm_s: float, ended_s: float) -> tuple[list[int], list[int]]:
    """Return the samples of the first and of the second half of the time after the warm-up."""
    middle_s = (warm_s + ended_s) / 2.0
    kept = [(at_s, size) for at_s, size in samples if warm_s <= at_s <= ended_s]
    return [size for at_s, size in kept if at_s < middle_s], [size for at_s, size in kept if at_s >= middle_s]


def at_rest(sizes: Sequence[int]) -> int:
    """Return what a process holds between rounds: the tenth part of its samples is below that. 0 for no samples."""
    return sorted(sizes)[int(REST_SHARE * len(sizes))] if sizes else 0


def fate_figures(name: str, ledgers: Iterable[Ledger], rounds: Iterable[RoundLine], fragments: int) -> list[Figure]:
    """Return whether everything has exactly one fate, and whether anything was refused; `ledgers` are the shards' last ones."""
    whole = Ledger()
    for ledger in ledgers:
        whole.absorb(ledger)
    accounts = whole.accounts.values()
    unsettled = sum(abs(one.pushed - one.settled) + abs(one.fates(fragments)["lost"]) for one in accounts)
    pushes = Counter(
        (line.round.fragment, share.learner, share.incarnation, share.push)
        for line in rounds
        for share in line.round.contributors
    )
    twice = sum(count - 1 for count in pushes.values())
    reasons = sum((Counter(one.refused) + Counter(local=one.refused_local) for one in accounts), Counter[str]())
    late = sum(one.merged_late for one in accounts)
    settled = sum(one.settled for one in accounts)
    how = f"{settled} token-fragments settled for {len(whole.accounts)} learners, {late} of them late"
    return [
        _zero(f"{name}: token-fragments without exactly one fate", unsettled, "token-fragments", how),
        _zero(f"{name}: contributions merged twice", twice, "pushes", f"{len(pushes)} pushes in commits"),
        _zero(f"{name}: refused", reasons.total(), "token-fragments", ", ".join(reasons) or how),
    ]


def _zero(name: str, count: int, unit: str, how: str) -> Figure:
    return Figure(name, float(count), unit, "0", count == 0, how)
