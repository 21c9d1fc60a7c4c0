"""Fetches inner-optimizer state from a healthy peer, so that a learner without a checkpoint starts warm.

    joiner                                   peers
      │── lend? (ctl.all) ──────────────────►│ every peer that could lend answers; the first answer wins
      │◄──────────────── offer ──────────────│
      │── share (ctl.<peer>) ───────────────►│ the next step boundary copies the state; packed and stored off the loop
      │◄──────────────── offer with a blob ──│
      │   read, check, purge                 │ purges it too, later

The peer's training thread does one thing, and only after a request: it copies its state to host memory (or, where the
state is not donated, keeps a reference). It lends to one joiner at a time, and a few times in two minutes (`LOANS_MAX`).
The joiner trusts nothing: the blob must be where states are stored, be no larger than its own would be, match its digest,
and be finite and the same tree as its own (`atoll.client.optimizer_state`). If anything goes wrong, or takes longer than
the joiner will wait, it starts fresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from atoll.base.errors import AccessDenied, AtollError, PeerMisbehaved
from atoll.base.identity import Identity
from atoll.base.logs import get, is_power_of_two
from atoll.bus.interface import Bus, CoreMessage
from atoll.client.optimizer_state import Arrays, host_copy, rebuild_state
from atoll.codec.arrays import pack_arrays, unpack_arrays
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Control, Member, RunRecord, StateOffer, decode, encode
from atoll.wire.subjects import Subjects, token

log = get(__name__)

OFFER_S = 1.0
SNAPSHOT_S = 10.0
LENT_S = 60.0
PURGE_S = 5.0
ANSWERS_AT_ONCE = 16
LOANS_MAX = 4
LOANS_S = 120.0
"""At most so many loans in so many seconds: a copy of the state costs the step that it is taken in, and room on the broker."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """A learner's progress: steps and tokens of this incarnation, the run's tokens, and whether it trains soundly."""

    steps: int
    tokens: int
    run_tokens: int
    healthy: bool


@dataclass(frozen=True, slots=True)
class Loan:
    """Arrays that a peer has lent: the lender, its progress in training, and the arrays' size on the way."""

    arrays: Arrays
    offer: StateOffer
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A peer's optimizer state: the pytree, the lender, the lender's progress, and the time it took."""

    state: Any
    lender: str
    steps: int
    tokens: int
    run_tokens: int
    size_bytes: int
    took_s: float


class StateLender:
    """A learner's readiness to lend. `start` and `stop` belong to the island's loop, `share` to the training thread."""

    def __init__(
        self, bus: Bus, run: RunRecord, member: Member, progress: Callable[[], TrainingProgress], identity: Identity
    ) -> None:
        self._bus = bus
        self._run = run
        self._member = member
        self._progress = progress
        self._identity = identity
        self._subjects = run.subjects
        self._lock = threading.Lock()
        self._able = False
        self._busy = False
        self._lent_at_s: deque[float] = deque(maxlen=LOANS_MAX)
        self._strange = itertools.count(1)
        self._wanted: Future[Callable[[], Arrays]] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order of their start

    # --- the training thread ----------------------------------------------------------------------------------------

    def share(self, state: Any, *, donated: bool) -> None:  # noqa: ANN401  (any JAX pytree)
        """Keep `state` ready for a peer that may ask; costs a look at a flag unless one is asking."""
        self._able = True
        if self._wanted is None:
            return
        with self._lock:
            wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted.set_running_or_notify_cancel():
            copied = host_copy(state) if donated else None
            wanted.set_result(lambda: host_copy(state) if copied is None else copied)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for peers that ask."""
        for who in ("all", self._member.learner):
            self._spawn(self._hear(await self._bus.listen(self._subjects.control(who))))

    async def stop(self) -> None:
        """End all background work."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hear(self, subscription: Any) -> None:  # noqa: ANN401  (Subscription)
        async for core_message in subscription:
            try:
                self._answer(core_message, decode(Control, core_message.data))
            except PeerMisbehaved as error:
                if is_power_of_two(count := next(self._strange)):
                    log.warning("core_message.refused", subject=core_message.subject, reason=str(error), messages=count)

    def _answer(self, core_message: CoreMessage, control: Control) -> None:
        now_s = asyncio.get_running_loop().time()
        spent = len(self._lent_at_s) == LOANS_MAX and now_s - self._lent_at_s[0] < LOANS_S
        willing = self._able and not self._busy and not spent and control.sender != self._member.learner
        if core_message.reply is None or not willing or not self._progress().healthy:
            return
        if control.verb == "lend" and len(self._tasks) < ANSWERS_AT_ONCE:
            self._spawn(self._bus.tell(core_message.reply, encode(self._offer(None))))
        elif control.verb == "share" and core_message.subject == self._subjects.control(self._member.learner):
            self._busy = True
            self._lent_at_s.append(now_s)
            self._spawn(self._lend(core_message.reply, control.sender))

    async def _lend(self, reply: str, to: str) -> None:
        stem = self._subjects.lent_stem(self._member.learner, self._member.incarnation, self._identity.nonce(4))
        wanted: Future[Callable[[], Arrays]] = Future()
        try:
            with self._lock:
                self._wanted = wanted
            async with asyncio.timeout(SNAPSHOT_S):
                arrays = await asyncio.wrap_future(wanted)
            packed = await asyncio.to_thread(lambda: pack_arrays(arrays()))
            blob = await self._bus.put_blob(stem, packed)
            self._spawn(self._purge(stem))
            await self._bus.tell(reply, encode(self._offer(blob)))
            log.info("state.lent", to=to, bytes=len(packed))
        except TimeoutError:
            log.warning("state.not_lent", to=to, reason=f"no step ended within {SNAPSHOT_S:g} s")
        finally:
            with self._lock:
                self._wanted = None
            self._busy = False

    async def _purge(self, stem: str) -> None:
        """Remove a loan that its borrower did not remove; what we cannot remove ages out."""
        await asyncio.sleep(LENT_S)
        await self._bus.purge(f"{stem}.*")

    def _offer(self, blob: BlobRef | None) -> StateOffer:
        progress = self._progress()
        return StateOffer(
            learner=self._member.learner,
            incarnation=self._member.incarnation,
            run_nonce=self._run.nonce,
            steps=progress.steps,
            tokens=progress.tokens,
            run_tokens=progress.run_tokens,
            blob=blob,
        )

    def _spawn(self, work: Any) -> None:  # noqa: ANN401  (a coroutine)
        task = asyncio.get_running_loop().create_task(_run_quietly(work))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)


async def borrow(bus: Bus, run: RunRecord, learner: str, bytes_max: int, within_s: float) -> Loan | None:
    """Return a healthy peer's state of at most `bytes_max` packed bytes, or None if none comes within `within_s`.

    Nothing that a peer sends makes this raise: a wrong answer is logged.
    """
    try:
        async with asyncio.timeout(within_s):
            offer = await _ask(bus, run, "all", Control(verb="lend", sender=learner), OFFER_S)
            if offer is None:
                return None
            peer = token(offer.learner, "learner id")
            shared = await _ask(bus, run, peer, Control(verb="share", sender=learner), within_s)
            if shared is None or shared.blob is None or shared.learner != peer:
                log.warning("state.not_borrowed", peer=peer, reason="offered, and then not shared")
                return None
            return await _read(bus, run.subjects, shared, shared.blob, bytes_max)
    except AccessDenied:
        log.info("state.not_borrowed", reason="learners of a locked run lend each other no optimizer state")
    except TimeoutError:
        log.warning("state.not_borrowed", reason=f"not within {within_s:g} s")
    except AtollError as error:
        log.warning("state.not_borrowed", reason=str(error))
    return None


def restore_loan(loan: Loan | None, like: Any, took_s: float) -> Borrowed | None:  # noqa: ANN401  (any pytree)
    """Return a peer's loan as a state like `like`, or None if it is not one."""
    if loan is None:
        return None
    try:
        state = rebuild_state(like, loan.arrays)
    except PeerMisbehaved as error:
        log.warning("state.not_borrowed", peer=loan.offer.learner, reason=str(error))
        return None
    offer = loan.offer
    return Borrowed(state, offer.learner, offer.steps, offer.tokens, offer.run_tokens, loan.size_bytes, took_s)


