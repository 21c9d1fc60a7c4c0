"""What a permitted learner may send, and what it must not be able to do to the others with that: rows for a run that trains.

The door lets all of it through (`support.door_attacks` has what it does not). The attacker has a key, a member record and
heartbeats like anybody. A row is an honest message with one lie in it, or a few lines that send something: every field of a
manifest, a frame, a heartbeat, a farewell, a member record and a ledger of data leases that others read has one. The key of a
region's synchronizer (`REGION`) lies where a shard asks it, for a learner that says that it is there.

Each row begins a life of the attacker's, so that none is refused for what an earlier one has done. `HonestWatch` says whether a
row got in: whether anything of an honest learner was refused other than for being late, whether a fragment made no version
more or an honest learner had no part in any, and whether the run counted more than such learners train.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import nats.errors
import numpy as np
import xxhash
import zstandard
from nats.aio.client import Client

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError
from atoll.base.quantities import INCARNATION_MAX, PUSH_MAX, STEPS_MAX, TOKEN_FRAGMENTS_MAX, TOKENS_MAX, VERSION_MAX
from atoll.bus.interface import Bus
from atoll.client.membership import claim
from atoll.codec import FrameEncoder, Framing
from atoll.codec.frames import COMPRESSED, HEADER
from atoll.protocol.data import DataGrant, DataLedger
from atoll.run.delta_chain import is_inline
from atoll.run.heads import read_heads
from atoll.wire.blobs import BlobRef, Upload
from atoll.wire.messages import Beat, Contribution, Event, Member, RegionAnswer, RunRecord, decode
from atoll.wire.subjects import PUSH_NONCE_BYTES
from support.door_attacks import PREMERGER, VICTIM

REGION: Final = PREMERGER.removesuffix("-premerge")
STEP_TOKENS: Final = 16
LENGTH: Final = 1e-3
ID_BYTES: Final = 60_000
IDS: Final = 400
FLOOD: Final = 400
FILL_S: Final = 0.5
SENT_S: Final = 60.0
ROLL_S: Final = 0.6
"""Within that shards have read which region a member says that it is in."""
ANSWERS_S: Final = 0.5

Lies = Mapping[str, Any]
"""Fields of a message with what stands there: a value, raw JSON (`msgspec.Raw`), or what makes it of the honest message."""
Send = Callable[["Attacker"], Awaitable[None]]
Connect = Callable[[], AbstractAsyncContextManager[Client]]
Spoil = Callable[[bytes], bytes]
"""Makes the first segment of a frame another one."""


@dataclass(frozen=True, slots=True)
class MemberAttack:
    """One row: what is sent."""

    name: str
    send: Send


@dataclass(slots=True)
class Attacker:
    """A member of a run that sends what it likes; `tokens` is what it says to have trained, `pushed` counts token-fragments.

    `connect` makes a connection with its key and without our bus, for what a bus does not send. `region` has the key of a
    region's synchronizer.
    """

    bus: Bus
    run: RunRecord
    member: Member
    connect: Connect | None = None
    region: Bus | None = None
    pushes: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    pushed: int = 0
    stores: bool = False
    """Whether it stores small frames, too, as a learner does whose region folds them."""

    @classmethod
    async def join(
        cls, bus: Bus, run: RunRecord, learner: str, connect: Connect | None = None, region: Bus | None = None
    ) -> Attacker:
        return cls(bus, run, await claim(bus, run.subjects, learner, SystemClock()), connect, region)

    @property
    def name(self) -> str:
        """Return the id of the learner that it is."""
        return self.member.learner

    async def play(self, attack: MemberAttack) -> None:
        """Begin a life and send a row."""
        await self.begin_life()
        # The broker may refuse it: a place in line is taken, or there is no room. Then this was not sent.
        with contextlib.suppress(AtollError):
            await attack.send(self)

    async def begin_life(self, **lies: Any) -> None:  # noqa: ANN401  (as `lied`)
        """Write the next member record, as a restarted learner does, and say that it trains."""
        life = msgspec.structs.replace(self.member, incarnation=self.member.incarnation + 1, nonce=secrets.token_hex(4))
        self.member, self.pushes, self.tokens, self.pushed = life, {}, 0, 0
        self.stores = "region" in lies
        await self.write(self.run.subjects.member(self.name), lied(life, lies))
        await self.beat()

    async def write(self, subject: str, data: bytes) -> None:
        record = await self.bus.get_record(subject)
        await self.bus.put_record(subject, data, expected=record.revision if record else 0)

    async def beat(self, **lies: Any) -> None:  # noqa: ANN401
        await self.bus.tell(self.run.subjects.beat(self.name), lied(self.report(), lies))

    async def leave(self, **lies: Any) -> None:  # noqa: ANN401
        for shard in range(self.run.protocol.shards):
            said = lied(msgspec.structs.replace(self.report(), state="left"), lies)
            place = self.run.subjects.farewell(shard, self.name)
            await self.bus.publish(place, said, msg_id=secrets.token_hex(8))

    async def train(self, steps: int = 20) -> None:
        """Say to have taken some more steps."""
        self.tokens += STEP_TOKENS * steps
        await self.beat()

    async def push_all(self, *, spoil: Spoil | None = None, **lies: Any) -> None:  # noqa: ANN401
        """Train, and push a contribution for each fragment on its newest version, with lies in its manifest or its frame."""
        await self.train()
        for fragment, head in (await read_heads(self.bus, self.run)).items():
            with contextlib.suppress(AtollError):
                await self.push(fragment, head.version, spoil=spoil, **lies)

    async def push(
        self,
        fragment: int,
        version: int,
        /,
        *,
        length: float = LENGTH,
        spoil: Spoil | None = None,
        **lies: Any,  # noqa: ANN401
    ) -> None:
        """Push one contribution of a length (L2 per element); `spoil` changes the first segment of its frame."""
        push = self.pushes[fragment] = self.pushes.get(fragment, 0) + 1
        run, elements = self.run, self.run.layout.fragment_sizes()[fragment]
        vector = (length * np.random.default_rng(push).standard_normal(elements)).astype(np.float32)
        framing = Framing(elements, run.protocol.of(fragment).codec_up)
        encoder = FrameEncoder(
            framing, lambda start, stop: vector[start:stop], run.layout.slices(fragment), compress=spoil is None
        )
        first, *others = [bytes(encoder.piece(number)) for number in range(len(encoder))]
        upload = Upload(Segments([spoil(first) if spoil else first, *others]))
        nonce = secrets.token_hex(PUSH_NONCE_BYTES)
        stem = run.subjects.contribution_stem(self.name, fragment, self.member.incarnation, push, nonce)
        frame = b""
        if is_inline(run, fragment) and not self.stores:
            upload.collision_free = True
            frame = bytes(upload.make(0))
            blob = upload.ref(stem)
        else:
            blob = await self.bus.put_blob(stem, upload)
        manifest = Contribution(
            learner=self.name,
            incarnation=self.member.incarnation,
            fragment=fragment,
            push=push,
            base_version=version,
            tokens=20 * STEP_TOKENS,
            steps=20,
            trained_tokens=self.tokens,
            loss=1.0,
            norms=tuple(encoder.norms()),
            layout=run.layout.fingerprint,
            run_nonce=run.nonce,
            blob=blob,
            frame=frame,
        )
        place = run.subjects.contribution(run.protocol.shard_of(fragment), fragment, self.name)
        await self.bus.publish(place, lied(manifest, lies), msg_id=secrets.token_hex(8))
        self.pushed += manifest.tokens

    async def pour(self, messages: Iterator[tuple[str, bytes, dict[str, str] | None]]) -> None:
        """Send messages as fast as the broker reads them, until it hangs up."""
        if self.connect is None:
            return
        with contextlib.suppress(nats.errors.Error):
            async with self.connect() as client:
                for number, (subject, body, headers) in enumerate(messages):
                    await client.publish(subject, body, headers=headers)
                    if number % 16 == 0:
                        await client.flush()
                await client.flush()

    def report(self) -> Beat:
        return Beat(
            learner=self.name,
            incarnation=self.member.incarnation,
            run_nonce=self.run.nonce,
            state="training",
            at_s=SystemClock().wall(),
            step=self.tokens // STEP_TOKENS,
            step_s=0.01,
            tokens=self.tokens,
            tokens_per_s=1.0,
            loss=1.0,
            pushed=self.pushed,
            superseded=0,
        )


@dataclass(frozen=True, slots=True)
class Segments:
    """Bytes as the pieces of a blob."""

    pieces: list[bytes]

    @property
    def size_bytes_max(self) -> int:
        return sum(map(len, self.pieces))

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, number: int) -> bytes:
        return self.pieces[number]


def lied(message: msgspec.Struct, lies: Lies) -> bytes:
    """Return a message as JSON with lies in it; nothing of ours checks what is sent."""
    told = {name: lie(message) if callable(lie) else lie for name, lie in lies.items()}
    return msgspec.json.encode(msgspec.structs.replace(message, **told))


def raw(text: str) -> msgspec.Raw:
    """Return JSON that no encoder of ours writes."""
    return msgspec.Raw(text.encode())


def _push(name: str, *, times: int = 1, spoil: Spoil | None = None, **lies: Any) -> MemberAttack:  # noqa: ANN401
    """Return a row: contributions for all fragments, `times` times."""

    async def send(attacker: Attacker) -> None:
        for _ in range(times):
            await attacker.push_all(spoil=spoil, **lies)

    return MemberAttack(f"a contribution {name}", send)


def _frame(name: str, spoil: Spoil) -> MemberAttack:
    return MemberAttack(f"a frame {name}", _push("", spoil=spoil).send)


def _blob(name: str, **lies: Any) -> MemberAttack:  # noqa: ANN401
    """Return a row: contributions that say something else of their chunks."""
    return _push(name, blob=lambda manifest: _replaced(manifest.blob, manifest, lies))


def _beat(name: str, *, times: int = 3, **lies: Any) -> MemberAttack:  # noqa: ANN401
    """Return a row: heartbeats of one who trains."""

    async def send(attacker: Attacker) -> None:
        await attacker.train()
        for _ in range(times):
            await attacker.beat(**lies)

    return MemberAttack(f"a heartbeat {name}", send)


def _bye(name: str, *, pushes: bool = False, **lies: Any) -> MemberAttack:  # noqa: ANN401
    """Return a row: a farewell to each shard, behind contributions or none."""

    async def send(attacker: Attacker) -> None:
        await (attacker.push_all() if pushes else attacker.train())
        await attacker.leave(**lies)

    return MemberAttack(f"a farewell {name}", send)


def _event(name: str, kind: str, **fields: Any) -> MemberAttack:  # noqa: ANN401
    """Return a row: an entry of the event log about its own life."""

    async def send(attacker: Attacker) -> None:
        run, told = attacker.run, {"incarnation": attacker.member.incarnation, **fields}
        raws = {field: msgspec.Raw(msgspec.json.encode(value)) for field, value in told.items()}
        event = Event(kind=kind, who=attacker.name, at_s=SystemClock().wall(), fields=raws)
        place = run.subjects.event(kind, attacker.name)
        await attacker.bus.publish(place, msgspec.json.encode(event), msg_id=secrets.token_hex(8))

    return MemberAttack(f"an event {name}", send)


def _record(name: str, **lies: Any) -> MemberAttack:  # noqa: ANN401
    """Return a row: a member record, and contributions behind it."""

    async def send(attacker: Attacker) -> None:
        await attacker.write(attacker.run.subjects.member(attacker.name), lied(attacker.member, lies))
        attacker.stores = "region" in lies
        await attacker.push_all()

    return MemberAttack(f"a member record {name}", send)


def _leases(name: str, change: Callable[[DataLedger, Attacker], bytes]) -> MemberAttack:
    """Return a row: another ledger of data leases in place of the one that is there."""

    async def send(attacker: Attacker) -> None:
        subject = attacker.run.subjects.data
        for _ in range(3):
            record = await attacker.bus.get_record(subject)
            there = DataLedger(blocks=max(1, attacker.run.data_blocks))
            if record is not None:
                with contextlib.suppress(AtollError):
                    there = decode(DataLedger, record.data)
            await attacker.bus.put_record(subject, change(there, attacker), expected=record.revision if record else 0)

    return MemberAttack(f"data leases {name}", send)


def _ids(name: str, subject_of: Callable[[Attacker], str]) -> MemberAttack:
    """Return a row: small messages with long ids, which a broker remembers."""
    headers = ({"Nats-Msg-Id": f"{number:08d}".ljust(ID_BYTES, "x")} for number in itertools.count())

    async def send(attacker: Attacker) -> None:
        await attacker.pour((subject_of(attacker), b"{}", next(headers)) for _ in range(IDS))

    return MemberAttack(f"ids of {ID_BYTES // 1000} kB {name}", send)


def _fills(name: str, subjects_of: Callable[[Attacker, int], str], size: int) -> MemberAttack:
    """Return a row: as many messages as can be sent in `FILL_S`, unless the broker closes the connection."""

    async def send(attacker: Attacker) -> None:
        until_s = time.monotonic() + FILL_S
        numbers = itertools.takewhile(lambda _: time.monotonic() < until_s, itertools.count())
        await attacker.pour((subjects_of(attacker, number), b"x" * size, None) for number in numbers)

    return MemberAttack(f"fills {name}", send)


def _region(name: str, answer: Callable[[Attacker], bytes | None]) -> MemberAttack:
    """Return a row: a learner says that it is in a region, whose synchronizer answers what shards ask with a lie."""

    async def send(attacker: Attacker) -> None:
        if attacker.region is None:
            return
        asked = await attacker.region.listen(attacker.run.subjects.premerge(REGION))
        await attacker.begin_life(region=REGION)
        await asyncio.sleep(ROLL_S)
        await attacker.push_all()
        until_s = time.monotonic() + ANSWERS_S
        while (left_s := until_s - time.monotonic()) > 0:
            question = await asked.next(left_s)
            said = answer(attacker)
            if question is not None and question.reply is not None and said is not None:
                await attacker.region.tell(question.reply, said)
        await asked.close()

    return MemberAttack(f"a region's synchronizer {name}", send)


def _replaced(message: Any, whole: Contribution, lies: Lies) -> Any:  # noqa: ANN401
    return msgspec.structs.replace(
        message, **{name: lie(whole) if callable(lie) else lie for name, lie in lies.items()}
    )


# --- contributions ----------------------------------------------------------------------------------------------------


async def _goes_back(attacker: Attacker) -> None:
    for push in (9, 5, 1, 7, 3):
        attacker.pushes = dict.fromkeys(range(attacker.run.protocol.fragments), push - 1)
        await attacker.push_all()


async def _twice(attacker: Attacker) -> None:
    for length in (LENGTH, 10 * LENGTH):
        attacker.pushes = {}
        await attacker.push_all(length=length)


async def _same_tokens(attacker: Attacker) -> None:
    await attacker.train()
    for _ in range(8):
        attacker.tokens = 0
        await attacker.push_all()


async def _holes(attacker: Attacker) -> None:
    for push in range(1, 32, 2):
        attacker.pushes = dict.fromkeys(range(attacker.run.protocol.fragments), push)
        await attacker.push_all(tokens=0)


async def _after_final(attacker: Attacker) -> None:
    for final in (True, True, False, True):
        await attacker.push_all(final=final)


async def _former(attacker: Attacker) -> None:
    former = attacker.member
    await attacker.begin_life()
    for _ in range(3):
        await attacker.push_all(incarnation=former.incarnation, blob=partial(_of_life, former.incarnation))


def _of_life(incarnation: int, manifest: Contribution) -> BlobRef:
    """Return where the chunks of a contribution were if it were another life's."""
    lives = f".{manifest.incarnation}-", f".{incarnation}-"
    return msgspec.structs.replace(manifest.blob, stem=manifest.blob.stem.replace(*lives))


