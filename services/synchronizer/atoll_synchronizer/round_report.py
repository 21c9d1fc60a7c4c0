"""Reports of a shard's rounds: a canonical log line and a `round` event per commit, and why a round waits.

`atoll.run.decisions` says why a round waited: the log gets it as one line, the event gets its values (`atoll why`).
If rounds last longer than the interval that they should fit into, most tokens come late: the reporter warns of that.

The event tells of each contributor when it answered, what its upload took, its weight, damping and correction, and how well it
agrees with its round; of the first `DETAILED_MAX` contributors, so that an event stays far below the limit of
a message. That is at most about 450 bytes for a contributor, of which 150 name it and its cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from atoll.base.errors import ProtocolMisuse
from atoll.base.logs import get, is_power_of_two
from atoll.merge.fold import Judgement
from atoll.protocol.events import NAMED_MAX, Commit, PublishCall, PushKey, Share, id_of
from atoll.protocol.shard import Shard
from atoll.run.decisions import describe_needs, describe_wait
from atoll.wire.events import Contributor, RoundEvent, WaitingEvent
from atoll.wire.messages import PushNotes
from atoll.wire.traffic import moved_by
from atoll_synchronizer.acknowledgements import PendingManifest
from atoll_synchronizer.aggregator import FoldEffect
from atoll_synchronizer.shard_context import EventLog, ShardContext

log = get(__name__)

OVERRUNS_PER_WARNING = 20
LONG_CALLS = 8
"""A round that is called so often waits for some sixteen steps of its fleet: unusual if that is also more than an interval."""
SAID_S_MIN = 10.0
SAID_S_MAX = 600.0
DETAILED_MAX = 512


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A commit as its lane made it: decided by the shard, begun, merged and made visible at these monotonic seconds.

    Its round was `away_s` without a broker before, and it waited the `hindered` seconds because the broker was "full" or
    "away". Bytes are those of the contributions and of the frames, `parameters` the elements of the fragment. `held` are its
    contributions as they arrived (one that a former owner was sent may be missing), `effects` what the fold noted of them.
    """

    decided_s: float
    began_s: float
    merged_s: float
    visible_s: float
    away_s: float
    hindered: Mapping[str, float]
    bytes_up: int
    bytes_down: int
    parameters: int
    held: Mapping[PushKey, PendingManifest]
    effects: Mapping[PushKey, FoldEffect]
    judgements: Sequence[Judgement]


@dataclass(slots=True)
class GrowingIntervals:
    """When a line that would come again and again is due: at once, then after twice the interval each time, up to a bound.

    A pause of `SAID_S_MAX` begins anew.
    """

    unsaid: int = 0
    _interval_s: float = 0.0
    _asked_s: float = -math.inf
    _due_s: float = -math.inf

    def is_due(self, now_s: float, *, is_long: bool) -> bool:
        """Return whether to say it now; `is_long` says it out of turn. A line that is not said is counted."""
        if now_s - self._asked_s >= SAID_S_MAX:
            self._interval_s, self._due_s = 0.0, now_s
        self._asked_s = now_s
        if now_s < self._due_s and not is_long:
            self.unsaid += 1
            return False
        if now_s >= self._due_s:
            self._interval_s = min(SAID_S_MAX, max(SAID_S_MIN, 2.0 * self._interval_s))
            self._due_s = now_s + self._interval_s
        return True

    def take_unsaid(self) -> int:
        """Return how often it was not said since it was last said, and begin to count anew."""
        unsaid, self.unsaid = self.unsaid, 0
        return unsaid


