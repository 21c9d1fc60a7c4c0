"""What brokers say of themselves, as plain figures: pure, from the JSON of their endpoints.

A nats-server with a monitoring port answers `/varz` (the process) and `/jsz` (JetStream). Both are written by software that
we do not make, so a figure that is missing is left out, and never an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    """One nats-server: memory, processor, connections, traffic since it began, and what its streams take."""

    memory_bytes: float = 0.0
    cpu_ratio: float = 0.0
    connections: int = 0
    slow_consumers: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    store_bytes: int = 0
    store_bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """A file system, in bytes."""

    size_bytes: int
    free_bytes: int


def figures_of(varz: Mapping[str, Any], jsz: Mapping[str, Any]) -> BrokerFigures:
    """Return the figures in the answers of one server."""
    config = jsz.get("config")
    return BrokerFigures(
        memory_bytes=_number(varz, "mem"),
        cpu_ratio=_number(varz, "cpu") / 100.0,
        connections=int(_number(varz, "connections")),
        slow_consumers=int(_number(varz, "slow_consumers")),
        bytes_in=int(_number(varz, "in_bytes")),
        bytes_out=int(_number(varz, "out_bytes")),
        store_bytes=int(_number(jsz, "storage")),
        store_bytes_max=int(_number(config if isinstance(config, dict) else {}, "max_storage")),
    )


def _number(table: Mapping[str, Any], name: str) -> float:
    """Return a figure; 0 where there is none, and for "no bound" (-1)."""
    value = table.get(name)
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0
