"""What is on the taps, who wants which, and how a reader begins in the past: nothing lost, nothing told twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from atoll.base.clock import SystemClock
from atoll.base.errors import PeerMisbehaved
from atoll.bus.interface import CoreMessage
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.cli.watch import pretty_line
from atoll.run import taps
from atoll.run.taps import KINDS, Selection, TapKind, TapMessage, TapReader, body_of, json_schemas, kind_of
from atoll.wire.messages import encode
from atoll.wire.subjects import Subjects
from support.clocks import HandClock
from support.events import event

GOLDEN: dict[str, str] = json.loads(
    (Path(__file__).parents[1] / "golden" / "messages.json").read_text(encoding="utf-8")
)
S = Subjects("r")


class DatedClock(SystemClock):
    """A clock whose date a test sets."""

    wall_s = 0.0

    def wall(self) -> float:
        return self.wall_s


DATE = DatedClock()
EVERY_READER = Selection()


@pytest.mark.parametrize(
    ("tail", "kind"),
    [
        ("gl.run", "run"),
        ("gl.head.3", "head"),
        ("up.m.0.3.a", "contribution"),
        ("up.m.0.bye.a", "goodbye"),
        ("mb.learner.a", "member"),
        ("hb.a", "beat"),
        ("sy.h", "presence"),
        ("ev.round.s", "round"),
        ("ev.new.s", None),
        ("gl.lease.0", None),
    ],
)
def test_every_subject_with_a_tap_has_a_kind(tail: str, kind: str | None) -> None:
    """A goodbye is on a subject of contributions, and is none; what is unknown is passed over."""
    assert kind_of(tail) is (None if kind is None else KINDS[kind])


def tail_of(tap: TapKind, told: dict[str, Any]) -> str:
    """Return the subject below the tap on which a message of its writer stands."""
    named = {"shard": 0, "process": told.get("name"), **told}
    return ".".join(str(named[level[1:-1]]) if level.startswith("<") else level for level in tap.subject.split("."))


@pytest.mark.parametrize("kind", ["run", "head", "contribution", "member", "beat", "goodbye", "presence", "joined"])
def test_a_golden_message_is_what_its_schema_says(kind: str) -> None:
    """And what the schema says is no message is none for the reader: one field less, and one of another type."""
    tap, told = KINDS[kind], json.loads(GOLDEN[KINDS[kind].message.__name__])
    schema = Draft202012Validator(json_schemas()[kind])
    assert list(schema.iter_errors(told)) == []
    tail = tail_of(tap, told)
    assert body_of(tap, tail, json.dumps(told).encode()) == told

    def names_of(shape: dict[str, Any]) -> list[str]:
        return list(shape["$defs"][shape["$ref"].rpartition("/")[2]]["required"])

    for name in names_of(json_schemas()[kind]):
        for wrong in ({key: value for key, value in told.items() if key != name}, {**told, name: [{}]}):
            assert not schema.is_valid(wrong)
            with pytest.raises(PeerMisbehaved):
                body_of(tap, tail, json.dumps(wrong).encode())


def test_an_event_has_the_fields_of_its_kind() -> None:
    """Fields of another kind, or a subject of another kind, are refused; an unknown field is none's fault."""
    told = event("left", "a", 1.0, incarnation=1, tokens=2, steps=3, said_later=1)
    assert body_of(KINDS["left"], "ev.left.a", encode(told))["fields"]["said_later"] == 1
    with pytest.raises(PeerMisbehaved, match="in the name of another"):
        body_of(KINDS["joined"], "ev.joined.a", encode(told))
    with pytest.raises(PeerMisbehaved, match="not the fields of a left"):
        body_of(KINDS["left"], "ev.left.a", encode(event("left", "a", 1.0, incarnation=1)))


def test_the_signature_of_a_locked_run_is_no_part_of_the_body() -> None:
    told = json.loads(GOLDEN["Beat"])
    tail = tail_of(KINDS["beat"], told)
    assert body_of(KINDS["beat"], tail, GOLDEN["Beat"].encode() + b"\nsigned:a.b.c") == told


