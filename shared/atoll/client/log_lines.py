"""What a learner's log says of adopted fragments, of tokens that are superseded, of its pace, and of a life that has ended.

A learner adopts every fragment again and again, so a line for each drowns what a person's own loop prints. Such a loop gets
them at debug and their number at intervals (`learner.moved`); a learner whose log is a file of its own has each at info.
"""

from __future__ import annotations

from typing import Final

from atoll.base.logs import get
from atoll.protocol.island import Island
from atoll.run.event_fields import SUPERSEDED_MAX

CALLS_DUE: Final = 2
"""After so many intervals of a fragment without a call nobody will call."""
ADOPTIONS_MIN: Final = 3
"""Of each fragment before a share is judged: what an adoption supersedes may have been trained long before."""

log = get(__name__)


class AdoptionLog:
    """Logs each adopted fragment, at info with `each` and else at debug, and counts them for the summary."""

    def __init__(self, *, each: bool = False) -> None:
        """Count from zero."""
        self._each = each
        self._adopted = 0

    def adopted(self, fragment: int, version: int, step: int, cause_id: str, *, overwritten: bool = False) -> None:
        """Log that the learner goes on from `version` of a fragment, after its step number `step`."""
        self._adopted += 1
        if overwritten:
            log.info("fragment.overwritten", fragment=fragment, version=version, step=step, cause_id=cause_id)
        elif self._each:
            log.info("fragment.adopted", fragment=fragment, version=version, step=step, cause_id=cause_id)
        else:
            log.debug("fragment.adopted", fragment=fragment, version=version, step=step, cause_id=cause_id)

    def taken(self) -> int:
        """Return how many fragments were adopted since this was last asked, and begin to count anew."""
        adopted, self._adopted = self._adopted, 0
        return adopted


class SupersededLog:
    """Warns, once in a life, that much of what a learner trains is superseded: nothing else says so before the run is over.

    A stretch is judged when each fragment has been adopted some times in it, and two in a row must be bad: a broker that was
    away for minutes is another matter.
    """

    def __init__(self) -> None:
        """Begin with a life in which nothing was trained."""
        self._trained = self._superseded = self._adopted = 0
        self._was_bad = self._warned = False

    def look(self, machine: Island, adopted: int) -> None:
        """Go on by `adopted` fragments, and warn if more than `SUPERSEDED_MAX` of two stretches was superseded."""
        self._adopted += adopted
        trained = machine.tokens * len(machine.intervals)
        if self._adopted < ADOPTIONS_MIN * len(machine.intervals) or trained == self._trained:
            return
        share = min(1.0, (machine.superseded - self._superseded) / (trained - self._trained))
        self._trained, self._superseded, self._adopted = trained, machine.superseded, 0
        was_bad, self._was_bad = self._was_bad, share > SUPERSEDED_MAX
        if was_bad and self._was_bad and not self._warned:
            self._warned = True
            log.warning(
                "learner.superseded",
                share=round(share, 2),
                why="a round takes long beside an interval, and new values overwrite what was trained since the push",
                todo="protocol.adoption=carry, or a longer protocol.interval_steps; both belong to the founding of a run",
            )


class UncalledLog:
    """Warns a learner that trains for nobody: its steps count no tokens, or no shard calls and none makes versions."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._steps = self._tokens = self._pushed = 0
        self._warned = False

    def look(self, machine: Island, adopted: int, interval_steps: int) -> None:
        """Go on by `adopted` fragments; warn, once until that ends, if nothing can come of the steps since the last look."""
        stepped, trained, pushed = (
            machine.steps - self._steps,
            machine.tokens - self._tokens,
            machine.pushed - self._pushed,
        )
        self._steps, self._tokens, self._pushed = machine.steps, machine.tokens, machine.pushed
        long = stepped > CALLS_DUE * interval_steps
        tokenless = long and not trained
        uncalled = long and not adopted and not pushed
        if tokenless and not self._warned:
            log.warning(
                "learner.tokenless",
                steps=stepped,
                why="your steps count 0 tokens: a contribution is weighed by its tokens, so nothing of yours can be merged",
                todo="say how many tokens (or samples) each step covers: island.step(params, tokens=...)",
            )
        elif uncalled and not self._warned:
            log.warning(
                "learner.uncalled",
                steps=stepped,
                why="no shard has called for a contribution, and no version was made",
                todo="is a synchronizer running? `atoll status` says what the run waits for",
            )
        self._warned = tokenless or uncalled


class HeldLog:
    """Says once in a life that its loop is held: it takes more steps a second than the run believes of one learner."""

    def __init__(self) -> None:
        """Say nothing yet."""
        self._told = False

    def tell(self, steps_per_s: float, allowed: float, held_to: float) -> None:
        """Warn, the first time, of a loop that takes so many steps a second, where fewer are allowed."""
        if self._told:
            return
        self._told = True
        log.warning(
            "learner.held",
            steps_per_s=round(steps_per_s, 1),
            allowed=allowed,
            held_to=round(held_to, 1),
            why="a shard believes no learner more steps a second than that: it would drop your heartbeats",
            todo="hand several steps over as one, with the tokens of all; or found the run with a larger "
            "protocol.steps_per_s_max",
        )


def account(machine: Island) -> dict[str, int]:
    """Return what became of a learner's tokens, as its last line says it: steps, tokens, and token-fragments.

    A token counts once in each fragment of the model, because its fragments may meet different fates. So the trained
    token-fragments are the sum of the others, and tokens are to be compared with none of them.
    """
    return {
        "steps": machine.steps,
        "tokens": machine.tokens,
        "trained_token_fragments": machine.tokens * len(machine.intervals),
        "pushed_token_fragments": machine.pushed,
        "superseded_token_fragments": machine.superseded,
        "refused_local_token_fragments": machine.refused_local,
    }
