"""Optimizer state: as named arrays in host memory and back, and lent by a healthy peer, so that a learner starts warm.

    joiner                                   peers
      │── lend? (ctl.all) ──────────────────►│ every peer that could lend answers; the first answer wins
      │◄──────────────── offer ──────────────│
      │── share (ctl.<peer>) ───────────────►│ the next step boundary copies the state; packed and stored off the loop
      │◄──────────────── offer with a blob ──│
      │   read, check, purge                 │ purges it too, later

Any pytree of arrays works, NumPy's without JAX. A typed key of random numbers travels as its data, which is unsigned integers.
A state is accepted only if it is finite and the same tree (names, shapes, dtypes) as a fresh one of the learner that asks: it
adopts a state whole or not at all.

The peer's training thread does one thing, and only after a request: it copies its state to host memory (or, where the state is
not donated, keeps a reference). It lends to one joiner at a time, and a few times in two minutes (`LOANS_MAX`). The joiner
trusts nothing: the blob must be where states are stored, no larger than its own would be, and match its digest. If anything
goes wrong, or takes longer than the joiner will wait, it starts fresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.base.clock import Identity
from atoll.base.errors import AccessDenied, AtollError, PeerMisbehaved
from atoll.base.logs import get, is_power_of_two
from atoll.bus.interface import Bus, CoreMessage
from atoll.codec.arrays import HEADER_BYTES_MAX, pack_arrays, unpack_arrays
from atoll.model.tree_walk import flatten, is_jax_array, loaded_jax
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Control, Member, RunRecord, StateOffer, decode, encode
from atoll.wire.subjects import Subjects, token

log = get(__name__)

Arrays = dict[str, npt.NDArray[Any]]

OFFER_S = 1.0
SNAPSHOT_S = 10.0
LENT_S = 60.0
PURGE_S = 5.0
ANSWERS_AT_ONCE = 16
LOANS_MAX = 4
LOANS_S = 120.0
"""At most so many loans in so many seconds: a copy of the state costs the step that it is taken in, and room on the broker."""


def host_copy(tree: Any, into: Arrays | None = None) -> Arrays:  # noqa: ANN401  (any pytree)
    """Copy the leaves of `tree` by name to host memory: the tree may be donated or overwritten afterwards.

    `into` are the arrays of an earlier copy that is no longer needed: writing to used memory is several times faster
    than writing to new memory.
    """
    held = {name: _on_host(leaf) for name, leaf in flatten(tree)[0]}
    if into is None or _kinds_of(held) != _kinds_of(into):
        return {name: np.array(array) for name, array in held.items()}
    for name, array in held.items():
        np.copyto(into[name], array)
    return into


def is_key(leaf: Any) -> bool:  # noqa: ANN401  (any leaf)
    """Return whether a leaf is an array of JAX's typed keys of random numbers."""
    return is_jax_array(leaf) and bool(loaded_jax().dtypes.issubdtype(leaf.dtype, loaded_jax().dtypes.prng_key))


def _on_host(leaf: Any) -> npt.NDArray[Any]:  # noqa: ANN401  (any leaf)
    return np.asarray(loaded_jax().random.key_data(leaf) if is_key(leaf) else leaf)


def _kinds_of(arrays: Arrays) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, *_kind(array)) for name, array in arrays.items()]


def _kind(leaf: Any) -> tuple[tuple[int, ...], str]:  # noqa: ANN401  (any leaf)
    """Return shape and dtype of what is copied of a leaf; an array stays where it is."""
    array = leaf if hasattr(leaf, "dtype") and not is_key(leaf) else _on_host(leaf)
    return tuple(array.shape), str(array.dtype)


def packed_bytes_max(like: Any) -> int:  # noqa: ANN401
    """Return the most bytes that `pack_arrays` makes of a state like this one."""
    return 8 + HEADER_BYTES_MAX + sum(int(array.nbytes) for array in host_copy(like).values())


def rebuild_state(like: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:  # noqa: ANN401
    """Return `arrays` as a pytree like `like`, each leaf on the device of that leaf in `like`.

    Raises `PeerMisbehaved` if a name, shape or dtype differs, or a value is not finite.
    """
    named, shape = flatten(like)
    wanted = {name: _kind(leaf) for name, leaf in named}
    for name in sorted(wanted.keys() | arrays.keys()):
        got = (arrays[name].shape, str(arrays[name].dtype)) if name in arrays else None
        if got != wanted.get(name):
            theirs, ours = (
                f"{name} {kind[1]} {list(kind[0])}" if kind else f"no {name}" for kind in (got, wanted.get(name))
            )
            raise PeerMisbehaved("a state of another optimizer or model", got=theirs, allowed=ours)
        if not is_finite(arrays[name]):
            raise PeerMisbehaved("a state with infinities or NaN", got=name)
    return shape.whole(_place_like(leaf, arrays[name]) for name, leaf in named)


def is_finite(array: npt.NDArray[Any]) -> bool:
    """Return whether no value of an array is NaN or an infinity."""
    return "float" not in str(array.dtype) or bool(
        np.isfinite(array.astype(np.float32) if array.dtype.itemsize < 4 else array).all()
    )


def _place_like(leaf: Any, array: npt.NDArray[Any]) -> Any:  # noqa: ANN401
    """Return `array` as the same kind of leaf as `leaf`; never an alias, since a received buffer may be reused."""
    if not is_jax_array(leaf):
        if isinstance(leaf, np.generic):
            return array[()]
        return array.copy() if isinstance(leaf, np.ndarray) else array.item()
    jax = loaded_jax()
    if is_key(leaf):
        key = jax.random.wrap_key_data(jax.numpy.array(array, copy=True), impl=jax.random.key_impl(leaf))
        return jax.device_put(key, leaf.sharding) if leaf.committed else key
    committed = leaf.committed
    return jax.device_put(array, leaf.sharding, may_alias=False) if committed else jax.numpy.array(array, copy=True)


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
    """Return a healthy peer's state of at most `bytes_max` packed bytes, or None if none comes; a wrong answer is logged."""
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
    return Borrowed(state, offer.learner, offer.steps, offer.run_tokens, loan.size_bytes, took_s)


async def _ask(bus: Bus, run: RunRecord, whom: str, question: Control, timeout_s: float) -> StateOffer | None:
    answer = await bus.ask(run.subjects.control(whom), encode(question), timeout_s=timeout_s)
    if answer is None:
        return None
    offer = decode(StateOffer, answer)
    if offer.run_nonce != run.nonce:
        raise PeerMisbehaved("a state of another run was offered", got=offer.run_nonce, allowed=run.nonce)
    return offer


async def _read(bus: Bus, subjects: Subjects, offer: StateOffer, blob: BlobRef, bytes_max: int) -> Loan:
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
    try:
        await work
    except AtollError as error:
        log.warning("state.lending_failed", reason=str(error))
