"""What a peer may write into the event log ends no reader and deceives none: forged, endless, and far too many events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest

from atoll.base.clock import SystemClock
from atoll.base.errors import PeerMisbehaved
from atoll.base.parsing import FAULT_CHARS_MAX
from atoll.base.quantities import COUNT_MAX, LEARNERS_MAX, MOMENT_MAX, RUN_TOKENS_MAX, TOKENS_MAX, TOTAL_MAX
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.driver import LossReader
from atoll.protocol.claims import CLOCKS_APART_S, steps_possible
from atoll.run import history as histories
from atoll.run.history import NAMES_KEPT, OTHER, History
from atoll.run.taps import KINDS, Selection, body_of, schemas
from atoll.run.watch import Watch
from atoll.wire.events import EVENTS, RoundEvent, event_of, fields_of, writers_named
from atoll.wire.messages import Event, LearnerState, Member, Presence, decode, encode
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import BYTES_MAX, LinkTraffic
from atoll_monitor import dashboard as feeds
from atoll_monitor.dashboard import Feed, RunScene
from atoll_monitor.monitored_run import MonitoredRun
from support.door_attacks import MISLEADING, DoorAttack, read_all
from support.events import event
from support.founded_run import run_record
from support.watched_runs import beat

S = Subjects("r")
ENDLESS = 10**400
DEADLINE_S = 60.0
LEFT = {"incarnation": 1, "tokens": 1, "steps": 1}


def line(kind: str, who: str, **changes: Any) -> bytes:  # noqa: ANN401  (any JSON)
    return json.dumps({"kind": kind, "who": who, "at_s": 1.0, "fields": LEFT, "schema": 1} | changes).encode()


@pytest.fixture
def bus() -> MemoryBus:
    """A bus on an open broker in memory: anybody writes anywhere."""
    return MemoryBus("r", MemoryBroker())


async def write(bus: MemoryBus, subject: str, data: bytes) -> None:
    await bus.publish(subject, data, msg_id=f"{subject}-{hash(data)}")


# --- the gate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["ev.left.a", "atoll.r.ev.left.a", "atoll.r.tap.ev.left.a"])
def test_an_event_on_its_own_subject_is_taken(subject: str) -> None:
    assert event_of(subject, line("left", "a")).who == "a"


@pytest.mark.parametrize(
    ("subject", "body"),
    [
        ("ev.left.a", line("left", "b")),
        ("ev.left.a", line("joined", "a")),
        ("ev.left.a", line("round", "shard-0")),
        ("ev.round.a", line("round", "a")),
        ("ev.ledger.evaluator", line("ledger", "evaluator")),
        ("ev.left.shard-0", line("left", "shard-0")),
        ("ev.left.evaluator", line("left", "evaluator")),
        ("ev.validation.a", line("validation", "a")),
        ("ev.round.shard-4096", line("round", "shard-4096")),
        ("ev.round.shard-00", line("round", "shard-00")),
        ("ev.left.<b>", line("left", "<b>")),
        ("up.left.a", line("left", "a")),
        ("left.a", line("left", "a")),
        ("a", line("left", "a")),
        ("", line("left", "a")),
        ("ev.left.a", line("left", "a", at_s=-1.0)),
        ("ev.left.a", line("left", "a", at_s=2 * MOMENT_MAX)),
        ("ev.left.a", line("left", "a", at_s=ENDLESS)),
    ],
)
def test_a_forged_event_is_refused(subject: str, body: bytes) -> None:
    """In another's name, under another kind, by who writes no such kind, outside the log, or at no time."""
    with pytest.raises(PeerMisbehaved):
        event_of(subject, body)


def test_a_kind_of_a_later_release_passes() -> None:
    assert event_of("ev.unheard_of.a", line("unheard_of", "a")).kind == "unheard_of"
    assert writers_named("shard-4095") == {"shard"}


def test_every_number_text_and_table_of_an_event_has_a_bound() -> None:
    """Also those inside, as the schemas tell; what only grows with the message is bounded by its size."""
    by_size = {"refusals", "accounts", "refused"}
    found = [where for name in schemas("#/{name}") if name not in ("RunRecord", "Layout") for where in unbounded(name)]
    reachable = {where for where in found if where.split(".")[0] in reached(map(_fields_name, EVENTS))}
    assert {where for where in reachable if where.rpartition(".")[2] not in by_size} == set()


