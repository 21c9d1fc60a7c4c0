"""Why a round waited, in plain words, and what caused what.

A round waits in four places. The shard notes why at each of them, and the note travels with the commit (`Commit.why`) into
the canonical log line of the round, into its event, and from there to `atoll why`:

    version v visible ──rests──► called ──waits──► quorum of K met ──grace──► end ──► merged, stored, version v + 1 visible
                        │                  │                          │
                  `opened`, `late_s`   `unanswered`, `met_by`    `grace`, `missing`

* It *rests* until its beat: every fragment is called once per H median steps (`atoll.protocol.pacing`).
* It waits for its *quorum*: K learners must have contributed on this version. Until then it is called again and again.
* Its *grace* is as long as Eq. 3 allows (`atoll.protocol.grace`, which has its sentence too), and ends at once when every
  live learner has answered.
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
from typing import Annotated, Final, Literal

import msgspec

from atoll.base.quantities import Count, Figure, PeerId, Text, Version
from atoll.base.wording import counted, few
from atoll.protocol.grace import GraceWindow

NAMED_MAX: Final = 12
ON_TIME_SHARE: Final = 0.02

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

    def told(self) -> str:
        """Return `a, b and 3 more`."""
        return few(self.names, NAMED_MAX, of=self.count)


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

    def told(self, version: int) -> str:
        """Return why the round was called when it was; `version` is the one that it began with."""
        if self.opened == "never":
            return "it was never called, because no live learner was left to ask"
        rested = f"{self.rested_s:.3g} s after version {version} was visible"
        if self.opened == "last_push":
            return f"the last push of a learner that leaves opened it before its beat, {rested}"
        pace = f"{self.interval_steps} steps of {self.step_s:.3g} s"
        if self.late_s <= max(ON_TIME_SHARE * self.interval_steps * self.step_s, 0.01):
            if self.opened == "first":
                return f"it rested until its first beat, within {pace} of the first step time that was heard, {rested}"
            return f"it rested until its beat ({pace}), {rested}"
        cause = (
            f"version {version} was visible only then" if self.behind_commit else "the shard was busy or its timer late"
        )
        return f"it was called {self.late_s:.3g} s after its beat ({pace}), because {cause}"


NOBODY: Final = Names()
NEVER_CALLED: Final = Opening()


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

    def sentences(self) -> dict[str, str]:
        """Return why the round waited, by the place where it did: "rest", "quorum", "grace", "end"."""
        found = {"rest": self.opening.told(self.version)}
        if self.calls:
            found["quorum"] = self._quorum_told()
        if self.together:
            found["grace"] = (
                "no grace window bounded it: the run ends together, and waits for every learner that is present"
            )
        elif self.grace is not None:
            found["grace"] = self.grace.told()
        return {**found, "end": self._end_told()}

    def _quorum_told(self) -> str:
        again = ""
        if self.calls > 1:
            again = f"; it was called {self.calls} times"
            again += f", and the last time {self.unanswered.told()} had not answered" if self.unanswered.count else ""
        if not self.met_by:
            needed = ", and needed no more because the run ends together" if self.together else ""
            return f"the quorum of {self.quorum} was never met{needed}{again}"
        by = f"by {self.met_by}" if self.met_by.startswith("push/") else "by contributions that were there already"
        return f"the quorum of {self.quorum} was met {self.quorum_wait_s:.3g} s after the call, {by}{again}"

    def _end_told(self) -> str:
        waited = f"it ended {self.grace_waited_s:.3g} s after the quorum" if self.met_by else "it ended"
        late = f"{self.missing.told()} had not answered" if self.missing.count else ""
        reading = counted(self.reading, "contribution was", "contributions were")
        read = f"{reading} still being read" if self.reading else ""
        left = " and ".join(part for part in (late, read) if part)
        if self.end == "all answered":
            return f"{waited}, because every live learner had answered"
        if self.end == "grace over":
            none = self.grace is not None and self.grace.granted_s == 0.0
            over = "there was no grace to wait for" if none else "the grace window was over"
            return f"{waited}, because {over}" + (f"; {left}" if left else "")
        if self.end == "nobody left":
            return f"{waited}, because no live learner was left to wait for"
        return f"{waited}: {self.end}"


def still_waiting(attempt: int, quorum: int, contributed: int, unanswered: Names, live: int) -> str:
    """Return why a round is called again: the sentence of a round that has not ended yet."""
    missing = f"not yet {unanswered.told()}" if unanswered.count else "none of them has an answer due"
    return f"call {attempt}: it needs {quorum} of {live} live learners, and has {contributed}; {missing}"
