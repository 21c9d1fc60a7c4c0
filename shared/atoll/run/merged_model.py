"""Reads the merged model: the newest values of every fragment, and their average where the run keeps one.

Fragments are at different versions while a run goes on. The average (`atoll.merge.global_update`) is in the outer state that
the same head names. A commit removes that state at once, not one version later as for frames: if the fragment moves on during a
read, the reader begins again with the newer head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.base.errors import BlobCorrupt, BlobGone, BrokerUnavailable, PeerMisbehaved
from atoll.base.large_arrays import Vector
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.codec import unpack_arrays
from atoll.merge.global_update import AVERAGE, state_bytes_max
from atoll.merge.outer import State
from atoll.model.layout import Layout
from atoll.model.pytrees import named_dtype
from atoll.run.heads import READ_ATTEMPTS, fetch_frame_and_head, read_head, read_heads
from atoll.wire.messages import Head, RunRecord

log = get(__name__)

NAMED = 6


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The merged parameters by name (NumPy arrays), their range of versions, and the token-fragments merged in them.

    `average`, if kept, is over former versions.
    """

    params: dict[str, Any]
    versions_min: int
    versions_max: int
    average: dict[str, Any] | None = None
    token_fragments: int = 0


async def read_merged(bus: Bus, run: RunRecord) -> MergedModel:
    """Return the newest parameters of `run`, assembled from every fragment's head.

    Raises:
        BrokerUnavailable: the founder has not published all fragments yet.
        BlobGone: a fragment moved on faster than it could be read, several times.
    """
    heads = await read_heads(bus, run)
    if missing := len(run.layout.fragments) - len(heads):
        raise BrokerUnavailable(
            f"run {run.run!r} is founded, but has no values yet",
            got=f"{missing} of {len(run.layout.fragments)} fragments are missing",
            todo="wait until its founder has published them; a founder that died leaves that to the next learner",
        )
    values: dict[int, Vector] = {}
    for p in sorted(heads):  # a head that was superseded meanwhile is replaced by that of the values
        heads[p], frame = await fetch_frame_and_head(bus, run, heads[p])
        values[p] = frame.values
    average = None
    if run.protocol.average_versions:
        kept = {p: await _fetch_average(bus, run, head, values[p]) for p, head in sorted(heads.items())}
        average = assembled(run.layout, kept)
    versions = [head.version for head in heads.values()]
    merged = sum(head.tokens_merged for head in heads.values())
    return MergedModel(assembled(run.layout, values), min(versions), max(versions), average, merged)


def warn_if_unmerged(run: RunRecord, merged: MergedModel) -> None:
    """Log that a model is the founder's, if no round has been merged: it looks like any other."""
    if merged.versions_max == 0:
        log.warning("model.unmerged", run=run.run, why="nothing has been merged yet: these are the founder's values")


def warn_if_partial(run: RunRecord) -> None:
    """Log which leaves of a run's model are not on the broker, if any."""
    if names := [leaf.name for leaf in run.frozen]:
        log.warning(
            "model.partial", run=run.run, frozen=names[:NAMED], leaves=len(names), why="frozen leaves never travel"
        )


def assembled(layout: Layout, values: Mapping[int, Vector]) -> dict[str, Any]:
    """Return NumPy arrays by name, in their dtypes, from the flat float32 values of the fragments."""
    tensors = {t.name: np.zeros(t.shape, dtype=np.float32) for t in layout.tensors}
    for fragment, vector in values.items():
        for tensor_slice in layout.slices(fragment):
            rows = tensors[tensor_slice.tensor_name]
            target = rows[tensor_slice.start : tensor_slice.stop] if rows.ndim else rows
            target[...] = vector[slice(*tensor_slice.bounds)].reshape(target.shape)
    return {t.name: tensors[t.name].astype(named_dtype(t.dtype), copy=False) for t in layout.tensors}


async def _fetch_average(bus: Bus, run: RunRecord, head: Head, values: Vector) -> Vector:
    """Return the average that `head` or a newer one names; for version 0 its values are the average."""
    ref = head.state
    for _ in range(READ_ATTEMPTS):
        if ref is None:
            return values
        try:
            packed = await bus.get_blob(ref, state_bytes_max(values.size))
        except (BlobGone, BlobCorrupt):
            newer = await read_head(bus, run, head.fragment)
            ref = newer.state if newer is not None else None
        else:
            return _average_in(await asyncio.to_thread(unpack_arrays, packed, len(packed)), values, ref.stem)
    raise BlobGone(
        f"the average of fragment {head.fragment} cannot be read",
        got=head.state.stem if head.state else "no state",
        todo="its fragment moves on faster than this reader can read; evaluate nearer to the broker",
    )


def _average_in(state: State, values: Vector, stem: str) -> Vector:
    average = state.get(AVERAGE)
    if average is None or average.shape != values.shape or average.dtype != np.float32:
        raise PeerMisbehaved("an outer state without the average that this run keeps", got=stem)
    return average
