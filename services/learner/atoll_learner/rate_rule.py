r"""The largest inner learning rate and the warm-up where nobody says them, from the model's shape and the inner optimizer.

For AdamW, with N the parameters of the layers' matrices (embeddings are left out: a larger vocabulary makes no layer wider),

.. math::

    r_0(N) = \min\left(r_{max},\; 2 \cdot 10^{-4} \left(\frac{1.2 \cdot 10^9}{N}\right)^{1/3}\right)

The anchor is GPT-3 XL, 2e-4 for 1.2 billion (Brown et al., arXiv 2005.14165, table 2.1), and the rates of that table from 85
million to 13 billion are within a fifth of the line. The exponent says that the rate falls as the width does: where models
grow in all directions N ~ width^3, and maximal update parametrisation wants 1 / width for matrices (Yang et al., arXiv
2203.03466). That the line holds four to five orders below its anchor was looked at with one seed for each of three sizes
(docs/adr/0056); between a million parameters and the anchor it is the literature's.

Muon's steps have the root mean square of AdamW's, and still it wants four times the rate: of what was tried that was the best
or next to it, at four sizes and texts from 16 thousand parameters to a million (docs/adr/0059). At eight million, 1200 steps
and one text, twice the rate of AdamW was 1.5 % better than four times, and eight times 5 % worse: one look, so the rule stays,
and whoever trains a larger model should try half of its rate.

Muon needs a short warm-up only: its steps have one length, whatever the first gradients are. AdamW's second moments have to
become known first (docs/adr/0061).

Left out: the tokens of a run (its schedule knows them, `atoll_learner.schedule`), its batch, and the number of learners (each
steps with a batch of its own, so more of them make none larger).
"""

from __future__ import annotations

from typing import Final

from atoll_learner.model_settings import ModelSettings

ANCHOR_RATE: Final = 2e-4
ANCHOR_PARAMETERS: Final = 1.2e9
EXPONENT: Final = 1.0 / 3.0
RATE_MAX: Final = 1e-2
TIMES: Final = {"adamw": 1.0, "muon": 4.0}
"""Rate of each inner optimizer, usual and at most, in rates of AdamW."""
WARMUP: Final = {"adamw": 0.1, "muon": 0.02}
"""Share of a run's token target during which the rate rises, for each inner optimizer."""


def layer_parameters(model: ModelSettings) -> int:
    """Return the parameters in matrices of all layers: attention and feed-forward, no embeddings, gains or biases."""
    queries = model.heads * model.head_dim
    keys_and_values = 2 * model.kv_heads * model.head_dim
    attention = model.width * (2 * queries + keys_and_values)
    return model.layers * (attention + 3 * model.width * model.ffn)


def usual_rate(model: ModelSettings, optimizer: str) -> float:
    """Return the largest learning rate for `model` with an inner optimizer (`TIMES`), to two digits.

    Examples:
        >>> from atoll_learner.model_settings import model_settings
        >>> sizes = [model_settings({"size": size}, vocab=256) for size in ("xs", "s", "m", "l")]
        >>> [usual_rate(size, "adamw") for size in sizes]
        [0.0043, 0.0021, 0.0011, 0.00071]
        >>> [usual_rate(size, "muon") for size in sizes]
        [0.017, 0.0085, 0.0043, 0.0028]
    """
    rate = ANCHOR_RATE * (ANCHOR_PARAMETERS / layer_parameters(model)) ** EXPONENT
    return float(f"{TIMES[optimizer] * min(RATE_MAX, rate):.2g}")
