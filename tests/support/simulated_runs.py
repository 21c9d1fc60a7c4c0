"""Small runs in virtual time, for tests of what a run does and of what is told of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support import caches

if TYPE_CHECKING:
    from atoll_simulator.workshop import SimulationResult

SMALL_MODEL: dict[str, object] = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn": 64,
    "model.context": 32,
    "train.batch": 4,
    "train.sequence": 32,
    "protocol.fragments": 4,
}
"""A model that trains in no time, on steps that cost nothing."""
SMALL: dict[str, object] = {
    **SMALL_MODEL,
    "protocol.interval_steps": 8,
    "protocol.silence_s": 2,
    "protocol.lease_s": 1,
    "sim.step_s": 0.05,
}
Simulate = Callable[..., "SimulationResult"]


@pytest.fixture(scope="module")
def simulated_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with token shards of some modules of the standard library."""
    from atoll_learner.data.prepare import prepare  # noqa: PLC0415  (only sessions that simulate load it)
    from atoll_learner.data.sources import files_of  # noqa: PLC0415  (only sessions that simulate load it)

    folder = tmp_path_factory.mktemp("shared")
    source = Path(os.__file__).parent
    prepare(files_of(sorted(source.glob("*.py"))[:60]), folder / "data", validation=0.1)
    return folder


@pytest.fixture(scope="module")
def simulate(simulated_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulate]:
    """Return a function that simulates a small run in this process, whose own JAX and environment stay as they are."""
    import jax  # noqa: PLC0415  (only sessions that simulate load it)

    from atoll_simulator.workshop import run_sim  # noqa: PLC0415  (only sessions that simulate load it)
    from support.up_requests import up_request  # noqa: PLC0415  (only sessions that simulate load it)

    jax.devices()

    def simulated(
        learners: int = 3, standbys: int = 0, config: str = "", out: Path | None = None, **changes: object
    ) -> SimulationResult:
        folder = tmp_path_factory.mktemp("simulated")
        file = folder / "run.toml"
        file.write_text(config, encoding="utf-8")
        told = assignments(simulated_text, **changes)
        return run_sim(
            up_request(learners=learners, standbys=standbys, out=out or folder / "run", config=file, assignments=told)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield simulated


def assignments(shared: Path, **changes: object) -> tuple[str, ...]:
    """Return the settings of a small run on the token shards in `shared`; `__` in a name stands for a dot."""
    told = SMALL | {"data.dir": shared / "data", "learner.compile_cache": caches.PROGRAMS}
    told |= {name.replace("__", "."): value for name, value in changes.items()}
    return tuple(f"{name}={value}" for name, value in told.items())


def events_of(ran: SimulationResult) -> list[dict[str, Any]]:
    """Return the events of a run's event log."""
    return [json.loads(line)["event"] for line in (ran.out / "events.jsonl").read_bytes().splitlines()]
