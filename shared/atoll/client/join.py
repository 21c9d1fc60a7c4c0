"""`atoll.join` turns any loop over arrays of JAX or NumPy into an island in a few lines.

    with atoll.join("nats://broker:4222", run="my-run", learner="a", params=params) as island:
        params = island.params
        while not island.done:
            params, opt_state, loss = step(params, opt_state, next(batches))
            params = island.step(params, tokens=batch_tokens, loss=float(loss))

`join` claims the learner id, founds the run or joins it, and returns with the run's parameters. `island.step` adopts the
fragments that have arrived and returns the parameters to go on with; it never waits for the network, but holds a loop to
the pace that the run believes (`protocol.steps_per_s_max`). At the end of the block, and on Ctrl-C or `SystemExit`, the
learner pushes the last pseudo-gradient and writes its final counts. On another exception it leaves at once: what was not
pushed counts as lost, as for a killed process.

A loop keeps what it needs to go on, beside the parameters, in checkpoints (`island.checkpoints`, see
`atoll.client.checkpoints`). A loop without them can start warm from a peer's optimizer state by
`island.recovered_state(like=opt_state)` and `island.share(opt_state)`.

The island keeps the parameters of the last step by reference, as the snapshot that answers calls. A loop that *donates*
them to its next step must say `donated=True`: then each step copies them to host memory first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat, TypeVar

import msgspec

from atoll.base.background_tasks import LoopThread
from atoll.base.clock import Clock, SystemClock, this_process
from atoll.base.errors import AtollError, BrokerUnavailable, SettingsError
from atoll.base.extras import install_command, is_installed
from atoll.base.logs import get
from atoll.base.wording import few
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.client.checkpoints import EVERY_S, KEPT, LoopCheckpoints
from atoll.client.model_reader import SETTLE_S, ReadModel, check_place, identity_file, read_model, wrong_type
from atoll.client.optimizer_state import Borrowed, borrow, packed_bytes_max, restore_loan
from atoll.client.options import DEFAULTS, JoinOptions
from atoll.client.parameters import LeafRules, ParameterShape, checked_parameters, frozen_leaves, log_rules
from atoll.client.session import JoinRequest, Session
from atoll.client.step_hook import StepHook, plan_origin
from atoll.codec import check_codecs
from atoll.keys.identity import HeldIdentity, learner_identity
from atoll.model.layout import Layout, TensorSpec
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.events import RecoveredEvent
from atoll.wire.messages import RunRecord, decode, encode
from atoll.wire.subjects import token

log = get(__name__)

T = TypeVar("T")
Opener = Callable[[], Coroutine[Any, Any, Bus]]

DRAIN_S = 60.0
STOP_S = 10.0
INTERRUPTED_S = 8.0
"""A process that is told to stop is usually killed after 10 s."""
RECOVER_S = 8.0
HELD_S_MAX = 0.1
"""A loop that is held looks so often whether it should end."""
UNPUSHED_NAMED = 6


def join(
    broker: str | Opener,
    *,
    run: str,
    learner: str,
    params: Any,  # noqa: ANN401  (any pytree)
    protocol: ProtocolSettings | None = None,
    options: JoinOptions = DEFAULTS,
) -> IslandHandle:
    """Return the island's handle, joined and with the run's parameters adopted; use it as a context manager.

    Args:
        broker: URL of the broker (of a cluster those of its nodes, separated by commas), or a coroutine function that opens
            a `Bus` (an in-memory one, say).
        run: run id; processes with the same run id train one model.
        learner: this learner's id, unique among live learners of the run.
        params: pytree of arrays; the first learner of a run founds it with these values.
        protocol: settings of the run, used only by its founder. Without them a founder takes the defaults, with fewer fragments
            where the parameters have fewer rows.
        options: everything else, see `JoinOptions`.

    Raises:
        SettingsError: JAX is missing, a setting is out of range, or a leaf cannot be a parameter (`atoll.client.parameters`).
        LayoutMismatch, IdentityTaken: see `atoll.base.errors`.
        BrokerUnavailable: no broker, or too old a one, within `options.patience_s`.
    """
    check_place(broker, run)
    check_joining(learner, protocol, options)
    file = identity_file(broker, options.identity)
    identity = None if file is None else learner_identity(file, run, learner)
    tensors, rules = checked_parameters(params, options.merge)
    settings = _founding_settings(protocol, tensors, rules)
    clock = options.clock or SystemClock()
    layout, origin = plan_origin(params, settings.fragments, rules)
    record = RunRecord(
        run=run,
        founder=learner,
        nonce=this_process().nonce(8),
        founded_at_s=clock.wall(),
        layout=layout,
        protocol=msgspec.structs.replace(settings, value_fragments=settings.value_fragments or layout.value_fragments),
        model=options.model,
        data=options.data,
        data_blocks=options.data_blocks,
        seed=options.seed,
        frozen=frozen_leaves(ParameterShape(params).leaves(params), rules),
        bulk=tuple(options.bulk),
    )
    _check_offer(record)
    request = JoinRequest(learner, record, origin, options, founds=identity is None or identity.founds)
    opener = partial(_open, broker, run, learner, options, identity) if isinstance(broker, str) else broker
    home = options.home or LoopThread(f"atoll-island-{learner}")
    try:
        handle = _enter_run(request, opener, params, clock, home)
    except BaseException:
        if options.home is None:
            home.stop()
        raise
    log_rules(handle.layout, rules)
    if protocol is not None:
        _warn_of_ignored(settings, handle.run.protocol)
    return handle


def _enter_run(request: JoinRequest, opener: Opener, params: Any, clock: Clock, home: LoopThread) -> IslandHandle:  # noqa: ANN401
    began_s = clock.monotonic()
    bus = home.submit(opener()).result()
    shut = bus.close
    try:
        session = home.submit(Session.open(bus, request, clock, began_s=began_s)).result()
        shut = session.shut
        handle = IslandHandle(session, params, clock, opener, request.options, home)
        home.submit(session.begin(handle.travelling)).result()
    except BaseException:
        with suppress(AtollError, TimeoutError):
            home.submit(shut()).result(STOP_S)
        raise
    handle.begin()
    return handle


async def _open(url: str, run: str, learner: str, options: JoinOptions, identity: HeldIdentity | None) -> Bus:
    known = None if identity is None else identity.credentials()
    # An island's loop has a thread of its own, and large work is done beside it.
    given = options.bus_options(options.region, known, own_thread=False)
    return await open_bus(url, run, name=learner, options=given)


def _founding_settings(
    protocol: ProtocolSettings | None, tensors: Iterable[TensorSpec], rules: LeafRules
) -> ProtocolSettings:
    if protocol is None:
        defaults = ProtocolSettings()  # a fragment has at least one row
        fragments = max(1, min(defaults.fragments, sum(t.rows for t in tensors if t.name in rules.merged)))
        protocol = ProtocolSettings(fragments=fragments, shards=min(defaults.shards, fragments))
    settings = check_codecs(protocol.check())
    if settings.fragments < rules.fragments_min:
        settings = msgspec.structs.replace(settings, fragments=rules.fragments_min)
        log.info(
            "fragments.raised", fragments=settings.fragments, why="leaves merged by value have fragments of their own"
        )
    return settings


class IslandHandle(StepHook):
    """A joined island as the training thread sees it. Only one thread may use it at a time.

    `session` is the asynchronous side, for coroutines given to `call`.
    """

    def __init__(
        self,
        session: Session,
        params: Any,  # noqa: ANN401  (any pytree)
        clock: Clock,
        opener: Opener,
        options: JoinOptions,
        home: LoopThread,
    ) -> None:
        super().__init__(session, params, clock, donated=options.donated)
        self._opener = opener
        self._home = home
        self._own_home = options.home is None
        self._closed = False
        self._kept: LoopCheckpoints | None = None

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
        return restore_loan(loan, like, self._clock.monotonic() - began_s)

    def checkpoints(
        self,
        folder: Path | str,
        *,
        like: Any,  # noqa: ANN401  (any pytree)
        lend: str = "",
        every_s: float = EVERY_S,
        kept: int = KEPT,
    ) -> LoopCheckpoints:
        """Return the keeper of what this loop needs to go on after every process has died (`atoll.client.checkpoints`).

        Call it once, after joining and before the first step. It needs `pip install 'atoll[learner]'`.

        Args:
            folder: where checkpoints are; learners and runs may share it. Each has a folder of its own in it.
            like: a fresh state, any pytree of arrays, keys, numbers and strings; `restored` is like it.
            lend: the entry of `like` with the optimizer's state, which peers lend to each other; empty for none.
            every_s: seconds between two checkpoints.
            kept: how many of the newest stay.

        Raises:
            SettingsError: a leaf cannot be kept, the folder cannot be used, an argument is out of range, or Orbax is missing.
        """
        if self._kept is not None:
            raise SettingsError("this island keeps checkpoints already", todo="put all of the state into one `like`")
        if not is_installed("orbax"):
            raise SettingsError("checkpoints need Orbax, which is not installed", todo=install_command("learner"))
        self._kept = LoopCheckpoints(
            self.session, self.recovered_state, self.note_recovery, folder, like, lend=lend, every_s=every_s, kept=kept
        )
        return self._kept

    def note_recovery(self, recovered: RecoveredEvent) -> None:
        """Write to log and event log where this optimizer state came from."""
        log.info("learner.recovered", **msgspec.to_builtins(recovered))
        self.call(self.session.record(recovered)).add_done_callback(_warn_if_failed)

    def merged(self, *, settle_s: float = SETTLE_S) -> ReadModel:
        """Return the run's merged model as a pytree like `params`; best after the end of the `with` block.

        The island's own `params` are what it trained, not what all have trained. Once this island has left a run with a token
        target, wait up to `settle_s` seconds until all shards have closed; then all islands read the same.
        """
        home = None if self._own_home else self._home
        settle_s = settle_s if self._closed else 0.0
        return read_model(self._opener, run=self.run.run, like=self.params, settle_s=settle_s, home=home)

    def step(self, params: Any, *, tokens: int, loss: SupportsFloat | None = None) -> Any:  # noqa: ANN401
        """Report a completed step over `tokens` tokens and return the parameters to continue from, as `StepHook.step`."""
        if self._closed:
            raise _left_error("a step")
        self._keep_pace()
        return super().step(params, tokens=tokens, loss=loss)

    def _keep_pace(self) -> None:
        began_s = self._clock.monotonic()
        while (wait_s := self.held_s()) > 0.0 and self.session.driver.failure is None:
            time.sleep(min(wait_s, HELD_S_MAX))
            if self.done:
                break
        self.inside_s += self._clock.monotonic() - began_s

    def call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the island's own loop (a data lease, an event for the log) and return its future."""
        if self._closed:
            work.close()
            raise _left_error("a call")
        return self._home.submit(work)

    # --- coming and going -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drain and leave; after an exception that is no interrupt leave without draining."""
        del error, trace
        if kind is None:
            self.close()
        elif issubclass(kind, KeyboardInterrupt | SystemExit):
            self._leave_interrupted()
        else:
            self._abandon()

    def close(self, drain_s: float = DRAIN_S) -> None:
        """Push the rest, write the final counts and say goodbye; idempotent.

        Raises:
            SettingsError: the loop has changed a frozen leaf; what was not pushed yet is lost.
            BrokerUnavailable: the last pushes could not be made durable within `drain_s`.
            AtollError: the island failed, and no step has raised that; what was not pushed yet is lost.
        """
        if self._closed:
            return
        try:
            self.frozen.check()
        except SettingsError:
            self._abandon()
            raise
        try:
            driver = self.session.driver
            if driver.failure is None:
                self.call(self.session.drain(drain_s)).result()
            elif not driver.failure_told:
                raise driver.failure
        except TimeoutError as error:
            raise BrokerUnavailable(
                "the last pushes are not durable",
                got=f"no acknowledgement within {drain_s:g} s of {self._describe_unpushed()}",
                todo="is the broker up? what was not pushed is lost, everything before it is merged",
            ) from error
        finally:
            # Last, as nobody else waits for it: the pushes go first.
            if self._kept is not None:
                self._kept.leave()
            self._shut()

    def _leave_interrupted(self) -> None:
        """Push what the steps so far have learnt and say goodbye; the exception that interrupts the loop goes on.

        The parameters are those of the last completed step, whatever the interrupted one has done. The state beside them may
        be changed half-way, so no last checkpoint is written.
        """
        log.info(
            "learner.interrupted", drain_s=INTERRUPTED_S, todo="wait for the last pushes; Ctrl-C again ends at once"
        )
        kept, self._kept = self._kept, None
        try:
            self.close(INTERRUPTED_S)
        except AtollError as failure:
            log.warning("learner.unpushed", reason=str(failure))
        if kept is not None:
            kept.finish(STOP_S)

    def _describe_unpushed(self) -> str:
        waiting = sorted(self.session.driver.machine.in_flight.items())
        named = (f"fragment {p} ({tokens} tokens)" for (p, _), tokens in waiting)
        return few(named, UNPUSHED_NAMED) or "the goodbye"

    def _abandon(self) -> None:
        if self._kept is not None:
            self._kept.finish(STOP_S)
        self._shut()

    def _shut(self) -> None:
        if self._closed:
            return
        try:
            self.call(self.session.shut()).result(STOP_S)
        except (AtollError, TimeoutError):
            pass
        finally:
            self._closed = True
            if self._own_home:
                self._home.stop()


