"""What is fuzzed: every decoder of bytes that a peer, a disk or another process may have written, and every handler.

A target takes one input. It may refuse it with an error of ours; every other exception is a find. The handlers are those of
the production drivers of both services, on the in-memory broker. They refuse nothing but what their callers catch, because an
exception there ends the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import CheckpointObject, Part, Piece, digest_of_bytes
from atoll.archive.object_store import Name
from atoll.base.clock import SystemClock, this_process
from atoll.base.errors import AtollError, PeerMisbehaved, ProtocolMisuse
from atoll.base.parsing import parsed
from atoll.base.retry import Unanswered
from atoll.bus.interface import CoreMessage
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.nats.consumers import _attempts
from atoll.bus.nats.jetstream_api import read_field
from atoll.client.driver import IslandDriver
from atoll.client.membership import claim
from atoll.client.optimizer_state import StateLender, TrainingProgress
from atoll.codec import Framing
from atoll.codec.arrays import pack_arrays, unpack_arrays
from atoll.codec.formats import FORMATS
from atoll.codec.frames import decode_frame, encode_frame
from atoll.protocol.data import DataGrant, DataLedger
from atoll.protocol.events import PushKey
from atoll.protocol.ledger import FragmentLedger, Ledger, SettledPushes
from atoll.protocol.quarantine import Measure
from atoll.protocol.recorder import FactRecorder, Replay
from atoll.protocol.shard import Shard
from atoll.run.heads import GlobalFragment
from atoll.run.history import History
from atoll.run.ledger import read_fragment_ledger
from atoll.settings.sections import ArchiveSettings
from atoll.wire import messages
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import RunRecord, decode, encode
from atoll_synchronizer.acknowledgements import PendingAcknowledgements
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.intake import FactIntake
from atoll_synchronizer.process import Host
from atoll_synchronizer.shard_context import EventLog, ShardContext
from fuzzing.mutators import Mutator, mutated_arrays, mutated_bytes, mutated_frame, mutated_json
from support.attacks import beat, manifest
from support.events import event
from support.founded_run import run_record
from support.queued_bytes import QueuedBytes
from support.shard_owners import FixedOwner

ELEMENTS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """A function of bytes, honest inputs to begin with, and how those are made wrong."""

    take: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    mutate: Mutator = mutated_json
    refuses: tuple[type[Exception], ...] = (AtollError,)


def decoders(run: RunRecord) -> dict[str, Target]:
    found = {f"message {kind}": Target(_decoding(kind), seeds) for kind, seeds in _messages(run).items()}
    found |= {f"frame {codec}": _frame(codec) for codec in FORMATS}
    arrays = {"m": np.ones((3, 4), np.float32), "count": np.int64(3) * np.ones((), np.int64)}
    found["packed arrays"] = Target(
        lambda data: unpack_arrays(data, 1 << 20), (pack_arrays(arrays),), mutate=mutated_arrays
    )
    found["fragment ledger"] = Target(read_fragment_ledger, (_fragment_ledger(),))
    found["manifest of an archive"] = _manifest(run)
    found["dump of facts"] = _dump(run)
    found["event log, live view"] = Target(lambda data: History().on_event(decode(messages.Event, data)), _events(run))
    found["event log, rounds"] = Target(lambda data: History().take(_stored(data), data), _events(run))
    found["answer of JetStream"] = Target(
        _answer,
        (b'{"seq":5,"message":{"seq":1,"data":"aGk="}}', b'{"error":{"code":404,"err_code":10037}}'),
        refuses=(Unanswered, msgspec.MsgspecError),
    )
    found["subject of an acknowledgement"] = Target(
        lambda data: _attempts(data.decode("utf-8", "replace")),
        (b"$JS.ACK.S.C.1.2.3.4.5", b"$JS.ACK.D.A.S.C.1.2.3.4.5.r"),
        mutate=mutated_bytes,
    )
    return found


def _decoding(kind: str) -> Callable[[bytes], object]:
    struct = getattr(messages, kind, DataLedger)
    return lambda data: decode(struct, data)


def _messages(run: RunRecord) -> dict[str, tuple[bytes, ...]]:
    blob = BlobRef(run.subjects.global_stem(0, 1, "1.a"), 1, 10, "0" * 32)
    delta = messages.Delta(1, "1.a", 1, 10, "0" * 32)
    included = messages.Included("a", 1, 1, 0, 10, 1, 100.0, 0)
    ledger = Ledger(run_tokens=5)
    ledger.take_report("a", 1, 10, 5, 5, 0)
    ledger.book("a", 1, 3, "refused", "stale")
    head = messages.Head(
        fragment=0,
        version=1,
        epoch=1,
        nonce="1.a",
        layout=run.layout.fingerprint,
        keyframe=blob,
        key_version=1,
        digest="0" * 32,
        deltas=(delta,),
        state=blob,
        fragment_ledger=blob,
        included=(included,),
        superseded=(blob,),
    )
    member = messages.Member(learner="a", incarnation=1, nonce="n", host="h", pid=1, claimed_at_s=0.0)
    lease = messages.Lease(shard=0, epoch=1, nonce="n", run_nonce="r", host="h", pid=1, ledger=ledger)
    grant = DataGrant(0, 0, 2, "a", 1, read=1, of=4)
    offer = messages.StateOffer(
        learner="a", incarnation=1, run_nonce=run.nonce, steps=1, tokens=1, run_tokens=1, blob=blob
    )
    verdict = messages.Verdict(learner="a", incarnation=1, fragment=0, push=1, fate="refused", reason="stale")
    presence = messages.Presence(name="x", host="h", pid=1, wants=(0,), owns=(1,))
    whole = {
        "RunRecord": run,
        "Head": head,
        "Member": member,
        "Lease": lease,
        "DataLedger": DataLedger(blocks=8, next_position=2, grants=(grant,)),
        "Call": messages.Call(fragment=0, version=1, attempt=1, run_tokens=10),
        "Verdict": verdict,
        "Presence": presence,
        "Control": messages.Control(verb="lend", sender="a"),
        "StateOffer": offer,
        "Event": event("joined", "a", 1.0, incarnation=1),
    }
    told: dict[str, tuple[bytes, ...]] = {name: (encode(message),) for name, message in whole.items()}
    return told | {"Beat": (beat(run, "a"),), "Contribution": (manifest(run, "a").data,)}


def _frame(codec: str) -> Target:
    vector = np.linspace(-1.0, 1.0, ELEMENTS, dtype=np.float32)
    return Target(
        lambda data: decode_frame(data, elements_expected=Framing(ELEMENTS, codec).elements, codec=codec),
        (bytes(encode_frame(vector, codec)),),
        mutate=mutated_frame,
    )


def _fragment_ledger() -> bytes:
    ledger = FragmentLedger(
        settled={"a/1": SettledPushes(merged=10, refused={"stale": 3}, pushes=[[1, 4], [6, 6]])},
        lengths={"a": Measure(1.0, 8, 1, 3)},
    )
    told = Ledger()
    told.take_report("a", 1, 10, 5, 5, 0)
    return ledger.freeze(told)


class _OneObject:
    """An archive whose every object is the same."""

    where = "memory"

    def __init__(self) -> None:
        self.data = b""

    def put(self, path: str, data: bytes) -> None:
        del path
        self.data = data

    def get(self, path: str, size_bytes_max: int) -> bytes:
        del path, size_bytes_max
        return self.data

    def names(self, prefix: str) -> list[Name]:
        del prefix
        return []

    def remove(self, paths: list[str]) -> None:
        """Remove nothing."""


def _manifest(run: RunRecord) -> Target:
    """Return the reader of manifests; their digest is repaired, or they would all be refused for it."""
    from atoll.archive.checkpoints import Manifest  # noqa: PLC0415

    objects = _OneObject()
    store = CheckpointStore(objects, run.run)
    head = msgspec.convert(
        msgspec.json.decode(_messages(run)["Head"][0]) | {"deltas": [], "superseded": []}, messages.Head
    )
    thing = CheckpointObject("a" * 64, 10)
    pieces = tuple(
        Piece(head=msgspec.structs.replace(head, fragment=p), frame=thing, state=thing)
        for p in run.protocol.fragments_of(0)
    )
    honest = Manifest(run=run, shard=0, epoch=1, number=60, made_at_s=1.0, tokens=1, pieces=pieces, ledger=Ledger())
    part = Part(honest.path.split("/")[2], 60, 0, run.protocol.shards, 1, False, False, honest.path)

    def take(data: bytes) -> object:
        objects.data = digest_of_bytes(data).encode() + b"\n" + data
        return store.read(part).objects

    return Target(take, (msgspec.json.encode(honest),))


def _dump(run: RunRecord) -> Target:
    shard = Shard(run.protocol, 0, dict.fromkeys(run.protocol.fragments_of(0), 0))
    recorder = FactRecorder("shard-0", shard)
    lines = b"\n".join(recorder.lines("test"))

    def take(data: bytes) -> object:
        return Replay(data.splitlines()).lost

    return Target(take, (lines,))


def _events(run: RunRecord) -> tuple[bytes, ...]:
    share = {"learner": "a", "incarnation": 1, "age": 0, "tokens": 10, "weight": 1.0, "push": 1}
    rounds = {"fragment": 0, "version": 1, "contributors": [share], "tokens": 10, "run_tokens": 10, "why": None}
    refusal = {**PushKey("a", 1, 0, 1)._asdict(), "reason": "stale"}
    told = Ledger()
    told.take_report("a", 1, 10, 5, 5, 0)
    del run
    return tuple(
        encode(each)
        for each in (
            event("round", "shard-0", 1.0, **rounds),
            event("waiting", "shard-0", 1.0, fragment=0, version=1, why="for a", cause_id="call/0/0/2"),
            event("joined", "a", 1.0, incarnation=1, founder=True, versions_max=0, took_s=0.1),
            event("left", "a", 1.0, incarnation=1, tokens=10, steps=1),
            event("refused", "shard-0", 1.0, refusals=[refusal]),
            event("junk", "shard-0", 1.0, messages=3, reasons={"stranger": 3}, senders={"x": 3}),
            event("filled", "shard-0", 1.0, subjects_of="a", removed=3),
            event("quarantined", "shard-0", 1.0, learner="a", incarnation=1, offences=3, reason="outlier"),
            event("moved", "a", 1.0, role="learner", incarnation=1, moved={"wire_up": 5}),
            event("validation", "evaluator", 1.0, run_tokens=10, bits_per_byte=2.0),
            event("ledger", "shard-0", 1.0, ledger=told, part=0, reason="drained", commits=3),
        )
    )


def _stored(data: bytes) -> str:
    one = decode(messages.Event, data)
    return f"ev.{one.kind}.{one.who}"


def _answer(data: bytes) -> object:
    answer = parsed(data, dict[str, Any])
    return read_field(answer, int, "seq"), read_field(answer, int, "message", "seq")


# --- the handlers of both services --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Scene:
    """One learner and one shard's intake on an in-memory broker, and a host of shards."""

    run: RunRecord
    driver: IslandDriver
    lender: StateLender
    intake: FactIntake
    host: Host
    machine: Shard

    @classmethod
    async def opened(cls) -> Scene:
        """Found a run, join it, and open the intake of its shard 0."""
        run = run_record("fuzz")
        bus = MemoryBus(run.run, MemoryBroker())
        await bus.put_record(run.subjects.run_record, encode(run), expected=0)
        member = await claim(bus, run.subjects, "a", SystemClock())
        sizes = run.layout.fragment_sizes()
        anchors = {p: GlobalFragment(p, 0, np.zeros(sizes[p], np.float32)) for p in range(len(sizes))}
        driver = IslandDriver(bus, run, member, anchors, SystemClock())
        progress = TrainingProgress(10, 100, 100, healthy=True)
        lender = StateLender(bus, run, member, lambda: progress, this_process())
        context = ShardContext(bus, run, 0, SystemClock())
        event_log = EventLog(bus, run.subjects, "shard-0", SystemClock())
        machine = Shard(run.protocol, 0, dict.fromkeys(run.protocol.fragments_of(0), 0))
        done = deque[Any](maxlen=1)
        owner = FixedOwner(lambda fact: done.append(machine.handle(fact)))
        pending = PendingAcknowledgements(bus, run.subjects, event_log, GarbageCollector(bus), owner)
        intake = FactIntake(context, pending, event_log, owner)
        await intake.open(1)
        host = Host(bus, run, (0,), SystemClock(), ArchiveSettings())
        return cls(run, driver, lender, intake, host, machine)

    async def rest(self) -> None:
        """Let background work go on, and forget what piles up where nobody works it off."""
        await asyncio.sleep(0)
        self.intake._dropped.clear()
        self.intake._waiting.before(float("inf"))
        self.intake._waiting_beats.before(float("inf"))
        self.intake._pending.contributions.clear()

    async def close(self) -> None:
        await self.driver.stop()
        await self.lender.stop()
        await self.intake.close()


