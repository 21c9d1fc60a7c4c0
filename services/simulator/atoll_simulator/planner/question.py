"""The question to the planner: a model, its training, over which links, on which machines, for which money.

Everything is in base units (bits per second, seconds, bytes). Protocol values are those of `ProtocolSettings`, which
checks them, so there is no plan for settings that a run would refuse. A quorum above the number of learners is no error
here but a warning: a plan is there to find that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from atoll.base.errors import SettingsError
from atoll.base.quantities import LEARNERS_MAX
from atoll.base.wording import check_within
from atoll.bus.options import DEFAULTS
from atoll.codec import FORMATS, KEYFRAME
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.limits import CHUNK_BYTES
from atoll_simulator.planner.failures import Failures
from atoll_simulator.planner.utilisation import PUBLISHED_LAYERS

FLAGS = ("fragments", "interval_steps", "overlap_steps", "quorum", "shards")
WANTED = (0.50, 0.80, 0.90, 0.95, 0.99)
"""The plan gives the bandwidth for these utilisations, those of the published tables."""
SEGMENT_BYTES = 1460.0
EXPECTED_WAIT_STEPS = 1.0
"""A region waits for its learners (`atoll_synchronizer.regions`). They answer at the ends of their steps, so within a step."""


@dataclass(frozen=True, slots=True)
class PlanLinks:
    """Bits per second of each learner's link, up and down, in order of regions; of the hub's, None for as much as needed.

    Attributes:
        up, down: one rate per region; learners are spread over the regions in turn.
        hub_in, hub_out: the hub's own link to the learners.
        rtt_s: round-trip time between a learner and the hub.
        loss: share of packets lost, which bounds one TCP connection (Mathis et al. 1997).
        window_bytes: bytes of a blob in flight while it is written: chunks in flight times chunk size.
        merge_s: seconds of a round that are no transfer: folding, outer step, the broker's disk.
    """

    up: tuple[float, ...]
    down: tuple[float, ...]
    hub_in: float | None = None
    hub_out: float | None = None
    rtt_s: float = 0.05
    loss: float = 0.0
    window_bytes: int = DEFAULTS.window * CHUNK_BYTES
    merge_s: float = 0.0

    @property
    def connection_bits_per_s(self) -> float:
        """Return what one TCP connection carries at this loss and round-trip time: 1.22 segments / (rtt sqrt(loss))."""
        if self.loss == 0.0 or self.rtt_s == 0.0:
            return math.inf
        return 8.0 * SEGMENT_BYTES * math.sqrt(1.5) / (self.rtt_s * math.sqrt(self.loss))

    @property
    def window_bits_per_s(self) -> float:
        """Return the rate at which the window of unacknowledged chunks lets a writer send."""
        return 8.0 * self.window_bytes / self.rtt_s if self.rtt_s else math.inf


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per chip and hour, and per GB that leaves a learner's region or the hub."""

    chip_hour: float = 0.0
    egress_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """One plan to make.

    Attributes:
        parameters: N.
        step_s: seconds of one inner step of one learner, compute only.
        links: see there.
        learners: M.
        per_region: learners that share a region and its link, whose synchronizer adds up what they send; 1 for no regions.
        protocol: P, H, tau, K, shards, codecs up and down, outer momentum, token target.
        step_tokens: tokens of one inner step of one learner.
        layers: layers of the model, for what a synchronous reduction can hide in its backward pass.
        reduce_bits: bits per parameter of a synchronous reduction.
        backward_overlap: whether a synchronous reduction runs beside the backward pass, of every step or of every H-th.
        tokens: budget to reach.
        chips: chips of one learner.
        failures: see there.
        prices: see there.
        stream_bytes_max: room of each broker stream that holds tensors; None where it follows from the model.
        shard_memory_bytes: memory of the machine that serves one shard.
    """

    parameters: int
    step_s: float
    links: PlanLinks
    learners: int = 8
    per_region: int = 1
    protocol: ProtocolSettings = field(default_factory=ProtocolSettings)
    step_tokens: int = 1 << 18
    layers: int = PUBLISHED_LAYERS
    reduce_bits: float = 16.0
    backward_overlap: bool = True
    tokens: int = 0
    chips: int = 1
    failures: Failures = field(default_factory=Failures)
    prices: Prices = field(default_factory=Prices)
    stream_bytes_max: int | None = None
    shard_memory_bytes: float = 16e9

    @property
    def fragment_elements(self) -> int:
        """Return the numbers in one fragment; the production layout is balanced to within a row."""
        return -(-self.parameters // self.protocol.fragments)

    @property
    def state_numbers(self) -> float:
        """Return the float32 numbers of outer state per parameter: momentum, or two as of Adam for an optax optimizer.

        The rounding residue of the down-link counts for half of one (`atoll.merge.global_update`).
        """
        carried = 0.0 if self.exact_down else 0.5
        if not self.protocol.outer_is_native:
            return 2 + carried
        return carried + (1 if self.protocol.outer_momentum else 0)

    @property
    def exact_down(self) -> bool:
        """Return whether every version is sent whole."""
        return self.protocol.codec_down == KEYFRAME

    @property
    def round_every_s(self) -> float:
        """Return the seconds between two rounds of any fragment."""
        return self.protocol.interval_steps * self.step_s / self.protocol.fragments

    @property
    def senders(self) -> int:
        """Return how many vectors a round brings to the hub: one of each region."""
        return -(-self.learners // self.per_region)

    @property
    def added_up_s(self) -> float:
        """Return how much longer a round takes where regions add up: learners wait for each other, and the shard asks."""
        return 0.0 if self.per_region == 1 else EXPECTED_WAIT_STEPS * self.step_s + self.links.rtt_s

    @property
    def hidden_s(self) -> float:
        """Return the seconds of a round that overlap hides: tau steps."""
        return self.protocol.overlap_steps * self.step_s

    def check(self) -> Question:
        """Return self, or raise `SettingsError` for the first value that makes no plan."""
        self._check_protocol()
        self.failures.check()
        for name, codec in (("--up", self.protocol.codec_up), ("--down", self.protocol.codec_down)):
            if codec not in FORMATS:
                raise SettingsError(
                    f"{name} is no codec", got=codec, allowed=", ".join(FORMATS), todo=f"set {name} to one of them"
                )
        if self.protocol.fragments > self.parameters:
            raise SettingsError(
                "more fragments than parameters",
                got=self.protocol.fragments,
                allowed=f"1..{self.parameters}",
                todo="lower --fragments",
            )
        if len(self.links.up) != len(self.links.down):
            raise SettingsError(
                "as many regions up as down are needed",
                got=f"{len(self.links.up)} up, {len(self.links.down)} down",
                allowed="one rate, or one per region, in both",
                todo="correct --bandwidth-down",
            )
        check_within("--learners", self.learners, 1, LEARNERS_MAX)
        if len(self.links.up) > self.learners:
            raise SettingsError(
                "there are regions without a learner",
                got=f"{len(self.links.up)} regions, {self.learners} learners",
                allowed="at most as many regions as learners",
                todo="leave rates out of --bandwidth, or raise --learners",
            )
        check_within("--per-region", self.per_region, 1, self.learners)
        check_within("--step-s", self.step_s, 1e-6, 1e6)
        check_within("--step-tokens", self.step_tokens, 1, 1 << 53)
        check_within("--layers", self.layers, 1, 100_000)
        check_within("--reduce-bits", self.reduce_bits, 0.1, 64.0)
        check_within("--tokens", self.tokens, 0, 1e24)
        check_within("--chips", self.chips, 1, 1 << 40)
        check_within("--rtt-ms", 1000.0 * self.links.rtt_s, 0.0, 100_000.0)
        check_within("--loss", self.links.loss, 0.0, 0.5)
        check_within("--merge-s", self.links.merge_s, 0.0, 1e6)
        check_within("--chip-hour", self.prices.chip_hour, 0.0, 1e9)
        check_within("--egress-gb", self.prices.egress_gb, 0.0, 1e9)
        check_within("--shard-memory-gb", self.shard_memory_bytes / 1e9, 1e-9, 1e9)
        return self

    def _check_protocol(self) -> None:
        try:
            self.protocol.check()
        except SettingsError as error:
            name, _, rest = error.what.partition(" ")
            if name not in FLAGS:
                raise
            flag = "--" + name.replace("_", "-")
            raise SettingsError(
                f"{flag} {rest}", got=error.got, allowed=error.allowed, todo=f"correct {flag} (protocol.{name})"
            ) from error
