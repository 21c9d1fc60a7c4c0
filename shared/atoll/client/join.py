"""`atoll.join` turns any JAX loop into an island in a few lines.

    with atoll.join("nats://broker:4222", run="my-run", learner="a", params=params) as island:
        params = island.params
        while not island.done:
            params, opt_state, loss = step(params, opt_state, next(batches))
            params = island.step(params, tokens=batch_tokens, loss=float(loss))

`join` claims the learner id, founds the run or joins it, and returns with the run's parameters. `island.step` takes the
parameters of a completed step, adopts the fragments that have arrived, and returns the parameters to go on with. It
never waits for the network. At the end of the block the learner pushes the last pseudo-gradient and writes its final
counts. On an exception it leaves at once: what was not pushed counts as lost, as for a killed process.

A loop whose optimizer state is worth keeping can start warm from a peer's, and lend its own:

        borrowed = island.recovered_state(like=opt_state)       # None: no peer had one, or not in time
        opt_state = borrowed.state if borrowed else opt_state
        ...
        island.share(opt_state)                                 # after each step; nearly free until a peer asks

The island keeps the parameters of the last step by reference, as the snapshot that answers calls. A loop that *donates*
them to its next step must say `donated=True`: then each step copies them to host memory first.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from atoll.base.clock import Clock, SystemClock
from atoll.base.errors import AtollError, BrokerUnavailable, PeerMisbehaved, SettingsError
from atoll.base.identity import this_process
from atoll.base.logs import get
from atoll.base.loop_thread import LoopThread
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.client.device_encoding import checked
from atoll.client.merged import SETTLE_S, ReadModel, read_model
from atoll.client.optimizer_state import packed_bytes_max, rebuilt
from atoll.client.parameters import checked_parameters
from atoll.client.peer_recovery import Loan, borrow
from atoll.client.session import JoinRequest, Session
from atoll.client.step_hook import StepHook, planned
from atoll.codec import check_codecs
from atoll.model.layout import Layout
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import RunRecord, decode, encode
from atoll.wire.subjects import token

log = get(__name__)

T = TypeVar("T")

DRAIN_S = 60.0
STOP_S = 10.0
RECOVER_S = 8.0
UNPUSHED_NAMED = 6


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What a caller of `join` may choose beside the run and its parameters.

    Attributes:
        direct: names (as `atoll.model.pytrees.describe` gives them) of embeddings, merged by the plain weighted mean.
        donated: the training step donates its parameters, so snapshots are copied.
        encode: where to make pseudo-gradients (`client.device_encoding`): "host", "device" (if possible) or "auto".
        model: a description of the model, kept in the run record.
        data: fingerprint of the data; two learners of a run must agree on it when both give one.
        data_blocks: blocks of leased data, 0 for a loop that brings its own.
        seed: the run's seed.
        stream_bytes_max: bound of each stream of tensors, used only by the founder; None: it follows from the model.
        patience_s: how long to try to reach the broker, seconds.
        health_file: touched with every heartbeat that reached the broker.
        clock: another clock, for tests.
        home: a loop thread to share with others (in-memory buses need one loop); a thread of its own by default.
    """

    direct: tuple[str, ...] = ()
    donated: bool = False
    encode: str = "auto"
    model: str = ""
    data: str = ""
    data_blocks: int = 0
    seed: int = 0
    stream_bytes_max: int | None = None
    patience_s: float = 30.0
    health_file: Path | None = None
    clock: Clock | None = None
    home: LoopThread | None = None


DEFAULTS = JoinOptions()


