"""What a shard says of its rounds: the canonical log line and the `round` event of a commit, and a word while one waits.

Why a round waited is `atoll.protocol.reasons`: one line of it goes to the log, its values into the event (`atoll why`).
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.base.errors import ProtocolMisuse
from atoll.base.logs import get
from atoll.protocol.events import Commit, PublishCall, Share
from atoll.protocol.reasons import NAMED_MAX, call_id, commit_id, push_id
from atoll.protocol.shard import Shard
from atoll.wire.traffic import moved_by
from atoll_synchronizer.event_log import EventLog
from atoll_synchronizer.overrun_monitor import OverrunMonitor
from atoll_synchronizer.shard_context import ShardContext

log = get(__name__)


@dataclass(frozen=True, slots=True)
class CommitTimes:
    """When a commit was decided, when its lane came to it, when it was merged and when it was visible; monotonic seconds."""

    decided_s: float
    began_s: float
    merged_s: float
    visible_s: float


@dataclass(frozen=True, slots=True)
class CommitSize:
    """Bytes of the contributions and of the frames, and how many numbers the fragment has."""

    bytes_up: int
    bytes_down: int
    parameters: int


def round_fields(command: Commit, times: CommitTimes, size: CommitSize) -> dict[str, object]:
    """Return the fields of a `round` event, less what only the machine knows."""
    return {
        "fragment": command.fragment,
        "version": command.base_version + 1,
        "contributors": [_contributor(share) for share in command.shares],
        "tokens": sum(share.tokens for share in command.shares),
        "bytes_up": size.bytes_up,
        "bytes_down": size.bytes_down,
        "quorum_wait_s": round(command.quorum_s - command.called_s, 4),
        "grace_s": round(command.grace_s, 4),
        "waited_s": round(times.decided_s - command.called_s, 4),
        "queued_s": round(times.began_s - times.decided_s, 4),
        "merge_s": round(times.merged_s - times.began_s, 4),
        "commit_s": round(times.visible_s - times.merged_s, 4),
        "end": command.end,
        "live": command.live,
        "parameters": size.parameters,
        "cause_id": command.cause_id,
        "why": command.why,
    }


def _contributor(share: Share) -> dict[str, object]:
    return {
        "learner": share.key.learner,
        "incarnation": share.key.incarnation,
        "push": share.key.push,
        "age": share.age,
        "tokens": share.tokens,
        "weight": share.weight,
        "cause_id": share.cause_id,
    }


class RoundReporter:
    """Tells log and event log of one tenure's rounds."""

    def __init__(self, context: ShardContext, machine: Shard, event_log: EventLog) -> None:
        """Say nothing yet."""
        self._context = context
        self._machine = machine
        self._event_log = event_log
        self._overrun = OverrunMonitor(context.run.protocol)

    async def committed(self, command: Commit, times: CommitTimes, size: CommitSize) -> None:
        """Write down a round whose version is visible."""
        if command.why is None:
            raise ProtocolMisuse("a round ends for a reason", got=(command.fragment, command.base_version))
        fields = round_fields(command, times, size) | {"run_tokens": self._machine.ledger.run_tokens}
        line = fields | {
            "contributors": len(command.shares),
            "id": commit_id(command.fragment, command.base_version + 1),
            "pushes": [push_id(*share.key) for share in command.shares[:NAMED_MAX]],
            "why": command.why.told(),
        }
        log.info("round.committed", **line, link=moved_by(self._context.bus.stats).told)
        called_s = command.called_s or times.visible_s
        self._overrun.see(times.visible_s - called_s, self._machine.step_s(times.visible_s))
        await self._event_log.record("round", **fields)

    async def called(self, call: PublishCall) -> None:
        """Write down why a round still waits: at powers of two, because a fragment that waits for long is called often."""
        if call.attempt > 1 and call.attempt & (call.attempt - 1) == 0:
            fields = {"fragment": call.fragment, "version": call.version, "why": call.why}
            cause = call_id(call.fragment, call.version, call.attempt)
            log.warning("round.waiting", **fields, cause_id=cause)
            await self._event_log.record("waiting", **fields, cause_id=cause)
