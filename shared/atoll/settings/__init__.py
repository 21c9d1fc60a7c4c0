"""The one configuration model: a TOML file, `ATOLL_…` environment variables and `--set a.b=c`, in rising precedence.

Flags win over all three; beneath them may lie values of an earlier run, or of `atoll up` (`SettingsFallback`). Each is read
to values by dotted name, every one with its origin, so that an error names the file, the variable or the flag that is
wrong, and is then a source of pydantic-settings, which merges them and judges the whole: name, type and bound of a setting
stand in its section (`atoll.settings.sections`) and nowhere else. `load` is the only place that reads the environment;
services get the frozen result. Relations between settings are checked here, once, with both values in the message.

A text that begins with `{` is a table in JSON, so that a variable can give one: `ATOLL_UP__THROTTLE='{"learner-3": 5}'`.
Relative paths in a file count from the folder of the file; in flags, `--set` and variables they count from the working
directory. The sections `model`, `train` and `sim` are plain tables here and are checked by the services that know what they
mean.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final, Self, get_args

import msgspec
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from atoll.base.errors import SettingsError
from atoll.base.files import DOCUMENT_BYTES_MAX, read_text
from atoll.base.parsing import parsed_toml
from atoll.base.uncaught import SWITCH
from atoll.bus.options import BusOptions
from atoll.codec import check_codecs
from atoll.keys.identity import run_credentials
from atoll.protocol.settings import NESTEROV, OUTERS, ProtocolSettings
from atoll.settings.errors import protocol_error, validation_error, with_origin
from atoll.settings.sections import (
    ArchiveSettings,
    BrokerSettings,
    DataSettings,
    LearnerSettings,
    LogSettings,
    MonitorSettings,
    NamesPlace,
    SomePath,
    SynchronizerSettings,
    UpSettings,
)
from atoll.wire.subjects import token

PREFIX: Final = "ATOLL_"
GivenValues = Mapping[str, tuple[Any, str]]
"""Values by dotted name, unjudged: each as it stands, and its origin."""
COMPLETERS: Final = "atoll.settings"
NAMES_OF_CODE: Final[Mapping[str, Container[str]]] = {"protocol.outer": OUTERS, "data.source": ("",)}
"""The settings that may name code, and their values that name none of a person's own."""


def _protocol(value: object) -> ProtocolSettings:
    if isinstance(value, ProtocolSettings):
        return value
    try:
        return check_codecs(msgspec.convert(value, ProtocolSettings, strict=False).check())
    except msgspec.ValidationError as error:
        raise protocol_error(error, value) from error


