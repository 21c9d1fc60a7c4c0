"""Keeps what a region has of its runs: a mirror of each run's global stream, and an outbox that catches up by itself.

It runs beside the leaf, in the process of `atoll broker --leaf-of`, and serves the runs that processes of the region ask for
(`atoll.bus.nats.region`). All streams are at the leaf:

* **The mirror** has the name of the stream at the hub, in the leaf's domain. It does not hear of deletions, so it has bounds of
  its own: the hub's bound of size, `MIRROR_AGE_S`, and what is oldest goes first.
* **The outbox** keeps what could not be sent, in the order of writing. It is forwarded from its beginning: up to `WINDOW`
  chunks at once, and whatever has a message id (manifests, events) only after all before it are at the hub. A message that
  the hub has acknowledged is removed here. So a keeper that dies sends at most one window again.
* **What stays** (`KEEP`) are the chunks of contributions that the region folds itself. A shard that cannot have their sum asks
  for them by name, and they are sent. One that has settled a contribution has its chunks dropped.

A run that the hub has no more is removed here, too. One that nobody has wanted for `UNWANTED_S` is given up, unless its outbox
holds something, or chunks stay here: a mirror costs the link what it copies, whether anybody reads it or not.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from atoll.base.errors import (
    AccessDenied,
    AtollError,
    BrokerUnavailable,
    PeerMisbehaved,
    ProtocolMisuse,
    QueueFull,
    RunReplaced,
    StorageFull,
)
from atoll.base.logs import get
from atoll.base.retry import Unanswered, all_of, patiently
from atoll.bus.nats import blobs
from atoll.bus.nats.connection import Connection
from atoll.bus.nats.jetstream_api import (
    NO_STREAM,
    ApiRefusal,
    JetStream,
    StoredRecord,
    headers_of,
    read_field,
    stored_message,
)
from atoll.bus.nats.provision import provision
from atoll.bus.nats.region import ASK_AGAIN_S, READY, STALE_S
from atoll.bus.options import BusOptions, Credentials
from atoll.bus.regions import HUB_DOMAIN
from atoll.bus.streams import kept_plan, outbox_plan, stream_of, stream_plan
from atoll.wire.messages import SENDING, heard_by_keeper
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import BusStats

MIRROR_AGE_S: Final = 6 * 3600.0
UNWANTED_S: Final = 15 * ASK_AGAIN_S
WINDOW: Final = 8
LOOK_S: Final = 0.25
LOOK_AT_HUB_S: Final = 30.0
WATCH_HUB_S: Final = 2.0
PREPARED_S: Final = 2.0
ANSWER_S: Final = 1.0
_CONNECT_S: Final = 15.0
_NS: Final = 1_000_000_000
_CREATED: Final = "atoll.created"
"""Under this key a mirror says which founding of the stream it copies."""
_MIRROR: Final = re.compile(r"atoll_([A-Za-z0-9_-]{1,64})_GL")
_ID: Final = "Nats-Msg-Id"
_OURS: Final = "Nats-"
AWAY: Final = (Unanswered, ApiRefusal, BrokerUnavailable, StorageFull, QueueFull)

log = get(__name__)


class KeptRun:
    """One run at a leaf. Everything runs in the connection's loop."""

    def __init__(self, run: str, connection: Connection, bulk: Iterator[JetStream]) -> None:
        """Do nothing yet; `keep` does. `bulk` carries the chunks of all runs of the keeper."""
        self.run = run
        self.wanted_s = connection.loop.time()
        self.ready = asyncio.Event()
        """Set while mirror and outbox are there."""
        self._far, self._near = JetStream(connection), JetStream(connection, nearby=True)
        self._bulk = bulk
        self._subjects, self._domain = Subjects(run), connection.domain
        self._copy = self._subjects.region_copy(self._domain)
        self._global = stream_of(stream_plan(run), self._subjects.run_record).name
        self._outbox, self._kept = outbox_plan(run, self._domain), kept_plan(run, self._domain)
        self._now_s = connection.loop.time
        self._sends: dict[str, asyncio.Task[int]] = {}

    async def keep(self) -> None:
        """Have mirror and outbox, and forward; return once both are removed, because the run is over or unwanted."""
        looked_s = float("-inf")
        while True:
            try:
                if self._now_s() - looked_s >= LOOK_AT_HUB_S or not self.ready.is_set():
                    if not await self._prepare():
                        return
                    looked_s = self._now_s()
                await self._forward()
            except RunReplaced:
                looked_s = float("-inf")
            except AWAY as reason:
                log.debug("region.waits", run=self.run, reason=str(reason))
            await asyncio.sleep(LOOK_S)

    async def _prepare(self) -> bool:
        """Have both streams as the hub's are; return False if the run is to be kept no more, and remove them."""
        there = await self._near.stream_info(self._global)
        try:
            hub = await self._far.request(f"{self._far.root}.STREAM.INFO.{self._global}", b"")
        except ApiRefusal as reason:
            if reason.err_code != NO_STREAM:
                raise
            log.info("region.run_gone", run=self.run)
            await self._remove()
            return False
        except Unanswered:
            if there is None:
                raise
            self.ready.set()  # as it was when the hub was last there
            return True
        created = str(hub.get("created"))
        if there is not None and not self._is_copy(read_field(there, dict[str, Any], "config"), created):
            await self._near.api(f"STREAM.DELETE.{self._global}")
            there = None
        bytes_max = read_field(hub, int, "config", "max_bytes")
        if there is None:
            await self._near.api(
                f"STREAM.CREATE.{self._global}", mirror_config(self._global, self._copy, bytes_max, created)
            )
            log.info("region.mirrored", run=self.run, region=self._domain)
        plans = (outbox_plan(self.run, self._domain, bytes_max), kept_plan(self.run, self._domain, bytes_max))
        await provision(self._near, plans, self._subjects.prefix)
        if self._now_s() - self.wanted_s > UNWANTED_S and not await self._waiting():
            log.info("region.run_unwanted", run=self.run)
            await self._remove()
            return False
        self.ready.set()
        return True

    def _is_copy(self, config: Mapping[str, Any], created: str) -> bool:
        external = config.get("mirror", {}).get("external", {})
        return bool(config.get("metadata", {}).get(_CREATED) == created and external.get("deliver") == self._copy)

    async def _remove(self) -> None:
        self.ready.clear()
        for name in (self._global, self._outbox.name, self._kept.name):
            if await self._near.stream_info(name) is not None:
                await self._near.api(f"STREAM.DELETE.{name}")

    async def _waiting(self) -> int:
        streams = [await self._near.stream_info(name) for name in (self._outbox.name, self._kept.name)]
        return sum(read_field(each, int, "state", "messages") for each in streams if each is not None)

    async def _forward(self) -> None:
        sent = 0
        while window := await self._window():
            await all_of(self._send(message) for message in window)
            await self._near.api(f"STREAM.PURGE.{self._outbox.name}", {"seq": window[-1].seq + 1})
            sent += len(window)
        if sent:
            log.info("region.caught_up", run=self.run, messages=sent)

    async def sent_kept(self, stem: str) -> int | None:
        """Return how many chunks of the contribution `stem` stay here once all are at the hub; None until then."""
        # A second question joins what is under way: a second sending would take half of the link from the first.
        sending = self._sends.get(stem)
        if sending is None:
            sending = self._sends[stem] = asyncio.create_task(self._send_kept(stem))
            sending.add_done_callback(partial(self._forget_sending, stem))
        done, _ = await asyncio.wait({sending}, timeout=ANSWER_S)
        return sending.result() if done else None

    def _forget_sending(self, stem: str, sending: asyncio.Task[int]) -> None:
        """Forget a sending that has ended; one that failed after its last question was answered is told here."""
        del self._sends[stem]
        if not sending.cancelled() and (reason := sending.exception()) is not None:
            log.debug("region.not_sent", run=self.run, stem=stem, reason=str(reason))

    async def _send_kept(self, stem: str) -> int:
        if await self._near.stream_info(self._kept.name) is None:
            return 0
        here, sent, after = self._subjects.kept(self._domain, stem), 0, 0
        while (message := await stored_message(self._near, self._kept.name, _next(after, f"{here}.*"))) is not None:
            there = f"{stem}{message.subject.removeprefix(here)}"
            await next(self._bulk).store(there, message.data, {}, first_wins=True)
            sent, after = sent + 1, message.seq
        log.debug("region.sent_kept", run=self.run, stem=stem, chunks=sent)
        return sent

    async def drop_kept(self, stem: str) -> None:
        """Remove the chunks that stay here of a contribution that nobody will read again."""
        dropped = {"filter": f"{self._subjects.kept(self._domain, stem)}.*"}
        await self._near.api(f"STREAM.PURGE.{self._kept.name}", dropped)

    async def _window(self) -> list[StoredRecord]:
        """Return the oldest messages that may be sent at once: chunks, or one message with an id."""
        window: list[StoredRecord] = []
        after = 0
        while len(window) < WINDOW:
            message = await stored_message(self._near, self._outbox.name, _next(after, self._outbox.subjects[0]))
            if message is None or (window and _ID in headers_of(message)):
                break
            window.append(message)
            after = message.seq
            if _ID in headers_of(message):
                break
        return window

    async def _send(self, message: StoredRecord) -> None:
        subject = f"{self._subjects.prefix}{message.subject.removeprefix(self._subjects.outbox(self._domain))}"
        headers = headers_of(message)
        kept = {name: value for name, value in headers.items() if name == _ID or not name.startswith(_OURS)}
        try:
            await next(self._bulk).store(subject, message.data, kept, first_wins=_ID not in kept)
        except ProtocolMisuse as reason:
            log.warning("region.dropped", run=self.run, subject=subject, reason=str(reason))
        except BrokerUnavailable:
            # A subject without a stream has no responders either, so this may be a run that is gone.
            await self._far.request(f"{self._far.root}.STREAM.INFO.{self._global}", b"")
            raise


