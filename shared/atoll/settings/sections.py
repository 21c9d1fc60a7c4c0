"""The sections of the configuration that the kernel itself reads, one class a table; `Attributes:` say what a setting means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from atoll.client.options import BrokerOptions, LearnerOptions
from atoll.protocol.data import UNIT_BLOCKS_MAX
from atoll.wire.subjects import REGION_NAMES

UP_LEARNERS_MAX: Final = 64
UP_STANDBYS_MAX: Final = 4
UP_BULK_MAX: Final = 7
THROTTLE_MAX: Final = 1000.0
YEAR_MINUTES: Final = 365.0 * 24 * 60
_REGION: Final = f"empty, or {REGION_NAMES}"


class NamesPlace:
    """Marks a text that may name a folder: such a text is a place, as a path is (see `atoll.settings.place_path`)."""


def _not_empty(given: object) -> object:
    if given == "":
        raise ValueError("a path cannot be empty; leave the setting away for none")  # pydantic makes its error of it
    return given


def _list(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given) if given.startswith("[") else [given]
    except RecursionError:
        raise ValueError("lists in lists, deeper than Python reads") from None


def _number(given: object) -> object:
    return int(given) if isinstance(given, str) and given.isdecimal() else given


SomePath = Annotated[Path, BeforeValidator(_not_empty)]
"""A path that was written down: an empty text would mean the working directory."""
SomePaths = Annotated[tuple[SomePath, ...], BeforeValidator(_list)]
FolderOrUrl = Annotated[str, NamesPlace()]
HttpAddress = Annotated[str, Field(pattern=r"^https?://[^/\s@]+(/\S*)?$")]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\.?$", max_length=253)]
SinkName = Literal["wandb", "tensorboard", "trackio"]
Copies = Annotated[Literal[1, 3, 5], BeforeValidator(_number)]


class Section(BaseModel):
    """A table of the configuration: frozen, and closed to names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class BrokerSettings(Section, BrokerOptions):
    """The broker, and how long a process tries to reach it.

    Attributes:
        url: address of the broker; of a cluster those of all nodes, separated by commas.
        identity: file that says who this process is, for a broker behind a locked door (`atoll keys`); none for an open one.
    """

    url: str = "nats://127.0.0.1:4222"
    identity: SomePath | None = None

    @field_validator("bulk", mode="before")
    @classmethod
    def _addresses(cls, given: object) -> object:
        return _list(given)

    @field_validator("replicas", mode="before")
    @classmethod
    def _check_replicas(cls, given: object) -> object:
        return _number(given)


class LearnerSettings(Section, LearnerOptions):
    """One learner process.

    Attributes:
        id: name of the learner in the run; no two live processes may share it.
        throttle: every step takes this many times as long; for tests of slow islands.
        initial_model: safetensors file that a new run begins from instead of random values. A learner that joins an
            existing run takes the run's values.
        compile_cache: folder in which JAX keeps compiled programs. `atoll up` and `atoll sim train` have one in the user's
            cache.
        threads: threads of the process; 0 lets the libraries decide.
        checkpoint_dir: folder for the state of the inner optimizer and the place in the data. Without it a
            learner that restarts asks a peer, which an open broker lets it do, or begins with fresh moments.
        checkpoint_every_s: seconds between two checkpoints; the learner also writes one when it leaves.
        drain_s: longest time that leaving may take, in seconds.
        spill_bytes: global fragments of this size and more are kept in scratch files and not in memory.
        scratch_dir: folder of the scratch files; none for the system's folder of temporary files, as long as it has room.
        profile: folder for a profile of some steps, which Perfetto reads; none for no profile.
        profile_steps: how many steps the profile covers.
    """

    id: str = "learner-0"
    throttle: float = Field(default=1.0, ge=1.0, le=1000.0)
    initial_model: SomePath | None = None
    compile_cache: SomePath | None = None
    threads: int = Field(default=0, ge=0, le=1024)
    checkpoint_dir: SomePath | None = None
    checkpoint_every_s: float = Field(default=20.0, ge=1.0, le=86_400.0)
    drain_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    spill_bytes: int = Field(default=1 << 30, ge=1 << 20)
    scratch_dir: SomePath | None = None
    profile: SomePath | None = None
    profile_steps: int = Field(default=64, ge=1, le=10_000)


class DataSettings(Section):
    """The token shards that learners read.

    Attributes:
        dir: folder of the token shards, as `atoll data prepare` writes it.
        lease_blocks: blocks that a learner leases at a time.
        source: `module:attribute` of a token source of one's own, which the learner trains on; vocabulary and held-out text
            are still those of `dir`. Empty: the token shards.
        held_out_tokens: so many tokens at the beginning of the held-out text are what a model is measured on, by the evaluator
            and at the export alike.
    """

    dir: SomePath = Path("corpus")
    lease_blocks: int = Field(default=64, ge=1, le=UNIT_BLOCKS_MAX)
    source: str = ""
    held_out_tokens: int = Field(default=32_768, ge=128, le=1 << 30)


class SynchronizerSettings(Section):
    """One synchronizer process.

    Attributes:
        shard: the only shard that it serves; none for a fair share of all shards beside other processes.
        restore: URL of an archive from which the process rebuilds a run that the broker does not have; empty for none.
        spill_bytes: arrays of this size and more are kept in scratch files and not in memory.
        scratch_dir: folder of the scratch files; none for the system's folder of temporary files.
        region: fold the contributions of this region's learners for the shards, and own no shard; empty for a shard's owner.
    """

    shard: int | None = Field(default=None, ge=0)
    restore: FolderOrUrl = ""
    spill_bytes: int = Field(default=1 << 30, ge=1 << 20)
    scratch_dir: SomePath | None = None
    region: str = Field(default="", description=_REGION)


