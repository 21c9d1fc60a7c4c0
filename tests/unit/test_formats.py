"""Every format, in all of its forms: what it promises (`support.formats`), to the bit where it promises bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter

import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import FrameRejected, ProtocolMisuse, SettingsError
from atoll.base.large_arrays import Vector
from atoll.codec import FORMATS, Encoded, check_codecs, format_of
from atoll.codec.formats.interface import BLOCK, LEVELS_MAX, SCALE_BYTES, STEPS_MAX, Format, load_codes
from atoll.codec.kernels import FAST_ELEMENTS, fast_kernels, kernels, plain_kernels
from atoll.codec.kernels.in_numpy import COPY, MULTIPLY, STRETCH, Kernels
from atoll.codec.on_device import quantise as quantise_on_device
from atoll.protocol.settings import ProtocolSettings
from support.formats import FACTS, RETIRED

Wide = npt.NDArray[np.float64]
BOTH: list[Callable[[Format], Kernels]] = [plain_kernels, fast_kernels]

LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77, 4 * BLOCK)
NAMED = attrgetter("name")

every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
both_sets = pytest.mark.parametrize("kernels_of", BOTH, ids=["plain", "fast"])
lossy_formats = pytest.mark.parametrize(
    "form", [form for form in FORMATS.values() if FACTS[form.name].error], ids=NAMED
)
scaled_formats = pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.levels], ids=NAMED)
floating_formats = pytest.mark.parametrize("form", [form for form in FORMATS.values() if not form.levels], ids=NAMED)


def drawn(elements: int, seed: int, spread: float = 3.0) -> Vector:
    """Return values over many magnitudes, a run of zeros among them, and some that are tiny."""
    rng = np.random.default_rng(seed)
    vector = (rng.normal(size=elements) * 10.0 ** rng.uniform(-spread, spread, elements)).astype(np.float32)
    vector[elements // 3 : elements // 2] = 0.0
    vector[: elements // 8] *= np.float32(1e-37)
    return vector


def quantised(made: Kernels, form: Format, vector: Vector) -> tuple[Encoded, float]:
    """Return the vector in a format, by the kernels given, and what they say of its largest magnitude."""
    codes = np.zeros(form.codes_bytes(vector.size), np.uint8)
    scales = np.zeros(form.scales_count(vector.size), np.float32)
    largest = made.quantise(vector, codes, scales)
    return Encoded(form, vector.size, codes, scales), largest


def payload_of(sent: Encoded) -> npt.NDArray[np.uint8]:
    payload = np.zeros(sent.format.size(sent.elements), np.uint8)
    sent.pack_into(payload)
    return payload


def carried(form: Format, vector: Vector) -> Vector:
    sent = Encoded.of(vector, form)
    arrived = Encoded.blank(form, vector.size)
    arrived.unpack_from(payload_of(sent))
    assert arrived.expanded().tobytes() == sent.expanded().tobytes()
    return arrived.expanded()


# --- facts ---------------------------------------------------------------------------------------------------------------


def test_every_format_has_its_facts_and_a_name_and_a_number_of_its_own() -> None:
    """A format is registered under its own name; numbers on the wire are fixed: a change would misread older frames."""
    assert FORMATS.keys() == FACTS.keys()
    assert all(name == form.name for name, form in FORMATS.items())
    assert {name: form.number for name, form in FORMATS.items()} == {
        name: facts.number for name, facts in FACTS.items()
    }
    assert len({form.number for form in FORMATS.values()}) == len(FORMATS)


@every_format
def test_the_bits_on_the_wire_are_fixed(form: Format) -> None:
    vector = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
    assert xxhash.xxh3_64_hexdigest(payload_of(Encoded.of(vector, form)).tobytes()) == FACTS[form.name].digest


@every_format
@pytest.mark.parametrize("elements", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_sizes_are_known_beforehand(form: Format, elements: int) -> None:
    """In whole blocks where they have scales; the vector comes back as long as it was, writable."""
    a_block = FACTS[form.name].block_bytes
    assert form.size(elements) == (-(-elements // BLOCK) * a_block if form.levels else elements * a_block // BLOCK)
    back = carried(form, drawn(elements, elements))
    assert back.shape == (elements,)
    assert back.dtype == np.float32
    assert back.flags.writeable


def test_no_number_on_the_wire_is_used_twice() -> None:
    """A reader of an old frame must never take it for a new format."""
    numbers = [form.number for form in FORMATS.values()]
    assert len({*numbers, *RETIRED}) == len(numbers) + len(RETIRED)


def test_a_codec_that_does_not_exist_is_refused_by_its_setting() -> None:
    assert check_codecs(ProtocolSettings()) == ProtocolSettings()
    for setting in ("codec_up", "codec_down"):
        with pytest.raises(SettingsError, match=f"protocol.{setting}"):
            check_codecs(msgspec.structs.replace(ProtocolSettings(), **{setting: "nonesuch"}))
    with pytest.raises(SettingsError, match="nonesuch"):
        format_of("nonesuch")


# --- rounding ------------------------------------------------------------------------------------------------------------


@every_format
@settings(max_examples=30, deadline=None)
@given(elements=st.integers(1, 3 * BLOCK), seed=st.integers(0, 1 << 20))
def test_an_error_is_a_share_of_the_largest_of_a_block(form: Format, elements: int, seed: int) -> None:
    vector = drawn(elements, seed)
    back = carried(form, vector)
    for start in range(0, elements, BLOCK):
        here = slice(start, start + BLOCK)
        bound = FACTS[form.name].error * float(np.abs(vector[here]).max())
        assert np.abs(back[here] - vector[here].astype(np.float64)).max() <= bound + (2e-36 if bound else 0.0)


@scaled_formats
def test_every_number_goes_to_the_nearest_that_there_is(form: Format) -> None:
    block = np.random.default_rng(0).uniform(-1.0, 1.0, BLOCK).astype(np.float32)
    block[:2] = 1.0, -1.0
    sent = Encoded.of(block, form)
    there_is = form.numpy.decode(np.arange(1 << form.bits).astype(form.code).reshape(1, -1)).reshape(-1)
    steps = (form.levels or 0) / form.unit
    values = np.unique(there_is[np.abs(there_is) <= steps]).astype(np.float64) * form.unit * float(sent.scales[0])
    nearest = np.abs(block[:, None] - values).min(axis=1)
    np.testing.assert_allclose(np.abs(sent.expanded() - block.astype(np.float64)), nearest, atol=1e-6)


@scaled_formats
def test_zeros_tiny_numbers_and_extremes(form: Format) -> None:
    """Blocks too small to scale become zero; the largest magnitude is kept up to its scale's rounding, on both sides."""
    assert carried(form, np.zeros(200, np.float32)).tolist() == [0.0] * 200
    assert carried(form, np.full(3, 1e-40, np.float32)).tolist() == [0.0] * 3
    back = carried(form, np.array([-8.1, 8.1, 0.0], np.float32))
    assert back[0] == -back[1]
    assert 8.1 * (1 - 1e-6) <= back[1] <= 8.1 * (1 + 2.0**-7)


