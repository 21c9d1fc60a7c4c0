"""The taps of a run: each kind of message, its subject and its fields; readers of them, and their schemas.

A *tap* is a message that the broker says again, under `tap.`, when a stream has stored it. A listener there sees a run as it
happens, in the words that its processes use among themselves, and can neither change nor delay it. Tensors are on no tap.

    run            gl.run                               the run record
    head           gl.head.<fragment>                   a version of a fragment that became visible
    contribution   up.m.<shard>.<fragment>.<learner>    the manifest of a pseudo-gradient
    goodbye        up.m.<shard>.bye.<learner>           a learner leaves; its last heartbeat
    member         mb.learner.<learner>                 an incarnation that joined or left
    beat           hb.<learner>                         a learner's heartbeat
    presence       sy.<process>                         a synchronizer process, and its shards
    round, …       ev.<kind>.<who>                      an event of the event log; its kind is that of the event

The kinds are the words of `atoll tap --kind`, and the names in the AsyncAPI document (`asyncapi`). A reader passes over kinds
and fields that it does not know. `TAPS_VERSION` grows when something of this table goes or changes its meaning.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from atoll.base.clock import Clock, unix_s
from atoll.base.docstrings import summary
from atoll.base.errors import BrokerUnavailable, BusError, PeerMisbehaved, RunReplaced, SettingsError
from atoll.base.parsing import fault_of, parsed
from atoll.base.quantities import MOMENT_MAX, UNSEEN_BEYOND
from atoll.bus.interface import PAGE_EVENTS, STORED_AT, Bus, CoreMessage, StoredEvent, Subscription
from atoll.bus.options import PORT
from atoll.wire.events import EVENTS, EventFields, event_of, fields_of
from atoll.wire.limits import INFO_HEADER
from atoll.wire.messages import (
    SCHEMA_NEWEST,
    Beat,
    Contribution,
    Event,
    Head,
    Member,
    Presence,
    RunRecord,
    decode,
    oldest_of,
    spoken_versions,
    without_signature,
)
from atoll.wire.subjects import Subjects, matches

TAPS_VERSION: Final = 1
DEPTH_MAX: Final = 32
NUMBER_LEN_MAX: Final = 19


@dataclass(frozen=True, slots=True)
class TapKind:
    """One kind of message: its subject below the tap, what it is, and of events their fields; `<level>` stands for many."""

    kind: str
    subject: str
    message: type[msgspec.Struct]
    about: str
    fields: type[EventFields] | None = None

    @property
    def pattern(self) -> str:
        """Return the filter of its subjects below the tap."""
        return ".".join("*" if level.startswith("<") else level for level in self.subject.split("."))

    def levels(self, tail: str) -> dict[str, str]:
        """Return what stands for each varying level in `tail`, a subject of this kind."""
        pairs = zip(self.subject.split("."), tail.split("."), strict=True)
        return {name[1:-1]: level for name, level in pairs if name.startswith("<")}


_OWN: Final = (
    TapKind("run", "gl.run", RunRecord, "The run record: it is founded, rebuilt or closing."),
    TapKind("head", "gl.head.<fragment>", Head, "A version of a fragment became visible: the commit of a round."),
    TapKind(
        "goodbye", "up.m.<shard>.bye.<learner>", Beat, "A learner leaves: its last heartbeat, behind its manifests."
    ),
    TapKind(
        "contribution",
        "up.m.<shard>.<fragment>.<learner>",
        Contribution,
        "A learner's pseudo-gradient is stored: its manifest.",
    ),
    TapKind("member", "mb.learner.<learner>", Member, "An incarnation of a learner joined or left."),
    TapKind("beat", "hb.<learner>", Beat, "A learner's heartbeat, about once a second."),
    TapKind(
        "presence", "sy.<process>", Presence, "A synchronizer process, the shards that it owns and those it wants."
    ),
)


def _about(fields: type[msgspec.Struct]) -> str:
    about = summary(fields.__doc__).partition(": ")[2]
    return about[:1].upper() + about[1:]


_EVENTS: Final = tuple(
    TapKind(kind, f"ev.{kind}.<who>", Event, _about(fields), fields) for kind, fields in EVENTS.items()
)
TAPS: Final = (*_OWN, *_EVENTS)
"""Of two that match a subject the first one counts."""
KINDS: Final = {tap.kind: tap for tap in TAPS}


def kind_of(tail: str) -> TapKind | None:
    """Return the kind of a message on `tail`, its subject below the tap; None if it is none of ours."""
    return next((tap for tap in TAPS if matches(tap.pattern, tail)), None)


def body_of(tap: TapKind, tail: str, data: bytes) -> dict[str, Any]:
    """Return the JSON of a message of this kind as it was written on `tail`, its subject below the tap.

    On an open broker anybody may have written it: also fields that we do not know are no deeper than `DEPTH_MAX`.

    Raises:
        PeerMisbehaved: it is not what the kind says, or it names another writer or another fragment than its subject.
    """
    if tap.fields is None:
        message = decode(tap.message, data)
        for name, level in tap.levels(tail).items():
            told = getattr(message, _NAMED.get(name, name), level)
            if str(told) != level:
                raise PeerMisbehaved(f"a {tap.kind} on the subject of another", got=told, allowed=level)
    else:
        fields_of(event_of(tail, data), tap.fields)
    try:
        return json_object(without_signature(tap.kind, data))
    except msgspec.MsgspecError as error:  # a number without end in a field that nobody knows
        raise PeerMisbehaved("a message that cannot be shown", got=fault_of(error), allowed="a JSON object") from error


_NAMED: Final = {"process": "name"}
"""Levels of subjects whose field in the message has another name."""


def json_object(text: bytes | str) -> dict[str, Any]:
    """Return a JSON object that can be written as one again; raise `msgspec.MsgspecError` if a text is none."""
    found = parsed(text, dict[str, Any])
    if not _is_within(found, DEPTH_MAX):
        raise msgspec.ValidationError(f"more than {DEPTH_MAX} levels deep")
    return found


def _is_within(value: object, levels: int) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_within(each, levels - 1) for each in inner)


@dataclass(frozen=True, slots=True)
class Selection:
    """Choice of messages: of these kinds, about one of these learners and one of these fragments; empty: all."""

    kinds: frozenset[str] = frozenset()
    learners: frozenset[str] = frozenset()
    fragments: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if unknown := self.kinds - KINDS.keys():
            raise SettingsError(
                "no tap has messages of this kind",
                got=", ".join(sorted(unknown)),
                allowed=", ".join(KINDS),
                todo="correct --kind",
            )

    @property
    def taps(self) -> tuple[TapKind, ...]:
        """Return the wanted kinds."""
        return tuple(tap for tap in TAPS if not self.kinds or tap.kind in self.kinds)

    def takes(self, tap: TapKind, tail: str, content: Mapping[str, Any]) -> bool:
        """Return whether a message is wanted; `content` is its body or, where the taps have none, its `info`."""
        if self.kinds and tap.kind not in self.kinds:
            return False
        levels = tap.levels(tail)
        fields = content.get("fields")
        if not isinstance(fields, dict):
            fields = content
        if self.fragments and self.fragments.isdisjoint(_fragments(levels, fields)):
            return False
        return not self.learners or not self.learners.isdisjoint(_learners(levels, fields))


def _fragments(levels: Mapping[str, str], fields: Mapping[str, Any]) -> set[int]:
    refusals = fields.get("refusals")
    named = [levels.get("fragment"), fields.get("fragment")]
    named += [one.get("fragment") for one in refusals if isinstance(one, dict)] if isinstance(refusals, list) else []
    return {int(text) for one in named if (text := str(one)).isdecimal() and len(text) <= NUMBER_LEN_MAX}


def _learners(levels: Mapping[str, str], fields: Mapping[str, Any]) -> set[str]:
    named = {levels.get("learner", ""), levels.get("who", ""), str(fields.get("learner", ""))}
    for many in ("contributors", "included", "refusals"):
        entries = fields.get(many)
        for entry in entries if isinstance(entries, list) else ():
            # A head lists learners as arrays or objects, as its schema says.
            named.add(str(entry.get("learner", "")) if isinstance(entry, dict) else str(entry))
    return named - {""}


FEED_LEN_MAX: Final = 4096
POLL_S: Final = 0.5
LOOK_S: Final = 2.0
"""Between two looks into the event log without a word of news: a tap may be lost."""
WRITTEN: Final = ("at_s", "claimed_at_s", "founded_at_s")
"""Fields that say when a message was written; a head and a presence have none."""
KEPT: Final = ("run", "member", "head", "beat", "presence")
"""Kinds of which the broker keeps the last, in the order in which they are told."""


@dataclass(frozen=True, slots=True)
class TapMessage:
    """One message: when it was stored, its subject below the tap, and what it says.

    `at_s` is the broker's time of what was heard, and of what was read the writer's, 0 if that says none.
    `sequence` is its number in its stream. A message that was not heard but read is `stored`. `body` is its JSON, None if the
    taps have no bodies, or if it is not what its kind should be: then `fault` says why.
    """

    at_s: float
    kind: str
    subject: str
    sequence: int
    info: dict[str, Any]
    body: dict[str, Any] | None = None
    fault: str = ""
    stored: bool = False

    def line(self, *, bodies: bool) -> dict[str, Any]:
        """Return it as the JSON object that `atoll tap` prints."""
        told = {"at_s": round(self.at_s, 3), "kind": self.kind, "subject": self.subject, "sequence": self.sequence}
        more = {"stored": True} if self.stored else {}
        content = ({"body": self.body} | ({"fault": self.fault} if self.fault else {})) if bodies else {}
        return {**told, **more, "info": self.info, **content}


class TapReader:
    """A reader of one run: `listen`, then iterate over `messages`.

    Nothing keeps taps. Of the past the *event log* has every event of the last 30 days, in order and with numbers; of the kinds
    in `KEPT` the broker keeps the last of each subject. Contributions of the past are in neither: the `round` event says what
    became of them.

    A reader that began with the past takes events from the log, by their numbers, and taps of events only tell it that there is
    news. So no event is lost or told twice, also if the connection breaks or the reader is slow. Other messages are lost where
    the reader is slower than the run: the feed has a bound, and drops the oldest.
    """

    def __init__(self, bus: Bus, run: str, clock: Clock, selection: Selection, *, tail: str = ">") -> None:
        """Hear nothing yet. `tail` is a filter of subjects below the tap, beside what the selection says."""
        self.bodiless = 0
        self._feed: Subscription
        self._bus = bus
        self._subjects = Subjects(run)
        self._clock = clock
        self._selection = selection
        self._tail = tail
        self._after = 0

    async def listen(self) -> None:
        """Hear the taps from now on; `messages` tells what was heard."""
        self._feed = await self._bus.listen(self._subjects.tap(self._wanted()), len_max=FEED_LEN_MAX)

    async def messages(self, since_s: float | None, *, follow: bool = True) -> AsyncIterator[TapMessage | None]:
        """Yield what is wanted, and None at least every `POLL_S` while there is nothing.

        Args:
            since_s: begin with how things stand, and with the events since then (seconds since the epoch, by the clocks of
                those who wrote them); None: only what happens from now on.
            follow: go on with what happens; otherwise end with the newest event.
        """
        if since_s is not None:
            async for message in self.last_messages():
                yield message
            self._after = await self._before(since_s)
            async for message in self._events():
                yield message
        looked_s = self._clock.monotonic()
        while follow:
            core_message = await self._feed.next(POLL_S)
            is_event = core_message is not None and core_message.subject.startswith(self._subjects.tap("ev."))
            if since_s is not None and (is_event or self._clock.monotonic() - looked_s > LOOK_S):
                # The next look brings what an absent broker could not say.
                with contextlib.suppress(BusError, BrokerUnavailable):
                    async for message in self._events():
                        yield message
                looked_s = self._clock.monotonic()
            from_log = is_event and since_s is not None
            yield None if core_message is None or from_log else self._read_heard(core_message)

    async def last_messages(self) -> AsyncIterator[TapMessage]:
        """Yield the last message of every subject of which the broker keeps one, as far as wanted."""
        for tap in (tap for name in KEPT for tap in self._selection.taps if tap.kind == name):
            try:
                records = await self._bus.get_records(f"{self._subjects.prefix}.{tap.pattern}")
            except RunReplaced:  # a run of old keeps no heartbeats, one that is not founded nothing
                continue
            for record in records:
                tail = record.subject.removeprefix(f"{self._subjects.prefix}.")
                if message := self._message(tap, tail, record.data, record.revision):
                    yield message

    def _wanted(self) -> str:
        wanted = self._selection.taps
        return wanted[0].pattern if self._tail == ">" and len(wanted) == 1 else self._tail

    def _read_heard(self, core_message: CoreMessage) -> TapMessage | None:
        tail = core_message.subject.removeprefix(self._subjects.tap(""))
        tap = kind_of(tail)
        if tap is None:
            return None
        self.bodiless += not core_message.data
        headers = core_message.headers
        number = headers.get("Nats-Sequence", "")
        sequence = int(number) if number.isdecimal() and len(number) <= NUMBER_LEN_MAX else 0
        return self._message(tap, tail, core_message.data, sequence, headers)

    def _message(
        self, tap: TapKind, tail: str, data: bytes, sequence: int, headers: Mapping[str, str] | None = None
    ) -> TapMessage | None:
        """Return a message as it is told, None if it is not wanted; one that was heard has headers, one that was read none."""
        if not matches(self._tail, tail):
            return None
        body, fault = None, ""
        if data:
            try:
                body = body_of(tap, tail, data)
            except PeerMisbehaved as error:
                fault = f"{error.what}: {error.got}"
        info = {} if headers is None else _info(headers.get(INFO_HEADER, ""))
        if not self._selection.takes(tap, tail, info if body is None else body):
            return None
        heard_s = None if headers is None else unix_s(headers.get(STORED_AT, "")) or self._clock.wall()
        at_s = _written_s(body or {}) if heard_s is None else heard_s
        return TapMessage(at_s, tap.kind, tail, sequence, info, body, fault, stored=headers is None)

    # --- the event log ------------------------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[TapMessage]:
        wanted = self._selection.taps
        kind = wanted[0].kind if len(wanted) == 1 and wanted[0].fields is not None else "*"
        if not any(tap.fields for tap in wanted):
            return
        while True:
            page = await self._page(kind, self._after, PAGE_EVENTS)
            for entry in page:
                self._after = max(self._after, entry.sequence)
                tail = entry.subject.removeprefix(f"{self._subjects.prefix}.")
                tap = kind_of(tail)
                if tap is not None and (message := self._message(tap, tail, entry.data, entry.sequence)):
                    yield message
            if len(page) < PAGE_EVENTS:
                return

    async def _before(self, since_s: float) -> int:
        """Return a number in the event log after which the events since then begin.

        The log has no index of times, but its times grow with its numbers. So halving finds the place, with at most twice
        as many requests as the log's length has bits. It is the broker's time: no writer can lead the search astray.
        """
        first = await self._written(0)
        if first is None or first[1] >= since_s:
            return 0
        low, step = first[0], 1
        while (found := await self._written(low + step)) is not None and found[1] < since_s:
            low, step = found[0], 2 * step
        high = low + step
        while low < high:
            middle = (low + high) // 2
            found = await self._written(middle)
            if found is None or found[1] >= since_s:
                high = middle
            else:
                low = found[0]
        return low

    async def _written(self, after: int) -> tuple[int, float] | None:
        """Return number and time of the first event after a number, by the writer's clock only if the broker says no time."""
        while found := await self._page("*", after, 1):
            after, stored_s = found[0].sequence, found[0].stored_s
            if stored_s is not None:
                return after, stored_s
            with contextlib.suppress(PeerMisbehaved):
                return after, event_of(found[0].subject, found[0].data).at_s
        return None

    async def _page(self, kind: str, after: int, limit: int) -> list[StoredEvent]:
        try:
            return await self._bus.replay(self._subjects.event(kind, "*"), after=after, limit=limit)
        except RunReplaced:
            return []