ROUND = {"fields": {"fragment": 3, "contributors": [{"learner": "a"}, {"learner": "b"}]}}


REFUSED = {"fields": {"refusals": [{"learner": "a", "fragment": 3, "reason": "x"}]}}


@pytest.mark.parametrize(
    ("selection", "kind", "tail", "told", "wanted"),
    [
        (EVERY_READER, "round", "ev.round.shard-0", ROUND, True),
        (Selection(frozenset({"round"})), "round", "ev.round.shard-0", ROUND, True),
        (Selection(frozenset({"head"})), "round", "ev.round.shard-0", ROUND, False),
        (Selection(learners=frozenset({"b"})), "round", "ev.round.shard-0", ROUND, True),
        (Selection(learners=frozenset({"c"})), "round", "ev.round.shard-0", ROUND, False),
        (Selection(learners=frozenset({"a"})), "joined", "ev.joined.a", {"fields": {}}, True),
        (Selection(learners=frozenset({"a"})), "beat", "hb.a", {}, True),
        (Selection(learners=frozenset({"a"})), "presence", "sy.a", {}, False),
        (Selection(learners=frozenset({"a"})), "head", "gl.head.3", {"included": [{"learner": "a"}]}, True),
        (Selection(learners=frozenset({"c"})), "head", "gl.head.3", {"included": [{"learner": "a"}]}, False),
        (Selection(fragments=frozenset({3})), "round", "ev.round.shard-0", ROUND, True),
        (Selection(fragments=frozenset({4})), "round", "ev.round.shard-0", ROUND, False),
        (Selection(fragments=frozenset({3})), "contribution", "up.m.0.3.a", {}, True),
        (Selection(fragments=frozenset({0})), "goodbye", "up.m.0.bye.a", {}, False),
        (Selection(fragments=frozenset({3})), "beat", "hb.a", {}, False),
        (Selection(fragments=frozenset({3})), "refused", "ev.refused.shard-0", REFUSED, True),
        (Selection(fragments=frozenset({4})), "refused", "ev.refused.shard-0", REFUSED, False),
        (Selection(learners=frozenset({"a"})), "refused", "ev.refused.shard-0", REFUSED, True),
    ],
)
def test_a_selection_takes_what_is_about_it(
    *, selection: Selection, kind: str, tail: str, told: dict[str, Any], wanted: bool
) -> None:
    assert selection.takes(KINDS[kind], tail, told) is wanted


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    """A bus on a broker in memory, whose clock shows the second of the newest event (`write`)."""
    opened = MemoryBus("r", MemoryBroker(clock=DATE))
    yield opened
    await opened.close()


async def write(bus: MemoryBus, number: int) -> None:
    """Write an event of second `number`."""
    DATE.wall_s = float(number)
    line = encode(event("left", f"w{number % 2}", float(number), incarnation=1, tokens=number, steps=0))
    await bus.publish(S.event("left", f"w{number % 2}"), line, msg_id=str(number))


def numbers(told: list[TapMessage]) -> list[int]:
    return [one.body["fields"]["tokens"] for one in told if one.kind == "left" and one.body]


async def past(bus: MemoryBus, since_s: float, selection: Selection = EVERY_READER) -> list[TapMessage]:
    """Return what a reader hears that does not follow."""
    reader = TapReader(bus, "r", HandClock(), selection)
    await reader.listen()
    return [told async for told in reader.messages(since_s, follow=False) if told is not None]


@pytest.mark.parametrize("page", [1, 7, 256])
@pytest.mark.parametrize("length", [0, 1, 2, 40])
async def test_events_since_a_moment_are_found(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, length: int, page: int
) -> None:
    """For every moment from before the first to after the last, in a log with gaps, page by page."""
    monkeypatch.setattr(taps, "PAGE_EVENTS", page)
    for number in range(length):
        await write(bus, number)
        if number % 5 == 3:
            await bus.publish(S.event("unread", "x"), b"not an event", msg_id=f"x{number}")
    for moment in (-1.0, 0.0, 0.5, 1.0, 17.0, 38.5, 39.0, 40.0):
        assert numbers(await past(bus, moment)) == [one for one in range(length) if one >= moment]
    assert numbers(await past(bus, -1.0, Selection(learners=frozenset({"w1"})))) == list(range(1, length, 2))


