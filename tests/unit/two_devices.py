"""A program for a process with two devices, which `test_ondevice.py` runs.

Arrays that are sharded by rows or by columns, replicated, or on one device are encoded on each fragment's home as on the
host, and adopted where they lie.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.client.device_encoding import choose_encoder
from atoll.client.driver import AdoptableFragment
from atoll.client.step_hook import adopt
from atoll.codec import Encoded, format_of
from atoll.model.layout import plan_layout
from atoll.model.pytrees import describe, gather
from atoll.protocol.settings import ProtocolSettings
from atoll.run.heads import GlobalFragment

SHAPES = {"columns": (12, 8), "none": (0, 4), "one": (10, 3), "replicated": (7, 5), "rows": (16, 6), "scalar": ()}
PLACES = {
    name: PartitionSpec(*axes)  # type: ignore[no-untyped-call]
    for name, axes in {
        "columns": (None, "x"),
        "none": (None, "x"),
        "replicated": (),
        "rows": ("x", None),
        "scalar": (),
    }.items()
}


def main() -> int:
    first, second = jax.devices()
    mesh = Mesh(np.array([first, second]), ("x",))
    rng = np.random.default_rng(0)
    leaves: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        place = NamedSharding(mesh, PLACES[name]) if name in PLACES else second
        leaves[name] = jax.device_put(rng.normal(size=shape).astype(np.float32), place)
    protocol = ProtocolSettings(fragments=4, shards=1, codec_up="int4").check()
    layout = plan_layout(describe(leaves), 4)
    encoder, why = choose_encoder("device", layout, protocol, leaves, donated=False)
    assert encoder is not None, why
    assert encoder.homes == (first, second)
    for p, size in enumerate(layout.fragment_sizes()):
        anchor = rng.normal(size=size).astype(np.float32)
        placed = encoder.place(p, anchor)
        assert placed.home == (first, second)[p % 2]
        assert all(rows.devices() == {placed.home} for rows in placed.rows)
        vector, _ = encoder.encode(p, placed, leaves)
        host = Encoded.of(anchor - gather(layout, leaves, p), format_of("int4"))
        assert vector.codes.tobytes() == host.codes.tobytes()
        assert vector.scales.tobytes() == host.scales.tobytes()
        ready = [AdoptableFragment(GlobalFragment(p, 1, anchor), anchor, placed)]
        adopted = adopt(layout, protocol, leaves, ready)
        assert gather(layout, adopted, p).tobytes() == anchor.tobytes()
        assert all(adopted[name].sharding == leaves[name].sharding for name in leaves)
        leaves = adopted
    sys.stdout.write("as on the host\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
