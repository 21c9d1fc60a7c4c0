"""Who answers to a learner id: incarnations, claimed by compare-and-set.

A learner id lives many lives. Each new one takes the next incarnation number in the member record, so that messages of
a former life can be told apart. Before it takes over it *asks* whether the present holder is alive: a live holder
answers `identify` at once, and the newcomer is refused (two learners with one id is a mistake, not a failure). A holder
that was killed cannot answer, so a restart under the same id waits one short time-out and no lease has to expire.

A holder that was frozen and comes back finds a higher incarnation in the record and stops (`still_ours`).
"""

from __future__ import annotations

import os
import secrets
import socket

from atoll.bus.interface import Bus
from atoll.bus.subjects import Subjects, token
from atoll.clock import Clock
from atoll.errors import IdentityTaken, RecordConflict
from atoll.wire.messages import Control, Member, decode, encode

IDENTIFY_TIMEOUT_S = 1.0


async def claim(bus: Bus, subjects: Subjects, learner: str, clock: Clock) -> Member:
    """Return this process's membership: the next incarnation of `learner`.

    Raises:
        IdentityTaken: a live process answers to the id, or another one was faster.
        SettingsError: the id cannot be part of a subject.
    """
    token(learner, "learner id")
    record = await bus.get_record(subjects.member(learner))
    incarnation = 1
    if record is not None:
        holder = decode(Member, record.data)
        incarnation = holder.incarnation + 1
        if not holder.left:
            question = encode(Control(verb="identify", sender=learner))
            answer = await bus.ask(subjects.control(learner), question, timeout_s=IDENTIFY_TIMEOUT_S)
            if answer is not None:
                raise _taken(learner, decode(Member, answer))
    member = Member(
        learner=learner,
        incarnation=incarnation,
        nonce=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        claimed_at_s=clock.wall(),
    )
    try:
        revision = record.revision if record else 0
        await bus.put_record(subjects.member(learner), encode(member), expected=revision)
    except RecordConflict as error:
        raise _taken(learner, None) from error
    return member


async def release(bus: Bus, subjects: Subjects, member: Member) -> None:
    """Mark the incarnation as left, so that the next one need not ask; a successor's record is left alone."""
    record = await bus.get_record(subjects.member(member.learner))
    if record is None or decode(Member, record.data).nonce != member.nonce:
        return
    gone = Member(
        learner=member.learner,
        incarnation=member.incarnation,
        nonce=member.nonce,
        host=member.host,
        pid=member.pid,
        claimed_at_s=member.claimed_at_s,
        left=True,
    )
    await bus.put_record(subjects.member(member.learner), encode(gone), expected=record.revision)


async def still_ours(bus: Bus, subjects: Subjects, member: Member) -> bool:
    """Return whether the member record still names this incarnation."""
    record = await bus.get_record(subjects.member(member.learner))
    return record is not None and decode(Member, record.data).nonce == member.nonce


def _taken(learner: str, holder: Member | None) -> IdentityTaken:
    where = f"held by process {holder.pid} on {holder.host}" if holder else "claimed by another process at this moment"
    return IdentityTaken(
        f"a learner named {learner!r} is already in this run",
        got=where,
        allowed="one live process per learner id",
        todo="choose another learner.id, or stop the other process",
    )
