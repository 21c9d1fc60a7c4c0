"""The way down: readers and shard hold the same bits, and what rounding took is not lost."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atoll.base.errors import FrameRejected, ProtocolMisuse, SettingsError
from atoll.base.large_arrays import Vector
from atoll.codec import FORMATS, KEYFRAME, Encoded, EncodedFrame, FrameDecoder
from atoll.merge.global_update import CARRY, DownlinkQuantiser
from atoll.merge.outer import State

SIZE = 3000


def drawn(seed: int, size: int = SIZE) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def settled(
    downlink: DownlinkQuantiser, values: Vector, target: Vector, delta: Encoded | None = None
) -> tuple[Vector, State]:
    """Return the values that readers reach on the way to `target`, and what is carried."""
    delta = delta or Encoded.blank(downlink.format, values.size)
    following, carry = target.copy(), np.empty(values.size, ml_dtypes.bfloat16)
    downlink.settle(values, following, delta, carry)
    return following, {CARRY: carry}


@pytest.mark.parametrize("size", [SIZE, 1 << 18])
@pytest.mark.parametrize("codec", [name for name in FORMATS if name != KEYFRAME])
def test_readers_hold_what_the_shard_holds_and_nothing_drifts(codec: str, size: int) -> None:
    """Over many versions, read from the wire: the same bits, and never further from the exact sum than one step's rounding."""
    downlink, exact = DownlinkQuantiser(codec), drawn(0, size).astype(np.float64)
    ours, reader = drawn(0, size), drawn(0, size)
    state = downlink.init(ours)
    errors = []
    for version in range(40):
        step = 0.01 * drawn(version + 1, size)
        exact += step
        target = downlink.unrounded(ours, state) + step
        delta = Encoded.blank(downlink.format, size)
        ours, state = settled(downlink, ours, target, delta)
        frame, arriving = EncodedFrame(codec, delta), FrameDecoder(size, codec)
        for number in range(len(frame)):
            arriving.take([(number, frame.piece(number))])
        arriving.vector.blend(reader, 0, size, 1.0, 1.0)
        assert reader.tobytes() == ours.tobytes()
        errors.append(float(np.abs(ours - exact).max()))
    assert state[CARRY].dtype == ml_dtypes.bfloat16
    assert errors[-1] < 1.5 * max(errors[:5])


def test_without_the_carry_errors_would_add_up() -> None:
    """A step far below the quantiser's is lost every time, unless it is kept until it counts."""
    downlink, start = DownlinkQuantiser("int4"), np.zeros(128, np.float32)
    step = np.full(128, 0.01, np.float32)
    step[0] = 1.0
    kept, lost, state = start, start, downlink.init(start)
    for _ in range(100):
        kept, state = settled(downlink, kept, downlink.unrounded(kept, state) + step)
        lost, _ = settled(downlink, lost, lost + step)
    assert (lost[1:] == 0.0).all()
    assert kept[1:] == pytest.approx(1.0, abs=0.08)


def test_float32_needs_no_carry() -> None:
    downlink, values = DownlinkQuantiser("f32"), drawn(1)
    assert downlink.exact
    assert downlink.init(values) == {}
    assert downlink.unrounded(values, {}) is values


@pytest.mark.parametrize("size", [SIZE, 1 << 18])
@pytest.mark.parametrize("codec", [name for name in FORMATS if name != KEYFRAME])
def test_what_a_codec_cannot_hold_is_refused(codec: str, size: int) -> None:
    """Wherever it is: a number that is none, a step to infinity, and one that only the sum makes infinite."""
    values, finite = drawn(0, size), drawn(1, size)
    for place in (0, size - 1):
        for wrong in (np.nan, np.inf, -np.inf):
            target = finite.copy()
            target[place] = wrong
            with pytest.raises(FrameRejected, match="hold"):
                settled(DownlinkQuantiser(codec), values, target)
    with pytest.raises(ProtocolMisuse, match="belong together"):
        settled(DownlinkQuantiser(codec), values[:-1], finite)
    form = FORMATS[codec]
    short = Encoded(form, size, np.empty(form.codes_bytes(size) - 1, np.uint8), np.empty(0, np.float32))
    with pytest.raises(ProtocolMisuse, match="belong together"):
        settled(DownlinkQuantiser(codec), values, finite, short)
    delta = Encoded.blank(form, size)
    with pytest.raises(ProtocolMisuse, match="belong to its values"):
        DownlinkQuantiser(codec).settle(values, finite, delta, np.empty(size, np.uint8))


def test_an_unknown_codec_is_a_setting_to_correct() -> None:
    with pytest.raises(SettingsError, match="codec"):
        DownlinkQuantiser("fp4")
