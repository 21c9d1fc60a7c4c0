"""What stands out of learners: slow links and steps, absences, refusals, quarantine, directions, shares, superseded.

A learner is compared with the *other* learners, because there is no absolute measure of a good step time or a good link.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from atoll.base.wording import counted, few
from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_isolation, describe_outlier
from atoll.run.event_fields import SUPERSEDED_MAX, FilledEvent, QuarantineEvent, RefusedContribution
from atoll.story.absences import LearnerAbsence, absences_of
from atoll.story.attribution import (
    LearnerShare,
    alignment_of_others,
    duration_of_others,
    longer_middle,
    middle,
    of_others,
    points_away,
)
from atoll.story.history import History, Noted, push_id
from atoll.story.run_finding import RunFinding, finding

SLOWER: Final = 2.0
"""A learner whose steps take this many times those of the others is slow."""
LINK_SLOWER: Final = 3.0
CONTRIBUTIONS_MIN: Final = 2
REFUSED_MIN: Final = 3
ROUNDS_MIN: Final = 8
"""Rounds of each fragment before what is superseded is judged."""
TOO_LATE: Final = frozenset({"stale", "chunks_gone"})
"""Reasons of refusals that a learner meets because it is late, and for no fault in what it sent."""
NAMED_MAX: Final = 4
GONE_MIN_S: Final = 1.0


def quarantines(history: History) -> list[RunFinding]:
    """Return the incarnations that are isolated, each with the shards and fragments that read it no more, and those that do."""
    by_life: dict[tuple[str, int], list[Noted[QuarantineEvent]]] = {}
    for each in history.quarantined:
        by_life.setdefault((each.fields.learner, each.fields.incarnation), []).append(each)
    found = []
    for (learner, incarnation), isolations in sorted(by_life.items()):
        shards = {each.who for each in isolations}
        others = [shard for shard in history.shards() if shard not in shards]
        reads = "reads" if len(others) == 1 else "read"
        still = f"; {_served(history, others)} still {reads} it" if others else "; no shard reads it any more"
        said = ", ".join(
            f"{each.who} after {describe_isolation(each.fields.offences, each.fields.reason)}"
            for each in isolations[:NAMED_MAX]
        )
        where = f"its incarnation {incarnation} is isolated at {_served(history, sorted(shards))}{still}"
        ended = [each.at_s for each in history.joined if each.who == learner and each.fields.incarnation > incarnation]
        found.append(
            finding(
                "quarantine",
                learner,
                f"{where}. Each shard judges by itself: {said}. {ISOLATION_CURE.capitalize()}",
                from_s=min(each.at_s for each in isolations),
                until_s=min(ended, default=None),
                evidence=tuple(_offences(history, learner, incarnation)),
            )
        )
    return found


def exceeded_shares(history: History) -> list[RunFinding]:
    """Return those on whose subjects more than their share was stored."""
    by_name: dict[str, list[Noted[FilledEvent]]] = {}
    for each in history.filled:
        by_name.setdefault(each.fields.subjects_of, []).append(each)
    return [
        finding(
            "share exceeded",
            name,
            f"more than its share was stored on its subjects; {counted(sum(each.fields.removed for each in told), 'message')} "
            "beyond it were removed; nobody else lost anything. Nobody signs chunks: they are from it, or from the broker of a "
            "region. If it goes on, revoke its key (`atoll keys revoke`), and that of a region if it goes on even then",
            from_s=told[0].at_s,
            until_s=told[-1].at_s,
            evidence=tuple(f"{each.who}: {each.fields.removed:,} removed" for each in told[-NAMED_MAX:]),
        )
        for name, told in sorted(by_name.items())
    ]


def bad_directions(history: History, shares: Sequence[LearnerShare]) -> list[RunFinding]:
    """Return the learners whose pseudo-gradients point elsewhere than the others' do."""
    found = []
    for share in shares:
        others = alignment_of_others(shares, share.learner)
        if not points_away(share, others) or share.aligned_with_others is None:
            continue
        how = "against the others" if share.aligned_with_others < -0.1 * (others or 0.0) else "nowhere, like noise"
        judged = [
            (each.aligned_with_others, line.at_s, push_id(line, each))
            for line, each in history.contributions(share.learner)
            if each.aligned_with_others is not None
        ]
        found.append(
            finding(
                "bad direction",
                share.learner,
                f"its contributions point {how}: cosine {share.aligned_with_others:.3g} with the other learners, whose own is "
                f"{others:.3g}, over {share.judged} rounds; look at its machine, its data and its learning rate",
                from_s=min(at_s for _, at_s, _ in judged),
                until_s=max(at_s for _, at_s, _ in judged),
                evidence=tuple(f"{push}: {cosine:.3g}" for cosine, _, push in sorted(judged)[:3]),
            )
        )
    return found