def _foreign_stem(manifest: Contribution) -> str:
    return manifest.blob.stem.replace(f".{manifest.learner}.", f".{VICTIM}.")


async def _junk_manifests(attacker: Attacker) -> None:
    for body in (
        b"",
        b"\x00" * 200,
        b"[" * 1100,
        b"{}",
        b'{"schema":1}',
        '{"learner":"\ud800"}'.encode("utf-8", "surrogatepass"),
    ):
        for fragment in range(attacker.run.protocol.fragments):
            place = attacker.run.subjects.contribution(
                attacker.run.protocol.shard_of(fragment), fragment, attacker.name
            )
            with contextlib.suppress(AtollError):
                await attacker.bus.publish(place, body, msg_id=secrets.token_hex(8))


async def _in_other_place(attacker: Attacker) -> None:
    fragments = attacker.run.protocol.fragments
    await attacker.push_all(fragment=lambda manifest: (manifest.fragment + 1) % fragments)


LENGTHS: Final = (
    _push("tiny, so that honest ones are outliers", times=10, length=1e-6),
    _push("tiny and final, so that honest ones are outliers", length=1e-6, final=True),
    _push("tiny, of ten times the steps", times=10, length=1e-6, steps=200),
    _push("of great length, which moves the limit", times=10, length=1.0),
    _push("of 1e6 a parameter", length=1e6),
)
CLAIMS: Final = (
    _push("that says 2^47 tokens trained", trained_tokens=TOKENS_MAX >> 1),
    _push(
        "of 2^47 tokens in as many steps as there are",
        tokens=TOKENS_MAX >> 1,
        trained_tokens=TOKENS_MAX >> 1,
        steps=STEPS_MAX,
    ),
    _push("of 2^47 tokens in one step", tokens=TOKENS_MAX >> 1, trained_tokens=TOKENS_MAX >> 1, steps=1),
    _push("of ten million tokens in one step", tokens=10**7, trained_tokens=10**7, steps=1),
    _push("of 2^39 steps", steps=STEPS_MAX >> 1),
    _push("of a hundred thousand steps", times=3, steps=100_000),
    _push("of more tokens than trained", tokens=10**6),
    MemberAttack("a contribution of the same tokens, again and again", _same_tokens),
    _push("of no tokens", times=3, tokens=0),
    _push("of no steps", times=3, steps=0),
    _push("of tokens below nothing", tokens=-1),
    _push("on a version of the future", base_version=lambda manifest: manifest.base_version + 1000),
    _push("on the next version", times=3, base_version=lambda manifest: manifest.base_version + 1),
    _push("on the last version that there can be", base_version=VERSION_MAX),
    _push("on version 0", times=3, base_version=0),
    MemberAttack("contributions whose numbers go back", _goes_back),
    MemberAttack("contributions with holes between their numbers", _holes),
    MemberAttack("two contributions of one number", _twice),
    _push("of the last number that there can be", push=PUSH_MAX, blob=lambda m: _numbered(m, PUSH_MAX)),
    _push("of a number beyond all", push=1 << 53),
    MemberAttack("contributions that are final twice, and go on", _after_final),
    MemberAttack("contributions of a former life", _former),
    _push("of a life that is not there", incarnation=INCARNATION_MAX, blob=partial(_of_life, INCARNATION_MAX)),
    _push("of life 0", incarnation=0, blob=partial(_of_life, 0)),
)
MANIFESTS: Final = (
    MemberAttack("no manifests in the queue", _junk_manifests),
    MemberAttack("a contribution to another fragment", _in_other_place),
    _push("of another learner", learner=VICTIM),
    _push("of another layout", layout="0" * 16),
    _push("of another founding", run_nonce="abcd"),
    _push("of a schema of the future", schema=999),
    _push("whose lengths are no numbers", norms=raw("[NaN]")),
    _push("whose lengths are infinite", norms=raw("[1e999]")),
    _push("whose lengths are 1e308", norms=lambda manifest: (1e308,) * len(manifest.norms)),
    _push("whose lengths are below nothing", norms=lambda manifest: tuple(-norm for norm in manifest.norms)),
    _push("with no lengths", norms=()),
    _push("with a length too many", norms=lambda manifest: (*manifest.norms, 0.0)),
    _push("of other lengths than its frame", norms=lambda manifest: tuple(2 * norm for norm in manifest.norms)),
    _push("of lengths of nothing", norms=lambda manifest: (0.0,) * len(manifest.norms)),
    _push("whose loss is no number", loss=raw("NaN")),
    _push("whose loss is 1e308", loss=1e308),
    _push("whose loss is 1e100", times=3, loss=1e100),
    _push("with a text that cannot be seen", cause_id="\u200b\u2060\ufeff"),
    _push("with a text that moves a cursor", cause_id="\x1b[2J"),
    _push("with a text of 10 kB", cause_id="x" * 10_000),
    _push("sent at a time that no calendar has", sent_at_s=1e300),
    _push("whose notes are beyond all", notes={"step_s": 1e12, "upload_s": 1e12, "adopted_at_s": 253e9}),
    _push("whose notes are none", notes=raw("[" * 900 + "]" * 900)),
    _push("that bears a frame of 10 kB", frame=b"x" * 10_000),
)
BLOBS: Final = (
    _blob("of another's chunks", stem=_foreign_stem),
    _blob("of 2^31 chunks", chunks=1 << 31),
    _blob("of 2^45 bytes", size_bytes=1 << 45),
    _blob("of a byte more than it has", size_bytes=lambda manifest: manifest.blob.size_bytes + 1),
    _blob("of a byte less than it has", size_bytes=lambda manifest: manifest.blob.size_bytes - 1),
    _blob("of no bytes", size_bytes=0, chunks=0),
    _blob("of another digest", digest="0" * 64),
    _blob("of a digest that anybody can match", digest="0" * 32),
    _push("whose chunks nobody has stored", push=77, frame=b"", blob=lambda manifest: _numbered(manifest, 77)),
)


