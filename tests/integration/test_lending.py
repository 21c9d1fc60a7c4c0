"""An optimizer's state from a peer over the in-memory bus: honest peers, hostile ones, and none at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from atoll.base.background_tasks import LoopThread
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.checkpoints import loan_recovery
from atoll.client.join import IslandHandle, join
from atoll.client.optimizer_state import host_copy
from atoll.client.options import JoinOptions
from atoll.client.session import LENDING_STEPS_MIN
from atoll.codec.arrays import pack_arrays
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.blobs import BlobRef
from atoll.wire.events import event_of
from atoll.wire.messages import Control, Event, RunRecord, StateOffer, decode, encode
from atoll.wire.subjects import Subjects

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.zeros((3,))}
ADAM = optax.adam(1e-3)
WITHIN_S = 3.0
"""How long to ask where nobody lends."""
DEADLINE_S = 120.0


class LendingWorld:
    """A run on one in-memory broker, all islands on one loop."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.broker = MemoryBroker()
        self.home = LoopThread("world")

    async def bus(self) -> Bus:
        return MemoryBus(self.run, self.broker)

    def join(self, learner: str) -> IslandHandle:
        protocol = ProtocolSettings(fragments=2, shards=1)
        return join(
            self.bus,
            run=self.run,
            learner=learner,
            params=PARAMS,
            protocol=protocol,
            options=JoinOptions(home=self.home),
        )

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        return self.home.submit(work).result(240.0)


@pytest.fixture
def world(run: str) -> Iterator[LendingWorld]:
    world = LendingWorld(run)
    yield world
    world.home.stop()


def stepped(island: IslandHandle, steps: int = LENDING_STEPS_MIN) -> Any:  # noqa: ANN401  (an optax state)
    params, state = island.params, ADAM.init(PARAMS)
    for _ in range(steps):
        updates, state = ADAM.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = island.step(optax.apply_updates(params, updates), tokens=10, loss=1.0)
        island.share(state)
    return state


