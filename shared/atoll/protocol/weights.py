r"""How much a contribution counts: by what its learner trained, and by how late it comes.

A learner that trained over `tokens` tokens in `steps` inner steps weighs (Sec. 3.2 of arXiv 2604.21428)

.. math::

    w = \frac{tokens^2}{steps} = tokens \cdot \frac{tokens}{steps}

so it counts by its tokens, and by its tokens per step. A contribution of `age` versions keeps its weight and enters with a
staleness weight: 1 in time, less the later it is.
"""

from __future__ import annotations

import math

from atoll.protocol.settings import ProtocolSettings


def token_weight(tokens: int, steps: int) -> float:
    """Return the weight of a learner that trained over `tokens` tokens in `steps` steps, both positive."""
    return tokens * tokens / steps


def staleness_weight(settings: ProtocolSettings, age: int) -> float:
    """Return the staleness weight of a contribution that is `age` versions late: 1 at age 0, then falling.

    The gate is that of CGAD (arXiv 2605.09126), sigma = gate * e^(-alpha age) with the cosine gate's end where contributions
    are refused anyway: `age_max + 1`. So there is no jump between what is taken and what is refused.
    """
    power = settings.age_damping**age
    if settings.age_law == "power":
        return power
    return power * 0.5 * (1.0 + math.cos(math.pi * age / (settings.age_max + 1)))
