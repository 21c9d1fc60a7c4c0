r"""Adopts a global fragment at a step boundary, for the arrays of any loop.

Let theta be the learner's values of the fragment, Theta the global ones and theta_s the snapshot that was pushed last:

.. math::

    overwrite: \theta \leftarrow \Theta \qquad
    blend: \theta \leftarrow \alpha\theta + (1-\alpha)\Theta \qquad
    carry: \theta \leftarrow \Theta + (\theta - \theta_s)

Overwrite is the paper's rule. Blend is Streaming DiLoCo's. Carry keeps the progress made while the round was under way.
Progress that is of no use any more is overwritten whatever the rule (`atoll.protocol.island.Island.keeps`).
Inner-optimizer moments stay. The learner replaces arrays and never writes to them. It always copies from host memory:
JAX may alias an aligned NumPy buffer, and a frame must not change under a running step. A frame that is on the leaves'
device already is adopted there (`atoll.client.device_encoding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from atoll.base import scratch_arrays
from atoll.base.buffer_pool import Vector
from atoll.client.device_encoding import Placed, adopt_on_device
from atoll.model.layout import Layout
from atoll.model.pytrees import gather, scatter
from atoll.model.tree_walk import is_jax_array, loaded_jax
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import GlobalFragment


@dataclass(frozen=True, slots=True)
class AdoptableFragment:
    """A global fragment to adopt, perhaps `placed` on its device; `carry` keeps the progress since `carry_from`.

    Without `carry_from` nothing is kept, and it is overwritten.
    """

    frame: GlobalFragment
    carry_from: Vector | None
    placed: Placed | None = None


def adopt(
    layout: Layout, settings: ProtocolSettings, leaves: Mapping[str, Any], ready: list[AdoptableFragment]
) -> dict[str, Any]:
    """Return `leaves` (name -> array) with every ready fragment adopted; untouched arrays are passed through."""
    adopted = dict(leaves)
    for item in ready:
        slices, rules = layout.slices(item.frame.fragment), settings.of(item.frame.fragment)
        if item.carry_from is None:
            rules = msgspec.structs.replace(rules, adoption="overwrite")
        on_device = None if item.placed is None else adopt_on_device(slices, rules, adopted, item.placed)
        if on_device is not None:
            adopted |= on_device
            continue
        values = item.frame.values
        if rules.adoption == "blend":
            alpha = np.float32(rules.blend_alpha)
            values = alpha * gather(layout, adopted, item.frame.fragment) + (np.float32(1.0) - alpha) * values
        elif rules.adoption == "carry" and item.carry_from is not None:
            carried = gather(
                layout, adopted, item.frame.fragment
            )  # a vector of its own, as large as all that is adopted
            carried -= item.carry_from
            carried += values
            values = carried
        shared = values is item.frame.values
        for name, pieces in scatter(layout, item.frame.fragment, values, adopted).items():
            adopted[name] = _with_rows(adopted[name], pieces, shared=shared)
            scratch_arrays.release_pages(*(rows for _, _, rows in pieces))
    return adopted


def _with_rows(leaf: Any, pieces: list[tuple[int, int, npt.NDArray[Any]]], *, shared: bool) -> Any:  # noqa: ANN401  (any array)
    """Return a new array like `leaf`, on the same device, with the given rows replaced; `shared` rows are somebody else's.

    On the CPU the array is put together in host memory: a copy, and nothing to compile. On an accelerator only the new
    rows are transferred, and the update is one program per pair of shapes, whatever the row. An array that was not
    committed to a device stays uncommitted: otherwise a jitted step would be compiled again for the other kind.
    """
    jax, on_host = loaded_jax(), not is_jax_array(leaf)
    if on_host or all(device.platform == "cpu" for device in leaf.devices()):
        whole = pieces[0][2].shape == leaf.shape
        array = pieces[0][2] if whole else np.array(leaf)
        if not whole:
            for start, stop, rows in pieces:
                array[... if array.ndim == 0 else slice(start, stop)] = rows
        if not on_host and not leaf.committed:
            return jax.numpy.array(array, copy=True)
        array = (
            array.copy() if whole and shared else array
        )  # `device_put` aliases aligned memory, whatever its options are
        return array if on_host else jax.device_put(array, leaf.sharding)
    from atoll.codec import on_device  # noqa: PLC0415

    for start, _, rows in pieces:
        leaf = on_device.overwritten(leaf, rows, start) if leaf.ndim else jax.device_put(rows, leaf.sharding)
    return leaf
