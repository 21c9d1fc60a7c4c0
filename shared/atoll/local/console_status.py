"""From a moment of a run to its status, and to the lines that `atoll status` prints without `--json`: pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from atoll.base.wording import counted
from atoll.local.console import ConsolePicture, status_line
from atoll.local.console_tables import TopMoment, heading, standing_at
from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_isolation
from atoll.run.hearing import Hearing
from atoll.run.links import byte_ledger
from atoll.run.process_views import LearnerView
from atoll.run.standing import FragmentStatus, LearnerStatus, RunStatus, ShardStatus

NAMED_MAX: Final = 4
RECENT_S: Final = 600.0


def status_of(moment: TopMoment, broker: str) -> RunStatus:
    """Return the status of a run at a moment; `broker` is the address that answered."""
    picture, view = moment.picture, moment.picture.view
    standing = standing_at(moment)
    hearing = moment.hearing
    learners = tuple(_learner(moment, hearing, learner) for _, learner in sorted(view.learners.items()))
    lags = [each.lag_versions for each in learners if each.state == "training" and each.lag_versions is not None]
    owners = {shard: host for host in picture.hosts() for shard in host.owns}
    shards = []
    for shard in range(picture.protocol.shards):
        owner = owners.get(shard)
        heard_s = None if owner is None or owner.heard_s is None else picture.now_s - owner.heard_s
        shards.append(ShardStatus(shard=shard, served=owner is not None, heard_s=_rounded(heard_s)))
    return RunStatus(
        run=picture.run,
        standing=standing.word,
        waits_for=standing.waits_for,
        unheard=standing.unheard,
        broker=broker,
        tokens=view.run_tokens,
        tokens_target=picture.target,
        tokens_per_s=round(picture.tokens_per_s, 3),
        commits=view.commits,
        quorum=picture.protocol.quorum,
        bits_per_byte=view.validations[-1].validation.bits_per_byte if view.validations else None,
        goodput=_rounded(picture.goodput),
        bytes_per_token=_rounded(byte_ledger(view, picture.protocol.fragments).per_token("learner")),
        lag_versions_max=max(lags, default=None),
        faults=moment.timeline.faults,
        learners=learners,
        shards=tuple(shards),
        fragments=tuple(
            FragmentStatus(fragment=fragment, version=known.version, contributors=known.contributors)
            for fragment, known in sorted(view.fragments.items())
        ),
        quarantined=tuple(sorted({told.learner for told in view.quarantined})),
        clipped=_clipped(moment),
    )


def status_lines(moment: TopMoment, founded_at_s: float | None = None) -> str:
    """Return the lines for a person: what the run does and waits for, the run in one line, who is isolated or clipped.

    `founded_at_s` is from the run record. Without it the run began with the first entry of its event log.
    """
    isolated = [
        f"in quarantine: {told.learner}, {describe_isolation(told.offences, told.reason)}; {ISOLATION_CURE}"
        for told in moment.picture.view.quarantined[-NAMED_MAX:]
    ]
    return "\n".join(
        [heading(moment), status_line(aged(moment, founded_at_s)), *isolated, *_clipped(moment)[:NAMED_MAX]]
    )


def _clipped(moment: TopMoment) -> tuple[str, ...]:
    """Return, by learner, that contributions were clipped within `RECENT_S`, and the newest of them."""
    return tuple(
        f"{name}: {counted(clips.count, 'contribution was', 'contributions were')} clipped, the last {moment.ago(clips.at_s)} "
        f"ago, {describe_clip(clips.norm, clips.norm_max)}; {CLIP_CURE}"
        for name, clips in sorted(moment.picture.view.sums.clipped.items())
        if moment.wall_s - clips.at_s <= RECENT_S
    )


def aged(moment: TopMoment, founded_at_s: float | None = None) -> ConsolePicture:
    """Return the picture of a moment with the age of its run; `founded_at_s` as in `status_lines`."""
    return replace(moment.picture, run_s=_age_s(moment, founded_at_s))


def _age_s(moment: TopMoment, founded_at_s: float | None) -> float:
    """Return the age of the run, or how long it lasted if it has ended."""
    timeline = moment.timeline
    until_s = timeline.newest_s if moment.has_ended and timeline.newest_s else moment.wall_s
    began_s = timeline.began_s if founded_at_s is None else founded_at_s
    # Two machines may disagree about the time: an age is never below zero.
    return 0.0 if began_s is None else max(0.0, until_s - began_s)


def _learner(moment: TopMoment, hearing: Hearing, learner: LearnerView) -> LearnerStatus:
    life, told = learner.latest, learner.told
    heard_at_s = moment.heard_at_s(learner)
    heard_s = None if heard_at_s is None else max(0.0, moment.wall_s - heard_at_s)
    return LearnerStatus(
        learner=learner.learner,
        state=hearing.state(learner),
        incarnation=0 if life is None else life.incarnation,
        tokens=learner.tokens,
        step=None if told is None else told.step,
        step_s=None if told is None else told.step_s,
        loss=None if told is None else told.loss,
        tokens_per_s=None if told is None else told.tokens_per_s,
        overhead=None if told is None else told.overhead,
        lag_versions=None if told is None else told.lag_versions,
        heard_s=_rounded(heard_s),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
