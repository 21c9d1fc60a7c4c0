"""Seeded walks through the same world as the Hypothesis machine: many cheap schedules, each with weather of its own.

Every walk draws its settings and how likely each kind of happening is (swarm testing), so that rare combinations, such
as everybody leaving while a commit is on its way, are common in some walks. A failure names its seed; `SCHEDULES=20000
make test ARGS="-k walk"` walks longer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from atoll.protocol.books import Books, Settled
from atoll.protocol.events import Acknowledge, Action, Keep, PushKey
from atoll.protocol.ledger import Ledger
from atoll.protocol.round import FragmentRound, Offer
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import FragmentSlot, Shard
from atoll.protocol_testing import World

NAMES = ("a", "b", "c")
STEPS = 120
SCHEDULES = int(os.environ.get("SCHEDULES", "500"))
PLANTED_SCHEDULES = 1000
FOLD = Shard._fold
ENTER = Books.enter_into


def walk(seed: int) -> None:
    """Walk `STEPS` happenings from `seed`, heal, and check that the books agree; every invariant is checked on the way."""
    dice = random.Random(seed)
    chosen: dict[str, object] = {"fragments": 2, "shards": 1, "interval_steps": 4, "silence_s": 6.0}
    chosen |= {
        "quorum": dice.choice([1, 1, 2]),
        "adoption": dice.choice(["overwrite", "carry"]),
        "age_max": dice.randint(0, 2),
        "grace_gamma": dice.choice([0.0, 0.8]),
    }
    world = World(msgspec.convert(chosen, ProtocolSettings).check())
    happenings = [join, die, train, wait, deliver, redeliver, read, spoil, whisper, work, leave, all_leave, crash]
    weights = [dice.choice([1, 4, 16]) * (0.05 if happening in RARE else 1.0) for happening in happenings]
    for _ in range(STEPS):
        dice.choices(happenings, weights)[0](world, dice)
    settled = world.heal()
    assert settled.exact, (settled.errors, settled.fates, settled.trained)


def walks(count: int) -> None:
    """Walk from the seeds 0 to `count` - 1; a failure names its seed."""
    for seed in range(count):
        try:
            walk(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def join(world: World, dice: random.Random) -> None:
    """A learner arrives, or returns after a death."""
    name = dice.choice(NAMES)
    if name not in world.lives:
        world.join(name)


def die(world: World, dice: random.Random) -> None:
    """A learner is killed."""
    if world.lives:
        world.die(dice.choice(sorted(world.lives)))


def train(world: World, dice: random.Random) -> None:
    """A learner takes some steps, and perhaps reports."""
    if world.lives:
        name = dice.choice(sorted(world.lives))
        for _ in range(dice.randint(1, 4)):
            world.step(name)
        if dice.random() < 0.7:
            world.beat(name)


def wait(world: World, dice: random.Random) -> None:
    """Time passes, sometimes in a jump."""
    world.tick(dice.choice([0.1, 0.5, 1.0, 1.0, 4.0, 60.0]))


def deliver(world: World, dice: random.Random) -> None:
    """The queue delivers something, in any order."""
    world.deliver(dice.randint(0, 7))


def redeliver(world: World, dice: random.Random) -> None:
    """An acknowledgement was lost."""
    world.deliver(dice.randint(0, 7), again=True)


def read(world: World, dice: random.Random) -> None:
    """The workbench finishes with something."""
    world.read(dice.randint(0, 7))


def spoil(world: World, dice: random.Random) -> None:
    """The workbench finds that something cannot be used."""
    world.read(dice.randint(0, 7), "not_finite")


def whisper(world: World, dice: random.Random) -> None:
    """A call or head arrives late, out of order, or never."""
    world.whisper(dice.randint(0, 7), lose=dice.random() < 0.2)


def work(world: World, dice: random.Random) -> None:
    """A commit becomes durable, or books, or an acknowledgement arrives."""
    world.work(dice.randint(0, 7))


def crash(world: World, dice: random.Random) -> None:
    """The shard's owner is killed between any two of its acts."""
    del dice
    world.crash_shard()


