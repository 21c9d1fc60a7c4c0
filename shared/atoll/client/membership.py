"""Membership in a run: found it or join one that exists, claim a learner id for one process, notice that either is lost.

The first learner to arrive writes the run record by compare-and-set, then version 0 of every fragment from its own parameters.
Every other learner checks that its model has the record's layout, and adopts the heads. If a founder dies before the heads are
complete, another learner completes them once no further one has appeared for a while, and says so if the founder began with
other values. Heads are created with revision 0, so a head that exists is never replaced. A founder that was only slow, and
finds a head of other values in the place of its own, stops.

A learner id has many incarnations, each with the next number in the member record, so that messages of a former one can be told
apart. A newcomer first *asks* whether the present holder is alive. A live holder answers `identify`: the newcomer is refused. A
holder that was killed cannot answer, so a restart under the same id waits one short time-out and no lease has to expire.

A member record that cannot be read does not say which incarnation is next, and neither does one that claims a higher number
than the broker has given to messages. Each incarnation began with a record of its own, so there were never more of them than
that, and the next one is counted from there. Nobody but it writes over such a record: an older incarnation could not know
whether it is still the newest. A holder that was frozen and comes back finds a higher incarnation in the record and stops
(`dismissal`). So does a holder whose run was rebuilt from an archive, or is gone from the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import msgspec

from atoll.base import VERSION
from atoll.base.clock import Clock, Identity, this_process
from atoll.base.errors import (
    AccessDenied,
    AtollError,
    BrokerUnavailable,
    IdentityTaken,
    PeerMisbehaved,
    Quarantined,
    RecordConflict,
    RunReplaced,
)
from atoll.base.large_arrays import Vector
from atoll.base.logs import get
from atoll.bus.interface import Bus, Record
from atoll.model.layout import Layout
from atoll.model.pytrees import gather
from atoll.protocol.ledger import LEDGER_BYTES_MAX
from atoll.run.decisions import ISOLATION_CURE, describe_isolation
from atoll.run.delta_chain import digest_of_values, keyframe_of
from atoll.run.heads import head_info, read_heads
from atoll.run.ledger import read_fragment_ledger
from atoll.run.record import check_run, read_run, readable
from atoll.wire.blobs import Upload
from atoll.wire.messages import Control, Head, Member, RunRecord, decode, encode
from atoll.wire.subjects import Subjects, token

log = get(__name__)

FOUNDED_S: Final = 600.0
ASKED_EVERY_S: Final = 0.5
TOLD_EVERY_S: Final = 30.0
WHO_FOUNDS: Final = "start a learner that founds (`atoll keys add NAME --run RUN --founds`), or correct the run id"
IDENTIFY_TIMEOUT_S = 1.0
CLAIM_ATTEMPTS = 32


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
    """Return once the run is founded, for an identity that may not found it; raise `AccessDenied` after `FOUNDED_S`."""
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
    why = "nobody has founded this run, and our identity may not"
    log.warning("run.awaited", run=subjects.run, why=why, todo=WHO_FOUNDS, trying_for_s=round(left_s))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while await read_run(bus, subjects) is None:  # noqa: ASYNC110  (a record sets no event)
                await asyncio.sleep(ASKED_EVERY_S)
            return True
    return False


async def found_or_join(bus: Bus, offer: RunRecord) -> tuple[RunRecord, bool]:
    """Write `offer` as the run record, or return the existing one; the flag says whether we founded. Raise as `check_run`."""
    try:
        await bus.put_record(offer.subjects.run_record, encode(offer), expected=0, info={"run": offer.run})
    except RecordConflict:
        return await check_run(bus, offer), False
    return offer, True


async def publish_origin(
    bus: Bus, run: RunRecord, values: Mapping[int, Vector], identity: Identity | None = None
) -> list[int]:
    """Make version 0 of every fragment visible, wherever no head exists yet; return those with a head of other values.

    Raises `BrokerUnavailable` for a run that is being rebuilt: fresh values would replace trained ones.
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


async def claim(
    bus: Bus, subjects: Subjects, learner: str, clock: Clock, identity: Identity | None = None, region: str = ""
) -> Member:
    """Return this process's membership: the next incarnation of `learner`, in a region or in none.

    Raises:
        IdentityTaken: a live process answers to the id, or another one was faster.
        SettingsError: the id cannot be part of a subject.
    """
    token(learner, "learner id")
    identity, locked = identity or this_process(), bus.signatures is not None
    for _ in range(CLAIM_ATTEMPTS):
        record = await bus.get_record(subjects.member(learner))
        holder = None if record is None else readable(Member, record)
        if record is not None and (holder is None or not holder.left):
            answering = await _ask_holder(bus, subjects, learner, holder)
            if answering is not None:
                raise _taken_error(learner, answering, locked=locked)
        member = Member(
            learner=learner,
            incarnation=_next_incarnation(record, holder),
            nonce=identity.nonce(8),
            host=identity.host,
            pid=identity.pid,
            claimed_at_s=clock.wall(),
            region=region,
            software=VERSION,
        )
        with contextlib.suppress(RecordConflict):
            await bus.put_record(subjects.member(learner), encode(member), expected=record.revision if record else 0)
            return member
        # Somebody wrote the record meanwhile: another process, which answers when it is asked, or one that writes junk.
    raise _taken_error(learner, None, locked=locked)


