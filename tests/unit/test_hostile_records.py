"""Records and replies that nobody of ours wrote: they end nothing, remove nothing of others, and delay nothing for long."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import msgspec
import pytest

from atoll.archive.checkpoints import CheckpointObject
from atoll.base.clock import SystemClock
from atoll.base.errors import IdentityTaken, PeerMisbehaved, ProtocolMisuse
from atoll.base.quantities import EPOCH_MAX, INCARNATION_MAX
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.data_leases import DataLeases
from atoll.client.membership import claim, dismissal, release
from atoll.codec.arrays import unpack_arrays
from atoll.protocol.data import DataLedger
from atoll.run.member_roll import MemberRoll
from atoll.wire.messages import Head, Member, RunRecord, decode, encode
from atoll.wire.subjects import Subjects
from support.founded_run import run_record

JUNK = [b"", b"{}", b"[" * 5000, b'{"learner":"*"}']


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": {"fragments": 1 << 40}},
        {"protocol": {"fragments": 1, "shards": 2}},
        {"protocol": {"fragments": 2, "shards": 1}},
        {"layout": {"tensors": [], "fragments": [[[7, 0, 1]]]}},
        {"layout": {"tensors": [{"name": "w", "shape": [1 << 50, 1 << 50], "dtype": "float32"}], "fragments": [[]]}},
        {"layout": {"tensors": [{"name": "w", "shape": [4], "dtype": "float32"}], "fragments": [[[0, 0, 9]]]}},
        {"run": "../x"},
        {"run": "-x"},
        {"founder": "-rf"},
        {"nonce": "*"},
        {"model": "\x1b[2J"},
        {"model": "a\nb"},
        {"model": "a\u200bb"},
        {"model": "\ufeffa"},
        {"data": "a\U000e0061\U000e007f"},
    ],
    ids=str,
)
def test_a_run_record_that_no_founder_writes_is_refused(changes: dict[str, object]) -> None:
    """Its settings and its layout are checked as a founder's are: everything else believes them."""
    document = json.loads(encode(run_record("r")))
    with pytest.raises(PeerMisbehaved):
        decode(RunRecord, json.dumps(document | changes).encode())


def test_what_becomes_a_record_is_read_once_more_before_it_is_written() -> None:
    """A head that no process can read would stop its fragment for ever, on this owner and on every later one."""
    head = msgspec.convert(
        {
            "fragment": 0,
            "version": 1,
            "epoch": 1,
            "nonce": "1.a",
            "layout": "f" * 16,
            "keyframe": {"stem": "a", "chunks": 1, "size_bytes": 1, "digest": "0" * 32},
            "key_version": 1,
            "digest": "0" * 32,
        },
        Head,
    )
    assert decode(Head, encode(head)) == head
    with pytest.raises(ProtocolMisuse, match="no process could read"):
        encode(msgspec.structs.replace(head, epoch=1 + EPOCH_MAX))


@pytest.mark.parametrize("junk", JUNK)
async def test_junk_in_a_member_record_ends_no_learner(run: str, junk: bytes) -> None:
    """It trains on, shards go on listening to it, and who comes next under that id is above all that came before."""
    broker = MemoryBroker()
    bus, record, subjects = MemoryBus(run, broker), run_record(run), Subjects(run)
    await bus.put_record(subjects.run_record, encode(record), expected=0)
    first = await claim(bus, subjects, "a", SystemClock())
    await bus.put_record(subjects.member("a"), junk, expected=None)

    assert await dismissal(bus, subjects, record, first) is None
    roll = MemberRoll(bus, subjects)
    await roll.read()
    assert roll.admits("a", first.incarnation)
    await release(bus, subjects, first)
    there = await bus.get_record(subjects.member("a"))
    assert there is not None
    assert there.data == junk
    second = await claim(bus, subjects, "a", SystemClock())
    await bus.put_record(subjects.member("a"), junk, expected=None)
    third = await claim(bus, subjects, "a", SystemClock())
    assert first.incarnation < second.incarnation < third.incarnation
    assert isinstance(await dismissal(bus, subjects, record, second), IdentityTaken)
    await bus.close()


