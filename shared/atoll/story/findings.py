"""Findings of a run, by cause: each cause once, and beneath it the findings that it explains; the most urgent first.

A finding that goes on comes before what has ended, the graver cause before the others, the newer finding before the older one.
So a shard that is dead now stands before the hundred outages that a long run has survived.

A finding compares a learner with the *other* learners, and a shard with its own usual pace, and names the figures it rests on
and where they are in the event log. Figures below the bounds here are not worth a finding; the stories of a round, a shard and
a learner have all figures. The causes are a closed list: `docs/how-to/ask-a-run.md` says what each means and what a person
does.

Two tables say which cause explains which finding: others of the *same culprit* (contributions over a slow link come too late
and are refused), or what fell mostly into its *time*, whoever it befell (while the disk is full, all uploads wait). They say
what is usual; a person checks it by the times. Nothing that had ended before a cause began is its effect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Literal, get_args

from atoll.base.wording import counted, few
from atoll.protocol.events import id_of
from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_isolation, describe_outlier
from atoll.run.history import History, RunClock, push_id
from atoll.run.process_views import Noted
from atoll.story.goodput import (
    LearnerShare,
    alignment_of_others,
    duration_of_others,
    longer_middle,
    middle,
    of_others,
    points_away,
    shares_of,
)
from atoll.story.lives import (
    SILENT_TIMES,
    LearnerAbsence,
    ShardOutage,
    absences_of,
    outages_of,
    owner_of,
    usual_pause_s,
)
from atoll.wire.events import SUPERSEDED_MAX, FilledEvent, QuarantinedEvent, RefusedContribution

Cause = Literal[
    "disk was full",
    "broker was away",
    "shard without owner",
    "share exceeded",
    "bad direction",
    "quarantine",
    "slow link",
    "slow learner",
    "learner was gone",
    "superseded",
    "refusals",
    "stale refusals",
    "clipped",
    "nothing merged",
]
GRAVITY: Final[tuple[Cause, ...]] = get_args(Cause)
"""The causes, the gravest first: what stops everybody, what harms the model, what harms one learner."""

TELLS_MORE: Final[Mapping[Cause, str]] = {
    "disk was full": "atoll doctor",
    "broker was away": "atoll doctor",
    "shard without owner": "atoll why shard {culprit}",
    "share exceeded": "atoll keys list FOLDER",
    "quarantine": "atoll why refused {culprit}",
    "refusals": "atoll why refused {culprit}",
    "stale refusals": "atoll why behind {culprit}",
    "clipped": "atoll why refused {culprit}",
    "bad direction": "atoll why learner {culprit}",
    "slow link": "atoll why behind {culprit}",
    "slow learner": "atoll why behind {culprit}",
    "learner was gone": "atoll why learner {culprit}",
    "superseded": "atoll fates",
    "nothing merged": "atoll why learner {culprit}",
}
"""The command that tells more of each cause; it takes the run (`--out`) as well."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing that stands out in a run.

    Attributes:
        cause: what it is, one of `Cause`.
        culprit: the learner or the shard that it is of, or "broker"; of a share that is exceeded, whose share it is.
        from_s, until_s: seconds since the Unix epoch, by the clock of who wrote the event; `until_s` None: it lasts to the end
            of the event log.
        text: a sentence with its figures, without its time.
        evidence: where its figures are in the event log.
        consequences: findings that this one explains; they have none of their own.
    """

    cause: Cause
    culprit: str
    text: str
    from_s: float
    until_s: float | None
    evidence: tuple[str, ...] = ()
    consequences: tuple[RunFinding, ...] = ()

    @property
    def command(self) -> str:
        """Return what a person types to be told more."""
        return TELLS_MORE[self.cause].format(culprit=self.culprit)

    def lines(self, clock: RunClock) -> list[str]:
        """Return it as lines for a person: the sentence, its time, its evidence, and beneath it what it has led to."""
        lines = [f"{self.cause}, {self.culprit}: {self.text}", f"    {clock.span(self.from_s, self.until_s)}"]
        lines += [f"    {line}" for line in self.evidence]
        for each in self.consequences:
            head, *rest = each.lines(clock)
            lines += [f"    so: {head}", *(f"    {line}" for line in rest)]
        return lines


HINDERED_MIN_S: Final = 1.0
NEAR_S: Final = 60.0
"""What waited again within this time waited for the same cause: one episode. After a longer time the broker was well."""
EPISODES_MAX: Final = 6
SHARDS_NAMED_MAX: Final = 3
HINDRANCES: Final[tuple[tuple[str, Cause, str], ...]] = (
    ("full", "disk was full", "it had no room"),
    ("away", "broker was away", "it did not answer: it was gone, cut off, or its disk was full"),
)
"""What commits note of it, what it is called, and why it made them wait."""


@dataclass(frozen=True, slots=True)
class HinderedWork:
    """A commit or an upload that waited for the broker: when it was under way, how long it waited, and where that is told."""

    from_s: float
    until_s: float
    waited_s: float
    is_commit: bool
    words: str


def hindered_commits(history: History) -> list[RunFinding]:
    """Return what kept commits and uploads waiting: a full disk or stream, or a broker that was away; one for each episode."""
    found: list[RunFinding] = []
    for word, cause, why in HINDRANCES:
        every = episodes(_hindered(history, word))
        kept = _worst(every)
        found += [
            _describe_episode(each, cause, why, left_out=len(every) - len(kept) if each is kept[-1] else 0)
            for each in kept
        ]
    return found


def episodes(hindered: Iterable[HinderedWork]) -> list[list[HinderedWork]]:
    """Return what waited in episodes, oldest first: within one no `NEAR_S` pass in which nothing waited."""
    found: list[list[HinderedWork]] = []
    until_s = 0.0
    for each in sorted(hindered, key=lambda one: one.from_s):
        if not found or each.from_s - until_s > NEAR_S:
            found.append([])
            until_s = each.until_s
        found[-1].append(each)
        until_s = max(until_s, each.until_s)
    return found


def _hindered(history: History, word: str) -> Iterator[HinderedWork]:
    for line in history.rounds:
        made = line.round
        before_s = made.away_s if word == "away" else 0.0
        waited_s = made.hindered.get(word, 0.0) + before_s
        if waited_s >= HINDERED_MIN_S:
            took_s, what = (
                (made.took_s, "from its call until it was visible") if before_s else (made.commit_s, "to commit")
            )
            told = (
                f"commit/{made.fragment}/{made.version} by {line.shard}: {waited_s:.3g} s of its {took_s:.3g} s {what}"
            )
            yield HinderedWork(line.at_s - took_s, line.at_s, waited_s, is_commit=True, words=told)
    if word != "full":
        return  # a learner notes only how long it waited for room
    for line, share in history.contributions():
        if share.full_s >= HINDERED_MIN_S:
            arrived_s = line.called_s + (share.arrived_s or 0.0)
            told = f"{push_id(line, share)}: its upload waited {share.full_s:.3g} s for room"
            yield HinderedWork(arrived_s - share.upload_s, arrived_s, share.full_s, is_commit=False, words=told)


def _worst(every: Sequence[list[HinderedWork]]) -> list[list[HinderedWork]]:
    """Return the episodes that are told, in order of time: the newest one, and those in which most was waited."""
    if len(every) <= EPISODES_MAX:
        return list(every)
    places = sorted(range(len(every) - 1), key=lambda place: sum(each.waited_s for each in every[place]), reverse=True)
    return [every[place] for place in sorted([*places[: EPISODES_MAX - 1], len(every) - 1])]


def _describe_episode(episode: Sequence[HinderedWork], cause: Cause, why: str, left_out: int) -> RunFinding:
    commits, uploads = [each for each in episode if each.is_commit], [each for each in episode if not each.is_commit]
    seconds = sum(each.waited_s for each in episode)
    evidence = [each.words for each in (*commits[:SHARDS_NAMED_MAX], *uploads[:SHARDS_NAMED_MAX])]
    if left_out:
        evidence.append(
            f"it was so at {counted(left_out, 'other time, which is', 'other times, which are')} not told here"
        )
    return RunFinding(
        cause,
        "broker",
        f"{counted(len(commits), 'round')} and {counted(len(uploads), 'upload')} waited {seconds:.3g} s in all, because {why}",
        from_s=min(each.from_s for each in episode),
        until_s=max(each.until_s for each in episode),
        evidence=tuple(evidence),
    )


def _without_owner(history: History, outage: ShardOutage) -> RunFinding:
    shard, until_s = outage.shard, None if outage.heir is None else outage.until_s
    fragments = ", ".join(map(str, history.fragments_of(shard)))
    stood = f"its fragments ({fragments}) stood still" if fragments else "its fragments stood still"
    last = next((line for line in reversed(history.rounds) if line.shard == shard and line.at_s <= outage.from_s), None)
    usual_s = usual_pause_s(history, shard)
    usual = "" if usual_s is None else f"; a round is usual every {usual_s:.3g} s"
    evidence = [] if last is None else [f"commit/{last.round.fragment}/{last.round.version} was its last before{usual}"]
    if outage.heir is None:
        others = sorted(who for who, at_s in history.last_s.items() if who != shard and at_s > history.last_s[shard])
        evidence.append(f"others wrote on: {', '.join(others[:SHARDS_NAMED_MAX]) or 'nobody'}")
        text = f"it has written nothing for the last {outage.lasted_s:.3g} s, and nobody took it over: {stood}"
    else:
        evidence.append(f"event serving of epoch {outage.heir.fields.epoch}: its next owner")
        text = f"it had no owner for {outage.lasted_s:.3g} s, until {owner_of(outage.heir)} took it over: {stood}"
    return RunFinding(
        "shard without owner", shard, text, from_s=outage.from_s, until_s=until_s, evidence=tuple(evidence)
    )


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


def quarantines(history: History) -> Iterator[RunFinding]:
    """Yield the incarnations that are isolated, each with the shards and fragments that read it no more, and those that do."""
    by_life = defaultdict[tuple[str, int], list[Noted[QuarantinedEvent]]](list)
    for each in history.quarantined:
        by_life[each.fields.learner, each.fields.incarnation].append(each)
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
        yield RunFinding(
            "quarantine",
            learner,
            f"{where}. Each shard judges by itself: {said}. {ISOLATION_CURE.capitalize()}",
            from_s=min(each.at_s for each in isolations),
            until_s=min(ended, default=None),
            evidence=tuple(_offences(history, learner, incarnation)),
        )


def exceeded_shares(history: History) -> list[RunFinding]:
    """Return those on whose subjects more than their share was stored."""
    by_name = defaultdict[str, list[Noted[FilledEvent]]](list)
    for each in history.filled:
        by_name[each.fields.subjects_of].append(each)
    return [
        RunFinding(
            "share exceeded",
            name,
            f"more than its share was stored on its subjects; {counted(sum(one.fields.removed for one in filled), 'message')} "
            "beyond it were removed; nobody else lost anything. Nobody signs chunks: they are from it, or from the broker of a "
            "region. If it goes on, revoke its key (`atoll keys revoke`), and that of a region if it goes on even then",
            from_s=filled[0].at_s,
            until_s=filled[-1].at_s,
            evidence=tuple(f"{each.who}: {each.fields.removed:,} removed" for each in filled[-NAMED_MAX:]),
        )
        for name, filled in sorted(by_name.items())
    ]


def bad_directions(history: History, shares: Sequence[LearnerShare]) -> Iterator[RunFinding]:
    """Yield the learners whose pseudo-gradients point elsewhere than the others' do."""
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
        yield RunFinding(
            "bad direction",
            share.learner,
            f"its contributions point {how}: cosine {share.aligned_with_others:.3g} with the other learners, whose own is "
            f"{others:.3g}, over {share.judged} rounds; look at its machine, its data and its learning rate",
            from_s=min(at_s for _, at_s, _ in judged),
            until_s=max(at_s for _, at_s, _ in judged),
            evidence=tuple(f"{push}: {cosine:.3g}" for cosine, _, push in sorted(judged)[:3]),
        )