def _next_incarnation(record: Record | None, holder: Member | None) -> int:
    if record is None:
        return 1
    if holder is None or holder.incarnation > record.revision:
        return record.revision + 1
    return holder.incarnation + 1


async def _ask_holder(bus: Bus, subjects: Subjects, learner: str, holder: Member | None) -> Member | None:
    question = encode(Control(verb="identify", sender=learner))
    answer = await bus.ask(subjects.control(learner), question, timeout_s=IDENTIFY_TIMEOUT_S)
    if answer is not None:
        with contextlib.suppress(PeerMisbehaved):
            answering = decode(Member, answer)
            return answering if holder is None or answering.nonce == holder.nonce else None
    return None


async def release(bus: Bus, subjects: Subjects, member: Member) -> None:
    """Mark the incarnation as left, so that the next one need not ask; a successor's record stays as it is."""
    record = await bus.get_record(subjects.member(member.learner))
    holder = None if record is None else readable(Member, record)
    if record is None or holder is None or holder.nonce != member.nonce:
        return
    gone = msgspec.structs.replace(member, left=True)
    await bus.put_record(subjects.member(member.learner), encode(gone), expected=record.revision)


async def dismissal(bus: Bus, subjects: Subjects, run: RunRecord, member: Member) -> AtollError | None:
    """Return why this incarnation must stop, or None while the run and the member record are still its own.

    A member record that nobody can read is nobody else's. Raises what the bus raises.
    """
    record = await bus.get_record(subjects.run_record)
    mine = await bus.get_record(subjects.member(member.learner))
    there = None if record is None else decode(RunRecord, record.data)
    if there is None or there.nonce != run.nonce:
        return _replaced_error(run, "no run record" if there is None else f"founding {there.nonce}")
    holder = None if mine is None else readable(Member, mine)
    if mine is not None and (holder is None or holder.nonce == member.nonce):
        return None
    return IdentityTaken(
        f"learner {member.learner!r} was taken over by a newer incarnation",
        got=f"incarnation {member.incarnation}",
        todo="this process stops; the newer one goes on",
    )


async def quarantine(bus: Bus, run: RunRecord, fragment: int, member: Member) -> Quarantined | None:
    """Return the error of an incarnation that the shard of `fragment` has put in quarantine, None for any other.

    The ledgers of the shard's fragments say it: they hold the offences. Raises what the bus raises.
    """
    heads = await read_heads(bus, run)
    offences = 0
    for number in run.protocol.fragments_of(run.protocol.shard_of(fragment)):
        ref = heads[number].fragment_ledger if number in heads else None
        if ref is not None:
            ledger = read_fragment_ledger(await bus.get_blob(ref, LEDGER_BYTES_MAX))
            offences += ledger.offences(member.learner, member.incarnation)
    if run.protocol.protect != "isolate" or not 0 < run.protocol.offences_max <= offences:
        return None
    return Quarantined(
        f"learner {member.learner!r} is in quarantine: a shard refuses all it sends",
        got=f"{describe_isolation(offences)}; fragment {fragment} refused; the warnings before say what for",
        todo=ISOLATION_CURE,
    )


def _replaced_error(run: RunRecord, got: str) -> RunReplaced:
    return RunReplaced(
        f"run {run.run!r} on this broker is not the one that this learner joined",
        got=got,
        allowed=f"founding {run.nonce}",
        todo="was the broker's store lost? rebuild the run from its archive (atoll synchronizer --restore), then start the "
        "learner again: it joins the run that is there",
    )


def _taken_error(learner: str, holder: Member | None, *, locked: bool) -> IdentityTaken:
    where = f"process {holder.pid} on {holder.host}" if holder else "another process"
    # Behind a locked door the identity fixes the id.
    todo = (
        "if it is not yours, your identity was copied: ask for a new key" if locked else "or choose another learner.id"
    )
    return IdentityTaken(
        f"a learner named {learner!r} is already in this run",
        got=f"held by {where}" if holder else "claimed by another process at this moment",
        allowed="one live process per learner id",
        todo=f"stop {where}{';' if locked else ','} {todo}",
    )
