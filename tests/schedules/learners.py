"""One life of a learner: production's session, boundary, driver, leases, lender and supply around a training of small sums.

join ─► its own checkpoint, a peer's state or a fresh one ─► batch, step, boundary … ─► data back, drain, goodbye
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from atoll.base.clock import Identity
from atoll.base.errors import AtollError, BrokerUnavailable
from atoll.client.driver import AdoptableFragment
from atoll.client.optimizer_state import borrow, packed_bytes_max, restore_loan
from atoll.client.options import JoinOptions
from atoll.client.parameters import rules_of
from atoll.client.session import JoinRequest, Session
from atoll.client.step_hook import StepHook, plan_origin
from atoll.model.pytrees import describe, gather
from atoll.wire.messages import RunRecord
from atoll_learner.feed import BatchReader, Supply
from schedules import values
from schedules.network import ScheduleBus
from schedules.processes import Process

if TYPE_CHECKING:
    from schedules.world import World

BLOCK_TOKENS = 8
RULES = {"e": "direct"}
SEQUENCE = 4
BATCH = 2
RECOVER_S = 5.0
DRAIN_S = 90.0
CHECKPOINT_STEPS = 5
LOOK_S = 0.2


class Corpus:
    """Blocks of tokens that say where they are from: (epoch, place, offset) as one number."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.block_tokens = BLOCK_TOKENS

    def check_trainable(self, sequence: int) -> None:
        assert sequence <= self.block_tokens

    def blocks_at(self, seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the blocks at places of an epoch, unlike any other's."""
        del seed
        return epoch * self.blocks + positions

    def window(self, block: int, at: int, tokens: int) -> npt.NDArray[np.int32]:
        return np.arange(at, at + tokens, dtype=np.int32) + block * BLOCK_TOKENS


class Learner:
    """One process that is, or wants to be, the learner `name`."""

    def __init__(self, world: World, process: Process, name: str, bus: ScheduleBus, identity: Identity) -> None:
        self.world = world
        self.process = process
        self.name = name
        self.bus = bus
        self.identity = identity
        self.stop = asyncio.Event()
        self.session: Session | None = None
        self.joined = self.left = False
        self.joined_s = 0.0
        self.spoil = False
        self._taken: list[AdoptableFragment] = []
        self.dice = random.Random(f"{world.seed}/{process.name}")
        self.numbers = np.random.default_rng(self.dice.getrandbits(32))

    async def live(self) -> None:
        """Join, train until told to leave, leave."""
        params = self.world.params(self.dice)
        shut = self.bus.close
        try:
            session = self.session = await Session.open(self.bus, self._request(params), self.process, self.identity)
            shut = session.shut
            self._check_frames(session, session.driver.first_frames())
            boundary = StepHook(session, params, self.process)
            await session.begin(boundary.travelling)
            self._watch(session)
            self.world.joined(self)
            state, cursor = await self._recovered(session, boundary)
            supply = await self._supply(session, cursor)
            boundary.begin()
            await self._train(session, boundary, supply, state)
            await self._leave(session, supply)
        finally:
            await shut()

    def _request(self, params: Mapping[str, Any]) -> JoinRequest:
        world = self.world
        layout, origin = plan_origin(params, world.settings.fragments, rules_of(describe(params), RULES))
        record = RunRecord(
            run=world.run,
            founder=self.name,
            nonce=self.identity.nonce(8),
            founded_at_s=self.process.wall(),
            layout=layout,
            protocol=world.settings,
            data="corpus",
            seed=world.seed,
        )
        options = JoinOptions(data_blocks=world.data_blocks, encode="host", region=world.region_of(self.name))
        return JoinRequest(self.name, record, origin, options)

    # --- what is checked ----------------------------------------------------------------------------------------------

    def _watch(self, session: Session) -> None:
        driver = session.driver
        end_step = driver.end_step

        def checked(tokens: int, snapshot: Mapping[str, Any]) -> list[AdoptableFragment]:
            self._taken = end_step(tokens, snapshot)
            self._check_frames(session, self._taken)
            return self._taken

        driver.end_step = checked  # type: ignore[method-assign]

    def _check_frames(self, session: Session, ready: list[AdoptableFragment]) -> None:
        # Heads outlive foundings. A learner that was cut off while the run was founded anew follows the new heads until it
        # reads the run record; the shards refuse what it sends.
        present = self.world.safety.run
        foundings = {session.run.nonce, session.run.nonce if present is None else present.nonce}
        for item in ready:
            frame = item.frame
            known = {self.world.safety.digests.get((each, frame.fragment, frame.version)) for each in foundings}
            self.world.check(
                values.digest_of(frame.values) in known,
                "who holds a version holds its values",
                (frame.fragment, frame.version),
            )

    def _check_adopted(self, boundary: StepHook, taken: list[AdoptableFragment]) -> None:
        if self.world.settings.adoption != "overwrite":
            return
        layout = self.world.layout
        for item in taken:
            got = gather(layout, boundary.leaves, item.frame.fragment)
            same = np.array_equal(got, item.frame.values)
            self.world.check(same, "who adopts a version trains on from it", item.frame.fragment)

    # --- training -----------------------------------------------------------------------------------------------------

    async def _recovered(self, session: Session, boundary: StepHook) -> tuple[dict[str, Any], Mapping[Any, Any]]:
        """Return the inner state to go on with, and the place in the data."""
        kept = self.world.disks.get(self.name)
        fresh = self._state(0)
        if kept is not None:
            self.world.tally["starts from a checkpoint"] += 1
            return {name: array.copy() for name, array in kept[0].items()}, kept[1]
        if boundary.run_tokens > 0 and not boundary.done:
            loan = await borrow(session.bus, session.run, self.name, packed_bytes_max(fresh), RECOVER_S)
            borrowed = restore_loan(loan, fresh, 0.0)
            if borrowed is not None:
                self.world.tally["starts from a peer's state"] += 1
                self.world.check_loan(borrowed)
                return borrowed.state, {}
        self.world.tally["starts afresh"] += 1
        return fresh, {}

    def _state(self, step: int) -> dict[str, Any]:
        """Return the inner state after so many steps: every number of it says the step and the run."""
        mark = np.float32(step)
        return {"count": np.full((3,), mark), "mu": np.full((200,), mark), "nu": np.full((150,), mark)}

    async def _supply(self, session: Session, cursor: Mapping[Any, Any]) -> Supply:
        corpus: Any = Corpus(self.world.data_blocks)
        reader = BatchReader(corpus, SEQUENCE, BATCH, session.run.seed)
        supply = Supply(session.leases, asyncio.get_running_loop().create_task, reader, self.world.lease_blocks)
        if cursor:
            try:
                for grant in await session.leases.resume(cursor):
                    self.world.tally["data units inherited"] += 1
                    supply._grant(grant)
            except AtollError:
                self.world.tally["data not resumed"] += 1
        supply.want()
        return supply

    async def _train(self, session: Session, boundary: StepHook, supply: Supply, state: dict[str, Any]) -> None:
        step_s = self.world.step_s_of(self.name)
        params: dict[str, Any] = boundary.params
        while not self._over(session, boundary):
            batch = await self._batch(session, boundary, supply)
            if batch is None:
                break
            self.world.read(self.name, batch)
            await asyncio.sleep(max(step_s * (0.8 + 0.4 * self.dice.random()), boundary.held_s()))
            params = self._stepped(params)
            self._taken = []
            params = boundary.step(params, tokens=self.world.tokens_of(self.name, batch), loss=1.0)
            self._check_adopted(boundary, self._taken)
            donated, state = state, self._state(session.driver.machine.steps + 1)
            for array in donated.values():
                array[:] = -1.0  # a donated buffer belongs to the step that took it
            session.lender.share(state, donated=True)
            if session.driver.machine.steps % CHECKPOINT_STEPS == 0:
                kept = {name: array.copy() for name, array in state.items()}
                self.world.disks[self.name] = (kept, supply._reader.progress())

    def _stepped(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters after a step: whole numbers are added, the same for nobody else."""
        stepped = {
            name: leaf + self.numbers.integers(-2, 3, leaf.shape).astype(np.float32) for name, leaf in params.items()
        }
        if self.spoil:
            self.spoil = False
            first = next(iter(stepped))
            stepped[first].reshape(-1)[0] = np.inf
        return stepped

    def _over(self, session: Session, boundary: StepHook) -> bool:
        if boundary.done:
            self.world.check_end(self.name)
        return boundary.done or self.stop.is_set() or session.driver.failure is not None

    async def _batch(self, session: Session, boundary: StepHook, supply: Supply) -> Any:  # noqa: ANN401  (int32)
        while (batch := supply.poll()) is None:
            if self._over(session, boundary):
                return None
            supply.want()
            if isinstance(supply.pending, asyncio.Task):
                await asyncio.wait({supply.pending}, timeout=LOOK_S)
            await asyncio.sleep(0.01)
        return batch

    async def _leave(self, session: Session, supply: Supply) -> None:
        if session.driver.failure is not None:
            raise session.driver.failure
        # A lease that is granted after all others were given back would be nobody's.
        if isinstance(supply.pending, asyncio.Task):
            await asyncio.wait({supply.pending}, timeout=DRAIN_S / 4.0)
        supply.publish()
        try:
            async with asyncio.timeout(DRAIN_S / 4.0):
                await session.leases.give_back()
            self.world.disks.pop(self.name, None)
        except (AtollError, TimeoutError):
            self.world.tally["data not returned"] += 1
        try:
            await session.drain(DRAIN_S)
        except TimeoutError as error:
            raise BrokerUnavailable("the last pushes are not durable", got=self.name) from error
        self.left = True
        self.world.left(self)
