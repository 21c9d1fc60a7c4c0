"""The story of a learner: its lives, what it contributed beside the others, its refusals, its latest contributions."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.run.decisions import describe_isolation
from atoll.run.event_fields import QuarantineEvent
from atoll.story.absences import LearnerAbsence, absences_of
from atoll.story.attribution import alignment_of_others, duration_of_others, of_others, points_away, shares_of
from atoll.story.history import History
from atoll.story.learner_findings import measure_told
from atoll.story.telling import LATEST, SILENT, answer_told


def learner_story(history: History, learner: str) -> list[str]:
    """Return what a learner did: its lives, what it contributed beside the others, its refusals, its latest contributions."""
    shares, clock = shares_of(history.rounds), history.clock
    own = next((share for share in shares if share.learner == learner), None)
    told = [f"learner {learner}", ""]
    lives = [
        (each.at_s, f"joined as incarnation {each.fields.incarnation} after {each.fields.took_s:.3g} s")
        for each in history.joined
        if each.who == learner
    ]
    lives += [
        (each.at_s, f"left: {each.fields.tokens:,} tokens in {each.fields.steps:,} steps")
        for each in history.left
        if each.who == learner
    ]
    lives += [(each.from_s, _gone(each)) for each in absences_of(history) if each.learner == learner]
    lives += [
        (each.at_s, f"{each.who} put incarnation {each.fields.incarnation} into quarantine: {_offences(each.fields)}")
        for each in history.quarantined
        if each.fields.learner == learner
    ]
    told += [f"  {clock.at(at_s)}  {words}" for at_s, words in sorted(lives)] or [f"  when it joined, {SILENT}"]
    if own is None:
        return [*told, "", "no contribution of it was merged", *_refusals(history, learner)]
    figures = [
        ("contributions merged", own.contributions, None, "{:,}"),
        ("of them late", own.late, None, "{:,}"),
        (
            "share of a round's weight",
            own.weight_share,
            of_others(shares, learner, lambda each: each.weight_share),
            "{:.1%}",
        ),
        ("inner steps in a contribution", own.steps, of_others(shares, learner, lambda each: each.steps), "{:.4g}"),
        ("inner step, s", own.step_s, duration_of_others(shares, learner, lambda each: each.step_s), "{:.3g}"),
        ("upload, s", own.upload_s, duration_of_others(shares, learner, lambda each: each.upload_s), "{:.3g}"),
        ("cosine with the merge", own.aligned, of_others(shares, learner, lambda each: each.aligned), "{:.3g}"),
        (
            "cosine with the other learners",
            own.aligned_with_others,
            alignment_of_others(shares, learner),
            "{:.3g}",
        ),
        ("left of its length after correction", own.shortened, None, "{:.1%}"),
        ("training loss", own.loss, of_others(shares, learner, lambda each: each.loss), "{:.4g}"),
    ]
    told += ["", f"  {'what it contributed (medians)':<38}{learner:>14}{'the others':>14}"]
    for name, mine, others, form in figures:
        told.append(
            f"  {name:<38}{'not told' if mine is None else form.format(mine):>14}"
            f"{'' if others is None else form.format(others):>14}".rstrip()
        )
    if points_away(own, alignment_of_others(shares, learner)):
        told.append("  it points elsewhere than the others: look at its machine, its data and its learning rate")
    told += _refusals(history, learner)
    told += ["", "its latest contributions"]
    told += [f"  {answer_told(line, share)}" for line, share in history.contributions(learner)[-LATEST:]]
    return told


def _gone(each: LearnerAbsence) -> str:
    """Return when a learner was gone: the last sign of a life, for how long nothing was heard, and what was lost."""
    told = f"was last heard: incarnation {each.former} left no word; it was gone for {each.gone_s:.3g} s"
    if each.joined_s is None or each.until_s is None:
        return f"{told}, to the end of the event log{each.lost_told()}"
    joined = f"incarnation {each.heir} began, which joined {each.joined_s - each.until_s:.3g} s later"
    return f"{told}, until {joined}{each.lost_told()}"


def _offences(told: QuarantineEvent) -> str:
    return describe_isolation(told.offences, told.reason)


def _refusals(history: History, learner: str) -> Sequence[str]:
    refused = [each for each in history.refused if each.fields.learner == learner]
    if not refused:
        return []
    told = [
        f"  {history.clock.at(each.at_s)}  push {each.fields.push} of fragment {each.fields.fragment}: {each.fields.reason}"
        f"{measure_told(each.fields)}"
        for each in refused[-LATEST:]
    ]
    return ["", f"{len(refused)} of its contributions were refused", *told]