def check_joining(learner: object, protocol: object, options: object) -> None:
    """Raise `SettingsError` unless these are a learner id, settings of a run or None, and options of `join`."""
    if not isinstance(learner, str):
        raise wrong_type("learner", learner, "a string")
    if protocol is not None and not isinstance(protocol, ProtocolSettings):
        todo = "write protocol=ProtocolSettings(...), from atoll.protocol.settings"
        raise wrong_type("protocol", protocol, "a ProtocolSettings, or None for the defaults", todo)
    if not isinstance(options, JoinOptions):
        raise wrong_type("options", options, "an atoll.JoinOptions", "write options=atoll.JoinOptions(...)")
    options.check()


def _check_offer(record: RunRecord) -> None:
    # What nobody could read is found before anything is created on the broker.
    token(record.run, "run id")
    token(record.founder, "learner id")
    try:
        decode(RunRecord, encode(record))
    except AtollError as error:
        raise SettingsError(
            "a run cannot be founded with these values",
            got=error.got or error.what,
            allowed="settings of the types that `ProtocolSettings` names; names of leaves up to 256 characters, on one line, "
            "each to be seen",
            todo="correct the value that is named",
        ) from error


def _warn_of_ignored(given: ProtocolSettings, agreed: ProtocolSettings) -> None:
    # The bound of a step's tokens follows from each learner's own batch, the fragments by value from its leaves.
    names = (name for name in given.__struct_fields__ if name not in {"step_tokens_max", "value_fragments"})
    pairs = ((name, getattr(given, name), getattr(agreed, name)) for name in names)
    if other := [f"{name} = {theirs} of the run, not {ours}" for name, ours, theirs in pairs if ours != theirs]:
        log.warning(
            "protocol.ignored",
            settings="; ".join(other),
            why="the founder's settings hold for the whole run",
            todo="found another run, or leave `protocol` away",
        )


def _left_error(what: str) -> SettingsError:
    return SettingsError(
        f"{what} comes after this island has left its run",
        got="close() was called, or the `with` block has ended",
        allowed="params and merged() of an island that has left",
        todo="put it inside the `with` block; to train on, join again",
    )


def _warn_if_failed(event: Future[None]) -> None:
    if not event.cancelled() and (error := event.exception()) is not None:
        log.warning("event_log.failed", reason=str(error))