def test_f32_is_exact_bf16_is_the_type_and_e3m0_takes_powers_of_two() -> None:
    vector = np.concatenate([drawn(1000, 0), np.array([-0.0, 1e-45, 3.0e38], np.float32)])
    assert carried(FORMATS["f32"], vector).tobytes() == vector.tobytes()
    np.testing.assert_array_equal(
        carried(FORMATS["bf16"], vector), vector.astype(ml_dtypes.bfloat16).astype(np.float32)
    )
    some = np.array([1.0, 0.76, 0.74, -0.3, 2.0**-6, 0.0079, 0.0077, 0.0], np.float32)
    assert carried(FORMATS["e3m0"], some).tolist() == [1.0, 1.0, 0.5, -0.25, 2.0**-6, 2.0**-6, 0.0, 0.0]


# --- what is not finite --------------------------------------------------------------------------------------------------


@every_format
@both_sets
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_said_wherever_it_is(
    form: Format, kernels_of: Callable[[Format], Kernels], value: float
) -> None:
    """Infinity is what the quantiser returns for it, it raises nothing; and nothing of the kind is sent."""
    for place in (0, BLOCK, 299):
        vector = drawn(300, place)
        vector[place] = value
        assert quantised(kernels_of(form), form, vector)[1] == np.inf
        with pytest.raises(FrameRejected, match="hold"):
            Encoded.of(vector, form)


