"""The one configuration model: a TOML file, `ATOLL_…` environment variables and `--set a.b=c`, in rising precedence.

Flags win over all three; beneath them may lie values of an earlier run, or of `atoll up` (`SettingsFallback`). Each is a
source of pydantic-settings, which merges them (`atoll.settings.sources`). `load` is the only place that reads the
environment; services get the frozen result. Every value remembers where it came from (`LoadedSettings.origins`), so an
error names the file, the variable or the flag that is wrong (`atoll.settings.errors`), and `atoll config` shows it.
Relations between settings are checked here, once, with both values in the message.

Sections: `broker` (where it is), `protocol` (what the run agrees on, see `atoll.protocol.settings`), `learner`, `model`,
`train`, `data`, `synchronizer`, `monitor`, `archive`, `up` (a whole run on one machine), `log`, `sim`. Model and training
sections are plain tables here and are checked by the learner, which knows what they mean, the scenario of a simulation by the
simulator; the kernel carries them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from atoll.base.errors import SettingsError
from atoll.bus.options import BusOptions
from atoll.codec import check_codecs
from atoll.keys.identity import run_credentials
from atoll.protocol.settings import NESTEROV, OUTERS, ProtocolSettings
from atoll.settings.errors import protocol_error, section_error, validation_error, with_origin
from atoll.settings.sections import (
    ArchiveSettings,
    BrokerSettings,
    DataSettings,
    LearnerSettings,
    LogSettings,
    MonitorSettings,
    SomePath,
    SynchronizerSettings,
    UpSettings,
)
from atoll.settings.sources import (
    PREFIX,
    SettingsFallback,
    StatedSource,
    StatedValues,
    assigned_values,
    environment_values,
    fallback_values,
    file_values,
    flag_values,
    in_force,
    place_path,
    places_of,
    variable,
)
from atoll.wire.subjects import token

__all__ = [
    "PLACES",
    "PREFIX",
    "ArchiveSettings",
    "LearnerSettings",
    "LoadedSettings",
    "Settings",
    "SettingsFallback",
    "bus_options",
    "given_values",
    "load",
    "named_code",
    "own_outer",
    "place_path",
    "section_error",
    "variable",
]

COMPLETERS: Final = "atoll.settings"
NAMES_OF_CODE: Final[Mapping[str, Container[str]]] = {"protocol.outer": OUTERS, "data.source": ("",)}
"""The settings that may name code, and their values that name none of a person's own."""


def _protocol(value: object) -> ProtocolSettings:
    """Turn a table of texts and numbers into `ProtocolSettings`; raise `SettingsError` that names the field."""
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
        """Return the sources of `load`, highest precedence first; what code passes directly wins over all."""
        del env_settings, dotenv_settings, file_secret_settings
        return (init_settings, *(StatedSource(settings_cls, one) for one in in_force.get()))


PLACES: Final = places_of(Settings) | {"model.config"}
"""The settings that hold paths; of the sections that the kernel only carries, one does."""


def bus_options(settings: Settings) -> BusOptions:
    """Return the bus bounds that follow from `settings`, with the credentials of its identity.

    Raises what `atoll.keys.identity.run_credentials` raises.
    """
    path = settings.broker.identity
    credentials = None if path is None else run_credentials(path, settings.run)
    broker = settings.broker
    region = settings.synchronizer.region or settings.learner.region
    return BusOptions(
        patience_s=broker.patience_s,
        replicas=broker.replicas,
        taps=broker.taps,
        region=region,
        bulk=tuple(broker.bulk),
        credentials=credentials,
    )


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


NO_FLAGS: Final[Mapping[str, object]] = {}


def given_values(
    config: Path | None = None,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] = NO_FLAGS,
) -> dict[str, tuple[Any, str]]:
    """Return what was given by dotted name, unjudged: each value as it stands, and its origin.

    Raises:
        SettingsError: the file is missing or not TOML, an assignment has no `=`, a name is a value here and a table there.
    """
    sources = _sources(config, assignments, environment, flags)
    origins = _origins(sources)
    return {name: (next(one.value(name) for one in sources if name in one.origins), at) for name, at in origins.items()}


