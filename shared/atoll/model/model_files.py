"""Files of a model that somebody has: which they are, and that each is safetensors by its header.

A model is a safetensors file, or a folder as Hugging Face lays it out: one file, or several with an index. To look at headers
takes no library and no memory to speak of, so whoever begins a run does it before anything else. Format: eight bytes with the
length of the header, the header in JSON, the values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from atoll.base.errors import CheckpointError
from atoll.base.files import TEXT_BYTES_MAX, is_folder, opened_file, read_text
from atoll.base.parsing import fault_of, parsed

WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
HEADER_BYTES_MAX: Final = 100_000_000
"""The format's own bound."""
LENGTH_BYTES: Final = 8


class ShardIndex(msgspec.Struct):
    """Which file of a folder holds which tensor."""

    weight_map: dict[str, str]


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files of a model: the file that was named, or those of a folder.

    Raises:
        CheckpointError: no model lies in the folder, or its index cannot be read or names files elsewhere.
    """
    if not is_folder(path):
        return [path]
    try:
        there = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error
    if WHOLE in there and INDEX not in there:
        return [path / WHOLE]
    try:
        index = parsed(read_text(path / INDEX, TEXT_BYTES_MAX), ShardIndex)
    except FileNotFoundError as error:
        allowed = f"{WHOLE}, or {INDEX} and the files that it names"
        raise CheckpointError("no model lies in this folder", got=path, allowed=allowed) from error
    except (OSError, msgspec.MsgspecError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError("the index of this model cannot be read", got=f"{path / INDEX}: {why}") from error
    names = sorted(set(index.weight_map.values()))
    if foreign := [name for name in names if not name or name in {".", ".."} or Path(name).name != name]:
        raise CheckpointError("an index that names files elsewhere", got=f"{path / INDEX}: {foreign[0]}")
    if not names:
        raise CheckpointError("an index that names no file", got=path / INDEX)
    return [path / name for name in names]


def check_model_files(path: Path) -> None:
    """Raise as `files_of`, and `CheckpointError` for a file of the model that is not safetensors by its header."""
    for file in files_of(path):
        check_header(file)


def check_header(file: Path) -> None:
    """Raise `CheckpointError` unless `file` is a regular one, and has a header that is a part of it and holds a table."""
    try:
        with opened_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            most = min(max(0, size - LENGTH_BYTES), HEADER_BYTES_MAX)
            if length > most:
                raise unreadable(file, f"its header would have {length:,} bytes, and at most {most:,} can be")
            parsed(opened.read(length), dict[str, Any])
    except OSError as error:
        raise unreadable(file, error.strerror or str(error)) from error
    except msgspec.MsgspecError as error:
        raise unreadable(file, f"its header is no table of tensors: {fault_of(error)}") from error


def unreadable(file: Path, why: str) -> CheckpointError:
    """Return that a file of a model cannot be read."""
    return CheckpointError(
        "this model file cannot be read", got=f"{file}: {why}", todo="export it again, or name another file"
    )
