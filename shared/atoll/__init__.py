"""Atoll: one model, trained across asynchronous islands of compute.

`import atoll` loads no JAX and opens nothing; `join`, `read_model` and the services load what they need when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.client.join import IslandHandle, JoinOptions, join
    from atoll.client.merged import ReadModel, read_model

__all__ = ["IslandHandle", "JoinOptions", "ReadModel", "__version__", "join", "read_model"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load `join`, `read_model` and what belongs to them on first use, so that commands that train nothing stay light."""
    if name in {"join", "JoinOptions", "IslandHandle"}:
        from atoll.client import join as module  # noqa: PLC0415  (lazy on purpose: see the module docstring)

        return getattr(module, name)
    if name in {"ReadModel", "read_model"}:
        from atoll.client import merged  # noqa: PLC0415

        return getattr(merged, name)
    raise AttributeError(name)
