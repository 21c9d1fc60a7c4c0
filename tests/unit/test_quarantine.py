"""Protection: what is clipped and by whose lengths, what is an offence, who is isolated, and that an heir knows of it."""

from __future__ import annotations

import math

import msgspec
import pytest

from atoll.base.parsing import parsed
from atoll.protocol import events
from atoll.protocol.ledger import FragmentLedger, Ledger
from atoll.protocol.quarantine import FADING, MEASURE_VERSIONS, MEASURES_MAX, Measure, norm_limit
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.shards import ShardDesk

USUAL = {name: Measure(1.0, 8, 1, 0) for name in ("a", "b", "c")}
"""Three other learners, which is a majority."""
GOOD = ("good", "well", "fine")


def settings(**changes: object) -> ProtocolSettings:
    return msgspec.convert({"fragments": 1, "interval_steps": 8, "shards": 1, **changes}, ProtocolSettings).check()


class QuarantineBench(ShardDesk):
    """A shard that is told of contributions one after the other, all on its present base."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.pushes: dict[tuple[str, int], int] = {}
        self.at_s = 0.0
        for learner in ("good", "bad"):
            self.heard(learner)

    def heard(self, learner: str, incarnation: int = 1) -> None:
        self.at_s += 0.1
        self.beat(learner, self.at_s, incarnation, tokens=10_000)

    def push(
        self, learner: str, norm: float = 1.0, spoil: str = "", incarnation: int = 1, **more: object
    ) -> list[events.Command]:
        """Let a contribution arrive and be read; commit what is decided."""
        push = self.pushes[learner, incarnation] = self.pushes.get((learner, incarnation), 0) + 1
        key = events.PushKey(learner, incarnation, 0, push)
        self.at_s += 1.0
        self.heard(learner, incarnation)
        actions = self.arrive(key, self.at_s, self.shard.slots[0].round.version, trained_tokens=80, **more)
        if any(isinstance(action, events.Fetch) for action in actions):
            if spoil:
                actions += self.tell(events.ContributionSpoiled(at_s=self.at_s, key=key, reason=spoil))
            else:
                actions += self.ready(key, self.at_s, norm=norm)
        for action in actions:
            if isinstance(action, events.Commit):  # a learner's last one calls its round at once
                self.committed(action)
        return actions

    def commit(self, *, hold: bool = False) -> events.Commit | None:
        """Call the round, wait its grace out and return its commit, which is durable unless it is to `hold`."""
        self.at_s += 10.0
        slot = self.shard.slots[0]
        slot.due_s = self.at_s
        decided = self.fire("due", self.at_s)
        self.at_s += 100.0
        decided += self.fire("grace", self.at_s)
        commit = next((action for action in decided if isinstance(action, events.Commit)), None)
        if commit is not None and not hold:
            self.committed(commit)
        return commit

    def committed(self, commit: events.Commit) -> list[events.Command]:
        return self.tell(events.Committed(at_s=self.at_s, fragment=0, version=commit.base_version + 1))


def refusals(actions: list[events.Command]) -> list[str]:
    """Return the reasons of the refusals among `actions`."""
    return [action.reason for action in actions if isinstance(action, events.Acknowledge) and action.fate == "refused"]


# --- the limit --------------------------------------------------------------------------------------------------------------


def test_more_steps_may_go_further_and_fewer_may_not() -> None:
    """An inner step has a bounded length, so k times the steps may lead k times as far; but steps are a claim."""
    assert norm_limit(USUAL, "x", 8, 10.0, 0.0) == 10.0
    assert norm_limit(USUAL, "x", 1, 10.0, 0.0) == 10.0
    assert norm_limit(USUAL, "x", 32, 10.0, 0.0) == 40.0
    assert norm_limit(USUAL, "x", 1 << 30, 10.0, 0.0) == 100.0


def test_what_is_short_beside_the_parameters_is_not_long() -> None:
    """Islands that have converged move hardly at all; one with other data may move a tenth of the parameters' length."""
    assert norm_limit(USUAL, "x", 8, 10.0, 99.0) == 10.0
    assert norm_limit(USUAL, "x", 8, 10.0, 500.0) == 50.0


def test_fewer_than_three_others_justify_the_length_of_the_parameters() -> None:
    two = {name: USUAL[name] for name in ("a", "b")}
    assert norm_limit(two, "x", 8, 10.0, 500.0) == 500.0
    assert norm_limit({**two, "x": Measure(3.0, 8, 1, 0)}, "x", 8, 10.0, 0.0) == 10.0


