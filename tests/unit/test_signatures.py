"""Signatures: what is signed is believed for its subject alone, and nothing else is believed."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path
from typing import Any

import msgspec
import nkeys
import pytest

from atoll.base.errors import BrokerUnavailable, PeerMisbehaved, SettingsError
from atoll.bus.interface import CoreMessage, Record
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.signed import SignedBus, is_signed
from atoll.keys.identity import read_identity
from atoll.keys.rights import Kind, premerger_of
from atoll.keys.signatures import IdentitySignatures
from atoll.wire.messages import SIGNATURE, Control, RunRecord, Verdict, decode, encode
from atoll.wire.subjects import Subjects
from support.founded_run import run_record
from support.signing_office import SigningOffice

RUN = "demo"
S = Subjects(RUN)
SOON_S = 120.0
MESSAGE = encode(Control(verb="drain", sender="up"))


@pytest.fixture
def office(tmp_path: Path) -> SigningOffice:
    return SigningOffice(tmp_path / "keys")


def test_a_signed_message_is_believed_by_all_and_read_by_everybody(office: SigningOffice) -> None:
    """Its first line stays the JSON, which a process without an identity reads, too; signing twice gives the same bytes."""
    shard, reader = office.signatures("shard", "synchronizer"), office.signatures("spy", "reader")
    signed = shard.sign(S.control("all"), MESSAGE)
    assert signed.split(b"\n")[0] == MESSAGE
    assert shard.sign(S.control("all"), MESSAGE) == signed
    assert reader.verify(S.control("all"), signed) == MESSAGE
    assert decode(Control, signed) == decode(Control, MESSAGE)


@pytest.mark.parametrize(
    ("kind", "subject"),
    [
        ("learner", S.head(0)),
        ("learner", S.run_record),
        ("learner", S.lease(0)),
        ("learner", S.contribution(0, 0, "other")),
        ("learner", S.farewell(0, "other")),
        ("learner", S.member("other")),
        ("learner", S.beat("other")),
        ("learner", S.call(0)),
        ("learner", S.verdict("me")),
        ("learner", S.presence("host")),
        ("learner", S.control("all")),
        ("learner", S.archived("demo/checkpoints/1")),
        ("learner", Subjects("another").contribution(0, 0, "me")),
        ("reader", S.head(0)),
        ("reader", S.answer),
        ("evaluator", S.control("all")),
        ("premerger", S.premerge_answer("us", "n")),
        ("premerger", S.premerge("me")),
        ("premerger", S.answer),
        ("premerger", S.contribution(0, 0, "me")),
        ("premerger", S.head(0)),
        ("premerger", S.lease(0)),
        ("learner", S.premerge_answer("me", "n")),
        ("synchronizer", Subjects("another").premerge_answer("me", "n")),
        ("synchronizer", Subjects("another").head(0)),
    ],
)
def test_nobody_is_believed_where_he_may_not_write(office: SigningOffice, kind: Kind, subject: str) -> None:
    name = premerger_of("me") if kind == "premerger" else "me"
    signed = office.signatures(name, kind).sign(subject, MESSAGE)
    with pytest.raises(PeerMisbehaved, match="may not write here"):
        office.signatures("reader", "reader").verify(subject, signed)


def test_what_a_learner_may_write_is_believed(office: SigningOffice) -> None:
    learner, operator = office.signatures("me"), office.signatures("boss", "operator")
    reader = office.signatures("spy", "reader")
    for subject in (S.contribution(0, 3, "me"), S.farewell(0, "me"), S.member("me"), S.data, S.beat("me"), S.answer):
        assert reader.verify(subject, learner.sign(subject, MESSAGE)) == MESSAGE
    for subject in (S.head(0), S.run_record, Subjects("another").lease(1)):
        assert reader.verify(subject, operator.sign(subject, MESSAGE)) == MESSAGE


def test_every_changed_byte_is_noticed(office: SigningOffice) -> None:
    """Of the message, of the voucher, of both signatures; and a message moved to another fragment."""
    learner, reader = office.signatures("me"), office.signatures("spy", "reader")
    subject = S.contribution(0, 0, "me")
    signed = learner.sign(subject, MESSAGE)
    for at in range(len(signed)):
        changed = signed[:at] + bytes([signed[at] ^ 4]) + signed[at + 1 :]
        with pytest.raises(PeerMisbehaved):
            reader.verify(subject, changed)
    with pytest.raises(PeerMisbehaved, match="does not fit"):
        reader.verify(S.contribution(0, 1, "me"), signed)
    for broken in (MESSAGE, signed[:-1], signed + b".x", MESSAGE + SIGNATURE, MESSAGE + SIGNATURE + b"x" * 100_000):
        with pytest.raises(PeerMisbehaved):
            reader.verify(subject, broken)


def test_one_cannot_borrow_the_voucher_of_another(office: SigningOffice) -> None:
    """A shard's voucher over a learner's signature is worth nothing; neither is a message of another operator's run."""
    shard, learner, reader = (
        office.signatures("shard", "synchronizer"),
        office.signatures("me"),
        office.signatures("spy", "reader"),
    )
    theirs = shard.sign(S.head(0), MESSAGE).rpartition(b".")[0]
    own = learner.sign(S.head(0), MESSAGE).rpartition(b".")[2]
    with pytest.raises(PeerMisbehaved, match="does not fit"):
        reader.verify(S.head(0), theirs + b"." + own)
    foreign = SigningOffice(office.keys.path.with_name("foreign")).signatures("shard", "synchronizer")
    with pytest.raises(PeerMisbehaved, match="does not vouch"):
        reader.verify(S.head(0), foreign.sign(S.head(0), MESSAGE))