@every_format
def test_the_largest_is_held_and_no_more(form: Format) -> None:
    """The largest magnitude comes back finite, and one above it is refused, where float32 has one."""
    largest = np.float32(form.largest)
    assert np.isfinite(carried(form, np.array([largest, -largest], np.float32))).all()
    with np.errstate(over="ignore"):
        more = np.nextafter(largest, np.float32(np.inf))
    with pytest.raises(FrameRejected, match="hold"):
        Encoded.of(np.array([more], np.float32), form)


@scaled_formats
@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC0, 0x7C00])
def test_a_hostile_scale_is_refused_and_warns_nobody(form: Format, scale: int) -> None:
    """Infinite, not a number, or larger than any sender of ours would use."""
    payload = np.zeros(form.size(2), np.uint8)
    payload[:SCALE_BYTES].view("<u2")[0] = scale
    with pytest.raises(FrameRejected, match="scale"):
        Encoded.blank(form, 2).unpack_from(payload)


@floating_formats
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_a_sum_of_squares(form: Format, value: float) -> None:
    """Of what arrives: wherever it is, and nowhere else."""
    code = quantised(plain_kernels(form), form, np.ones(1, np.float32))[0].codes.copy()
    code[:] = np.array([value], np.float32).view(np.uint8)[
        -code.size :
    ]  # the upper bytes of a float32 hold the exponent
    for place in (0, 1023, 1024, 2999):
        sent = quantised(plain_kernels(form), form, drawn(3000, 1, 1.0))[0]
        sent.codes[place * code.size : (place + 1) * code.size] = code
        for kernels_of in BOTH:
            squares = kernels_of(form).squares
            assert not np.isfinite(squares(sent.codes, sent.scales, 0, 3000))
            for start, stop in ((0, place), (place + 1, 3000)):
                assert np.isfinite(squares(sent.codes, sent.scales, start, stop))


@floating_formats
@pytest.mark.parametrize("magnitude", [3e38, 1e19, 1.0, 1e-12, 1e-20, 1e-38, 1e-44, 0.0])
def test_a_length_is_right_at_any_magnitude(form: Format, magnitude: float) -> None:
    """Where squares leave the range of float32 they are added up in float64; both sets do it where the other does."""
    vector = np.random.default_rng(0).uniform(0.1, 1.0, 5000).astype(np.float32) * np.float32(
        min(magnitude, form.largest)
    )
    vector[7] = 0.0
    sent = quantised(plain_kernels(form), form, vector)[0]
    wide = sent.expanded().astype(np.float64)
    found = [kernels_of(form).squares(sent.codes, sent.scales, 3, 4990) for kernels_of in BOTH]
    assert found[0] == found[1] == pytest.approx(float(wide[3:4990] @ wide[3:4990]), rel=1e-6)


# --- three forms, the same bits ------------------------------------------------------------------------------------------


def done(made: Kernels, operation: int, v: Encoded, start: int, stop: int, other: Vector) -> tuple[Vector, Wide]:
    acc, lanes = drawn(v.elements, 9, 1.0), np.zeros(BLOCK)
    made.over(operation, v.codes, v.scales, start, stop, other, acc, lanes, 0.7, 0.3, 0.2)
    return acc, lanes


