"""Requests of `atoll up`, by the names of its flags."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atoll.cli.options import run_flags
from atoll.local.options import UpRequest

FIELDS = ("config", "again", "resume", "run", "fresh", "like")


def up_request(
    *,
    assignments: Iterable[str] = (),
    corpus: Iterable[Path] = (),
    throttle: Iterable[str] = (),
    via: Iterable[str] = (),
    **options: Any,  # noqa: ANN401  (values of flags)
) -> UpRequest:
    """Return the request of a person who gave these options; those that are settings become flags."""
    fields = {name: options.pop(name) for name in FIELDS if name in options}
    flags = {f"up__{name}": value for name, value in options.items()}
    return UpRequest(
        assignments=run_flags(list(assignments), list(corpus), list(throttle), list(via), **flags), **fields
    )
