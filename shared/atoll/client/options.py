"""The options of `atoll.join`, each declared once: its kind and bound, its default, its help.

`join` refuses what these types do not allow. The sections `[broker]` and `[learner]` of the settings inherit those options that
are settings, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, SkipValidation, TypeAdapter, ValidationError

from atoll.base.background_tasks import LoopThread
from atoll.base.clock import Clock
from atoll.base.errors import SettingsError
from atoll.base.wording import DAY_S
from atoll.bus.options import BusOptions, Credentials
from atoll.client.parameters import Rule
from atoll.wire.subjects import REGION_NAMES, region_name

SAMPLE_S_MIN: Final = 1.0
Encode = Literal["auto", "host", "device"]


@dataclass(frozen=True)
class BrokerOptions:
    """Options of a learner that are settings of the broker.

    Attributes:
        patience_s: seconds for which a process tries to reach the broker before it gives up.
        stream_bytes_max: largest size of each stream that holds tensors, for the founder of a run; without it, the bound
            follows from the model (`atoll.run.stream_room`).
        replicas: nodes of a cluster that each keep a copy of every stream, for the founder of a run. With 3 any one of them
            may die, with 5 any two.
        taps: what the taps of a new run show, for its founder: "bodies", or "headers" where learners of a release before are to
            join it, for which bodies are another run's streams (`atoll runs taps`).
        bulk: addresses of further brokers, over which the founder of a run spreads its fragments. Other processes need them
            only where they reach those brokers at other addresses; then as many, in the same order.
    """

    patience_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    stream_bytes_max: Annotated[int | None, Field(ge=1 << 20)] = None
    replicas: Literal[1, 3, 5] = 1
    taps: Literal["bodies", "headers"] = "bodies"
    bulk: Annotated[
        Sequence[str], Field(max_length=63, description="a list of addresses, up to 63"), AfterValidator(tuple)
    ] = ()

    def bus_options(self, region: str, credentials: Credentials | None, *, own_thread: bool = True) -> BusOptions:
        """Return the bounds of a connection with these options."""
        return BusOptions(
            patience_s=self.patience_s,
            replicas=self.replicas,
            taps=self.taps,
            region=region,
            bulk=tuple(self.bulk),
            credentials=credentials,
            own_thread=own_thread,
        )


@dataclass(frozen=True)
class LearnerOptions:
    """Options of a learner that are settings of it.

    Attributes:
        encode: where pseudo-gradients are encoded: "host", "device" (if possible), or "auto" (an accelerator, else the host).
        region: the region whose synchronizer folds what this learner sends (`synchronizer.region`); empty for none.
        sample_s: longest pause between two samples of the learner in the event log, from which a report draws its curves;
            a learner that is young writes more of them (`atoll.client.session.pause_of`).
    """

    encode: Encode = "auto"
    region: Annotated[str, Field(description=f"empty, or {REGION_NAMES}")] = ""
    sample_s: Annotated[float, Field(ge=SAMPLE_S_MIN, le=DAY_S)] = 30.0


@dataclass(frozen=True)
class JoinOptions(BrokerOptions, LearnerOptions):
    """Choices of a caller of `join`, beside the run and its parameters; those of `BrokerOptions` and `LearnerOptions`, too.

    Attributes:
        merge: rules of leaves by patterns on their names, {"*/scale": "mean"} say, see `atoll.client.parameters`. The
            founder's hold for the run.
        donated: the training step donates its parameters, so snapshots are copied.
        model: a description of the model, kept in the run record.
        data: fingerprint of the data; two learners of a run must agree on it when both give one.
        data_blocks: blocks of leased data, 0 for a loop that brings its own.
        seed: the run's seed.
        identity: file that says who this learner is, for a broker behind a locked door (`atoll keys add`);
            None: the one that ATOLL_BROKER__IDENTITY names, if it names one.
        start_s: how long this program had been starting before it called `join`, seconds: that is time of the learner, too
            (`atoll why goodput`). A notebook that has been open for hours had not.
        log_adoptions: log a line at info for each adopted fragment. Without it they are at debug, and the line `learner.moved`,
            every 30 s, has their number.
        health_file: touched with every heartbeat that reached the broker.
        clock: another clock, for tests.
        home: a loop thread to share with others (in-memory buses need one loop); a thread of its own by default.
    """

    __pydantic_config__: ClassVar = ConfigDict(strict=True, arbitrary_types_allowed=True, revalidate_instances="always")

    merge: Mapping[str, Rule] = field(default_factory=dict)
    donated: bool = False
    model: str = ""
    data: str = ""
    data_blocks: int = 0
    seed: int = 0
    identity: Path | str | None = None
    start_s: Annotated[float, Field(ge=0, le=DAY_S)] = 0.0
    log_adoptions: bool = False
    health_file: Path | None = None
    clock: Annotated[Clock | None, SkipValidation] = None
    home: LoopThread | None = None

    @classmethod
    def of(cls, *sections: BrokerOptions | LearnerOptions) -> Self:
        """Return the options that these sections of the settings have."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: getattr(one, name) for one in sections for name in names if hasattr(one, name)})

    def check(self) -> None:
        """Raise `SettingsError` for an option of another kind, or out of its bound."""
        try:
            _adapter().validate_python(self)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name, got = f"options.{first['loc'][0]}", first["input"]
            raise SettingsError(
                f"{name} is wrong",
                got=f"{name} = {str(got)[:80]!r} ({type(got).__name__})",
                allowed=first["msg"].removeprefix("Input should be "),
                todo=f"correct {name}",
            ) from error
        if self.region:
            region_name(self.region, "correct options.region")


@cache
def _adapter() -> TypeAdapter[JoinOptions]:
    return TypeAdapter(JoinOptions)


DEFAULTS: Final = JoinOptions()