def join(
    broker: str | Callable[[], Coroutine[Any, Any, Bus]],
    *,
    run: str,
    learner: str,
    params: Any,  # noqa: ANN401  (any JAX pytree)
    protocol: ProtocolSettings | None = None,
    options: JoinOptions = DEFAULTS,
) -> IslandHandle:
    """Return the island's handle, joined and with the run's parameters adopted; use it as a context manager.

    Args:
        broker: URL of the broker, or a coroutine function that opens a `Bus` (an in-memory one, say).
        run: run id; processes with the same run id train one model.
        learner: this learner's id, unique among live learners of the run.
        params: pytree of arrays; the first learner of a run founds it with these values.
        protocol: settings of the run, used only by its founder. Without them a founder takes the defaults, with fewer fragments
            where the parameters have fewer rows.
        options: everything else, see `JoinOptions`.

    Raises:
        SettingsError: a setting is out of range, or a leaf cannot be a parameter (`atoll.client.parameters`).
        LayoutMismatch, IdentityTaken: see `atoll.base.errors`.
        BrokerUnavailable: no broker, or too old a one, within `options.patience_s`.
    """
    rows = sum(tensor.rows for tensor in checked_parameters(params))
    settings = check_codecs((protocol or suited(rows)).check())
    clock = options.clock or SystemClock()
    layout, origin = planned(params, settings.fragments, options.direct)
    record = RunRecord(
        run=run,
        founder=learner,
        nonce=this_process().nonce(8),
        founded_at_s=clock.wall(),
        layout=layout,
        protocol=settings,
        model=options.model,
        data=options.data,
        seed=options.seed,
    )
    check_offer(record)
    request = JoinRequest(
        learner,
        record,
        origin,
        options.data_blocks,
        options.health_file,
        encode=checked(options.encode),
        donated=options.donated,
        bytes_max=options.stream_bytes_max,
    )

    async def open_url() -> Bus:
        return await open_bus(str(broker), run, name=learner, options=BusOptions(patience_s=options.patience_s))

    session = Session(request, open_url if isinstance(broker, str) else broker, clock)
    handle = IslandHandle(session, clock, donated=options.donated, home=options.home)
    handle.enter_run(params)
    if protocol is not None:
        warn_of_ignored(protocol, handle.run.protocol)
    return handle


def suited(rows: int) -> ProtocolSettings:
    """Return the default settings for parameters of so many rows: a fragment has at least one."""
    usual = ProtocolSettings()
    fragments = max(1, min(usual.fragments, rows))
    return ProtocolSettings(fragments=fragments, shards=min(usual.shards, fragments))


def check_offer(record: RunRecord) -> None:
    """Raise `SettingsError` for a record that nobody could read: it is found before anything is created on the broker."""
    token(record.run, "run id")
    token(record.founder, "learner id")
    try:
        decode(RunRecord, encode(record))
    except AtollError as error:
        raise SettingsError(
            "a run cannot be founded with these values",
            got=error.got or error.what,
            allowed="settings of the types that `ProtocolSettings` names; names of leaves up to 256 characters, on one line",
            todo="correct the value that is named",
        ) from error


def warn_of_ignored(given: ProtocolSettings, agreed: ProtocolSettings) -> None:
    """Log which settings of a learner that joins an existing run have no effect."""
    # The bound of a step's tokens follows from each learner's own batch.
    names = (name for name in given.__struct_fields__ if name != "step_tokens_max")
    pairs = ((name, getattr(given, name), getattr(agreed, name)) for name in names)
    if other := [f"{name} = {theirs} of the run, not {ours}" for name, ours, theirs in pairs if ours != theirs]:
        log.warning(
            "protocol.ignored",
            settings="; ".join(other),
            why="the founder's settings hold for the whole run",
            todo="found another run, or leave `protocol` away",
        )


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


