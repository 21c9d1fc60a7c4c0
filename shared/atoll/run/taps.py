"""What is on the taps of a run: each kind of message, its subject and its fields.

A *tap* is a message that the broker says again, under `tap.`, when a stream has stored it. Who listens there sees a run as it
happens, in the words that its processes use among themselves, and can neither change nor delay it. Tensors are on no tap.

    run            gl.run                               the run record
    head           gl.head.<fragment>                   a version of a fragment that became visible
    contribution   up.m.<shard>.<fragment>.<learner>    the manifest of a pseudo-gradient
    goodbye        up.m.<shard>.bye.<learner>           a learner leaves; its last heartbeat
    member         mb.learner.<learner>                 an incarnation that joined or left
    beat           hb.<learner>                         a learner's heartbeat
    presence       sy.<process>                         a synchronizer process, and its shards
    round, …       ev.<kind>.<who>                      an event of the event log; its kind is that of the event

The kinds here are the words of `atoll tap --kind`, and the names in the AsyncAPI document (`atoll.run.tap_schema`). A reader
passes over a kind and over a field that it does not know. `TAPS_VERSION` is that of this table: it grows when something that
was here goes or changes its meaning. Messages have the run's wire version in `schema` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from atoll.base.docstrings import summary
from atoll.base.errors import PeerMisbehaved, SettingsError
from atoll.base.parsing import fault_of, parsed
from atoll.run.event_fields import EVENT_FIELDS, fields_of
from atoll.wire.event_log import event_of
from atoll.wire.messages import Beat, Contribution, Event, Head, Member, Presence, RunRecord, decode
from atoll.wire.signature_line import without_signature
from atoll.wire.subjects import matches

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
    fields: type[msgspec.Struct] | None = None

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
    """Return what an event tells of: the first paragraph of its fields' description, behind the colon."""
    told = summary(fields.__doc__).partition(": ")[2]
    return told[:1].upper() + told[1:]


_EVENTS: Final = tuple(
    TapKind(kind, f"ev.{kind}.<who>", Event, _about(fields), fields) for kind, fields in EVENT_FIELDS.items()
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
    """Return whether a JSON value has at most so many levels, and whole numbers of at most 64 bits."""
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_within(each, levels - 1) for each in inner)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages somebody wants: of these kinds, about one of these learners and one of these fragments; empty: all."""

    kinds: frozenset[str] = frozenset()
    learners: frozenset[str] = frozenset()
    fragments: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Refuse kinds that are none."""
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

    def takes(self, tap: TapKind, tail: str, told: Mapping[str, Any]) -> bool:
        """Return whether a message is wanted; `told` is its body or, where the taps have none, its `info`."""
        if self.kinds and tap.kind not in self.kinds:
            return False
        levels = tap.levels(tail)
        fields = told.get("fields")
        if not isinstance(fields, dict):
            fields = told
        if self.fragments and self.fragments.isdisjoint(_fragments(levels, fields)):
            return False
        return not self.learners or not self.learners.isdisjoint(_learners(levels, fields))


def _fragments(levels: Mapping[str, str], fields: Mapping[str, Any]) -> set[int]:
    """Return the fragments that a message is about: its own, and those of contributions that were refused."""
    refusals = fields.get("refusals")
    named = [levels.get("fragment"), fields.get("fragment")]
    named += [one.get("fragment") for one in refusals if isinstance(one, dict)] if isinstance(refusals, list) else []
    return {int(text) for one in named if (text := str(one)).isdecimal() and len(text) <= NUMBER_LEN_MAX}


def _learners(levels: Mapping[str, str], fields: Mapping[str, Any]) -> set[str]:
    """Return the learners that a message is about: its writer, and those that a round, a head or a refusal names."""
    named = {levels.get("learner", ""), levels.get("who", ""), str(fields.get("learner", ""))}
    for many in ("contributors", "included", "refusals"):
        entries = fields.get(many)
        for entry in entries if isinstance(entries, list) else ():
            # A head lists learners as arrays or objects, as its schema says.
            named.add(str(entry.get("learner", "")) if isinstance(entry, dict) else str(entry))
    return named - {""}