def handlers(scene: Scene) -> dict[str, Target]:
    """Return every handler of messages of both services. They let nothing through but what a driver catches."""
    run, s, driver = scene.run, scene.run.subjects, scene.driver
    seeds = _messages(run)
    heard = (PeerMisbehaved,)

    def core(subject: str, handler: Callable[[CoreMessage], object]) -> Callable[[bytes], object]:
        return lambda data: handler(CoreMessage(subject, data, "_INBOX.x"))

    def tap(data: bytes) -> None:
        driver._on_head(CoreMessage(s.tap("gl.head.0"), b"", headers={"Atoll-Info": data.decode("utf-8", "replace")}))

    def presence(data: bytes) -> None:
        scene.host._on_presence(decode(messages.Presence, data))

    def control(data: bytes) -> None:
        message = CoreMessage(s.control("a"), data)
        scene.lender._answer(message, decode(messages.Control, data))

    return {
        "learner: call": Target(core(s.call(0), driver._on_call), seeds["Call"], refuses=heard),
        "learner: verdict": Target(core(s.verdict("a"), driver._on_verdict), seeds["Verdict"], refuses=heard),
        "learner: command": Target(core(s.control("a"), driver._on_control), seeds["Control"], refuses=heard),
        "learner: head": Target(tap, (b'{"fragment":0,"version":1}',), refuses=heard),
        "learner: loan": Target(control, seeds["Control"], refuses=heard),
        "shard: heartbeat": Target(core(s.beat("a"), scene.intake._on_beat), seeds["Beat"], refuses=()),
        "shard: manifest": Target(
            lambda data: scene.intake._take(QueuedBytes(s.contribution(0, 0, "a"), data)),
            seeds["Contribution"],
            refuses=(),
        ),
        "shard: farewell": Target(
            lambda data: scene.intake._take(QueuedBytes(s.farewell(0, "a"), data)), seeds["Beat"], refuses=()
        ),
        "host: presence": Target(presence, seeds["Presence"], refuses=heard),
    }


MISTAKES = (ProtocolMisuse,)
"""Errors of ours that say that we are wrong: they are finds wherever they come from."""
