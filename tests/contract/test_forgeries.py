"""The broker's own operator cannot forge what learners and shards believe: he writes where he likes, and nobody believes it.

He runs the server, so he may let himself in as anybody, overwrite every subject and read every byte. He has neither the root
key nor anybody's identity: they are in the folder of the run's operator, which need not be on the broker's host.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from atoll.base.errors import BlobCorrupt, PeerMisbehaved
from atoll.bus.interface import Bus
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.locked import LockedDoor
from atoll.keys.roll import KeyFolder
from atoll.wire.messages import Control, decode, encode
from atoll.wire.subjects import Subjects
from support.locked_brokers import HOST, SOON_S, LockedBroker

pytestmark = pytest.mark.connected
RUN = "demo"
S = Subjects(RUN)
MESSAGE = encode(Control(verb="drain", sender="honest"))
FORGED = encode(Control(verb="drain", sender="forged"))
MIB = 1 << 20

FORGERIES = {
    "a head": S.head(0),
    "the run record": S.run_record,
    "a lease": S.lease(0),
    "a member record": S.member("ada"),
    "the data ledger": S.data,
}
QUEUED = {"a manifest": S.contribution(0, 0, "ada"), "a farewell": S.farewell(0, "ada")}
TOLD = {
    "a call": S.call(0),
    "a verdict": S.verdict("ada"),
    "a command to all": S.control("all"),
    "a beat": S.beat("ada"),
}


@dataclass(frozen=True, slots=True)
class LockedPair:
    """A locked broker, and whom its operator let in."""

    locked: LockedBroker
    forger: HeldIdentity


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedPair]:
    """A locked broker whose operator let himself in as an operator of every run, under a root of his own."""
    folder = tmp_path_factory.mktemp("locked")
    with LockedBroker(folder) as made:
        made.add(RUN, "ada", founds=True)
        made.add(RUN, "shard", "synchronizer")
        made.add(RUN, "spy", "reader")
        own = KeyFolder(folder / "own")
        forger = read_identity(own.create([HOST], time.time()))
        roll, entry = made.keys.read(), own.read().entries[0]
        entry = msgspec.structs.replace(entry, name="forger")
        made.keys.roll_path.write_bytes(msgspec.json.encode(roll.replaced(entry)))
        made.follow()
        yield LockedPair(made, replace(forger, authority=made.operator.authority))


@pytest.fixture
def locked(pair: LockedPair) -> LockedBroker:
    return pair.locked


async def _opened_by(locked: LockedBroker, identity: HeldIdentity) -> Bus:
    options = BusOptions(credentials=identity.credentials())
    return await open_bus(locked.url, RUN, name=identity.name, options=options)


@pytest.fixture
async def forging(pair: LockedPair) -> AsyncIterator[list[Bus]]:
    forger = pair.forger
    options = BusOptions(credentials=forger.credentials())
    buses: list[Bus] = [
        await JetStreamBus.open(pair.locked.url, RUN, name="forger", options=options),
        await _opened_by(pair.locked, forger),
    ]
    yield buses
    for bus in buses:
        await bus.close()


@pytest.fixture
async def honest(locked: LockedBroker) -> AsyncIterator[dict[str, Bus]]:
    buses = {name: await _opened_by(locked, locked.identity(RUN, name)) for name in ("ada", "shard", "spy")}
    await buses["ada"].provision(64 * MIB)
    yield buses
    for bus in buses.values():
        await bus.close()


@pytest.mark.parametrize("subject", FORGERIES.values(), ids=FORGERIES)
async def test_a_forged_record_is_not_believed(subject: str, forging: list[Bus], honest: dict[str, Bus]) -> None:
    """It is stored, and every reader says why it does not believe it; who may write there can write it again."""
    for forger in forging:
        await forger.put_record(subject, FORGED, expected=None)
        for reader in honest.values():
            found = await reader.get_record(subject)
            assert found is not None
            with pytest.raises(PeerMisbehaved, match=r"not believed[\s\S]*(nobody signed this|does not vouch)"):
                decode(Control, found.data)
    await honest["shard"].put_record(subject, MESSAGE, expected=None)
    found = await honest["spy"].get_record(subject)
    assert found is not None
    assert decode(Control, found.data).sender == "honest"


@pytest.mark.parametrize("subject", QUEUED.values(), ids=QUEUED)
async def test_a_forged_message_of_the_queue_is_not_believed(
    subject: str, forging: list[Bus], honest: dict[str, Bus]
) -> None:
    queue = await honest["shard"].consume(S.contributions_of(0), durable="shard-0")
    own = S.contribution(0, 1, "ada")
    await honest["ada"].publish(own, MESSAGE, msg_id=f"{time.time_ns()}")
    moved = (await forging[0].replay(own))[-1].data
    delivery = await queue.next(SOON_S)
    assert delivery is not None
    assert (delivery.subject, decode(Control, delivery.data).sender) == (own, "honest")
    await delivery.ack()
    unsigned, foreign = forging
    for forger, data, why in (
        (unsigned, FORGED, "nobody signed this"),
        (foreign, FORGED, "does not vouch"),
        (unsigned, moved, "the signature does not fit"),
    ):
        await forger.publish(subject, data, msg_id=f"{time.time_ns()}")
        delivery = await queue.next(SOON_S)
        assert delivery is not None
        assert delivery.subject == subject
        with pytest.raises(PeerMisbehaved, match=why):
            decode(Control, delivery.data)
        await delivery.ack()
    await queue.close()


@pytest.mark.parametrize("subject", TOLD.values(), ids=TOLD)
async def test_a_forged_core_message_is_not_believed(subject: str, forging: list[Bus], honest: dict[str, Bus]) -> None:
    heard = await honest["shard"].listen(subject)
    assert await honest["shard"].reach(SOON_S)
    for forger in forging:
        await forger.tell(subject, FORGED)
        found = await heard.next(SOON_S)
        assert found is not None
        with pytest.raises(PeerMisbehaved, match="not believed"):
            decode(Control, found.data)
    sender = honest["ada"] if subject == S.beat("ada") else honest["shard"]
    await sender.tell(subject, MESSAGE)
    found = await heard.next(SOON_S)
    assert found is not None
    assert decode(Control, found.data).sender == "honest"
    await heard.close()


async def test_chunks_cannot_be_exchanged(forging: list[Bus], honest: dict[str, Bus]) -> None:
    """The reference that a signed message holds has a digest that nobody can meet with other bytes."""
    ref = await honest["ada"].put_blob(S.contribution_stem("ada", 0, 1, time.time_ns() % 10**6, "0" * 16), b"x" * 100)
    assert len(ref.digest) == 64
    assert await forging[0].purge(f"{ref.stem}.*") == 1
    await forging[0].put_record(f"{ref.stem}.0", b"y" * 100, expected=None)
    with pytest.raises(BlobCorrupt):
        await honest["shard"].get_blob(ref, 100)


def test_the_broker_needs_no_secret_but_its_certificate(locked: LockedBroker, tmp_path: Path) -> None:
    """So the folder with the root key may stay elsewhere: a copy of three files locks a broker."""
    there = tmp_path / "there"
    there.mkdir()
    for name in ("roll.json", "broker.pem", "broker.key"):
        (there / name).write_bytes((locked.keys.path / name).read_bytes())
    assert LockedDoor(KeyFolder(there), tmp_path / "store").entrants == locked.doors[0].entrants
