"""The two sets of kernels agree bit for bit, and with float64 arithmetic as far as float32 can."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from atoll.base.errors import ProtocolMisuse
from atoll.base.large_arrays import Vector
from atoll.codec import kernels as sets
from atoll.codec.encoded import Encoded
from atoll.codec.formats import F32, INT8, int4, int8
from atoll.codec.formats.interface import BLOCK
from atoll.codec.kernels import FAST_ELEMENTS, compiled, fast_kernels, plain_kernels
from atoll.codec.kernels.in_numpy import Kernels
from atoll.merge.outer import MOMENTUM, Nesterov, compiled_step


def both() -> list[Kernels]:
    """Return the two sets; here and not at the head, where every worker that collects would compile the second."""
    return [plain_kernels(INT8), fast_kernels(INT8)]


def drawn(elements: int, seed: int, spread: float = 3.0) -> Vector:
    rng = np.random.default_rng(seed)
    vector = (rng.normal(size=elements) * 10.0 ** rng.uniform(-spread, spread, elements)).astype(np.float32)
    vector[elements // 3 : elements // 2] = 0.0
    vector[: elements // 8] *= np.float32(1e-37)
    return vector


def test_the_compiled_set_is_there() -> None:
    """What follows compares two sets, not one with itself; once it is there, all vectors take the compiled one."""
    assert [kernels.name for kernels in both()] == ["plain", "fast"]
    assert sets.kernels(INT8, FAST_ELEMENTS) is both()[1]
    assert sets.kernels(INT8, 1) is both()[1]


def test_code_that_was_kept_is_of_the_sources_as_they_are() -> None:
    """A digest of a format's file is part of what a kernel is found by: another file, another digest."""
    assert compiled.stamp(int8) == compiled.stamp(int8)
    assert compiled.stamp(int8) != compiled.stamp(int4)
    made: list[Any] = [both()[1].squares, both()[1].quantise, both()[1].settle, fast_kernels(F32).squares]
    for kernel in made:
        cells = [cell.cell_contents for cell in kernel.py_func.__closure__]
        assert any(isinstance(cell, tuple) and isinstance(cell[-1], int) and cell[-1] > 1 << 32 for cell in cells)


def test_one_infinite_scale_is_seen_in_a_sum_of_squares() -> None:
    """A hostile sender's; nothing warns, nobody else's elements suffer."""
    codes, scales = np.ones(2 * BLOCK, np.uint8), np.array([1.0, np.inf], np.float32)
    for kernels in both():
        assert not np.isfinite(kernels.squares(codes, scales, 0, 2 * BLOCK))
        assert kernels.squares(codes, scales, 0, BLOCK) == BLOCK


def test_nesterov_steps_agree_to_the_bit() -> None:
    values, pseudo_gradient, momentum, lost = (drawn(3000, seed, 1.0) for seed in range(4))
    bits = lost.astype(ml_dtypes.bfloat16).view(np.uint16)
    compiled_loop = compiled_step.now()
    assert compiled_loop is not None
    for carry, before in itertools.product((bits[:0], bits), (momentum[:0], momentum)):
        after, kept, same, same_kept = (np.empty_like(like) for like in (values, before, values, before))
        plain = Nesterov(0.6, 0.3 if before.size else 0.0)
        plain.step(values, carry, pseudo_gradient, {MOMENTUM: before}, after, {MOMENTUM: kept})
        compiled_loop(values, carry, pseudo_gradient, before, 0.6, 0.3, same, same_kept)
        assert after.tobytes() + kept.tobytes() == same.tobytes() + same_kept.tobytes()
        wanted = (
            0.3 * before.astype(np.float64) + pseudo_gradient if before.size else pseudo_gradient.astype(np.float64)
        )
        if before.size:
            np.testing.assert_allclose(kept, wanted, rtol=0, atol=1e-6 * float(np.abs(wanted).max()))
        unrounded = values + carry.view(ml_dtypes.bfloat16).astype(np.float64) if carry.size else values
        step = unrounded - 0.6 * (pseudo_gradient + 0.3 * wanted if before.size else pseudo_gradient)
        np.testing.assert_allclose(after, step, rtol=0, atol=1e-6 * float(np.abs(step).max()))


def test_vectors_that_do_not_belong_together_are_refused() -> None:
    """Compiled code would read, or write, what is not theirs."""
    vector = drawn(300, 4)
    whole, short = Encoded.exact(vector), vector[:200].copy()
    with pytest.raises(ProtocolMisuse, match="belong together"):
        whole.products([(0, 300)], short)
    with pytest.raises(ProtocolMisuse, match="belong together"):
        whole.blend(short, 0, 300, 1.0, 1.0)
    for start, stop in ((-1, 3), (0, 301), (5, 4)):
        with pytest.raises(ProtocolMisuse, match="belong together"):
            whole.products([(start, stop)])


@pytest.mark.parametrize("momentum", [np.ones(4, np.float32), np.ones(5, np.float64), np.ones((5, 1), np.float32)])
def test_a_momentum_of_another_fragment_is_refused(momentum: npt.NDArray[Any]) -> None:
    with pytest.raises(ProtocolMisuse, match="belong together"):
        Nesterov(0.6, 0.3).update(np.ones(5, np.float32), np.ones(5, np.float32), {"momentum": momentum})


def test_a_folder_that_cannot_keep_code_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def njit(_: Any, **options: Any) -> Any:  # noqa: ANN401  (as numba's)
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise EOFError("Ran out of input")
        return lambda function: function

    monkeypatch.setattr(compiled, "njit", njit)
    assert compiled.compiled("sig")(len) is len
    assert asked == [True, False]


def test_an_exact_vector_shares_its_memory() -> None:
    vector = drawn(300, 4)
    encoded = Encoded.exact(vector)
    assert encoded.format is F32
    assert np.shares_memory(encoded.codes, vector)
