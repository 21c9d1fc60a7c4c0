"""Many versions of a fragment in numbers: what the shard holds, what learners hold, and what the formulas say.

The reference is the outer step in float64, without any rounding. A shard that rounds what it sends may be away from it by one
step of its quantiser, never by more, however many versions there were; its learners hold its bits.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from atoll.base.errors import PeerMisbehaved
from atoll.base.large_arrays import Vector
from atoll.codec import FORMATS, pack_arrays
from atoll.merge.global_update import AVERAGE, CARRY, GlobalUpdate, state_bytes_max
from atoll.merge.outer import MOMENTUM, OuterOptimizer, State, make_outer
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.blobs import BlobRef, Download
from support.formats import FACTS

Wide = npt.NDArray[np.float64]
SIZE, VERSIONS = 300, 30
LR, MOMENTUM_SHARE = 0.7, 0.6
CARRIED = 2.0**-9
"""What rounding to bfloat16 takes of what is carried."""


LATEST = "latest"


class Plain:
    """The same outer step as an optimizer that wants a fragment as a whole, as those of optax do.

    Its state looks into the values that it returns, as that of a look-ahead may.
    """

    def init(self, params: Vector) -> State:
        return {MOMENTUM: np.zeros(params.size, np.float32), LATEST: params}

    def update(self, params: Vector, pseudo_gradient: Vector, state: State) -> tuple[Vector, State]:
        momentum = (MOMENTUM_SHARE * state[MOMENTUM] + pseudo_gradient).astype(np.float32)
        moved: Vector = (params - LR * (pseudo_gradient + MOMENTUM_SHARE * momentum)).astype(np.float32)
        return moved, {MOMENTUM: momentum, LATEST: moved}


def rules(optimizer: OuterOptimizer, **asked: Any) -> GlobalUpdate:  # noqa: ANN401  (settings of any type)
    agreed: dict[str, Any] = {"correction": "none", "outer_lr": LR, "outer_momentum": MOMENTUM_SHARE} | asked
    return GlobalUpdate(optimizer, ProtocolSettings(**agreed).check())


@pytest.mark.parametrize("average", [0, 4])
@pytest.mark.parametrize("outer", [make_outer("nesterov", LR, MOMENTUM_SHARE), Plain()], ids=["nesterov", "whole"])
@pytest.mark.parametrize("codec", list(FORMATS))
def test_learners_hold_the_shards_bits_and_nothing_that_rounding_took_is_lost(
    codec: str, outer: OuterOptimizer, average: int
) -> None:
    """All deltas and what is carried add up to the exact sum of all outer steps.

    A derived momentum is a sum of steps as they were sent: the residue of the last one is in it, and enters the values damped.
    """
    update = rules(outer, codec_down=codec, average_versions=average)
    rng = np.random.default_rng(7)
    values: Vector = rng.normal(size=SIZE).astype(np.float32)
    state, learner = update.init(values), values.copy()
    exact: Wide = values.astype(np.float64)
    momentum: Wide = np.zeros(SIZE)
    largest_step, seen = 0.0, list[Wide]()
    for version in range(1, VERSIONS + 1):
        pseudo_gradient = (0.01 * rng.normal(size=SIZE)).astype(np.float32)
        made = update.step(values, pseudo_gradient, state)
        if made.delta is None:
            learner = made.values.copy()
        else:
            sent = made.delta.expanded()
            largest_step = max(largest_step, float(np.abs(sent).max()))
            made.delta.blend(learner, 0, SIZE, 1.0, 1.0)
        values, state = made.values, made.state
        seen.append(values.astype(np.float64))
        momentum = MOMENTUM_SHARE * momentum + pseudo_gradient
        exact -= LR * (pseudo_gradient + MOMENTUM_SHARE * momentum)

        assert learner.tobytes() == values.tobytes()
        carried = state[CARRY].astype(np.float64) if CARRY in state else 0.0
        residue = FACTS[codec].error * largest_step
        derived = residue if update.derived else 0.0
        lost = (
            2e-6 + version * (5e-7 + 1.5 * CARRIED * residue) + derived * MOMENTUM_SHARE**2 / (1.0 - MOMENTUM_SHARE**2)
        )
        np.testing.assert_allclose(values + carried, exact, rtol=0, atol=lost)
        off = 1e-6 + 2.0 * derived / (LR * (1.0 + MOMENTUM_SHARE))
        np.testing.assert_allclose(state[MOMENTUM], momentum, rtol=0, atol=off)
        if LATEST in state:
            np.testing.assert_allclose(state[LATEST], values + carried, rtol=0, atol=lost)
    if average:
        weights = (1.0 - 1.0 / average) ** np.arange(VERSIONS - 1, -1, -1)
        wanted = np.average(seen, axis=0, weights=weights)
        np.testing.assert_allclose(state[AVERAGE], wanted, rtol=0, atol=1e-5)
    assert (AVERAGE in state) == bool(average)
    assert (CARRY in state) == (codec != "f32")
    assert np.abs(values - exact).max() <= lost + residue


@pytest.mark.parametrize("elements", [0, 1, 1000, 1 << 18])
def test_the_bound_of_an_outer_state_is_sixteen_numbers_of_float32_each(elements: int) -> None:
    """Every state up to there fits with its header; one of seventeen is none that a run may have."""
    room = [{str(n): np.zeros(elements, np.float32) for n in range(count)} for count in (16, 17)]
    fits, too_much = (len(pack_arrays(state)) for state in room)
    bound = state_bytes_max(elements)

    assert fits <= bound <= fits + (2 << 20)
    assert too_much > bound or elements * 4 < (2 << 20)


@pytest.mark.parametrize(
    ("outer", "asked"),
    [
        *itertools.product(
            ["nesterov", "optax:adam", "optax:amsgrad", "optax:lion", "optax:adagrad"],
            [{}, {"codec_down": "int4", "average_versions": 4}],
        )
    ],
)
def test_every_real_outer_state_is_within_its_bound_and_the_bound_is_not_absurd(
    outer: str, asked: dict[str, Any]
) -> None:
    elements = 1 << 18
    update = rules(make_outer(outer, 0.1, 0.5), outer=outer, **asked)
    packed = len(pack_arrays(update.init(np.ones(elements, np.float32))))
    bound = state_bytes_max(elements)

    assert packed <= bound <= 16 * packed + (2 << 20)
    Download(BlobRef("s", 1 + bound // (1 << 20), bound, ""), bound)
    with pytest.raises(PeerMisbehaved):
        Download(BlobRef("s", 1 + bound // (1 << 20), bound + 1, ""), bound)