class RoundReporter:
    """Reports one tenure's rounds to log and event log."""

    def __init__(self, context: ShardContext, machine: Shard, event_log: EventLog) -> None:
        self._context = context
        self._machine = machine
        self._event_log = event_log
        self._overruns = 0  # consecutive rounds that were longer than an interval
        self._waits, self._uncounted = GrowingIntervals(), GrowingIntervals()
        self._called: dict[int, tuple[float, float]] = {}  # when, and for how long the broker had been away by then

    def note_call(self, fragment: int) -> None:
        """Note that a round was called: a broker that is away from now on holds it up."""
        self._called[fragment] = self._context.clock.monotonic(), self.away_s()

    def away_since_call_s(self, fragment: int) -> float:
        """Return for how many seconds of its round the broker was away; for a round that nobody called it is 0."""
        now_s, away_s = self._context.clock.monotonic(), self.away_s()
        called_s, before_s = self._called.pop(fragment, (now_s, away_s))
        # That it is away is known later than it is so: what is added then may be from before the call.
        return min(now_s - called_s, away_s - before_s)

    def away_s(self) -> float:
        """Return for how many seconds any broker was away, since the process began."""
        return self._context.bus.stats.away_s(self._context.clock.monotonic())

    async def record_commit(self, command: Commit, made: CommitRecord) -> None:
        """Record a round whose version is visible."""
        if command.why is None:
            raise ProtocolMisuse("a round ends for a reason", got=(command.fragment, command.base_version))
        judged: Sequence[Judgement | None] = made.judgements or [None] * len(command.shares)
        fields = RoundEvent(
            fragment=command.fragment,
            version=command.base_version + 1,
            contributors=tuple(
                _contributor(share, command, made, judgement, detailed=number < DETAILED_MAX)
                for number, (share, judgement) in enumerate(zip(command.shares, judged, strict=True))
            ),
            tokens=sum(share.tokens for share in command.shares),
            bytes_up=made.bytes_up,
            bytes_down=made.bytes_down,
            quorum_wait_s=round(command.quorum_s - command.called_s, 4),
            grace_s=round(command.grace_s, 4),
            waited_s=round(made.decided_s - command.called_s, 4),
            queued_s=round(made.began_s - made.decided_s, 4),
            merge_s=round(made.merged_s - made.began_s, 4),
            commit_s=round(made.visible_s - made.merged_s, 4),
            away_s=round(made.away_s, 3),
            hindered={word: round(seconds, 3) for word, seconds in made.hindered.items()},
            end=command.end,
            live=command.live,
            parameters=made.parameters,
            cause_id=command.cause_id,
            why=command.why,
            run_tokens=self._machine.ledger.run_tokens,
        )
        line = msgspec.structs.asdict(fields) | {
            "contributors": len(command.shares),
            "id": id_of("commit", command.fragment, command.base_version + 1),
            "pushes": [id_of("push", *share.key) for share in command.shares[:NAMED_MAX]],
            "why": "; ".join(describe_wait(command.why).values()),
        }
        log.info("round.committed", **line, link=moved_by(self._context.bus.stats).counters)
        step_s = self._machine.step_s()
        if step_s is not None:
            round_s = made.visible_s - (command.called_s or made.visible_s)
            interval_s = self._interval_s()
            self._overruns = self._overruns + 1 if round_s > interval_s else 0
            if self._overruns and self._overruns % OVERRUNS_PER_WARNING == 0:
                log.warning(
                    "interval.too_short",
                    round_s=round(round_s, 4),
                    interval_s=round(interval_s, 4),
                    todo=f"found a run with protocol.interval_steps={max(2, round(2 * round_s / step_s))} or more",
                )
        self._tell_unheard(command, made.judgements)
        self._tell_uncounted(command)
        await self._event_log.record(fields)

    def _tell_unheard(self, command: Commit, judgements: Sequence[Judgement]) -> None:
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

    def _tell_uncounted(self, command: Commit) -> None:
        most = max(command.shares, key=lambda share: share.tokens - share.credit)
        uncounted = most.tokens - most.credit
        if not uncounted or not self._uncounted.is_due(self._context.clock.monotonic(), is_long=False):
            return
        log.warning(
            "contribution.counted_in_part",
            learner=most.key.learner,
            fragment=command.fragment,
            tokens=most.tokens,
            uncounted=uncounted,
            unsaid=self._uncounted.take_unsaid(),
            why="it has far more tokens than the others' contributions, or than an interval; all of it is merged",
            todo="found a run with a larger protocol.interval_steps, or a larger protocol.tokens_target",
        )

    async def record_wait(self, call: PublishCall) -> None:
        """Record why a round that is called again still waits, at powers of two of its calls: a long wait has many.

        `version` is the one that the round is to make. The log gets what is new: a line at growing intervals (`unsaid` waits
        came since the one before), and each long wait. It is a warning only if the wait is unusual: a slow step often comes
        between.
        """
        if is_power_of_two(call.attempt):
            is_away = self._context.bus.stats.is_away
            needs = "" if call.needs is None else describe_needs(call.attempt, call.needs)
            why = f"the broker is away; {needs}" if is_away else needs
            now_s = self._context.clock.monotonic()
            waited_s = now_s - self._machine.slots[call.fragment].round.called_s
            fields = WaitingEvent(
                fragment=call.fragment,
                version=call.version + 1,
                why=why,
                waited_s=round(waited_s, 3),
                cause_id=id_of("call", call.fragment, call.version, call.attempt),
            )
            if self._waits.is_due(now_s, is_long=call.attempt >= LONG_CALLS):
                line = msgspec.structs.asdict(fields) | {"unsaid": self._waits.take_unsaid()}
                if call.attempt >= LONG_CALLS and waited_s > self._interval_s() and not is_away:
                    log.warning("round.waiting", **line)
                else:
                    log.info("round.waiting", **line)
            await self._event_log.record(fields)

    def _interval_s(self) -> float:
        """Return the time that a round should fit into: an interval at the live learners' median step time, 0 without one."""
        return self._context.run.protocol.interval_steps * (self._machine.step_s() or 0.0)


