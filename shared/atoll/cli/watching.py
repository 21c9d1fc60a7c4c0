"""How `atoll status` and `atoll top` follow a run: its record, and a view that heartbeats and events keep current."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from atoll.cli.reading import opened

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.base.clock import Clock
    from atoll.bus.interface import Bus
    from atoll.local.console import ConsolePicture
    from atoll.protocol.settings import ProtocolSettings
    from atoll.run.timeline import TimedView
    from atoll.run.view import RunView
    from atoll.run.watch import Watch
    from atoll.settings import Settings
    from atoll.wire.messages import RunRecord

BEATS_HEARD: Final = 2.5
"""For how many heartbeats' time a verb that looks once waits for a silent process: two make a pace."""
LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """A run that is followed; `began_s` is when that began, by `clock`, and `following` ends only by an error."""

    run: str
    bus: Bus
    record: RunRecord
    view: TimedView
    watch: Watch
    clock: Clock
    began_s: float
    following: asyncio.Task[None]

    async def hear(self) -> None:
        """Wait until nobody is missing any more (`all_heard`); for a silent process so long as it takes to tell."""
        until_s = self.clock.monotonic() + BEATS_HEARD * heartbeat_pause_s_max(self.record.protocol)

        def hears_on() -> bool:
            waits = self.clock.monotonic() < until_s and not self.following.done()
            return waits and not all_heard(self.record, self.view)

        # A view tells nobody that it has changed.
        while hears_on():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def picture(self) -> ConsolePicture:
        """Return the run as it is now."""
        from atoll.local.console import ConsolePicture  # noqa: PLC0415  (a verb loads what it needs when it runs)

        return ConsolePicture(self.view, self.run, self.record.protocol, self.began_s, self.clock.monotonic())


def all_heard(record: RunRecord, view: RunView) -> bool:
    """Return whether nobody is missing: there are two heartbeats of each learner that has not left, and an owner of each shard.

    Two heartbeats make a pace. In a run that has reached its end a shard that has closed its ledger is not missing.
    """
    protocol, lives = record.protocol, [(learner, learner.latest) for learner in view.learners.values()]
    there = [learner for learner, life in lives if life is not None and not life.left]
    known = {shard for host in view.hosts.values() if host.heard_s is not None for shard in host.owns}
    if ended := record.closing or 0 < protocol.tokens_target <= view.run_tokens:
        known |= {shard for shard in range(protocol.shards) if f"shard-{shard}" in view.closed}
    heard = all(learner.present_s > 0.0 for learner in there)
    return bool(there or ended) and heard and known >= set(range(protocol.shards))


def heartbeat_pause_s_max(protocol: ProtocolSettings) -> float:
    """Return the longest pause between two heartbeats of a live process, learner or host, in seconds."""
    from atoll.protocol.balance import BEATS_PER_LEASE  # noqa: PLC0415
    from atoll.protocol.pacing import BEATS_PER_SILENCE  # noqa: PLC0415

    return max(protocol.silence_s / BEATS_PER_SILENCE, protocol.lease_s / BEATS_PER_LEASE)


@asynccontextmanager
async def watched(settings: Settings, verb: str, out: Path | None = None) -> AsyncIterator[WatchedRun]:
    """Follow a run while the block runs; its event log has been read when that begins. `out` is its folder, if it has one.

    Raises:
        SettingsError: nobody has founded the run.
        AtollError: what ended the following.
    """
    from atoll.base.clock import SystemClock  # noqa: PLC0415
    from atoll.run.timeline import TimedView  # noqa: PLC0415
    from atoll.run.watch import Watch  # noqa: PLC0415

    clock, view = SystemClock(), TimedView()
    async with opened(settings, verb) as bus:
        record = await _record(bus, settings.run, out)
        watch = Watch(bus, settings.run, view, clock)
        following = asyncio.create_task(watch.follow())
        try:
            await watch.catch_up()
            yield WatchedRun(settings.run, bus, record, view, watch, clock, clock.monotonic(), following)
            if following.done():
                following.result()
        finally:
            following.cancel()


async def _record(bus: Bus, run: str, out: Path | None) -> RunRecord:
    """Return the record of a run; raise `SettingsError` if it is not founded, which takes the `atoll up` of `out` a while."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.run.record import founded_run, read_run  # noqa: PLC0415
    from atoll.wire.subjects import Subjects  # noqa: PLC0415

    if out is None:
        return await founded_run(bus, run)
    record = await read_run(bus, Subjects(run))
    if record is None:
        raise SettingsError(
            "the run of this folder is still being founded, or ended before it was",
            got=f"{out} without a run record",
            todo="try again in some seconds: the first learner of `atoll up` founds the run once it has its model",
        )
    return record
