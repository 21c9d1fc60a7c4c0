"""Makes pseudo-gradients on the device of the parameters: only what is sent crosses from an accelerator to its host.

    host     ── values of a new version, float32, once ──►  device: rows of the anchor ──► adopted: rows of the leaves
             ◄── codes and scales ─────────────────────────  anchor - theta (+ what was kept), quantised

Otherwise the parameters of a fragment cross as they are, 16 or 32 bits each, and the host subtracts and quantises. On the
device one program does both (`atoll.codec.on_device`), compiled once per shape of a fragment. The codes equal the host's to
the bit. A worker thread does all this: the training thread only hands over references and adopts rows that are on its
device already.

**A fragment has a home**: the device of the parameters, or one of them in turn where they are on several. The home holds
the fragment's anchor, four bytes per parameter, and with `error_feedback` the rounding residual, as much again. Rows of
sharded leaves move there shard by shard. No program runs on several devices: it would have to meet the training step's
programs in the same order on all of them, or both would wait for ever, and two threads cannot promise that order.

**The host does the rest**: where the training step keeps its arrays there, where the host needs what was sent (carry,
endings together) or has a copy anyway (donated parameters), where an array is offloaded or shared with other processes. A
learner pushes from the host again if its arrays change in kind, or if its device has no room for an anchor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.base.large_arrays import Vector
from atoll.base.logs import get
from atoll.codec import Encoded, format_of
from atoll.model.layout import FragmentSlice, Layout
from atoll.model.tree_walk import is_jax_array
from atoll.protocol.settings import ProtocolSettings

log = get(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """A fragment's values on its home: per slice its rows, float32 JAX arrays."""

    home: Any
    rows: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes pseudo-gradients on devices. Its methods are for worker threads; they raise `RuntimeError` as JAX does.

    `homes` are the devices that get fragments in turn. If the leaves are not `committed` to their devices, neither are
    the arrays beside them: otherwise a jitted step would be compiled again for the other kind of argument.
    """

    layout: Layout
    protocol: ProtocolSettings
    homes: tuple[Any, ...]
    committed: bool

    def place(self, fragment: int, values: Vector) -> Placed:
        """Put a fragment's values, flat float32, on its home, and return them once they have arrived."""
        import jax  # noqa: PLC0415  (the kernel loads JAX only where arrays are JAX arrays)

        home = self.homes[fragment % len(self.homes)]
        shapes = {tensor.name: tensor.shape for tensor in self.layout.tensors}
        rows: list[Any] = []
        with jax.default_device(home), jax.transfer_guard("allow"):
            for tensor_slice in self.layout.slices(fragment):
                whole = shapes[tensor_slice.tensor_name]
                shape = (tensor_slice.stop - tensor_slice.start, *whole[1:]) if whole else ()
                here = values[slice(*tensor_slice.bounds)].reshape(shape)
                rows.append(jax.device_put(here, home if self.committed else None, may_alias=False))
            for placed in rows:
                placed.block_until_ready()
        return Placed(home, tuple(rows))

    async def placed(self, fragment: int, version: int, values: Vector) -> Placed | None:
        """Put a version's values on their home, if it has room; pseudo-gradients of the fragment are then made there."""
        try:
            return await asyncio.to_thread(self.place, fragment, values)
        except RuntimeError as error:
            log.warning("anchor.not_placed", fragment=fragment, version=version, reason=str(error))
            return None

    def reads(self, fragment: int, leaves: Mapping[str, Any]) -> bool:
        """Return whether pseudo-gradients of a snapshot with these arrays can still be made here."""
        slices = self.layout.slices(fragment)
        return not any(_obstacle(leaves[tensor_slice.tensor_name]) for tensor_slice in slices)

    def encode(
        self,
        fragment: int,
        anchor: Placed,
        leaves: Mapping[str, Any],
        kept: Any = None,  # noqa: ANN401  (a JAX or NumPy array)
    ) -> tuple[Encoded, Any]:
        """Return a fragment's pseudo-gradient in the snapshot `leaves`, on the host, and its rounding residual, at home.

        `kept` is the residual of the last time, flat float32. Raises `FrameRejected` (`not_finite`) rather than send a
        value that would not arrive finite.
        """
        import jax  # noqa: PLC0415

        from atoll.codec import on_device  # noqa: PLC0415

        slices, form = self.layout.slices(fragment), format_of(self.protocol.of(fragment).codec_up)
        with jax.default_device(anchor.home), jax.transfer_guard("allow"):
            found = [_rows_at(leaves[part.tensor_name], part, anchor.home) for part in slices]
            sizes, corners = tuple(part.size for part in slices), tuple(rows.corners for rows in found)
            made = on_device.pseudo_gradient(
                on_device.EncodingPlan(form, self.protocol.of(fragment).error_feedback, sizes, corners),
                anchor.rows,
                tuple(each.parts for each in found),
                tuple(each.start for each in found),
                kept,
                0,
            )
            vector = made.on_host(form, sum(sizes))
        return vector, made.residue


