"""The settings of `atoll up` where the person sets nothing: a run of about five minutes on two cores.

The model is the learner's size "s"; the optimizer is its default. Eight fragments every sixteen steps make one round due
about every second step: two cores that also train can afford no more. With so short an interval an overwrite would throw
away much of the training, so adoption carries it over (docs/lab/LOG.md has the comparison).
"""

from __future__ import annotations

from typing import Any, Final

ORIGIN: Final = "atoll up"
"""What `atoll config --up` calls the origin of these values."""
SETTINGS: Final[dict[str, Any]] = {
    "model.size": "s",
    "protocol.fragments": 8,
    "protocol.interval_steps": 16,
    "protocol.overlap_steps": 2,
    "protocol.adoption": "carry",
    "protocol.shards": 2,
    "protocol.quorum": 1,
    "protocol.tokens_target": 2_500_000,
    "archive.every_s": 30,
}
EVALUATE_EVERY_S: Final = 15.0
