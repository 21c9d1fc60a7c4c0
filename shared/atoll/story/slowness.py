"""The slow parts of a run: the largest shares of its time that were lost, each with a figure and the command that tells more.

There are two wholes, and no second belongs to both. *Learners' time* is the learner-seconds present of `atoll.story.goodput`:
what of it was no stepping, and what a slow learner's steps took beyond those of the others. *Rounds' time* is the sum of all
rounds from call to commit. Learners never wait for a round, so its parts cost versions that come late, not idle time. Other
findings are those of `atoll.story.findings`.

Waiting for text happens inside the training loop's step. The event log has the time of whole steps, so that wait
is not told apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any, Final, Literal

from atoll.base.wording import counted
from atoll.run.history import History, RoundLine
from atoll.story.findings import RunFinding, findings
from atoll.story.goodput import TimePresent, duration_of_others, presences, shares_of, summed
from atoll.story.lives import absences_of, adoption_delays
from atoll.story.telling import SILENT

Whole = Literal["learners", "rounds"]
SHARE_MIN: Final = 0.01
"""A smaller share of its whole is not told."""
SLOWER_MIN: Final = 1.2
"""Step times of equal learners differ by less than this factor."""
LOST_MAX: Final = 12
FINDINGS_MAX: Final = 12


@dataclass(frozen=True, slots=True)
class LostTime:
    """`seconds` of a whole that were lost, and which `share` of it they are, 0..1; `who` is a learner, or "" for all rounds."""

    of: Whole
    what: str
    who: str
    seconds: float
    share: float
    sentence: str
    command: str

    def as_json(self) -> dict[str, Any]:
        """Return it in plain JSON values."""
        return {**asdict(self), "seconds": round(self.seconds, 3), "share": round(self.share, 5)}


@dataclass(frozen=True, slots=True)
class Slowness:
    """Slow parts: time lost, the largest share first; what stands out, and how much more does; what the event log lacks."""

    lost: tuple[LostTime, ...]
    findings: tuple[RunFinding, ...]
    notes: tuple[str, ...]
    left_out: int = 0


def slowness(history: History) -> Slowness:
    """Return what was slow."""
    there = presences(history)
    whole_s = summed(there.values()).present_s
    rounds_s = sum(line.round.took_s for line in history.rounds)
    parts = chain(
        _of_learners(history, there, whole_s),
        _slower_steps(history, there, whole_s),
        _of_rounds(history.rounds, rounds_s),
    )
    lost = sorted((part for part in parts if part.share >= SHARE_MIN), key=lambda part: part.share, reverse=True)
    found = findings(history)
    left_out = max(0, len(found) - FINDINGS_MAX)
    cut = [describe_left_out(left_out)] if left_out else []
    notes = (*cut, *_notes(history, there))
    return Slowness(tuple(lost[:LOST_MAX]), tuple(found[:FINDINGS_MAX]), notes, left_out)


def describe_left_out(count: int) -> str:
    """Return that more stands out than is told here, and which command tells all of it."""
    more = counted(count, "more finding stands", "more findings stand")
    return f"{more} out, less urgent than these: `atoll why` names all"


def _of_learners(history: History, there: Mapping[str, TimePresent], whole_s: float) -> Iterator[LostTime]:
    """Yield, by learner, the time present that was no stepping; its parts are cut so that they never exceed it."""
    gone_s: defaultdict[str, float] = defaultdict(float)
    for each in absences_of(history):
        if each.until_s is not None:
            gone_s[each.learner] += each.gone_s
    for learner, one in there.items():
        left_s = max(0.0, one.present_s - one.stepping_s)
        away_s = gone_s[learner]
        # By its newest sample: the share of its time that it was inside `island.step`.
        newest = history.learners[learner].curve.newest if learner in history.learners else None
        overhead = 0.0 if newest is None else newest.fields.overhead
        inside_s = overhead * max(0.0, one.present_s - one.starting_s - one.joining_s - away_s)
        told = (
            ("starting", one.starting_s, f"started {_times(one.lives)}: loaded its libraries and what it trains"),
            ("joining", one.joining_s, f"joined {_times(one.lives)}: found the run and read its values"),
            (
                "compiling",
                one.compiling_s,
                "had joined and made no step yet: it compiled its step, or waited for its turn to",
            ),
            ("silence", away_s, "was gone between its last sign of life and its next start"),
            ("adoption", inside_s, "was inside `island.step`: it adopted versions and handed over its own"),
        )
        for what, claimed_s, sentence in told:
            seconds = min(left_s, claimed_s)
            left_s -= seconds
            yield _lost("learners", what, learner, seconds, whole_s, sentence, f"atoll why learner {learner}")
        rest = (
            "did not step, and the event log does not tell why: "
            "it compiled kernels, wrote a checkpoint, pushed its last or was dead"
        )
        yield _lost("learners", "unexplained", learner, left_s, whole_s, rest, "atoll why goodput")


def _slower_steps(history: History, there: Mapping[str, TimePresent], whole_s: float) -> Iterator[LostTime]:
    """Yield what the steps of a learner took longer than the same number of steps of the others' median."""
    shares = shares_of(history.rounds)
    for share in shares:
        others_s, one = duration_of_others(shares, share.learner, lambda each: each.step_s), there.get(share.learner)
        if one is None or others_s is None or share.step_s is None or share.step_s < SLOWER_MIN * others_s:
            continue
        seconds = one.stepping_s * (1.0 - others_s / share.step_s)
        sentence = f"stepped in {share.step_s:.3g} s, while the median of the others is {others_s:.3g} s"
        command = f"atoll why behind {share.learner}"
        yield _lost("learners", "slow learner", share.learner, seconds, whole_s, sentence, command)