def _next(after: int, subject_filter: str) -> dict[str, Any]:
    return {"seq": after + 1, "next_by_subj": subject_filter}


def mirror_config(name: str, deliver: str, bytes_max: int, created: str) -> dict[str, Any]:
    """Return the mirror of the hub's stream `name`, which was `created` then and comes under `deliver`, as JetStream has it."""
    return {
        "name": name,
        "mirror": {"name": name, "external": {"api": f"$JS.{HUB_DOMAIN}.API", "deliver": deliver}},
        "retention": "limits",
        "discard": "old",
        "max_msgs_per_subject": 1,
        "max_bytes": bytes_max,
        "max_age": int(MIRROR_AGE_S * _NS),
        "storage": "file",
        "num_replicas": 1,
        "allow_direct": True,
        "metadata": {_CREATED: created},
    }


class RegionKeeper:
    """Serves the runs of a region, in a thread of its own; usable from any thread."""

    def __init__(self, url: str, credentials: Credentials | None = None) -> None:
        options = BusOptions(patience_s=_CONNECT_S, credentials=credentials)
        self._connection = Connection(url, "region-keeper", options, BusStats())
        self._bulk = blobs.bulk_connections(self._connection)
        self._hub = HubWatch(self._connection)
        self._serving: Future[None] | None = None
        self._runs: dict[str, tuple[KeptRun, asyncio.Task[None]]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def hub_answers(self) -> bool:
        """Return whether the hub answers through the region's link (`HubWatch`)."""
        return self._hub.answers

    def start(self) -> None:
        """Begin; the leaf must run."""
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(), self._connection.loop)

    def stop(self) -> None:
        """End; what waits in outboxes stays there."""
        if self._serving is not None:
            self._serving.cancel()
        # In a thread, because the caller's may have a loop that runs.
        ending = threading.Thread(target=lambda: asyncio.run(self._connection.stop()))
        ending.start()
        ending.join()

    async def _serve(self) -> None:
        connection = self._connection
        # A leaf that does not let us in is tried again: its certificate, or our own, may be renewed.
        closed = (TimeoutError, BrokerUnavailable, Unanswered, AccessDenied)
        await patiently(lambda: connection.connect(_CONNECT_S), "the leaf", on=closed)
        await patiently(self._hear, "the leaf", on=closed)
        for run in await patiently(self._mirrored_runs, "the leaf", on=closed):
            self._keep_run(run)
        await self._hub.watch()

    async def _hear(self) -> None:
        mine = f"atoll.*.rg.{self._connection.domain}"
        await self._connection.subscribe(mine, self._on_message(self._serve_run))
        await self._connection.subscribe(f"{mine}.kept", self._on_message(self._serve_chunks))

    async def _mirrored_runs(self) -> Sequence[str]:
        names = await JetStream(self._connection, nearby=True).list_streams("NAMES")
        return [named[1] for name in names if (named := _MIRROR.fullmatch(str(name)))]

    def _keep_run(self, run: str) -> KeptRun:
        if run not in self._runs or self._runs[run][1].done():
            kept = KeptRun(run, self._connection, self._bulk)
            self._runs[run] = kept, asyncio.create_task(self._keep(kept))
        return self._runs[run][0]

    async def _keep(self, kept: KeptRun) -> None:
        try:
            await kept.keep()
        except AtollError as reason:
            log.warning("region.not_kept", run=kept.run, reason=str(reason))
        self._runs.pop(kept.run, None)

    def _on_message(self, answer: Callable[[Msg], Coroutine[Any, Any, None]]) -> Callable[[Msg], None]:
        def begin(message: Msg) -> None:
            task = asyncio.create_task(answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

        return begin

    async def _serve_run(self, message: Msg) -> None:
        kept = self._keep_run(message.subject.split(".")[1])
        kept.wanted_s = self._connection.loop.time()
        prepared = asyncio.create_task(kept.ready.wait())
        await asyncio.wait({prepared, self._runs[kept.run][1]}, timeout=PREPARED_S, return_when=asyncio.FIRST_COMPLETED)
        prepared.cancel()
        said = READY if kept.ready.is_set() else b"-not yet"
        try:
            await self._connection.send(message.reply, said, timeout_s=0.0)
        except Unanswered as reason:
            log.debug("region.unsaid", run=kept.run, reason=str(reason))

    async def _serve_chunks(self, message: Msg) -> None:
        run = message.subject.split(".")[1]
        if run not in self._runs:
            return
        kept = self._runs[run][0]
        try:
            verb, stem = heard_by_keeper(bytes(message.data))
            if not Subjects(kept.run).is_contribution(stem):
                return
            if verb == "drop":
                await kept.drop_kept(stem)
                return
            sent = await kept.sent_kept(stem)
            await self._connection.send(message.reply, SENDING if sent is None else b"+%d" % sent, timeout_s=0.0)
        except (*AWAY, PeerMisbehaved) as reason:
            log.debug("region.not_done", run=kept.run, asked=bytes(message.data)[:80], reason=str(reason))


class HubWatch:
    """Health of a region's link: whether the hub answers through it. `answers` may be read by any thread.

    A leaf serves its learners while its hub is away, so that its process lives says nothing of the link. The watch asks the
    hub's JetStream again and again, in the loop of a connection to the leaf. A closed link is known at once: nobody answers.
    One that carries nothing counts as cut after `STALE_S`, because the question waits behind megabytes on a link that is
    full.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answered_s = float("-inf")

    @property
    def answers(self) -> bool:
        """Return whether the hub has answered within `STALE_S`, and the link has not been closed since."""
        return time.monotonic() - self._answered_s <= STALE_S

    async def watch(self) -> None:
        """Ask without end: cancel it. A leaf that does not let us in is asked on: a certificate may be renewed."""
        question, refused = f"{JetStream(self._connection).root}.INFO", False
        while True:
            try:
                await self._connection.request(question, timeout_s=STALE_S)
                self._answered_s, refused = time.monotonic(), False
            except Unanswered as reason:
                if isinstance(reason.__cause__, NoRespondersError):
                    self._answered_s = float("-inf")
            except AtollError as reason:
                if not refused:
                    log.warning("region.unwatched", reason=str(reason))
                refused = True
            await asyncio.sleep(WATCH_HUB_S)
