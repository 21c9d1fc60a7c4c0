"""A synchronizer and learners of a rendered deployment that only say that they live, with their own identities."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from atoll import __version__
from atoll.bus.interface import Bus
from atoll.wire.messages import Beat, Member, Presence, encode
from atoll.wire.subjects import Subjects
from support.deployments import open_signed
from support.events import heartbeat

BEAT_S = 0.05


@asynccontextmanager
async def saying(
    run: str,
    out: Path,
    urls: tuple[str, str],
    learners: Sequence[str],
    *,
    left: Sequence[str] = (),
    software: str = __version__,
) -> AsyncIterator[None]:
    """Let synchronizer-1 and some learners of region `home` say again and again that they live; some have left.

    `urls` are the broker's addresses for the hub, and for the region.
    """
    subjects = Subjects(run)
    shard = await open_signed(urls[0], run, out / "hub/services/synchronizer-1/identity.toml")
    buses: dict[str, Bus] = {}
    for name in (*learners, *left):
        bus = buses[name] = await open_signed(urls[1], run, out / f"home/services/{name}/identity.toml")
        member = Member(
            learner=name,
            incarnation=1,
            nonce="n",
            host="h",
            pid=1,
            claimed_at_s=0.0,
            left=name in left,
            software=software,
        )
        there = await bus.get_record(subjects.member(name))
        await bus.put_record(subjects.member(name), encode(member), expected=there.revision if there else 0)
    talking = asyncio.ensure_future(_say(shard, {name: buses[name] for name in learners}, subjects, software))
    try:
        yield
    finally:
        talking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await talking
        for bus in (shard, *buses.values()):
            await bus.close()


async def _say(shard: Bus, buses: dict[str, Bus], subjects: Subjects, software: str) -> None:
    presence = Presence(name="h-1", wants=(0, 1), owns=(0, 1), host="h", pid=1, software=software)
    while True:
        await shard.tell(subjects.presence("h-1"), encode(presence))
        for name, bus in buses.items():
            await bus.tell(subjects.beat(name), encode(beat_of(name)))
        await asyncio.sleep(BEAT_S)


def beat_of(name: str) -> Beat:
    """Return a heartbeat of a learner that trains."""
    return heartbeat(name, run_nonce="first", step=1, step_s=0.1, tokens=1, tokens_per_s=1.0, loss=None)
