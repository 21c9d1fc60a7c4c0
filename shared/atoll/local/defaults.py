"""The settings of `atoll up` where the person sets nothing: a run of about five minutes on two cores.

The model is the learner's size "s"; its rate and schedule are the learner's (`atoll_learner.rate_rule`). Eight fragments every
eight steps make one round due about every step: the shorter the run, the more the interval decides. With so short an
interval an overwrite would throw away much of the training, so adoption carries it over. Few learners that meet so often do
better with the mean of their pseudo-gradients than with RDA, which makes their noise as long as what they agree on.
docs/adr/0056 and 0063 have the tables and where each value comes from.
"""

from __future__ import annotations

from typing import Any, Final

ORIGIN: Final = "atoll up"
"""What `atoll config --up` calls the origin of these values."""
SETTINGS: Final[dict[str, Any]] = {
    "model.size": "s",
    "protocol.fragments": 8,
    "protocol.interval_steps": 8,
    "protocol.overlap_steps": 2,
    "protocol.adoption": "carry",
    "protocol.merge": "mean",
    "protocol.shards": 2,
    "protocol.quorum": 1,
    "protocol.tokens_target": 2_500_000,
    "archive.every_s": 30,
}
EVALUATE_EVERY_S: Final = 15.0
EVALUATE_CORES_MAX: Final = 0.1
"""Of a core, in the mean: what an evaluator takes, learners on the same machine do not have."""
