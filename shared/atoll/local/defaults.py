"""What `atoll up` sets where nobody has set anything: a run of about five minutes on two cores.

The model is the learner's size "s"; the optimizer is its default. Eight fragments every sixteen steps: one is due about
every second step, as often as two cores that also train can afford. With so short an interval an overwrite throws away a
good part of what is trained, so adoption carries it on (docs/lab/LOG.md has the comparison).
"""

from __future__ import annotations

from typing import Any, Final

LEARNERS: Final = 3
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
EVALUATE_EVERY_S: Final = 10.0