def test_one_that_is_alone_is_measured_by_itself_and_its_first_by_nothing() -> None:
    assert norm_limit({}, "x", 8, 10.0, 5.0) == math.inf
    assert norm_limit({"x": Measure(3.0, 8, 1, 0)}, "x", 8, 10.0, 5.0) == 30.0


def test_a_ratio_of_zero_bounds_no_length() -> None:
    assert norm_limit(USUAL, "x", 8, 0.0, 1.0) == math.inf


@pytest.mark.parametrize("learners", [3, 4, 5, 6, 7])
def test_less_than_half_of_the_learners_moves_no_limit(learners: int) -> None:
    """By next to nothing over many steps they do not lower that of an honest learner, nor by great lengths raise their own."""
    liars = (learners - 1) // 2
    for lie in (Measure(1e-9, 1 << 30, 1, 0), Measure(1e9, 1, 1, 0)):
        told = {f"liar {n}": lie for n in range(liars)} | {
            f"l{n}": Measure(1.0, 8, 1, 0) for n in range(learners - liars)
        }
        assert norm_limit(told, "l0", 8, 10.0, 0.0) >= 10.0
        assert norm_limit(told, "liar 0", 8, 10.0, 0.0) == 10.0


@pytest.mark.parametrize("interval", [8, 24, 100])
@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("learners", [1, 2, 3, 4, 8])
def test_a_warm_up_clips_nobody(interval: int, first: int, learners: int) -> None:
    """The rate grows with the run's tokens from nearly nothing, pseudo-gradients with it; the first ones cover few steps."""
    bench = QuarantineBench(interval_steps=interval)
    names, step, scales = [f"l{number}" for number in range(learners)], 0, []
    for name in names:
        bench.heard(name)
    for round_number in range(8):
        steps = first if round_number == 0 else interval
        norm = sum(1.0 + learners * (step + taken) for taken in range(steps))
        step += steps
        for name in names:
            scales += [
                action.scale for action in bench.push(name, norm, steps=steps) if isinstance(action, events.Fold)
            ]
        bench.commit()

    assert scales == [1.0] * 8 * learners


# --- measures ---------------------------------------------------------------------------------------------------------------


def test_a_learner_has_one_measure_its_latest_however_often_it_pushes() -> None:
    """Tiny contributions, many of them, over many steps, the last of their learner: one vote."""
    bench = QuarantineBench()
    usual(bench)
    for _ in range(20):
        bench.push("bad", 1e-6, steps=8_000, final=True)
        bench.commit()

    lengths = bench.shard.slots[0].fragment_ledger.lengths
    assert lengths["bad"].norm == 1e-6
    assert set(lengths) == {*GOOD, "bad"}
    assert [action.scale for action in bench.push("good", 9.0) if isinstance(action, events.Fold)] == [1.0]


def test_the_first_contribution_of_a_life_is_no_measure() -> None:
    bench = QuarantineBench()
    bench.push("good", 0.001, steps=1)
    bench.commit()
    assert bench.shard.slots[0].fragment_ledger.lengths == {}
    bench.push("good", 1.0)
    assert set(bench.shard.slots[0].fragment_ledger.lengths) == {"good"}


