"""Quarantine: what is an outlier, what is an offence, who is isolated, and that an heir knows of it."""

from __future__ import annotations

import msgspec
import pytest

from atoll.base.errors import SettingsError
from atoll.base.parsing import parsed
from atoll.protocol.events import (
    Acknowledge,
    Command,
    Commit,
    Committed,
    ContributionArrived,
    ContributionReady,
    ContributionSpoiled,
    Fetch,
    Fold,
    Isolate,
    Keep,
    LearnerBeat,
    LearnerLeft,
    PublishCall,
    PushKey,
    TimerFired,
)
from atoll.protocol.fragment_ledger import FragmentLedger
from atoll.protocol.ledger import Ledger
from atoll.protocol.quarantine import MEASURES_MAX, MEASURES_MIN, Measure, is_outlier, judged, stands_alone
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.shards import told

USUAL = [Measure(1.0, 8, "good")] * MEASURES_MIN


def weighed(ledger: FragmentLedger, measure: Measure, base_norm: float, rules: ProtocolSettings) -> str:
    """Return what a ledger makes of a length that it then remembers."""
    reason = judged(ledger.measures, measure, rules.outlier_ratio, base_norm)
    ledger.remember(measure, rules, refused=bool(reason))
    return reason


def settings(**changes: object) -> ProtocolSettings:
    """Return settings of one shard with one fragment."""
    return msgspec.convert({"fragments": 1, "interval_steps": 8, "shards": 1, **changes}, ProtocolSettings).check()


class QuarantineBench:
    """A shard that is told of contributions one after the other, all on its present base."""

    def __init__(self, **changes: object) -> None:
        """Begin with two learners that train."""
        self.shard = Shard(settings(**changes), 0, {0: 0})
        self.pushes: dict[tuple[str, int], int] = {}
        self.at_s = 0.0
        for learner in ("good", "bad"):
            self.beat(learner)

    def beat(self, learner: str, incarnation: int = 1) -> None:
        """Let a learner report."""
        self.at_s += 0.1
        told(
            self.shard,
            LearnerBeat(
                at_s=self.at_s, learner=learner, incarnation=incarnation, training=True, step_s=1.0, tokens=10_000
            ),
        )

    def push(self, learner: str, norm: float = 1.0, spoil: str = "", incarnation: int = 1) -> list[Command]:
        """Let a contribution arrive and be read; commit what is decided."""
        push = self.pushes[learner, incarnation] = self.pushes.get((learner, incarnation), 0) + 1
        key = PushKey(learner, incarnation, 0, push)
        self.at_s += 1.0
        self.beat(learner, incarnation)
        base = self.shard.slots[0].round.version
        actions = told(
            self.shard,
            ContributionArrived(at_s=self.at_s, key=key, base_version=base, tokens=80, steps=8, trained_tokens=80),
        )
        if any(isinstance(action, Fetch) for action in actions):
            spoiled = ContributionSpoiled(at_s=self.at_s, key=key, reason=spoil)
            ready = ContributionReady(at_s=self.at_s, key=key, norm=norm)
            actions = actions + told(self.shard, spoiled if spoil else ready)
        return actions

    def commit(self) -> None:
        """Call the round, wait its grace out and make it durable."""
        self.at_s += 10.0
        slot = self.shard.slots[0]
        slot.due_s = self.at_s
        decided = told(self.shard, TimerFired(at_s=self.at_s, name="due/0"))
        self.at_s += 100.0
        decided += told(self.shard, TimerFired(at_s=self.at_s, name="grace/0"))
        for action in decided:
            if isinstance(action, Commit):
                version = action.base_version + 1
                told(self.shard, Committed(at_s=self.at_s, fragment=0, version=version))


def refusals(actions: list[Command]) -> list[str]:
    """Return the reasons of the refusals among `actions`."""
    return [action.reason for action in actions if isinstance(action, Acknowledge) and action.fate == "refused"]


def test_nothing_is_an_outlier_before_there_is_a_yardstick() -> None:
    """The first contributions of a fragment are judged by `norm_max` alone."""
    assert not is_outlier(USUAL[1:], 1e9, 8, 10.0)
    assert is_outlier(USUAL, 10.1, 8, 10.0)
    assert not is_outlier(USUAL, 9.9, 8, 10.0)


def test_more_steps_may_go_further_and_fewer_may_not() -> None:
    """An inner step has a bounded length, so k times the steps may lead k times as far."""
    assert not is_outlier(USUAL, 39.0, 32, 10.0)
    assert is_outlier(USUAL, 41.0, 32, 10.0)
    assert is_outlier(USUAL, 10.1, 1, 10.0)


def test_what_is_short_beside_the_parameters_is_no_outlier() -> None:
    """A run that has converged moves hardly at all; ten times that is not much either."""
    assert is_outlier(USUAL, 50.0, 8, 10.0, base_norm=4_999.0)
    assert not is_outlier(USUAL, 50.0, 8, 10.0, base_norm=5_001.0)