def _of_rounds(rounds: Iterable[RoundLine], whole_s: float) -> Iterator[LostTime]:
    quorum_s = grace_s = queued_s = merge_s = commit_s = broker_s = 0.0
    for line in rounds:
        made, phases = line.round, line.round.phases
        hindered_s = min(sum(made.hindered.values()), phases.commit_s)
        before_s = min(made.away_s, phases.quorum_wait_s)
        quorum_s, grace_s = quorum_s + phases.quorum_wait_s - before_s, grace_s + phases.grace_s
        queued_s, merge_s = queued_s + phases.queued_s, merge_s + phases.merge_s
        commit_s, broker_s = commit_s + phases.commit_s - hindered_s, broker_s + hindered_s + before_s
    for what, seconds, sentence, command in (
        ("quorum", quorum_s, "waited for the quorum", "atoll why"),
        ("grace", grace_s, "waited after the quorum, for those that were still to answer", "atoll why grace"),
        ("queue", queued_s, "waited for their shard, which was busy with other rounds", "atoll why"),
        ("merge", merge_s, "were merged", "atoll why"),
        ("commit", commit_s, "were written to the broker", "atoll why"),
        ("broker", broker_s, "stood still, because the broker was full or away", "atoll doctor"),
    ):
        yield _lost("rounds", what, "", seconds, whole_s, sentence, command)


def _lost(of: Whole, what: str, who: str, seconds: float, whole_s: float, sentence: str, command: str) -> LostTime:  # noqa: PLR0913, PLR0917  (one field each)
    share = min(1.0, max(0.0, seconds / whole_s)) if whole_s > 0.0 else 0.0
    return LostTime(of, what, who, max(0.0, seconds), share, sentence, command)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _notes(history: History, there: Mapping[str, TimePresent]) -> Iterator[str]:
    if not there:
        yield f"{SILENT} how long learners stepped: no contribution of this run notes a step time"
    delays = [delay for learner in history.learner_names() for delay in adoption_delays(history, learner)]
    if delays:
        yield f"a learner adopts a version {median(delays):.3g} s after that is visible (median, by two clocks)"
    yield f"{SILENT} how long learners waited for text: that is within the time of their steps"
