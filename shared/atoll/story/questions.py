"""The five usual questions, answered from the event log: goodput, a learner behind, a refusal, a jump of the loss, more grace.

Each answer rests on figures of the event log and names them. Where the event log has none, the answer says so: it is no guess.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf, isfinite
from statistics import fmean, median
from typing import Final

from atoll.base.wording import counted
from atoll.protocol.events import id_of
from atoll.protocol.quarantine import OFFENCES
from atoll.run.decisions import CLIP_CURE, describe_clip, describe_isolation
from atoll.run.history import History, RoundLine, base_of, push_id
from atoll.run.process_views import Noted
from atoll.story.findings import TOO_LATE, describe_measure, refused_id, slow_learners, slow_links
from atoll.story.goodput import (
    DEFINITION,
    LearnerShare,
    alignment_of_others,
    duration_of_others,
    goodput_of,
    points_away,
    shares_of,
)
from atoll.story.lives import adoption_delays
from atoll.story.slowness import SHARE_MIN, describe_left_out, slowness
from atoll.story.telling import SILENT
from atoll.wire.events import Contributor, RefusedContribution

REASONS: Final = {
    "stale": "its base version was older than protocol.age_max allows when it arrived: a slow learner or link",
    "future_base": "it is on a version that does not exist yet: its learner follows another founding or is broken",
    "empty": "it covers no token or no step",
    "implausible": "it claims more tokens than its steps, or the time, allow",
    "outlier": "it is far longer than the other learners': a learning rate, other data, or broken memory",
    "unusual": "it is far longer than usual, but others' were as well: nobody is blamed",
    "quarantined": "its incarnation had been isolated before, and is not read any more",
    "after_final": "its learner had called an earlier push of this fragment its last",
    "after_end": "it was trained on a version that was made long after the run had reached its target",
    "unjudged": "the last learners left before a majority was there to judge it",
    "chunks_gone": "the broker no longer had its segments: it waited too long in the queue, or the stream was full",
    "replaced": "its bytes are not those that its manifest names: a lost part, or somebody wrote in its learner's place",
    "norm_claim": "it is not as long as its manifest says",
    "norm_bound": "a slice is longer than protocol.norm_max allows",
    "not_finite": "it holds infinities or NaN",
}
"""What a reason means; others are named as they are, and are damaged bytes."""

JUMP_MIN: Final = 0.02
"""A rise of the loss by this share is called a jump."""
NEAR_ZERO: Final = 0.05
QUANTILES: Final = (0.25, 0.5, 0.75, 0.9, 1.0)
"""A row for the grace that this share of the contributions that missed their round would have needed."""
OFTEN_LATE: Final = 0.25
"""A learner with this share of its contributions late is late by rule, and not by chance."""


def goodput(history: History) -> list[str]:
    """Answer why learners were not stepping all the time that they were there: who costs how much, and for what cause."""
    found = goodput_of(history)
    if found.share is None:
        return [f"{SILENT} how long learners stepped: no contribution and no sample of this run notes a step time"]
    told = [
        f"goodput by the event log: {found.share:.1%} ({found.stepping_s:,.4g} of {found.present_s:,.4g} learner-seconds)",
        f"  {DEFINITION}",
        "",
        "who cost how much of the learners' time",
    ]
    slow = slowness(history)
    mine = [part for part in slow.lost if part.of == "learners"]
    told += [
        f"  {part.share:>6.1%} {part.seconds:>9.4g} s  {part.who} {part.sentence}; {part.command}" for part in mine
    ] or [f"  nobody cost more than {SHARE_MIN:.0%} of it"]
    if any(part.what == "slow learner" for part in mine):
        told.append(
            "  a slow learner's steps are steps: its part is no loss of goodput, and trains fewer tokens all the same"
        )
    told += [
        "",
        "rounds take no time from learners, which never wait for them; what follows costs tokens their effect",
        f"  late contributions: {sum(share.age > 0 for _, share in history.contributions())} of {len(history.contributions())}",
        f"  refused contributions: {len(history.refused)}",
        "",
        f"{SILENT} what a learner did between two steps (adopting, encoding, its data): its overhead is in `atoll top`",
    ]
    standing_out = [line for each in slow.findings for line in each.lines(history.clock)]
    standing_out += [describe_left_out(slow.left_out)] if slow.left_out else []
    return [*told, *(["", "what stands out", *(f"  {line}" for line in standing_out)] if standing_out else [])]


def behind(history: History, learner: str | None) -> list[str]:
    """Answer why a learner is behind; without a name, why the one with the most late and refused contributions is."""
    shares, clock = shares_of(history.rounds), history.clock
    too_late = Counter(each.fields.learner for each in history.refused if each.fields.reason in TOO_LATE)
    if learner is None:
        lateness = Counter({share.learner: share.late for share in shares}) + too_late
        learner = max(lateness, key=lambda name: lateness[name], default=None)
    if learner is None:
        return ["no learner is behind: no contribution came late, and none was refused for being late"]
    own = next((share for share in shares if share.learner == learner), None)
    if own is None:
        refusals = counted(too_late[learner], "was refused because it", "were refused because they")
        return [
            f"{learner}: no contribution of it was merged; {refusals} came too late",
            *(line for each in slow_links(history, shares) if each.culprit == learner for line in each.lines(clock)),
            *_describe_isolations(history, learner),
        ]
    refusals = counted(too_late[learner], "more was refused because it", "more were refused because they")
    told = [
        f"{learner}: {own.late} of its {own.contributions} merged contributions were late, and {refusals} came too late"
    ]
    told += _describe_lateness(history, shares, own)
    late = [(line, share) for line, share in history.contributions(learner) if share.age]
    told += [_describe_miss(history, line, share) for line, share in late[-3:]]
    if adoptions := adoption_delays(history, learner):
        told.append(f"it adopts a version {median(adoptions):.3g} s after that is visible (by two clocks)")
    return told + _describe_isolations(history, learner)


def _describe_lateness(history: History, shares: Sequence[LearnerShare], own: LearnerShare) -> list[str]:
    """Return what makes a learner late: a slow link or slow steps, or that rounds do not wait for it."""
    found = (*slow_links(history, shares), *slow_learners(history, shares))
    if causes := [line for each in found if each.culprit == own.learner for line in each.lines(history.clock)]:
        return causes
    step_s = duration_of_others(shares, own.learner, lambda each: each.step_s)
    upload_s = duration_of_others(shares, own.learner, lambda each: each.upload_s)
    not_waited = _not_waited_for(history, own.learner) if own.late >= OFTEN_LATE * own.contributions else []
    return [*_not_slow(history, own, step_s, upload_s, explained=bool(not_waited)), *not_waited]


def _not_slow(
    history: History, own: LearnerShare, step_s: float | None, upload_s: float | None, *, explained: bool
) -> list[str]:
    """Return that neither steps nor uploads make a learner late, beside those of the others, or that one is not known."""
    steps, uploads = f"its steps ({_beside(own.step_s, step_s)})", f"its uploads ({_beside(own.upload_s, upload_s)})"
    both = "are much slower than the others'" if explained else "explain it"
    if own.step_s is not None and own.upload_s is not None:
        return [f"neither {steps} nor {uploads} {both}"]
    fast = "are not much slower than the others'" if explained else "do not explain it"
    told = [f"{SILENT} its step time" if own.step_s is None else f"{steps} {fast}"]
    if own.upload_s is not None:
        told.append(f"{uploads} {fast}")
    elif any(share.inline for _, share in history.contributions(own.learner)):
        told.append("its contributions are so small that messages carry them: there is no upload that could be slow")
    else:
        told.append(f"{SILENT} its upload time")
    return told


def _not_waited_for(history: History, learner: str) -> list[str]:
    """Return that the rounds which a learner missed did not wait for it, because their quorum was met without it.

    A learner whose steps and link are like the others' is late by what the rounds wait for alone.
    """
    missed = [
        line.round.why
        for late, share in history.contributions(learner)
        if share.age
        and (line := history.find(late.round.fragment, base_of(late, share) + 1)) is not None
        and line.round.why is not None
        and line.round.why.met_by
    ]
    everybody = len({share.learner for _, share in history.contributions()})
    if not missed:
        return []
    quorum, count = Counter(why.quorum for why in missed).most_common(1)[0]
    if quorum >= everybody:
        return []
    met = f"{count} of the {len(missed)} rounds that it missed needed a quorum of {quorum} of {everybody} learners"
    longer = "a longer grace (protocol.grace_gamma, protocol.grace_cap_steps) for a bounded time"
    return [
        f"rounds end without waiting for it: {met}, and the others met it",
        f"    a quorum of {everybody} (protocol.quorum) waits for all, {longer}; `atoll why grace` says how long",
        f"    what it gives this run: `atoll what-if` with `--set protocol.quorum={everybody}`",
    ]


def refused(history: History, learner: str | None) -> list[str]:
    """Answer why contributions were refused or clipped: all of them, or those of one learner."""
    chosen = [each for each in history.refused if learner in (None, each.fields.learner)]
    clipped = describe_clips(history, learner)
    if not chosen:
        return [f"no contribution{'' if learner is None else f' of {learner}'} was refused", *clipped]
    told, clock = clipped, history.clock
    for (name, reason), count in Counter((each.fields.learner, each.fields.reason) for each in chosen).most_common():
        newest = next(each for each in reversed(chosen) if (each.fields.learner, each.fields.reason) == (name, reason))
        blame = "an offence" if reason in OFFENCES else "no offence"
        why = REASONS.get(reason, "its bytes were damaged")
        told.append(f"{name or 'a learner'}: {counted(count, 'time')} {reason!r} ({blame}): {why}")
        push = newest.fields
        which = f"{refused_id(push)}{describe_measure(push)}" if push.push else f"{SILENT} which"
        told.append(f"    the last by {newest.who} at {clock.at(newest.at_s)}: {which}")
        if reason == "stale" and push.base_version is not None:
            told.append(f"    {_describe_staleness(history, newest, push.base_version)}")
    told += [
        f"{each.fields.learner} is in quarantine at {each.who} since {clock.at(each.at_s)}: "
        f"{describe_isolation(each.fields.offences, each.fields.reason)}"
        for each in history.quarantined
        if learner in (None, each.fields.learner)
    ]
    return told


def _describe_staleness(history: History, refusal: Noted[RefusedContribution], base_version: int) -> str:
    push = refusal.fields
    here = [line for line in history.rounds if line.round.fragment == push.fragment and line.at_s <= refusal.at_s]
    version = here[-1].round.version if here else base_version
    took = f"; its upload took {push.upload_s:.3g} s" if push.upload_s else ""
    return f"it was on version {base_version}, and the fragment was at {version}{took}"


def describe_clips(history: History, learner: str | None) -> list[str]:
    """Return, by learner, how many merged contributions were clipped, and the newest of them."""
    lines = []
    own = [(line, share) for line, share in history.contributions(learner) if share.norm_max is not None]
    for name, count in Counter(share.learner for _, share in own).most_common():
        line, newest = next((line, share) for line, share in reversed(own) if share.learner == name)
        clipped = counted(count, "merged contribution was", "merged contributions were")
        why = describe_clip(newest.norm or 0.0, newest.norm_max or 0.0)
        lines += [
            f"{name}: {clipped} clipped; {CLIP_CURE}",
            f"    the last at {history.clock.at(line.at_s)}: {push_id(line, newest)} {why}",
        ]
    return lines


def _loss_curves(history: History) -> dict[str, list[tuple[float, float]]]:
    curves = defaultdict[str, list[tuple[float, float]]](list)
    if len(history.validations) > 1:  # a rise is between two points
        points = [(each.at_s, each.fields.bits_per_byte) for each in history.validations]
        curves["bits per byte on held-out text"] = points
    else:  # of each learner by itself: their data differ, and from round to round those that contribute do
        for line in history.rounds:
            for share in line.round.contributors:
                if share.loss is not None:
                    curves[f"training loss of {share.learner}"].append((line.at_s, share.loss))
    return curves


def _happenings(history: History) -> list[tuple[float, str]]:
    happened = [(each.at_s, f"{each.who} joined as incarnation {each.fields.incarnation}") for each in history.joined]
    happened += [(each.at_s, f"{each.who} left") for each in history.left]
    happened += [(each.from_s, f"{each.shard} has a new owner, epoch {each.fields.epoch}") for each in history.tenures]
    happened += [
        (each.at_s, f"{each.who} put {each.fields.learner} into quarantine: {each.fields.reason}")
        for each in history.quarantined
    ]
    happened += [
        (each.at_s, f"a contribution of {each.fields.learner} was refused: {each.fields.reason}")
        for each in history.refused
    ]
    return happened


def _disagreements(rounds: Sequence[RoundLine]) -> list[str]:
    shares = shares_of(rounds)
    away = [s for s in shares if points_away(s, alignment_of_others(shares, s.learner))]
    told = [
        f"  {share.learner} pointed elsewhere than the others: cosine {share.aligned_with_others:.3g}, with "
        f"{share.weight_share:.1%} of the weight"
        for share in away
    ]
    low = [
        (share.aligned_with_others, push_id(line, share))
        for line in rounds
        for share in line.round.contributors
        if share.aligned_with_others is not None
    ]
    return told + [f"  agreed least with the others: {push}, cosine {cosine:.3g}" for cosine, push in sorted(low)[:3]]


def loss(history: History) -> list[str]:
    """Answer why the loss jumped: where it rose most, and what happened in that time."""
    rises = [
        (_rise_share(before[1], after[1], max(abs(value) for _, value in curve)), before, after, what)
        for what, curve in _loss_curves(history).items()
        for before, after in pairwise(curve)
    ]
    if not rises:
        return [f"{SILENT} the loss: no validation, and no contribution that notes one"]
    clock = history.clock
    rise, before, after, what = max(rises)
    if rise < JUMP_MIN:
        return [f"the loss did not jump: the {what} never rose by more than {max(rise, 0.0):.1%} between two points"]
    by = f" by {rise:.1%}" if isfinite(rise) else ""
    told = [f"the {what} rose{by}: from {before[1]:.4g} to {after[1]:.4g}"]
    told.append(f"  between {clock.at(before[0])} and {clock.at(after[0])}")
    told += ["", "what happened in that time"]
    inside = [
        f"  {clock.at(at_s)}  {words}" for at_s, words in sorted(_happenings(history)) if before[0] < at_s <= after[0]
    ]
    rounds = [line for line in history.rounds if before[0] < line.at_s <= after[0]]
    told += inside[:20] or ["  nobody joined, left, was refused or taken over"]
    late = sum(share.age > 0 for line in rounds for share in line.round.contributors)
    told.append(f"  {counted(len(rounds), 'round')}, {counted(late, 'late contribution')}")
    told += _disagreements(rounds)
    return [
        *told,
        "",
        f"{SILENT} the data of those steps, nor which of these moved the loss: it has their order, not their effect",
    ]


def grace(history: History, fragment: int | None) -> list[str]:
    """Answer what another grace would have given: contributions in time, and seconds that rounds would have waited."""
    rounds = [line for line in history.rounds if fragment in (None, line.round.fragment) and line.round.why is not None]
    granted = [line.round.grace_s for line in rounds if line.round.why is not None and line.round.why.met_by]
    if not granted:
        return [f"{SILENT} of a grace: no round met its quorum"]
    usual_s = median(granted)
    delays = _delays(history, fragment)
    merged = sum(len(line.round.contributors) for line in rounds)
    untold = sum(share.age == 1 and share.arrived_s is None for line in rounds for share in line.round.contributors)
    missed = f"{len(delays)} of {merged} contributions missed the round that they answered"
    told = [
        f"{counted(len(rounds), 'round')} with a median grace of {usual_s:.3g} s; {missed}",
        *([f"{SILENT} when {untold} more of those arrived"] if untold else []),
        "",
        f"  {'grace':>10}{'in time of those':>18}{'more waiting, mean of their rounds':>40}",
    ]
    for grace_s in _graces(delays, usual_s):
        caught = [delay for delay in delays if delay <= grace_s]
        # The mean: with a fast loop most rounds would wait hardly longer, and their median would tell nothing.
        more_s = fmean(max(0.0, min(delay, grace_s) - usual_s) for delay in delays) if delays else 0.0
        told.append(f"  {grace_s:>8.3g} s{len(caught):>18}{more_s:>38.3g} s")
    told += [
        "",
        "a round is not waited for by learners, so a longer grace costs versions that come later, not idle time",
        "what another grace gives this run: `atoll what-if` with protocol.grace_gamma and protocol.grace_cap_steps",
        f"{SILENT} what that does to the loss: try it in `atoll sim train`",
    ]
    return told


def _graces(delays: list[float], usual_s: float) -> list[float]:
    """Return the graces worth a row: the usual one, and those by which a quarter, half, ... of `delays` would be in time.

    Multiples of the usual grace are no rows: a fast loop has a usual grace of 0.
    """
    ordered = sorted(delays)
    reached = {ordered[ceil(share * len(ordered)) - 1] for share in QUANTILES} if ordered else set()
    # Rounded upwards to 1 ms, so that the contribution that a row is made for is in time.
    return sorted({usual_s} | {ceil(delay_s * 1e3) / 1e3 for delay_s in reached})


def _delays(history: History, fragment: int | None) -> list[float]:
    """Return, of contributions that were one version late, how long after the quorum that they missed they arrived."""
    found = []
    for line, share in history.contributions():
        if share.age != 1 or share.arrived_s is None or fragment not in (None, line.round.fragment):
            continue
        missed = history.find(line.round.fragment, line.round.version - 1)
        if missed is not None:
            found.append(line.called_s + share.arrived_s - missed.quorum_s)
    return [max(0.0, delay) for delay in found]


def _describe_miss(history: History, line: RoundLine, share: Contributor) -> str:
    push, missed = push_id(line, share), history.find(line.round.fragment, base_of(line, share) + 1)
    if missed is None or share.arrived_s is None:
        return f"    {push}: {share.age} late; {SILENT} by how much it missed its round"
    late_s = line.called_s + share.arrived_s - missed.ended_s
    commit = id_of("commit", missed.round.fragment, missed.round.version)
    if late_s < 0.0:
        # A round ends without what its shard has not read to the end, so a contribution may be there and yet too late.
        return f"    {push}: arrived {-late_s:.3g} s before the end of {commit}, and was still being read then"
    return f"    {push}: missed {commit} by {late_s:.3g} s"


def _rise_share(before: float, after: float, largest: float) -> float:
    """Return by which share of itself a loss rose, negative if it fell; infinite for a rise from 0, which has no share.

    One that was near 0 beside the `largest` of its curve rose by a share of `NEAR_ZERO` of that: such a loss is noise. A loss
    of a loop of one's own may be 0, or negative (a log-likelihood).
    """
    if before:
        return (after - before) / max(abs(before), NEAR_ZERO * largest)
    return inf if after > before else 0.0


def _beside(own: float | None, others: float | None) -> str:
    return f"{own or 0:.3g} s" + ("" if others is None else f", the others' {others:.3g} s")


def _describe_isolations(history: History, learner: str) -> list[str]:
    return [
        f"{each.who} has isolated its incarnation {each.fields.incarnation} since {history.clock.at(each.at_s)}: "
        f"{describe_isolation(each.fields.offences, each.fields.reason)}"
        for each in history.quarantined
        if each.fields.learner == learner
    ]
