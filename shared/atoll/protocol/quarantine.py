"""Protection against contributions that would spoil a run: one that is too long is shortened, one that is unusable is refused.

A pseudo-gradient may be finite, of the right size and as long as claimed, and still ruin the model: memory flips bits, or a
learning rate is a hundred times the run's. An honest one may be as long: an island with other data joins islands that have
converged. So a contribution v over s steps is *clipped*: folded as `scale` v, as long as the others (norms ||v_i|| over s_i
steps) and the parameters justify,

    ||scale v|| <= max(outlier_ratio * median_i(||v_i|| * steps(s / s_i)), share * ||theta||),  steps(x) = min(max(1, x), 10)

k times the steps may lead k times as far; but steps are claims, so their factor is bounded. `share` is 0.1 with three others
or more. Fewer cannot outvote a liar: then a contribution may be as long as the parameters themselves. A learner that is alone
is measured by its own last length, and its first one by nothing.

**Measures.** Each learner has one: the length at which its latest contribution was folded, as the shard has computed it. The
first contribution of a life is no measure: as a rule it covers a step or two of a warm-up. Measures count for
`MEASURE_VERSIONS` versions, and not after their life has ended before the run was at its target. Of an even number of others
the larger middle one counts. So less than half of the learners neither lower the limit of an honest one nor raise their own.

**Isolation** (`protocol.protect = "isolate"`, for runs with strangers). A contribution beyond the limit is refused as
`outlier`, unless it is the first of its life or has fewer than three others beside it. That, and what no healthy learner sends
(`OFFENCES`), are *offences*; `FADING` merged contributions in a row take one back. At the run's `offences_max`-th the shard
isolates that incarnation: it refuses its later contributions unread as `quarantined`, no round waits for it, and a learner of
ours then stops with an error. The next incarnation begins with a clean record.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from statistics import median_high
from typing import Final

import msgspec

from atoll.base.quantities import Incarnation, Steps, Version

OFFENCES: Final = frozenset(
    {
        "after_final",
        "checksum",
        "codec",
        "compression",
        "corrupt",
        "empty",
        "foreign",
        "implausible",
        "norm_bound",
        "norm_claim",
        "not_finite",
        "outlier",
        "oversized",
        "size",
        "truncated",
        "version",
    }
)
"""Reasons of refusals that no healthy learner gives."""

OTHERS_MIN: Final = 3
"""The least number of other learners of which most can be believed."""
NEGLIGIBLE_SHARE: Final = 0.1
STEPS_RATIO_MAX: Final = 10.0
MEASURES_MAX: Final = 64
MEASURE_VERSIONS: Final = 24
FADING: Final = 8


class Measure(msgspec.Struct, frozen=True, array_like=True):
    """The length (L2) at which a learner's contribution was folded, its inner steps, its incarnation, and the round's base."""

    norm: float
    steps: Steps
    incarnation: Incarnation
    version: Version


def norm_limit(measures: Mapping[str, Measure], learner: str, steps: int, ratio: float, base_norm: float) -> float:
    """Return the length (L2) up to which a learner's pseudo-gradient over so many steps counts; infinite where any does.

    `measures` are those that count, by learner; `base_norm` is the L2 norm of the global fragment that it would move.
    """
    if ratio <= 0.0:
        return inf
    known = {
        name: each.norm * min(max(1.0, steps / max(1, each.steps)), STEPS_RATIO_MAX) for name, each in measures.items()
    }
    own = known.pop(learner, None)
    lengths = list(known.values()) or ([] if own is None else [own])
    if not lengths:
        return inf
    share = NEGLIGIBLE_SHARE if len(known) >= OTHERS_MIN else 1.0
    return max(share * base_norm, ratio * median_high(lengths))