def test_measures_are_bounded_in_number_and_age() -> None:
    ledger = FragmentLedger()
    for number in range(2 * MEASURES_MAX):
        key = events.PushKey(f"l{number}", 1, 0, 1)
        ledger.merge(events.Share(key=key, base_version=0, tokens=1, steps=1, weight=1.0, age=0, credit=1))
        ledger.remember(key.learner, Measure(1.0, 8, 1, number // 8))
        assert len(ledger.lengths) <= MEASURES_MAX
    assert f"l{2 * MEASURES_MAX - 1}" in ledger.lengths
    assert ledger.measures(2 * MEASURES_MAX // 8 + MEASURE_VERSIONS) == {}


# --- clipped ----------------------------------------------------------------------------------------------------------------


def test_what_is_too_long_is_clipped_and_never_refused() -> None:
    """It is folded at the longest that the others justify, and its commit says so, and so does its measure."""
    bench = QuarantineBench()
    usual(bench)
    told = [bench.push("bad", norm=50.0) for _ in range(20)]
    folds = [action for actions in told for action in actions if isinstance(action, events.Fold)]

    assert [fold.scale for fold in folds] == [0.2] * 20
    assert {fold.norm for fold in folds} == {50.0}
    assert not any(isinstance(action, events.Refuse | events.Isolate) for actions in told for action in actions)
    assert bench.shard.slots[0].fragment_ledger.lengths["bad"].norm == 10.0
    commit = bench.commit()
    assert commit is not None
    assert [share.scale for share in commit.shares if share.key.learner == "bad"] == [0.2] * 20


def test_when_the_whole_run_changes_its_limit_follows() -> None:
    """A longer schedule, a larger rate: everybody is clipped once or twice, and nobody is refused."""
    bench = QuarantineBench()
    usual(bench)
    for norm in (300.0, 300.0, 300.0):
        told = [bench.push(name, norm) for name in (*GOOD, "bad")]
        bench.commit()

    assert [action.scale for actions in told for action in actions if isinstance(action, events.Fold)] == [1.0] * 4


def test_what_is_parked_is_clipped_as_it_was_judged() -> None:
    bench = QuarantineBench()
    usual(bench)
    bench.push("good")
    told = bench.commit(hold=True)
    assert told is not None
    assert not any(isinstance(action, events.Fold) for action in bench.push("bad", norm=50.0))
    [fold] = [action for action in bench.committed(told) if isinstance(action, events.Fold)]

    assert (fold.key.learner, fold.scale) == ("bad", 0.2)


def test_values_are_never_clipped() -> None:
    """A shorter variance would be another one."""
    bench = QuarantineBench(value_fragments=1)
    usual(bench)

    assert [action.scale for action in bench.push("bad", norm=5e9) if isinstance(action, events.Fold)] == [1.0]


# --- isolated ---------------------------------------------------------------------------------------------------------------


def test_a_run_that_isolates_refuses_an_outlier_whole() -> None:
    """It is not folded, and what is too long once does not make the next one usual."""
    bench = QuarantineBench(protect="isolate")
    usual(bench)

    actions = bench.push("bad", norm=50.0)

    assert refusals(actions) == ["outlier"]
    assert [action.norms for action in actions if isinstance(action, events.Refuse)] == [(50.0, 10.0)]
    assert not any(isinstance(action, events.Fold) for action in actions)
    assert refusals(bench.push("bad", norm=50.0)) == ["outlier"]


def test_the_first_of_a_life_and_one_among_few_are_clipped_also_where_a_run_isolates() -> None:
    bench = QuarantineBench(protect="isolate", offences_max=1)
    usual(bench)
    for learner, norm in (("new", 500.0), ("bad", 500.0)):
        incarnation = 2 if learner == "bad" else 1
        told = bench.push(learner, norm, incarnation=incarnation)
        assert [action.scale for action in told if isinstance(action, events.Fold)] == [10.0 / norm]
    few = QuarantineBench(protect="isolate", offences_max=1)
    for _ in range(3):
        for learner in ("good", "bad"):
            few.push(learner)
        few.commit()
    assert [action.scale for action in few.push("bad", norm=50.0) if isinstance(action, events.Fold)] == [0.2]


def test_offences_fade_with_what_is_merged() -> None:
    bench = QuarantineBench(protect="isolate", offences_max=2)
    for _ in range(3):
        assert refusals(bench.push("bad", spoil="corrupt")) == ["corrupt"]
        assert bench.shard.offences("bad", 1) == 1
        for _ in range(FADING):
            bench.push("bad")
            bench.commit()
        assert bench.shard.offences("bad", 1) == 0


def left(bench: QuarantineBench, learner: str, incarnation: int = 1) -> None:
    bench.tell(events.LearnerLeft(at_s=bench.at_s, learner=learner, incarnation=incarnation))


def usual(bench: QuarantineBench) -> None:
    for _ in range(2):
        for learner in (*GOOD, "bad"):
            bench.push(learner)
        bench.commit()


def test_a_fleet_that_begins_anew_is_judged_anew() -> None:
    """It goes on with a longer schedule, and so with a larger rate: lengths of lives that have ended count no more."""
    bench = QuarantineBench()
    usual(bench)
    for learner in (*GOOD, "bad"):
        left(bench, learner)
    told = [bench.push(learner, norm=5e3, incarnation=2) for learner in (*GOOD, "bad")]

    assert [action.scale for actions in told for action in actions if isinstance(action, events.Fold)] == [1.0] * 4


def test_a_life_that_was_killed_is_of_the_past_once_the_next_is_heard() -> None:
    bench = QuarantineBench()
    usual(bench)
    for learner in GOOD:
        bench.heard(learner, incarnation=2)

    assert [action.scale for action in bench.push("bad", norm=10.0) if isinstance(action, events.Fold)] == [
        1.0
    ]  # its own
    bench.push("good", 0.01, incarnation=2)
    bench.commit()
    bench.push("good", 0.01, incarnation=2)
    assert [action.scale for action in bench.push("bad", norm=10.0) if isinstance(action, events.Fold)] == [0.01]


def test_repeated_offence_isolates_that_learner_only() -> None:
    """The third offence isolates; then nothing of it is read, no round waits for it, and the other goes on."""
    bench = QuarantineBench(protect="isolate", offences_max=3)
    first, second, third = (bench.push("bad", spoil="not_finite") for _ in range(3))
    after = bench.push("bad")
    other = bench.push("good")

    assert [a for a in first + second if isinstance(a, events.Isolate)] == []
    assert [(a.learner, a.offences) for a in third if isinstance(a, events.Isolate)] == [("bad", 3)]
    assert refusals(after) == ["quarantined"]
    assert not any(isinstance(action, events.Fetch) for action in after)
    assert any(isinstance(action, events.Fold) for action in other)
    assert bench.shard.live() == {"good"}


def test_what_is_nobodys_fault_is_no_offence() -> None:
    bench = QuarantineBench(protect="isolate", offences_max=1)

    for _ in range(5):
        assert refusals(bench.push("bad", spoil="chunks_gone")) == ["chunks_gone"]

    assert bench.shard.live() == {"good", "bad"}


def test_the_next_incarnation_begins_with_a_clean_record() -> None:
    bench = QuarantineBench(protect="isolate", offences_max=1)
    bench.push("bad", spoil="corrupt")
    assert refusals(bench.push("bad")) == ["quarantined"]

    bench.heard("bad", incarnation=2)

    assert refusals(bench.push("bad", incarnation=2)) == []
    assert "bad" in bench.shard.live()


@pytest.mark.parametrize("changes", [{"protect": "clip"}, {"protect": "isolate", "offences_max": 0}])
def test_nobody_is_isolated_by_default_or_when_the_limit_is_zero(changes: dict[str, object]) -> None:
    """What cannot be used is refused one by one, for ever."""
    bench = QuarantineBench(**changes)

    assert [refusals(bench.push("bad", spoil="corrupt")) for _ in range(5)] == [["corrupt"]] * 5


def test_an_heir_judges_as_its_predecessor_did() -> None:
    """Offences and measures are in the ledgers that are kept before a refusal is acknowledged, and that a commit carries."""
    bench = QuarantineBench(protect="isolate", offences_max=2)
    usual(bench)
    bench.push("bad", norm=99.0)
    kept = [action for action in bench.push("bad", norm=99.0) if isinstance(action, events.Keep)]
    fragment_ledger = parsed(kept[-1].fragment_ledger, FragmentLedger)

    heir = Shard(settings(protect="isolate", offences_max=2), 0, {0: 0}, fragment_ledgers={0: fragment_ledger})

    assert heir.isolated("bad", 1)
    assert not heir.isolated("good", 1)
    assert norm_limit(fragment_ledger.lengths, "good", 8, 10.0, 0.0) == 10.0
    assert parsed(FragmentLedger(lengths=USUAL).freeze(Ledger()), FragmentLedger).lengths == USUAL


def test_a_question_opens_no_account() -> None:
    """Whoever is asked about, forged or real: the ledgers that travel hold only those who said or sent something."""
    shard = QuarantineBench(protect="isolate", offences_max=2).shard
    before = msgspec.json.encode(shard.ledger)

    assert not shard.isolated("never seen", 7)
    assert shard.offences("never seen", 7) == 0
    assert msgspec.json.encode(shard.ledger) == before


def test_a_round_does_not_wait_for_who_is_isolated() -> None:
    bench = QuarantineBench(protect="isolate", offences_max=1)
    bench.push("bad", spoil="checksum")
    slot = bench.shard.slots[0]
    slot.due_s = bench.at_s
    bench.heard("good")
    bench.heard("bad")
    bench.shard.handle(events.TimerFired(at_s=bench.at_s, name="due/0"))

    ends = [action.end for action in bench.push("good") if isinstance(action, events.Commit)]

    assert ends == ["all answered"]


def test_who_is_in_quarantine_is_called_when_nobody_else_is_there() -> None:
    """The verdict is an at-most-once message: who did not hear it must be called, to answer and to be told once more."""
    bench = QuarantineBench(protect="isolate", offences_max=1)
    for learner in ("good", "bad"):
        bench.push(learner, spoil="checksum")
    bench.heard("bad")
    slot = bench.shard.slots[0]
    slot.due_s = bench.at_s

    called = bench.shard.handle(events.TimerFired(at_s=bench.at_s, name="due/0"))

    assert bench.shard.live() == set()
    assert any(isinstance(action, events.PublishCall) for action in called)
    assert refusals(bench.push("bad")) == ["quarantined"]
