"""Restarts and the average of the global values, against references of a few lines; and what a takeover finds of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec import pack_arrays, unpack_arrays
from atoll.merge.global_update import AVERAGE, CARRY, WEIGHT, GlobalUpdate
from atoll.merge.outer import MOMENTUM, make_outer
from atoll.protocol.settings import ProtocolSettings

Vector = npt.NDArray[np.float32]
SIZE = 7


def rules(outer: str = "nesterov", **changes: Any) -> GlobalUpdate:  # noqa: ANN401  (settings of any type)
    asked: dict[str, Any] = {"correction": "none", "outer_momentum": 0.9} | changes
    agreed = ProtocolSettings(outer=outer, **asked).check()
    return GlobalUpdate(make_outer(agreed.outer, agreed.outer_lr, agreed.outer_momentum), agreed)


def walked(advance: GlobalUpdate, versions: int, seed: int = 0, stops: frozenset[int] = frozenset()) -> list[Any]:
    """Return (values, state) of versions 0 to `versions`; at `stops` both go through bytes, as at a takeover."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=SIZE).astype(np.float32)
    state = advance.init(values)
    seen = [(values, state)]
    for version in range(1, versions + 1):
        advanced = advance.step(values, rng.normal(size=SIZE).astype(np.float32), state)
        values, state = advanced.values, advanced.state
        if version in stops:
            state = unpack_arrays(pack_arrays(state), 1 << 20)
        seen.append((values, state))
    return seen


@settings(max_examples=50, deadline=None)
@given(horizon=st.integers(1, 40), versions=st.integers(1, 60), seed=st.integers(0, 999))
def test_the_average_is_the_exponential_one_of_all_versions_but_the_first(
    horizon: int, versions: int, seed: int
) -> None:
    """Weights d^(age of the version), d = 1 - 1/N, divided by their sum."""
    seen = walked(rules(average_versions=horizon), versions, seed)
    trained = np.asarray([values for values, _ in seen[1:]], np.float64)
    weights = (1.0 - 1.0 / horizon) ** np.arange(versions - 1, -1, -1)

    wanted = np.average(trained, axis=0, weights=weights)

    np.testing.assert_allclose(seen[-1][1][AVERAGE], wanted, rtol=0, atol=3e-5 * np.abs(trained).max())


def test_the_average_of_one_version_is_that_version_and_of_none_the_values() -> None:
    """Bit for bit, so that a run of one round has one answer."""
    (before, state), (after, next_state) = walked(rules(average_versions=9), 1)
    assert np.array_equal(state[AVERAGE], before)
    assert np.array_equal(next_state[AVERAGE], after)
    assert float(state[WEIGHT]) == 0.0


def test_an_average_changes_nothing_else() -> None:
    """Values and momentum are those of a run without one, bit for bit, where versions are sent whole; only readers see it."""
    plain = walked(rules(codec_down="f32"), 8)
    averaged = walked(rules(codec_down="f32", average_versions=4), 8)
    for (values, state), (same, more) in zip(plain, averaged, strict=True):
        assert np.array_equal(values, same)
        assert set(more) == set(state) | {AVERAGE, WEIGHT}
        assert np.array_equal(state[MOMENTUM], more[MOMENTUM])


@pytest.mark.parametrize("momentum", [0.3, 0.9])
@pytest.mark.parametrize("size", [SIZE, 1 << 18])
def test_a_derived_momentum_is_that_of_the_step_but_for_rounding(momentum: float, size: int) -> None:
    """With a fine codec the two ways agree; with a coarse one they differ by what rounding took and will give back."""
    for codec, differs in (("bf16", 0.02), ("int4", 1.0)):
        asked = ProtocolSettings(codec_down=codec, outer_momentum=momentum).check()
        outer = make_outer("nesterov", asked.outer_lr, momentum)
        averaging = msgspec.structs.replace(asked, average_versions=4)
        stored, derived = GlobalUpdate(outer, averaging), GlobalUpdate(outer, asked)
        rng, values = np.random.default_rng(1), np.zeros(size, np.float32)
        state = derived.init(values)
        for _ in range(6):
            push = rng.normal(size=size).astype(np.float32)
            one, two = stored.step(values, push, stored.init(values) | state), derived.step(values, push, state)
            assert one.values.tobytes() == two.values.tobytes(), "how the momentum is kept changes nothing of this step"
            distance = np.abs(one.state[MOMENTUM] - two.state[MOMENTUM]).max()
            assert 0 < distance < differs * np.abs(one.state[MOMENTUM]).max()
            wanted = (momentum * state[MOMENTUM] + (values - two.values) / asked.outer_lr) / (1 + momentum)
            np.testing.assert_allclose(two.state[MOMENTUM], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
            values, state = two.values, two.state


def test_what_is_stored_of_a_derived_state() -> None:
    """The momentum; what rounding took stays with its owner. Where values do not tell the state, all of it is stored."""
    values = np.zeros(SIZE, np.float32)
    for changes, kept in (
        ({}, {MOMENTUM}),
        ({"outer_momentum": 0.0}, set()),
        ({"average_versions": 3}, {MOMENTUM, CARRY, AVERAGE, WEIGHT}),
        ({"codec_down": "f32"}, {MOMENTUM}),
    ):
        said: dict[str, Any] = {"codec_down": "int4", "correction": "none", "outer_momentum": 0.9} | changes
        asked = ProtocolSettings(**said).check()
        update = GlobalUpdate(make_outer(asked.outer, asked.outer_lr, asked.outer_momentum), asked)
        state = update.init(values)
        assert update.stored(state).keys() == kept
        assert update.taken_over(values, update.stored(state)).keys() == state.keys()
        assert update.derived == (changes.keys() <= {"outer_momentum"})
    optax = ProtocolSettings(codec_down="int4", correction="none", outer="optax:sgd").check()
    assert not GlobalUpdate(make_outer("optax:sgd", 0.5, 0.0), optax).derived


@pytest.mark.parametrize("outer", ["nesterov", "optax:adam"])
def test_owners_that_change_go_on_to_the_same_bits(outer: str) -> None:
    """State that was stored and read again at any version leads where it would have led."""
    stayed = walked(rules(outer, average_versions=5), 11)
    moved = walked(rules(outer, average_versions=5), 11, stops=frozenset({1, 4, 5, 8, 10}))
    assert pack_arrays(stayed[-1][1]) == pack_arrays(moved[-1][1])
    assert np.array_equal(stayed[-1][0], moved[-1][0])
