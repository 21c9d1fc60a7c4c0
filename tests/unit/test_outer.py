"""The outer optimizer against optax, against torch where it is installed, and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import optax
import pytest

from atoll.base.errors import ProtocolMisuse, SettingsError
from atoll.codec import pack_arrays, unpack_arrays
from atoll.codec.kernels import FAST_ELEMENTS
from atoll.codec.kernels.background import CompiledLater
from atoll.merge.outer import Nesterov, OptaxOuter, OuterOptimizer, make_outer

Vector = npt.NDArray[np.float32]
STEPS = 20
ELEMENTS = 33


def pseudo_gradients() -> list[Vector]:
    return list(np.random.default_rng(11).normal(size=(STEPS, ELEMENTS)).astype(np.float32))


def started() -> Vector:
    return np.random.default_rng(12).normal(size=ELEMENTS).astype(np.float32)


def run_outer(outer: OuterOptimizer, *, through_bytes: bool = False) -> list[Vector]:
    """Return the values after each step; the state may travel as packed bytes between steps."""
    params, found = started(), []
    state = outer.init(params)
    for pseudo_gradient in pseudo_gradients():
        params, state = outer.update(params, pseudo_gradient, state)
        if through_bytes:
            state = unpack_arrays(pack_arrays(state), 1 << 20)
        found.append(params)
    return found


def run_optax(transformation: Any) -> list[Vector]:  # noqa: ANN401  (optax is untyped here)
    params, found = started(), []
    state = transformation.init(params)
    for pseudo_gradient in pseudo_gradients():
        updates, state = transformation.update(pseudo_gradient, state, params)
        params = np.asarray(optax.apply_updates(params, updates))
        found.append(params)
    return found


def scheduled(lr: float) -> Any:  # noqa: ANN401  (an optax transformation)
    """Return an outer optimizer of our own: a chain with a schedule, found by `module:attribute`."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.linear_schedule(lr, 0.0, STEPS), momentum=0.5))


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.3, 0.5), (1.0, 0.0), (0.1, 0.0)])
def test_nesterov_is_optax_sgd(lr: float, momentum: float) -> None:
    """Twenty steps equal `optax.sgd(lr, momentum, nesterov=True)`."""
    expected = run_optax(optax.sgd(lr, momentum, nesterov=True))
    np.testing.assert_allclose(run_outer(make_outer("nesterov", lr, momentum)), expected, rtol=2e-5, atol=2e-5)


def test_nesterov_by_hand() -> None:
    """Two steps of eta 0.5 and mu 0.5 on a pseudo-gradient of 1: 0.75, then 0.875 off."""
    outer = Nesterov(0.5, 0.5)
    params = np.array([10.0], np.float32)
    one = np.ones(1, np.float32)
    params, state = outer.update(params, one, outer.init(params))
    assert (params.tolist(), state["momentum"].tolist()) == ([9.25], [1.0])
    params, state = outer.update(params, one, state)
    assert (params.tolist(), state["momentum"].tolist()) == ([8.375], [1.5])


def test_plain_sgd_keeps_no_state_and_averages() -> None:
    """With eta 1 and no momentum the next value is the learner's, and there is no state to carry."""
    outer = make_outer("nesterov", 1.0, 0.0)
    params, learner = np.array([1.0, 2.0], np.float32), np.array([0.5, 4.0], np.float32)
    assert outer.init(params) == {}
    after, state = outer.update(params, params - learner, {})
    assert after.tolist() == learner.tolist()
    assert state == {}


@pytest.mark.parametrize("spec", ["nesterov", "optax:adam", "optax:sgd"])
def test_an_update_changes_none_of_its_arguments(spec: str) -> None:
    """Values, pseudo-gradient and state are as they were, and the result is float32."""
    outer = make_outer(spec, 0.7, 0.9)
    params, pseudo_gradient = started(), pseudo_gradients()[0]
    _, state = outer.update(params, pseudo_gradient, outer.init(params))
    before = (params.copy(), pseudo_gradient.copy(), {name: array.copy() for name, array in state.items()})
    after, _ = outer.update(params, pseudo_gradient, state)
    assert after.dtype == np.float32
    assert params.tobytes() == before[0].tobytes()
    assert pseudo_gradient.tobytes() == before[1].tobytes()
    assert all(array.tobytes() == before[2][name].tobytes() for name, array in state.items())


