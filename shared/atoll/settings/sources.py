"""Where settings come from: flags, `--set a.b=c`, environment variables, a TOML file, and what lies beneath them.

Each is read into nested tables that remember the origin of every value. Nothing is judged here but the form: whether a name
exists and a value fits is for `atoll.settings.load`, which merges the sources.

A text that begins with `{` is a table in JSON, so that a variable can give one: `ATOLL_UP__THROTTLE='{"learner-3": 5}'`.

**Relative paths.** In a file they count from the folder of the file, so that file and text can be moved together and used
from anywhere. In flags, `--set` and variables they count from the working directory, as in any shell.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from atoll.base.errors import SettingsError
from atoll.base.parsing import parsed_toml
from atoll.base.regular_files import DOCUMENT_BYTES_MAX, read_text
from atoll.base.uncaught import SWITCH
from atoll.settings.sections import NamesPlace

PREFIX: Final = "ATOLL_"


@dataclass(frozen=True, slots=True)
class StatedValues:
    """The content of one source: nested tables, and the origin of each value by its dotted name."""

    tables: dict[str, Any]
    origins: dict[str, str]

    def value(self, name: str) -> object:
        """Return the value at dotted `name`, None if this source has none."""
        here: object = self.tables
        for key in name.split("."):
            here = here.get(key) if isinstance(here, dict) else None
        return here


@dataclass(frozen=True, slots=True)
class SettingsFallback:
    """Values by dotted name that hold where nothing else is given, and what `atoll config` calls their origin.

    None and an empty text are no values. `origins` has the origins that differ from `origin`, by dotted name.
    """

    origin: str
    values: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin_of(self, name: str) -> str:
        """Return the origin of the value of `name`."""
        return self.origins.get(name, self.origin)


in_force: ContextVar[tuple[StatedValues, ...]] = ContextVar("in_force", default=())
"""The sources of the `load` that is under way, highest precedence first."""


class StatedSource(PydanticBaseSettingsSource):
    """One source of `load`, for pydantic-settings.

    The library's own sources pass over a variable that no field asks for. These hand every name on, so that a setting
    which does not exist is refused by name.
    """

    def __init__(self, settings_cls: type[BaseSettings], given: StatedValues) -> None:
        """Keep what was given."""
        super().__init__(settings_cls)
        self._given = given

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return the value of one field."""
        del field
        return self._given.tables.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return all values."""
        return self._given.tables


def variable(name: str) -> str:
    """Return the environment variable of the setting with this dotted name."""
    return f"{PREFIX}{name.upper().replace('.', '__')}"


class FlagText(str):
    """The assignment `name=value` that a flag of the command line makes. `flag` is what the person typed."""

    __slots__ = ("flag",)
    flag: str

    def __new__(cls, flag: str, name: str, value: object) -> Self:
        """Return the assignment of `value` to the setting `name`, by `flag`."""
        text = super().__new__(cls, f"{name}={value}")
        text.flag = flag
        return text


def flag_values(flags: Mapping[str, object]) -> StatedValues:
    """Return what flags give: values of `up` by dotted name; the flag of `up.throttle.learner-1` is `--throttle`."""
    found = StatedValues({}, {})
    for name, value in flags.items():
        _put_text(found, name, value, f"--{name.split('.')[1]}")
    return found


def assigned_values(assignments: Sequence[str]) -> StatedValues:
    """Return what `--set` texts give, and those of flags that name a setting outside of `up`.

    Raises:
        SettingsError: a text is no assignment.
    """
    found = StatedValues({}, {})
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise SettingsError("not an assignment", got=assignment, allowed="a.b=c", todo="write --set name=value")
        origin = assignment.flag if isinstance(assignment, FlagText) else f"--set {name.strip()}"
        _put_text(found, name.strip(), text, origin)
    return found


def environment_values(environment: Mapping[str, str]) -> StatedValues:
    """Return what `ATOLL_…` variables give; an empty one gives nothing."""
    found = StatedValues({}, {})
    for key, text in sorted(environment.items()):
        if key.startswith(PREFIX) and key != SWITCH and text != "":
            _put_text(found, key.removeprefix(PREFIX).lower().replace("__", "."), text, key)
    return found


def file_values(config: Path | None, places: Collection[str]) -> StatedValues:
    """Return what the file gives; the settings in `places` are paths, relative ones as seen from the file's folder.

    Raises:
        SettingsError: the file cannot be read, or is not TOML.
    """
    found = StatedValues({}, {})
    for name, value in _flatten(_read_toml(config)) if config is not None else ():
        _put(found, name, place_path(value, config.parent) if config and name in places else value, str(config))
    return found


def fallback_values(fallback: SettingsFallback | None) -> StatedValues:
    """Return what holds where nothing else is given."""
    found = StatedValues({}, {})
    if fallback is None:
        return found
    for name, value in fallback.values.items():
        if value is not None and value != "":
            _put(found, name, value, fallback.origin_of(name))
    return found


def places_of(kind: type[BaseModel], prefix: str = "") -> frozenset[str]:
    """Return the dotted names of all settings of `kind` that hold paths."""
    found: set[str] = set()
    for name, known in kind.model_fields.items():
        if isinstance(known.default, BaseModel):
            found |= places_of(type(known.default), f"{prefix}{name}.")
        elif _holds_paths(known.annotation) or any(isinstance(mark, NamesPlace) for mark in known.metadata):
            found.add(f"{prefix}{name}")
    return frozenset(found)


def place_path(value: object, folder: Path) -> object:
    """Return a path, or a list of them, as seen from `folder`; what is absolute, in a home, a URL or empty stays."""
    if isinstance(value, list | tuple):
        return [place_path(one, folder) for one in value]
    if not isinstance(value, str | Path) or value == "" or "://" in str(value) or str(value).startswith("~"):
        return value
    return str(folder / value)


def _holds_paths(annotation: object) -> bool:
    return annotation is Path or any(_holds_paths(part) for part in get_args(annotation))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return parsed_toml(read_text(path))
    except OSError as error:
        raise SettingsError(
            "cannot read the configuration",
            got=f"{path}: {error.strerror}",
            allowed=f"a file of TOML in UTF-8, of at most {DOCUMENT_BYTES_MAX:,} bytes",
            todo="check --config",
        ) from error
    except ValueError as error:
        raise SettingsError("the configuration is not TOML", got=f"{path}: {error}", todo="correct the file") from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Return leaf values by dotted name; an empty table is a leaf, so that an unknown one is refused."""
    leaves: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            leaves += _flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


def _put_text(given: StatedValues, name: str, value: object, origin: str) -> None:
    """Plant what a flag, `--set` or a variable gives; a table in JSON is planted value by value."""
    table = _table(value) if isinstance(value, str) and value.startswith("{") else None
    for inner, leaf in [(name, value)] if table is None else _flatten({name: table}):
        _put(given, inner, leaf, origin)


def _table(text: str) -> dict[str, Any] | None:
    """Return the table that a JSON text holds, None if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _put(given: StatedValues, name: str, value: object, origin: str) -> None:
    """Put `value` into the nested tables at dotted `name`."""
    *path, last = name.split(".")
    here = given.tables
    for key in path:
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise SettingsError("a setting is not a table", got=f"{name} (from {origin})", todo="see `atoll config`")
    here[last] = value
    given.origins[name] = origin
