r"""Taking a global fragment over at a step boundary, for arrays of any JAX loop.

Let theta be the learner's values of the fragment, Theta the global ones and theta_s the snapshot that was pushed last:

.. math::

    overwrite: \theta \leftarrow \Theta \qquad
    blend: \theta \leftarrow \alpha\theta + (1-\alpha)\Theta \qquad
    carry: \theta \leftarrow \Theta + (\theta - \theta_s)

Overwrite is the paper's rule, blend is Streaming DiLoCo's, carry keeps what was learnt while the round was on its way.
Inner-optimizer moments stay. Arrays are replaced, never written to, and always copied from host memory: JAX may alias
an aligned NumPy buffer, and a frame must not change under a running step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.fragments import gather, scatter
from atoll.island.driver import Ready
from atoll.island.founding import Vector
from atoll.layout import Layout
from atoll.protocol.settings import ProtocolSettings


def adopt(layout: Layout, settings: ProtocolSettings, leaves: Mapping[str, Any], ready: list[Ready]) -> dict[str, Any]:
    """Return `leaves` (name -> array) with every ready fragment adopted; untouched arrays are passed through."""
    import jax.numpy as jnp  # noqa: PLC0415  (the kernel loads JAX only where arrays are JAX arrays)

    adopted = dict(leaves)
    for item in ready:
        values = adopted_values(layout, settings, adopted, item)
        for name, pieces in scatter(layout, item.frame.fragment, values, adopted).items():
            leaf = adopted[name]
            for start, stop, rows in pieces:
                whole = leaf.ndim == 0 or (start == 0 and stop == leaf.shape[0])
                new = jnp.array(rows, dtype=leaf.dtype, copy=True)
                leaf = _placed(new.reshape(leaf.shape), leaf) if whole else leaf.at[start:stop].set(new)
            adopted[name] = leaf
    return adopted


def adopted_values(layout: Layout, settings: ProtocolSettings, leaves: Mapping[str, Any], item: Ready) -> Vector:
    """Return the values, flat float32, that the learner continues from."""
    if settings.adoption == "overwrite":
        return item.frame.values
    own = gather(layout, leaves, item.frame.fragment)
    if settings.adoption == "blend":
        alpha = np.float32(settings.blend_alpha)
        return alpha * own + (np.float32(1.0) - alpha) * item.frame.values
    return item.frame.values + (own - item.carry_from)


def _placed(new: Any, old: Any) -> Any:  # noqa: ANN401  (any JAX array)
    """Return `new` where `old` lies (device or sharding)."""
    import jax  # noqa: PLC0415

    return new if new.sharding == old.sharding else jax.device_put(new, old.sharding)