def _written_s(body: Mapping[str, Any]) -> float:
    """Return when a message says that it was written, 0 if it does not; a field that is none of its kind may hold anything."""
    times = (body.get(name) for name in WRITTEN)
    return next((float(one) for one in times if isinstance(one, int | float) and 0.0 <= one <= MOMENT_MAX), 0.0)


def _info(text: str) -> dict[str, Any]:
    try:
        return json_object(text or "{}")
    except msgspec.MsgspecError:
        return {}


DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
SIGNATURE_NOTE: Final = (
    "In a locked run every message but events ends in a line break and `signed:` with a signature. "
    "Take off what follows the last line break; the rest is the JSON."
)
_COMPONENTS: Final = "#/components/schemas/{name}"
_LEVELS: Final = {
    "run": "The id of the run.",
    "fragment": "The number of a fragment, from 0.",
    "shard": "The number of a synchronizer shard, from 0.",
    "learner": "The id of a learner.",
    "process": "The name of a synchronizer process.",
    "who": "Who wrote the event: a learner, `shard-<number>`, a synchronizer process, or `evaluator`.",
}
_HEADERS: Final = {
    "Nats-Stream": "The stream that stored the message.",
    "Nats-Subject": "The subject on which it was stored.",
    "Nats-Sequence": "Its number in the stream.",
    "Nats-Time-Stamp": "When the broker stored it (RFC 3339, UTC).",
    "Nats-Msg-Id": "The id by which the broker knows it again.",
    "Atoll-Info": "A few numbers and short texts of the message, as a JSON object of at most 4,096 bytes.",
}


