"""Hypothesis drives the real machines through joins, deaths, delays, duplicates, reorderings and clock steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from atoll.protocol.settings import ProtocolSettings
from support.protocol_world import ProtocolWorld

NAMES = ("a", "b", "c")
INDEX = st.integers(0, 7)
PROFILE = settings(
    max_examples=2 * settings().max_examples,
    stateful_step_count=50,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class ProtocolFaults(RuleBasedStateMachine):
    """Three learner ids, one shard, two fragments, and everything that can go wrong between them."""

    @initialize(
        quorum=st.integers(1, 2),
        adoption=st.sampled_from(["overwrite", "carry"]),
        age_max=st.integers(0, 2),
        grace_gamma=st.sampled_from([0.0, 0.8]),
        ending=st.sampled_from([("apart", 0), ("together", 0), ("together", 60)]),
    )
    def begin(self, quorum: int, adoption: str, age_max: int, grace_gamma: float, ending: tuple[str, int]) -> None:
        chosen: dict[str, object] = {"fragments": 2, "shards": 1, "interval_steps": 4, "silence_s": 6.0}
        chosen |= {"quorum": quorum, "adoption": adoption, "age_max": age_max, "grace_gamma": grace_gamma}
        chosen |= {"ending": ending[0], "tokens_target": ending[1]}
        self.world = ProtocolWorld(msgspec.convert(chosen, ProtocolSettings).check())

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.world.lives:
            self.world.join(name)

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX)
    def die(self, index: int) -> None:
        if index == 0:
            self.world.die(min(self.world.lives))

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX, steps=st.integers(1, 5), beat=st.booleans())
    def train(self, index: int, steps: int, *, beat: bool) -> None:
        name = sorted(self.world.lives)[index % len(self.world.lives)]
        for _ in range(0 if self.world.lives[name].island.draining else steps):
            self.world.step(name)
        if beat:
            self.world.beat(name)

    @rule(for_s=st.sampled_from([0.1, 0.5, 1.0, 4.0, 60.0]))
    def wait(self, for_s: float) -> None:
        self.world.tick(for_s)

    @rule(index=INDEX, again=st.booleans())
    def deliver(self, index: int, *, again: bool) -> None:
        self.world.deliver(index, again=again)

    @rule(index=INDEX, spoil=st.sampled_from(["", "", "", "not_finite"]))
    def read(self, index: int, spoil: str) -> None:
        self.world.read(index, spoil)

    @rule(index=INDEX, lose=st.booleans())
    def core_message(self, index: int, *, lose: bool) -> None:
        """A call or head arrives late, out of order, or never."""
        self.world.core_message(index, lose=lose)

    @rule(holding=st.booleans())
    def slow(self, *, holding: bool) -> None:
        """Pushes and frames take their time from now on, or no longer."""
        self.world.holding = holding

    @rule(index=INDEX, reason=st.sampled_from(["", "", "gave_up", "not_finite"]))
    def send(self, index: int, reason: str) -> None:
        self.world.send(index, reason)

    @rule(index=INDEX, fail=st.booleans())
    def fetch(self, index: int, *, fail: bool) -> None:
        self.world.fetch(index, fail=fail)

    @rule(index=INDEX)
    def take_over(self, index: int) -> None:
        if index == 0:
            self.world.take_over()

    @rule(index=INDEX)
    def commit(self, index: int) -> None:
        self.world.commit(index)

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX)
    def drain(self, index: int) -> None:
        if index < 2:
            self.world.drain(min(self.world.lives))

    @precondition(lambda self: self.world.lives)
    @rule(index=INDEX)
    def end(self, index: int) -> None:
        """The token target: everybody leaves at once, and the farewells meet whatever is being committed."""
        if index > 1:
            return
        for name in sorted(self.world.lives):
            self.world.drain(name)
        for _ in range(2 * len(self.world.queue)):
            self.world.deliver(0)
            self.world.read(0, "")

    def teardown(self) -> None:
        """After the storm: everything arrives, everybody leaves, the ledgers agree."""
        if not hasattr(self, "world"):
            return
        settled = self.world.heal()
        assert settled.exact, (settled.errors, settled.fates, settled.trained, self.world.log[-30:])


def test_no_storm_breaks_a_promise() -> None:
    """After every fact every invariant holds, and at the end every token has exactly one fate."""
    run_state_machine_as_test(ProtocolFaults, settings=PROFILE)


def many_short_lives(seed: int) -> ProtocolWorld:
    """Return a world after many lives that leave, die and come again, with duplicates, delays and takeovers."""
    chance = random.Random(seed)
    chosen = {"fragments": 2, "shards": 1, "interval_steps": 4, "silence_s": 6.0, "quorum": 1, "age_max": 1 + seed % 2}
    world = ProtocolWorld(msgspec.convert(chosen, ProtocolSettings).check())
    for _ in range(80):
        for name in NAMES:
            if name not in world.lives:
                world.join(name)
            for _ in range(
                chance.randrange(1, 4) if name in world.lives and not world.lives[name].island.draining else 0
            ):
                world.step(name)
            world.beat(name)
        world.tick(chance.choice([0.5, 1.0, 4.0]))
        for _ in range(chance.choice([0, 8, 200])):
            if chance.random() < 0.1:
                world.deliver(chance.randrange(8), again=True)
            may_happen: list[Callable[[int], None]] = [world.core_message, world.deliver, world.read, world.work]
            chance.choice(may_happen)(chance.randrange(3))
        if chance.random() < 0.2:
            world.die(chance.choice(sorted(world.lives)))
        if world.lives and chance.random() < 0.2:
            world.drain(chance.choice(sorted(world.lives)))
        if chance.random() < 0.05:
            world.take_over()
    return world


def test_no_storm_breaks_a_promise_of_lives_that_are_folded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No life that is over keeps an account of its own: what comes late, twice, or to an heir still has one fate."""
    monkeypatch.setattr("atoll.protocol.ledger.KEPT_LIVES", 0)
    run_state_machine_as_test(ProtocolFaults, settings=PROFILE)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 24), marks=pytest.mark.second_tier)], ids=str)
def test_many_lives_that_are_folded_at_once_leave_exact_books(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.setattr("atoll.protocol.ledger.KEPT_LIVES", 0)
    for seed in seeds:
        world = many_short_lives(seed)
        settled = world.heal()
        assert settled.exact, (seed, settled.errors, world.log[-30:])
        assert world.folded > 0, seed