def _numbered(manifest: Contribution, push: int) -> BlobRef:
    """Return where the chunks of a contribution were if it had another number."""
    numbers = f".{manifest.incarnation}-{manifest.push}", f".{manifest.incarnation}-{push}"
    return msgspec.structs.replace(manifest.blob, stem=manifest.blob.stem.replace(*numbers))


# --- frames -----------------------------------------------------------------------------------------------------------


def _frame_of(piece: bytes, payload: bytes, flags: int = 0, **header: int) -> bytes:
    """Return a segment of another payload, whose header fits it but for what is given."""
    names = "magic", "version", "kind", "flags", "zero", "elements", "start", "count", "length", "digest"
    told: dict[str, Any] = dict(zip(names, HEADER.unpack_from(piece), strict=True))
    told |= {"flags": flags, "length": len(payload), "digest": xxhash.xxh3_64_intdigest(payload)} | header
    return HEADER.pack(*told.values()) + payload


def _payload(piece: bytes) -> bytes:
    return piece[HEADER.size :]


def _bomb(piece: bytes) -> bytes:
    """Return a segment that unpacks to 64 MiB."""
    return _frame_of(piece, zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20)), COMPRESSED)


def _hidden_bomb(piece: bytes) -> bytes:
    """Return a segment that unpacks to 64 MiB and does not say so."""
    compressor = zstandard.ZstdCompressor(level=19, write_content_size=False)
    return _frame_of(piece, compressor.compress(bytes(64 << 20)), COMPRESSED)