def test_a_voucher_ends_with_its_key(office: SigningOffice) -> None:
    """Readers go by their own clock. What was stored before stays true: a run outlives the key of its founder."""
    held = office.identity("me", until_s=time.time() + 3600.0)
    subject = S.beat("me")
    signed = held.signatures().sign(subject, MESSAGE)
    other = office.identity("spy", "reader")
    assert other.signatures().verify(subject, signed, live=True) == MESSAGE
    late = IdentitySignatures(other.seed, other.root, other.voucher, wall=lambda: time.time() + 7200.0)
    with pytest.raises(PeerMisbehaved, match="has ended"):
        late.verify(subject, signed, live=True)
    assert late.verify(subject, signed) == MESSAGE


def test_the_door_does_not_sign_messages(office: SigningOffice) -> None:
    """A broker chooses what an identity signs at the door. That signature must never pass for one of a message."""
    held = office.identity("shard", "synchronizer")
    subject = S.head(0)
    honest = held.signatures().sign(subject, MESSAGE)
    number = b"atoll message 1\0" + subject.encode() + b"\0" + MESSAGE
    at_the_door = nkeys.from_seed(bytearray(held.seed.encode())).sign(number)
    forged = honest.rpartition(b".")[0] + b"." + base64.urlsafe_b64encode(at_the_door).rstrip(b"=")
    with pytest.raises(PeerMisbehaved, match="does not fit"):
        office.signatures("spy", "reader").verify(subject, forged)


@pytest.mark.parametrize("field", ["root", "voucher"])
def test_an_identity_whose_parts_do_not_fit_is_refused(office: SigningOffice, field: str) -> None:
    """A voucher of another, or another root: at once, with the file's name and what to do; the secret is not shown."""
    path = office.keys.add("me", "learner", RUN, time.time())
    other = SigningOffice(office.keys.path.with_name("foreign")).identity("me")
    held = read_identity(path)
    path.write_text(
        path.read_text(encoding="utf-8").replace(getattr(held, field), getattr(other, field)), encoding="utf-8"
    )
    with pytest.raises(SettingsError, match="does not fit together") as refused:
        read_identity(path)
    assert held.seed not in str(refused.value)
    assert "ask the operator" in str(refused.value)


async def test_readers_are_told_why_a_message_is_not_believed(office: SigningOffice) -> None:
    """Records, queued and core messages that nobody signed cannot be read; the event log has no signatures."""
    broker = MemoryBroker()
    plain, signed = (
        MemoryBus(RUN, broker),
        SignedBus(MemoryBus(RUN, broker), RUN, office.signatures("boss", "operator")),
    )
    await plain.put_record(S.head(0), MESSAGE, expected=0)
    await plain.publish(S.contribution(0, 0, "me"), MESSAGE, msg_id="a")
    await plain.publish(S.event("round", "me"), MESSAGE, msg_id="b")
    record = await signed.get_record(S.head(0))
    queued = await (await signed.consume(S.contributions_of(0), durable="d")).next(SOON_S)
    heard = await signed.listen(S.control("all"))
    await plain.tell(S.control("all"), MESSAGE)
    told = await heard.next(SOON_S)
    assert record is not None
    assert queued is not None
    assert told is not None
    for data in (record.data, queued.data, told.data):
        with pytest.raises(
            PeerMisbehaved, match=r"Control that is not believed[\s\S]*nobody signed this: no signature"
        ):
            decode(Control, data)
    assert [entry.data for entry in await signed.replay(S.event("*", ">"))] == [MESSAGE]
    assert is_signed(S.data)
    assert not is_signed(S.tap("gl.head.0"))


