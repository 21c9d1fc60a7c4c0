"""The second half of the bus contract: the event log, at-most-once messages and taps."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from atoll.base.errors import ProtocolMisuse
from atoll.wire.limits import INFO_HEADER, Info
from atoll.wire.subjects import Subjects
from support.bus_contract_data import NEVER_S, SOON_S, MakeBus

if TYPE_CHECKING:
    from atoll.bus.interface import Subscription


class EventLogContract:
    """Ordered reading."""

    async def test_the_event_log_replays_in_order_and_by_pages(self, make_bus: MakeBus, run: str) -> None:
        """2500 entries of two kinds come back in order, whole or page by page, and by kind."""
        bus, subjects = await make_bus(), Subjects(run)
        numbers = iter(range(2500))

        async def write() -> None:
            for i in numbers:
                await bus.publish(subjects.event(f"kind{i % 2}", "w"), str(i).encode(), msg_id=str(i))

        await asyncio.gather(*(write() for _ in range(32)))

        whole = await bus.replay(subjects.event("*", ">"), limit=10_000)
        pages, after = [], 0
        while page := await bus.replay(subjects.event("*", ">"), after=after, limit=700):
            assert len(page) <= 700
            pages += page
            after = page[-1].sequence
        odd = await bus.replay(subjects.event("kind1", "w"), limit=10_000)

        assert len({entry.data for entry in whole}) == 2500
        assert sorted(entry.sequence for entry in whole) == [entry.sequence for entry in whole]
        assert whole == pages
        assert all(entry.stored_s for entry in whole), "the broker says when it stored each"
        assert [entry for entry in whole if int(entry.data) % 2] == odd

    async def test_the_event_log_cannot_be_cut(self, make_bus: MakeBus, run: str) -> None:
        bus, subjects = await make_bus(), Subjects(run)
        await bus.publish(subjects.event("a", "b"), b"x", msg_id="m")

        with pytest.raises(ProtocolMisuse):
            await bus.purge(subjects.event("*", ">"))

        assert len(await bus.replay(subjects.event("*", ">"))) == 1


class CoreMessageContract:
    """At most once."""

    async def test_core_messages_reach_who_listens(self, make_bus: MakeBus, run: str) -> None:
        """Exact and wildcard listeners on other buses hear; the wrong subject and the silent do not matter."""
        bus, other, subjects = await make_bus(), await make_bus(), Subjects(run)
        await bus.tell(subjects.call(0), b"nobody")
        one, every = await other.listen(subjects.call(3)), await other.listen(subjects.call("*"))

        await bus.tell(subjects.call(2), b"two")
        await bus.tell(subjects.call(3), b"three")

        heard = [await every.next(SOON_S), await every.next(SOON_S)]
        single = await one.next(SOON_S)
        assert [core_message.data for core_message in heard if core_message] == [b"two", b"three"]
        assert single is not None
        assert subjects.call(3) == single.subject
        assert await one.next(NEVER_S) is None

    async def test_a_listener_that_lets_messages_be_late_hears_them_all(self, make_bus: MakeBus, run: str) -> None:
        """In order, together with those of another such listener, and nothing after it was closed."""
        bus, other, subjects = await make_bus(), await make_bus(), Subjects(run)
        beats = await other.listen(subjects.beat("*"), late_s_max=0.05)
        calls = await other.listen(subjects.call("*"), late_s_max=0.05)

        for i in range(20):
            await bus.tell(subjects.beat("a"), str(i).encode())
        await bus.tell(subjects.call(0), b"call")

        heard = [await beats.next(SOON_S) for _ in range(20)]
        call = await calls.next(SOON_S)
        assert [core_message.data for core_message in heard if core_message] == [str(i).encode() for i in range(20)]
        assert call is not None
        await beats.close()
        await bus.tell(subjects.beat("a"), b"late")
        assert await beats.next(NEVER_S) is None

    async def test_a_slow_listener_loses_the_oldest(self, make_bus: MakeBus, run: str) -> None:
        bus, subjects = await make_bus(), Subjects(run)
        feed, last = await bus.listen(subjects.beat("a"), len_max=3), await bus.listen(subjects.beat("end"))

        for i in range(10):
            await bus.tell(subjects.beat("a"), str(i).encode())
        await bus.tell(subjects.beat("end"), b"")
        assert await last.next(SOON_S) is not None

        kept = [await feed.next(SOON_S) for _ in range(3)]
        assert [core_message.data for core_message in kept if core_message] == [b"7", b"8", b"9"]
        assert bus.stats.core_messages_dropped == 7

    async def test_iteration_ends_with_close(self, make_bus: MakeBus, run: str) -> None:
        """`async for` yields what comes and stops when the feed is closed; afterwards nothing is heard."""
        bus, subjects = await make_bus(), Subjects(run)
        feed = await bus.listen(subjects.control("all"))
        await bus.tell(subjects.control("all"), b"stop")

        heard = []
        async for core_message in feed:
            heard.append(core_message.data)
            await feed.close()

        assert heard == [b"stop"]
        assert await feed.next(NEVER_S) is None

    async def test_a_question_gets_its_first_answer(self, make_bus: MakeBus, run: str) -> None:
        """`ask` returns the answer told to the reply subject, and None when nobody listens or nobody answers."""
        bus, other, subjects = await make_bus(), await make_bus(), Subjects(run)
        assert await bus.ask(subjects.control("x"), b"?", timeout_s=NEVER_S) is None
        feed = await other.listen(subjects.control("x"))
        assert await bus.ask(subjects.control("x"), b"?", timeout_s=NEVER_S) is None
        await feed.next(SOON_S)

        asking = asyncio.create_task(bus.ask(subjects.control("x"), b"?", timeout_s=SOON_S))
        question = await feed.next(SOON_S)
        assert question is not None
        assert question.reply is not None
        await other.tell(question.reply, b"!")

        assert await asking == b"!"

    async def test_taps_show_what_was_stored(self, make_bus: MakeBus, run: str) -> None:
        """Manifests, heads, members and events are republished with their bodies, `info` and ids; leases and chunks are not."""
        bus, monitor, subjects = await make_bus(), await make_bus(), Subjects(run)
        tap = await monitor.listen(subjects.tap())
        info: Info = {"tokens": 5, "loss": 2.5, "ok": True, "who": "ä"}

        await bus.put_record(subjects.lease(0), b"secret", expected=0)
        await bus.put_blob(subjects.global_stem(0, 1, "n"), b"secret")
        await bus.publish(subjects.contribution(0, 1, "a"), b"manifest", msg_id="m1", info=info)
        await bus.put_record(subjects.head(1), b"head", expected=0)
        await bus.put_record(subjects.member("a"), b"member", expected=0)
        await bus.put_record(subjects.data, b"secret", expected=0)
        await bus.publish(subjects.event("round", "s"), b"event", msg_id="m2")

        heard = [core_message for _ in range(4) if (core_message := await tap.next(SOON_S)) is not None]
        shown = {core_message.subject: core_message for core_message in heard}  # two brokers keep no common order
        assert {core_message.subject: core_message.data for core_message in heard} == {
            subjects.tap("up.m.0.1.a"): b"manifest",
            subjects.tap("gl.head.1"): b"head",
            subjects.tap("mb.learner.a"): b"member",
            subjects.tap("ev.round.s"): b"event",
        }
        headers = shown[subjects.tap("up.m.0.1.a")].headers
        assert info == json.loads(headers[INFO_HEADER])
        assert headers["Nats-Subject"] == subjects.contribution(0, 1, "a")
        assert headers["Nats-Msg-Id"]
        assert int(headers["Nats-Sequence"]) > 0
        assert await tap.next(NEVER_S) is None

    async def test_who_comes_late_has_the_last_heartbeat(self, make_bus: MakeBus, run: str) -> None:
        """Once a shard has come: of each sender the last one is kept, and all are on the tap, and the run record is."""
        bus, monitor, subjects = await make_bus(), await make_bus(), Subjects(run)
        tap = await monitor.listen(subjects.tap())
        shard = await bus.consume(subjects.contributions_of(0), durable="shard")
        await bus.put_record(subjects.run_record, b"record", expected=0)
        first = await tap.next(SOON_S)
        assert first is not None
        assert (first.subject, first.data) == (subjects.tap("gl.run"), b"record")

        for subject, data in ((subjects.beat("a"), b"1"), (subjects.presence("h"), b"2"), (subjects.beat("a"), b"3")):
            await bus.tell(subject, data)
        heard = [(await _next(tap)) for _ in range(3)]
        late = await make_bus()

        assert heard == [(subjects.tap("hb.a"), b"1"), (subjects.tap("sy.h"), b"2"), (subjects.tap("hb.a"), b"3")]
        assert [(one.subject, one.data) for one in await late.get_records(subjects.beat("*"))] == [
            (subjects.beat("a"), b"3")
        ]
        assert [one.data for one in await late.get_records(subjects.presence("*"))] == [b"2"]
        await shard.close()


async def _next(feed: Subscription) -> tuple[str, bytes]:
    message = await feed.next(SOON_S)
    assert message is not None
    return message.subject, message.data