async def settle() -> None:
    """Return when everything that was handed to the loop before is done."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("donated", [True, False])
def test_a_joiner_gets_the_state_of_a_peer_that_trains(world: LendingWorld, donated: bool) -> None:  # noqa: FBT001
    """Bit for bit, from the next step boundary; the blob is gone afterwards, and the event log tells of it."""
    with world.join("peer") as peer, world.join("joiner") as joiner:
        state = stepped(peer)
        world.do(settle())
        asking = partial(joiner.recovered_state, ADAM.init(PARAMS), within_s=DEADLINE_S)
        asked = world.home.loop.run_in_executor(None, asking)
        while not asked.done():
            peer.share(state, donated=donated)
        borrowed = world.do(_result(asked))
        joiner.note_recovery(loan_recovery(joiner.incarnation, borrowed, joiner.run_tokens))
        world.do(settle())
        left = world.do(_stored(world, "ps.>"))
        told = world.do(_events(world, "recovered"))

    assert (borrowed.lender, borrowed.steps) == ("peer", LENDING_STEPS_MIN)
    assert borrowed.size_bytes > 0
    for one, two in zip(jax.tree.leaves(borrowed.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    assert left == 0
    assert [msgspec.json.decode(event.fields["source"]) for event in told] == ["peer"]


async def _result(future: Any) -> Any:  # noqa: ANN401
    return await future


async def _stored(world: LendingWorld, tail: str) -> int:
    bus = await world.bus()
    return await bus.purge(f"{Subjects(world.run).prefix}.{tail}")


async def _events(world: LendingWorld, kind: str) -> list[Event]:
    bus = await world.bus()
    return [event_of(entry.subject, entry.data) for entry in await bus.replay(Subjects(world.run).event(kind, "*"))]


def test_a_peer_that_has_hardly_trained_or_does_not_share_lends_nothing(world: LendingWorld) -> None:
    with world.join("newborn") as newborn, world.join("silent") as silent, world.join("joiner") as joiner:
        stepped(newborn, LENDING_STEPS_MIN - 1)
        silent.step(silent.params, tokens=10, loss=1.0)
        world.do(settle())

        assert joiner.recovered_state(ADAM.init(PARAMS), within_s=WITHIN_S) is None


Answer = Callable[[Bus, RunRecord, Subjects], Coroutine[Any, Any, bytes]]


def offer(run: RunRecord, **fields: Any) -> StateOffer:  # noqa: ANN401
    """Return an offer of a learner named `evil`."""
    told: dict[str, Any] = {"learner": "evil", "incarnation": 1, "run_nonce": run.nonce}
    return StateOffer(**{**told, "steps": 100, "tokens": 100, "run_tokens": 100, **fields})


def stored(arrays: dict[str, Any], **changes: Any) -> Answer:  # noqa: ANN401
    """Return an answer that names a blob of `arrays`, its reference changed."""

    async def answer(bus: Bus, run: RunRecord, subjects: Subjects) -> bytes:
        blob = await bus.put_blob(subjects.lent_stem("evil", 1, "abcd"), pack_arrays(arrays))
        return encode(offer(run, blob=msgspec.structs.replace(blob, **changes)))

    return answer


def said(**fields: Any) -> Answer:  # noqa: ANN401
    async def answer(bus: Bus, run: RunRecord, subjects: Subjects) -> bytes:
        del bus, subjects
        return encode(offer(run, **fields))

    return answer


async def garbage(bus: Bus, run: RunRecord, subjects: Subjects) -> bytes:
    del bus, run, subjects
    return b"\xff\x00 garbage"


async def gone(bus: Bus, run: RunRecord, subjects: Subjects) -> bytes:
    blob = await bus.put_blob(subjects.lent_stem("evil", 1, "abcd"), pack_arrays(arrays()))
    await bus.purge(f"{blob.stem}.*")
    return encode(offer(run, blob=blob))


def arrays(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    good = host_copy(ADAM.init(PARAMS))
    return {**good, **changes}


MU = next(name for name in host_copy(ADAM.init(PARAMS)) if name.endswith("mu/w"))
HOSTILE: dict[str, Answer] = {
    "garbage": garbage,
    "another run": said(run_nonce="other"),
    "another peer": said(learner="somebody-else"),
    "no subject token": said(learner="a.>"),
    "no blob": said(),
    "a blob that is gone": gone,
    "a head for a blob": said(blob=BlobRef("atoll.x.gl.c.0.0.abcd", 1, 10, "0" * 32)),
    "wrong digest": stored(arrays(), digest="0" * 32),
    "absurd size": stored(arrays(), size_bytes=1 << 50),
    "absurd chunks": stored(arrays(), chunks=1 << 40),
    "not a number": stored(arrays(**{MU: np.full((4, 3), np.nan, np.float32)})),
    "another shape": stored(arrays(**{MU: np.zeros((3, 4), np.float32)})),
    "another dtype": stored(arrays(**{MU: np.zeros((4, 3), np.float64)})),
    "too much": stored(arrays(more=np.zeros(1 << 20, np.float32))),
    "too little": stored({MU: np.zeros((4, 3), np.float32)}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_peer_costs_a_joiner_nothing_but_time(world: LendingWorld, kind: str) -> None:
    with world.join("joiner") as joiner:
        stop = world.do(_evil(world, joiner.run, HOSTILE[kind]))
        borrowed = joiner.recovered_state(ADAM.init(PARAMS), within_s=WITHIN_S)
        joiner.step(joiner.params, tokens=10, loss=1.0)
        world.do(stop())

    assert borrowed is None


async def _evil(world: LendingWorld, run: RunRecord, answer: Answer) -> Callable[[], Coroutine[Any, Any, None]]:
    """Answer every question for a state: an offer first, then what `answer` makes; return how to stop."""
    bus, subjects = await world.bus(), Subjects(world.run)

    async def hear(who: str) -> None:
        async for core_message in await bus.listen(subjects.control(who)):
            control = decode(Control, core_message.data)
            assert core_message.reply is not None
            first = encode(offer(run)) if control.verb == "lend" else await answer(bus, run, subjects)
            await bus.tell(core_message.reply, first)

    tasks = [asyncio.create_task(hear(who)) for who in ("all", "evil")]
    await settle()

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return stop
