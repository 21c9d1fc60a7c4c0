"""The gate of the event log: who writes which kind of event, and what a reader takes for one.

The event log is not signed (`atoll.bus.signed`). On a locked broker a learner may write below its own name only, on an open
broker anybody writes anywhere. So the subject of an event, `ev.<kind>.<who>`, is what a broker vouches for, and its body is a
claim. A reader takes an event through `event_of`, and only there:

* The body names the kind and the writer of its subject. If it names others, it is a forgery.
* A kind has few writers (`EVENT_WRITERS`), and names tell most of them apart: `shard-<number>`, `evaluator`, everybody else.
  A learner that tells of a commit is none of ours.

* Its time is a claim as well, and readers compare the times of all writers: who is silent, what came first, how long the run
  stood. So the broker's clock, which dates every message that it stores, bounds it.

The rights of identities (`atoll.keys.rights`) are made from the same table, so a locked broker and its readers agree. A
kind that is not in the table is of a later release: it passes, and its reader skips it.

Known limitation: no name tells a learner from a synchronizer process, so where the broker is open a learner may write the
`hosted` of one. Readers refuse that of a known learner (`atoll.run.view`); a locked broker refuses that of every learner.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.quantities import FRAGMENTS_MAX
from atoll.wire.messages import Event, decode

EventWriter = Literal["learner", "shard", "synchronizer", "evaluator"]
SHOWN_CHARS_MAX: Final = 120
REMEMBERED: Final = 16
SUBJECTS_MAX: Final = 4096
STORING_S_MAX: Final = 5.0
"""An event is stored within this time; one that waited for its broker longer is dated by when that came back."""
EVALUATOR: Final = "evaluator"
"""The name under which every evaluator writes."""

_SHARD: Final = frozenset[EventWriter]({"shard"})
_LEARNER: Final = frozenset[EventWriter]({"learner"})
_EVALUATOR: Final = frozenset[EventWriter]({"evaluator"})
_SYNCHRONIZER: Final = frozenset[EventWriter]({"synchronizer"})
_PROCESS: Final = frozenset[EventWriter]({"learner", "synchronizer"})

EVENT_WRITERS: Final[dict[str, frozenset[EventWriter]]] = {
    "round": _SHARD,
    "waiting": _SHARD,
    "refused": _SHARD,
    "junk": _SHARD,
    "filled": _SHARD,
    "quarantined": _SHARD,
    "serving": _SHARD,
    "ledger": _SHARD,
    "joined": _LEARNER,
    "recovered": _LEARNER,
    "left": _LEARNER,
    "sample": _LEARNER,
    "moved": _LEARNER,
    "hosted": _SYNCHRONIZER,
    "validation": _EVALUATOR,
    "evaluated": _EVALUATOR,
}
"""The kinds of event of this release, and who writes each."""

_SHARD_NAME: Final = re.compile(r"shard-(0|[1-9][0-9]{0,3})")


def kinds_of(writer: EventWriter) -> tuple[str, ...]:
    """Return the kinds of event that such a process writes."""
    return tuple(kind for kind, writers in EVENT_WRITERS.items() if writer in writers)


def writers_named(name: str) -> frozenset[EventWriter]:
    """Return which processes write under a name; nobody has the name of a shard that no run can have."""
    if name.startswith("shard-"):
        numbered = _SHARD_NAME.fullmatch(name)
        return _SHARD if numbered is not None and int(numbered[1]) < FRAGMENTS_MAX else frozenset()
    return _EVALUATOR if name == EVALUATOR else _PROCESS


def event_of(subject: str, data: bytes, stored_s: float | None = None) -> Event:
    """Return the event in `data`, as it was stored or heard on `subject`, which may be that of a tap.

    Its `at_s` is what `stored_s` bears out, the broker's time of storage: not after it, and at most `STORING_S_MAX` before.

    Raises:
        PeerMisbehaved: it is no event, it stands under a kind or a name that is not its own, or its writer writes no such kind.
    """
    log, kind, who = ["", "", "", *subject.split(".")][-3:]
    if log != "ev":
        raise PeerMisbehaved("an event that is not in the event log", got=subject, allowed="ev.<kind>.<who>")
    event = decode(Event, data)
    if (event.kind, event.who) != (kind, who):
        raise PeerMisbehaved(
            "an event in the name of another", got=f"{event.kind} of {event.who}", allowed=f"{kind} of {who}"
        )
    writers = EVENT_WRITERS.get(kind)
    if writers is not None and not writers & writers_named(who):
        raise PeerMisbehaved("an event that its writer does not write", got=f"{kind} of {who}", allowed=_names(writers))
    if stored_s is None:
        return event
    return msgspec.structs.replace(event, at_s=min(stored_s, max(event.at_s, stored_s - STORING_S_MAX)))


class Repeats:
    """Recent events of a reader, so that it takes an event once although it was stored twice.

    A writer that heard no answer stores its event again, with the same bytes; a broker that remembers ids for long would drop
    the second, and could be made to remember without end (`atoll.bus.streams`).
    """

    def __init__(self) -> None:
        """Have read nothing."""
        self._newest: dict[str, deque[bytes]] = {}

    def repeats(self, subject: str, data: bytes) -> bool:
        """Return whether the same was read on this subject among its last `REMEMBERED` events, and remember it."""
        newest = self._newest.pop(subject, None) or deque(maxlen=REMEMBERED)
        while len(self._newest) >= SUBJECTS_MAX:
            del self._newest[next(iter(self._newest))]
        self._newest[subject] = newest
        digest = hashlib.blake2b(data, digest_size=8).digest()
        if digest in newest:
            return True
        newest.append(digest)
        return False


def event_info(kind: str, fields: Mapping[str, object]) -> dict[str, str | int | float | bool]:
    """Return what taps show of an event: its kind, its numbers and short texts, and of lists how long they are."""
    counted = {name: len(value) if isinstance(value, list | tuple) else value for name, value in fields.items()}
    shown = {name: value for name, value in counted.items() if isinstance(value, int | float | str)}
    return {"kind": kind, **{name: value for name, value in shown.items() if len(str(value)) <= SHOWN_CHARS_MAX}}


def _names(writers: frozenset[EventWriter]) -> str:
    return " or ".join(f"a {writer}" if writer != "evaluator" else "the evaluator" for writer in sorted(writers))
