"""The shard's store as the service has it, step for step: fence and load, commit, keep, purge.

The order of effects is `atoll_synchronizer.store`'s: chunks of frame, state and books (in any order among themselves),
the head by compare-and-set, then the purge of what was superseded (at once, where production lets it lie for a while) and,
once, of what former epochs left. A frame holds no numbers here but its descent: what it was made from and which
contributions were folded into it, so that a head can be asked whether it tells the truth.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from typing import Any

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import Commit, PushKey, Share
from atoll.protocol.fragment_ledger import FragmentLedger, thawed
from atoll.protocol.ledger import Ledger
from atoll.sim.dst.broker import Full, Gone, Record
from atoll.sim.dst.line import Conflict, Line, Unavailable
from atoll.sim.dst.process import Work

LOAD_ATTEMPTS = 4
COMMITS_BEFORE_SWEEP = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """Global values of a fragment, by descent: the frame before and the contributions folded into it."""

    parent: str
    folded: frozenset[PushKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The record that makes a version visible; blobs are named by their stems, "" where there is none."""

    fragment: int
    version: int
    epoch: int
    frame: str
    state: str = ""
    fragment_ledger: str = ""
    previous: str = ""
    included: tuple[Share, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the stems that a reader of this head may ask for."""
        return tuple(stem for stem in (self.frame, self.state, self.fragment_ledger) if stem)


@dataclass(slots=True)
class Holding:
    """One fragment as its owner holds it; `commits` counts those of this tenure."""

    head: Head
    revision: int
    before: str = ""
    commits: int = 0


def head_name(fragment: int) -> str:
    """Return the name of a fragment's head record."""
    return f"head/{fragment}"


class Store:
    """Loads and commits the fragments of one shard for one owner."""

    def __init__(self, line: Line, fragments: tuple[int, ...], dice: random.Random) -> None:
        """Hold nothing yet; `open` loads."""
        self._line = line
        self._fragments = fragments
        self._dice = dice
        self.epoch = 0
        self.holdings: dict[int, Holding] = {}
        self.fragment_ledger: dict[int, FragmentLedger] = {}
        self._litter: list[str] = []

    def open(self, epoch: int) -> Work:
        """Begin the tenure `epoch`: fence every head, then load what it names."""
        self.epoch = epoch
        for fragment in self._fragments:
            self.holdings[fragment] = yield from self._load(fragment)

    def commit(self, command: Commit, folded: frozenset[PushKey]) -> Work:
        """Make the next version visible with its books. May be repeated."""
        held = self.holdings[command.fragment]
        if held.head.version != command.base_version:
            raise ProtocolMisuse("a commit on another version than the one we hold", got=(held.head.version, command))
        p, version = command.fragment, command.base_version + 1
        nonce = self._nonce(command.fragment_ledger)
        frame, state, fragment_ledger = f"gl/{p}/{version}/{nonce}", f"st/{p}/{version}/{nonce}", f"bk/{p}/-/{nonce}"
        chunks: list[tuple[str, object]] = [
            (frame, Frame(held.head.frame, folded)),
            (state, Frame(held.head.frame, folded)),
            (fragment_ledger, command.fragment_ledger),
        ]
        self._dice.shuffle(chunks)
        for stem, payload in chunks:
            yield from self._line.ask(self._line.broker.put_blob, stem, payload)
        head = Head(
            fragment=p,
            version=version,
            epoch=self.epoch,
            frame=frame,
            state=state,
            fragment_ledger=fragment_ledger,
            previous=held.head.frame,
            included=command.shares,
        )
        try:
            revision = yield from self._write(head, held.revision)
        except Conflict:
            yield from self._disown(p, (frame, state, fragment_ledger))
            raise
        made = held.commits + 1
        self.holdings[p] = Holding(head, revision, held.head.frame, made)
        self.fragment_ledger[p] = thawed(command.fragment_ledger)
        yield from self._purge(held.before, held.head.state, held.head.fragment_ledger)
        if made == COMMITS_BEFORE_SWEEP:
            yield from self._purge(*(f"*/{p}/*/{epoch}.*" for epoch in range(1, self.epoch)))

    def keep(self, fragment: int, fragment_ledger: bytes) -> Work:
        """Make the books of a fragment durable with the version it has."""
        held = self.holdings[fragment]
        stem = f"bk/{fragment}/-/{self._nonce(fragment_ledger)}"
        yield from self._line.ask(self._line.broker.put_blob, stem, fragment_ledger)
        head = replace(held.head, fragment_ledger=stem)
        held.revision = yield from self._write(head, held.revision)
        held.head, former = head, held.head.fragment_ledger
        self.fragment_ledger[fragment] = thawed(fragment_ledger)
        if former not in ("", stem):
            yield from self._purge(former)

    def ledger(self, told: Ledger) -> Ledger:
        """Return the fates that are durable in this shard's books, with the newest of what learners have `told`."""
        ledger = Ledger()
        for fragment_ledger in self.fragment_ledger.values():
            fragment_ledger.enter_into(ledger)
        ledger.learn(told)
        return ledger

    def _nonce(self, fragment_ledger: bytes) -> str:
        return f"{self.epoch}.{hashlib.blake2b(fragment_ledger, digest_size=6).hexdigest()}"

    def _write(self, head: Head, revision: int) -> Work:
        """Write a head by compare-and-set; an earlier attempt whose answer was lost counts as this one."""
        name = head_name(head.fragment)
        try:
            return (yield from self._line.put_record(name, head, revision))
        except Conflict:
            there: Record = yield from self._line.ask(self._line.broker.get, name)
            if there.value != head:
                raise
            return there.revision

    def _purge(self, *superseded: str) -> Work:
        """Remove chunks that no head names any more: housekeeping, which never makes a commit fail."""
        stems = [*self._litter, *(stem for stem in superseded if stem)]
        self._litter.clear()
        for done, stem in enumerate(stems):
            try:
                yield from self._line.ask(self._line.broker.purge, stem)
            except (Unavailable, Full):
                self._litter += stems[done:]
                return

    def _disown(self, fragment: int, stems: tuple[str, ...]) -> Work:
        """Remove what a refused commit had stored, unless a head names it: one of ours, fenced by whoever came later."""
        try:
            record: Record = yield from self._line.ask(self._line.broker.get, head_name(fragment))
        except Unavailable:
            return
        head: Head = record.value
        if not {*head.names, head.previous} & set(stems):
            yield from self._purge(*stems)

    def _fence(self, fragment: int) -> Work:
        """Write the head again with our epoch; return it with its revision."""
        name = head_name(fragment)
        while True:
            record: Record = yield from self._line.ask(self._line.broker.get, name)
            head: Head = record.value
            if head.epoch > self.epoch:
                raise Conflict(name)
            fenced = replace(head, epoch=self.epoch)
            try:
                revision = yield from self._write(fenced, record.revision)
            except Conflict:
                self._line.network.tally["fences repeated"] += 1
                continue
            return fenced, revision

    def _load(self, fragment: int) -> Work:
        """Fence a fragment and read what its head names."""
        for _ in range(LOAD_ATTEMPTS):
            head, revision = yield from self._fence(fragment)
            try:
                for stem in head.names:
                    payload: Any = yield from self._line.ask(self._line.broker.get_blob, stem)
                    if stem == head.fragment_ledger:
                        self.fragment_ledger[fragment] = thawed(payload)
            except Gone:
                continue
            return Holding(head, revision, before=head.previous)
        raise Unavailable