def _fields_name(kind: str) -> str:
    return f"{kind.capitalize()}Fields"


def reached(names: Iterable[str]) -> set[str]:
    all_of_them, found, waiting = schemas("#/{name}"), set[str](), [*names, "Beat"]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            text = json.dumps(all_of_them.get(name, {}))
            waiting += [one for one in all_of_them if f'"#/{one}"' in text]
    return found


def unbounded(name: str) -> Iterator[str]:
    """Yield the fields of a schema that have no end."""
    for field, schema in schemas("#/{name}")[name].get("properties", {}).items():
        if field != "schema" and any(not bounded(one) for one in parts(schema)):
            yield f"{name}.{field}"


def parts(schema: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401  (a piece of JSON)
    if isinstance(schema, list):
        for one in schema:
            yield from parts(one)
    elif isinstance(schema, dict):
        yield schema
        for key in ("anyOf", "items", "prefixItems", "additionalProperties", "propertyNames"):
            yield from parts(schema.get(key))


def bounded(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return {"minimum", "exclusiveMinimum"} & schema.keys() != set() and (
            {"maximum", "exclusiveMaximum"} & schema.keys() != set()
        )
    if kind == "string":
        return bool({"pattern", "maxLength", "enum", "const"} & schema.keys())
    if kind == "array":
        return "maxItems" in schema
    return kind != "object" or "maxProperties" in schema or "additionalProperties" not in schema


def test_what_a_shard_may_honestly_write_is_never_refused() -> None:
    """A round of learners who all claim as much as they can: else one of them could hide the commits of others."""
    share = {
        "learner": "a" * 64,
        "incarnation": COUNT_MAX,
        "age": 0,
        "tokens": TOKENS_MAX,
        "weight": 1e90,
        "loss": 1e100,
        "norm": 3e45,
    }
    most = {"tokens": LEARNERS_MAX * TOKENS_MAX, "grace_s": 1e20, "quorum_wait_s": -1e9, "run_tokens": RUN_TOKENS_MAX}
    told = event("round", "shard-0", 1.0, fragment=0, version=1, contributors=[share], **most)
    assert fields_of(told, RoundEvent).tokens == TOTAL_MAX


@pytest.mark.parametrize(("loss", "told"), [(2.5, 2.5), (1e200, None), (float("nan"), None), (-1e200, None)])
async def test_a_learner_tells_of_a_loss_only_what_is_taken(loss: float, told: float | None) -> None:
    known = await LossReader().read(loss)
    assert msgspec.json.decode(msgspec.json.encode(known)) == told


# --- views --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", MISLEADING, ids=lambda attack: attack.name)
async def test_no_reader_ends_or_believes(
    bus: MemoryBus, attack: DoorAttack, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a learner can write on a locked broker: all readers refuse it, each time, say whose it is, and draw the rest."""
    names = {"p": S.prefix, "me": "mallory", "victim": "a", "mark": "tell-tale"}
    await write(bus, S.event("left", "a"), line("left", "a"))
    await write(bus, attack.subject.format(**names), attack.body.format(**names).encode())
    for _ in range(2):
        read = await read_all(bus, "r")
        assert read.refused == {"mallory": 1}
        assert b"tell-tale" not in read.drawn
        assert b'"a"' in read.drawn
    assert "messages.refused" in capsys.readouterr().err


async def test_a_story_passes_over_what_is_forged(bus: MemoryBus) -> None:
    await write(bus, S.event("left", "a"), line("left", "a"))
    await write(bus, S.event("left", "b"), line("left", "a"))
    await write(bus, S.event("round", "b"), line("round", "b"))
    history = History()
    await history.read(bus, S)
    assert [each.who for each in history.left] == ["a"]
    assert history.unreadable == 2


async def test_a_heartbeat_in_the_name_of_another_is_not_shown(bus: MemoryBus) -> None:
    """A learner signs what stands on its own subject, whatever the body says; so it is with presences."""
    view = History()
    member = Member(learner="a", incarnation=1, nonce="n", host="h", pid=1, claimed_at_s=0.0)
    await bus.put_record(S.member("a"), encode(member), expected=0)
    following = asyncio.create_task(Watch(bus, "r", view, SystemClock()).follow())
    presence = Presence(name="p", host="h", pid=1, wants=(), owns=(0,))
    async with asyncio.timeout(DEADLINE_S):
        while view.unreadable < 2:
            await bus.tell(S.beat("mallory"), encode(beat("a", state="left")))
            await bus.tell(S.presence("q"), encode(presence))
            await asyncio.sleep(0.01)
        assert not view.learners
        assert not view.hosts
        while "a" not in view.learners or "p" not in view.hosts:
            await bus.tell(S.beat("a"), encode(beat("a")))
            await bus.tell(S.presence("p"), encode(presence))
            await asyncio.sleep(0.01)
    assert view.strange.keys() == {"mallory", "q"}
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


class UnbentClock(SystemClock):
    """A clock whose wall time is right: a reader's is within an hour of the founder's."""

    wall = staticmethod(time.time)


async def test_nobody_is_shown_to_have_trained_more_than_can_be(bus: MemoryBus) -> None:
    """A shard drops such a heartbeat; a report that believes it shows tokens that nobody trained, and none has a fate."""
    view, clock = History(), UnbentClock()
    founded = run_record("r")
    settings = msgspec.structs.replace(founded.protocol, step_tokens_max=100)
    founded = msgspec.structs.replace(founded, protocol=settings, founded_at_s=clock.wall())
    await bus.put_record(S.run_record, encode(founded), expected=0)
    for name in ("a", "liar", "sampler", "leaver", "goer"):
        member = Member(learner=name, incarnation=1, nonce="n", host="h", pid=1, claimed_at_s=0.0)
        await bus.put_record(S.member(name), encode(member), expected=0)
    lie = {"incarnation": 1, "tokens": 1 << 47}
    for kind, who, steps in (("sample", "sampler", {"step": 1 << 39}), ("left", "leaver", {"steps": 1 << 39})):
        await write(bus, S.event(kind, who), encode(event(kind, who, clock.wall(), **lie, **steps)))
    following = asyncio.create_task(Watch(bus, "r", view, clock).follow())
    async with asyncio.timeout(DEADLINE_S):
        while "a" not in view.learners or not {"liar", "sampler"} <= view.strange.keys():
            for told in (beat("liar", step=1 << 39), beat("goer", state="left", step=1 << 39), beat("a")):
                await bus.tell(S.beat(told.learner), encode(told))
            await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    most = steps_possible(settings, CLOCKS_APART_S + DEADLINE_S) * settings.step_tokens_max
    tokens = {name: learner.tokens for name, learner in view.learners.items()}
    assert tokens["a"] == beat("a").tokens
    assert tokens.keys() == {"a", "leaver", "goer"}
    assert 0 < tokens["leaver"] <= most
    assert 0 < tokens["goer"] <= most
    assert view.learners["leaver"].has_left
    assert view.learners["goer"].has_left


def test_invented_learners_put_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound they are counted and passed over, in events and heartbeats alike; who is known goes on."""
    monkeypatch.setattr(histories, "LEARNERS_KEPT", 3)
    view = History()
    states: tuple[LearnerState, ...] = ("training", "left")
    for number in range(6):
        name = f"w{number}"
        view.on_event(event("joined", name, 1.0, incarnation=1))
        view.on_event(event("sample", name, 2.0, incarnation=1, step=1, tokens=10))
        view.on_event(event("moved", name, 2.0, role="learner", incarnation=1, moved={}))
        for state in states:
            view.on_beat(beat(name, state=state), 1.0)
        view.on_event(event("left", name, 3.0, **LEFT))
    assert list(view.learners) == ["w0", "w1", "w2"]
    assert list(view.signs) == ["w0", "w1", "w2"]
    assert view.passed_over == 3 * 6
    assert view.unreadable == 0


def test_reasons_and_strangers_are_few() -> None:
    view = History()
    for number in range(2 * NAMES_KEPT):
        view.on_event(event("junk", "shard-0", 1.0, reasons={f"r{number}": 1}))
        view.refuse(f"w{number}", PeerMisbehaved("why"))
    assert len(view.junk) == len(view.strange) == NAMES_KEPT + 1
    assert view.junk[OTHER] == view.strange[OTHER].count == NAMES_KEPT


def test_sums_saturate() -> None:
    view = History()
    for version in range(1, 4):
        most = {"tokens": TOTAL_MAX, "bytes_up": TOTAL_MAX, "bytes_down": TOTAL_MAX, "parameters": TOTAL_MAX}
        view.on_event(event("round", "shard-0", 1.0, fragment=0, version=version, contributors=[], **most))
        view.on_event(event("junk", "shard-0", 1.0, reasons={"malformed": COUNT_MAX}))
    for life in range(1, 100):
        view.on_event(event("left", "a", 1.0, incarnation=life, tokens=TOKENS_MAX, steps=1))
    assert {view.token_fragments_merged, view.bytes_merged, view.bytes_published, view.parameters_published} == {
        TOTAL_MAX
    }
    assert view.junk["malformed"] == COUNT_MAX
    assert view.trained_tokens == view.learners["a"].tokens == RUN_TOKENS_MAX
    assert LinkTraffic(wire_up=BYTES_MAX).plus(LinkTraffic(wire_up=1)).wire_up == BYTES_MAX


# --- taps ---------------------------------------------------------------------------------------------------------


def test_a_tap_shows_nobody_the_words_of_another() -> None:
    """The name in the body is that of the subject; a number without end in a field that nobody knows is refused."""
    told = encode(beat("a"))
    assert body_of(KINDS["beat"], "hb.a", told)["learner"] == "a"
    with pytest.raises(PeerMisbehaved, match="on the subject of another"):
        body_of(KINDS["beat"], "hb.b", told)
    endless = told[:-1] + b',"unknown":' + b"1" * 5000 + b"}"
    with pytest.raises(PeerMisbehaved, match="cannot be shown"):
        body_of(KINDS["beat"], "hb.a", endless)


def test_a_selection_reads_no_number_without_end() -> None:
    """`info` is its writer's, and of any length."""
    assert not Selection(fragments=frozenset({1})).takes(KINDS["head"], "gl.head.0", {"fragment": "1" * 5000})


# --- the page -----------------------------------------------------------------------------------------------------


class BrokenScene(RunScene):
    """A scene that cannot be drawn."""

    def tick(self) -> None:
        raise OverflowError("int too large to convert to float")

    def state(self) -> dict[str, Any]:
        raise OverflowError("int too large to convert to float")


async def test_a_scene_that_fails_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its viewers wait for its next frame; those of other runs, and the comparison, get theirs. It is logged once."""
    monkeypatch.setattr(feeds, "FRAME_S", 0.01)
    clock = SystemClock()
    watched = {name: MonitoredRun(name, clock) for name in ("bad", "good")}
    scenes = {"bad": BrokenScene(watched["bad"], "bad"), "good": RunScene(watched["good"], "good")}
    feed = Feed(scenes, clock)
    blind, seeing = feed.enter("bad"), feed.enter("good")
    assert blind is not None
    assert seeing is not None
    making = asyncio.create_task(feed.run())
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            frames = await seeing.take()
            assert b"event: state" in frames
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)
    assert blind.missed == 0
    assert capsys.readouterr().err.count("scene.failed") == 1


@pytest.mark.parametrize("state", ["\n\x1b[2J", "x" * 100_000])
def test_why_a_message_was_refused_is_said_in_few_plain_words(state: str) -> None:
    view = History()
    view.on_event(event("sample", "a", 1.0, incarnation=1, step=1, tokens=1, state=state))
    reason = view.strange["a"].reason
    assert "$.state" in reason or len(reason) > FAULT_CHARS_MAX
    assert len(reason) < 2 * FAULT_CHARS_MAX
    assert reason.isprintable()
    with pytest.raises(PeerMisbehaved) as refused:
        decode(Event, json.dumps({"kind": state}).encode())
    assert len(str(refused.value)) < 2 * FAULT_CHARS_MAX
