"""From extracts to figures: how soon things went on, what it cost; what must be zero or exact is in `safety`. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.faults.extracts import Extract, ExtractRound
from benchmarks.faults.goodput import Window, gaps, paces, participation, useful_share
from benchmarks.faults.safety import safety
from benchmarks.faults.storm import Fault
from benchmarks.lib.reports import loss_beside, merged_tokens
from benchmarks.lib.results import Figure

COMMIT_MAX_S = 5.0
LOSS_MAX = 0.01
PACE_MIN = 0.99
QUIET_AFTER_S = 8.0
QUIET_AFTER_LEARNER_S = 20.0
QUIET_MIN_S = 3.0


def figures(extracts: Sequence[Extract]) -> list[Figure]:
    """Return every figure of the runs that were measured; what a missing run would have told is left out."""
    undisturbed = plains(extracts)
    storms = [e for e in extracts if e.course.per_minute]
    found: list[Figure] = []
    for extract in [*undisturbed.values(), *storms]:
        plain = undisturbed.get((extract.course.system, extract.course.seed))
        found += named(extract, what_was_done(extract))
        if extract.course.kills_min:
            found += named(extract, [*safety(extract), *([] if plain is None else [loss_at_equal(extract, plain)])])
            continue
        found += named(extract, shares(extract, plain))
        if extract.course.system == "atoll":
            found += named(extract, [*safety(extract), *recovery(extract), *partition(extract)])
            found += named(extract, [] if plain is None or plain is extract else quality(extract, plain))
        elif extract is not plain and plain is not None:
            found += named(
                extract, [final_loss(extract), thrown_away(extract, "tokens rolled back", "to a checkpoint")]
            )
    return [*found, *takeovers([e for e in storms if e.course.system == "atoll" and not e.course.kills_min])]


def plains(extracts: Sequence[Extract]) -> dict[tuple[str, int], Extract]:
    """Return the undisturbed runs by system and seed."""
    return {(e.course.system, e.course.seed): e for e in extracts if not e.course.per_minute}


def named(extract: Extract, found: Sequence[Figure]) -> list[Figure]:
    """Return figures under the name of their run."""
    name = extract.course.name
    return [Figure(f"{name}: {f.name}", f.value, f.unit, f.goal, f.holds, f.how) for f in found]


def what_was_done(extract: Extract) -> list[Figure]:
    """Return how many faults there were, and how many of them were kills."""
    if not extract.course.per_minute:
        return []
    kinds = Counter(f"{fault.act} {fault.role}" for fault in extract.faults)
    killed = sum(fault.act == "kill" for fault in extract.faults)
    what = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    least = extract.course.kills_min
    minutes = (extract.storm[-1].at_s if least and extract.faults else extract.course.seconds) / 60
    return [
        Figure(
            "kills",
            float(killed),
            "kills",
            f">= {least}" if least else "",
            killed >= least if least else None,
            f"in {minutes:.1f} minutes; {extract.missed} planned faults found nobody",
        ),
        Figure("faults", float(len(extract.faults)), "faults", "", None, what),
    ]


# --- how soon things went on --------------------------------------------------------------------------------------------


def recovery(extract: Extract) -> list[Figure]:
    """Return how soon after each kind of fault something was committed again, and whether learners noticed."""
    storm = extract.storm
    rounds = extract.rounds
    owners = [
        (f, next_commit(rounds, f.at_s, f"shard-{f.shard}")) for f in storm if (f.act, f.role) == ("kill", "owner")
    ]
    cut_off = [
        (f, next_commit(rounds, f.at_s, f"shard-{f.shard}")) for f in storm if f.act != "kill" and f.role == "owner"
    ]
    brokers = [(f, next_commit(rounds, f.over_at_s)) for f in storm if (f.act, f.role) == ("kill", "broker")]
    found = [
        *after("next commit of the shard after its owner was killed", owners, COMMIT_MAX_S),
        *after("next commit of the shard after its owner froze or was cut off", cut_off, None),
        *after("next commit after the broker was up again", brokers, COMMIT_MAX_S),
    ]
    learners = [f for f in storm if (f.act, f.role) == ("kill", "learner")]
    if learners and (one_round := round_s(rounds)) > 0.0:
        waits = [(f, next_commit(rounds, f.at_s, besides=f.who) / one_round) for f in learners]
        found += after(
            "next commit of the others after a learner was killed",
            waits,
            1.0,
            "rounds",
            f"; a round is {one_round:.1f} s",
        )
    return found


def takeovers(extracts: Sequence[Extract]) -> list[Figure]:
    """Return the pace of the learners while a killed owner's shard rests, over that of quiet times, of all storms.

    Only takeovers that have no other fault in or shortly before them count: what a restarting learner or a broker that was
    away takes from the machine is no cost of a takeover.
    """
    found: list[tuple[float, float]] = []
    left_out = 0
    for extract in extracts:
        every = [
            (f, (f.at_s, f.at_s + next_commit(extract.rounds, f.at_s, f"shard-{f.shard}")))
            for f in extract.storm
            if (f.act, f.role) == ("kill", "owner")
        ]
        alone = [
            window for fault, window in every if window[1] < float("inf") and not disturbed(extract, window, fault)
        ]
        left_out += len(every) - len(alone)
        found += paces(extract, alone, quiet(extract))
    if not found:
        return []
    pace = sum(taken for taken, _ in found) / sum(expected for _, expected in found)
    ratios = [taken / expected for taken, expected in found]
    sigma = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    how = (
        f"steps of learners that live through one, over theirs in quiet times; {len(found)} windows and learners, "
        f"standard error {sigma:.3f}; {left_out} takeovers with other faults left out"
    )
    return [Figure("storms: pace during a takeover", pace, "ratio", f">= {PACE_MIN}", pace >= PACE_MIN, how)]


def disturbed(extract: Extract, window: Window, besides: Fault) -> bool:
    """Return whether another fault than one was done or held in a window or just before it; a partition does not count."""
    return any(
        fault.at_s < window[1] and settled_s(fault) > window[0]
        for fault in extract.storm
        if fault != besides and fault.act != "partition"
    )


def after(
    name: str, waits: Sequence[tuple[Fault, float]], goal: float | None, unit: str = "s", more: str = ""
) -> list[Figure]:
    """Return the median of some waits and how they are spread."""
    if not waits:
        return []
    found = [wait for _, wait in waits]
    median = statistics.median(found)
    how = f"median of {len(found)}; longest {max(found):.1f} {unit}{more}"
    return [Figure(name, median, unit, f"<= {goal:g}" if goal else "", median <= goal if goal else None, how)]


def next_commit(rounds: Sequence[ExtractRound], at_s: float, shard: str = "", besides: str = "") -> float:
    """Return how long after a time the next commit came, of one shard, or with one that is not `besides`; else infinity."""
    return min(
        (
            made.at_s - at_s
            for made in rounds
            if made.at_s > at_s and made.shard.startswith(shard) and any(s.learner != besides for s in made.shares)
        ),
        default=float("inf"),
    )


def round_s(rounds: Sequence[ExtractRound]) -> float:
    """Return the median time between two commits of the same fragment."""
    times: dict[int, list[float]] = defaultdict(list)
    for made in rounds:
        times[made.fragment].append(made.at_s)
    waits = [b - a for found in times.values() for a, b in itertools.pairwise(sorted(found))]
    return statistics.median(waits) if waits else 0.0


def settled_s(fault: Fault) -> float:
    """Return when a fault no longer weighs on the machine: a killed learner imports and compiles for a while."""
    after_s = QUIET_AFTER_LEARNER_S if (fault.act, fault.role) == ("kill", "learner") else QUIET_AFTER_S
    return max(fault.at_s, fault.over_at_s) + after_s


def quiet(extract: Extract) -> list[Window]:
    """Return the times in which no fault was done, held, or just over; a partition holds for long and disturbs one."""
    busy = [(f.at_s, settled_s(f)) for f in extract.storm if f.act != "partition"]
    return gaps(busy, 0.0, extract.course.seconds, QUIET_MIN_S)


def partition(extract: Extract) -> list[Figure]:
    """Return what became of the first contribution per fragment that a partitioned learner got through afterwards."""
    found: list[Figure] = []
    for fault in extract.storm:
        if fault.act != "partition":
            continue
        life = life_at(extract, fault.who, fault.at_s)
        firsts = first_fates(extract, fault.who, int(life.rpartition("/")[2]) if life else -1, fault.over_at_s)
        lasted = f"{fault.who} for {fault.over_at_s - fault.at_s:.0f} s"
        if not firsts:
            found.append(Figure("first fate after a partition", float("inf"), "s", "finite", False, lasted))
            continue
        fates = Counter(fate for _, fate in firsts.values())
        what = ", ".join(f"{fate} {count}" for fate, count in sorted(fates.items()))
        soonest, latest = min(at for at, _ in firsts.values()), max(at for at, _ in firsts.values())
        rows = extract.lives[life]
        how = f"{lasted}; the same life goes on to step {rows[-1][1]}"
        every = f"{len(firsts)} of {extract.fragments} fragments: {what}"
        found += [
            Figure("first fate after a partition", soonest, "s", "finite", True, how),
            Figure("last of the first fates after it", latest, "s", "", None, every),
        ]
    return found


def life_at(extract: Extract, learner: str, at_s: float) -> str:
    """Return the life that a learner was in at a time, empty when none is known."""
    begun = [
        (rows[0][0], life)
        for life, rows in extract.lives.items()
        if life.rpartition("/")[0] == learner and rows and rows[0][0] <= at_s
    ]
    return max(begun)[1] if begun else ""


def first_fates(extract: Extract, learner: str, incarnation: int, since_s: float) -> dict[int, tuple[float, str]]:
    """Return, per fragment, when after `since_s` the next push of an incarnation got a fate, and which."""
    fates: list[tuple[float, int, str]] = []
    for made in extract.rounds:
        fates += [
            (made.at_s, made.fragment, "merged late" if share.age else "merged")
            for share in made.shares
            if (share.learner, share.incarnation) == (learner, incarnation)
        ]
    fates += [
        (r.at_s, r.fragment, f"refused {r.reason}")
        for r in extract.refusals
        if (r.learner, r.incarnation) == (learner, incarnation)
    ]
    firsts: dict[int, tuple[float, str]] = {}
    for at_s, fragment, fate in sorted(fates):
        if at_s > since_s:
            firsts.setdefault(fragment, (at_s - since_s, fate))
    return firsts


# --- what it cost -------------------------------------------------------------------------------------------------------


def shares(extract: Extract, plain: Extract | None) -> list[Figure]:
    """Return participation and, where the undisturbed run is known, the useful-step share."""
    found = [Figure("participation", participation(extract), "ratio", "", None, "stepping over present time")]
    if plain is not None:
        share = useful_share(extract, plain)
        how = "tokens that entered the model over those possible in the same time undisturbed"
        found.append(Figure("useful-step share", share, "ratio", "", None, how))
    if plain is not None and extract.course.system == "atoll":
        damped = useful_share(extract, plain, extract.age_damping)
        how = f"the same, with {extract.age_damping:g} per version of age of what was merged late"
        found.append(Figure("useful-step share, damped", damped, "ratio", "", None, how))
    return found


def quality(extract: Extract, plain: Extract) -> list[Figure]:
    """Return the loss beside the undisturbed run's at equal merged tokens, and what died with learners."""
    return [
        loss_at_equal(extract, plain),
        final_loss(extract),
        thrown_away(extract, "tokens lost with killed learners", "open when an incarnation died"),
    ]


def loss_at_equal(extract: Extract, plain: Extract) -> Figure:
    """Return by how much the loss is above the undisturbed run's at equal merged tokens."""
    loss, losses = loss_beside(extract.report, plain.report)
    return Figure("held-out loss", loss, "ratio", f"<= {LOSS_MAX}", loss <= LOSS_MAX, losses)


def thrown_away(extract: Extract, name: str, how: str) -> Figure:
    """Return the share of the trained tokens that no model has."""
    lost = extract.report["tokens_by_fate"]["lost"] / max(1, extract.report["tokens_trained"])
    return Figure(name, lost, "ratio", "", None, how)


def final_loss(extract: Extract) -> Figure:
    """Return the held-out loss at the end, after the same time for every run."""
    how = f"the final model, {merged_tokens(extract.report)} tokens merged"
    return Figure("final held-out loss", last_loss(extract.report), "bits/byte", "", None, how)


def last_loss(report: dict[str, Any]) -> float:
    """Return the bits per byte of the final model."""
    return float(report["validation"]["final_bits_per_byte"])
