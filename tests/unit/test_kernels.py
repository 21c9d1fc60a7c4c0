"""The two sets of kernels agree bit for bit, and with float64 arithmetic as far as float32 can."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import ProtocolMisuse
from atoll.codec import ENCODINGS
from atoll.codec import kernels as sets
from atoll.codec.encoded import Encoded, codes_bytes, scales_count
from atoll.codec.kernels import (
    BLOCK,
    COPY,
    F32,
    FAST_ELEMENTS,
    INT8,
    MULTIPLY,
    Kernels,
    Vector,
    compiling,
    fast,
    fast_kernels,
    measuring,
    plain_kernels,
    quantising,
)
from atoll.codec.kernels.plain import STRETCH
from atoll.merge.outer import Nesterov

Wide = npt.NDArray[np.float64]
BOTH = [plain_kernels(), fast_kernels()]
NONE = np.empty(0, np.float32)


def drawn(elements: int, seed: int, spread: float = 3.0) -> Vector:
    """Return values over many magnitudes, a run of zeros among them."""
    rng = np.random.default_rng(seed)
    vector = (rng.normal(size=elements) * 10.0 ** rng.uniform(-spread, spread, elements)).astype(np.float32)
    vector[elements // 3 : elements // 2] = 0.0
    vector[: elements // 8] *= np.float32(1e-37)
    return vector


def quantised(kernels: Kernels, name: str, vector: Vector) -> tuple[Encoded, float]:
    """Return the vector in an encoding, by the kernels given, and what they say of its largest magnitude."""
    encoding = ENCODINGS[name]
    codes = np.zeros(codes_bytes(encoding.number, vector.size), np.uint8)
    scales = np.zeros(scales_count(encoding.number, vector.size), np.float32)
    largest = kernels.quantise(encoding.number, vector, codes, scales)
    return Encoded(encoding.number, vector.size, codes, scales), largest


def done(kernels: Kernels, operation: int, v: Encoded, start: int, stop: int, other: Vector) -> tuple[Vector, Wide]:
    """Return the sum and the lanes after an operation."""
    acc, lanes = drawn(v.elements, 9, 1.0), np.zeros(BLOCK)
    kernels.over(operation, v.kind, v.codes, v.scales, start, stop, other, acc, lanes, 0.7, 0.3, 0.2)
    return acc, lanes


def test_the_compiled_set_is_there() -> None:
    """What follows compares two sets, not one with itself; large vectors take the compiled one."""
    assert [kernels.name for kernels in BOTH] == ["plain", "fast"]
    assert sets.kernels(FAST_ELEMENTS).name == "fast"
    assert sets.kernels(FAST_ELEMENTS - 1).name == "plain"


def test_what_is_compiled_in_is_what_everybody_uses() -> None:
    """A constant that differs is found when the module is loaded, by name."""
    for module in (fast, measuring, quantising):
        compiling.agree(vars(module), "F32", "INT8", "INT4", "BLOCK")
    with pytest.raises(AssertionError, match="INT8"):
        compiling.agree({"INT8": 3, "BLOCK": BLOCK}, "INT8", "BLOCK")


@settings(max_examples=60, deadline=None)
@given(
    elements=st.one_of(st.integers(0, 4 * BLOCK), st.integers(STRETCH - 5, 3 * STRETCH)),
    name=st.sampled_from(list(ENCODINGS)),
    places=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 1 << 20),
)
def test_both_sets_agree_to_the_bit(elements: int, name: str, places: tuple[float, float], seed: int) -> None:
    """Codes, scales, sums and what is folded in, from any element to any other."""
    vector, other = drawn(elements, seed), drawn(elements, seed + 1)
    (plain, largest), (fast, again) = (quantised(kernels, name, vector) for kernels in BOTH)
    assert plain.codes.tobytes() == fast.codes.tobytes()
    assert plain.scales.tobytes() == fast.scales.tobytes()
    assert largest == again == float(np.abs(vector).max(initial=0.0))
    start, stop = sorted(round(place * elements) for place in places)
    for operation in range(COPY, MULTIPLY + 1):
        (acc, lanes), (acc_again, lanes_again) = (done(k, operation, plain, start, stop, other) for k in BOTH)
        assert acc.tobytes() == acc_again.tobytes()
        assert lanes.tobytes() == lanes_again.tobytes()
    one, same = (kernels.squares(plain.kind, plain.codes, plain.scales, start, stop) for kernels in BOTH)
    assert one == same


@pytest.mark.parametrize("magnitude", [3e38, 1e19, 1.0, 1e-12, 1e-20, 1e-38, 1e-44, 0.0])
@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_a_length_is_right_at_any_magnitude(name: str, magnitude: float) -> None:
    """Where squares leave the range of float32 they are added up in float64; both sets do it where the other does."""
    vector = np.random.default_rng(0).uniform(0.1, 1.0, 5000).astype(np.float32) * np.float32(magnitude)
    vector[7] = 0.0
    sent = quantised(plain_kernels(), name, vector)[0]
    wide = sent.expanded().astype(np.float64)
    found = []
    for kernels in BOTH:
        found.append(kernels.squares(sent.kind, sent.codes, sent.scales, 3, 4990))
        assert found[-1] == pytest.approx(float(wide[3:4990] @ wide[3:4990]), rel=1e-6)
    assert found[0] == found[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_what_is_not_finite_is_seen_in_a_sum_of_squares(name: str, value: float) -> None:
    """Wherever it is, and nowhere else."""
    for place in (0, 1023, 1024, 2999):
        vector = drawn(3000, 1, 1.0)
        sent = quantised(plain_kernels(), name, vector)[0]
        sent.codes.view(np.float32 if name == "f32" else ml_dtypes.bfloat16)[place] = value
        for kernels in BOTH:
            assert not np.isfinite(kernels.squares(sent.kind, sent.codes, sent.scales, 0, 3000))
            for start, stop in ((0, place), (place + 1, 3000)):
                assert np.isfinite(kernels.squares(sent.kind, sent.codes, sent.scales, start, stop))


@pytest.mark.parametrize("name", list(ENCODINGS))
@pytest.mark.parametrize("elements", [1, BLOCK, 1000, 2 * FAST_ELEMENTS + 77])
def test_an_encoded_vector_does_as_its_expansion_would(name: str, elements: int) -> None:
    """Sums of squares and products, blends and bends, beside float64 arithmetic on what `expanded` returns."""
    vector, other = drawn(elements, 1), drawn(elements, 2, 1.0)
    encoded = quantised(sets.kernels(elements), name, vector)[0]
    v, w = encoded.expanded().astype(np.float64), other.astype(np.float64)
    start, stop = elements // 5, elements - elements // 7
    here = slice(start, stop)
    assert encoded.squares(start, stop) == pytest.approx(float(v[here] @ v[here]), rel=1e-6, abs=1e-30)
    size = float(np.abs(v[here]) @ np.abs(w[here]))
    assert encoded.product(start, stop, other) == pytest.approx(float(v[here] @ w[here]), abs=1e-6 * size)
    assert encoded.part(start, stop).tobytes() == encoded.expanded()[here].tobytes()
    for bent in (False, True):
        acc = drawn(elements, 3)
        before = acc.copy()
        wanted = acc.astype(np.float64)
        wanted[here] = 0.75 * wanted[here] + 0.25 * v[here] + (0.5 * w[here] if bent else 0.0)
        if bent:
            encoded.bend(acc, (start, stop), (0.75, 0.25, 0.5), other)
        else:
            encoded.blend(acc, start, stop, 0.75, 0.25)
        scale = 0.75 * np.abs(before) + 0.25 * np.abs(v) + 0.5 * np.abs(w)
        assert (np.abs(acc - wanted) <= 4e-7 * scale + 1e-38).all()
        assert acc[:start].tobytes() + acc[stop:].tobytes() == before[:start].tobytes() + before[stop:].tobytes()


@pytest.mark.parametrize("kernels", BOTH, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("name", list(ENCODINGS))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_said_wherever_it_is(kernels: Kernels, name: str, value: float) -> None:
    """Infinity is what the quantiser returns for it, and it raises nothing."""
    for place in (0, BLOCK, 299):
        vector = drawn(300, place)
        vector[place] = value
        assert quantised(kernels, name, vector)[1] == np.inf


def test_one_infinite_scale_is_seen_in_a_sum_of_squares() -> None:
    """A hostile sender's; nothing warns, nobody else's elements suffer."""
    codes, scales = np.ones(2 * BLOCK, np.uint8), np.array([1.0, np.inf], np.float32)
    for kernels in BOTH:
        assert not np.isfinite(kernels.squares(INT8, codes, scales, 0, 2 * BLOCK))
        assert kernels.squares(INT8, codes, scales, 0, BLOCK) == BLOCK


def test_nesterov_steps_agree_to_the_bit() -> None:
    """And with the formula."""
    values, pseudo_gradient, momentum, lost = (drawn(3000, seed, 1.0) for seed in range(4))
    bits = lost.astype(ml_dtypes.bfloat16).view(np.uint16)
    for carry, before in itertools.product((bits[:0], bits), (momentum[:0], momentum)):
        results = []
        for kernels in BOTH:
            after, kept = np.empty_like(values), np.empty_like(before)
            kernels.nesterov(values, carry, pseudo_gradient, before, np.float32(0.6), np.float32(0.3), after, kept)
            results.append(after.tobytes() + kept.tobytes())
        assert results[0] == results[1]
        wanted = (
            0.3 * before.astype(np.float64) + pseudo_gradient if before.size else pseudo_gradient.astype(np.float64)
        )
        if before.size:
            np.testing.assert_allclose(kept, wanted, rtol=0, atol=1e-6 * float(np.abs(wanted).max()))
        unrounded = values + carry.view(ml_dtypes.bfloat16).astype(np.float64) if carry.size else values
        step = unrounded - 0.6 * (pseudo_gradient + 0.3 * wanted if before.size else pseudo_gradient)
        np.testing.assert_allclose(after, step, rtol=0, atol=1e-6 * float(np.abs(step).max()))


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "f32"])
@pytest.mark.parametrize("elements", [0, 1, BLOCK, 1000, 4 * BLOCK + 5])
def test_settling_is_quantising_adding_and_rounding_what_is_left(name: str, elements: int) -> None:
    """To the bit, in both sets, also where scales are too small to be sent."""
    encoding = ENCODINGS[name]
    values, target = drawn(elements, 1), drawn(elements, 2)
    values[: elements // 4], target[: elements // 8] = 0.0, np.float32(1e-39)
    for kernels in BOTH:
        sent, largest = quantised(plain_kernels(), name, np.subtract(target, values))
        wanted = values.copy()
        sent.blend(wanted, 0, elements, 1.0, 1.0)
        following, carry = target.copy(), np.zeros(elements, np.uint16)
        codes, scales = np.zeros_like(sent.codes), np.zeros_like(sent.scales)
        assert kernels.settle(encoding.number, values, following, codes, scales, carry) == largest
        assert (codes.tobytes(), scales.tobytes()) == (sent.codes.tobytes(), sent.scales.tobytes())
        assert following.tobytes() == wanted.tobytes()
        assert carry.tobytes() == (target - wanted).astype(ml_dtypes.bfloat16).tobytes()


def test_vectors_that_do_not_belong_together_are_refused() -> None:
    """Compiled code would read, or write, what is not theirs."""
    vector = drawn(300, 4)
    whole, short = Encoded.exact(vector), vector[:200].copy()
    with pytest.raises(ProtocolMisuse, match="belong together"):
        whole.product(0, 300, short)
    with pytest.raises(ProtocolMisuse, match="belong together"):
        whole.blend(short, 0, 300, 1.0, 1.0)
    for start, stop in ((-1, 3), (0, 301), (5, 4)):
        with pytest.raises(ProtocolMisuse, match="belong together"):
            whole.squares(start, stop)
    for name in ENCODINGS:
        sent = quantised(plain_kernels(), name, vector)[0]
        with pytest.raises(ProtocolMisuse, match="belong together"):
            Encoded(sent.kind, 300, sent.codes[:-1], sent.scales).squares(0, 3)
        if sent.scales.size:
            with pytest.raises(ProtocolMisuse, match="belong together"):
                Encoded(sent.kind, 300, sent.codes, sent.scales[:-1]).squares(0, 3)


@pytest.mark.parametrize("momentum", [np.ones(4, np.float32), np.ones(5, np.float64), np.ones((5, 1), np.float32)])
def test_a_momentum_of_another_fragment_is_refused(momentum: npt.NDArray[Any]) -> None:
    """Outer state comes from the broker."""
    with pytest.raises(ProtocolMisuse, match="belong together"):
        Nesterov(0.6, 0.3).update(np.ones(5, np.float32), np.ones(5, np.float32), {"momentum": momentum})


def test_a_folder_that_cannot_keep_code_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged or full one, and one that is not ours: the function is compiled without it."""
    asked = []

    def njit(_: Any, **options: Any) -> Any:  # noqa: ANN401  (as numba's)
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise EOFError("Ran out of input")
        return lambda function: function

    monkeypatch.setattr(compiling, "njit", njit)
    assert compiling.compiled("sig")(len) is len
    assert asked == [True, False]


def test_an_exact_vector_shares_its_memory() -> None:
    """Nothing is copied to measure a vector."""
    vector = drawn(300, 4)
    encoded = Encoded.exact(vector)
    assert encoded.kind == F32
    assert np.shares_memory(encoded.codes, vector)
