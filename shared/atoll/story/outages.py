"""When a shard had no owner: its *outages*, and which rounds stood still in them.

    last sign of an owner ──(dead)──► `serving` of the next owner ──► rounds go on

No event says that a process died. A shard was without an owner if a new one begins to serve it and the former did not close its
ledger: from the last sign of the former until then. A shard that has been silent for much longer than it usually is, and that
nobody has taken over while others wrote on, is without an owner to the end of the event log. The death lies between the last
sign and the next thing that the shard would have written, so an outage is at most as long as told here.

How long is "much longer"? A living owner whose rounds wait for a quorum commits nothing. It then writes why a round waits, at
growing intervals, and its process a sample of its presence every `TOLD_EVERY_S`. Where the event log has such signs of a shard,
it is missed only after the time of two of those samples, however fast its rounds were before.

The clock of a round begins with the call of its present owner. A round that an outage has interrupted stood still for longer
than its own figures say: `stood_still` has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from atoll.run.history import History, RoundLine, ServedTenure
from atoll.story.goodput import middle
from atoll.wire.traffic import TOLD_EVERY_S

SILENT_TIMES: Final = 4.0
"""A shard is missed when it has written nothing for this many of its usual pauses between rounds (`missed_after_s`)."""
PRESENCE_SLACK_S: Final = 5.0
"""How late a sample of presence may be written: a busy machine, a broker that was away for a moment."""
GAPS_MIN: Final = 2
LONG_TIMES: Final = 2.0
LONG_MIN_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ShardOutage:
    """A time in which a shard had no owner; `heir` is the tenure that ended it, None: it lasts to the end of the event log."""

    shard: str
    from_s: float
    until_s: float
    heir: ServedTenure | None

    @property
    def lasted_s(self) -> float:
        """Return how long it was, in seconds."""
        return self.until_s - self.from_s

    def within_s(self, from_s: float, until_s: float) -> float:
        """Return how much of it lies in a stretch of time, in seconds."""
        return max(0.0, min(self.until_s, until_s) - max(self.from_s, from_s))


def owner_of(tenure: ServedTenure) -> str:
    """Return the process that serves in a tenure, in words."""
    return f"process {tenure.fields.pid} on {tenure.fields.host}" if tenure.fields.host else "another process"


def usual_pause_s(history: History, shard: str) -> float | None:
    """Return the time that usually passes between two rounds of a shard; None with too few of them to tell."""
    made = [line for line in history.rounds if line.shard == shard]
    gaps = [after.at_s - before.at_s for before, after in pairwise(made)]
    if len(gaps) < GAPS_MIN:
        return None
    return max(median(gaps), middle(line.round.waited_s for line in made) or 0.0)


def missed_after_s(history: History, shard: str) -> float | None:
    """Return the silence after which a shard is missed; None where neither its rounds nor other signs of it tell."""
    usual_s = usual_pause_s(history, shard)
    patience_s = None if usual_s is None else SILENT_TIMES * usual_s
    if shard not in history.sighted:
        return patience_s
    # A page forgets the rounds of a shard that is dead for long. It is missed all the same.
    return max(patience_s or 0.0, 2 * TOLD_EVERY_S + PRESENCE_SLACK_S)


def outages_of(history: History) -> list[ShardOutage]:
    """Return the outages of all shards, oldest first. While the whole run was stopped no shard is missed."""
    found = []
    for each in history.tenures:
        if each.former_s is None or each.closed or each.from_s <= each.former_s:
            continue
        if not history.paused_s(each.former_s, each.from_s):
            found.append(ShardOutage(each.shard, each.former_s, each.from_s, each))
    for shard in history.shards():
        patience_s, last_s = missed_after_s(history, shard), history.last_s.get(shard, history.newest_s)
        if shard in history.closed or patience_s is None or history.newest_s - last_s <= patience_s:
            continue
        found.append(ShardOutage(shard, last_s, history.newest_s, None))
    return sorted(found, key=lambda each: each.from_s)


def stood_still(history: History, line: RoundLine, outages: Sequence[ShardOutage]) -> list[ShardOutage]:
    """Return the outages of a round's shard since the version before was made: so long it stood still."""
    before = history.find(line.round.fragment, line.round.version - 1)
    since_s = before.at_s if before is not None else history.began_s or 0.0
    return [each for each in outages if each.shard == line.shard and each.within_s(since_s, line.at_s) > 0.0]


@dataclass(frozen=True, slots=True)
class RoundLength:
    """How long a round took from its call until it was visible, and how long it stood still before, without an owner."""

    line: RoundLine
    took_s: float
    outage_s: float

    @property
    def whole_s(self) -> float:
        """Return both."""
        return self.took_s + self.outage_s


def round_lengths(history: History) -> list[RoundLength]:
    """Return the length of every round, the longest first."""
    outages = outages_of(history)
    lengths = [
        RoundLength(line, line.round.took_s, sum(each.lasted_s for each in stood_still(history, line, outages)))
        for line in history.rounds
    ]
    return sorted(lengths, key=lambda each: each.whole_s, reverse=True)


def long_bound_s(lengths: Sequence[RoundLength]) -> float:
    """Return the length beyond which a round is long: twice the median, and at least `LONG_MIN_S` more than it."""
    usual_s = median(each.whole_s for each in lengths) if lengths else 0.0
    return max(LONG_TIMES * usual_s, usual_s + LONG_MIN_S)
