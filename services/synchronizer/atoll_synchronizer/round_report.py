"""What a shard reports of its rounds: a canonical log line and a `round` event per commit, and why a round waits.

`atoll.protocol.reasons` says why a round waited: the log gets it as one line, the event gets its values (`atoll why`).
If rounds last longer than the interval that they should fit into, most tokens come late: the reporter warns of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.base.errors import ProtocolMisuse
from atoll.base.logs import get
from atoll.merge.fold import Judgement
from atoll.protocol.events import Commit, PublishCall
from atoll.protocol.reasons import NAMED_MAX, id_of
from atoll.protocol.shard import Shard
from atoll.wire.traffic import moved_by
from atoll_synchronizer.shard_context import EventLog, ShardContext

log = get(__name__)

OVERRUNS_PER_WARNING = 20


@dataclass(frozen=True, slots=True)
class CommitTimes:
    """When the shard decided a commit, its lane began it, merged it and made it visible; monotonic seconds."""

    decided_s: float
    began_s: float
    merged_s: float
    visible_s: float


@dataclass(frozen=True, slots=True)
class CommitSize:
    """Bytes of the contributions and of the frames, and the number of elements of the fragment."""

    bytes_up: int
    bytes_down: int
    parameters: int


class RoundReporter:
    """Reports one tenure's rounds to log and event log."""

    def __init__(self, context: ShardContext, machine: Shard, event_log: EventLog) -> None:
        """Report nothing yet."""
        self._context = context
        self._machine = machine
        self._event_log = event_log
        self._overruns = 0  # consecutive rounds that were longer than an interval

    async def committed(
        self, command: Commit, times: CommitTimes, size: CommitSize, judgements: Sequence[Judgement] = ()
    ) -> None:
        """Record a round whose version is visible; `judgements` are those on its contributions, where there are any."""
        if command.why is None:
            raise ProtocolMisuse("a round ends for a reason", got=(command.fragment, command.base_version))
        fields: dict[str, object] = {
            "fragment": command.fragment,
            "version": command.base_version + 1,
            "contributors": [
                {
                    "learner": share.key.learner,
                    "incarnation": share.key.incarnation,
                    "push": share.key.push,
                    "age": share.age,
                    "tokens": share.tokens,
                    "weight": share.weight,
                    "cause_id": share.cause_id,
                    **effects,
                }
                for share, effects in zip(command.shares, _effects(command, judgements), strict=True)
            ],
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
            "run_tokens": self._machine.ledger.run_tokens,
        }
        line = fields | {
            "contributors": len(command.shares),
            "id": id_of("commit", command.fragment, command.base_version + 1),
            "pushes": [id_of("push", *share.key) for share in command.shares[:NAMED_MAX]],
            "why": "; ".join(command.why.sentences().values()),
        }
        log.info("round.committed", **line, link=moved_by(self._context.bus.stats).told)
        step_s = self._machine.step_s(times.visible_s)
        if step_s is not None:
            round_s = times.visible_s - (command.called_s or times.visible_s)
            interval_s = self._context.run.protocol.interval_steps * step_s
            self._overruns = self._overruns + 1 if round_s > interval_s else 0
            if self._overruns and self._overruns % OVERRUNS_PER_WARNING == 0:
                log.warning(
                    "interval.too_short",
                    round_s=round(round_s, 4),
                    interval_s=round(interval_s, 4),
                    todo=f"found a run with protocol.interval_steps={max(2, round(2 * round_s / step_s))} or more",
                )
        self._tell_unheard(command, judgements)
        await self._event_log.record("round", **fields)

    def _tell_unheard(self, command: Commit, judgements: Sequence[Judgement]) -> None:
        """Log whom most of a round's slices leave out: its machine or its data may be broken."""
        for share, judgement in zip(command.shares, judgements, strict=False):
            unheard = judgement.heard.count(False)
            if 2 * unheard > len(judgement.heard):
                log.warning(
                    "contribution.unheard",
                    learner=share.key.learner,
                    incarnation=share.key.incarnation,
                    fragment=command.fragment,
                    push=share.key.push,
                    slices=f"{unheard} of {len(judgement.heard)}",
                    todo="it points away from the others': look at this machine, its data and its learning rate",
                )

    async def waiting(self, call: PublishCall) -> None:
        """Log why a round that is called again still waits, at powers of two of its calls: a long wait has many.

        `version` is the one that the round is to make, as in `committed`.
        """
        if call.attempt & (call.attempt - 1) == 0:
            fields = {"fragment": call.fragment, "version": call.version + 1, "why": call.why}
            cause = id_of("call", call.fragment, call.version, call.attempt)
            log.warning("round.waiting", **fields, cause_id=cause)
            await self._event_log.record("waiting", **fields, cause_id=cause)


def _effects(command: Commit, judgements: Sequence[Judgement]) -> list[dict[str, int]]:
    """Return, per share, what its judgement did: nothing is said of those that were taken as they came."""
    if not judgements:
        return [{} for _ in command.shares]
    return [
        {"shortened": sum(clip < 1.0 for clip in judgement.clips), "unheard": judgement.heard.count(False)}
        for judgement in judgements
    ]