def slow_links(history: History, shares: Sequence[LearnerShare]) -> list[RunFinding]:
    """Return the learners whose uploads take much longer than those of the others, and longer than a step.

    Uploads that were refused count too: those of the slowest links all come too late.
    """
    uploads = _uploads(history)
    usual_s = {learner: median(took_s for took_s, _, _ in pushes) for learner, pushes in uploads.items()}
    by_name = {share.learner: share for share in shares}
    size_bytes = middle(share.bytes for share in shares)
    found = []
    for learner, pushes in sorted(uploads.items()):
        own_s, others_s = usual_s[learner], longer_middle(took_s for name, took_s in usual_s.items() if name != learner)
        share = by_name.get(learner)
        step_s = None if share is None else share.step_s
        if others_s is None or len(pushes) < CONTRIBUTIONS_MIN or own_s <= max(LINK_SLOWER * others_s, step_s or 0.0):
            continue
        rate = f", so {size_bytes / own_s / 1e3:.3g} kB/s" if size_bytes else ""
        took_s, push, _ = max(pushes)
        merged, late = (0, 0) if share is None else (share.contributions, share.late)
        found.append(
            finding(
                "slow link",
                learner,
                f"an upload of {size_bytes or 0:,.0f} bytes takes {own_s:.3g} s{rate}; the others' {others_s:.3g} s",
                from_s=min(at_s - one_s for one_s, _, at_s in pushes),
                until_s=max(at_s for _, _, at_s in pushes),
                evidence=(
                    f"{push}: its upload took {took_s:.3g} s",
                    f"of {counted(len(pushes), 'upload')} {merged} were merged, {late} of these late"
                    + ("; the others were refused" if merged < len(pushes) else ""),
                ),
            )
        )
    return found


def _uploads(history: History) -> dict[str, list[tuple[float, str, float]]]:
    """Return, by learner, how long each known upload took, its id, and when the event that tells of it was written."""
    found: dict[str, list[tuple[float, str, float]]] = {}
    for line, share in history.contributions():
        if share.upload_s and not share.inline:
            found.setdefault(share.learner, []).append((share.upload_s, push_id(line, share), line.at_s))
    for each in history.refused:
        if each.fields.upload_s:
            told = (each.fields.upload_s, refused_id(each.fields), each.at_s)
            found.setdefault(each.fields.learner, []).append(told)
    return found


def slow_learners(history: History, shares: Sequence[LearnerShare]) -> list[RunFinding]:
    """Return the learners whose inner steps take much longer than those of the others."""
    found = []
    for share in shares:
        others = duration_of_others(shares, share.learner, lambda each: each.step_s)
        if share.step_s is None or others is None or share.step_s <= SLOWER * others:
            continue
        steps = of_others(shares, share.learner, lambda each: each.steps)
        # The learner made the first of these steps after it had adopted the version that its contribution is on.
        merged = history.contributions(share.learner)
        from_s = merged[0][1].adopted_at_s or merged[0][0].at_s
        found.append(
            finding(
                "slow learner",
                share.learner,
                f"its inner step takes {share.step_s:.3g} s, {share.step_s / others:.3g} times the others' {others:.3g} s",
                from_s=from_s,
                until_s=merged[-1][0].at_s,
                evidence=(
                    f"a contribution of it holds {share.steps or 0:.3g} steps, of the others {steps or 0:.3g}",
                    f"its mean share of a round's weight is {share.weight_share:.1%}",
                ),
            )
        )
    return found


def absent_learners(history: History) -> list[RunFinding]:
    """Return when learners were gone without a farewell: the newest absences of each, and how many there were before."""
    by_learner: dict[str, list[LearnerAbsence]] = {}
    for each in absences_of(history):
        if each.gone_s >= GONE_MIN_S:
            by_learner.setdefault(each.learner, []).append(each)
    found = []
    for learner, every in by_learner.items():
        for each in every[-NAMED_MAX:]:
            evidence = [f"the last sign of incarnation {each.former} was at {history.clock.at(each.from_s)}"]
            if each.joined_s is not None:
                evidence.append(f"event joined of incarnation {each.heir} at {history.clock.at(each.joined_s)}")
            if each is every[-1] and len(every) > NAMED_MAX:
                evidence.append(f"it was gone {len(every) - NAMED_MAX} times before, which are not told here")
            ended = "it is still gone" if each.heir is None else f"then incarnation {each.heir} began"
            found.append(
                finding(
                    "learner was gone",
                    learner,
                    f"incarnation {each.former} left no word, and nothing was heard of the learner for {each.gone_s:.3g} s; "
                    f"{ended}{each.lost_told()}",
                    from_s=each.from_s,
                    until_s=each.until_s,
                    evidence=tuple(evidence),
                )
            )
    return found


