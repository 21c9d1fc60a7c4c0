"""One life of a learner in virtual time: what `atoll_learner.process` does with threads, as one coroutine.

    join (Session) ─► recover ─► batch, step, wait step_s, boundary … ─► data back, drain, goodbye

Session, driver, leases, peer recovery, supply, step hook, schedule and step are the production ones. The gradient is computed
from the step's beginning, on a device that learners may share, and waited for only when its values are needed: at a push, an
adoption or a heartbeat. Not here: checkpoints, compile turns, signals.

**Liars** train like the others and send something else than what they have learnt: the pseudo-gradient backwards, `SCALE` times
it, noise of its length, zeros, or their first one over and over. Frames are whole, norms are those of what is sent, books are
right, so nothing but the merge itself can bound what a liar does (`atoll.merge.robust`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np

from atoll.base.clock import Clock, Identity
from atoll.base.errors import AtollError, BrokerUnavailable
from atoll.base.large_arrays import Vector
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.client.checkpoints import fresh_recovery, loan_recovery
from atoll.client.join import RECOVER_S
from atoll.client.optimizer_state import borrow, packed_bytes_max, restore_loan
from atoll.client.options import JoinOptions
from atoll.client.parameters import rules_of
from atoll.client.pushing import Pusher
from atoll.client.session import JoinRequest, Session
from atoll.client.step_hook import StepHook, plan_origin
from atoll.codec import Read
from atoll.model.pytrees import describe
from atoll.protocol.events import Push
from atoll.settings import Settings
from atoll.wire.messages import RunRecord
from atoll_learner.checkpoints import RETURN_SHARE, possible
from atoll_learner.feed import LOOK_S, BatchReader, Supply
from atoll_learner.model import Params, embedding_rules
from atoll_learner.process import LearnerWork
from atoll_learner.train import Step, init_optimizer
from atoll_learner.train_settings import learning_rate
from atoll_simulator.scenario import Lie

SCALE: Final = 10.0


class Liar:
    """One learner's vectors in place of its pseudo-gradients."""

    def __init__(self, lie: Lie, seed: str) -> None:
        self._lie = lie
        self._dice = np.random.default_rng(list(seed.encode()))
        self._first: dict[int, Vector] = {}

    def instead(self, fragment: int, truth: Vector) -> Vector:
        """Return what is sent in place of `truth`, flat float32."""
        if self._lie == "sign flip":
            return -truth
        if self._lie == "scaling":
            return np.float32(SCALE) * truth
        if self._lie == "zeros":
            return np.zeros_like(truth)
        if self._lie == "copied":
            return self._first.setdefault(fragment, truth.copy())
        drawn = self._dice.standard_normal(truth.size, dtype=np.float32)
        length = np.float32(np.linalg.norm(truth) / max(1e-20, float(np.linalg.norm(drawn))))
        return drawn * length


def corrupt(pusher: Pusher, liar: Liar) -> None:
    """Have a pusher send the liar's vectors from now on."""
    honest = pusher.push

    async def push(
        action: Push, origin: Vector, theta: Read, loss: Callable[[], Coroutine[Any, Any, float | None]]
    ) -> None:
        sent = origin - liar.instead(action.fragment, origin - theta(0, origin.size))
        await honest(action, origin, lambda start, stop: sent[start:stop], loss)

    pusher.push = push  # type: ignore[method-assign]  # the class is production's, the lie is ours


log = get(__name__)