class MonitorSettings(Section):
    """One monitor process (`atoll monitor`).

    Attributes:
        host: address at which it serves metrics and pages, to anybody who reaches it: 127.0.0.1 is this machine alone.
        port: port at which it serves; 0 takes a free one, which its log names.
        names: further host names by which it may be asked, such as that of a container or a proxy. Without any it answers to
            addresses, `localhost`, and, if it serves others, the name of its machine.
        endpoints: addresses of the monitoring ports of brokers (`http://host:8222`), for their memory and connections.
        disks: folders on the file systems whose free space is to be known, such as those of brokers on this machine.
        url_file: file to which it writes its address once it serves; none for no file.
        folder: where it writes its journal (`RUN.jsonl`: every event, and samples of every metric) and the files of sinks.
            Without it `runs/monitor`.
        files: compressed files of the journal that are kept, each of 32 MB before it was compressed.
        sample_s: seconds between two samples.
        sinks: where else samples go; each is an extra of its own.
        traces: address of an OpenTelemetry collector (`http://host:4318/v1/traces`) that is told of each round; empty for none.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=9464, ge=0, le=65535)
    names: Annotated[tuple[HostName, ...], BeforeValidator(_list)] = Field(
        default=(), max_length=64, description="a list of host names, up to 64"
    )
    endpoints: Annotated[tuple[HttpAddress, ...], BeforeValidator(_list)] = Field(default=(), max_length=64)
    disks: SomePaths = Field(default=(), max_length=64)
    url_file: SomePath | None = None
    folder: SomePath | None = None
    files: int = Field(default=16, ge=1, le=1000)
    sample_s: float = Field(default=10.0, ge=1.0, le=3600.0)
    sinks: Annotated[tuple[SinkName, ...], BeforeValidator(_list)] = ()
    traces: Annotated[str, Field(pattern=r"^(https?://[^/\s@]+(/\S*)?)?$")] = ""


class ArchiveSettings(Section):
    """Where shards keep checkpoints outside the broker (see `atoll.archive`).

    Attributes:
        url: a folder, `file://…` or `s3://bucket/prefix`; empty for no archive.
        every_s: a checkpoint is made every so many seconds of the run's age; 0 for never.
        keep: how many of the newest checkpoints that every shard has made are kept.
        contributions: whether shards also retain every round there, with all contributions, for `atoll replay`. It costs as
            many bytes as learners send, for ever, and every commit waits for it.
    """

    url: FolderOrUrl = ""
    every_s: int = Field(default=300, ge=0, le=7 * 86400)
    keep: int = Field(default=3, ge=1, le=1000)
    contributions: bool = False


class UpSettings(Section):
    """A whole run on this machine, as `atoll up` starts it; of other processes only its page reads this section: `out`.

    Attributes:
        learners: how many learners; their ids are learner-1, learner-2 and so on.
        standbys: how many more processes stand by for each shard.
        brokers: how many nodes the run's own broker has; with more than one `broker.replicas` is as many, unless it is given.
        bulk_brokers: how many further brokers of the run's own share its fragments (`broker.bulk`), to try that.
        minutes: train for this long at most, in minutes; 0 for no bound.
        corpus: text to train on, as `atoll data prepare` reads it: files and folders; empty for Python's own source.
        throttle: factor by learner id: every step of that learner takes this many times as long.
        via: broker URL by process (a learner, shard-0, standby-0-1), for processes that reach the broker through a relay.
        port: port of the run's own broker, the next ones for further nodes; 0 for free ones.
        locked: whether the run's own broker has a locked door; the keys are in the run's folder. A run that goes on stays as it
            was begun.
        out: folder of the run; one that holds a run continues it. Without it `runs/<run>`.
        dashboard: whether a monitor serves the page of the run while it goes on, at `monitor.host` and, if that is set, at
            `monitor.port`; else at a free port.
    """

    learners: int = Field(default=3, ge=1, le=UP_LEARNERS_MAX)
    standbys: int = Field(default=0, ge=0, le=UP_STANDBYS_MAX)
    brokers: Copies = 1
    bulk_brokers: int = Field(default=0, ge=0, le=UP_BULK_MAX)
    minutes: float = Field(default=0.0, ge=0.0, le=YEAR_MINUTES)
    corpus: SomePaths = ()
    throttle: dict[str, Annotated[float, Field(ge=1.0, le=THROTTLE_MAX)]] = Field(default_factory=dict)
    via: dict[str, str] = Field(default_factory=dict)
    port: int = Field(default=0, ge=0, le=65535)
    locked: bool = True
    out: SomePath | None = None
    dashboard: bool = False


class LogSettings(Section):
    """Logging of a process.

    Attributes:
        format: "json" (a line for each event), "console" (for people), or "auto": JSON unless the output is a terminal.
        level: the least serious level that is written.
        dump_dir: where the last facts of its machines are written when something of ours fails, or on SIGUSR1 (`atoll replay`);
            if it is not set, `atoll-facts` where the system keeps temporary files.
    """

    format: Literal["auto", "json", "console"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"
    dump_dir: SomePath | None = None