def asyncapi() -> dict[str, Any]:
    """Return the AsyncAPI 3 document of the taps of a run, for readers in other languages.

    It is made from the code that reads and writes the messages, in AsyncAPI's dialect (a superset of JSON Schema draft 7).
    """
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Taps of an Atoll run",
            "version": f"{TAPS_VERSION}.0.0",
            "description": (
                "What a run of Atoll stores, as it happens: read-only, without tensors. Fields and kinds may be added in any "
                f"release, so pass over those that you do not know. Runs of wire version {spoken_versions()} (`schema` "
                f"of the run record). {SIGNATURE_NOTE}"
            ),
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "broker": {
                "host": "{host}:{port}",
                "protocol": "nats",
                "description": "The home broker of the run. A further broker (`bulk`) has the heads of its own fragments.",
                "variables": {"host": {"default": "127.0.0.1"}, "port": {"default": str(PORT)}},
            }
        },
        "channels": {tap.kind: _channel(tap) for tap in TAPS},
        "operations": {
            f"read_{tap.kind}": {
                "action": "receive",
                "channel": {"$ref": f"#/channels/{tap.kind}"},
                "summary": tap.about,
            }
            for tap in TAPS
        },
        "components": {
            "messages": {tap.kind: _message(tap) for tap in TAPS},
            "schemas": {name: _draft_7(schema) for name, schema in schemas(_COMPONENTS).items()},
        },
    }


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return a JSON Schema of each kind of message, by kind."""
    return {
        tap.kind: {
            "$schema": DRAFT,
            "title": tap.kind,
            "description": tap.about,
            "$ref": f"#/$defs/{schema_name(tap)}",
            "$defs": schemas("#/$defs/{name}", (tap,)),
        }
        for tap in TAPS
    }


def schema_name(tap: TapKind) -> str:
    """Return under which name the schema of a kind of message stands."""
    return tap.message.__name__ if tap.fields is None else f"{tap.kind.capitalize()}Event"


def schemas(ref_template: str, taps: Sequence[TapKind] = TAPS) -> dict[str, dict[str, Any]]:
    """Return the schemas of messages and of what is in them, by name; references are made by `ref_template`."""
    kinds = [*{tap.message for tap in taps}, *{tap.fields for tap in taps if tap.fields is not None}]
    _, found = msgspec.json.schema_components(sorted(kinds, key=lambda kind: kind.__name__), ref_template=ref_template)
    # In the dialect of schemas a pattern cannot name all that ours refuses.
    components: dict[str, dict[str, Any]] = json.loads(json.dumps(found).replace(json.dumps(UNSEEN_BEYOND)[1:-1], ""))
    for name, schema in components.items():
        if "schema" in (properties := schema.get("properties", {})):
            properties["schema"] |= {"minimum": oldest_of(name), "maximum": SCHEMA_NEWEST}
    envelope = components.pop("Event", {})
    for tap in taps:
        if tap.fields is None:
            continue
        name = f"{tap.kind.capitalize()}Fields"
        components[name] = components.pop(tap.fields.__name__)
        properties = {"kind": {"const": tap.kind}, "fields": {"$ref": ref_template.format(name=name)}}
        components[schema_name(tap)] = envelope | {
            "title": schema_name(tap),
            "description": tap.about,
            "properties": envelope["properties"] | properties,
        }
    return dict(sorted(components.items()))


def _channel(tap: TapKind) -> dict[str, Any]:
    levels = ["run", *(level[1:-1] for level in tap.subject.split(".") if level.startswith("<"))]
    return {
        "address": f"atoll.{{run}}.tap.{tap.subject}".replace("<", "{").replace(">", "}"),
        "description": tap.about,
        "parameters": {level: {"description": _LEVELS[level]} for level in levels},
        "messages": {tap.kind: {"$ref": f"#/components/messages/{tap.kind}"}},
    }


def _message(tap: TapKind) -> dict[str, Any]:
    headers = {name: {"type": "string", "description": about} for name, about in _HEADERS.items()}
    return {
        "name": tap.kind,
        "title": schema_name(tap),
        "summary": tap.about,
        "contentType": "application/json",
        "headers": {
            "type": "object",
            "properties": headers,
            "required": ["Nats-Stream", "Nats-Subject", "Nats-Sequence"],
        },
        "payload": {"$ref": _COMPONENTS.format(name=schema_name(tap))},
    }


def _draft_7(node: Any) -> Any:  # noqa: ANN401  (a piece of JSON)
    """Return a schema in draft 7, where the first items of an array are written in another way."""
    if isinstance(node, list):
        return [_draft_7(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    names = {"prefixItems": "items", "items": "additionalItems"} if "prefixItems" in node else {}
    return {names.get(key, key): _draft_7(inner) for key, inner in node.items()}
