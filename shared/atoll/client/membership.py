"""Claims a learner id for one process: incarnations, numbered by compare-and-set.

A learner id has many incarnations. Each takes the next number in the member record, so that messages of a former
incarnation can be told apart. A newcomer first *asks* whether the present holder is alive. A live holder answers
`identify` at once, and the newcomer is refused (two learners with one id is a mistake, not a failure). A holder that
was killed cannot answer, so a restart under the same id waits one short time-out and no lease has to expire.

A member record that cannot be read does not say which incarnation is next, and neither does one that claims a higher
incarnation than the broker has given numbers to messages. Each incarnation began with a record of its own, so there were
never more of them than that, and the next one is counted from there. Nobody but it writes over such a record: an older
incarnation could not know whether it is still the newest.

A holder that was frozen and comes back finds a higher incarnation in the record and stops (`dismissal`). So does a
holder whose run was rebuilt from an archive, or is gone from the broker: its later training belongs to a run that no
longer exists.
"""

from __future__ import annotations

import contextlib

import msgspec

from atoll.base import VERSION
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, IdentityTaken, PeerMisbehaved, Quarantined, RecordConflict, RunReplaced
from atoll.base.identity import Identity, this_process
from atoll.bus.interface import Bus, Record
from atoll.protocol.ledger import LEDGER_BYTES_MAX
from atoll.run.decisions import ISOLATION_CURE, describe_isolation
from atoll.run.heads import read_heads
from atoll.run.ledger import read_fragment_ledger
from atoll.run.record import readable
from atoll.wire.messages import Control, Member, RunRecord, decode, encode
from atoll.wire.subjects import Subjects, token

IDENTIFY_TIMEOUT_S = 1.0
CLAIM_ATTEMPTS = 32


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
    """Return the number of the incarnation after that of a record, which `holder` is if it can be read."""
    if record is None:
        return 1
    if holder is None or holder.incarnation > record.revision:
        return record.revision + 1
    return holder.incarnation + 1


async def _ask_holder(bus: Bus, subjects: Subjects, learner: str, holder: Member | None) -> Member | None:
    """Return the holder of an id if it answers; an answer that is not the holder's own is none."""
    question = encode(Control(verb="identify", sender=learner))
    answer = await bus.ask(subjects.control(learner), question, timeout_s=IDENTIFY_TIMEOUT_S)
    answering = None if answer is None else _parse_answer(answer)
    return answering if answering is not None and (holder is None or answering.nonce == holder.nonce) else None


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


def _parse_answer(answer: bytes) -> Member | None:
    try:
        return decode(Member, answer)
    except PeerMisbehaved:
        return None


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
