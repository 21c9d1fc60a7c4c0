"""Atoll: one model, trained across asynchronous islands of compute.

`import atoll` loads no JAX and opens nothing; `join`, `read_model` and the services load what they need when they are called.
An error of ours that a script does not catch ends it with a message and without a traceback (`atoll.base.uncaught`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from atoll.base import VERSION, uncaught

if TYPE_CHECKING:
    from atoll.base.errors import AtollError, SettingsError
    from atoll.client.join import IslandHandle, join
    from atoll.client.model_reader import ReadModel, read_model
    from atoll.client.options import JoinOptions

__all__ = [
    "AtollError",
    "IslandHandle",
    "JoinOptions",
    "ReadModel",
    "SettingsError",
    "__version__",
    "join",
    "read_model",
]
__version__ = VERSION

_HOMES = {
    "AtollError": "atoll.base.errors",
    "SettingsError": "atoll.base.errors",
    "IslandHandle": "atoll.client.join",
    "JoinOptions": "atoll.client.options",
    "join": "atoll.client.join",
    "ReadModel": "atoll.client.model_reader",
    "read_model": "atoll.client.model_reader",
}

uncaught.install()


def __getattr__(name: str) -> object:
    """Load `join`, `read_model` and what belongs to them on first use, so that commands that train nothing stay light."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(_HOMES[name]), name)