@every_format
@settings(max_examples=20, deadline=None)
@given(
    elements=st.one_of(st.integers(0, 4 * BLOCK), st.integers(STRETCH - 5, 3 * STRETCH)),
    places=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 1 << 20),
)
def test_both_sets_agree_to_the_bit(form: Format, elements: int, places: tuple[float, float], seed: int) -> None:
    vector, other = drawn(elements, seed), drawn(elements, seed + 1)
    (plain, largest), (fast, again) = (quantised(kernels_of(form), form, vector) for kernels_of in BOTH)
    assert plain.codes.tobytes() == fast.codes.tobytes()
    assert plain.scales.tobytes() == fast.scales.tobytes()
    assert largest == again == float(np.abs(vector).max(initial=0.0))
    start, stop = sorted(round(place * elements) for place in places)
    for operation in range(COPY, MULTIPLY + 1):
        (acc, lanes), (acc_again, lanes_again) = (
            done(kernels_of(form), operation, plain, start, stop, other) for kernels_of in BOTH
        )
        assert acc.tobytes() == acc_again.tobytes()
        assert lanes.tobytes() == lanes_again.tobytes()
    one, same = (kernels_of(form).squares(plain.codes, plain.scales, start, stop) for kernels_of in BOTH)
    assert one == same


@every_format
def test_every_code_stands_for_the_same_in_both_sets(form: Format) -> None:
    if form.bits > 8:
        return
    codes = np.arange(256, dtype=np.uint8)
    count = 256 * 8 // form.bits
    sent = Encoded(
        form, count, np.resize(codes, form.codes_bytes(count)), np.ones(form.scales_count(count), np.float32)
    )
    results = [done(kernels_of(form), COPY, sent, 0, count, sent.scales[:0]) for kernels_of in BOTH]
    assert results[0][0].tobytes() == results[1][0].tobytes()
    one, same = (kernels_of(form).squares(sent.codes, sent.scales, 0, count) for kernels_of in BOTH)
    assert one == same == float(results[0][0].astype(np.float64) @ results[0][0])
    rows = load_codes(form, np.resize(codes, 8 * form.items).view(form.code).reshape(-1, form.items))
    assert form.numpy.decode(rows).dtype == np.float32


def on_device(form: Format, vector: Vector) -> tuple[Encoded, Vector]:
    made = quantise_on_device(form, jnp.asarray(vector), 0, feedback=True)
    return made.on_host(form, vector.size), np.asarray(made.residue)


def same_on_device(form: Format, vector: Vector) -> bool:
    """Return whether host and device agree on codes, scales and what rounding took."""
    host, (device, residue) = Encoded.of(vector, form), on_device(form, vector)
    return (host.codes.tobytes(), host.scales.tobytes(), (vector - host.expanded()).tobytes()) == (
        device.codes.tobytes(),
        device.scales.tobytes(),
        residue.tobytes(),
    )


