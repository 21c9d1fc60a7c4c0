"""The goodput of a run: learner-seconds stepping over learner-seconds present, by its event log.

For a whole run this is the only definition. Live views estimate it from heartbeats (`atoll.run.view`), curves from samples
(`atoll.run.curves`).

    present     from the beginning of a learner's first start to its farewell. A loop of somebody's own starts when it calls
                `join`, unless it says for how long it had been starting before. Between a death and the next start it counts
                as present: that time is lost. Between a farewell and the next start it does not, nor while the whole run
                was stopped.
    stepping    its inner steps x its median step time, at most the time present; 0 in a run that never made a version.

The report, the page, `atoll why goodput`, `atoll what-if` and the shares of time lost (`atoll.story.slowness`) rest on it, so
their figures agree.
A learner that died and never came back was present until the last sign of it. One whose beginning or step time the event log
does not tell has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from atoll.story.attribution import middle
from atoll.story.history import History
from atoll.story.lives import RecordedLife, lives_of

DEFINITION: Final = (
    "goodput: learner-seconds stepping over learner-seconds present; who failed is present until it is back"
)
"""What `atoll why`, `atoll what-if` and `atoll plan` mean by the word, for a person to read."""
SIGN_S: Final = 60.0
"""A learner with a sign of it within this time before the end of the event log counts as present until then."""


@dataclass(frozen=True, slots=True)
class TimePresent:
    """How long a learner was present, stepped, started and joined by the event log, in seconds; in how many lives.

    `compiling_s` is the time between joining and the first step: a learner compiles its step then, or waits for its turn to.
    `step_s` is its median step time.
    """

    present_s: float
    stepping_s: float
    starting_s: float
    joining_s: float
    compiling_s: float
    lives: int
    step_s: float

    def stepped_s(self, steps: int) -> float:
        """Return the seconds of so many steps, at most the time present."""
        return min(steps * self.step_s, self.present_s)


@dataclass(frozen=True, slots=True)
class RunGoodput:
    """The seconds of all learners; `share` is the goodput, 0..1, None where the event log tells of no learner's time."""

    present_s: float
    stepping_s: float

    @property
    def share(self) -> float | None:
        """Return the goodput."""
        return self.stepping_s / self.present_s if self.present_s > 0.0 else None


def goodput_of(history: History) -> RunGoodput:
    """Return the goodput of a run."""
    return summed(presences(history).values())


def summed(there: Iterable[TimePresent]) -> RunGoodput:
    """Return the goodput of these learners together."""
    known = list(there)
    return RunGoodput(sum(one.present_s for one in known), sum(one.stepping_s for one in known))


def presences(history: History) -> dict[str, TimePresent]:
    """Return the time of each learner of which the event log tells its steps and its beginning."""
    found = {learner: _presence(history, list(lives.values())) for learner, lives in lives_of(history).items()}
    return {learner: there for learner, there in found.items() if there is not None}


def _presence(history: History, lives: list[RecordedLife]) -> TimePresent | None:
    step_s = middle(share.step_s or None for life in lives for _, share in life.merged)
    if step_s is None:
        step_s = middle(each.fields.step_s or None for life in lives for each in life.samples)
    if step_s is None:
        # The history has forgotten the rounds and the samples of this learner, but not the newest sample of each life.
        step_s = middle(life.newest.fields.step_s or None for life in lives if life.newest is not None)
    begun = [life for life in lives if life.joined is not None]
    if not begun or step_s is None:
        return None
    present_s = starting_s = joining_s = compiling_s = 0.0
    for place, life in enumerate(begun):
        if life.joined is None:
            continue
        starting_s += life.joined.fields.start_s
        joining_s += life.joined.fields.took_s
        joined_s, first_s = life.joined.at_s, life.first_step_s(step_s) or 0.0
        compiling_s += max(0.0, first_s - joined_s - history.paused_s(joined_s, first_s))
        begun_s = joined_s - life.joined.fields.began_before_s
        following = begun[place + 1].joined if place + 1 < len(begun) else None
        last_s = life.last_s or begun_s
        if life.left is not None:
            ended_s = life.left.at_s
        elif following is not None:
            ended_s = following.at_s - following.fields.began_before_s
        else:
            ended_s = history.newest_s if last_s >= history.newest_s - SIGN_S else last_s
        present_s += max(0.0, ended_s - begun_s - history.paused_s(begun_s, ended_s))
    stepping_s = min(sum(life.steps for life in lives) * step_s, present_s) if history.rounds else 0.0
    return TimePresent(max(present_s, 1e-9), stepping_s, starting_s, joining_s, compiling_s, len(begun), step_s)