def _contributor(
    share: Share, command: Commit, made: CommitRecord, judgement: Judgement | None, *, detailed: bool
) -> Contributor:
    # Times of arrival are seconds after the first call; negative ones were there before it. Without details only a length that
    # was clipped is told.
    effect, held = made.effects.get(share.key), made.held.get(share.key) if detailed else None
    manifest, notes = (None, PushNotes()) if held is None else (held.manifest, held.manifest.notes)
    is_clipped = share.scale < 1.0
    norm = None if effect is None or not (detailed or is_clipped) else effect.note.norm
    seen = effect if detailed else None
    corrected = 0 if seen is None else seen.note.corrected_slices
    return Contributor(
        learner=share.key.learner,
        incarnation=share.key.incarnation,
        push=share.key.push,
        age=share.age,
        tokens=share.tokens,
        weight=share.weight,
        cause_id=share.cause_id,
        norm=_rounded(norm),
        norm_max=_rounded(share.scale * norm) if norm is not None and is_clipped else None,
        steps=share.steps if detailed else 0,
        arrived_s=None if held is None else round(held.arrived_s - command.called_s, 4),
        read_s=None if held is None or not held.ready_s else round(max(0.0, held.ready_s - held.arrived_s), 4),
        loss=None if manifest is None else manifest.loss,
        bytes=0 if manifest is None else manifest.blob.size_bytes,
        inline=manifest is not None and bool(manifest.frame),
        adopted_at_s=notes.adopted_at_s,
        step_s=notes.step_s,
        upload_s=notes.upload_s,
        full_s=notes.full_s,
        staleness_weight=None if seen is None else _rounded(seen.note.staleness_weight),
        aligned=None if seen is None else _rounded(seen.alignment.merged),
        aligned_with_others=None if seen is None else _rounded(seen.alignment.others),
        corrected=corrected,
        corrected_norm=_rounded(seen.note.corrected_norm) if seen is not None and corrected else None,
        shortened=0 if judgement is None else sum(clip < 1.0 for clip in judgement.clips),
        unheard=0 if judgement is None else judgement.heard.count(False),
    )


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else float(f"{figure:.4g}")