def test_a_ratio_of_zero_judges_nobody() -> None:
    """The rule can be switched off."""
    assert not is_outlier(USUAL, 1e30, 1, 0.0)


def test_the_yardstick_follows_the_run() -> None:
    """Only the newest measures count, and what is refused is measured too: no change of the run locks it."""
    fragment_ledger = FragmentLedger(measures=list(USUAL))
    reasons = [
        weighed(fragment_ledger, Measure(100.0, 8, f"learner-{i % 3}"), 0.0, settings()) for i in range(MEASURES_MAX)
    ]

    assert reasons[0] == "outlier"
    assert set(reasons[1:3]) == {"unusual"}
    assert set(reasons[len(USUAL) :]) == {""}
    assert len(fragment_ledger.measures) == MEASURES_MAX
    assert not is_outlier(fragment_ledger.measures, 900.0, 8, 10.0)


def test_the_first_pushes_of_a_run_are_no_yardstick() -> None:
    """They cover a step or two of a warm-up that has hardly begun."""
    fragment_ledger = FragmentLedger()
    for _ in range(MEASURES_MAX):
        weighed(fragment_ledger, Measure(0.001, 3, "a"), 0.0, settings(interval_steps=8))
    weighed(fragment_ledger, Measure(0.0, 8, "a"), 0.0, settings(interval_steps=8))

    assert fragment_ledger.measures == []
    assert weighed(fragment_ledger, Measure(1.0, 4, "a"), 0.0, settings(interval_steps=8)) == ""
    assert len(fragment_ledger.measures) == 1


@pytest.mark.parametrize("interval", [8, 16, 24, 64, 100])
@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("learners", [1, 2, 3, 4, 8])
def test_a_warm_up_isolates_nobody(interval: int, first: int, learners: int) -> None:
    """The rate grows with the run's tokens from nearly nothing; pseudo-gradients grow with it, and none is an outlier."""
    fragment_ledger = FragmentLedger()
    rules = settings(interval_steps=interval)
    names = [f"learner-{i}" for i in range(learners)]
    step, reasons = 0, []
    for round_number in range(12):
        steps = first if round_number == 0 else interval
        rates = [1.0 + learners * (step + i) for i in range(steps)]
        step += steps
        reasons += [weighed(fragment_ledger, Measure(sum(rates), steps, name), 0.0, rules) for name in names]

    assert set(reasons) == {""}


def test_who_is_not_alone_with_it_commits_no_offence() -> None:
    """An outlier counts against its learner while somebody else is accepted and nobody else refused."""
    good, bad, worse = (
        Measure(1.0, 8, "good"),
        Measure(99.0, 8, "bad", refused=True),
        Measure(99.0, 8, "x", refused=True),
    )

    assert stands_alone([good, good, bad], "bad")
    assert not stands_alone([good, bad, worse], "bad")
    assert not stands_alone([bad, bad], "bad")


def test_an_outlier_is_refused_whole() -> None:
    """It is not folded, and what is too long once does not make the next one usual."""
    bench = QuarantineBench()
    for _ in range(MEASURES_MIN):
        bench.push("good")

    actions = bench.push("bad", norm=50.0)

    assert refusals(actions) == ["outlier"]
    assert not any(isinstance(action, Fold) for action in actions)
    assert refusals(bench.push("bad", norm=50.0)) == ["outlier"]


def left(bench: QuarantineBench, learner: str, incarnation: int = 1) -> None:
    """Let a learner say goodbye."""
    told(bench.shard, LearnerLeft(at_s=bench.at_s, learner=learner, incarnation=incarnation))


def usual(bench: QuarantineBench) -> None:
    """Make a measure of what both learners send."""
    for _ in range(MEASURES_MIN):
        bench.push("good")
        bench.push("bad")
        bench.commit()


def test_a_fleet_that_begins_anew_is_judged_anew() -> None:
    """It goes on with a longer schedule, and so with a larger rate: honest learners were isolated within seconds."""
    bench = QuarantineBench(offences_max=1)
    usual(bench)
    for learner in ("good", "bad"):
        left(bench, learner)
    for _ in range(MEASURES_MIN):
        lengths = [bench.push(learner, norm=50.0, incarnation=2) for learner in ("good", "bad")]
        assert [refusals(actions) for actions in lengths] == [[], []]
        bench.commit()

    assert refusals(bench.push("bad", norm=600.0, incarnation=2)) == ["outlier"]


def test_one_that_begins_anew_among_others_is_judged_by_theirs() -> None:
    """By what they send in the lives that they have."""
    bench = QuarantineBench(offences_max=1)
    usual(bench)

    assert refusals(bench.push("bad", norm=50.0, incarnation=2)) == ["outlier"]


def test_a_life_that_was_killed_is_of_the_past_once_the_next_is_heard() -> None:
    bench = QuarantineBench()
    usual(bench)
    bench.beat("good", incarnation=2)

    assert refusals(bench.push("bad", norm=50.0)) == ["unusual"]  # nobody else's measure is there: it has no witness
    for _ in range(MEASURES_MIN):
        bench.push("good", incarnation=2)
    assert refusals(bench.push("bad", norm=50.0, incarnation=1)) != []


