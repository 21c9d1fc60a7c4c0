"""What is adopted is in memory of its own, and arrays are replaced, never written to."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from atoll.client.driver import AdoptableFragment
from atoll.client.step_hook import adopt
from atoll.model.layout import plan_layout
from atoll.model.pytrees import describe, gather
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import GlobalFragment


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("made", [np.asarray, jnp.asarray])
def test_an_adopted_array_is_nobody_elses(made: Callable[..., Any], dtype: Any, fragments: int) -> None:  # noqa: ANN401
    """Whether a fragment brings all of a tensor or some rows; a frame that changes later changes nothing."""
    before = {"w": made(np.ones((6, 4), dtype)), "s": made(np.asarray(2.0, dtype))}
    layout, settings = plan_layout(describe(before), fragments), ProtocolSettings(fragments=fragments, shards=1)
    leaves: dict[str, Any] = dict(before)
    for fragment, size in enumerate(layout.fragment_sizes()):
        values = np.arange(size, dtype=np.float32)
        wanted = values.copy()
        leaves = adopt(layout, settings, leaves, [AdoptableFragment(GlobalFragment(fragment, 1, values), values)])
        values[:] = -1.0
        np.testing.assert_array_equal(gather(layout, leaves, fragment), wanted)
    assert {name: (type(leaf), leaf.dtype) for name, leaf in leaves.items()} == {
        name: (type(leaf), leaf.dtype) for name, leaf in before.items()
    }
    assert (np.asarray(before["w"]) == 1.0).all()
    assert float(before["s"]) == 2.0


@pytest.mark.parametrize("writeable", [False, True])
def test_an_adopted_array_can_be_changed_where_the_loops_own_could(writeable: bool) -> None:  # noqa: FBT001
    """Whether it is replaced whole or in part, once or twice in one step."""
    before = {"w": np.ones((6, 4), np.float32), "b": np.ones(4, np.float32)}
    for leaf in before.values():
        leaf.flags.writeable = writeable
    layout, settings = plan_layout(describe(before), 3), ProtocolSettings(fragments=3, shards=1)
    frames = [GlobalFragment(p, 1, np.zeros(size, np.float32)) for p, size in enumerate(layout.fragment_sizes())]

    leaves = adopt(layout, settings, before, [AdoptableFragment(frame, None) for frame in frames])

    assert not any(leaf.any() for leaf in leaves.values())
    assert [leaf.flags.writeable for leaf in leaves.values()] == [writeable, writeable]


@pytest.mark.parametrize(
    ("adoption", "since", "kept"),
    [("carry", 3.0, 2.0), ("carry", None, 0.0), ("blend", 3.0, 2.0), ("blend", None, 0.0)],
)
def test_progress_is_kept_by_the_rule_if_it_is_of_use(adoption: str, since: float | None, kept: float) -> None:
    """Carry adds what was trained since the push, blend a half of the way; without either the global values stand."""
    before = {"w": np.full(8, 5.0, np.float32)}
    settings = ProtocolSettings(fragments=1, shards=1, adoption=adoption, blend_alpha=0.5)  # type: ignore[arg-type]
    origin = None if since is None else np.full(8, since, np.float32)
    frame = GlobalFragment(0, 9, np.full(8, 1.0, np.float32))

    leaves = adopt(plan_layout(describe(before), 1), settings, before, [AdoptableFragment(frame, origin)])

    np.testing.assert_array_equal(leaves["w"], np.full(8, 1.0 + kept, np.float32))


@pytest.mark.parametrize("committed", [False, True])
def test_an_adopted_array_does_not_look_into_its_frame(committed: bool) -> None:  # noqa: FBT001
    """Memory as large frames have it, aligned to pages, is what JAX would rather not copy."""
    before = {"w": jnp.ones((1024, 1024), np.float32)}
    if committed:
        before = {"w": jax.device_put(before["w"], jax.devices()[0])}
    layout, settings = plan_layout(describe(before), 1), ProtocolSettings(fragments=1, shards=1)
    values = np.frombuffer(mmap.mmap(-1, 4 << 20), np.float32)
    leaves = adopt(layout, settings, before, [AdoptableFragment(GlobalFragment(0, 1, values), values)])
    leaves["w"].block_until_ready()
    values[:] = 7.0
    assert not np.asarray(leaves["w"]).any()
    assert leaves["w"].committed == committed
