"""What a learner's log says of adopted fragments, and of the tokens of a life that has ended.

A learner adopts every fragment again and again, so a line for each drowns what a person's own loop prints. Such a loop gets
them at debug and their number at intervals (`learner.moved`); a learner whose log is a file of its own has each at info.
"""

from __future__ import annotations

from atoll.base.logs import get
from atoll.protocol.island import Island

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
