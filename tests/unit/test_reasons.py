"""Why a round waited: every place where it can wait has its words, and every cause its effect."""

from __future__ import annotations

import msgspec
import pytest

from atoll.protocol.events import Commit, Names, PublishCall, PushKey, RoundReasons, id_of
from atoll.protocol.pacing import grace_window
from atoll.protocol.settings import ProtocolSettings
from atoll.run.decisions import describe_grace, describe_needs, describe_wait
from support.shards import ShardDesk


class Told(ShardDesk):
    """A shard of one fragment, told facts at times; it keeps the commands."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**{"interval_steps": 4} | changes)

    @property
    def calls(self) -> list[PublishCall]:
        return [action for action in self.done if isinstance(action, PublishCall)]

    @property
    def commits(self) -> list[Commit]:
        return [action for action in self.done if isinstance(action, Commit)]

    def push(self, at_s: float, learner: str) -> None:
        key, cause = PushKey(learner, 1, 0, 1), id_of("call", 0, 0, 1)
        self.arrive(key, at_s, tokens=8, steps=4, trained_tokens=8, cause_id=cause)
        self.ready(key, at_s, cause_id=cause)

    @property
    def why(self) -> RoundReasons:
        """Return why the one round took as long as it did."""
        (commit,) = self.commits
        assert commit.why is not None
        return commit.why


def test_a_round_that_everybody_answers_says_so() -> None:
    told = Told()
    for learner in ("a", "b"):
        told.beat(learner)
    told.fire("due", 4.0)
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
    for learner in ("a", "b", "c"):
        told.beat(learner)
    told.fire("due", 4.0)
    told.push(4.5, "a")
    told.fire("grace", 5.5)
    words = describe_wait(told.why)

    assert told.why.missing == Names(("b", "c"), 2)
    assert words["end"] == "it ended 1 s after the quorum, because the grace window was over; b, c had not answered"
    assert words["grace"].startswith("grace of 1 s, the cap")
    assert told.commits[0].cause_id == "grace/0"


def test_a_round_below_its_quorum_says_at_every_call_what_it_waits_for() -> None:
    told = Told(quorum=2)
    for learner in ("a", "b"):
        told.beat(learner)
    told.fire("due", 4.0)
    told.push(4.5, "a")
    told.fire("due", 6.0)
    told.fire("due", 8.0)
    told.push(8.5, "b")
    told.fire("grace", 9.5)
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
    told.beat("a")
    told.fire("due", 4.0)
    told.push(4.5, "a")
    data = msgspec.json.encode(told.why)

    assert msgspec.json.decode(data, type=RoundReasons) == told.why
    assert b"missing" not in data
    assert id_of("head", 3, 18) == "head/3/18"