class IslandHandle(StepHook):
    """A joined island as the training thread sees it. Only one thread may use it at a time.

    A loop uses the hook's `step`, `params`, `done`, `run_tokens`, `overhead` and `inside_s` all the time. `session` is
    the asynchronous side, for coroutines given to `call`.
    """

    def __init__(self, session: Session, clock: Clock, *, donated: bool, home: LoopThread | None) -> None:
        """Prepare; `enter_run` does the work."""
        super().__init__(session, clock, donated=donated)
        self._own_home = home is None
        self._home = home or LoopThread(f"atoll-island-{session.learner}")
        self._closed = False

    # --- what a loop uses -------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Return how the run's model is divided into fragments."""
        return self.session.run.layout

    @property
    def run(self) -> RunRecord:
        """Return the run record; another learner may have founded the run."""
        return self.session.run

    @property
    def incarnation(self) -> int:
        """Return the number of this incarnation of the learner id."""
        return self.session.driver.member.incarnation

    def share(self, state: Any, *, donated: bool = True) -> None:  # noqa: ANN401  (any pytree)
        """Offer the inner optimizer's `state` after the last step to a peer that starts without one.

        This costs one look at a flag. When a peer has asked, the state is copied to host memory: at once if it is
        `donated` to the next step, else in a worker.
        """
        self.session.lender.share(state, donated=donated)

    def recovered_state(self, like: Any, *, within_s: float = RECOVER_S) -> Borrowed | None:  # noqa: ANN401
        """Return a healthy peer's inner-optimizer state, or None if no peer lends one within `within_s` seconds.

        Call it after joining and before the first step. `like` is a fresh state: the result is a finite pytree of the
        same names, shapes and dtypes, each leaf on the device of that leaf in `like`. Nothing that a peer sends raises.
        """
        began_s = self._clock.monotonic()
        work = borrow(self.session.bus, self.run, self.session.member.learner, packed_bytes_max(like), within_s)
        loan = self.call(work).result()
        return believed(loan, like, self._clock.monotonic() - began_s)

    def note_recovery(self, source: str, **facts: str | float) -> None:
        """Write to log and event log where this optimizer state came from: `checkpoint`, `peer` or `fresh`."""
        log.info("learner.recovered", source=source, incarnation=self.incarnation, **facts)
        told = self.session.record("recovered", source=source, incarnation=self.incarnation, **facts)
        self.call(told).add_done_callback(_say_if_failed)

    def merged(self, *, settle_s: float = SETTLE_S) -> ReadModel:
        """Return the run's merged model as a pytree like `params`; best after the end of the `with` block.

        The island's own `params` are what it trained, not what all have trained. Once this island has left a run with a token
        target, wait up to `settle_s` seconds until all shards have closed; then all islands read the same.
        """
        home = None if self._own_home else self._home
        settle_s = settle_s if self._closed else 0.0
        return read_model(self.session.opener, run=self.run.run, like=self.params, settle_s=settle_s, home=home)

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the island's own loop (a data lease, an event for the log) and return its future."""
        return self._home.submit(work)

    # --- coming and going -------------------------------------------------------------------------------------------

    def enter_run(self, params: Any) -> None:  # noqa: ANN401  (the caller's pytree)
        """Join; this blocks until the run's parameters are here."""
        try:
            self.enter(params, self.call(self.session.open()).result())
            self.call(self.session.begin(dict(self.leaves))).result()
        except BaseException:
            self._shut()
            raise
        self.begin()

    def __enter__(self) -> Self:
        """Return the handle; it is joined already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain and leave; after an exception leave without draining."""
        del error, trace
        if kind is None:
            self.close()
        else:
            self._shut()

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Push the rest, write the final counts and say goodbye; idempotent.

        Raises:
            BrokerUnavailable: the last pushes could not be made durable within `drain_s`.
        """
        if self._closed:
            return
        try:
            if self.session.driver.failure is None:
                self.call(self.session.drain(drain_s)).result()
        except TimeoutError as error:
            raise BrokerUnavailable(
                "the last pushes are not durable",
                got=f"no acknowledgement within {drain_s:g} s of {self._unpushed()}",
                todo="is the broker up? what was not pushed is lost, everything before it is merged",
            ) from error
        finally:
            self._shut()

    def _unpushed(self) -> str:
        """Say which pushes are still on their way."""
        waiting = sorted(self.session.driver.machine.in_flight.items())
        named = ", ".join(f"fragment {p} ({tokens} tokens)" for (p, _), tokens in waiting[:UNPUSHED_NAMED])
        more = f" and {len(waiting) - UNPUSHED_NAMED} more" if len(waiting) > UNPUSHED_NAMED else ""
        return named + more if waiting else "the goodbye"

    def _shut(self) -> None:
        """Stop the loop and its thread, whatever state they are in."""
        if self._closed:
            return
        self._closed = True
        try:
            self.call(self.session.shut()).result(STOP_S)
        except (AtollError, TimeoutError):
            pass
        finally:
            if self._own_home:
                self._home.stop()


def believed(loan: Loan | None, like: Any, took_s: float) -> Borrowed | None:  # noqa: ANN401  (any pytree)
    """Return a peer's loan as a state like `like`, or None if it is not one."""
    if loan is None:
        return None
    try:
        state = rebuilt(like, loan.arrays)
    except PeerMisbehaved as error:
        log.warning("state.not_borrowed", peer=loan.offer.learner, reason=str(error))
        return None
    offer = loan.offer
    return Borrowed(state, offer.learner, offer.steps, offer.tokens, offer.run_tokens, loan.size_bytes, took_s)


def _say_if_failed(told: Future[None]) -> None:
    """Warn if an event could not be written to the event log."""
    if not told.cancelled() and (error := told.exception()) is not None:
        log.warning("event_log.failed", reason=str(error))
