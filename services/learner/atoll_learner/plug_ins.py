"""Code of a person's own, named as `module:attribute`: found, and its errors told apart from ours.

Modules of the working directory count, as they do for `python -m`. An error in such code is the person's to mend: it is
reported with its kind, its words and the line where it was raised, without our own frames. Code that wants to leave the program
(`sys.exit`, an argument parser on import) has failed, too: `FAILURES` are what to catch around it.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import SettingsError
from atoll.base.exits import end_as_python_does

FAILURES: Final = (Exception, SystemExit)
"""Failures of code of a person's own; Ctrl-C is none of it."""


def load_object(text: str, option: str) -> Any:  # noqa: ANN401  (anything that a module has)
    """Return what `text` names; `option` is where it was written.

    Raises:
        SettingsError: it names nothing, or its module fails while it is loaded.
    """
    module, colon, path = text.partition(":")
    if not (module and colon and path):
        raise SettingsError(
            f"{option} names nothing", got=text, allowed="module:attribute", todo="write for example mine:accuracy"
        )
    end_as_python_does()  # what this code leaves open is closed when its objects are collected
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except FAILURES as error:
        raise SettingsError(
            f"{option} names a module that cannot be loaded",
            got=f"{module}: {describe_failure(error)}",
            todo="start where the module lies, install what it needs, or correct the name",
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise SettingsError(
                f"{option} names what its module has not", got=text, allowed=f"a name in {module}", todo="correct it"
            )
        found = getattr(found, name)
    return found


def callable_of(text: str, option: str) -> Any:  # noqa: ANN401  (a function of any signature)
    """Return the function that `text` names; raise `SettingsError` for what cannot be called."""
    found = load_object(text, option)
    if not callable(found):
        raise SettingsError(f"{option} names no function", got=f"{text} is a {type(found).__name__}", todo="correct it")
    return found


def describe_failure(error: BaseException) -> str:
    """Return the kind and words of an error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    try:
        words = str(error).strip()
    except FAILURES:
        words = "its words cannot be read"
    return f"{type(error).__name__}{f': {words}' if words else ''}{place}"