async def test_a_reader_of_the_past_begins_with_how_things_stand(bus: MemoryBus) -> None:
    """Members, heads, and the last heartbeat of each; then the log, then what happens: each event once."""
    await bus.put_record(S.run_record, GOLDEN["RunRecord"].encode(), expected=0)
    await bus.put_record(S.member("a"), GOLDEN["Member"].encode(), expected=0)
    for _ in range(2):
        await bus.tell(S.beat("a"), GOLDEN["Beat"].encode())
    await write(bus, 0)
    reader = TapReader(bus, "r", SystemClock(), Selection())
    await reader.listen()
    await write(bus, 1)  # heard, and in the log
    await bus.put_record(S.head(0), GOLDEN["Head"].encode(), expected=0)  # heard, and standing
    heard: list[TapMessage] = []
    async for told in reader.messages(-1.0):
        heard += [told] if told else []
        if len(heard) == 6:
            await write(bus, 2)
            await bus.put_record(S.head(1), b"no head", expected=0)
        if len(heard) == 9:
            break

    assert [one.kind for one in heard] == ["run", "member", "head", "beat", "left", "left", "left", "head", "head"]
    assert numbers(heard) == [0, 1, 2]
    assert [one.stored for one in heard] == [True] * 7 + [False, False]
    assert heard[2].sequence == heard[7].sequence
    assert heard[8].body is None
    assert heard[8].fault.startswith("not a Head")
    assert json.loads(json.dumps(heard[1].line(bodies=True)))["body"] == json.loads(GOLDEN["Member"])
    assert "body" not in heard[1].line(bodies=False)


async def test_without_the_past_only_what_happens_is_told(bus: MemoryBus) -> None:
    await write(bus, 0)
    reader = TapReader(bus, "r", SystemClock(), Selection(frozenset({"left"}), fragments=frozenset()))
    await reader.listen()
    await bus.put_record(S.head(0), GOLDEN["Head"].encode(), expected=0)
    await write(bus, 1)
    async for told in reader.messages(None):
        assert told is not None
        assert (told.kind, told.stored, numbers([told])) == ("left", False, [1])
        break


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    "more",
    [
        '"x":NaN',
        '"x":1e999',
        f'"x":{"9" * 5000}',
        f'"x":{"9" * 4000}',
        f'"x":{DEEP}',
        f'"x":{"[" * 100_000}',
        '"x":"\xff"',
    ],
)
def test_a_field_that_nobody_can_show_makes_a_message_none(more: str) -> None:
    data = f"{GOLDEN['Beat'].strip()[:-1]},{more}}}".encode("latin-1")

    with pytest.raises(PeerMisbehaved):
        body_of(KINDS["beat"], "hb.a", data)


@pytest.mark.parametrize(
    "headers",
    [
        {"Nats-Sequence": "9" * 5000},
        {"Nats-Time-Stamp": "0001-01-01T00:00:00+23:59"},
        *(
            {"Atoll-Info": text}
            for text in (
                *('{"fields":3}', '{"fields":[]}', '{"fields":null}', '{"a":NaN}', f'{{"a":{DEEP}}}', "[]", "{"),
                *(f'{{"fragment":"{"9" * 5000}"}}', '{"refusals":[[]]}', '{"contributors":{"a":[]}}', '{"learner":[]}'),
            )
        ),
    ],
)
@pytest.mark.parametrize("selection", [EVERY_READER, Selection(learners=frozenset({"a"}), fragments=frozenset({3}))])
def test_headers_of_a_stranger_end_no_reader(headers: dict[str, str], selection: Selection) -> None:
    reader = TapReader(MemoryBus("r", MemoryBroker()), "r", HandClock(), selection)
    told = reader._read_heard(CoreMessage(S.tap("up.m.0.3.a"), b"", headers=headers))

    assert told is not None
    line = json.dumps(told.line(bodies=True), allow_nan=False)
    assert json.loads(line)["kind"] == "contribution"
    assert pretty_line(told, bodies=False)