@pytest.mark.parametrize(
    ("spec", "transformation"),
    [
        ("optax:adam", optax.adam(0.05)),
        ("optax:sgd", optax.sgd(0.05)),
        ("optax:adamw", optax.adamw(0.05)),
        ("optax:lion", optax.lion(0.05)),
    ],
)
def test_any_optax_optimizer_serves(spec: str, transformation: Any) -> None:  # noqa: ANN401  (optax is untyped here)
    """Twenty steps equal optax run by hand, with the state packed and unpacked after every step."""
    outer = make_outer(spec, 0.05, 0.9)
    assert isinstance(outer, OptaxOuter)
    np.testing.assert_allclose(run_outer(outer, through_bytes=True), run_optax(transformation), rtol=2e-5, atol=2e-5)


def test_a_chain_with_a_schedule_serves() -> None:
    outer = OptaxOuter(scheduled(0.5))
    np.testing.assert_allclose(run_outer(outer, through_bytes=True), run_optax(scheduled(0.5)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("spec", ["optax:no_such", "no_such_module:x"])
def test_an_unknown_optimizer_is_refused(spec: str) -> None:
    with pytest.raises(SettingsError, match="unknown outer optimizer") as caught:
        make_outer(spec, 0.7, 0.9, spec)
    assert str(caught.value.got).startswith(spec)


class HalfAnOptimizer:
    """Something that is called with a learning rate and can begin, but cannot go on."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def init(self, params: Vector) -> Vector:
        return params


class NotCallable(HalfAnOptimizer):
    """One whose parts are there by name only."""

    update = 3


def leaves(lr: float) -> None:
    raise SystemExit(lr)


@pytest.mark.parametrize("kind", [HalfAnOptimizer, NotCallable, 7, lambda: None, leaves, lambda lr: lr / 0])
def test_what_makes_no_optimizer_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, kind: object) -> None:
    """Whether it cannot be called with a rate, or what it makes lacks a part, or the part cannot be called."""
    monkeypatch.setattr("support.clocks.made", kind, raising=False)
    with pytest.raises(SettingsError, match="makes no outer optimizer") as raised:
        make_outer("support.clocks:made", 0.1, 0.0, "support.clocks:made")
    assert str(raised.value.got).startswith("support.clocks:made")


def test_vectors_that_do_not_belong_together_are_refused() -> None:
    outer, plain = Nesterov(0.1, 0.5), Nesterov(0.1, 0.0)
    good, short = np.zeros(4, np.float32), np.zeros(3, np.float32)
    none = np.empty(0, np.uint16)
    state = outer.init(good)
    outer.step(good, none, good, state, good.copy(), outer.init(good))
    outer.step(good, np.zeros(4, np.uint16), good, state, good.copy(), outer.init(good))
    wide: Any = good.astype(np.float64)
    for rule, carry, merged, momentum, new, state_new in (
        (outer, none, short, state, good.copy(), outer.init(good)),
        (outer, none, good, state, short, outer.init(good)),
        (outer, none, wide, state, good.copy(), outer.init(good)),
        (outer, np.zeros(3, np.uint16), good, state, good.copy(), outer.init(good)),
        (outer, none, good, {}, good.copy(), outer.init(good)),
        (plain, none, good, state, good.copy(), {}),
    ):
        with pytest.raises(ProtocolMisuse, match="belong together"):
            rule.step(good, carry, merged, momentum, new, state_new)


def test_a_large_vector_takes_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    there = CompiledLater("there", lambda: lambda values, *_: asked.append(values.size))
    monkeypatch.setattr("atoll.merge.outer.compiled_step", there)
    Nesterov(0.6, 0.0).update(np.ones(FAST_ELEMENTS, np.float32), np.ones(FAST_ELEMENTS, np.float32), {})
    assert (asked, there.now() is None) == ([], False)
    for elements in (FAST_ELEMENTS - 1, FAST_ELEMENTS):
        Nesterov(0.6, 0.0).update(np.ones(elements, np.float32), np.ones(elements, np.float32), {})
    assert asked == [FAST_ELEMENTS]
