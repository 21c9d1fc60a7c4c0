"""A locked broker of several nodes: newcomers are served by each, and nobody else becomes a node of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.base.errors import AccessDenied
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import ClusterNode, EmbeddedBroker
from atoll.bus.streams import GIB
from atoll.keys.certificates import Certified, broker_certificate
from atoll.keys.identity import HeldIdentity
from atoll.keys.locked import LockedDoor
from atoll.keys.roll import KeyFolder
from atoll.wire.subjects import Subjects
from support.bus_contract import until
from support.locked_brokers import HOST, LockedBroker

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]
RUN, NODES = "demo", 3
S = Subjects(RUN)
SOON_S = 60.0


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedBroker]:
    with LockedBroker(tmp_path_factory.mktemp("locked"), NODES) as made:
        made.add(RUN, "shard", "synchronizer")
        yield made


@pytest.fixture
async def shard(locked: LockedBroker) -> AsyncIterator[JetStreamBus]:
    bus = await locked.bus(RUN, locked.identity(RUN, "shard"), patience_s=SOON_S)
    await bus.provision(GIB)
    yield bus
    await bus.close()


@asynccontextmanager
async def opened(identity: HeldIdentity, url: str) -> AsyncIterator[JetStreamBus]:
    """Yield the bus of an identity at the nodes of `url`."""
    options = BusOptions(credentials=identity.credentials(), replicas=NODES, patience_s=SOON_S)
    bus = await JetStreamBus.open(url, RUN, name=identity.name, options=options)
    try:
        yield bus
    finally:
        await bus.close()


async def serves(locked: LockedBroker, identity: HeldIdentity, node: int, shard: JetStreamBus) -> None:
    """Assert that a node lets a learner store, read and hear what the synchronizer says at whatever node."""
    async with opened(identity, locked.servers[node].url) as bus:
        await bus.publish(S.event("joined", identity.name), b"{}", msg_id=f"{identity.name}-{node}-{time.time()}")
        assert await bus.get_records(S.head("*")) == []
        calls, beats = await bus.listen(S.call("*")), await shard.listen(S.beat("*"))
        async with asyncio.timeout(SOON_S):
            call = beat = None
            while call is None or beat is None:
                await shard.tell(S.call(0), b"call")
                await bus.tell(S.beat(identity.name), b"beat")
                call, beat = call or await calls.next(0.2), beat or await beats.next(0.2)
        await beats.close()


async def test_a_newcomer_is_served_by_every_node_in_whatever_order_they_learn_of_her(
    locked: LockedBroker, shard: JetStreamBus
) -> None:
    """She enters at a node while the others do not know her yet; later each serves her, too, and readers at each hear her."""
    locked.add(RUN, "spy", "reader")
    spy = locked.identity(RUN, "spy")
    for number, order in enumerate(itertools.permutations(range(NODES))):
        name = f"new-{number}"
        locked.keys.add(name, "learner", RUN, time.time())
        newcomer = locked.identity(RUN, name)
        for node in order:
            assert locked.doors[node].has_changed()
            await asyncio.to_thread(locked.servers[node].reload)
            await serves(locked, newcomer, node, shard)
        for node in range(NODES):
            await serves(locked, newcomer, node, shard)
            async with opened(spy, locked.servers[node].url) as reader, opened(newcomer, locked.url) as bus:
                beats = await reader.listen(S.beat(name))
                async with asyncio.timeout(SOON_S):
                    await bus.tell(S.beat(name), b"beat")
                    while await beats.next(0.2) is None:
                        await bus.tell(S.beat(name), b"beat")


@pytest.mark.usefixtures("shard")
async def test_a_newcomer_goes_on_to_the_node_that_knows_her(locked: LockedBroker) -> None:
    locked.keys.add("early", "learner", RUN, time.time())
    early = locked.identity(RUN, "early")
    with pytest.raises(AccessDenied, match="does not let us in"):
        async with opened(early, locked.url):
            pass
    assert locked.doors[2].has_changed()
    await asyncio.to_thread(locked.servers[2].reload)
    for _ in range(NODES):
        async with opened(early, locked.url) as bus:
            assert await bus.get_record(S.run_record) is None
    locked.follow()


async def test_a_synchronizer_brings_the_leaders_together(locked: LockedBroker, shard: JetStreamBus) -> None:
    await shard.consume(S.contributions_of(0), durable="shard-0")
    first = min(server.name for server in locked.servers)
    async with asyncio.timeout(SOON_S):
        leaders: set[str] = set()
        while leaders != {first}:
            told = [
                await shard._connection.call(shard._jetstream.api(f"STREAM.INFO.{plan.name}")) for plan in shard._needed
            ]
            leaders = {str(each["cluster"].get("leader")) for each in told}
            await asyncio.sleep(0.1)


async def test_the_certificate_is_renewed_while_the_nodes_serve(locked: LockedBroker, shard: JetStreamBus) -> None:
    """Node by node; each then takes the others by the new one, and what is written is on all of them."""
    locked.keys.certify([HOST])
    locked.follow()
    for server in locked.servers:
        async with opened(locked.identity(RUN, "shard"), server.url) as bus:
            await bus.publish(S.event("renewed", "shard"), b"{}", msg_id=server.url)
    assert len(await shard.replay(S.event("renewed", "*"))) == NODES


@pytest.mark.parametrize("holds", ["nothing", "a certificate of another authority", "another of this authority"])
async def test_nobody_else_becomes_a_node(holds: str, locked: LockedBroker, tmp_path: Path) -> None:
    """Neither an open server, nor one with keys of its own, nor one whose certificate the same authority has signed."""
    config, routes = None, None
    if holds != "nothing":
        keys = KeyFolder(tmp_path / "keys")
        keys.create([HOST], time.time())
        if holds.endswith("of this authority"):
            signer = Certified(*((locked.keys.path / f"authority.{end}").read_text() for end in ("pem", "key")))
            signed = broker_certificate(signer, [HOST])
            keys.certificate_path.write_text(signed.certificate)
            keys.key_path.write_text(signed.key)
            keys.authority_path.write_text(signer.certificate)
        door = LockedDoor(keys, tmp_path / "store", node=True)
        config, routes = door.config, door.routes
    member = locked.servers[0]
    assert member.node
    intruder = ClusterNode(member.node.name, 9, -1, (f"nats://{HOST}:{member.node.port}",))
    before = locked.said()[0]
    with EmbeddedBroker(tmp_path / "store", node=intruder, include=config, routes=routes) as node:
        await until(lambda: "Handshake" in locked.said()[0][len(before) :])
        # It finds no peers, so its JetStream has no leader and its clients no streams.
        assert "Server is ready" in node.log_path.read_text()
        assert f"{member.node.name}-9" not in "".join(locked.said())