class Settings(BaseSettings):
    """Everything that a process of Atoll can be told.

    Attributes:
        run: id of the run.
        seed: seed of the model's first values, of the order of the data and of sampling.
        health_file: file that a service touches while it is healthy (`atoll health` reads it); none for no file.
        stay: when the run is over, services rest until they are told to stop, for engines that start again whatever ends.
        broker: the broker.
        protocol: what all processes of the run agree on.
        learner: one learner process.
        model: dimensions of the reference learner's model.
        train: the reference learner's optimizer and schedule.
        data: the token shards.
        synchronizer: one synchronizer process.
        monitor: one monitor process.
        archive: checkpoints outside the broker.
        up: a whole run on this machine.
        log: how a process logs.
        sim: the scenario of `atoll sim train`.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    run: str = "local"
    seed: int = Field(default=0, ge=0, le=1 << 62)
    health_file: SomePath | None = None
    stay: bool = False
    broker: BrokerSettings = BrokerSettings()
    protocol: Annotated[ProtocolSettings, BeforeValidator(_protocol)] = ProtocolSettings()
    learner: LearnerSettings = LearnerSettings()
    model: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    data: DataSettings = DataSettings()
    synchronizer: SynchronizerSettings = SynchronizerSettings()
    monitor: MonitorSettings = MonitorSettings()
    archive: ArchiveSettings = ArchiveSettings()
    up: UpSettings = UpSettings()
    log: LogSettings = LogSettings()
    sim: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the one source of settings that code makes by itself: what it passes. `load` brings its own."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)


def _place_names(kind: type[BaseModel], prefix: str = "") -> frozenset[str]:
    found: set[str] = set()
    for name, known in kind.model_fields.items():
        if isinstance(known.default, BaseModel):
            found |= _place_names(type(known.default), f"{prefix}{name}.")
        elif _holds_paths(known.annotation) or any(isinstance(mark, NamesPlace) for mark in known.metadata):
            found.add(f"{prefix}{name}")
    return frozenset(found)


def _holds_paths(annotation: object) -> bool:
    return annotation is Path or any(_holds_paths(part) for part in get_args(annotation))


PLACES: Final = _place_names(Settings) | {"model.config"}
"""The settings that hold paths; of the sections that the kernel only carries, one does."""


def bus_options(settings: Settings) -> BusOptions:
    """Return the bus bounds that follow from `settings`, with the credentials of its identity.

    Raises what `atoll.keys.identity.run_credentials` raises.
    """
    path = settings.broker.identity
    credentials = None if path is None else run_credentials(path, settings.run)
    return settings.broker.bus_options(settings.synchronizer.region or settings.learner.region, credentials)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings and, per dotted name, where a value that is not a default came from."""

    settings: Settings
    origins: Mapping[str, str]

    def check_learners(self, learners: int) -> None:
        """Raise `SettingsError` if what the run agrees on cannot hold among so many learners."""
        try:
            self.settings.protocol.check(learners)
        except SettingsError as error:
            raise with_origin(error, self.origins) from error


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

    def known_values(self) -> dict[str, tuple[Any, str]]:
        """Return the values that are some, with their origins."""
        return {name: (value, self.origin_of(name)) for name, value in self.values.items() if value not in (None, "")}


class FlagText(str):
    """The assignment `name=value` that a flag makes: `flag` is what the person typed, `value` its value."""

    __slots__ = ("flag", "value")
    flag: str
    value: object

    def __new__(cls, flag: str, name: str, value: object) -> Self:
        """Return the assignment of `value` to the setting `name`, by `flag`."""
        text = super().__new__(cls, f"{name}={value}")
        text.flag = flag
        text.value = value
        return text


def variable(name: str) -> str:
    """Return the environment variable of the setting with this dotted name."""
    return f"{PREFIX}{name.upper().replace('.', '__')}"


def place_path(value: object, folder: Path) -> object:
    """Return a path, or a list of them, as seen from `folder`; what is absolute, in a home, a URL or empty stays."""
    if isinstance(value, list | tuple):
        return [place_path(one, folder) for one in value]
    if not isinstance(value, str | Path) or value == "" or "://" in str(value) or str(value).startswith("~"):
        return value
    return str(folder / value)


def given_values(
    config: Path | None = None, assignments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, tuple[Any, str]]:
    """Return what was given by dotted name, unjudged: each value as it stands, and its origin.

    Raises:
        SettingsError: the file is missing or not TOML, an assignment has no `=`, a name is a value here and a table there.
    """
    return _merge_sources(_given_sources(config, assignments, environment))


def _given_sources(
    config: Path | None, assignments: Sequence[str], environment: Mapping[str, str] | None
) -> tuple[dict[str, tuple[Any, str]], ...]:
    environment = os.environ if environment is None else environment
    return _file_values(config), _environment_values(environment), _assigned_values(assignments)


def _merge_sources(sources: Sequence[GivenValues]) -> dict[str, tuple[Any, str]]:
    merged: dict[str, tuple[Any, str]] = {}
    for stated in sources:
        merged |= stated
    _check_tables(merged)
    return merged


def own_outer(config: Path | None = None, assignments: Sequence[str] = ()) -> str:
    """Return the outer optimizer that the settings of this process name; raise what `given_values` raises."""
    value, _ = given_values(config, assignments).get("protocol.outer", (NESTEROV, ""))
    return str(value)


