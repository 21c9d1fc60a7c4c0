"""Commands out: one lane per fragment executes that fragment's commands strictly in the order the machine gave them.

A commit sees every fold before it, and an acknowledgement never overtakes its commit. Lanes of different fragments run
side by side. While the broker is away a lane waits and tries again; it never skips. After a refused compare-and-set a
lane does nothing more, because another process owns the shard.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from atoll.base.clock import Clock
from atoll.base.errors import RecordConflict, StorageFull
from atoll.base.retry import patiently
from atoll.protocol.events import (
    Acknowledge,
    Commit,
    CommitRefused,
    Committed,
    Dismiss,
    Fact,
    Fold,
    Keep,
    Kept,
    Unfold,
)
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.pending import PendingAcknowledgements
from atoll_synchronizer.retention import Retention
from atoll_synchronizer.round_report import CommitSize, CommitTimes, RoundNotes, RoundReporter
from atoll_synchronizer.store import ShardStore

LaneCommand = Fold | Unfold | Commit | Keep | Acknowledge | Dismiss


@dataclass(frozen=True, slots=True)
class LaneTools:
    """Tools of the lanes: tensors, durable state, unsettled deliveries, the report of finished work, and what is retained."""

    aggregator: Aggregator
    store: ShardStore
    pending: PendingAcknowledgements
    report: RoundReporter
    retention: Retention | None = None


class FragmentLanes:
    """The lanes of one tenure; `tell` receives the results of commits."""

    def __init__(self, fragments: Iterable[int], tools: LaneTools, clock: Clock, tell: Callable[[Fact], None]) -> None:
        """Begin with empty lanes; `work` empties one."""
        self._tools = tools
        self._clock = clock
        self._tell = tell
        self._lanes: dict[int, asyncio.Queue[tuple[LaneCommand, float]]] = {p: asyncio.Queue() for p in fragments}
        self.commits = 0

    def put(self, command: LaneCommand) -> None:
        """Queue a command behind all earlier commands of its fragment."""
        fragment = command.key.fragment if isinstance(command, Fold | Acknowledge) else command.fragment
        self._lanes[fragment].put_nowait((command, self._clock.monotonic()))

    async def empty(self) -> None:
        """Wait until everything is executed."""
        await asyncio.gather(*(lane.join() for lane in self._lanes.values()))

    async def work(self, fragment: int) -> None:
        """Execute one fragment's commands; when a write is refused, tell the machine and raise `RecordConflict`."""
        lane = self._lanes[fragment]
        try:
            while True:
                command, put_s = await lane.get()
                await self._execute(command, put_s)
                lane.task_done()
        except RecordConflict as error:
            self._tell(CommitRefused(at_s=self._clock.monotonic(), fragment=fragment, reason=str(error)))
            raise

    async def _execute(self, command: LaneCommand, put_s: float) -> None:
        tools = self._tools
        if isinstance(command, Fold):
            await tools.aggregator.fold(command, tools.store.holdings[command.key.fragment].state)
            tools.pending.tell_clip(command)
            if tools.retention is not None:
                tools.retention.folded(command)
        elif isinstance(command, Unfold):
            tools.aggregator.unfold(command.fragment)
            if tools.retention is not None:
                tools.retention.unfolded(command.fragment)
        elif isinstance(command, Acknowledge):
            await tools.pending.acknowledge(command)
            if tools.retention is not None:
                tools.retention.forget(command.key)
        elif isinstance(command, Dismiss):
            await tools.pending.dismiss(command)
        elif isinstance(command, Keep):
            await patiently(lambda: tools.store.keep(command.fragment, command.fragment_ledger), "a fragment's ledger")
            self._tell(Kept(at_s=self._clock.monotonic(), fragment=command.fragment, cause_id=command.cause_id))
        elif isinstance(command, Commit):
            await self._commit(command, put_s)

    async def _commit(self, command: Commit, decided_s: float) -> None:
        began_s, tools = self._clock.monotonic(), self._tools
        before_s = tools.report.away_since_call_s(command.fragment)
        state = tools.store.holdings[command.fragment].state
        merged = await tools.aggregator.merged(command.fragment, state, command.base_version + 1)
        effects = await tools.aggregator.effects(command.fragment, merged)
        compress = tools.aggregator.is_answer_compressed(command.fragment)
        merged_s, hindered, retaining = self._clock.monotonic(), defaultdict[str, float](float), None
        away_s = tools.report.away_s()

        def hinder(error: Exception, seconds: float) -> None:
            hindered["full" if isinstance(error, StorageFull) else "away"] += seconds

        if tools.retention is not None:
            retaining = partial(tools.retention.round, folds=tools.retention.take_folds(command.fragment))
        bytes_down = await patiently(
            lambda: tools.store.commit(command, merged.pseudo_gradient, merged.memory, retaining, compress=compress),
            "a commit",
            hindered=hinder,
        )
        now_s = self._clock.monotonic()
        # A request may outlast the time without a broker, and then no attempt has failed.
        waited_s = round(min(now_s - merged_s, tools.report.away_s() - away_s), 3)
        if waited_s:
            hindered["away"] = max(hindered["away"], waited_s)
        self.commits += 1
        known = {share.key: tools.pending.contributions.get(share.key) for share in command.shares}
        held = {key: one for key, one in known.items() if one is not None}
        bytes_up = sum(one.manifest.blob.size_bytes for one in held.values())
        fragment, version = command.fragment, command.base_version + 1
        self._tell(Committed(at_s=now_s, fragment=fragment, version=version, cause_id=command.cause_id))
        times = CommitTimes(decided_s, began_s, merged_s, now_s)
        size = CommitSize(bytes_up, bytes_down, merged.pseudo_gradient.size)
        await tools.report.record_commit(
            command, times, size, merged.judgements, RoundNotes(held, effects, hindered, before_s)
        )
