"""Waits of a round: how long its grace window is, why it waited, and ids of what caused what.

A round waits in four places. The shard notes why at each of them, and the note travels with the commit (`Commit.why`) into
the canonical log line of the round, into its event, and from there to `atoll why`; `atoll.run.decisions` has the sentences:

    version v visible ──rests──► called ──waits──► quorum of K met ──grace──► end ──► merged, stored, version v + 1 visible
                        │                  │                          │
                  `opened`, `late_s`   `unanswered`, `met_by`    `grace`, `missing`

* It *rests* until its beat: every fragment is called once per H median steps (`atoll.protocol.pacing`).
* It waits for its *quorum*: K learners must have contributed on this version. Until then it is called again and again.
* Its *grace* is as long as Eq. 3 allows (`atoll.protocol.waits`), and ends at once when every live learner has answered.
* From its end on it is merged and stored; no learner can delay that any more.

**Causes.** Every message and every command names its cause (`cause_id`) by an id, so what is visible can be traced back:

    due/3 ──► call/3/17/1 ──► push/a/1/3/5 ──► commit/3/18 ──► head/3/18 ──► adopted by each learner

The ids: `due/<fragment>` and `grace/<fragment>` are timers, `call/<fragment>/<version>/<attempt>` asks for a fragment on a
version, `push/<learner>/<incarnation>/<fragment>/<push>` is a contribution, `commit/<fragment>/<version>` and
`head/<fragment>/<version>` make a version. `beat/<learner>/<incarnation>` is a heartbeat and `bye/<learner>/<incarnation>` a
farewell; `queue` is a look at a shard's queue, and `drain` the order to finish.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from atoll.base.quantities import Count, Figure, PeerId, Text, Version
from atoll.protocol.settings import ProtocolSettings


@dataclass(slots=True)
class MovingAverage:
    """`value <- (1 - decay) * value + decay * sample`; the first sample is taken whole. `value` is None before it."""

    decay: float
    value: float | None = None

    def add(self, sample: float) -> float:
        """Fold in `sample` and return the new value."""
        self.value = sample if self.value is None else (1.0 - self.decay) * self.value + self.decay * sample
        return self.value


class GraceWindow(msgspec.Struct, frozen=True):
    """The time that a round may wait after its quorum, and the terms of Eq. 3 that say so, all in seconds.

    `bound` names the term that decided: "none" (no slack is left), "slack" (gamma times the slack) or "cap".
    """

    granted_s: Figure
    bound: Literal["none", "slack", "cap"]
    step_s: Figure
    quorum_s: Figure
    sync_s: Figure
    overlap_s: Figure
    slack_s: Figure
    cap_s: Figure


def grace_window(
    settings: ProtocolSettings, step_s: float, quorum_s: float | None, sync_s: float | None
) -> GraceWindow:
    r"""Return how long a round may wait after its quorum, by Eq. 3 of arXiv 2604.21428, with its terms.

    Let xi_step be the step time of the live learners, xi_quorum the time from call to quorum and xi_sync the time from the
    end of collection to a visible head, each an exponential moving average. A round overlaps with tau inner steps, so what
    is left for waiting is

    .. math::

        \xi_{slack} = \tau \xi_{step} - (\xi_{quorum} + \xi_{sync}), \qquad
        \xi_{grace} = \mathrm{clamp}(\gamma \xi_{slack},\ 0,\ c\,\xi_{step})

    with gamma < 1 and a cap of c steps. The average of xi_quorum holds the present round already, since its quorum is met;
    xi_sync is zero until a first version is visible. xi_step is the *median* over live learners, so one slow island cannot
    lengthen everybody's window.
    """
    quorum_s, sync_s = quorum_s or 0.0, sync_s or 0.0
    overlap_s = settings.overlap_steps * step_s
    slack_s = overlap_s - quorum_s - sync_s
    cap_s = settings.grace_cap_steps * step_s
    wanted_s = settings.grace_gamma * slack_s
    bound: Literal["none", "slack", "cap"] = "slack"
    if wanted_s <= 0.0:
        wanted_s, bound = 0.0, "none"
    elif wanted_s >= cap_s:
        wanted_s, bound = cap_s, "cap"
    return GraceWindow(wanted_s, bound, step_s, quorum_s, sync_s, overlap_s, slack_s, cap_s)


NAMED_MAX: Final = 12

Opened = Literal["first", "due", "last_push", "never"]


def id_of(kind: Literal["call", "push", "commit", "head", "beat", "bye"], *parts: str | int) -> str:
    """Return the id of what has parts; the list of ids above names those of each kind."""
    return "/".join([kind, *map(str, parts)])


class Names(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some learners: the first `NAMED_MAX` of them by name, and how many there are."""

    names: Annotated[tuple[PeerId, ...], msgspec.Meta(max_length=NAMED_MAX)] = ()
    count: Count = 0

    @classmethod
    def of(cls, learners: Iterable[str]) -> Names:
        """Return these learners, bounded, because a round of thousands is written down as well."""
        ordered = sorted(learners)
        return cls(tuple(ordered[:NAMED_MAX]), len(ordered)) if ordered else NOBODY


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a round came to be called.

    Attributes:
        opened: "first": its first beat came; "due": its beat came; "last_push": the last push of a learner that leaves opened
            it; "never": it was not called.
        rested_s: from the moment its version was visible here, or the shard began, to the first call.
        late_s: how long after its beat it was called.
        behind_commit: whether its version was visible only after the beat.
        interval_steps, step_s: the interval is H steps of this length.
        cause_id: what caused the first call.
    """

    opened: Opened = "never"
    rested_s: Figure = 0.0
    late_s: Figure = 0.0
    behind_commit: bool = False
    interval_steps: Count = 0
    step_s: Figure = 0.0
    cause_id: Text = ""


NOBODY: Final = Names()
NEVER_CALLED: Final = Opening()


class RoundNeeds(msgspec.Struct, frozen=True):
    """The need of a round that is called again: `contributed` of `quorum` are there, and of `live` some are `unanswered`."""

    quorum: int
    contributed: int
    unanswered: Names
    live: int


class RoundReasons(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why one round took as long as it did.

    Attributes:
        version: the version that it began with; it made the next one.
        opening: how it came to be called.
        calls: how often it was called.
        quorum: K, how many learners had to contribute.
        quorum_wait_s: from the first call to the quorum.
        unanswered: live learners that had not answered when it was called again for the last time.
        met_by: the id of the contribution that met the quorum; empty when it was never met.
        grace: the window that Eq. 3 granted, with its terms; None without a quorum.
        grace_waited_s: how long it really waited after the quorum.
        end: why it ended ("all answered", "grace over", "nobody left").
        missing: live learners that had not answered at the end.
        reading: contributions that had arrived and were still being read then.
        together: whether it waited without a bound, because the run ends together.
    """

    version: Version
    opening: Opening = NEVER_CALLED
    calls: Count = 0
    quorum: Count = 1
    quorum_wait_s: Figure = 0.0
    unanswered: Names = NOBODY
    met_by: Text = ""
    grace: GraceWindow | None = None
    grace_waited_s: Figure = 0.0
    end: Text = ""
    missing: Names = NOBODY
    reading: Count = 0
    together: bool = False
