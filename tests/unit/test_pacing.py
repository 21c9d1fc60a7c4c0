"""The rhythm of fragments: beats are kept through late calls, early ones and outages, and stay staggered."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import events, pacing
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from support.shards import beat_of

STEP_S, FRAGMENTS, STEPS = 0.5, 8, 16


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.floats(0.1, 1e3))
def test_a_call_stands_for_the_nearest_beat(at_s: float, due_s: float, interval_s: float) -> None:
    beat = pacing.due_of_call_s(at_s, due_s, interval_s)
    assert abs(beat - at_s) <= interval_s * (0.5 + 1e-6)
    beats = (beat - due_s) / interval_s
    assert beats == pytest.approx(round(beats), abs=1e-4)


def test_a_first_call_begins_the_rhythm() -> None:
    assert pacing.due_of_call_s(7.25, None, 16.0) == 7.25


def test_only_much_shorter_steps_move_a_beat_up() -> None:
    assert pacing.comes_earlier(None, 5.0, 16.0)
    assert not pacing.comes_earlier(10.0, 7.0, 16.0)
    assert pacing.comes_earlier(10.0, 5.0, 16.0)


def test_a_round_below_its_quorum_is_called_again_after_two_steps() -> None:
    assert (pacing.recall_s(3.0, 1.0), pacing.recall_s(3.0, 0.01)) == (5.0, 3.0 + pacing.RECALL_S_MIN)


class PacedFleet:
    """A shard and learners that answer every call at once, on a clock of their own; timers are `late_s` late."""

    def __init__(self, learners: Iterable[str], late_s: float = 0.003) -> None:
        chosen = msgspec.convert(
            {"fragments": FRAGMENTS, "interval_steps": STEPS, "shards": 1, "silence_s": 5.0, "overlap_steps": 2},
            ProtocolSettings,
        ).check()
        self.shard = Shard(chosen, 0, dict.fromkeys(range(FRAGMENTS), 0))
        self.learners = set(learners)
        self.late_s = late_s
        self.called: dict[int, list[float]] = {p: [] for p in range(FRAGMENTS)}
        self.away = False
        self._pushes = 0
        self._timers: dict[str, float] = {}
        self._due: list[tuple[float, int, events.Fact]] = []
        self._order = 0

    def run(self, from_s: float, until_s: float) -> None:
        for tick in range(int((until_s - from_s) * 2)):
            for who in sorted(self.learners):
                at_s = from_s + tick / 2.0
                self._at(at_s, beat_of(who, 0.0, step_s=STEP_S, tokens=1 << 40, steps=int(at_s / STEP_S)))
        while self._due and self._due[0][0] <= until_s:
            at_s, _, fact = heapq.heappop(self._due)
            if isinstance(fact, events.TimerFired) and self._timers.get(fact.name) != at_s:
                continue
            if not (self.away and isinstance(fact, events.ContributionArrived)):
                self._do(at_s, self.shard.handle(msgspec.structs.replace(fact, at_s=at_s)))

    def leave(self, who: str, at_s: float) -> None:
        for fragment, slot in self.shard.slots.items():
            self._push(who, fragment, slot.round.version, at_s, final=True)
        self.learners.discard(who)
        self._at(at_s + 0.02, events.LearnerLeft(at_s=0.0, learner=who, incarnation=1))

    def _do(self, at_s: float, actions: list[events.ShardCommand]) -> None:
        for action in actions:
            if isinstance(action, events.ArmTimer):
                due_s = max(action.due_s, at_s) + self.late_s
                self._timers[action.name] = due_s
                self._at(due_s, events.TimerFired(at_s=0.0, name=action.name))
            elif isinstance(action, events.PublishCall):
                if not self.called[action.fragment] or action.attempt == 1:
                    self.called[action.fragment].append(at_s)
                for who in sorted(self.learners):
                    self._push(who, action.fragment, action.version, at_s + 0.05, final=False)
            elif isinstance(action, events.Fetch):
                self._at(at_s + 0.01, events.ContributionReady(at_s=0.0, key=action.key))
            elif isinstance(action, events.Commit):
                done = events.Committed(at_s=0.0, fragment=action.fragment, version=action.base_version + 1)
                self._at(at_s + 0.01, done)

    def _push(self, who: str, fragment: int, base: int, at_s: float, *, final: bool) -> None:
        self._pushes += 1
        key = events.PushKey(who, 1, fragment, self._pushes)
        arrived = events.ContributionArrived(
            at_s=0.0, key=key, base_version=base, tokens=64, steps=8, trained_tokens=1 << 40, final=final
        )
        self._at(at_s, arrived)

    def _at(self, at_s: float, fact: events.Fact) -> None:
        self._order += 1
        heapq.heappush(self._due, (at_s, self._order, fact))

    def phases(self) -> list[float]:
        """Return where in the interval each fragment was called last, in order."""
        return sorted(times[-1] % (STEPS * STEP_S) for times in self.called.values())

    def spacing_min_s(self) -> float:
        """Return the shortest time between the last calls of two fragments that follow each other in the interval."""
        phases = self.phases()
        gaps = [b - a for a, b in itertools.pairwise([*phases, phases[0] + STEPS * STEP_S])]
        return min(gaps)


EVEN_S = STEPS * STEP_S / FRAGMENTS


def test_a_leaver_does_not_end_the_staggering() -> None:
    fleet = PacedFleet("abc")
    fleet.run(0.0, 60.0)
    assert fleet.spacing_min_s() == pytest.approx(EVEN_S, rel=0.1)

    fleet.leave("c", 61.0)
    fleet.run(61.0, 130.0)

    assert fleet.spacing_min_s() == pytest.approx(EVEN_S, rel=0.1)


def test_an_outage_does_not_end_the_staggering() -> None:
    fleet = PacedFleet("ab")
    fleet.run(0.0, 60.0)
    fleet.away = True
    fleet.run(60.0, 95.0)
    fleet.away = False
    fleet.run(95.0, 180.0)

    assert fleet.spacing_min_s() == pytest.approx(EVEN_S, rel=0.1)


def test_late_timers_do_not_stretch_the_interval() -> None:
    fleet = PacedFleet("ab", late_s=0.2)
    fleet.run(0.0, 200.0)
    calls = fleet.called[3]

    assert (calls[-1] - calls[1]) / (len(calls) - 2) == pytest.approx(STEPS * STEP_S, rel=0.005)


@pytest.mark.parametrize("absurd_s", [1e-320, 1e-300, 1e12])
def test_absurd_step_times_neither_end_a_rhythm_nor_keep_a_learner_alive(absurd_s: float) -> None:
    """They are a peer's word: three learners with such a one fell silent, and the healthy one goes on being called."""
    fleet = PacedFleet(["a"])
    for number, name in enumerate(("x", "y", "z")):
        fleet.shard.handle(beat_of(name, 0.0, incarnation=number, step_s=absurd_s, tokens=0))
    known = fleet.shard.learners["x"]

    assert known.step_s == pacing.plausible(min(absurd_s, pacing.SLOWER_MAX * pacing.SEEN_S_MIN))
    assert not known.is_heard(10.0 * pacing.STEP_S_MAX + 10.0, silence_s=5.0)
    fleet.shard.handle(beat_of("a", 20.0, step_s=STEP_S, tokens=0))
    for fragment in range(FRAGMENTS):
        fleet.shard.handle(events.TimerFired(at_s=21.0, name=f"due/{fragment}"))
    dues = [slot.due_s for slot in fleet.shard.slots.values()]
    assert all(due is not None and math.isfinite(due) for due in dues)


def test_a_heartbeat_behind_its_farewell_brings_nobody_back() -> None:
    """The farewell comes by the queue, the heartbeat does not; its next incarnation is somebody new."""
    fleet = PacedFleet(["a", "b", "c"])
    for name in ("a", "b"):
        fleet.shard.handle(beat_of(name, 0.5, step_s=STEP_S, tokens=0))
    for name in ("b", "c"):  # the second was never heard before
        fleet.shard.handle(events.LearnerLeft(at_s=1.0, learner=name, incarnation=1))
        fleet.shard.handle(beat_of(name, 1.1, step_s=STEP_S, tokens=0))
    assert fleet.shard.live() == fleet.shard.present() == {"a"}

    fleet.shard.handle(beat_of("b", 1.3, incarnation=2, step_s=STEP_S, tokens=0))
    assert fleet.shard.live() == {"a", "b"}
