"""The owner of a shard whose answers a test chooses (`atoll_synchronizer.shard_context.ShardOwner`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from atoll.protocol.events import Fact
from atoll.protocol.ledger import Ledger
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Contribution, Head, RunRecord

DIGEST = "0" * 32


@dataclass
class FixedOwner:
    """Everybody is of region `eu`; facts go to `hear`, and work goes on until the test ends."""

    hear: Callable[[Fact], object] = lambda _: None
    live: frozenset[str] = frozenset("a")
    median_s: float = 0.01
    head: Head | None = None
    ledger: Ledger = field(default_factory=Ledger)
    works: list[asyncio.Task[None]] = field(default_factory=list)
    settled: list[Contribution] = field(default_factory=list)

    def tell(self, fact: Fact) -> None:
        self.hear(fact)

    def spawn(self, *works: Coroutine[Any, Any, None]) -> None:
        self.works += [asyncio.ensure_future(work) for work in works]

    def note_settled(self, manifest: Contribution) -> None:
        self.settled.append(manifest)

    def ledger_now(self) -> Ledger:
        return self.ledger

    def step_s(self) -> float:
        return self.median_s

    def live_in(self, region: str) -> set[str]:
        del region
        return set(self.live)

    def region_of(self, learner: str) -> str:
        del learner
        return "eu"

    def head_of(self, fragment: int) -> Head:
        assert self.head is not None, fragment
        return self.head

    def norm_of(self, fragment: int) -> float:
        del fragment
        return 1.0


def first_head(run: RunRecord) -> Head:
    """Return the head that a founder writes for fragment 0."""
    keyframe = BlobRef(run.subjects.global_stem(0, 0, "f"), 1, 8, DIGEST)
    return Head(
        fragment=0,
        version=0,
        epoch=1,
        nonce="f",
        layout=run.layout.fingerprint,
        keyframe=keyframe,
        key_version=0,
        digest=DIGEST,
    )
