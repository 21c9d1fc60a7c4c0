"""The rounds of a run as its event log shows them: why each waited, and what caused what. Reading changes nothing.

The words are those of `atoll.protocol.reasons`. This module puts them beside the measurements, and joins the causes to
a chain:

    call ──► contributions ──► commit ──► head ──► adoption

No event says that a learner has adopted a version. Its next contribution shows it, because that names its version.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.parsing import parsed
from atoll.bus.interface import Bus
from atoll.protocol.reasons import id_of
from atoll.run.view import RoundLine, RunView
from atoll.wire.messages import Event, decode
from atoll.wire.subjects import Subjects

PAGE_EVENTS = 1000


class WaitingEvent(msgspec.Struct, frozen=True):
    """The fields of a `waiting` event: a round that is to make `version` was called again, and why."""

    fragment: int
    version: int
    why: str
    cause_id: str = ""


class RoundHistory:
    """The rounds in the event log, in order, and the newest `waiting` event of each round that still waits."""

    def __init__(self) -> None:
        """Start without rounds."""
        self._view = RunView()
        self._waiting: dict[tuple[int, int], WaitingEvent] = {}

    @property
    def rounds(self) -> list[RoundLine]:
        """Return all known rounds, the oldest first."""
        return list(self._view.rounds)

    async def read(self, bus: Bus, subjects: Subjects) -> None:
        """Read the event log from its beginning."""
        for kind in ("round", "waiting"):
            after = 0
            while True:
                page = await bus.replay(subjects.event(kind, "*"), after=after, limit=PAGE_EVENTS)
                for entry in page:
                    after = max(after, entry.sequence)
                    self.take(entry.data)
                if len(page) < PAGE_EVENTS:
                    break

    def take(self, data: bytes) -> None:
        """Take one event; an unreadable one is skipped."""
        try:
            event = decode(Event, data)
            if event.kind == "waiting":
                told = parsed(msgspec.json.encode(event.fields), WaitingEvent)
                self._waiting[told.fragment, told.version] = told
            else:
                self._view.on_event(event)
        except (PeerMisbehaved, msgspec.MsgspecError):
            self._view.unreadable += 1

    def find(self, fragment: int, version: int | None = None) -> RoundLine | None:
        """Return the round that made `version` of a fragment, or its newest one."""
        found = [line for line in self._view.rounds if line.round.fragment == fragment]
        if version is None:
            return found[-1] if found else None
        return next((line for line in reversed(found) if line.round.version == version), None)

    def waiting(self, fragment: int, version: int) -> WaitingEvent | None:
        """Return the newest `waiting` event of the round that is to make `version`, if it was called in vain."""
        return self._waiting.get((fragment, version))

    def slowest(self, count: int) -> list[RoundLine]:
        """Return the rounds that waited longest from their call to their end, the longest first."""
        return sorted(self._view.rounds, key=lambda line: line.round.waited_s, reverse=True)[:count]

    def adopted_by(self, fragment: int, version: int) -> dict[str, str]:
        """Return the learners known to have adopted a version: each with its first contribution on it."""
        found: dict[str, str] = {}
        for line in self._view.rounds:
            for share in line.round.contributors:
                if line.round.fragment == fragment and line.round.version - 1 - share.age == version:
                    push = id_of("push", share.learner, share.incarnation, fragment, share.push)
                    found.setdefault(share.learner, push)
        return found


def one_line(line: RoundLine) -> str:
    """Return a round in one line: its identity, how long it waited, and why it ended."""
    made, why = line.round, line.round.why
    end = made.end if why is None else why.sentences()["end"]
    met = why is None or bool(why.met_by)
    quorum = f"{made.quorum_wait_s:.3f} s to the quorum" if met else "its quorum was never met"
    return f"fragment {made.fragment} version {made.version}: {made.waited_s:.3f} s from call to end ({quorum}); {end}"


def story(history: RoundHistory, line: RoundLine) -> list[str]:
    """Return why one round waited, place by place, and its chain of causes, as lines for a person."""
    made = line.round
    at = datetime.fromtimestamp(line.at_s, UTC).isoformat(sep=" ", timespec="milliseconds")
    head = f"fragment {made.fragment}: version {made.version - 1} became {made.version}, by {line.shard} at {at}"
    return [head, "", "why it waited", *_waits(line), "", "what caused what", *_causes(history, line)]


def _waits(line: RoundLine) -> list[str]:
    made, why = line.round, line.round.why
    if why is None:
        return [f"  not written down; it ended with {made.end!r} {made.waited_s:.3f} s after the call"]
    told, grace_s = why.sentences(), max(0.0, made.waited_s - made.quorum_wait_s)
    places = [
        (why.opening.rested_s, "rest", told["rest"]),
        (made.quorum_wait_s, "quorum", told.get("quorum", "it was never called")),
        (grace_s, "grace", "; ".join(part for part in (told.get("grace"), told["end"]) if part)),
        (made.queued_s, "queue", "from the decision until the shard came to it"),
        (made.merge_s, "merge", f"of {len(made.contributors)} contributions"),
        (made.commit_s, "commit", "outer step, storing, and the head"),
    ]
    return [f"  {name:<7} {seconds:>9.3f} s  {words}" for seconds, name, words in places]


def _causes(history: RoundHistory, line: RoundLine) -> list[str]:
    made, why = line.round, line.round.why
    fragment, version = made.fragment, made.version
    links: list[tuple[str, str, str]] = []
    if why is not None and why.calls:
        again = f"called {why.calls} times" if why.calls > 1 else ""
        links.append((why.opening.cause_id, id_of("call", fragment, version - 1, 1), again))
    for share in made.contributors:
        late = f", {share.age} version{'s' if share.age > 1 else ''} late" if share.age else ""
        push = id_of("push", share.learner, share.incarnation, fragment, share.push)
        links.append((share.cause_id, push, f"{share.tokens:,} tokens{late}"))
    commit, head = id_of("commit", fragment, version), id_of("head", fragment, version)
    links += [(made.cause_id, commit, made.end), (commit, head, "")]
    lines = [f"  {cause or 'unknown':<28} -> {effect:<28} {note}".rstrip() for cause, effect, note in links]
    adopted = history.adopted_by(fragment, version)
    for learner, push in sorted(adopted.items()):
        lines.append(f"  {head:<28} -> adopted by {learner}: {push} is on it")
    if not adopted:
        lines.append(f"  {head:<28} -> no contribution on it is known yet")
    return lines