def choose_encoder(
    choice: str, layout: Layout, protocol: ProtocolSettings, leaves: Mapping[str, Any], *, donated: bool
) -> tuple[Encoder | None, str]:
    """Return the encoder for the device, or None where the host makes pseudo-gradients, and why.

    `choice` is `host`, `device` (wherever that is possible) or `auto` (where that is an accelerator).
    """
    merged = {tensor.name: leaves[tensor.name] for tensor in layout.tensors}
    unfit = [f"{name!r} {reason}" for name, leaf in merged.items() if (reason := _obstacle(leaf))]
    if choice == "host":
        return None, "so it was asked for"
    if donated:
        return None, "snapshots of donated parameters are copies on the host"
    if protocol.adoption == "carry" or protocol.ending == "together":
        return None, "adoption by carry and endings together need what was sent"
    if unfit:
        return None, f"{unfit[0]} ({len(unfit)} of {len(merged)} tensors)"
    homes = sorted({device for leaf in merged.values() for device in leaf.devices()}, key=lambda device: device.id)
    platforms = sorted({str(device.platform) for device in homes})
    if choice == "auto" and "cpu" in platforms:
        return None, "parameters lie in the host's memory"
    committed = any(leaf.committed for leaf in merged.values())
    return Encoder(
        layout, protocol, tuple(homes), committed
    ), f"parameters lie on {len(homes)} x {', '.join(platforms)}"


def adopt_on_device(
    slices: Sequence[FragmentSlice], settings: ProtocolSettings, leaves: Mapping[str, Any], placed: Placed
) -> dict[str, Any] | None:
    """Return the arrays of a fragment, by name, with `placed` adopted in them on their device.

    Return None, with nothing done, unless all of them are on its home alone. For the training thread: it never waits.
    """
    import jax  # noqa: PLC0415

    from atoll.codec import on_device  # noqa: PLC0415

    changed: dict[str, Any] = {}
    with jax.transfer_guard("allow"):  # the loop may forbid transfers: ours are a few numbers
        for tensor_slice, rows in zip(slices, placed.rows, strict=True):
            leaf = changed.get(tensor_slice.tensor_name, leaves[tensor_slice.tensor_name])
            if _obstacle(leaf) or leaf.devices() != {placed.home} or leaf.committed != rows.committed:
                return None
            if settings.adoption == "blend":
                keep = np.float32(settings.blend_alpha)
                changed[tensor_slice.tensor_name] = on_device.blend(
                    leaf, rows, tensor_slice.start, keep, np.float32(1.0) - keep, 0
                )
            else:
                changed[tensor_slice.tensor_name] = on_device.overwrite(leaf, rows, tensor_slice.start)
    return changed


@dataclass(frozen=True, slots=True)
class _Found:
    """Rows of a leaf at home: one larger array and where they begin, or several arrays and their places."""

    parts: tuple[Any, ...]
    start: int = 0
    corners: tuple[tuple[int, ...], ...] = ()


def _obstacle(leaf: Any) -> str:  # noqa: ANN401  (any array)
    if not is_jax_array(leaf):
        return "is no array of JAX"
    if not leaf.is_fully_addressable:
        return "lies with other processes, too"
    usual = {device.default_memory().kind for device in leaf.devices()}
    return "" if {leaf.sharding.memory_kind} <= usual else f"lies in {leaf.sharding.memory_kind} memory"


def _rows_at(leaf: Any, tensor_slice: FragmentSlice, home: Any) -> _Found:  # noqa: ANN401  (a JAX array and a device)
    """Return the rows of a slice on `home`; rows that are elsewhere are moved there."""
    if leaf.devices() == {home}:
        return _Found((leaf,), tensor_slice.start)
    import jax  # noqa: PLC0415

    from atoll.codec import on_device  # noqa: PLC0415

    parts: dict[tuple[int, ...], Any] = {}
    for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device != home):
        data = jax.device_put(shard.data, shard.device)
        if not leaf.ndim or (data.shape == leaf.shape and shard.device == home):
            return _Found((jax.device_put(data, home),), tensor_slice.start)
        first, *others = (along.start or 0 for along in shard.index)
        low, high = max(tensor_slice.start, first), min(tensor_slice.stop, first + data.shape[0])
        corner = (low - tensor_slice.start, *others)
        if low < high and corner not in parts:
            parts[corner] = jax.device_put(on_device.cut(data, low - first, rows=high - low), home)
    return _Found(tuple(parts.values()), 0, tuple(parts))