SMALLEST_STEP: Final = 0.05
"""No step takes less than this share of the mean, whatever was drawn."""


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Parts that all learners of a run share: settings, checked work, the first parameters and the compiled step."""

    settings: Settings
    work: LearnerWork
    params: Params
    step: Step


def warm(shared: SharedParts) -> None:
    """Compile the step for every device, so that the first steps of a run take no longer than others."""
    train = shared.work.train
    shape = (train.batch, train.sequence + 1)
    batch = np.zeros(shape if train.accumulation == 1 else (train.accumulation, *shape), dtype=np.int32)
    for device in jax.local_devices():
        params = jax.device_put(shared.params, device)
        state = jax.device_put(init_optimizer(train, params), device)
        shared.step(params, state, batch, 0.0)[2].block_until_ready()


class StepPace:
    """Step times of a learner: mean `mean_s`, drawn from a lognormal of variation `cv`; the first step takes longer."""

    def __init__(self, mean_s: float, cv: float, dice: random.Random, *, compile_s: float = 0.0) -> None:
        """Draw from `dice`; the first step takes `compile_s` longer."""
        self._mean_s = mean_s
        self._compile_s = compile_s
        self._sigma = math.sqrt(math.log1p(cv * cv))
        self._dice = dice

    def next_s(self) -> float:
        """Return the seconds of the next step."""
        more_s, self._compile_s = self._compile_s, 0.0
        drawn = math.exp(self._dice.gauss(-0.5 * self._sigma**2, self._sigma)) if self._sigma else 1.0
        return more_s + self._mean_s * max(SMALLEST_STEP, drawn)


@dataclass(frozen=True, slots=True)
class LifeParts:
    """Parts that differ between two lives of a learner; `stop` ends the life, `on_step` is called after each step.

    The process had been starting for `start_s` before this life begins. A `liar` is the same in all lives of its learner.
    """

    clock: Clock
    identity: Identity
    pace: StepPace
    device: jax.Device
    stop: asyncio.Event
    on_step: Callable[[], None]
    start_s: float
    liar: Liar | None = None


class SimulatedLearner:
    """One incarnation of learner `name`, on the running loop."""

    def __init__(self, shared: SharedParts, name: str, bus: Bus, parts: LifeParts) -> None:
        self._shared = shared
        self._name = name
        self._bus = bus
        self._parts = parts

    async def live(self) -> None:
        """Join, train to the end, leave; raise the errors that end a real learner's process."""
        params = jax.device_put(self._shared.params, self._parts.device)
        shut = self._bus.close
        try:
            session = await Session.open(self._bus, self._request(params), self._parts.clock, self._parts.identity)
            shut = session.shut
            boundary = StepHook(session, params, self._parts.clock)
            await session.begin(boundary.travelling)
            if self._parts.liar is not None:
                corrupt(session.driver.pusher, self._parts.liar)
            state = await self._recovered(session, boundary)
            supply = self._supply(session)
            boundary.begin()
            await self._train(session, boundary, supply, state)
            await self._leave(session, supply)
        finally:
            # A kill cancels us: a dead process does not tidy up.
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                await shut()

    def _request(self, params: Params) -> JoinRequest:
        settings, work = self._shared.settings, self._shared.work
        layout, origin = plan_origin(
            params, settings.protocol.fragments, rules_of(describe(params), embedding_rules(work.model))
        )
        record = RunRecord(
            run=settings.run,
            founder=self._name,
            nonce=self._parts.identity.nonce(8),
            founded_at_s=self._parts.clock.wall(),
            layout=layout,
            protocol=settings.protocol,
            model=work.model.describe(),
            data=work.shards.meta.fingerprint,
            seed=settings.seed,
        )
        options = replace(
            JoinOptions.of(settings.learner),
            data_blocks=work.shards.blocks,
            start_s=self._parts.start_s,
            log_adoptions=True,
        )
        return JoinRequest(self._name, record, origin, options)

    async def _recovered(self, session: Session, boundary: StepHook) -> Any:  # noqa: ANN401  (an optax state)
        """Return a healthy peer's optimizer state, else a fresh one, and record in the event log which."""
        train = self._shared.work.train
        fresh = jax.device_put(init_optimizer(train, boundary.params), self._parts.device)
        incarnation = session.member.incarnation
        state, recovered = fresh, fresh_recovery(incarnation)
        if boundary.run_tokens > 0 and not boundary.done:
            began_s = self._parts.clock.monotonic()
            loan = await borrow(session.bus, session.run, self._name, packed_bytes_max(fresh), RECOVER_S)
            borrowed = restore_loan(loan, fresh, self._parts.clock.monotonic() - began_s)
            if borrowed is not None and possible(borrowed, train):
                state, recovered = borrowed.state, loan_recovery(incarnation, borrowed, boundary.run_tokens)
        with contextlib.suppress(AtollError):
            await session.record(recovered)
        return state

    def _supply(self, session: Session) -> Supply:
        work, settings = self._shared.work, self._shared.settings
        windows = work.train.batch * work.train.accumulation
        reader = BatchReader(work.shards, work.train.sequence, windows, session.run.seed)
        supply = Supply(session.leases, self._call, reader, settings.data.lease_blocks)
        supply.want()
        return supply

    @staticmethod
    def _call(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    async def _train(self, session: Session, boundary: StepHook, supply: Supply, state: Any) -> None:  # noqa: ANN401
        train, target = self._shared.work.train, session.run.protocol.tokens_target
        over = functools.partial(self._over, session, boundary)
        params: Any = boundary.params
        while not over():
            batch = await self._batch(supply, over)
            if batch is None:
                break
            rate = learning_rate(train, boundary.run_tokens, target)
            params, state, loss = self._shared.step(params, state, self._shaped(batch), rate)
            await asyncio.sleep(max(self._parts.pace.next_s(), boundary.held_s()))
            params = boundary.step(params, tokens=train.tokens_per_step, loss=loss)
            session.lender.share(state, donated=True)
            self._parts.on_step()

    def _over(self, session: Session, boundary: StepHook) -> bool:
        return boundary.done or self._parts.stop.is_set() or session.driver.failure is not None

    async def _batch(self, supply: Supply, over: Callable[[], bool]) -> Any:  # noqa: ANN401  (int32, or None)
        while (batch := supply.poll()) is None:
            if over():
                return None
            supply.want()
            if isinstance(supply.pending, asyncio.Task):
                await asyncio.wait({supply.pending}, timeout=LOOK_S)
        return batch

    def _shaped(self, batch: Any) -> Any:  # noqa: ANN401  (int32)
        train = self._shared.work.train
        shaped = batch if train.accumulation == 1 else batch.reshape(train.accumulation, train.batch, -1)
        return np.ascontiguousarray(shaped)

    async def _leave(self, session: Session, supply: Supply) -> None:
        """Return the data, push what is not pushed yet, say goodbye; raise when it takes longer than its limit."""
        if session.driver.failure is not None:
            raise session.driver.failure
        bound_s = self._shared.settings.learner.drain_s
        deadline_s = self._parts.clock.monotonic() + bound_s
        # A lease granted after all others were given back would have no owner.
        if isinstance(supply.pending, asyncio.Task):
            await asyncio.wait({supply.pending}, timeout=bound_s / RETURN_SHARE)
        supply.publish()
        try:
            async with asyncio.timeout(bound_s / RETURN_SHARE):
                await session.leases.give_back()
        except (AtollError, TimeoutError) as error:
            log.warning("data.not_returned", units=len(session.leases.mine), reason=str(error) or "no answer in time")
        try:
            await session.drain(deadline_s - self._parts.clock.monotonic())
        except TimeoutError as error:
            raise BrokerUnavailable("the last pushes are not durable", got=self._name) from error