def test_repeated_offence_isolates_that_learner_only() -> None:
    """The third offence isolates; then nothing of it is read, no round waits for it, and the other goes on."""
    bench = QuarantineBench(offences_max=3)
    first, second, third = (bench.push("bad", spoil="not_finite") for _ in range(3))
    after = bench.push("bad")
    other = bench.push("good")

    assert [a for a in first + second if isinstance(a, Isolate)] == []
    assert [(a.learner, a.offences) for a in third if isinstance(a, Isolate)] == [("bad", 3)]
    assert refusals(after) == ["quarantined"]
    assert not any(isinstance(action, Fetch) for action in after)
    assert any(isinstance(action, Fold) for action in other)
    assert bench.shard.live(bench.at_s) == {"good"}


def test_what_is_nobodys_fault_is_no_offence() -> None:
    """Chunks that the broker let go are refused, however often, and isolate nobody."""
    bench = QuarantineBench(offences_max=1)

    for _ in range(5):
        assert refusals(bench.push("bad", spoil="chunks_gone")) == ["chunks_gone"]

    assert bench.shard.live(bench.at_s) == {"good", "bad"}


def test_the_next_incarnation_begins_with_a_clean_record() -> None:
    """What a restart mends is mended by a restart."""
    bench = QuarantineBench(offences_max=1)
    bench.push("bad", spoil="corrupt")
    assert refusals(bench.push("bad")) == ["quarantined"]

    bench.beat("bad", incarnation=2)

    assert refusals(bench.push("bad", incarnation=2)) == []
    assert "bad" in bench.shard.live(bench.at_s)


def test_nobody_is_isolated_when_the_limit_is_zero() -> None:
    """A run may choose to refuse one by one for ever."""
    bench = QuarantineBench(offences_max=0)

    assert [refusals(bench.push("bad", spoil="corrupt")) for _ in range(5)] == [["corrupt"]] * 5


def test_an_heir_judges_as_its_predecessor_did() -> None:
    """Offences and measures are in the ledgers that are kept before a refusal is acknowledged, and that a commit carries."""
    bench = QuarantineBench(offences_max=2)
    for _ in range(MEASURES_MIN):
        bench.push("good")
    bench.push("bad", norm=99.0)
    kept = [action for action in bench.push("bad", norm=99.0) if isinstance(action, Keep)]
    fragment_ledger = parsed(kept[-1].fragment_ledger, FragmentLedger)

    heir = Shard(settings(offences_max=2), 0, {0: 0}, fragment_ledger={0: fragment_ledger})

    assert heir.isolated("bad", 1)
    assert not heir.isolated("good", 1)
    assert is_outlier(fragment_ledger.measures, 99.0, 8, 10.0)
    assert parsed(FragmentLedger(measures=USUAL).frozen(Ledger()), FragmentLedger).measures == USUAL


def test_a_question_opens_no_account() -> None:
    """Whoever is asked about, forged or real: the ledgers that travel hold only those who said or sent something."""
    shard = QuarantineBench(offences_max=2).shard
    before = msgspec.json.encode(shard.ledger)

    assert not shard.isolated("never seen", 7)
    assert shard.offences("never seen", 7) == 0
    assert msgspec.json.encode(shard.ledger) == before


def test_a_round_does_not_wait_for_who_is_isolated() -> None:
    """It ends when every live learner has answered, and an isolated one is not among them."""
    bench = QuarantineBench(offences_max=1)
    bench.push("bad", spoil="checksum")
    slot = bench.shard.slots[0]
    slot.due_s = bench.at_s
    bench.beat("good")
    bench.beat("bad")
    bench.shard.handle(TimerFired(at_s=bench.at_s, name="due/0"))

    ends = [action.end for action in bench.push("good") if isinstance(action, Commit)]

    assert ends == ["all answered"]


def test_who_is_in_quarantine_is_called_when_nobody_else_is_there() -> None:
    """The verdict is an at-most-once message: who did not hear it must be called, to answer and to be told once more."""
    bench = QuarantineBench(offences_max=1)
    for learner in ("good", "bad"):
        bench.push(learner, spoil="checksum")
    bench.beat("bad")
    slot = bench.shard.slots[0]
    slot.due_s = bench.at_s

    called = bench.shard.handle(TimerFired(at_s=bench.at_s, name="due/0"))

    assert bench.shard.live(bench.at_s) == set()
    assert any(isinstance(action, PublishCall) for action in called)
    assert refusals(bench.push("bad")) == ["quarantined"]


def test_limits_out_of_range_are_refused() -> None:
    """A negative ratio or limit means nothing."""
    for change in ({"outlier_ratio": -1.0}, {"offences_max": -1}):
        with pytest.raises(SettingsError, match="out of range"):
            settings(**change)