def signed_bus(broker: MemoryBroker, signatures: IdentitySignatures) -> SignedBus:
    return SignedBus(MemoryBus(RUN, broker), RUN, signatures)


def record_of(founding: str) -> RunRecord:
    return msgspec.structs.replace(run_record(RUN), nonce=founding)


async def test_nothing_passes_from_a_run_to_a_later_one_of_its_id(office: SigningOffice) -> None:
    """Heads, calls and queued messages of a former founding are not believed, though their signatures are genuine."""
    boss, spy = office.signatures("boss", "operator"), office.signatures("spy", "reader")
    heads: list[bytes] = []
    for founding in ("first", "second"):
        broker = MemoryBroker()
        plain, shard, reader = MemoryBus(RUN, broker), signed_bus(broker, boss), signed_bus(broker, spy)
        assert await reader.get_record(S.head(0)) is None
        await shard.put_record(S.run_record, encode(record_of(founding)), expected=0)
        await shard.put_record(S.head(0), MESSAGE, expected=0)
        there, told = await plain.get_record(S.head(0)), await reader.get_record(S.head(0))
        assert there is not None
        assert told is not None
        assert told.data == MESSAGE
        heads.append(there.data)

    await plain.put_record(S.head(0), heads[0], expected=None)
    calls, queue = await reader.listen(S.call("*")), await shard.consume(S.contributions_of(0), durable="d")
    await plain.tell(S.call(0), boss.sign(S.call(0), MESSAGE, "first"))
    manifest = office.signatures("me").sign(S.contribution(0, 0, "me"), MESSAGE, "first")
    await plain.publish(S.contribution(0, 0, "me"), manifest, msg_id="m")
    replayed = [await reader.get_record(S.head(0)), await calls.next(SOON_S), await queue.next(SOON_S)]
    for each in replayed:
        assert each is not None
        with pytest.raises(PeerMisbehaved, match="the signature does not fit"):
            decode(Control, each.data)


