"""The way down: readers and shard hold the same bits, and what rounding took is not lost."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from atoll.codecs import Arriving, Sealed
from atoll.downleg import CARRY, Downleg
from atoll.errors import SettingsError
from atoll.kernels import Vector

SIZE = 3000


def drawn(seed: int, size: int = SIZE) -> Vector:
    """Return values."""
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@pytest.mark.parametrize("size", [SIZE, 1 << 18])
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "e3m0"])
def test_readers_hold_what_the_shard_holds_and_nothing_drifts(codec: str, size: int) -> None:
    """Over many versions, read from the wire: the same bits, and never further from the exact sum than one step's rounding."""
    downleg, exact = Downleg(codec), drawn(0, size).astype(np.float64)
    ours, reader = drawn(0, size), drawn(0, size)
    state = downleg.init(ours)
    errors = []
    for version in range(40):
        step = 0.01 * drawn(version + 1, size)
        exact += step
        target = downleg.unrounded(ours, state) + step
        delta = downleg.blank(size)
        assert delta is not None
        ours, state = downleg.rounded(ours, target, delta)
        sealed, arriving = Sealed(codec, delta), Arriving(size, codec)
        for number in range(len(sealed)):
            arriving.take(number, sealed.piece(number))
        arriving.encoded().blend(reader, 0, size, 1.0, 1.0)
        assert reader.tobytes() == ours.tobytes()
        errors.append(float(np.abs(ours - exact).max()))
    assert state[CARRY].dtype == ml_dtypes.bfloat16
    assert errors[-1] < 1.5 * max(errors[:5])


def test_without_the_carry_errors_would_add_up() -> None:
    """A step far below the quantiser's is lost every time, unless it is kept until it counts."""
    downleg, start = Downleg("int4"), np.zeros(128, np.float32)
    step = np.full(128, 0.01, np.float32)
    step[0] = 1.0
    kept, lost, state = start, start, downleg.init(start)
    for _ in range(100):
        kept, state = downleg.rounded(kept, downleg.unrounded(kept, state) + step, downleg.blank(128))
        lost, _ = downleg.rounded(lost, lost + step, downleg.blank(128))
    assert (lost[1:] == 0.0).all()
    assert kept[1:] == pytest.approx(1.0, abs=0.08)


def test_float32_needs_no_carry() -> None:
    """Every version is sent whole: the target is the values, and there is no delta."""
    downleg, values, target = Downleg("f32"), drawn(1), drawn(2)
    assert downleg.exact
    assert downleg.init(values) == {}
    assert downleg.unrounded(values, {}) is values
    assert downleg.blank(target.size) is None
    following, state = downleg.rounded(values, target, None)
    assert following is target
    assert state == {}


def test_an_unknown_codec_is_a_setting_to_correct() -> None:
    """It is said when the shard begins."""
    with pytest.raises(SettingsError, match="codec"):
        Downleg("fp4")
