"""The contract of a bus, where the run's fragments lie on two brokers; and what is particular to that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.base.errors import BrokerUnavailable, RunReplaced, SettingsError
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.bus.spread import SpreadBus
from atoll.keys.locked import LockedDoor
from atoll.wire.messages import RunRecord, encode
from atoll.wire.subjects import Subjects, fragment_level
from support.bus_contract import ROOM_BYTES, SOON_S, BusContract, MakeBus, buses
from support.command_line import atoll
from support.founded_run import run_record
from support.locked_brokers import LockedBroker

OpenBus = Callable[..., Awaitable[Bus]]
OPTIONS = BusOptions(full_s=0.3, gone_s=0.2, patience_s=2.0, total_s=4.0, try_s=1.0, reconnect_s=0.05)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401
    with EmbeddedBroker(tmp_path_factory.mktemp("second")) as running:
        yield running


class TestSpreadMemoryBus(BusContract):
    """The contract over two brokers in memory."""

    @pytest.fixture
    async def make_bus(self, run: str) -> AsyncIterator[MakeBus]:
        brokers = [MemoryBroker(stream_bytes_max=ROOM_BYTES) for _ in range(2)]

        async def made(_: int) -> Bus:
            home = MemoryBus(run, brokers[0])

            async def further(address: str) -> Bus:
                assert address == "second"
                bus = MemoryBus(run, brokers[1])
                bus.stats = home.stats
                return bus

            return SpreadBus(home, run, further)

        async with buses(made, ROOM_BYTES, ("second",)) as make:
            yield make


@pytest.mark.connected
class TestSpreadJetStreamBus(BusContract):
    """The contract over two real servers."""

    @pytest.fixture
    async def make_bus(self, broker: EmbeddedBroker, second: EmbeddedBroker, run: str) -> AsyncIterator[MakeBus]:
        async with buses(
            lambda number: open_bus(broker.url, run, name=f"bus-{number}", options=OPTIONS), ROOM_BYTES, (second.url,)
        ) as make:
            yield make


@pytest.mark.parametrize(
    ("tail", "level"),
    [
        ("up.c.learner-0.7.1-2", "7"),
        ("up.c.*.7.>", "7"),
        ("up.c.learner-0.>", "*"),
        ("gl.head.12", "12"),
        ("gl.head.*", "*"),
        ("gl.c.3.1.n", "3"),
        ("gl.d.3.>", "3"),
        ("st.b.3.1.x.*", "3"),
        ("tap.gl.head.5", "5"),
        ("tap.gl.head.*", "*"),
        ("tap.>", "*"),
        (">", "*"),
        ("gl.head.junk", None),
        ("gl.head", None),
        ("gl.run", None),
        ("gl.lease.1", None),
        ("up.m.0.7.learner-0", None),
        ("mb.data", None),
        ("ps.c.learner-0.1-n", None),
        ("tap.ev.>", None),
        ("hb.*", None),
        ("ctl.all", None),
    ],
)
def test_a_subject_says_with_which_fragment_it_is_kept(tail: str, level: str | None) -> None:
    """Heads and chunks; everything else is at home."""
    assert fragment_level(f"atoll.r.{tail}") == level


def spread_record(run: str, *bulk: str) -> RunRecord:
    """Return the record of a run whose fragments lie on several brokers."""
    return msgspec.structs.replace(run_record(run), bulk=bulk)


@pytest.fixture
async def opened(broker: EmbeddedBroker, run: str) -> AsyncIterator[OpenBus]:
    buses: list[Bus] = []

    async def one(url: str = "", **options: Any) -> Bus:  # noqa: ANN401
        buses.append(await open_bus(url or broker.url, run, name="test", options=replace(OPTIONS, **options)))
        return buses[-1]

    yield one
    for bus in buses:
        await bus.close()


@pytest.mark.connected
async def test_who_comes_later_finds_fragments_by_the_run_record(
    opened: OpenBus, second: EmbeddedBroker, run: str
) -> None:
    """By the run record: odd fragments lie on the second broker with their heads, even ones and the record at home."""
    founder, record, s = await opened(), spread_record(run, second.url), Subjects(run)
    await founder.provision(ROOM_BYTES, record.bulk)
    await founder.put_record(s.run_record, encode(record), expected=0)
    refs = [await founder.put_blob(s.global_stem(fragment, 0, "n"), b"x" * 1000) for fragment in range(4)]
    for fragment in range(4):
        await founder.put_record(s.head(fragment), b"%d" % fragment, expected=0, reconnects=0)

    joiner = await opened()
    assert [await joiner.get_blob(ref, 1000) for ref in refs] == [b"x" * 1000] * 4
    assert [found.data for found in await joiner.get_records(s.head("*"))] == [b"0", b"1", b"2", b"3"]
    bare = await JetStreamBus.open(second.url, run, name="bare", options=OPTIONS)
    assert [found.subject for found in await bare.get_records(s.head("*"))] == [s.head(1), s.head(3)]
    assert await bare.get_record(s.run_record) is None
    await bare.close()
    assert joiner.reconnects(s.head(1)) == 0


@pytest.mark.connected
async def test_taps_of_all_fragments_are_heard(opened: OpenBus, second: EmbeddedBroker, run: str) -> None:
    bus, record, s = await opened(), spread_record(run, second.url), Subjects(run)
    await bus.provision(ROOM_BYTES, record.bulk)
    await bus.put_record(s.run_record, encode(record), expected=0)
    feed = await (await opened()).listen(s.tap("gl.head.*"))
    for fragment in range(4):
        await bus.put_record(s.head(fragment), b"h", expected=0)
    heard = [await feed.next(SOON_S) for _ in range(4)]
    assert {message.subject for message in heard if message} == {s.tap(f"gl.head.{fragment}") for fragment in range(4)}
    await feed.close()


@pytest.mark.connected
async def test_a_broker_that_is_away_stops_its_own_fragments_only(opened: OpenBus, tmp_path: Path, run: str) -> None:
    """What was begun there ends with a clear error, the rest goes on; and once it is back, it is heard again."""
    away = EmbeddedBroker(tmp_path / "away")
    away.start()
    bus, record, s = await opened(), spread_record(run, away.url), Subjects(run)
    await bus.provision(ROOM_BYTES, record.bulk)
    await bus.put_record(s.run_record, encode(record), expected=0)
    await bus.put_record(s.head(1), b"1", expected=0)
    away.stop()
    try:
        late = await opened()
        feed = await late.listen(s.tap("gl.head.*"))
        ref = await late.put_blob(s.global_stem(0, 0, "n"), b"y" * 10)
        assert await late.get_blob(ref, 10) == b"y" * 10
        with pytest.raises(BrokerUnavailable):
            await late.put_blob(s.global_stem(1, 0, "n"), b"y" * 10)
        before = bus.reconnects(s.head(1))
        away.start()
        revision = (await late.get_records(s.head("1")))[0].revision
        heard = None
        async with asyncio.timeout(SOON_S):
            while heard is None:
                revision = await late.put_record(s.head(1), b"2", expected=revision)
                heard = await feed.next(0.2)
            while bus.reconnects(s.head(1)) == before:
                await bus.get_record(s.head(1))
        assert heard.subject == s.tap("gl.head.1")
        assert bus.reconnects(s.head(0)) == 0
    finally:
        away.stop()


async def test_another_number_of_own_addresses_is_an_error(opened: OpenBus, run: str) -> None:
    """Fragments would be looked for where they are not."""
    bus = await opened()
    await bus.provision(ROOM_BYTES)
    await bus.put_record(Subjects(run).run_record, encode(run_record(run)), expected=0)
    wrong = await opened(bulk=("nats://127.0.0.1:1",))
    with pytest.raises(SettingsError, match="another number of brokers"):
        await wrong.get_record(Subjects(run).run_record)


async def test_own_addresses_go_before_those_of_the_record(opened: OpenBus, second: EmbeddedBroker, run: str) -> None:
    founder, s = await opened(bulk=(second.url,)), Subjects(run)
    record = spread_record(run, "nats://inside.example:4222")
    await founder.provision(ROOM_BYTES, record.bulk)
    await founder.put_record(s.run_record, encode(record), expected=0)
    await founder.put_record(s.head(1), b"1", expected=0)
    late = await opened(bulk=(second.url,))
    assert [found.data for found in await late.get_records(s.head("*"))] == [b"1"]


async def test_a_broker_that_lost_the_run_says_so(opened: OpenBus, second: EmbeddedBroker, run: str) -> None:
    bus, record, s = await opened(), spread_record(run, second.url), Subjects(run)
    await bus.provision(ROOM_BYTES, record.bulk)
    await bus.put_record(s.run_record, encode(record), expected=0)
    bare = await JetStreamBus.open(second.url, run, name="bare", options=OPTIONS)
    await bare.remove_run()
    await bare.close()
    with pytest.raises(RunReplaced):
        await bus.get_record(s.head(1))
    assert await bus.get_record(s.head(0)) is None


async def test_signed_messages_travel_over_several_locked_brokers(tmp_path: Path, run: str) -> None:
    """One folder of keys locks them all; an identity is the same at each, and so are its signatures."""
    with LockedBroker(tmp_path) as home:
        other = EmbeddedBroker(tmp_path / "other", include=LockedDoor(home.keys, tmp_path / "other").config)
        other.start()
        try:
            home.add(run, "shards", "synchronizer")
            LockedDoor(home.keys, tmp_path / "other")
            other.reload()
            options = BusOptions(credentials=home.identity(run, "shards").credentials(), patience_s=5.0)
            bus = await open_bus(home.url, run, name="shards", options=options)
            record, s = spread_record(run, other.url), Subjects(run)
            await bus.provision(ROOM_BYTES, record.bulk)
            await bus.put_record(s.run_record, encode(record), expected=0)
            ref = await bus.put_blob(s.global_stem(1, 0, "n"), b"z" * 10)
            await bus.put_record(s.head(1), b"1", expected=0)
            assert ref.collision_free
            reader = await open_bus(home.url, run, name="reader", options=options)
            assert await reader.get_blob(ref, 10) == b"z" * 10
            assert [found.data for found in await reader.get_records(s.head("*"))] == [b"1"]
            await asyncio.gather(bus.close(), reader.close())
        finally:
            other.stop()


async def found(url: str, record: RunRecord) -> None:
    bus = await open_bus(url, record.run, name="founder", options=OPTIONS)
    await bus.provision(ROOM_BYTES, record.bulk)
    await bus.put_record(record.subjects.run_record, encode(record), expected=0)
    await bus.close()


@pytest.mark.second_tier
def test_runs_whose_brokers_are_away_are_listed_and_removed(broker: EmbeddedBroker, tmp_path: Path, run: str) -> None:
    """The list says so and does not wait; removing them takes --force, and with all brokers there it takes none."""
    with EmbeddedBroker(tmp_path / "second") as second:
        asyncio.run(found(broker.url, spread_record(run, second.url)))
        at = ("--broker", broker.url)
        here = atoll("runs", "--json", *at)
        [row] = [row for row in json.loads(here.stdout) if row["run"] == run]
    listed = atoll("runs", "--json", *at)
    [away] = [row for row in json.loads(listed.stdout) if row["run"] == run]
    assert (row["state"], away["state"]) == ("founding", "a broker is away")
    assert row["bounds_bytes"] == 2 * away["bounds_bytes"]
    refused = atoll("runs", "remove", run, "--yes", *at)
    assert refused.returncode != 0
    assert "is away" in refused.stderr
    forced = atoll("runs", "remove", run, "--yes", "--force", *at)
    assert forced.returncode == 0, forced.stderr


class SlowToClose(MemoryBus):
    """A bus that takes a turn of the loop, and more, to be closed."""

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        await super().close()


async def test_no_bus_is_left_at_a_former_address() -> None:
    """While the former ones are closed somebody else needs a bus; and several learn of the new addresses at once."""
    opened: list[str] = []

    async def open_at(address: str) -> Bus:
        opened.append(address)
        await asyncio.sleep(0)
        return SlowToClose("r", MemoryBroker())

    bus = SpreadBus(SlowToClose("r", MemoryBroker()), "r", open_at)
    subjects = Subjects("r")
    await bus.provision(1 << 20, ["old-1", "old-2"])
    learning = [asyncio.create_task(bus.provision(1 << 20, ["new-1", "new-2"])) for _ in range(2)]
    await asyncio.sleep(0)
    await bus.get_record(subjects.head(1))
    await asyncio.gather(*learning)
    before = len(opened)
    await bus.get_record(subjects.head(1))
    await bus.get_record(subjects.head(2))
    await bus.close()

    assert opened[:2] == ["old-1", "old-2"]
    assert set(opened[2:]) == {"new-1", "new-2"}
    assert len(opened) == before


async def test_brokers_in_another_order_than_the_founders_are_refused() -> None:
    """A synchronizer took shards over that it could not serve, and said that their store had been deleted."""
    brokers = {address: MemoryBroker() for address in ("a", "b", "home")}

    async def open_at(address: str) -> Bus:
        return MemoryBus("r", brokers[address])

    founder = SpreadBus(await open_at("home"), "r", open_at)
    await founder.provision(1 << 20, ["a", "b"])
    for fragment in range(5):
        await founder.put_record(Subjects("r").head(fragment), b"head", expected=0)
    wrong = SpreadBus(await open_at("home"), "r", open_at, own_addresses=["b", "a"])
    with pytest.raises(SettingsError, match="in the founder's order") as refused:
        await wrong.provision(1 << 20, ["a", "b"])
    right = SpreadBus(await open_at("home"), "r", open_at, own_addresses=["a", "b"])
    await right.provision(1 << 20, ["a", "b"])

    assert refused.value.got == "fragment 2"
    for bus in (founder, wrong, right):
        await bus.close()
