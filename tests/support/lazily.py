"""Modules that are loaded when something of them is first used.

Every worker imports every test module to collect it. What is slow to load, and used by one module only, need not be loaded by
the others.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for the module of a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:  # noqa: ANN401  (whatever the module has)
        """Load the module, if nobody has, and return what it has under this name."""
        if attribute.startswith("_"):  # asked by pytest, which looks for tests in all that a test module holds
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
