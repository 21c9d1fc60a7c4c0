"""The extra that brings a package which is not installed: the smallest one that makes what was asked for work.

Several extras bring JAX: the island's is named, unless a service of ours asked for it; then that service's.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import TracebackType
from typing import Final

from atoll.base.errors import SettingsError, UserError

_OF_PACKAGE: Final = {
    "keras": "keras",
    "tokenizers": "bpe",
    "pyarrow": "parquet",
    "numba": "synchronizer",
    "prometheus_client": "monitor",
    "starlette": "monitor",
    "uvicorn": "monitor",
    "opentelemetry": "traces",
}
_OF_SERVICE: Final = {"atoll_simulator": "simulator", "atoll_learner": "learner"}
_OF_ISLANDS: Final = {"jax": "island", "jaxlib": "island"}
_OF_LEARNERS: Final = ("flax", "optax", "orbax")


def install_command(extra: str) -> str:
    """Return what a person types to install an extra."""
    return f"pip install 'atoll[{extra}]'"


def is_installed(package: str) -> bool:
    """Return whether a package is installed; it is not imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a finder that refuses it, or what somebody has put in its place
        return False


def require(package: str, extra: str, what: str) -> None:
    """Raise `SettingsError` that names the extra, unless the package is installed; it is not imported."""
    if not is_installed(package):
        raise SettingsError(f"{what} needs {package}, which is not installed", todo=install_command(extra))


def missing_extra(error: ModuleNotFoundError) -> UserError | None:
    """Return what to tell a person of an import that failed, or None if no extra brings that package."""
    package = (error.name or "").partition(".")[0]
    extra = _OF_PACKAGE.get(package)
    if extra is None and package in (*_OF_ISLANDS, *_OF_LEARNERS):
        services = [_OF_SERVICE[name] for name in _packages(error.__traceback__) if name in _OF_SERVICE]
        extra = services[0] if services else _OF_ISLANDS.get(package, "learner")
    if extra is None:
        return None
    return UserError(f"this needs {package}, which is not installed", todo=install_command(extra))


def _packages(trace: TracebackType | None) -> list[str]:
    found = []
    while trace is not None:
        found.append(str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        trace = trace.tb_next
    return found