@pytest.mark.parametrize("answer", [b"junk", b"", b"forged"])
async def test_only_the_holder_s_own_answer_keeps_an_id(run: str, answer: bytes) -> None:
    """After a kill nobody of ours answers; whoever else does locks nobody out."""
    broker = MemoryBroker()
    bus, liar, subjects = MemoryBus(run, broker), MemoryBus(run, broker), Subjects(run)
    killed = await claim(bus, subjects, "a", SystemClock())
    data = encode(msgspec.structs.replace(killed, nonce="liar")) if answer == b"forged" else answer
    questions = await liar.listen(subjects.control("a"))

    async def lie() -> None:
        async for question in questions:
            assert question.reply is not None
            await liar.tell(question.reply, data)

    lying = asyncio.create_task(lie())
    again = await claim(bus, subjects, "a", SystemClock())
    lying.cancel()

    assert again.incarnation == killed.incarnation + 1
    for each in (bus, liar):
        await each.close()


async def test_who_claims_an_id_tries_again_when_junk_is_written_meanwhile(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, subjects = MemoryBus(run, MemoryBroker()), Subjects(run)
    put, times = bus.put_record, itertools.count()

    async def raced(subject: str, data: bytes, **more: Any) -> int:  # noqa: ANN401
        if next(times) < 5:
            await put(subject, b"junk", expected=None)
        return await put(subject, data, **more)

    monkeypatch.setattr(bus, "put_record", raced)
    member = await claim(bus, subjects, "a", SystemClock())
    record = await bus.get_record(subjects.member("a"))

    assert record is not None
    assert decode(Member, record.data) == member
    await bus.close()


async def test_an_incarnation_above_the_broker_s_numbers_is_not_gone_on_from(run: str) -> None:
    """The next one would be one that nobody reads."""
    bus = MemoryBus(run, MemoryBroker())
    last = Member(learner="a", incarnation=INCARNATION_MAX, nonce="n", host="h", pid=1, claimed_at_s=0.0, left=True)
    revision = await bus.put_record(Subjects(run).member("a"), encode(last), expected=0)

    assert (await claim(bus, Subjects(run), "a", SystemClock())).incarnation == revision + 1
    await bus.close()


@pytest.mark.parametrize("junk", [*JUNK, b'{"blocks":8,"next_position":9}', b'{"blocks":0}'])
async def test_junk_in_the_data_ledger_is_replaced_by_what_a_learner_has_seen(run: str, junk: bytes) -> None:
    """Without somebody who does it, no learner could lease a block any more, and training would stop."""
    bus, subjects = MemoryBus(run, MemoryBroker()), Subjects(run)
    member = await claim(bus, subjects, "a", SystemClock())
    leases = DataLeases(bus, subjects, member, 8, lease_s=30.0, clock=SystemClock())
    first = await leases.take(2)
    leases.progress = {first.key: (0, 4)}
    await bus.put_record(subjects.data, junk, expected=None)
    second = await leases.take(2)

    assert (first.start, first.stop, second.start, second.stop) == (0, 2, 2, 4)
    record = await bus.get_record(subjects.data)
    assert record is not None
    assert len(decode(DataLedger, record.data).grants) == 2


# --- the archive --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named",
    [
        {"digest": "../../x", "size_bytes": 1},
        {"digest": "a" * 63, "size_bytes": 1},
        {"digest": "a" * 64, "size_bytes": -5},
        {"digest": "a" * 64, "size_bytes": 1 << 62},
    ],
    ids=str,
)
def test_an_object_of_an_archive_is_named_by_a_digest_and_has_a_size(named: dict[str, object]) -> None:
    """A manifest that named `../../x` once had files removed outside of the archive."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(named).encode(), type=CheckpointObject)


# --- the rest -----------------------------------------------------------------------------------------------------------------


def test_a_header_of_many_arrays_is_read_in_time() -> None:
    """Names were compared each with each: 400 kB of header took 34 seconds."""
    entries = [[f"a{number}", "int8", [0]] for number in range(40_000)]
    header = json.dumps(entries).encode()
    packed = len(header).to_bytes(8, "little") + header

    async def read() -> int:
        return len(await asyncio.to_thread(unpack_arrays, packed, 1 << 22))

    assert asyncio.run(asyncio.wait_for(read(), 120.0)) == len(entries)
