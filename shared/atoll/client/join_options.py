"""What a loop may choose when it joins a run, beside the run and its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atoll.base.clock import Clock
from atoll.base.loop_thread import LoopThread
from atoll.client.leaf_rules import Rule
from atoll.client.samples import SAMPLE_S


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What a caller of `join` may choose beside the run and its parameters.

    Attributes:
        merge: rules of leaves by patterns on their names, {"*/scale": "mean"} say, see `atoll.client.leaf_rules`. The
            founder's hold for the run.
        donated: the training step donates its parameters, so snapshots are copied.
        encode: where to make pseudo-gradients (`client.device_encoding`): "host", "device" (if possible) or "auto".
        model: a description of the model, kept in the run record.
        data: fingerprint of the data; two learners of a run must agree on it when both give one.
        data_blocks: blocks of leased data, 0 for a loop that brings its own.
        seed: the run's seed.
        stream_bytes_max: bound of each stream of tensors, used only by the founder; None: it follows from the model.
        replicas: copies of each stream, on as many nodes of the broker's cluster, used only by the founder.
        taps: "bodies" or "headers": what the taps of a new run show (`broker.taps`), used only by the founder.
        bulk: addresses of further brokers, over which the founder spreads the run's fragments, see `atoll.bus.spread`.
        region: the region whose synchronizer folds what this learner sends (`atoll synchronizer --region`); empty for none.
        patience_s: how long to try to reach the broker, seconds.
        identity: file that says who this learner is, for a broker behind a locked door (`atoll keys add`);
            None: the one that ATOLL_BROKER__IDENTITY names, if it names one.
        sample_s: longest pause between two samples of this learner in the event log (`client.samples`), seconds.
        start_s: how long this program had been starting before it called `join`, seconds: that is time of the learner, too
            (`atoll why goodput`). A notebook that has been open for hours had not.
        log_adoptions: log a line at info for each adopted fragment. Without it they are at debug, and the line `learner.moved`,
            every 30 s, has their number.
        health_file: touched with every heartbeat that reached the broker.
        clock: another clock, for tests.
        home: a loop thread to share with others (in-memory buses need one loop); a thread of its own by default.
    """

    merge: Mapping[str, Rule] = field(default_factory=dict)
    donated: bool = False
    encode: str = "auto"
    model: str = ""
    data: str = ""
    data_blocks: int = 0
    seed: int = 0
    stream_bytes_max: int | None = None
    replicas: int = 1
    taps: Literal["bodies", "headers"] = "bodies"
    bulk: Sequence[str] = ()
    region: str = ""
    patience_s: float = 30.0
    identity: Path | str | None = None
    sample_s: float = SAMPLE_S
    start_s: float = 0.0
    log_adoptions: bool = False
    health_file: Path | None = None
    clock: Clock | None = None
    home: LoopThread | None = None


DEFAULTS = JoinOptions()
