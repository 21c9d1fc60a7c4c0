"""Foundation of every room: errors, logs, clocks, files, waiting, memory for large arrays. No knowledge of training."""

from importlib.metadata import version

VERSION = version("atoll")  # declared in pyproject.toml