def own_outer(config: Path | None = None, assignments: Sequence[str] = ()) -> str:
    """Return the outer optimizer that the settings of this process name, of a process that agrees on nothing else of a run.

    Raises what `given_values` raises.
    """
    value, _ = given_values(config, assignments).get("protocol.outer", (NESTEROV, ""))
    return str(value)


def load(
    config: Path | None = None,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] = NO_FLAGS,
    fallback: SettingsFallback | None = None,
) -> LoadedSettings:
    """Merge flags, `a.b=c` assignments, environment, file and `fallback`, in falling precedence, and validate the whole.

    `flags` are values of the section `up` by dotted name.

    Raises:
        SettingsError: as `given_values`; a name is unknown, a value is wrong, also in the sections of an installed service;
            only `fallback` names some code.
    """
    sources = (*_sources(config, assignments, environment, flags), fallback_values(fallback))
    origins = _origins(sources)
    _check_code(sources)
    before = in_force.set(sources)
    try:
        settings = Settings()
        token(settings.run, "run id")
        token(settings.learner.id, "learner id")
        for completed in _completers():
            model, train = completed(settings.model, settings.train)
            settings = settings.model_copy(update={"model": model, "train": train})
    except ValidationError as error:
        raise validation_error(error, origins, Settings) from error
    except SettingsError as error:
        raise with_origin(error, origins) from error
    finally:
        in_force.reset(before)
    return LoadedSettings(settings, origins)


def named_code(values: Mapping[str, Any]) -> dict[str, str]:
    """Return which settings, by dotted name, name code of a person's own, and their values."""
    found = {name: values[name] for name in NAMES_OF_CODE if values.get(name) is not None}
    return {name: str(value) for name, value in found.items() if value not in NAMES_OF_CODE[name]}


def _check_code(sources: Sequence[StatedValues]) -> None:
    """Raise `SettingsError` for code that only the lowest source names: a file of an earlier run, and nobody here."""
    *own, lowest = sources
    for name, value in named_code({name: lowest.value(name) for name in NAMES_OF_CODE}).items():
        if any(name in source.origins for source in own):
            continue
        raise SettingsError(
            "only code that you name yourself is run, and this is named by an earlier run alone",
            got=f"{name} = {value[:80]} (from {lowest.origins[name]})",
            todo=f"if you trust it, give it yourself, as --set {name}=… or {variable(name)}",
            setting=name,
        )


@functools.cache
def _completers() -> tuple[Callable[..., Any], ...]:
    """Return what the installed services complete settings by; to look for it takes as long as all the rest."""
    return tuple(point.load() for point in entry_points(group=COMPLETERS))


def _sources(
    config: Path | None,
    assignments: Sequence[str],
    environment: Mapping[str, str] | None,
    flags: Mapping[str, object],
) -> tuple[StatedValues, ...]:
    """Return all that was given, highest precedence first."""
    environment = os.environ if environment is None else environment
    return (
        flag_values(flags),
        assigned_values(assignments),
        environment_values(environment),
        file_values(config, PLACES),
    )


def _origins(sources: Sequence[StatedValues]) -> dict[str, str]:
    """Return by name the origin of the value that holds; refuse a name that is a value in one place and a table in another."""
    origins = {name: origin for source in reversed(sources) for name, origin in source.origins.items()}
    # An empty table contradicts nothing.
    values = [name for name in origins if not any(source.value(name) == {} for source in sources)]
    for name, origin in origins.items():
        if table := next((each for each in values if name.startswith(f"{each}.")), None):
            raise SettingsError(
                f"{table} is a value in one place and a table in another",
                got=f"{table} from {origins[table]}, {name} from {origin}",
                todo="remove one of them",
            )
    return origins