def leave(world: World, dice: random.Random) -> None:
    """A learner leaves in good order."""
    if world.lives:
        world.drain(dice.choice(sorted(world.lives)))


def all_leave(world: World, dice: random.Random) -> None:
    """The token target: everybody leaves at once, and the farewells meet whatever is being committed."""
    for name in sorted(world.lives):
        world.drain(name)
    for _ in range(2 * len(world.queue)):
        deliver(world, dice)
        read(world, dice)


RARE = (die, leave, all_leave, crash)


def test_no_walk_breaks_a_promise() -> None:
    """After every fact every invariant holds, and at the end every token has exactly one fate."""
    walks(SCHEDULES)


def forget_settled(self: Settled, push: int) -> None:
    """Planted: nothing is remembered, so a redelivery is taken for new."""
    del self, push


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


def fold_before_all(self: Shard, slot: FragmentSlot, ready: list[Offer], at_s: float, cause_id: str) -> list[Action]:
    """Planted: a final contribution opens its round before the others that waited with it are folded."""
    return [action for offer in ready for action in FOLD(self, slot, [offer], at_s, cause_id)]


def without_keeping(original: Callable[..., list[object]]) -> Callable[..., list[object]]:
    """Planted: refusals and farewells are acknowledged before anything durable knows of them."""

    def handle(self: object, fact: object) -> list[object]:
        return [action for action in original(self, fact) if not isinstance(action, Keep)]

    return handle


def books_of_later(original: Callable[..., list[Action]]) -> Callable[..., list[Action]]:
    """Planted: books are kept as they stand when everything a fact led to is decided, with commits that never happened."""

    def handle(self: Shard, fact: object) -> list[Action]:
        actions = original(self, fact)
        return [
            replace(action, books=self.slots[action.fragment].books.frozen(self.ledger))
            if isinstance(action, Keep)
            else action
            for action in actions
        ]

    return handle


def one_ledger(self: Books, ledger: Ledger) -> None:
    """Planted: an heir takes over what learners reported, and not what was settled."""
    ENTER(Books(reports=self.reports), ledger)


def reports_forgotten(self: Books, ledger: Ledger) -> bytes:
    """Planted: the books do not carry what learners reported."""
    del ledger
    return msgspec.json.encode(Books(self.settled))


BUGS = [
    "no dedupe",
    "any base",
    "ack before commit",
    "counted twice",
    "opened too early",
    "ack before keeping",
    "lost fates",
    "lost reports",
    "books of a later moment",
]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walks are wild enough to find what they are there to find."""
    if bug == "no dedupe":
        monkeypatch.setattr(Settled, "note", forget_settled)
    elif bug == "any base":
        monkeypatch.setattr(FragmentRound, "refusal", always_welcome)
    elif bug == "ack before commit":
        monkeypatch.setattr(Shard, "handle", acknowledged_at_once(Shard.handle))  # type: ignore[arg-type]
    elif bug == "ack before keeping":
        monkeypatch.setattr(Shard, "handle", without_keeping(Shard.handle))  # type: ignore[arg-type]
    elif bug == "books of a later moment":
        monkeypatch.setattr(Shard, "handle", books_of_later(Shard.handle))
    elif bug == "lost fates":
        monkeypatch.setattr(Books, "enter_into", one_ledger)
    elif bug == "lost reports":
        monkeypatch.setattr(Books, "frozen", reports_forgotten)
    elif bug == "opened too early":
        monkeypatch.setattr(Shard, "_fold", fold_before_all)
    else:
        monkeypatch.setattr(FragmentRound, "fold", count_twice(FragmentRound.fold))

    with pytest.raises(AssertionError, match="seed"):
        walks(PLANTED_SCHEDULES)