def _lying_bomb(piece: bytes) -> bytes:
    """Return a segment that unpacks to 64 MiB and says that it has what its elements need."""
    packed = bytearray(zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20)))
    single = packed[4] >> 5 & 1
    width = {0: single, 1: 2, 2: 4, 3: 8}[packed[4] >> 6]
    at = 5 + (not single)
    said = len(_payload(piece)) - (256 if width == 2 else 0)
    packed[at : at + width] = (said % (1 << 8 * width)).to_bytes(width, "little")
    return _frame_of(piece, bytes(packed), COMPRESSED)


FRAMES: Final = (
    _frame("that ends too early", lambda piece: piece[:-3]),
    _frame("that is shorter than its header", lambda piece: piece[:20]),
    _frame("of another kind of file", lambda piece: b"EVIL" + piece[4:]),
    _frame("of another version", lambda piece: _frame_of(piece, _payload(piece), version=9)),
    _frame("in another codec", lambda piece: _frame_of(piece, _payload(piece), kind=1 + piece[5] % 8)),
    _frame("with flags that nobody knows", lambda piece: _frame_of(piece, _payload(piece), 0x80)),
    _frame("of 2^60 elements", lambda piece: _frame_of(piece, _payload(piece), elements=1 << 60)),
    _frame("that begins elsewhere", lambda piece: _frame_of(piece, _payload(piece), start=256)),
    _frame("of no elements", lambda piece: _frame_of(piece, b"", count=0)),
    _frame("whose checksum is wrong", lambda piece: piece[:-1] + bytes([piece[-1] ^ 1])),
    _frame("with more behind it", lambda piece: _frame_of(piece, _payload(piece) + b"x")),
    _frame("twice in one", lambda piece: piece + piece),
    _frame("that unpacks to 64 MiB", _bomb),
    _frame("that unpacks to 64 MiB and does not say so", _hidden_bomb),
    _frame("that unpacks to 64 MiB and says something else", _lying_bomb),
    _frame("that cannot be unpacked", lambda piece: _frame_of(piece, secrets.token_bytes(100), COMPRESSED)),
    _frame("of numbers that are none", lambda piece: _frame_of(piece, b"\xff" * len(_payload(piece)))),
    _frame(
        "of infinities",
        lambda piece: _frame_of(piece, b"\x80\x7f" * (len(_payload(piece)) // 2) + b"\0" * (len(_payload(piece)) % 2)),
    ),
    _frame(
        "of the largest numbers",
        lambda piece: _frame_of(piece, b"\x7f\x7f" * (len(_payload(piece)) // 2) + b"\0" * (len(_payload(piece)) % 2)),
    ),
)


# --- heartbeats, farewells, records -----------------------------------------------------------------------------------


async def _flood_of_beats(attacker: Attacker) -> None:
    for _ in range(FLOOD):
        await attacker.beat(step_s=1e12)
    await attacker.bus.reach(SENT_S)


async def _flood_of_lives(attacker: Attacker) -> None:
    last = attacker.member.incarnation + FLOOD
    attacker.member = msgspec.structs.replace(attacker.member, incarnation=last)
    await attacker.write(attacker.run.subjects.member(attacker.name), msgspec.json.encode(attacker.member))
    for life in range(last - FLOOD, last):
        await attacker.beat(incarnation=life, step=1, tokens=16)
    await attacker.bus.reach(SENT_S)


async def _awaited_of_nobody(attacker: Attacker) -> None:
    """Have shards look for chunks that nobody has stored, in a region that is not there."""
    await attacker.begin_life(region="nowhere")
    await asyncio.sleep(ROLL_S)
    for push in (77, 78):
        await attacker.push_all(push=push, frame=b"", blob=partial(_numbered, push=push))


async def _flood_of_farewells(attacker: Attacker) -> None:
    for life in range(1, 20):
        await attacker.leave(incarnation=life)


async def _stays_and_gives_nothing(attacker: Attacker) -> None:
    for _ in range(8):
        await attacker.train(200)
        await asyncio.sleep(0.1)


async def _leaves_and_goes_on(attacker: Attacker) -> None:
    for _ in range(2):
        await attacker.push_all()
        await attacker.leave()
    await attacker.push_all()


async def _beats_back(attacker: Attacker) -> None:
    for step in (1000, 10, 500, 0):
        await attacker.beat(step=step, tokens=16 * step)


BEATS: Final = (
    _beat("of 2^39 steps", step=STEPS_MAX >> 1),
    _beat("of 2^47 tokens", tokens=TOKENS_MAX >> 1, step=STEPS_MAX),
    _beat("of a step that takes 1e12 s", step_s=1e12, times=10),
    _beat("of a step that takes 1e12 s, and stands still", step=1, tokens=16, step_s=1e12, times=10),
    _beat("of a step that takes 1e-12 s", step_s=1e-12, times=10),
    _beat("of a step that takes no time", step_s=0.0, times=10),
    _beat("of a step of no length", step_s=raw("NaN")),
    _beat("of a step of a length below nothing", step_s=-1.0),
    MemberAttack("heartbeats that go back", _beats_back),
    _beat("of a life that is not there", incarnation=INCARNATION_MAX),
    _beat("of life 0", incarnation=0),
    _beat("of a former life", incarnation=lambda beat: max(0, beat.incarnation - 1)),
    _beat("of another founding", run_nonce="abcd"),
    _beat("of another learner", learner=VICTIM),
    _beat("of more pushed than trained", pushed=TOKEN_FRAGMENTS_MAX >> 1),
    _beat("of more overwritten than trained", superseded=TOKEN_FRAGMENTS_MAX >> 1),
    _beat("of more refused than trained", refused_local=TOKEN_FRAGMENTS_MAX >> 1),
    _beat("of a run that is at its target", run_tokens=1 << 52, times=10),
    _beat("whose loss is no number", loss=raw("NaN")),
    _beat("whose loss is 1e100", loss=1e100),
    _beat("of 1e100 tokens a second", tokens_per_s=1e100),
    _beat("at a time that no calendar has", at_s=1e300),
    _beat("of a state that nobody knows", state="asleep"),
    _beat("that has left", state="left"),
    _beat("that joins for ever", state="joining"),
    _beat("that drains", state="draining"),
    _beat("that is 2^53 versions behind", lag_versions=1 << 53),
    _beat("of traffic beyond all", moved={"wire_up": 1 << 53, "payload_up": 1 << 53, "frames_up": 1 << 53}),
    _beat("of an overhead of 1e100", overhead=1e100),
    _beat("of a schema of the future", schema=999),
    _beat("of 100 kB", learner="x" * 100_000),
    MemberAttack("a flood of heartbeats", _flood_of_beats),
    MemberAttack("heartbeats of one who gives nothing", _stays_and_gives_nothing),
)
FAREWELLS: Final = (
    _bye("at once, of 2^47 tokens", step=STEPS_MAX, tokens=TOKENS_MAX >> 1),
    _bye("of an account that does not balance", pushes=True, pushed=1),
    _bye("of 2^59 token-fragments", superseded=TOKEN_FRAGMENTS_MAX >> 1),
    _bye("of another learner", learner=VICTIM),
    _bye("of a life that is not there", incarnation=INCARNATION_MAX),
    _bye("of another founding", run_nonce="abcd"),
    _bye("that is none", state="training"),
    _bye("of a schema of the future", schema=999),
    MemberAttack("farewells, and goes on", _leaves_and_goes_on),
    MemberAttack("farewells of all its lives", _flood_of_farewells),
)
RECORDS: Final = (
    _record("of another learner", learner=VICTIM),
    _record("of a schema of the future", schema=999),
    _record("that has left", left=True),
    _record("with texts that cannot be seen", host="\u200b\u2060", software="\U000e0041"),
    _record("with texts that move a cursor", host="\x1b[2J", software="\r\n"),
    _record("that names a region of nobody", region="nowhere"),
    MemberAttack("chunks that a region of nobody is asked for", _awaited_of_nobody),
    _record("that names a region that is a wildcard", region="*"),
    _record("that names a region of 10 kB", region="x" * 10_000),
    _record("of a time that no calendar has", claimed_at_s=1e300),
    _record("of a process beyond all", pid=1 << 60),
    _record("of 500 kB", nonce="x" * 500_000),
    _record("that nests deeper than a stack", nonce=raw("[" * 1100 + "]" * 1100)),
    MemberAttack("a flood of lives", _flood_of_lives),
    _record("of the last life that there can be", incarnation=INCARNATION_MAX),
)
LEASES: Final = (
    _leases("of the last epoch that there can be", lambda there, _: _changed(there, epoch=(1 << 53) - 1)),
    _leases("of another number of blocks", lambda there, _: _changed(there, blocks=7)),
    _leases("that are junk", lambda *_: b"{}"),
    _leases("of a position beyond the last", lambda there, _: _changed(there, next_position=1 << 52)),
    _leases("without those of the others", lambda there, _: _changed(there, grants=())),
    _leases("that are all its own", lambda there, attacker: _changed(there, grants=_all_of(there, attacker))),
    _leases(
        "that are renewed 2^52 times",
        lambda there, _: _changed(there, grants=tuple(_changed_grant(g) for g in there.grants)),
    ),
    _leases("of 13,000 grants of nobody", lambda there, _: _units(there, "grants", 13_000)),
    _leases("of 1 MiB that came back", lambda there, _: _units(there, "returned", 14_500)),
    _leases(
        "that came back as one unit of all blocks, begun",
        lambda there, _: _changed(there, next_position=there.blocks, grants=(), returned=(_begun(there),)),
    ),
    _leases("of nothing left to read", lambda there, _: _changed(there, next_position=there.blocks)),
    _leases("of an epoch that is over", lambda there, _: _changed(there, epoch=0, grants=(), returned=(), finished=())),
)


def _changed(there: DataLedger, **lies: Any) -> bytes:  # noqa: ANN401
    return msgspec.json.encode(msgspec.structs.replace(there, **lies))


def _units(there: DataLedger, where: str, count: int) -> bytes:
    """Return a ledger of so many units of holders that are nowhere, each as short as it can be written."""
    units = b",".join(
        b'{"epoch":0,"start":%d,"stop":%d,"learner":"m","incarnation":%d}'
        % (number % there.blocks, number % there.blocks + 1, number)
        for number in range(count)
    )
    return b'{"blocks":%d,"next_position":%d,"%s":[%s]}' % (there.blocks, there.blocks // 2, where.encode(), units)


def _begun(there: DataLedger) -> DataGrant:
    return DataGrant(there.epoch, 0, there.blocks, "", 0, read=1, of=2)


def _changed_grant(grant: DataGrant) -> DataGrant:
    return msgspec.structs.replace(grant, renewals=1 << 52)


def _all_of(there: DataLedger, attacker: Attacker) -> tuple[DataGrant, ...]:
    return (DataGrant(there.epoch, 0, there.blocks, attacker.name, attacker.member.incarnation),)


# --- what a broker keeps ----------------------------------------------------------------------------------------------


def _chunk(attacker: Attacker, number: int = 0) -> str:
    return f"{attacker.run.subjects.contribution_stem(attacker.name, 0, attacker.member.incarnation, 1 + number, '0' * 16)}.0"


def _queued(attacker: Attacker, number: int = 0) -> str:
    fragment = number % attacker.run.protocol.fragments
    return attacker.run.subjects.contribution(attacker.run.protocol.shard_of(fragment), fragment, attacker.name)


IDS_KEPT: Final = (
    _ids("on chunks", _chunk),
    _ids("on manifests", _queued),
    _ids("on farewells", lambda attacker: attacker.run.subjects.farewell(0, attacker.name)),
    _ids("on its member record", lambda attacker: attacker.run.subjects.member(attacker.name)),
    _ids("on data leases", lambda attacker: attacker.run.subjects.data),
    _ids("on heartbeats", lambda attacker: attacker.run.subjects.beat(attacker.name)),
)
FILLS: Final = (
    _fills("the queue with manifests", _queued, 24 << 10),
    _fills(
        "the queue with farewells",
        lambda attacker, n: attacker.run.subjects.farewell(n % attacker.run.protocol.shards, attacker.name),
        24 << 10,
    ),
    _fills("the stream of chunks", _chunk, 256 << 10),
    _fills("the stream of records", lambda attacker, _: attacker.run.subjects.member(attacker.name), 256 << 10),
    _fills("the memory of heartbeats", lambda attacker, _: attacker.run.subjects.beat(attacker.name), 256 << 10),
)
EVENTS: Final = (
    _event("of 2^47 tokens trained", "sample", step=STEPS_MAX, tokens=TOKENS_MAX >> 1),
    _event("of 2^47 tokens in one step", "sample", step=1, tokens=TOKENS_MAX >> 1),
    _event("of more overwritten than trained", "sample", step=1, tokens=16, superseded=TOKEN_FRAGMENTS_MAX >> 1),
    _event("of a farewell after 2^47 tokens", "left", steps=STEPS_MAX, tokens=TOKENS_MAX >> 1),
    _ids("on events", lambda attacker: attacker.run.subjects.event("sample", attacker.name)),
    _fills("the event log", lambda attacker, _: attacker.run.subjects.event("sample", attacker.name), 16 << 10),
)
"""Whoever reads the event log meets these."""


# --- a region's synchronizer ------------------------------------------------------------------------------------------


def _answer(**fields: Any) -> Callable[[Attacker], bytes]:  # noqa: ANN401
    return lambda attacker: lied(
        RegionAnswer(done=True), {name: lie(attacker) if callable(lie) else lie for name, lie in fields.items()}
    )


def _sum(attacker: Attacker, region: str = REGION) -> BlobRef:
    return BlobRef(attacker.run.subjects.partial_stem(region, 0, 1, "ab"), 1, 1000, "0" * 64)


REGIONS: Final = (
    _region("that never answers", lambda _: None),
    _region("that is at work for ever", _answer(done=False)),
    _region("that answers junk", lambda _: b"\x00" * 100),
    _region("that has read nothing, for a reason", _answer(reason="not_finite")),
    _region("that has read lengths beyond all", _answer(norm=1e308, blob=_sum)),
    _region("that has read a length that is none", _answer(norm=raw("NaN"))),
    _region("that misses all", _answer(missing=(0, 1, 1 << 40), blob=_sum)),
    _region("whose sum is nowhere", _answer(blob=_sum)),
    _region("whose sum is another's", _answer(blob=lambda attacker: _sum(attacker, "near"))),
    _region(
        "whose sum has 2^45 bytes",
        _answer(blob=lambda attacker: msgspec.structs.replace(_sum(attacker), size_bytes=1 << 45)),
    ),
    _region("whose sum has lengths that lie", _answer(blob=_sum, lengths=((1e308, 1e308, 1e308),))),
    _region("of a schema of the future", _answer(schema=999)),
)

MEMBER_ATTACKS: Final = (
    *LENGTHS,
    *CLAIMS,
    *MANIFESTS,
    *BLOBS,
    *FRAMES,
    *BEATS,
    *FAREWELLS,
    *LEASES,
    *IDS_KEPT,
    *FILLS,
    *REGIONS,
    *RECORDS,
    *EVENTS,
)
"""Records of lives come late: where one has said that it has had its last life, what it sends afterwards is of a former one."""
