"""A whole run inside one process: shards and learners on the in-memory bus, around one loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import BlobGone
from atoll.base.parsing import parsed
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.join import IslandHandle, join
from atoll.client.options import Encode, JoinOptions
from atoll.protocol.ledger import LEDGER_BYTES_MAX, FragmentLedger, Ledger, settle
from atoll.protocol.quarantine import OTHERS_MIN
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import read_heads
from atoll.run.merged_model import MergedModel, read_merged
from atoll.run.record import read_run
from atoll.settings.sections import ArchiveSettings
from atoll.wire.events import event_of
from atoll.wire.subjects import Subjects
from atoll_synchronizer.process import serve_run
from support.events import closing_ledger
from support.islands import check_heads

STEP_S = 0.004

MEAN = {"merge": "mean", "outer_lr": 1.0, "outer_momentum": 0.0, "correction": "none"}
"""The outer step that takes the mean of what learners reached, for tests that rest on exact values."""


def settings(**changes: object) -> ProtocolSettings:
    base: dict[str, object] = {
        "fragments": 4,
        "interval_steps": 6,
        "shards": 2,
        "silence_s": 2.0,
        "tokens_target": 6_000,
        "outlier_ratio": 0.0,  # a toy is where it pulls to after few steps: its lengths say nothing
    }
    return msgspec.convert(base | changes, ProtocolSettings).check()


def parameters(value: float = 0.0, width: int = 6) -> dict[str, jax.Array]:
    """Return a small pytree of float32 arrays."""
    return {
        "a": jnp.full((width, 3), value, dtype=jnp.float32),
        "b": jnp.full((5,), value, dtype=jnp.float32),
        "c": jnp.full((), value, dtype=jnp.float32),
    }


class MemoryWorld:
    """One broker, one loop for everybody, shards as futures, learners as threads."""

    def __init__(
        self, run: str, protocol: ProtocolSettings, encode: Encode = "auto", archive: ArchiveSettings | None = None
    ) -> None:
        """Start the shards; they wait for the founder. Learners `encode` where it says; an `archive` may retain rounds."""
        self.run, self.protocol, self.encode = run, protocol, encode
        self.broker = MemoryBroker()
        self.home = LoopThread("world")
        self.shards = [
            self.home.submit(serve_run(self.bus, run, shard=s, archive=archive, own_outer=protocol.outer))
            for s in range(protocol.shards)
        ]
        self.final: dict[str, Any] = {}
        self.errors: list[BaseException] = []

    async def bus(self) -> Bus:
        """Open one more bus on the shared broker."""
        return MemoryBus(self.run, self.broker)

    def join(self, learner: str, params: dict[str, jax.Array] | None = None, **options: Any) -> IslandHandle:  # noqa: ANN401
        """Join as `learner`, with options of `JoinOptions`."""
        given = parameters() if params is None else params
        return join(
            self.bus,
            run=self.run,
            learner=learner,
            params=given,
            protocol=self.protocol,
            options=JoinOptions(home=self.home, encode=self.encode, **options),
        )

    def train(
        self,
        learner: str,
        towards: float,
        pace: float = 1.0,
        steps_max: int = 100_000,
        at_each_step: Callable[[], None] = lambda: None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Pull every parameter towards a value until the run is over; 10 tokens a step; with options of `JoinOptions`."""
        with self.join(learner, **options) as island:
            params = island.params
            steps = 0
            while not island.done and steps < steps_max:
                params = jax.tree.map(lambda leaf: leaf + 0.05 * (towards - leaf), params)
                time.sleep(STEP_S * pace)
                at_each_step()
                params = island.step(params, tokens=10, loss=1.0)
                steps += 1
            self.final[learner] = params

    def go(self, *work: Callable[[], None]) -> None:
        """Run the learners side by side to their end, then wait for the shards."""

        def guarded(one: Callable[[], None]) -> None:
            try:
                one()
            except Exception as error:  # noqa: BLE001  (whatever ends a learner's thread fails the test)
                self.errors.append(error)

        # A learner that never ends fails the test; it must not keep the process from ending, too.
        threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240.0)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in threads), "a learner has not ended"
        assert [shard.result(timeout=240.0) for shard in self.shards] == ["token target reached"] * len(self.shards)

    def merged(self) -> MergedModel:
        """Return the run's values as a reader finds them."""

        async def read() -> MergedModel:
            bus = await self.bus()
            record = await read_run(bus, Subjects(self.run))
            assert record is not None
            return await read_merged(bus, record)

        return self.home.submit(read()).result(240.0)

    def ledger(self) -> Ledger:
        """Return all shards' closing ledgers, added together."""

        async def read() -> Ledger:
            bus = await self.bus()
            entries = await bus.replay(Subjects(self.run).event("ledger", "*"))
            heads = await bus.get_records(Subjects(self.run).head("*"))
            await bus.close()
            ledger = closing_ledger(event_of(entry.subject, entry.data) for entry in entries)
            check_heads(settle(ledger, self.protocol.fragments), heads)
            return ledger

        return self.home.submit(read()).result(240.0)

    def versions(self) -> dict[int, int]:
        """Return the newest version of each fragment."""

        async def read() -> dict[int, int]:
            bus = await self.bus()
            record = await read_run(bus, Subjects(self.run))
            assert record is not None
            return {fragment: head.version for fragment, head in (await read_heads(bus, record)).items()}

        return self.home.submit(read()).result(240.0)

    def usual(self) -> bool:
        """Return whether the shards know of every fragment what is usual, and not from the learner "mad" alone."""

        async def read() -> list[FragmentLedger]:
            bus = await self.bus()
            record = await read_run(bus, Subjects(self.run))
            assert record is not None
            heads = await read_heads(bus, record)
            refs = [head.fragment_ledger for head in heads.values() if head.fragment_ledger is not None]
            return [parsed(await bus.get_blob(ref, LEDGER_BYTES_MAX), FragmentLedger) for ref in refs]

        try:
            fragment_ledger = self.home.submit(read()).result(240.0)
        except BlobGone:  # a commit wrote newer ledgers between the two reads
            return False
        known = [each for each in fragment_ledger if len(each.lengths.keys() - {"mad"}) >= OTHERS_MIN]
        return len(known) == self.protocol.fragments and all(each.has_merged("mad", 1) for each in known)