def load(
    config: Path | None = None,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    fallback: SettingsFallback | None = None,
) -> LoadedSettings:
    """Merge `a.b=c` assignments, environment, file and `fallback`, in falling precedence, and validate the whole.

    Raises:
        SettingsError: as `given_values`; a name is unknown, a value is wrong, also in the sections of an installed service;
            only `fallback` names some code.
    """
    given = _given_sources(config, assignments, environment)
    beneath = {} if fallback is None else fallback.known_values()
    _check_code(beneath, _merge_sources(given))
    origins = {name: origin for name, (_, origin) in _merge_sources((beneath, *given)).items()}
    sources = (InitSettingsSource(Settings, _nest(stated)) for stated in (*reversed(given), beneath))
    try:
        settings = Settings(_build_sources=(tuple(sources), {}))
        token(settings.run, "run id")
        token(settings.learner.id, "learner id")
        for completed in _completers():
            model, train = completed(settings.model, settings.train)
            settings = settings.model_copy(update={"model": model, "train": train})
    except ValidationError as error:
        raise validation_error(error, origins, Settings) from error
    except SettingsError as error:
        raise with_origin(error, origins) from error
    return LoadedSettings(settings, origins)


def named_code(values: Mapping[str, Any]) -> dict[str, str]:
    """Return which settings, by dotted name, name code of a person's own, and their values."""
    found = {name: values[name] for name in NAMES_OF_CODE if values.get(name) is not None}
    return {name: str(value) for name, value in found.items() if value not in NAMES_OF_CODE[name]}


def _check_code(beneath: GivenValues, given: GivenValues) -> None:
    for name, value in named_code({name: value for name, (value, _) in beneath.items() if name not in given}).items():
        raise SettingsError(
            "only code that you name yourself is run, and this is named by an earlier run alone",
            got=f"{name} = {value[:80]} (from {beneath[name][1]})",
            todo=f"if you trust it, give it yourself, as --set {name}=… or {variable(name)}",
            setting=name,
        )


@functools.cache
def _completers() -> tuple[Callable[..., Any], ...]:
    return tuple(point.load() for point in entry_points(group=COMPLETERS))


def _file_values(config: Path | None) -> dict[str, tuple[Any, str]]:
    if config is None:
        return {}
    try:
        table = parsed_toml(read_text(config))
    except OSError as error:
        raise SettingsError(
            "cannot read the configuration",
            got=f"{config}: {error.strerror}",
            allowed=f"a file of TOML in UTF-8, of at most {DOCUMENT_BYTES_MAX:,} bytes",
            todo="check --config",
        ) from error
    except ValueError as error:
        raise SettingsError(
            "the configuration is not TOML", got=f"{config}: {error}", todo="correct the file"
        ) from error
    return {
        name: (place_path(value, config.parent) if name in PLACES else value, str(config))
        for name, value in _flatten(table).items()
    }


def _environment_values(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for key, text in sorted(environment.items()):
        if key.startswith(PREFIX) and key != SWITCH and text != "":
            found |= _read_table(key.removeprefix(PREFIX).lower().replace("__", "."), text, key)
    return found


def _assigned_values(assignments: Sequence[str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise SettingsError("not an assignment", got=assignment, allowed="a.b=c", todo="write --set name=value")
        if isinstance(assignment, FlagText):
            found |= _read_table(name, assignment.value, assignment.flag)
        else:
            found |= _read_table(name.strip(), text, f"--set {name.strip()}")
    return found


def _read_table(name: str, value: object, origin: str) -> dict[str, tuple[Any, str]]:
    if isinstance(value, str) and value.startswith("{"):
        try:
            table = json.loads(value)
        except (ValueError, RecursionError):
            table = None
        if isinstance(table, dict):
            return {inner: (leaf, origin) for inner, leaf in _flatten({name: table}).items()}
    return {name: (value, origin)}


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            leaves |= _flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _check_tables(stated: GivenValues) -> None:
    for name, (_, origin) in stated.items():
        parts = name.split(".")
        for table in (".".join(parts[:count]) for count in range(1, len(parts))):
            if table in stated and stated[table][0] != {}:
                raise SettingsError(
                    f"{table} is a value in one place and a table in another",
                    got=f"{table} from {stated[table][1]}, {name} from {origin}",
                    todo="remove one of them",
                )


def _nest(stated: GivenValues) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name, (value, _) in sorted(stated.items(), key=lambda item: item[0].count(".")):
        *path, last = name.split(".")
        here = tables
        for key in path:
            here = here.setdefault(key, {})
        here[last] = {} if value == {} else value
    return tables
