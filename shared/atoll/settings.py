"""The one configuration model: a TOML file, `ATOLL_…` environment variables and `--set a.b=c`, in rising precedence.

Each of the three is a source of pydantic-settings, which merges them (`_GivenSource`). `load` is the only place that reads
the environment; services get the frozen result. Every value remembers where it came from (`LoadedSettings.origins`), so an
error names the file, the variable or the flag that is wrong, and `atoll config` shows it. Relations between settings are
checked here, once, with both values in the message.

Sections: `broker` (where it is), `protocol` (what the run agrees on, see `atoll.protocol.settings`), `learner`,
`model`, `train`, `data`, `synchronizer`, `archive`, `sim`. Model and training sections are plain tables here and are
checked by the learner, which knows what they mean, the scenario of a simulation by the simulator; the kernel carries them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from atoll.base.errors import SettingsError
from atoll.bus.options import BusOptions
from atoll.codec import check_codecs
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.subjects import token

PREFIX = "ATOLL_"
COMPLETERS = "atoll.settings"


def _not_empty(given: object) -> object:
    if given == "":
        raise ValueError("a path cannot be empty; leave the setting away for none")  # pydantic makes its error of it
    return given


SomePath = Annotated[Path, BeforeValidator(_not_empty)]
"""A path that was written down: an empty text would mean the working directory."""


class Section(BaseModel):
    """A table of the configuration: frozen, and closed to names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class BrokerSettings(Section):
    """The broker, and how long a process tries to reach it.

    Attributes:
        url: address of the broker.
        patience_s: seconds for which a process tries to reach the broker before it gives up.
        stream_bytes_max: largest size of each stream that holds tensors, for the founder of a run; without it, the bound
            follows from the model (`atoll.run.stream_room`).
    """

    url: str = "nats://127.0.0.1:4222"
    patience_s: float = Field(default=30.0, gt=0, le=3600)
    stream_bytes_max: int | None = Field(default=None, ge=1 << 20)


class LearnerSettings(Section):
    """One learner process.

    Attributes:
        id: name of the learner in the run; no two live processes may share it.
        throttle: every step takes this many times as long; for tests of slow islands.
        initial_model: safetensors file that a new run begins from instead of random values. A learner that joins an
            existing run takes the run's values.
        compile_cache: folder in which JAX keeps compiled programs.
        threads: threads of the process; 0 lets the libraries decide.
        checkpoint_dir: folder for the state of the inner optimizer and the place in the data. A learner without it asks a
            peer when it restarts.
        checkpoint_every_s: seconds between two checkpoints; the learner also writes one when it leaves.
        drain_s: longest time that leaving may take, in seconds.
        encode: where pseudo-gradients are encoded: "host", "device" (if possible), or "auto" (an accelerator, else the host).
        spill_bytes: global fragments of this size and more are kept in scratch files and not in memory.
        scratch_dir: folder of the scratch files; none for the system's folder of temporary files, as long as it has room.
    """

    id: str = "learner-0"
    throttle: float = Field(default=1.0, ge=1.0, le=1000.0)
    initial_model: SomePath | None = None
    compile_cache: SomePath | None = None
    threads: int = Field(default=0, ge=0, le=1024)
    checkpoint_dir: SomePath | None = None
    checkpoint_every_s: float = Field(default=20.0, ge=1.0, le=86_400.0)
    drain_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    encode: Literal["auto", "host", "device"] = "auto"
    spill_bytes: int = Field(default=1 << 30, ge=1 << 20)
    scratch_dir: SomePath | None = None


class DataSettings(Section):
    """The token shards that learners read.

    Attributes:
        dir: folder of the token shards, as `atoll data prepare` writes it.
        lease_blocks: blocks that a learner leases at a time; also how widely its text is mixed.
    """

    dir: SomePath = Path("corpus")
    lease_blocks: int = Field(default=64, ge=1, le=65536)