async def _ask(bus: Bus, run: RunRecord, whom: str, question: Control, timeout_s: float) -> StateOffer | None:
    answer = await bus.ask(run.subjects.control(whom), encode(question), timeout_s=timeout_s)
    if answer is None:
        return None
    offer = decode(StateOffer, answer)
    if offer.run_nonce != run.nonce:
        raise PeerMisbehaved("a state of another run was offered", got=offer.run_nonce, allowed=run.nonce)
    return offer


async def _read(bus: Bus, subjects: Subjects, offer: StateOffer, blob: BlobRef, bytes_max: int) -> Loan:
    """Return the arrays of a blob and purge it, whatever it held."""
    home = subjects.lent_stem(offer.learner, offer.incarnation, "")
    nonce = blob.stem.removeprefix(home)
    if not blob.stem.startswith(home) or not nonce.isalnum():
        raise PeerMisbehaved("a state that lies where no states lie", got=blob.stem, allowed=f"{home}<nonce>")
    try:
        packed = await bus.get_blob(blob, bytes_max)
        return Loan(await asyncio.to_thread(unpack_arrays, packed, bytes_max), offer, len(packed))
    finally:
        with contextlib.suppress(AtollError, TimeoutError):
            async with asyncio.timeout(PURGE_S):
                await bus.purge(f"{blob.stem}.*")


async def _run_quietly(work: Any) -> None:  # noqa: ANN401
    """Run a coroutine of ours; an unreachable bus costs a peer its loan and nothing else."""
    try:
        await work
    except AtollError as error:
        log.warning("state.lending_failed", reason=str(error))