async def test_a_watcher_follows_its_run_to_the_next_founding(
    office: SigningOffice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.bus.signed.LOOK_AGAIN_S", 0.0)
    broker = MemoryBroker()
    first, second, watcher = (
        SignedBus(MemoryBus(RUN, broker), RUN, office.signatures(name, "operator")) for name in ("a", "b", "c")
    )
    await first.put_record(S.run_record, encode(record_of("first")), expected=0)
    assert await watcher.get_record(S.run_record) is not None
    await second.put_record(S.run_record, encode(record_of("second")), expected=None)
    calls = await watcher.listen(S.call("*"))
    await second.tell(S.call(0), MESSAGE)
    heard = await calls.next(SOON_S)
    assert heard is not None
    assert heard.data == MESSAGE


class _Elsewhere(MemoryBus):
    """A broker that delivers whatever it likes, on subjects that nobody asked for."""

    async def listen(self, subject_filter: str, **more: Any) -> Any:  # noqa: ANN401  (as the bus takes it)
        return await super().listen(">" if subject_filter == S.call("*") else subject_filter, **more)

    async def get_records(self, subject_filter: str) -> list[Record]:
        return [
            *await super().get_records(subject_filter),
            Record("evil", MESSAGE, 1),
            Record(S.event("a", "b"), MESSAGE, 2),
        ]


async def test_a_message_is_believed_only_where_it_was_asked_for(office: SigningOffice) -> None:
    """A subject outside the run, or one of the event log, carries no signature; it answers no other question."""
    broker = MemoryBroker()
    reader = SignedBus(_Elsewhere(RUN, broker), RUN, office.signatures("spy", "reader"))
    calls = await reader.listen(S.call("*"))
    for subject in ("evil", S.event("a", "b"), S.tap("x")):
        broker.core_message(CoreMessage(subject, MESSAGE))
        heard = await calls.next(SOON_S)
        assert heard is not None
        with pytest.raises(PeerMisbehaved, match="it was not asked for"):
            decode(Control, heard.data)
    assert await reader.get_records(S.head("*")) == []


async def test_nobody_can_take_the_next_ids_of_another(office: SigningOffice) -> None:
    """An id of our own is not the one that others see or guess; a repeated message is still stored once."""
    broker = MemoryBroker()
    plain, mine = MemoryBus(RUN, broker), SignedBus(MemoryBus(RUN, broker), RUN, office.signatures("me"))
    await plain.publish(S.event("x", "mallory"), b"{}", msg_id="nonce-0-1")
    for _ in range(2):
        await mine.publish(S.event("x", "me"), MESSAGE, msg_id="nonce-0-1")
    assert [entry.data for entry in await mine.replay(S.event("x", "me"))] == [MESSAGE]


async def test_an_answer_is_signed_as_an_answer(office: SigningOffice) -> None:
    broker = MemoryBroker()
    asker = SignedBus(MemoryBus(RUN, broker), RUN, office.signatures("a"))
    signing, plain = SignedBus(MemoryBus(RUN, broker), RUN, office.signatures("b", "operator")), MemoryBus(RUN, broker)
    for responder, believed in ((signing, True), (plain, False)):
        heard = await responder.listen(S.control("a"))

        async def answer(bus: SignedBus | MemoryBus = responder, feed: object = heard) -> None:
            question = await feed.next(SOON_S)  # type: ignore[attr-defined]
            assert question is not None
            await bus.tell(question.reply, MESSAGE)

        answering = asyncio.create_task(answer())
        got = await asker.ask(S.control("a"), MESSAGE, timeout_s=SOON_S)
        await answering
        assert got is not None
        await heard.close()
        if believed:
            assert got == MESSAGE
        else:
            with pytest.raises(PeerMisbehaved, match="nobody signed this"):
                decode(Verdict, got)


async def test_a_signed_blob_has_a_digest_that_nobody_can_forge(office: SigningOffice) -> None:
    """BLAKE3 in 64 digits; an open run keeps the faster xxh3 in 32, and each reader takes both."""
    broker = MemoryBroker()
    plain = MemoryBus(RUN, broker)
    signed = SignedBus(MemoryBus(RUN, broker), RUN, office.signatures("boss", "operator"))
    strong = await signed.put_blob(S.contribution_stem("me", 0, 1, 1, "0" * 16), b"x" * 100)
    quick = await plain.put_blob(S.contribution_stem("me", 0, 1, 2, "0" * 16), b"x" * 100)
    assert (len(strong.digest), len(quick.digest)) == (64, 32)
    for bus in (plain, signed):
        assert await bus.get_blob(strong, 100) == await bus.get_blob(quick, 100) == b"x" * 100


class _AwayForRecords(MemoryBus):
    """A broker whose streams have no leader for now, while what is live still flows."""

    how = "away"

    async def get_record(self, subject: str) -> Record | None:
        if self.how == "slow":
            await asyncio.sleep(3600.0)
        if self.how == "away":
            raise BrokerUnavailable("no leader")
        return await super().get_record(subject)


@pytest.mark.parametrize("how", ["away", "slow"])
async def test_a_record_that_cannot_be_read_ends_and_delays_no_feed(
    office: SigningOffice, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that nobody vouches for has the record read; without it that message is not believed, and the next one is."""
    monkeypatch.setattr("atoll.bus.signed.LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("atoll.bus.signed.LOOK_S", 0.05)
    broker = MemoryBroker()
    boss, plain, streams = office.signatures("boss", "operator"), MemoryBus(RUN, broker), _AwayForRecords(RUN, broker)
    streams.how = "there"
    writer, reader = signed_bus(broker, boss), SignedBus(streams, RUN, boss)
    await writer.put_record(S.run_record, encode(record_of("first")), expected=0)
    assert await reader.get_record(S.run_record) is not None
    calls = await reader.listen(S.call("*"))
    streams.how = how
    async with asyncio.timeout(SOON_S):
        await plain.tell(S.call(0), MESSAGE)
        await writer.tell(S.call(0), MESSAGE)
        unbelieved, believed = await calls.next(SOON_S), await calls.next(SOON_S)

    assert unbelieved is not None
    assert believed is not None
    with pytest.raises(PeerMisbehaved, match="not believed"):
        decode(Control, unbelieved.data)
    assert decode(Control, believed.data).sender == "up"