class SynchronizerSettings(Section):
    """One synchronizer process.

    Attributes:
        shard: the only shard that it serves; none for a fair share of all shards beside other processes.
        restore: URL of an archive from which the process rebuilds a run that the broker does not have; empty for none.
        spill_bytes: arrays of this size and more are kept in scratch files and not in memory.
        scratch_dir: folder of the scratch files; none for the system's folder of temporary files.
    """

    shard: int | None = Field(default=None, ge=0)
    restore: str = ""
    spill_bytes: int = Field(default=1 << 30, ge=1 << 20)
    scratch_dir: SomePath | None = None


class ArchiveSettings(Section):
    """Where shards keep checkpoints outside the broker (see `atoll.archive`).

    Attributes:
        url: a folder, `file://…` or `s3://bucket/prefix`; empty for no archive.
        every_s: a checkpoint is made every so many seconds of the run's age; 0 for never.
        keep: how many of the newest checkpoints that every shard has made are kept.
    """

    url: str = ""
    every_s: int = Field(default=300, ge=0, le=7 * 86400)
    keep: int = Field(default=3, ge=1, le=1000)


class LogSettings(Section):
    """How a process logs.

    Attributes:
        format: "json" (a line for each event), "console" (for people), or "auto": JSON unless the output is a terminal.
        level: the least serious level that is written.
        dump_dir: where the last facts of its machines are written when something of ours fails, or on SIGUSR1 (`atoll replay`);
            if it is not set, `atoll-facts` where the system keeps temporary files.
    """

    format: Literal["auto", "json", "console"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"
    dump_dir: SomePath | None = None


def _protocol(value: object) -> ProtocolSettings:
    """Turn a table of texts and numbers into `ProtocolSettings`; raise ValueError with the field's own message."""
    if isinstance(value, ProtocolSettings):
        return value
    try:
        return check_codecs(msgspec.convert(value, ProtocolSettings, strict=False).check())
    except msgspec.ValidationError as error:
        raise ValueError(_with_choices(str(error))) from error


def _with_choices(said: str) -> str:
    """Return what was said of a protocol setting; of one with a choice of words, the words as well."""
    name = said.rpartition("$.")[2].rstrip("`")
    words = get_args(get_type_hints(ProtocolSettings).get(name))
    return f"protocol.{name} is one of {', '.join(words)} ({said})" if words else said


@dataclass(frozen=True, slots=True)
class _Given:
    """What one source holds: nested tables, and the origin of each value by its dotted name."""

    tables: dict[str, Any]
    origins: dict[str, str]


_given: ContextVar[tuple[_Given, ...]] = ContextVar("given", default=())


class _GivenSource(PydanticBaseSettingsSource):
    """One source of `load`, for pydantic-settings.

    The library's own sources pass over a variable that no field asks for. These hand every name on, so that a setting
    which does not exist is refused by name.
    """

    def __init__(self, settings_cls: type[BaseSettings], given: _Given) -> None:
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


class Settings(BaseSettings):
    """Everything that a process of Atoll can be told.

    Attributes:
        run: id of the run.
        seed: seed of the model's first values, of the order of the data and of sampling.
        health_file: file that a service touches while it is healthy (`atoll health` reads it); none for no file.
        broker: the broker.
        protocol: what all processes of the run agree on.
        learner: one learner process.
        model: dimensions of the reference learner's model.
        train: the reference learner's optimizer and schedule.
        data: the token shards.
        synchronizer: one synchronizer process.
        archive: checkpoints outside the broker.
        log: how a process logs.
        sim: the scenario of `atoll sim train`.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    run: str = "local"
    seed: int = Field(default=0, ge=0, le=1 << 62)
    health_file: SomePath | None = None
    broker: BrokerSettings = BrokerSettings()
    protocol: Annotated[ProtocolSettings, BeforeValidator(_protocol)] = ProtocolSettings()
    learner: LearnerSettings = LearnerSettings()
    model: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    data: DataSettings = DataSettings()
    synchronizer: SynchronizerSettings = SynchronizerSettings()
    archive: ArchiveSettings = ArchiveSettings()
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
        return (init_settings, *(_GivenSource(settings_cls, given) for given in _given.get()))


def bus_options(settings: Settings) -> BusOptions:
    """Return the bus bounds that follow from `settings`."""
    return BusOptions(patience_s=settings.broker.patience_s)


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings and, per dotted name, where a value that is not a default came from."""

    settings: Settings
    origins: Mapping[str, str]


def load(
    config: Path | None = None, assignments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> LoadedSettings:
    """Merge file, environment and `a.b=c` assignments and validate the whole.

    Raises:
        SettingsError: the file is missing or not TOML, an assignment has no `=`, a name is unknown, a value is wrong;
            also in the sections that belong to an installed service.
    """
    given = (
        _assigned(assignments),
        _exported(os.environ if environment is None else environment),
        _written(config),
    )
    origins = {name: origin for source in reversed(given) for name, origin in source.origins.items()}
    # An empty table contradicts nothing.
    values = [name for name in origins if not any(source.tables.get(name) == {} for source in given)]
    for name, origin in origins.items():
        if table := next((each for each in values if name.startswith(f"{each}.")), None):
            raise SettingsError(
                f"{table} is a value in one place and a table in another",
                got=f"{table} from {origins[table]}, {name} from {origin}",
                todo="remove one of them",
            )
    before = _given.set(given)
    try:
        settings = Settings()
    except ValidationError as error:
        raise _explained(error, origins) from error
    finally:
        _given.reset(before)
    token(settings.run, "run id")
    token(settings.learner.id, "learner id")
    for point in entry_points(group=COMPLETERS):
        model, train = point.load()(settings.model, settings.train)
        settings = settings.model_copy(update={"model": model, "train": train})
    return LoadedSettings(settings, origins)


def refusal(error: ValidationError, section: str, names: Sequence[str]) -> SettingsError:
    """Return the first validation error of a service's own section, whose settings are `names`."""
    first = error.errors(include_url=False)[0]
    name = ".".join((section, *(str(part) for part in first["loc"])))
    todo = "`atoll config` shows every value and where it comes from"
    if first["type"] == "extra_forbidden":
        return SettingsError(f"unknown setting {name}", got=first["input"], allowed=", ".join(names), todo=todo)
    return SettingsError(
        f"setting {name} is wrong: {first['msg'].removeprefix('Value error, ')}", got=first["input"], todo=todo
    )


def _assigned(assignments: Sequence[str]) -> _Given:
    """Return what `--set` texts give."""
    found = _Given({}, {})
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise SettingsError("not an assignment", got=assignment, allowed="a.b=c", todo="write --set name=value")
        _plant(found, name.strip(), text, f"--set {name.strip()}")
    return found


def _exported(environment: Mapping[str, str]) -> _Given:
    """Return what `ATOLL_…` variables give; an empty one gives nothing."""
    found = _Given({}, {})
    for variable, text in sorted(environment.items()):
        if variable.startswith(PREFIX) and text != "":
            _plant(found, variable.removeprefix(PREFIX).lower().replace("__", "."), text, variable)
    return found


def _written(config: Path | None) -> _Given:
    """Return what the file gives."""
    found = _Given({}, {})
    for name, value in _flatten(_read_toml(config)) if config is not None else ():
        _plant(found, name, value, str(config))
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            "cannot read the configuration", got=f"{path}: {error.strerror}", todo="check --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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


def _plant(given: _Given, name: str, value: object, origin: str) -> None:
    """Put `value` into the nested tables at dotted `name`."""
    *path, last = name.split(".")
    here = given.tables
    for key in path:
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise SettingsError("a setting is not a table", got=f"{name} (from {origin})", todo="see `atoll config`")
    here[last] = value
    given.origins[name] = origin


def _explained(error: ValidationError, origins: Mapping[str, str]) -> SettingsError:
    """Return the first validation error as one message that names where the value came from."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    origin = origins.get(name) or next((o for n, o in origins.items() if n.startswith(f"{name}.")), "a default")
    if first["type"] == "extra_forbidden":
        # Its value stays unsaid: a misspelt name may hold a secret.
        return SettingsError(f"unknown setting {name}", got=origin, todo="`atoll config` lists what exists")
    return SettingsError(
        f"setting {name} is wrong: {first['msg'].removeprefix('Value error, ')}",
        got=f"{first['input']!r} from {origin}",
        todo="`atoll config` shows every value and where it comes from",
    )
