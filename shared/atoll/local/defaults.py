"""The settings of `atoll up` where the person sets nothing: a run of about five minutes on two cores.

The model is the learner's size "s"; its rate and schedule are the learner's (`atoll_learner.rate_rule`). With an interval of a
few steps an overwrite would throw away much of the training, so adoption carries it over. Few learners that meet so often do
better with the mean of their pseudo-gradients than with RDA, which makes their noise as long as what they agree on.
docs/adr/0056 and 0063 have the tables and where each value comes from.

**The interval follows from the number of learners.** All learners share a run's tokens, so twice as many take half of the
steps each, and with the same interval would meet half as often. The interval is 16 steps divided by the learners, rounded down:
with two to four learners the rounds of a run, and what they cost, follow from its tokens alone. It is at least four steps, in
which the eight fragments make two rounds a step, and at most eight: the loss of short runs suffers beyond. docs/adr/0064 has
the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from atoll.base.wording import counted
from atoll.settings import SettingsFallback
from atoll.settings.sections import UpSettings

ORIGIN: Final = "atoll up"
"""What `atoll config --up` calls the origin of these values."""
SETTINGS: Final[dict[str, Any]] = {
    "model.size": "s",
    "protocol.fragments": 8,
    "protocol.overlap_steps": 2,
    "protocol.adoption": "carry",
    "protocol.merge": "mean",
    "protocol.shards": 2,
    "protocol.quorum": 1,
    "protocol.tokens_target": 2_500_000,
    "archive.every_s": 30,
}
"""The settings that follow from no other."""
FOLLOWING: Final = ("protocol.interval_steps",)
"""The settings that follow from the number of learners."""
INTERVAL_OF_ALL: Final = 16
"""Steps of all learners together, in the mean, from one round of a fragment to the next."""
INTERVAL_MIN: Final = 4
INTERVAL_MAX: Final = 8
EVALUATE_EVERY_S: Final = 15.0
EVALUATE_CORES_MAX: Final = 0.1
"""Of a core, in the mean: what an evaluator takes, learners on the same machine do not have."""


def settings_of(learners: int) -> dict[str, Any]:
    """Return the settings of a run that begins with so many learners, by dotted name."""
    interval = min(INTERVAL_MAX, max(INTERVAL_MIN, INTERVAL_OF_ALL // max(1, learners)))
    return SETTINGS | {"protocol.interval_steps": interval}


def learners_of(stated: Mapping[str, tuple[Any, str]]) -> int:
    """Return the learners that a run begins with where so much was `stated` (`atoll.settings.given`)."""
    told = {"learners": stated["up.learners"][0]} if "up.learners" in stated else {}
    try:
        return UpSettings.model_validate(told).learners
    except ValidationError:  # `load` will refuse it, and with the widest interval nothing else before it
        return 1


def fallback(learners: int, **more: Any) -> SettingsFallback:  # noqa: ANN401  (values of settings)
    """Return what holds in a run of so many learners where nothing was said: `settings_of` them, and `more`."""
    follows = f"{ORIGIN} with {counted(learners, 'learner')}"
    return SettingsFallback(ORIGIN, settings_of(learners) | more, dict.fromkeys(FOLLOWING, follows))
