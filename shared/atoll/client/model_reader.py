"""The merged model in the hands of a loop: `atoll.read_model(url, run=...)` and `island.merged()`.

The run's values are on the broker: each fragment's newest version, and their average where the run keeps one. Reading them
takes no part in the run, and needs neither token shards nor the model's code: the run record holds names, shapes and
dtypes.

At the end of a run shards merge the last steps while the learners leave, so one reader may be a version ahead of another. A
reader can wait until all shards have closed their ledgers: then everybody reads the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import SettingsError
from atoll.base.logs import get
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.client.parameters import ParameterShape, digest_of
from atoll.keys.identity import run_credentials
from atoll.model.layout import FrozenLeaf
from atoll.model.pytrees import describe
from atoll.model.tree_walk import is_jax_array, loaded_jax
from atoll.run.merged_model import MergedModel, read_merged, warn_if_partial, warn_if_unmerged
from atoll.run.record import check_frozen, check_tensors, founded_run, recorded_progress
from atoll.wire.messages import RunRecord

log = get(__name__)

Opener = Callable[[], Coroutine[Any, Any, Bus]]
SETTLE_S = 60.0
POLL_S = 0.2
PATIENCE_S = 30.0
IDENTITY: Final = "ATOLL_BROKER__IDENTITY"
"""The setting `broker.identity` as a variable of the environment; of all settings a loop takes this one only."""


@dataclass(frozen=True, slots=True)
class ReadModel:
    """The merged model of a run.

    Attributes:
        params: the newest values, as the pytree that was asked for, or NumPy arrays by name. Local and frozen leaves do not
            travel: they are as in `like`, or left out.
        average: their average over former versions, likewise; None where the run keeps none.
        versions_min, versions_max: the range of the fragments' versions.
        settled: whether the run is over and all shards have closed, so that nothing changes any more.
        run: the run record.
    """

    params: Any
    average: Any
    versions_min: int
    versions_max: int
    settled: bool
    run: RunRecord


def read_model(  # noqa: PLR0913  (one keyword each)
    broker: str | Opener,
    *,
    run: str,
    like: Any = None,  # noqa: ANN401  (any pytree)
    settle_s: float = 0.0,
    patience_s: float = PATIENCE_S,
    identity: Path | str | None = None,
    home: LoopThread | None = None,
) -> ReadModel:
    """Return the merged model of a run as the broker has it.

    Args:
        broker: URL of the broker, or a coroutine function that opens a `Bus`.
        run: run id.
        like: a pytree of arrays of the run's model. The result has its structure; each leaf is of its kind, dtype and device.
        settle_s: wait so long for the end of a run that has a token target, seconds.
        patience_s: how long to try to reach the broker, seconds.
        identity: file that says who reads, for a broker behind a locked door (`atoll keys add --kind reader`);
            None: the one that ATOLL_BROKER__IDENTITY names, if it names one.
        home: a loop thread to share with others.

    Raises:
        SettingsError: nobody has founded this run.
        LayoutMismatch: `like` is not the run's model.
        BrokerUnavailable, BlobGone: see `atoll.base.errors`.
    """
    check_place(broker, run)
    file = identity_file(broker, identity)
    credentials = None if file is None else run_credentials(file, run)
    options = BusOptions(patience_s=patience_s, credentials=credentials)
    opener = partial(open_bus, broker, run, name="reader", options=options) if isinstance(broker, str) else broker
    thread = home or LoopThread("atoll-reader")
    try:
        record, merged, settled = thread.submit(_read(opener, run, settle_s)).result()
    finally:
        if home is None:
            thread.stop()
    if like is not None:
        check_like(record, like)
    else:
        warn_if_partial(record)
    warn_if_unmerged(record, merged)
    return ReadModel(
        params=merged.params if like is None else place_like(merged.params, like),
        average=merged.average if like is None or merged.average is None else place_like(merged.average, like),
        versions_min=merged.versions_min,
        versions_max=merged.versions_max,
        settled=settled,
        run=record,
    )


async def _read(opener: Opener, run: str, settle_s: float) -> tuple[RunRecord, MergedModel, bool]:
    bus = await opener()
    try:
        record = await founded_run(bus, run)
        settled = await _await_end(bus, record, settle_s)
        return record, await read_merged(bus, record), settled
    finally:
        await bus.close()


def check_like(run: RunRecord, like: Any) -> None:  # noqa: ANN401  (any JAX pytree)
    """Raise `LayoutMismatch` unless `like` has all leaves that the run merges, and its frozen ones with their values."""
    names, frozen = {tensor.name for tensor in run.layout.tensors}, {leaf.name for leaf in run.frozen}
    leaves = ParameterShape(like).leaves(like)
    merged = tuple(tensor for tensor in describe(like) if tensor.name in names)
    check_tensors(run, merged, "give parameters of the run's model, or leave `like` away")
    check_frozen(run, tuple(FrozenLeaf(name, digest_of(name, leaves[name])) for name in leaves if name in frozen))


def check_place(broker: object, run: object) -> None:
    """Raise `SettingsError` unless these can be a broker and a run id."""
    if not isinstance(broker, str) and not callable(broker):
        raise wrong_type("broker", broker, "the broker's URL, or a coroutine function that opens a bus")
    if not isinstance(run, str):
        raise wrong_type("run", run, "a string")


def identity_file(broker: object, identity: Path | str | None) -> Path | None:
    """Return the file that says who we are at a broker with an address: the one given, else that of the environment."""
    told = identity if identity is not None or not isinstance(broker, str) else os.environ.get(IDENTITY) or None
    return None if told is None else Path(told)


def wrong_type(name: str, value: object, allowed: str, todo: str = "") -> SettingsError:
    """Return the error of an argument of a wrong type."""
    return SettingsError(
        f"{name} has a wrong type",
        got=f"{name} = {str(value)[:80]!r} ({type(value).__name__})",
        allowed=allowed,
        todo=todo or f"correct {name}",
    )


async def _await_end(bus: Bus, run: RunRecord, within_s: float) -> bool:
    now_s = asyncio.get_running_loop().time
    within_s = within_s if run.protocol.tokens_target else 0.0
    deadline_s = now_s() + within_s
    while not (await recorded_progress(bus, run)).over:
        if now_s() >= deadline_s:
            if within_s:
                todo = "some shard has not closed its ledger: does a synchronizer run, and have all learners left?"
                log.warning("model.unsettled", run=run.run, waited_s=within_s, todo=todo)
            return False
        await asyncio.sleep(POLL_S)
    return True


def place_like(values: Mapping[str, Any], like: Any) -> Any:  # noqa: ANN401  (any pytree)
    """Return values by name as a pytree like `like`: NumPy arrays stay NumPy's, others go where the leaf lies."""
    shape = ParameterShape(like)
    return shape.whole({name: _leaf(values.get(name), leaf) for name, leaf in shape.leaves(like).items()})


def _leaf(value: Any, leaf: Any) -> Any:  # noqa: ANN401  (arrays)
    if value is None or "float" not in str(leaf.dtype):
        return leaf
    array = np.asarray(value).astype(leaf.dtype, copy=False)
    return loaded_jax().device_put(array, leaf.sharding) if is_jax_array(leaf) else array