def normal(elements: int, seed: int) -> Vector:
    """Return values over many magnitudes, none so small that XLA takes it for zero."""
    vector = drawn(elements, seed)
    vector[: elements // 8] = 0.0
    return vector


@every_format
@settings(max_examples=8, deadline=None)
@given(elements=st.sampled_from(LENGTHS), seed=st.integers(0, 1 << 20))
def test_device_and_host_agree_to_the_bit(form: Format, elements: int, seed: int) -> None:
    assert same_on_device(form, normal(elements, seed))


@every_format
def test_they_agree_in_large_and_where_rounding_is_close(form: Format) -> None:
    """Any magnitude; blocks whose scale is just a bfloat16 or one float32 above it; and numbers halfway between codes."""
    assert same_on_device(form, normal(1_000_003, 1))
    rng = np.random.default_rng(2)
    for levels in {1, 7, 127, form.levels or 1}:
        largest = (rng.integers(1, 256, 4000) * 2.0 ** rng.integers(-90, 90, 4000)).astype(np.float32) * levels
        blocks = np.zeros((largest.size, BLOCK), np.float32)
        blocks[:, 0] = largest
        blocks[::2, 1] = np.nextafter(largest[::2], np.float32(np.inf))
        blocks[::3, 1] = np.nextafter(largest[::3], np.float32(0.0))
        halves = (rng.integers(-levels, levels, (largest.size, BLOCK - 2)) + 0.5) * (largest / levels)[:, None]
        nudge = rng.integers(-3, 4, halves.shape).astype(np.int32)
        blocks[:, 2:] = (halves.astype(np.float32).view(np.int32) + nudge).view(np.float32)
        assert same_on_device(form, blocks.reshape(-1))


@scaled_formats
def test_what_is_below_the_normal_numbers_may_be_zero_on_a_device(form: Format) -> None:
    """The one thing in which they may differ: the host keeps numbers below 2^-126, XLA on a CPU takes them for zero."""
    assert not on_device(form, np.full(BLOCK, 2.0**-130, np.float32))[0].expanded().any()
    assert same_on_device(form, np.full(BLOCK, 2.0**-100, np.float32))


# --- an encoded vector, used ---------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("elements", [1, BLOCK, 1000, 2 * FAST_ELEMENTS + 77])
def test_an_encoded_vector_does_as_its_expansion_would(form: Format, elements: int) -> None:
    """Sums of squares and products, blends and bends, beside float64 arithmetic on what `expanded` returns."""
    vector, other = drawn(elements, 1), drawn(elements, 2, 1.0)
    encoded = quantised(kernels(form, elements), form, vector)[0]
    v, w = encoded.expanded().astype(np.float64), other.astype(np.float64)
    start, stop = elements // 5, elements - elements // 7
    here = slice(start, stop)
    assert encoded.products([(start, stop)])[0] == pytest.approx(float(v[here] @ v[here]), rel=1e-6, abs=1e-30)
    size = float(np.abs(v[here]) @ np.abs(w[here]))
    assert encoded.products([(start, stop)], other)[0] == pytest.approx(float(v[here] @ w[here]), abs=1e-6 * size)
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


@lossy_formats
@both_sets
@pytest.mark.parametrize("elements", [0, 1, BLOCK, 1000, 4 * BLOCK + 5])
def test_settling_is_quantising_adding_and_rounding_what_is_left(
    form: Format, kernels_of: Callable[[Format], Kernels], elements: int
) -> None:
    values, target = drawn(elements, 1), drawn(elements, 2)
    values[: elements // 4], target[: elements // 8] = 0.0, np.float32(1e-39)
    sent, largest = quantised(plain_kernels(form), form, np.subtract(target, values))
    wanted = values.copy()
    sent.blend(wanted, 0, elements, 1.0, 1.0)
    following, carry = target.copy(), np.zeros(elements, np.uint16)
    codes, scales = np.zeros_like(sent.codes), np.zeros_like(sent.scales)
    found = kernels_of(form).settle(values, following, codes, scales, carry)
    left = np.abs(target - wanted).max(initial=0.0)
    assert found == max(largest, float(left))
    assert (codes.tobytes(), scales.tobytes()) == (sent.codes.tobytes(), sent.scales.tobytes())
    assert following.tobytes() == wanted.tobytes()
    assert carry.tobytes() == (target - wanted).astype(ml_dtypes.bfloat16).tobytes()


@every_format
def test_codes_of_another_length_are_refused(form: Format) -> None:
    """Compiled code would read what is not theirs."""
    sent = Encoded.of(drawn(300, 4), form)
    with pytest.raises(ProtocolMisuse, match="belong together"):
        Encoded(form, 300, sent.codes[:-1], sent.scales).products([(0, 3)])
    if sent.scales.size:
        with pytest.raises(ProtocolMisuse, match="belong together"):
            Encoded(form, 300, sent.codes, sent.scales[:-1]).products([(0, 3)])


def test_a_format_whose_squares_would_overflow_is_refused() -> None:
    """The kernels add the squares of a block in 32 bits; nothing would say that they had not fitted."""
    refused: list[dict[str, float]] = [{"levels": LEVELS_MAX + 1}, {"levels": LEVELS_MAX, "unit": 2.0**-5}]
    for steps in refused:
        with pytest.raises(ProtocolMisuse, match="too many steps"):
            dataclasses.replace(FORMATS["int8"], **steps)  # type: ignore[arg-type]
    dataclasses.replace(FORMATS["int8"], levels=LEVELS_MAX, unit=2.0**-4)
    with pytest.raises(ProtocolMisuse, match="width"):
        dataclasses.replace(FORMATS["int4"], bits=3)

    assert BLOCK * STEPS_MAX**2 < 2**31 <= BLOCK * (STEPS_MAX + 1) ** 2
