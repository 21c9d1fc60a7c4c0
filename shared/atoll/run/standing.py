"""What a run does at this moment, in one word, and what it waits for: pure, the same for `atoll top` and `atoll status`.

over       it has reached its end and no learner is heard any more
ending     it has reached its end, and learners are still heard
training   rounds can be merged: a quorum of learners trains and every shard is served
waiting    something is missing; `waits_for` names all of it

Every process writes into the event log twice a minute. If nothing is written although learners are heard, the broker carries
messages and stores none: its disk is full.

A learner that has not left and is not heard is *unheard*: its process is gone, or its region is cut off. A run trains on
without it, so it is no reason to wait; `unheard` names it, with for how long, until it is back, has left or the run is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from atoll.base.wording import few
from atoll.protocol.settings import ProtocolSettings
from atoll.run.process_views import LearnerView
from atoll.wire.traffic import TOLD_EVERY_S

StandingWord = Literal["over", "ending", "training", "waiting"]
NAMED_MAX: Final = 8
HEARD: Final = ("joining", "training", "draining")
"""The states of a learner that is heard."""
UNWRITTEN_S: Final = 4.0 * TOLD_EVERY_S
"""After so long without an entry in the event log the broker stores nothing; clocks of two machines differ by less."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The word for what a run does, all that it waits for, and whom it does not hear, in words."""

    word: StandingWord
    waits_for: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """Return all of it as one line."""
        waits = f" for {'; '.join(self.waits_for)}" if self.waits_for else ""
        if not self.unheard:
            return f"{self.word}{waits}"
        return f"{self.word}{waits}; not heard, and has not left: {few(self.unheard, NAMED_MAX)}"


def heard_at_s(learner: LearnerView, epoch_s: float) -> float | None:
    """Return when a learner was last heard, by date: by its heartbeat, else by what it wrote into the event log.

    `epoch_s` is the date at which the clock of arrivals shows 0. None if nothing tells.
    """
    if learner.heard_s is not None:
        return epoch_s + learner.heard_s
    life, newest = learner.latest, learner.curve.newest
    told = (None if newest is None else newest.at_s, None if life is None else life.joined_at_s)
    return max((at_s for at_s in told if at_s is not None), default=None)


def standing_of(
    protocol: ProtocolSettings,
    states: Iterable[str],
    owned: Collection[int],
    *,
    ended: bool,
    unheard: tuple[str, ...] = (),
    unwritten_s: float = 0.0,
) -> Standing:
    """Return how a run stands.

    Args:
        protocol: what it agreed on.
        states: those of all its learners.
        owned: the shards that a process that is heard owns.
        ended: whether the run has reached its end.
        unheard: the learners that are not heard, in words.
        unwritten_s: for how long nobody has written into the event log.
    """
    told = list(states)
    heard = any(state in HEARD for state in told)
    if ended:
        return Standing("ending" if heard else "over")
    waits_for = []
    training = told.count("training")
    if not heard:
        waits_for.append("a learner: none is heard")
    elif training < protocol.quorum:
        waits_for.append(f"a quorum of {protocol.quorum}: {training} training")
    unserved = [str(shard) for shard in range(protocol.shards) if shard not in owned]
    if unserved:
        waits_for.append(f"a synchronizer for shard {', '.join(unserved)}")
    if training and unwritten_s > UNWRITTEN_S:
        waits_for.append(
            f"a broker that stores something: for {unwritten_s:.0f} s it has not. Is its disk full (`atoll broker status`)?"
        )
    return Standing("waiting" if waits_for else "training", tuple(waits_for), unheard)
