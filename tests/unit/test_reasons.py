"""Why a round waited: every place where it can wait has its words, and every cause its effect."""

from __future__ import annotations

import msgspec
import pytest

from atoll.protocol.events import (
    Commit,
    ContributionArrived,
    ContributionReady,
    Fact,
    LearnerBeat,
    PublishCall,
    PushKey,
    TimerFired,
)
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from atoll.protocol.waits import Names, RoundReasons, grace_window, id_of
from atoll.run.decisions import describe_grace, describe_needs, describe_wait
from support.shards import answered


class Told:
    """One shard of one fragment, told facts at times; it keeps the commands."""

    def __init__(self, **protocol: object) -> None:
        settings = msgspec.convert({"fragments": 1, "shards": 1, "interval_steps": 4, **protocol}, ProtocolSettings)
        self.shard = Shard(settings, 0, {0: 0})
        self.calls: list[PublishCall] = []
        self.commits: list[Commit] = []

    def tell(self, fact: Fact) -> None:
        actions = [*answered(self.shard, fact.at_s), *self.shard.handle(fact)]
        self.calls += [action for action in actions if isinstance(action, PublishCall)]
        self.commits += [action for action in actions if isinstance(action, Commit)]

    def beat(self, at_s: float, *learners: str, step_s: float = 1.0) -> None:
        for learner in learners:
            beat = LearnerBeat(at_s=at_s, learner=learner, incarnation=1, training=True, step_s=step_s, tokens=100)
            self.tell(beat)

    def push(self, at_s: float, learner: str, push: int = 1, *, final: bool = False) -> None:
        """A contribution of a learner arrives and is read at once."""
        key, cause = PushKey(learner, 1, 0, push), id_of("call", 0, 0, 1)
        self.tell(
            ContributionArrived(
                at_s=at_s, key=key, base_version=0, tokens=8, steps=4, trained_tokens=8, final=final, cause_id=cause
            )
        )
        self.tell(ContributionReady(at_s=at_s, key=key, cause_id=cause))

    def due(self, at_s: float) -> None:
        self.tell(TimerFired(at_s=at_s, name="due/0"))

    def grace_over(self, at_s: float) -> None:
        """The timer of the grace window fires."""
        self.tell(TimerFired(at_s=at_s, name="grace/0"))

    @property
    def why(self) -> RoundReasons:
        """Return why the one round took as long as it did."""
        (commit,) = self.commits
        assert commit.why is not None
        return commit.why


def test_a_round_that_everybody_answers_says_so() -> None:
    """It rested until its beat, and nobody had to be waited for."""
    told = Told()
    told.beat(0.0, "a", "b")
    told.due(4.0)
    told.push(4.5, "a")
    told.push(4.75, "b")
    words = describe_wait(told.why)

    first = "it rested until its first beat, within 4 steps of 1 s of the first step time that was heard"
    assert words["rest"] == f"{first}, 4 s after version 0 was visible"
    assert words["quorum"] == "the quorum of 1 was met 0.5 s after the call, by push/a/1/0/1"
    assert words["end"] == "it ended 0.25 s after the quorum, because every live learner had answered"
    assert told.commits[0].cause_id == id_of("push", "b", 1, 0, 1)
    assert [share.cause_id for share in told.commits[0].shares] == [id_of("call", 0, 0, 1)] * 2


def test_a_round_whose_grace_is_over_names_the_learners_that_it_missed() -> None:
    told = Told()
    told.beat(0.0, "a", "b", "c")
    told.due(4.0)
    told.push(4.5, "a")
    told.grace_over(5.5)
    words = describe_wait(told.why)

    assert told.why.missing == Names(("b", "c"), 2)
    assert words["end"] == "it ended 1 s after the quorum, because the grace window was over; b, c had not answered"
    assert words["grace"].startswith("grace of 1 s, the cap")
    assert told.commits[0].cause_id == "grace/0"


def test_a_round_below_its_quorum_says_at_every_call_what_it_waits_for() -> None:
    """So an operator finds it in the log while it waits, and afterwards in the event."""
    told = Told(quorum=2)
    told.beat(0.0, "a", "b")
    told.due(4.0)
    told.push(4.5, "a")
    told.due(6.0)
    told.due(8.0)
    told.push(8.5, "b")
    told.grace_over(9.5)
    words = describe_wait(told.why)

    assert [call.needs and describe_needs(call.attempt, call.needs) for call in told.calls] == [
        None,
        "call 2: it needs 2 of 2 live learners, and has 1; not yet b",
        "call 3: it needs 2 of 2 live learners, and has 1; not yet b",
    ]
    assert words["quorum"] == (
        "the quorum of 2 was met 4.5 s after the call, by push/b/1/0/1; it was called 3 times, and the last time b had not "
        "answered"
    )


@pytest.mark.parametrize(
    ("quorum_s", "sync_s", "granted_s", "words"),
    [
        (0.0, 0.0, 1.0, "grace of 1 s, the cap"),
        (0.6, 0.4, 0.5, "grace of 0.5 s, a share of the slack of 1 s"),
        (1.5, 1.0, 0.0, "no grace: the overlap of 2 s is used up by 1.5 s to the quorum and 1 s to commit"),
        (1.5, 0.5, 0.0, "no grace: the overlap of 2 s is used up by 1.5 s to the quorum and 0.5 s to commit"),
    ],
)
def test_a_grace_window_names_the_term_that_decided(
    quorum_s: float, sync_s: float, granted_s: float, words: str
) -> None:
    """Eq. 3 has three outcomes."""
    settings = ProtocolSettings(overlap_steps=2, grace_gamma=0.5, grace_cap_steps=1.0)
    window = grace_window(settings, 1.0, quorum_s, sync_s)

    assert window.granted_s == pytest.approx(granted_s)
    assert describe_grace(window).startswith(words)


def test_reasons_survive_the_event_log() -> None:
    told = Told()
    told.beat(0.0, "a")
    told.due(4.0)
    told.push(4.5, "a")
    data = msgspec.json.encode(told.why)

    assert msgspec.json.decode(data, type=RoundReasons) == told.why
    assert b"missing" not in data
    assert id_of("head", 3, 18) == "head/3/18"
