"""What a permitted learner may send, and what it must not be able to do to the others with that: rows for a run that trains.

The door lets all of it through (`support.door_attacks` has what it does not). The attacker has a key, a member record and
heartbeats like anybody; its contributions are whole frames on the newest base, and its accounts are right. A row has got in if
anything of an honest learner was refused other than for being late (`honest_refusals`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, BlobGone
from atoll.bus.interface import Bus
from atoll.client.membership import claim
from atoll.codec import FrameEncoder, Framing
from atoll.protocol.fragment_ledger import LEDGER_BYTES_MAX, FragmentLedger
from atoll.run.heads import read_head, read_heads
from atoll.run.inline_frames import is_inline
from atoll.run.ledger import read_fragment_ledger
from atoll.wire.blobs import Upload
from atoll.wire.messages import Beat, Contribution, Member, RunRecord, encode

LATE: Final = frozenset({"stale", "chunks_gone"})


@dataclass(frozen=True, slots=True)
class MemberAttack:
    """One row: contributions of this length (L2 per element), said to be of so many steps, `final` or not."""

    name: str
    length: float
    steps: int = 20
    final: bool = False


MEMBER_ATTACKS: Final = (
    MemberAttack("tiny contributions make honest ones outliers", 1e-6),
    MemberAttack("tiny final contributions make honest ones outliers", 1e-6, final=True),
    MemberAttack("tiny contributions of ten times the steps", 1e-6, steps=200),
    MemberAttack("contributions of great length move the limit", 1.0),
)


@dataclass(slots=True)
class Attacker:
    """A member of a run that sends what it likes; `tokens` is what it says to have trained, `pushed` counts token-fragments."""

    bus: Bus
    run: RunRecord
    member: Member
    pushes: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    pushed: int = 0

    @classmethod
    async def join(cls, bus: Bus, run: RunRecord, learner: str) -> Attacker:
        """Claim a member record."""
        return cls(bus, run, await claim(bus, run.subjects, learner, SystemClock()))

    async def play(self, attack: MemberAttack) -> None:
        """Send one contribution for each fragment, on its newest version, and a heartbeat."""
        self.tokens += 16 * attack.steps
        for fragment, head in (await read_heads(self.bus, self.run)).items():
            # A manifest's place in line may be taken, or the broker full: then this one is not sent.
            with contextlib.suppress(AtollError):
                await self._push(attack, fragment, head.version)
        await self.bus.tell(self.run.subjects.beat(self.member.learner), encode(self._beat()))

    async def _push(self, attack: MemberAttack, fragment: int, version: int) -> None:
        push = self.pushes[fragment] = self.pushes.get(fragment, 0) + 1
        run, name, elements = self.run, self.member.learner, self.run.layout.fragment_sizes()[fragment]
        draw = np.random.default_rng(push)
        vector = (attack.length * draw.standard_normal(elements)).astype(np.float32)
        framing = Framing(elements, run.protocol.of(fragment).codec_up)
        encoder = FrameEncoder(framing, lambda start, stop: vector[start:stop], run.layout.slices(fragment))
        stem, upload, frame = (
            run.subjects.contribution_stem(name, fragment, self.member.incarnation, push),
            Upload(encoder),
            b"",
        )
        if is_inline(run, fragment):
            upload.collision_free = True
            frame = bytes(upload.make(0))
            blob = upload.ref(stem)
        else:
            blob = await self.bus.put_blob(stem, upload)
        manifest = Contribution(
            learner=name,
            incarnation=self.member.incarnation,
            fragment=fragment,
            push=push,
            base_version=version,
            tokens=16 * attack.steps,
            steps=attack.steps,
            trained_tokens=self.tokens,
            loss=1.0,
            norms=tuple(encoder.norms()),
            layout=run.layout.fingerprint,
            run_nonce=run.nonce,
            blob=blob,
            frame=frame,
            final=attack.final,
        )
        place = run.subjects.contribution(run.protocol.shard_of(fragment), fragment, name)
        await self.bus.publish(place, encode(manifest), msg_id=f"{name}-{self.member.incarnation}-{fragment}-{push}")
        self.pushed += 16 * attack.steps

    def _beat(self) -> Beat:
        return Beat(
            learner=self.member.learner,
            incarnation=self.member.incarnation,
            run_nonce=self.run.nonce,
            state="training",
            at_s=SystemClock().wall(),
            step=self.tokens // 16,
            step_s=0.01,
            tokens=self.tokens,
            tokens_per_s=1.0,
            loss=1.0,
            pushed=self.pushed,
            superseded=0,
        )


async def honest_refusals(bus: Bus, run: RunRecord, attackers: Collection[str]) -> dict[str, int]:
    """Return the token-fragments of others than `attackers` that were refused and not late, by `learner: reason`."""
    found: dict[str, int] = {}
    for fragment in range(run.protocol.fragments):
        for name, account in (await _ledger(bus, run, fragment)).settled.items():
            learner = name.rpartition("/")[0]
            for reason, tokens in account.refused.items():
                if learner not in attackers and reason not in LATE:
                    found[f"{learner}: {reason}"] = found.get(f"{learner}: {reason}", 0) + tokens
    return found


async def _ledger(bus: Bus, run: RunRecord, fragment: int) -> FragmentLedger:
    """Return the newest ledger of a fragment; a commit may write a newer one while it is read."""
    while True:
        head = await read_head(bus, run, fragment)
        if head is None or head.fragment_ledger is None:
            return FragmentLedger()
        with contextlib.suppress(BlobGone):
            return read_fragment_ledger(await bus.get_blob(head.fragment_ledger, LEDGER_BYTES_MAX))
