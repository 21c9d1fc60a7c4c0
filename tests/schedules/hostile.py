"""Hostile peers of a schedule: they send until it ends, and everything that must happen must happen all the same.

    messages   whoever reaches the broker: every attack of `support.attacks`, and honest messages with absurd values
    learner    one with a member record: lying heartbeats, and manifests that name what is not there or claim too much
    records    whoever may write records: leases and member records become junk

They speak to the broker directly: their messages are neither delayed nor lost. A queue that has no room for them says so, and
they do not mind.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atoll.base.errors import AtollError
from atoll.bus.interface import CoreMessage
from atoll.bus.streams import stream_plan
from atoll.wire.messages import Member, encode
from fuzzing.mutators import mutated_json
from support.attacks import ATTACKS, HostileMessage, beat, manifest

if TYPE_CHECKING:
    from atoll.wire.messages import RunRecord
    from schedules.broker import WatchedStream
    from schedules.world import World

LIAR = "z"
HOSTILE = "hostile-"
"""How the ids of hostile messages begin: the world knows them by that, and production does not look."""
JUNK = (b"", b"{}", b"[" * 2000, b"\x00" * 64, b'{"schema":99}')
SPOILED_MAX = 12


class HostilePeers:
    """The hostile peers of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._dice = random.Random(f"{world.seed}/hostile")
        self._numbers = itertools.count(1)
        self._begun: set[str] = set()
        self._spoiled = 0

    def begin(self, kind: str, rate: float) -> None:
        """Begin to send messages of a kind, `rate` a second, unless that has begun."""
        if kind not in self._begun:
            self._begun.add(kind)
            self.world.loop.after(0.0, self._send, kind, 1.0 / rate)

    def _send(self, kind: str, pause_s: float) -> None:
        run = self.world.safety.run
        if self.world.over.done():
            return
        self.world.loop.after(pause_s * (0.5 + self._dice.random()), self._send, kind, pause_s)
        if run is None or not self.world.broker.up:
            return
        if kind == "hostile records":
            self._spoil(run)
            return
        message = self._lie(run) if kind == "hostile learner" else self._attack(run)
        self.world.tally["hostile messages sent"] += 1
        self._deliver(run, message)

    def _attack(self, run: RunRecord) -> HostileMessage:
        """Return a message of an attack, or an honest one with absurd values."""
        name = self._dice.choice(list(ATTACKS))
        sent = _nth(ATTACKS[name](run), self._dice.randrange(40))
        if self._dice.random() < 0.5 and sent.data and not sent.data.startswith(b"["):
            return sent._replace(data=mutated_json(sent.data, self._dice))
        return sent

    def _lie(self, run: RunRecord) -> HostileMessage:
        dice, s = self._dice, run.subjects
        if not self._stream(s.member(LIAR)).subjects(s.member(LIAR)):
            member = Member(learner=LIAR, incarnation=1, nonce="z", host="z", pid=1, claimed_at_s=0.0)
            self._store(s.member(LIAR), encode(member))
        act = dice.randrange(4)
        if act == 0:
            changes: dict[str, Any] = {
                "tokens": dice.choice((0, 10, 1 << 48)),
                "step_s": dice.choice((0.0, 1e-9, 1e12)),
            }
            changes |= {
                "pushed": dice.choice((0, 5, 1 << 60)),
                "state": dice.choice(("training", "draining", "joining")),
            }
            return HostileMessage(s.beat(LIAR), beat(run, LIAR, **changes))
        fragment, push = dice.randrange(run.protocol.fragments), next(self._numbers)
        stem = s.contribution_stem(LIAR, fragment, 1, push, f"{push:016x}")
        blob = {"stem": stem, "chunks": 1, "size_bytes": 64, "digest": "0" * 32}
        known = self.world.safety.versions.get(fragment)
        version = (0 if known is None else known.number) + dice.choice((-2, 0, 0, 1, 1 << 40))
        lie = manifest(
            run,
            LIAR,
            fragment=fragment,
            push=push,
            base_version=max(0, version),
            tokens=dice.choice((1, 80, 1 << 48)),
            steps=dice.choice((0, 1, 8, 1 << 40)),
            trained_tokens=dice.choice((0, 100)),
            blob=blob,
            final=dice.random() < 0.2,
        )
        return lie._replace(subject=s.contribution(run.protocol.shard_of(fragment), fragment, LIAR))

    def _spoil(self, run: RunRecord) -> None:
        """Write junk over a lease or a member record; heads, the run record and the data ledger are the run itself."""
        if self._spoiled >= SPOILED_MAX:
            return
        self._spoiled += 1
        s, dice = run.subjects, self._dice
        learner = dice.choice(sorted(self.world.safety.members) or [LIAR])
        lease = s.lease(dice.randrange(run.protocol.shards))
        self.world.tally["records spoiled"] += 1
        self._store(dice.choice((lease, s.member(learner))), dice.choice(JUNK))

    def _deliver(self, run: RunRecord, message: HostileMessage) -> None:
        """Publish a message; one on a subject that a stream keeps is stored as well."""
        if not message.subject.startswith(f"{run.subjects.prefix}.up.m."):
            self.world.broker.core_message(CoreMessage(message.subject, message.data, headers=dict(message.headers)))
            return
        try:
            self._store(message.subject, message.data)
        except AtollError:
            self.world.tally["hostile messages refused by the queue"] += 1

    def _stream(self, subject: str) -> WatchedStream:
        return self.world.broker.stream(stream_plan(self.world.run), subject)

    def _store(self, subject: str, data: bytes) -> None:
        self._stream(subject).store(subject, data, f"{HOSTILE}{next(self._numbers)}", info={})


def _nth(messages: Iterator[HostileMessage], number: int) -> HostileMessage:
    *_, last = itertools.islice(messages, number + 1)
    return last
