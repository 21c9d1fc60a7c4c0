"""Planted bugs: named patches of the machines and of the drivers' order of effects, each of which must be caught.

A simulation that finds nothing proves nothing until it is shown what it would find.
Some of these were real: those say so, and each stands for a fault that once was in the code (docs/lab/LOG.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from atoll.protocol.events import (
    Acknowledge,
    Action,
    ArmTimer,
    Commit,
    ContributionReady,
    Event,
    Keep,
    LearnerLeft,
    TimerFired,
)
from atoll.protocol.fragment_ledger import FragmentLedger, SettledPushes
from atoll.protocol.fragment_slot import FragmentSlot
from atoll.protocol.ledger import Ledger
from atoll.protocol.round import FragmentRound, Offer
from atoll.protocol.shard import Shard
from atoll.protocol.tenure import LeaseSeen, Tenure
from atoll.sim.dst.broker import Gone, NoReader, Record
from atoll.sim.dst.faults import Faults
from atoll.sim.dst.learner import Learner
from atoll.sim.dst.line import Line
from atoll.sim.dst.owner import Owner
from atoll.sim.dst.process import Work
from atoll.sim.dst.reader import Reader
from atoll.sim.dst.schedule import play
from atoll.sim.dst.store import Frame, Head, Holding, Store, head_name

HANDLE, FOLD_ALL, FOLD = Shard.handle, Shard._fold, FragmentRound.fold  # noqa: SLF001  (patches know what they patch)
ENTER, SEEN, WRITE = FragmentLedger.enter_into, Tenure._seen, Store._write  # noqa: SLF001
COMMIT, PUT, SEND = Store.commit, Line.put_record, Learner._send  # noqa: SLF001


def forget_settled(self: SettledPushes, push: int) -> None:
    """Nothing is remembered, so a redelivery is taken for new."""
    del self, push


def any_base(self: FragmentRound, offer: Offer) -> str:
    """Too old and too new are folded as well."""
    del self, offer
    return ""


def acknowledge_when_ready(self: Shard, event: Event) -> list[Action]:
    """A contribution is acknowledged when it becomes ready, before its commit."""
    actions = HANDLE(self, event)
    early = [Acknowledge(key=event.key, fate="merged")] if isinstance(event, ContributionReady) else []
    return [*early, *actions]


def fold_twice(self: FragmentRound, offer: Offer, cause_id: str) -> Action:
    """A folded contribution is listed twice."""
    command = FOLD(self, offer, cause_id)
    self.shares.append(self.shares[-1])
    return command


def open_too_early(self: Shard, slot: FragmentSlot, ready: list[Offer], at_s: float, cause_id: str) -> list[Action]:
    """A final contribution opens its round before the others that waited with it are folded."""
    return [action for offer in ready for action in FOLD_ALL(self, slot, [offer], at_s, cause_id)]


def acknowledge_unkept(self: Shard, event: Event) -> list[Action]:
    """Refusals are acknowledged before anything durable knows of them."""
    actions = HANDLE(self, event)
    return actions if isinstance(event, LearnerLeft) else [each for each in actions if not isinstance(each, Keep)]


def dismiss_unkept(self: Shard, event: Event) -> list[Action]:
    """Farewells are dismissed before anything durable knows of them."""
    actions = HANDLE(self, event)
    return [each for each in actions if not isinstance(each, Keep)] if isinstance(event, LearnerLeft) else actions


def books_of_later(self: Shard, event: Event) -> list[Action]:
    """Books are kept as they stand when all that a fact led to is decided, even commits that never happen. It was real."""
    return [
        replace(each, fragment_ledger=self.slots[each.fragment].fragment_ledger.frozen(self.ledger))
        if isinstance(each, Keep)
        else each
        for each in HANDLE(self, event)
    ]


def reports_only(self: FragmentLedger, ledger: Ledger) -> None:
    """An heir takes over what learners reported, and not what was settled."""
    ENTER(FragmentLedger(reports=self.reports), ledger)


def reports_forgotten(self: FragmentLedger, ledger: Ledger) -> bytes:
    """The books do not carry what learners reported."""
    del ledger
    return msgspec.json.encode(FragmentLedger(self.settled))


def early_timer_lost(self: Shard, event: Event) -> list[Action]:
    """A due timer that fires a tick early is not armed again: the fragment rests for ever. It was real."""
    actions = HANDLE(self, event)
    if isinstance(event, TimerFired) and event.name.startswith("due/") and len(actions) == 1:
        return [each for each in actions if not (isinstance(each, ArmTimer) and each.name == event.name)]
    return actions


def steal(self: Tenure, fact: LeaseSeen) -> list[Action]:
    """A candidate takes any lease it sees, however fresh, and does not fence (see `no_fence`)."""
    return SEEN(self, replace(fact, released=fact.released or not fact.ours))


def never_expires(self: Tenure, fact: LeaseSeen) -> list[Action]:
    """Only a lease that was released is taken; that of a dead owner is respected for ever."""
    self.moved_s = fact.at_s
    return SEEN(self, fact)


def no_fence(self: Store, fragment: int) -> Work:
    """A new owner reads the head without writing its epoch into it."""
    record: Record = yield from self._line.ask(self._line.broker.get, head_name(fragment))
    return record.value, record.revision


def load_before_fence(self: Store, fragment: int) -> Work:
    """A new owner reads the books first and fences then: a commit between the two is forgotten."""
    record: Record = yield from self._line.ask(self._line.broker.get, head_name(fragment))
    head: Head = record.value
    if head.fragment_ledger:
        try:
            payload = yield from self._line.ask(self._line.broker.get_blob, head.fragment_ledger)
        except Gone:
            return (yield from load_before_fence(self, fragment))
        self.fragment_ledger[fragment] = msgspec.json.decode(payload, type=FragmentLedger)
    fenced, revision = yield from self._fence(fragment)
    return Holding(fenced, revision, before=fenced.previous)


def overwrite(self: Line, name: str, value: object, expected: int) -> Work:
    """Heads are written whatever their revision is: the epoch and the fence are not checked."""
    if name.startswith("head/"):
        there: Record = yield from self.ask(self.broker.get, name)
        expected = there.revision
    return (yield from PUT(self, name, value, expected))


def head_first(self: Store, command: Commit, folded: frozenset[Any]) -> Work:
    """The head becomes visible before the chunks it names are durable."""
    held = self.holdings[command.fragment]
    p, version = command.fragment, command.base_version + 1
    nonce = self._nonce(command.fragment_ledger)
    stems = (f"gl/{p}/{version}/{nonce}", f"st/{p}/{version}/{nonce}", f"bk/{p}/-/{nonce}")
    head = replace(
        held.head, version=version, frame=stems[0], state=stems[1], fragment_ledger=stems[2], included=command.shares
    )
    revision = yield from self._write(head, held.revision)
    frame = Frame(held.head.frame, folded)
    for stem, payload in zip(stems, (frame, frame, command.fragment_ledger), strict=True):
        yield from self._line.ask(self._line.broker.put_blob, stem, payload)
    self.holdings[p] = Holding(head, revision, before=held.head.frame)


def purge_first(self: Store, command: Commit, folded: frozenset[Any]) -> Work:
    """What a commit supersedes is deleted before the new head is visible."""
    head = self.holdings[command.fragment].head
    yield from self._purge(head.state, head.fragment_ledger)
    yield from COMMIT(self, command, folded)


def purge_when_refused(self: Store, fragment: int, stems: tuple[str, ...]) -> Work:
    """A commit that was refused deletes its chunks, although a fence may stand on them. It was real."""
    del fragment
    yield from self._purge(*stems)


def repeat_commit(self: Store, *superseded: str) -> Work:
    """Purging is part of the commit: when it fails, the commit is done again. It was real."""
    for stem in superseded:
        if stem:
            yield from self._line.ask(self._line.broker.purge, stem)


def removed_reader_waits(self: Reader) -> Work:
    """An owner whose reader was removed goes on owning, without ever reading again. It was real."""
    try:
        return (yield from self._line.ask(self._line.broker.is_drained, self._queue, self._name))
    except NoReader:
        return False


def books_not_read(self: Store, fragment: int) -> Work:
    """An heir begins with empty books: what comes again after the takeover is new to it."""
    head, revision = yield from self._fence(fragment)
    return Holding(head, revision, before=head.previous)


def acknowledge_apart(self: Owner, fragment: int, action: Action) -> None:
    """Acknowledgements do not wait in the lane behind the commit and the books that they rest on."""
    if isinstance(action, Acknowledge):
        self.process.spawn(self._guarded(self._acknowledge(action)), self.scope)
        return
    self._waiting += 1
    self._lanes[fragment].put(action)


def leave_early(self: Learner) -> Work:
    """A learner says farewell without having pushed what it holds."""
    machine = self.machine
    if machine is not None:
        for interval in machine.intervals.values():
            interval.from_tokens = machine.tokens
    self.state = "draining"
    yield from DRAIN(self)


DRAIN = Learner._drain  # noqa: SLF001

WEATHER: dict[str, Faults] = {
    "opened too early": Faults(drains_per_min=20.0, joins_per_min=30.0, delay_s=0.3),
    "books of a later moment": Faults(spoiled=0.2, acts_to_crash=60, delay_s=0.1),
    "purge is part of the commit": Faults(full_disks_per_min=12.0, delay_s=0.1),
    "early timer lost": Faults(drift=0.2),
    "removed reader stays owner": Faults(acts_to_freeze=20, freeze_s=6.0),
    "purge of a refused commit": Faults(lost_answers=0.3, partitions_per_min=20.0, delay_s=0.1),
    "books read before the fence": Faults(acts_to_freeze=60, freeze_s=6.0, clock_jumps_per_min=12.0, delay_s=0.1),
}
"""What makes a rare bug likely: the faults it needs, often, and no others."""

Patch = tuple[Any, str, Callable[..., Any]]

BUGS: dict[str, tuple[Patch, ...]] = {
    "no dedupe": ((SettledPushes, "note", forget_settled),),
    "any base": ((FragmentRound, "refusal", any_base),),
    "ack before commit": ((Shard, "handle", acknowledge_when_ready),),
    "counted twice": ((FragmentRound, "fold", fold_twice),),
    "opened too early": ((Shard, "_fold", open_too_early),),
    "refusal acked before kept": ((Shard, "handle", acknowledge_unkept),),
    "farewell dismissed before kept": ((Shard, "handle", dismiss_unkept),),
    "acks beside the lane": ((Owner, "_enqueue", acknowledge_apart),),
    "books of a later moment": ((Shard, "handle", books_of_later),),
    "lost fates": ((FragmentLedger, "enter_into", reports_only),),
    "lost reports": ((FragmentLedger, "frozen", reports_forgotten),),
    "books not read at takeover": ((Store, "_load", books_not_read),),
    "books read before the fence": ((Store, "_load", load_before_fence),),
    "no fence": ((Store, "_fence", no_fence),),
    "revision not checked": ((Line, "put_record", overwrite),),
    "lease stolen, no fence": ((Tenure, "_seen", steal), (Store, "_fence", no_fence)),
    "lease never expires": ((Tenure, "_seen", never_expires),),
    "head before chunks": ((Store, "commit", head_first),),
    "purge before head": ((Store, "commit", purge_first),),
    "purge of a refused commit": ((Store, "_disown", purge_when_refused),),
    "purge is part of the commit": ((Store, "_purge", repeat_commit),),
    "removed reader stays owner": ((Reader, "is_drained", removed_reader_waits),),
    "early timer lost": ((Shard, "handle", early_timer_lost),),
    "farewell before pushes": ((Learner, "_drain", leave_early),),
}


@contextlib.contextmanager
def planted(bug: str) -> Iterator[None]:
    """Patch `bug` in for the length of a block."""
    patches = BUGS[bug]
    originals = [(target, name, getattr(target, name)) for target, name, _ in patches]
    try:
        for target, name, patch in patches:
            setattr(target, name, patch)
        yield
    finally:
        for target, name, original in originals:
            setattr(target, name, original)


@dataclass(frozen=True, slots=True)
class Caught:
    """How many schedules, and seconds, it took until `bug` broke a promise; `violation` is empty when it never did."""

    bug: str
    schedules: int
    took_s: float
    kind: str
    violation: str


def hunt(bug: str, first: int, schedules_max: int) -> Caught:
    """Play schedules from seed `first` with `bug` planted, in its `WEATHER` if it has one, until one fails."""
    began_s = time.monotonic()
    with planted(bug):
        for played in range(schedules_max):
            outcome = play(first + played, weather=WEATHER.get(bug))
            if outcome.violation:
                return Caught(bug, played + 1, time.monotonic() - began_s, outcome.kind, outcome.violation)
    return Caught(bug, schedules_max, time.monotonic() - began_s, "", "")
