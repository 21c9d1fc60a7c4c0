r"""The learning rate of a step, from the tokens of the run: warm-up, hold, and a straight fall to nothing.

With s the share of the run's token target that is trained, w the warm-up's share and d that of the decay, `wsd` (warmup,
stable, decay) is

.. math::

    r(s) = r_{max} \cdot \min\left(1,\; \frac{s}{w},\; m + (1 - m) \frac{1 - s}{d}\right)

where m is `rate_min_ratio`. A rate that is held and then falls in a straight line to nothing is at least as good as a cosine
(Hu et al., arXiv 2404.06395; Haegele et al., arXiv 2405.18392), and the longer a run, the sooner its fall should begin: what
limits a long run is the noise of its steps (Bergsma et al., arXiv 2502.15938), a short one the way that it can go. So where
nobody says d, the rate is held for about as many steps whatever the run's length, as far as d keeps its bounds:

.. math::

    d = \max\left(\tfrac{2}{5},\; 1 - \frac{900 \cdot \text{tokens of a step}}{\text{token target}}\right), \qquad d \le 1 - w

The 900 are steps of all learners together, because a learner knows its own batch and the run's target, and not how many others
there will be. They were found with two and three learners (docs/adr/0061); many learners only begin the fall sooner.

`cosine` is the schedule of runs and pages before: half a wave from the rate to its share `rate_min_ratio`.
"""

from __future__ import annotations

import math
from typing import Final

from atoll_learner.train_settings import TrainSettings

HOLD_STEPS: Final = 900
"""The rate begins to fall after so many steps of all learners, where the bounds of the decay allow it."""
DECAY_MIN: Final = 0.4


def learning_rate(train: TrainSettings, run_tokens: int, tokens_target: int) -> float:
    """Return the rate of the step that begins after `run_tokens` of `tokens_target` tokens; constant without a target.

    Tokens that were trained before the run count as the first of both. During warm-up the rate is that of the step's end: a
    first step of next to no length would be the measure by which shards judge the next ones (`atoll.protocol.quarantine`).
    """
    if tokens_target <= 0:
        return train.rate
    run_tokens, tokens_target = run_tokens + train.tokens_before, tokens_target + train.tokens_before
    warm = max(1.0, train.warmup * tokens_target)
    risen = min(1.0, (run_tokens + train.tokens_per_step) / warm) if run_tokens < warm else 1.0
    if train.schedule == "cosine":
        share = min(1.0, max(0.0, run_tokens - warm) / max(1.0, tokens_target - warm))
        left = 0.5 * (1.0 + math.cos(math.pi * share))
    else:
        falling = max(1.0, decay_share(train, tokens_target) * tokens_target)
        left = min(1.0, max(0, tokens_target - run_tokens) / falling)
    return train.rate * min(risen, train.rate_min_ratio + (1.0 - train.rate_min_ratio) * left)


def decay_share(train: TrainSettings, tokens_target: int) -> float:
    """Return the share of `tokens_target` (> 0) during which the rate of "wsd" falls."""
    if train.decay != "auto":
        return train.decay
    return min(1.0 - train.warmup, max(DECAY_MIN, 1.0 - HOLD_STEPS * train.tokens_per_step / tokens_target))
