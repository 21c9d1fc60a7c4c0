"""Founds a run, or joins one that exists.

There is no initialisation step. The first learner to arrive writes the run record by compare-and-set (layout, protocol
settings, seed, fingerprint of the data), then version 0 of every fragment from its own parameters. Every other learner,
including one that lost this race, reads the record, checks that its own model has the same layout, and adopts the
heads. If a founder dies before the heads are complete, another learner with the same layout completes them once no further one
has appeared for a while, and says so if the founder began with other values than its own. Heads are created with revision 0, so
a head that exists is never replaced. A founder that was only slow, and finds a head of other values in the place of its own,
stops.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from atoll.base.buffer_pool import Vector
from atoll.base.errors import AccessDenied, BrokerUnavailable, RecordConflict
from atoll.base.identity import Identity, this_process
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.model.layout import Layout
from atoll.model.pytrees import gather
from atoll.run.delta_chain import digest_of_values, keyframe_of
from atoll.run.heads import head_info
from atoll.run.record import check_run, read_run
from atoll.wire.blobs import Upload
from atoll.wire.messages import Head, RunRecord, decode, encode
from atoll.wire.subjects import Subjects

log = get(__name__)

FOUNDED_S: Final = 600.0
ASKED_EVERY_S: Final = 0.5
TOLD_EVERY_S: Final = 30.0
WHO_FOUNDS: Final = "start a learner that founds (`atoll keys add NAME --run RUN --founds`), or correct the run id"


class Origin(Mapping[int, Vector]):
    """The parameters that a founder brings, flat by fragment; each fragment is built when it is read."""

    def __init__(self, layout: Layout, leaves: Mapping[str, Any]) -> None:
        self._layout = layout
        self._leaves = leaves

    def in_layout(self, layout: Layout) -> Origin:
        """Return the same parameters in another division."""
        return Origin(layout, self._leaves)

    def __getitem__(self, fragment: int) -> Vector:
        return gather(self._layout, self._leaves, fragment)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._layout.fragments)))

    def __len__(self) -> int:
        return len(self._layout.fragments)


async def await_founding(bus: Bus, subjects: Subjects) -> None:
    """Return once the run is founded: what a learner does whose identity may not found it (`atoll.keys`).

    Raises:
        AccessDenied: nobody did within `FOUNDED_S`.
    """
    if await read_run(bus, subjects) is not None:
        return
    now_s = asyncio.get_running_loop().time
    deadline_s = now_s() + FOUNDED_S
    try:
        async with asyncio.timeout(FOUNDED_S):
            while not await _founded_within(bus, subjects, TOLD_EVERY_S, left_s=deadline_s - now_s()):
                pass
    except TimeoutError:
        raise AccessDenied(
            f"nobody has founded run {subjects.run!r}, and this identity may not",
            got=f"no run record for {FOUNDED_S:g} s",
            allowed="a learner that founds",
            todo=WHO_FOUNDS,
        ) from None


async def _founded_within(bus: Bus, subjects: Subjects, within_s: float, *, left_s: float) -> bool:
    """Say that we wait and for whom, and return whether somebody founds the run within so many seconds."""
    why = "nobody has founded this run, and our identity may not"
    log.warning("run.awaited", run=subjects.run, why=why, todo=WHO_FOUNDS, trying_for_s=round(left_s))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while await read_run(bus, subjects) is None:  # noqa: ASYNC110  (a record sets no event)
                await asyncio.sleep(ASKED_EVERY_S)
            return True
    return False


async def found_or_join(bus: Bus, offer: RunRecord) -> tuple[RunRecord, bool]:
    """Write `offer` as the run record, or return the existing one; the flag says whether we are the founder.

    Raises:
        LayoutMismatch: the run exists with another model or other data.
    """
    try:
        await bus.put_record(offer.subjects.run_record, encode(offer), expected=0, info={"run": offer.run})
    except RecordConflict:
        return await check_run(bus, offer), False
    return offer, True


async def publish_origin(
    bus: Bus, run: RunRecord, values: Mapping[int, Vector], identity: Identity | None = None
) -> list[int]:
    """Make version 0 of every fragment visible, wherever no head exists yet; return those with a head of other values.

    Raises:
        BrokerUnavailable: the run is being rebuilt from an archive; fresh values would replace trained ones.
    """
    if run.rebuilt is not None:
        raise BrokerUnavailable(
            f"run {run.run!r} is being rebuilt from its archive and is not complete yet",
            got=f"checkpoint {run.rebuilt.checkpoint} of founding {run.rebuilt.source}",
            todo="start every synchronizer shard with --restore, then the learners",
        )
    identity, others = identity or this_process(), []
    for fragment in values:
        reconnects = bus.reconnects(run.subjects.head(fragment))
        nonce, vector = identity.nonce(4), await asyncio.to_thread(values.__getitem__, fragment)
        keyframe = await bus.put_blob(run.subjects.global_stem(fragment, 0, nonce), Upload(keyframe_of(vector)))
        bus.stats.frame_bytes_up += keyframe.size_bytes
        head = Head(
            fragment=fragment,
            version=0,
            epoch=0,
            nonce=nonce,
            layout=run.layout.fingerprint,
            keyframe=keyframe,
            key_version=0,
            digest=await asyncio.to_thread(digest_of_values, vector),
        )
        try:
            await bus.put_record(
                run.subjects.head(fragment), encode(head), expected=0, info=head_info(head), reconnects=reconnects
            )
        except RecordConflict:
            if await _disown(bus, run, fragment, head):
                others.append(fragment)
    return others


def warn_of_mixture(run: RunRecord, others: Collection[int]) -> None:
    """Say that a model begins from the values of two learners: a run must begin though its founder is gone."""
    if others:
        log.warning(
            "run.mixed",
            founder=run.founder,
            fragments=f"{len(others)} of {len(run.layout.fragments)}",
            why="its founder is gone, and began it with other values than those with which we have completed it",
            todo=f"where initial values matter: stop all learners, `atoll runs remove {run.run}`, and found it anew",
        )


async def _disown(bus: Bus, run: RunRecord, fragment: int, ours: Head) -> bool:
    """Remove our keyframe if another's head is there in its place; return whether that is of other values, as far as it tells.

    The answer to our write may have been lost, and a shard's fence may already have updated that head.
    """
    record, keyframe = await bus.get_record(run.subjects.head(fragment)), ours.keyframe
    head = None if record is None else decode(Head, record.data)
    if head is None or keyframe in (head.keyframe, *head.superseded):
        return False
    await bus.purge(f"{keyframe.stem}.*")
    return head.version == 0 and head.digest != ours.digest