def without_contributions(history: History) -> list[RunFinding]:
    """Return the learners that were there for some rounds and of which nothing was merged, in the whole run."""
    # The rounds that are kept do not tell this: they may be younger than the last contribution of a learner that left.
    told = set(history.merged)
    left_s = {(each.who, each.fields.incarnation): each.at_s for each in history.left}
    fragments = len({line.round.fragment for line in history.rounds})
    found = []
    for each in history.joined:
        if each.who in told:
            continue
        until_s = left_s.get((each.who, each.fields.incarnation))
        since = [line for line in history.rounds if each.at_s < line.at_s and (until_s is None or line.at_s <= until_s)]
        # Every fragment twice: by then a learner has been called for all of them.
        if not since or len(since) < 2 * fragments:
            continue
        told.add(each.who)
        refused = sum(one.fields.learner == each.who for one in history.refused)
        found.append(
            finding(
                "nothing merged",
                each.who,
                f"it joined, and none of its contributions entered one of the {len(since)} rounds since",
                from_s=each.at_s,
                until_s=until_s,
                evidence=(
                    f"{refused} of its contributions were refused",
                    "the event log does not tell why the others never arrived: look at its link and its log",
                ),
            )
        )
    return found


def much_superseded(history: History) -> list[RunFinding]:
    """Return the learners of which new versions overwrite more than `SUPERSEDED_MAX` of what they train."""
    fragments = len({line.round.fragment for line in history.rounds})
    joined_s = {(each.who, each.fields.incarnation): each.at_s for each in history.joined}
    found = []
    for life, newest in history.newest_samples.items():
        told, trained = newest.fields, newest.fields.tokens * fragments
        since = [line for line in history.rounds if joined_s.get(life, 0.0) < line.at_s <= newest.at_s]
        # Each fragment some times: a first step that is compiled is another matter.
        if not trained or len(since) < ROUNDS_MIN * fragments or told.superseded <= SUPERSEDED_MAX * trained:
            continue
        found.append(
            finding(
                "superseded",
                newest.who,
                f"{100 * told.superseded / trained:.0f} % of what it trained was overwritten by new versions, and never pushed",
                from_s=joined_s.get(life, since[0].at_s),
                until_s=newest.at_s,
                evidence=(f"{told.superseded:,} of {trained:,} token-fragments, by its newest sample",),
            )
        )
    return found


def many_refusals(history: History) -> list[RunFinding]:
    """Return the learners that had several contributions refused, those that came too late apart from the others."""
    found = []
    for learner in sorted({each.fields.learner for each in history.refused}):
        own = [each for each in history.refused if each.fields.learner == learner]
        late = [each for each in own if each.fields.reason in TOO_LATE]
        other = [each for each in own if each.fields.reason not in TOO_LATE]
        for cause, refused in (("stale refusals", late), ("refusals", other)):
            if len(refused) < REFUSED_MIN:
                continue
            reasons = ", ".join(sorted({each.fields.reason for each in refused}))
            found.append(
                finding(
                    "stale refusals" if cause == "stale refusals" else "refusals",
                    learner,
                    f"{len(refused)} of its contributions were refused: {reasons}",
                    from_s=refused[0].at_s,
                    until_s=refused[-1].at_s,
                    evidence=tuple(refusal_told(each) for each in refused[:3] if each.fields.push),
                )
            )
    return found


def many_clips(history: History) -> list[RunFinding]:
    """Return the learners of which several contributions were clipped."""
    found = []
    for learner in sorted({share.learner for _, share in history.contributions() if share.norm_max is not None}):
        own = [(line, share) for line, share in history.contributions(learner) if share.norm_max is not None]
        if len(own) < REFUSED_MIN:
            continue
        told = [
            f"{push_id(line, share)} {describe_clip(share.norm or 0.0, share.norm_max or 0.0)}"
            for line, share in own[-2:]
        ]
        found.append(
            finding(
                "clipped",
                learner,
                f"{len(own)} of its {len(history.contributions(learner))} merged contributions were clipped; {CLIP_CURE}",
                from_s=own[0][0].at_s,
                until_s=own[-1][0].at_s,
                evidence=tuple(told),
            )
        )
    return found


def refused_id(one: RefusedContribution) -> str:
    """Return the id of a refused contribution."""
    return f"push/{one.learner}/{one.incarnation}/{one.fragment}/{one.push}"


def refusal_told(one: Noted[RefusedContribution]) -> str:
    """Return one refusal with the measure that decided it, where the event log has that."""
    return f"{refused_id(one.fields)} was refused by {one.who}: {one.fields.reason}{measure_told(one.fields)}"


def measure_told(one: RefusedContribution) -> str:
    """Return the length of an outlier, and its bound; nothing for other reasons, or an event of an earlier release."""
    if not one.norm_max:
        return ""
    return f", {describe_outlier(one.norm or 0.0, one.norm_max)}"


def _served(history: History, shards: Sequence[str]) -> str:
    """Return shards with their fragments, bounded."""
    told = []
    for shard in shards[:NAMED_MAX]:
        fragments = history.fragments_of(shard)
        numbers = few(map(str, fragments), NAMED_MAX)
        told.append(f"{shard} (fragments {numbers})" if fragments else shard)
    return few(told, NAMED_MAX, of=len(shards))


def _offences(history: History, learner: str, incarnation: int) -> list[str]:
    refused = [
        each for each in history.refused if (each.fields.learner, each.fields.incarnation) == (learner, incarnation)
    ]
    return [refusal_told(each) for each in refused[:3] if each.fields.push]
