"""Hypothesis drives the real machines through joins, deaths, delays, duplicates, reorderings and clock steps."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from atoll.errors import AtollError
from atoll.protocol.events import Acknowledge, PushKey
from atoll.protocol.round import FragmentRound
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import FragmentSlot
from atoll.protocol_testing import World

NAMES = ("a", "b", "c")
INDEX = st.integers(0, 7)
PROFILE = settings(
    max_examples=250, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class Weather(RuleBasedStateMachine):
    """Three learner ids, one shard, two fragments, and everything that can go wrong between them."""

    @initialize(
        quorum=st.integers(1, 2),
        adoption=st.sampled_from(["overwrite", "carry"]),
        age_max=st.integers(0, 2),
    )
    def begin(self, quorum: int, adoption: str, age_max: int) -> None:
        """Choose the run's settings."""
        chosen: dict[str, object] = {"fragments": 2, "shards": 1, "interval_steps": 4, "silence_s": 6.0}
        chosen |= {"quorum": quorum, "adoption": adoption, "age_max": age_max}
        self.world = World(msgspec.convert(chosen, ProtocolSettings).check())

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        """A learner arrives, or returns after a death."""
        if name not in self.world.lives:
            self.world.join(name)

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX)
    def die(self, index: int) -> None:
        """A learner is killed."""
        if index == 0:
            self.world.die(min(self.world.lives))

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX, steps=st.integers(1, 5), beat=st.booleans())
    def train(self, index: int, steps: int, *, beat: bool) -> None:
        """A learner takes some steps, and perhaps reports."""
        name = sorted(self.world.lives)[index % len(self.world.lives)]
        for _ in range(steps):
            self.world.step(name)
        if beat:
            self.world.beat(name)

    @rule(for_s=st.sampled_from([0.1, 0.5, 1.0, 4.0, 60.0]))
    def wait(self, for_s: float) -> None:
        """Time passes, sometimes in a jump."""
        self.world.tick(for_s)

    @rule(index=INDEX, again=st.booleans())
    def deliver(self, index: int, *, again: bool) -> None:
        """The queue delivers something, in any order, perhaps twice."""
        self.world.deliver(index, again=again)

    @rule(index=INDEX, spoil=st.sampled_from(["", "", "", "not_finite"]))
    def read(self, index: int, spoil: str) -> None:
        """The workbench finishes with something."""
        self.world.read(index, spoil)

    @rule(index=INDEX, lose=st.booleans())
    def whisper(self, index: int, *, lose: bool) -> None:
        """A call or head arrives late, out of order, or never."""
        self.world.whisper(index, lose=lose)

    @rule(index=INDEX)
    def commit(self, index: int) -> None:
        """A commit becomes durable."""
        self.world.commit(index)

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX)
    def drain(self, index: int) -> None:
        """A learner leaves in good order."""
        if index == 1:
            self.world.drain(min(self.world.lives))

    def teardown(self) -> None:
        """After the storm: everything arrives, everybody leaves, the books agree."""
        if not hasattr(self, "world"):
            return
        settled = self.world.heal()
        assert settled.exact, (settled.errors, settled.fates, settled.trained, self.world.log[-30:])


def test_no_storm_breaks_a_promise() -> None:
    """After every fact every invariant holds, and at the end every token has exactly one fate."""
    run_state_machine_as_test(Weather, settings=PROFILE)


def forget_settled(self: FragmentSlot, key: PushKey) -> None:
    """Planted: nothing is remembered, so a redelivery is taken for new."""
    del self, key


def always_welcome(self: FragmentRound, offer: object) -> str:
    """Planted: too old and too new are folded as well."""
    del self, offer
    return ""


def acknowledged_at_once(original: Callable[..., list[object]]) -> Callable[..., list[object]]:
    """Planted: a contribution is acknowledged when it becomes ready, before its commit."""

    def handle(self: object, fact: object) -> list[object]:
        actions = original(self, fact)
        key = getattr(fact, "key", None)
        if type(fact).__name__ == "ContributionReady" and isinstance(key, PushKey):
            return [Acknowledge(key=key, fate="merged"), *actions]
        return actions

    return handle


def count_twice(original: Callable[..., object]) -> Callable[..., object]:
    """Planted: a folded contribution is listed twice."""

    def fold(self: FragmentRound, offer: object, cause_id: str) -> object:
        command = original(self, offer, cause_id)
        self.shares.append(self.shares[-1])
        return command

    return fold


@pytest.mark.parametrize("bug", ["no dedupe", "any base", "ack before commit", "counted twice"])
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storm is strong enough to find what it is there to find."""
    if bug == "no dedupe":
        monkeypatch.setattr(FragmentSlot, "remember", forget_settled)
    elif bug == "any base":
        monkeypatch.setattr(FragmentRound, "refusal", always_welcome)
    elif bug == "ack before commit":
        from atoll.protocol.shard import Shard  # noqa: PLC0415  (patched here only)

        monkeypatch.setattr(Shard, "handle", acknowledged_at_once(Shard.handle))  # type: ignore[arg-type]
    else:
        monkeypatch.setattr(FragmentRound, "fold", count_twice(FragmentRound.fold))

    with pytest.raises((AtollError, AssertionError, ExceptionGroup)):
        run_state_machine_as_test(Weather, settings=settings(PROFILE, phases=[Phase.generate]))
