"""What a benchmark of shaped links does where there can be none."""

from __future__ import annotations

from typing import Final

from support.wan import unfit

UNFIT: Final = 3
"""The exit code of a benchmark that could measure nothing here."""


def is_unfit() -> bool:
    """Say why links cannot be shaped here; return whether that is so."""
    if reason := unfit():
        print(f"no link can be shaped here: {reason}")
    return bool(reason)
