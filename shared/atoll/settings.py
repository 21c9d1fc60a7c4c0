"""The one configuration model: a TOML file, `ATOLL_…` environment variables and `--set a.b=c`, in rising precedence.

`load` is the only place that reads the environment; services get the frozen result handed down. Every value remembers
where it came from (`LoadedSettings.origins`), so that an error names the file, the variable or the flag that is wrong, and
`atoll config` can show it. Relations between settings are checked here, once, with both values in the message.

Sections: `broker` (where it is), `protocol` (what the run agrees on, see `atoll.protocol.settings`), `learner`,
`model`, `train`, `data`, `synchronizer`, `archive`, `sim`. Model and training sections are plain tables here and are
checked by the learner, which knows what they mean, the scenario of a simulation by the simulator; the kernel carries them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from atoll.base.errors import SettingsError
from atoll.bus.options import BusOptions
from atoll.codec import check_codecs
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.subjects import token

PREFIX = "ATOLL_"
COMPLETERS = "atoll.settings"


class Section(BaseModel):
    """A table of the configuration: frozen, and closed to names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class BrokerSettings(Section):
    """Where the broker is and how long to try before giving up."""

    url: str = "nats://127.0.0.1:4222"
    patience_s: float = Field(default=30.0, gt=0, le=3600)
    stream_bytes_max: int = Field(default=8 << 30, ge=1 << 20)


class LearnerSettings(Section):
    """One learner process.

    `throttle` stretches every step by that factor (for tests of slow islands). `initial_model` is a safetensors file that
    the run begins from instead of random values; who joins a run that exists takes the run's values. In `checkpoint_dir`
    the state of the inner optimizer and the place in the data are kept, every `checkpoint_every_s` seconds and on leaving;
    without it a learner that restarts asks a peer. `drain_s` bounds what leaving may take. `encode` says where pseudo-gradients
    are made: on the `host`, on the `device` if that is possible, or there if it is an accelerator. Global fragments of
    `spill_bytes` and more lie in scratch files in `scratch_dir` (where the system keeps temporary files, if not said, as long
    as there is room) and not in memory.
    """

    id: str = "learner-0"
    throttle: float = Field(default=1.0, ge=1.0, le=1000.0)
    initial_model: Path | None = None
    compile_cache: Path | None = None
    threads: int = Field(default=0, ge=0, le=1024)
    checkpoint_dir: Path | None = None
    checkpoint_every_s: float = Field(default=20.0, ge=1.0, le=86_400.0)
    drain_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    encode: Literal["auto", "host", "device"] = "auto"
    spill_bytes: int = Field(default=1 << 30, ge=1 << 20)
    scratch_dir: Path | None = None


class DataSettings(Section):
    """Where the token shards lie, and how many blocks a learner leases at once: also how widely its text is mixed."""

    dir: Path = Path("corpus")
    lease_blocks: int = Field(default=64, ge=1, le=65536)


class SynchronizerSettings(Section):
    """One synchronizer process: the only shard it serves, or a fair share of all beside other processes.

    `restore` is the URL of an archive from which a run that the broker does not have is rebuilt. Arrays of `spill_bytes` and
    more lie in scratch files in `scratch_dir` (where the system keeps temporary files, if not said) and not in memory.
    """

    shard: int | None = Field(default=None, ge=0)
    restore: str = ""
    spill_bytes: int = Field(default=1 << 30, ge=1 << 20)
    scratch_dir: Path | None = None


class ArchiveSettings(Section):
    """Where shards keep checkpoints outside the broker (see `atoll.archive`).

    `url` is a folder, `file://…` or `s3://bucket/prefix`; empty means no archive. A mark is made every `every_s` seconds of
    the run's age (0: none), and the newest `keep` marks that every shard has made are kept.
    """

    url: str = ""
    every_s: int = Field(default=300, ge=0, le=7 * 86400)
    keep: int = Field(default=3, ge=1, le=1000)


class LogSettings(Section):
    """How a process logs: `auto` is JSON unless the output is a terminal."""

    format: Literal["auto", "json", "console"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


def _protocol(value: object) -> ProtocolSettings:
    """Turn a table of texts and numbers into `ProtocolSettings`; raise ValueError with the field's own message."""
    if isinstance(value, ProtocolSettings):
        return value
    try:
        return check_codecs(msgspec.convert(value, ProtocolSettings, strict=False).check())
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


class Settings(BaseSettings):
    """Everything a process of Atoll can be told. `health_file` is what a service touches while it lives."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid", arbitrary_types_allowed=True
    )

    run: str = "local"
    seed: int = Field(default=0, ge=0, le=1 << 62)
    health_file: Path | None = None
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
        """Take nothing but what `load` merged: one reader of the environment, one order of precedence."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)


def bus_options(settings: Settings) -> BusOptions:
    """Return the bus bounds that follow from `settings`."""
    broker = settings.broker
    return BusOptions(patience_s=broker.patience_s, stream_bytes_max=broker.stream_bytes_max)


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
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value, origin in _sources(config, assignments, os.environ if environment is None else environment):
        _plant(tree, name, value, origin)
        origins[name] = origin
    try:
        settings = Settings(**tree)
    except ValidationError as error:
        raise _explained(error, origins) from error
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


def _sources(
    config: Path | None, assignments: Sequence[str], environment: Mapping[str, str]
) -> list[tuple[str, object, str]]:
    """Return (dotted name, value, origin), lowest precedence first."""
    found: list[tuple[str, object, str]] = []
    if config is not None:
        found += [(name, value, str(config)) for name, value in _flatten(_read_toml(config))]
    for variable, text in sorted(environment.items()):
        if variable.startswith(PREFIX) and text != "":
            found.append((variable.removeprefix(PREFIX).lower().replace("__", "."), text, variable))
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise SettingsError("not an assignment", got=assignment, allowed="a.b=c", todo="write --set name=value")
        found.append((name.strip(), text, f"--set {assignment}"))
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
    """Return leaf values by dotted name."""
    leaves: list[tuple[str, object]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            leaves += _flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


def _plant(tree: dict[str, Any], name: str, value: object, origin: str) -> None:
    """Put `value` into the nested tables at dotted `name`."""
    *path, last = name.split(".")
    here = tree
    for key in path:
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise SettingsError("a setting is not a table", got=f"{name} (from {origin})", todo="see `atoll config`")
    here[last] = value


def _explained(error: ValidationError, origins: Mapping[str, str]) -> SettingsError:
    """Return the first validation error as one message that names where the value came from."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    origin = origins.get(name) or next((o for n, o in origins.items() if n.startswith(f"{name}.")), "a default")
    if first["type"] == "extra_forbidden":
        return SettingsError(
            f"unknown setting {name}", got=f"{first['input']!r} from {origin}", todo="`atoll config` lists what exists"
        )
    return SettingsError(
        f"setting {name} is wrong: {first['msg'].removeprefix('Value error, ')}",
        got=f"{first['input']!r} from {origin}",
        todo="`atoll config` shows every value and where it comes from",
    )