Upload = tuple[float, str, float]
"""How long an upload took (s), its id, and when the event that tells of it was written (s)."""


def slow_links(history: History, shares: Sequence[LearnerShare]) -> Iterator[RunFinding]:
    """Yield the learners whose uploads take much longer than those of the others, and longer than a step.

    Uploads that were refused count too: those of the slowest links all come too late.
    """
    uploads = _uploads(history)
    usual_s = {learner: median(took_s for took_s, _, _ in pushes) for learner, pushes in uploads.items()}
    by_name = {share.learner: share for share in shares}
    size_bytes = middle(share.bytes for share in shares)
    for learner, pushes in sorted(uploads.items()):
        others_s = longer_middle(took_s for name, took_s in usual_s.items() if name != learner)
        share = by_name.get(learner)
        step_s = 0.0 if share is None else share.step_s or 0.0
        if others_s is None or len(pushes) < CONTRIBUTIONS_MIN:
            continue
        if usual_s[learner] > max(LINK_SLOWER * others_s, step_s):
            yield _slow_link(learner, pushes, share, others_s, size_bytes)


def _slow_link(
    learner: str, pushes: Sequence[Upload], share: LearnerShare | None, others_s: float, size_bytes: float | None
) -> RunFinding:
    own_s = median(took_s for took_s, _, _ in pushes)
    rate = f", so {size_bytes / own_s / 1e3:.3g} kB/s" if size_bytes else ""
    took_s, push, _ = max(pushes)
    merged, late = (0, 0) if share is None else (share.contributions, share.late)
    return RunFinding(
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


def _uploads(history: History) -> dict[str, list[Upload]]:
    found = defaultdict[str, list[Upload]](list)
    for line, share in history.contributions():
        if share.upload_s and not share.inline:
            found[share.learner].append((share.upload_s, push_id(line, share), line.at_s))
    for each in history.refused:
        if each.fields.upload_s:
            found[each.fields.learner].append((each.fields.upload_s, refused_id(each.fields), each.at_s))
    return found


def slow_learners(history: History, shares: Sequence[LearnerShare]) -> Iterator[RunFinding]:
    """Yield the learners whose inner steps take much longer than those of the others."""
    for share in shares:
        others = duration_of_others(shares, share.learner, lambda each: each.step_s)
        if share.step_s is None or others is None or share.step_s <= SLOWER * others:
            continue
        steps = of_others(shares, share.learner, lambda each: each.steps)
        # The learner made the first of these steps after it had adopted the version that its contribution is on.
        merged = history.contributions(share.learner)
        from_s = merged[0][1].adopted_at_s or merged[0][0].at_s
        yield RunFinding(
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


def absent_learners(history: History) -> Iterator[RunFinding]:
    """Yield when learners were gone without a farewell: the newest absences of each, and how many there were before."""
    by_learner = defaultdict[str, list[LearnerAbsence]](list)
    for each in absences_of(history):
        if each.gone_s >= GONE_MIN_S:
            by_learner[each.learner].append(each)
    for learner, every in by_learner.items():
        for each in every[-NAMED_MAX:]:
            evidence = [f"the last sign of incarnation {each.former} was at {history.clock.at(each.from_s)}"]
            if each.joined_s is not None:
                evidence.append(f"event joined of incarnation {each.heir} at {history.clock.at(each.joined_s)}")
            if each is every[-1] and len(every) > NAMED_MAX:
                evidence.append(f"it was gone {len(every) - NAMED_MAX} times before, which are not told here")
            ended = "it is still gone" if each.heir is None else f"then incarnation {each.heir} began"
            yield RunFinding(
                "learner was gone",
                learner,
                f"incarnation {each.former} left no word, and nothing was heard of the learner for {each.gone_s:.3g} s; "
                f"{ended}{each.describe_loss()}",
                from_s=each.from_s,
                until_s=each.until_s,
                evidence=tuple(evidence),
            )


def without_contributions(history: History) -> Iterator[RunFinding]:
    """Yield the learners that were there for some rounds and of which nothing was merged, in the whole run."""
    # The rounds that are kept do not tell this: they may be younger than the last contribution of a learner that left.
    judged = set(history.merged)
    left_s = {(each.who, each.fields.incarnation): each.at_s for each in history.left}
    fragments = len({line.round.fragment for line in history.rounds})
    for each in history.joined:
        if each.who in judged:
            continue
        until_s = left_s.get((each.who, each.fields.incarnation))
        since = [line for line in history.rounds if each.at_s < line.at_s and (until_s is None or line.at_s <= until_s)]
        # Every fragment twice: by then a learner has been called for all of them.
        if not since or len(since) < 2 * fragments:
            continue
        judged.add(each.who)
        refused = sum(one.fields.learner == each.who for one in history.refused)
        yield RunFinding(
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


def much_superseded(history: History) -> Iterator[RunFinding]:
    """Yield the learners of which new versions overwrite more than `SUPERSEDED_MAX` of what they train."""
    fragments = len({line.round.fragment for line in history.rounds})
    joined_s = {(each.who, each.fields.incarnation): each.at_s for each in history.joined}
    sampled = [(view.learner, life.newest) for view in history.learners.values() for life in view.lives.values()]
    for learner, newest in sampled:
        if newest is None:
            continue
        told, trained = newest.fields, newest.fields.tokens * fragments
        begun_s = joined_s.get((learner, told.incarnation))
        since = [line for line in history.rounds if (begun_s or 0.0) < line.at_s <= newest.at_s]
        # Each fragment some times: a first step that is compiled is another matter.
        if not trained or len(since) < ROUNDS_MIN * fragments or told.superseded <= SUPERSEDED_MAX * trained:
            continue
        yield RunFinding(
            "superseded",
            learner,
            f"{100 * told.superseded / trained:.0f} % of what it trained was overwritten by new versions, and never pushed",
            from_s=since[0].at_s if begun_s is None else begun_s,
            until_s=newest.at_s,
            evidence=(f"{told.superseded:,} of {trained:,} token-fragments, by its newest sample",),
        )


def many_refusals(history: History) -> Iterator[RunFinding]:
    """Yield the learners that had several contributions refused, those that came too late apart from the others."""
    for learner in sorted({each.fields.learner for each in history.refused}):
        own = [each for each in history.refused if each.fields.learner == learner]
        late = [each for each in own if each.fields.reason in TOO_LATE]
        other = [each for each in own if each.fields.reason not in TOO_LATE]
        causes: tuple[tuple[Cause, list[Noted[RefusedContribution]]], ...] = (
            ("stale refusals", late),
            ("refusals", other),
        )
        for cause, refused in causes:
            if len(refused) < REFUSED_MIN:
                continue
            reasons = ", ".join(sorted({each.fields.reason for each in refused}))
            yield RunFinding(
                cause,
                learner,
                f"{len(refused)} of its contributions were refused: {reasons}",
                from_s=refused[0].at_s,
                until_s=refused[-1].at_s,
                evidence=tuple(describe_refusal(each) for each in refused[:3] if each.fields.push),
            )


def many_clips(history: History) -> Iterator[RunFinding]:
    """Yield the learners of which several contributions were clipped."""
    for learner in sorted({share.learner for _, share in history.contributions() if share.norm_max is not None}):
        own = [(line, share) for line, share in history.contributions(learner) if share.norm_max is not None]
        if len(own) < REFUSED_MIN:
            continue
        evidence = [
            f"{push_id(line, share)} {describe_clip(share.norm or 0.0, share.norm_max or 0.0)}"
            for line, share in own[-2:]
        ]
        yield RunFinding(
            "clipped",
            learner,
            f"{len(own)} of its {len(history.contributions(learner))} merged contributions were clipped; {CLIP_CURE}",
            from_s=own[0][0].at_s,
            until_s=own[-1][0].at_s,
            evidence=tuple(evidence),
        )


def refused_id(one: RefusedContribution) -> str:
    """Return the id of a refused contribution."""
    return id_of("push", one.learner, one.incarnation, one.fragment, one.push)


def describe_refusal(one: Noted[RefusedContribution]) -> str:
    """Return one refusal with the measure that decided it, where the event log has that."""
    return f"{refused_id(one.fields)} was refused by {one.who}: {one.fields.reason}{describe_measure(one.fields)}"


def describe_measure(one: RefusedContribution) -> str:
    """Return the length of an outlier, and its bound; nothing for other reasons."""
    return f", {describe_outlier(one.norm or 0.0, one.norm_max)}" if one.norm_max else ""


def _served(history: History, shards: Sequence[str]) -> str:
    fragments = {shard: few(map(str, history.fragments_of(shard)), NAMED_MAX) for shard in shards[:NAMED_MAX]}
    named = [f"{shard} (fragments {numbers})" if numbers else shard for shard, numbers in fragments.items()]
    return few(named, NAMED_MAX, of=len(shards))


def _offences(history: History, learner: str, incarnation: int) -> list[str]:
    refused = [
        each for each in history.refused if (each.fields.learner, each.fields.incarnation) == (learner, incarnation)
    ]
    return [describe_refusal(each) for each in refused[:3] if each.fields.push]


SAME_CULPRIT: Final[Mapping[Cause, tuple[Cause, ...]]] = {
    "bad direction": ("quarantine", "refusals", "clipped", "nothing merged"),
    "quarantine": ("refusals", "nothing merged"),
    "slow link": ("stale refusals", "superseded", "nothing merged"),
    "slow learner": ("stale refusals", "superseded", "nothing merged"),
    "learner was gone": ("superseded", "nothing merged"),
    "refusals": ("nothing merged",),
    "stale refusals": ("nothing merged",),
}
"""What a cause explains of its own culprit."""
SAME_TIME: Final[Mapping[Cause, tuple[Cause, ...]]] = {
    "disk was full": ("shard without owner", "slow link", "learner was gone", "stale refusals", "superseded"),
    "broker was away": ("shard without owner", "slow link", "learner was gone", "stale refusals", "superseded"),
    "shard without owner": ("stale refusals",),
}
"""What a cause explains of everybody, if most of it fell into the time of the cause."""
MOSTLY: Final = 0.5
ENDS: Final[frozenset[Cause]] = frozenset({"shard without owner", "quarantine", "learner was gone", "nothing merged"})
"""Findings of which an event tells the end. Of the others `until_s` is only the newest measurement that they rest on."""
RECENT_S: Final = 60.0
"""Such a measurement of the last minute, or of the last usual pauses between rounds: what was measured goes on."""


def findings(history: History) -> list[RunFinding]:
    """Return what stands out by cause, the most urgent first; nothing for a run that goes as it should.

    A history that keeps only the newest rounds, as that of a page does, tells nothing that had ended before them.
    """
    shares = shares_of(history.rounds)
    found = [
        *hindered_commits(history),
        *(_without_owner(history, each) for each in outages_of(history)),
        *bad_directions(history, shares),
        *quarantines(history),
        *exceeded_shares(history),
        *slow_links(history, shares),
        *slow_learners(history, shares),
        *absent_learners(history),
        *much_superseded(history),
        *many_refusals(history),
        *many_clips(history),
        *without_contributions(history),
    ]
    kept_s = history.forgotten_until_s
    found = [each for each in found if each.until_s is None or kept_s is None or each.until_s >= kept_s]
    if not found:
        return []
    usual_s = max((usual_pause_s(history, shard) or 0.0 for shard in history.shards()), default=0.0)
    recent_s = history.newest_s - max(RECENT_S, SILENT_TIMES * usual_s)
    return by_urgency(by_cause(found, history.newest_s), recent_s)


def by_urgency(found: Iterable[RunFinding], recent_s: float) -> list[RunFinding]:
    """Return findings in the order in which a person needs them; what was measured after `recent_s` goes on."""

    def urgency(each: RunFinding) -> tuple[bool, int, float]:
        goes_on = each.until_s is None or (each.cause not in ENDS and each.until_s >= recent_s)
        return not goes_on, GRAVITY.index(each.cause), -each.from_s

    return sorted(found, key=urgency)


def by_cause(found: list[RunFinding], newest_s: float) -> list[RunFinding]:
    """Return the findings that no other one explains, each with those that it does; causes come before what they explain.

    A finding with consequences passes them on to its cause: a reader sees one level.
    """
    beneath: dict[int, int] = {}
    for place, each in enumerate(found):
        cause = next((at for at, one in enumerate(found) if at != place and _explains(one, each, newest_s)), None)
        if cause is not None:
            beneath[place] = cause
    consequences = defaultdict[int, list[RunFinding]](list)
    for place in beneath:
        root = place
        while root in beneath:
            root = beneath[root]
        consequences[root].append(found[place])
    return [
        replace(each, consequences=tuple(consequences[place]))
        for place, each in enumerate(found)
        if place not in beneath
    ]


def _explains(cause: RunFinding, other: RunFinding, newest_s: float) -> bool:
    if cause.culprit == other.culprit and other.cause in SAME_CULPRIT.get(cause.cause, ()):
        # The refusals before a quarantine are the offences that it is for.
        return cause.cause == "quarantine" or other.until_s is None or other.until_s >= cause.from_s
    if other.cause not in SAME_TIME.get(cause.cause, ()):
        return False
    ended_s = newest_s if other.until_s is None else other.until_s
    until_s = newest_s if cause.until_s is None else cause.until_s
    within_s = min(until_s, ended_s) - max(cause.from_s, other.from_s)
    return within_s >= MOSTLY * (ended_s - other.from_s)
