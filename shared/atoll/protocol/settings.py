"""The settings that all processes of a run must agree on; written once into the run record by the founder.

Defaults are Decoupled DiLoCo's where it publishes them (tau = 2, K = 1 plus grace, Nesterov outside) and
our own measurements where it does not (outer rate and momentum, merge, interval; see docs/results). Two relations
matter: the interval H must allow every fragment its turn, and the grace window may not exceed what overlap hides.

The last `value_fragments` fragments hold tensors that no optimizer trains, running statistics say, and are merged *by value*:
their new version is the weighted mean of the learners' values, late ones too. A learner pushes the difference from zero in
place of that from its anchor, and other settings hold (`of`). Nothing is rounded on the way, and a learner takes the mean as
it is: a mean of variances is a variance, but one plus a difference or an error may be negative.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args, get_type_hints

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.quantities import FRAGMENTS_MAX, LEARNERS_MAX, RUN_TOKENS_MAX, TOKENS_MAX

KEYFRAME_VERSIONS_MAX: Final = 1024
MAJORITY_MIN: Final = 3
"""The least number of contributions of which most can be believed."""
BY_VALUE: Final[dict[str, Any]] = {
    "merge": "mean",
    "correction": "none",
    "age_law": "power",
    "age_damping": 1.0,  # damping shortens: of values, that would be another value
    "adoption": "overwrite",
    "codec_up": "f32",
    "codec_down": "f32",
    "error_feedback": False,
    "norm_max": 1e12,  # of values, not of differences
}
"""What holds for fragments merged by value, whatever the run has for the others."""


NESTEROV: Final = "nesterov"
"""Our own outer optimizer."""
OPTAX_OUTERS: Final = tuple(
    f"optax:{name}"
    for name in (
        *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamw", "amsgrad", "lamb", "lars", "lion", "nadam"),
        *("nadamw", "novograd", "radam", "rmsprop", "sgd", "sign_sgd", "sm3", "yogi"),
    )
)
"""The outer optimizers of optax that a run record may name. The one argument of each is `outer_lr`, which has bounds."""
OUTERS: Final = (NESTEROV, *OPTAX_OUTERS)
_OWN_CODE: Final = re.compile(r"[A-Za-z_]\w{0,63}(\.[A-Za-z_]\w{0,63}){0,15}:[A-Za-z_]\w{0,63}", re.ASCII)
OUTER_ALLOWED: Final = (
    f"{NESTEROV}; optax:<name> with one of {', '.join(name.removeprefix('optax:') for name in OPTAX_OUTERS)}; "
    "or module:attribute, where a process's own settings name it"
)


class SettingBounds(msgspec.Struct, frozen=True):
    """The least and the largest value of a setting, both allowed; `high` may name another setting. `why` explains a bound."""

    low: float
    high: float | str
    why: str = ""


BOUNDS: Final[Mapping[str, SettingBounds]] = {
    "fragments": SettingBounds(1, FRAGMENTS_MAX),
    "value_fragments": SettingBounds(0, "fragments", "as many as there are fragments"),
    "interval_steps": SettingBounds(1, 100_000),
    "overlap_steps": SettingBounds(1, "interval_steps", "interval_steps"),
    "shards": SettingBounds(1, "fragments", "as many as there are fragments"),
    "quorum": SettingBounds(1, LEARNERS_MAX),
    "grace_gamma": SettingBounds(0.0, 0.999, "below 1, so that a round ends inside its overlap"),
    "grace_cap_steps": SettingBounds(0.0, "overlap_steps", "overlap_steps"),
    "average_decay": SettingBounds(0.001, 1.0),
    "age_max": SettingBounds(0, 1000),
    "age_damping": SettingBounds(0.0, 1.0),
    "share_max": SettingBounds(1e-4, 1.0),
    "outer_lr": SettingBounds(1e-6, 100.0),
    "outer_momentum": SettingBounds(0.0, 0.9999),
    "average_versions": SettingBounds(0, 1 << 20),
    "blend_alpha": SettingBounds(0.0, 1.0),
    "keyframe_versions": SettingBounds(1, KEYFRAME_VERSIONS_MAX),
    "tokens_target": SettingBounds(0, RUN_TOKENS_MAX),
    "lease_s": SettingBounds(0.2, 3600.0),
    "silence_s": SettingBounds(0.2, 3600.0),
    "norm_max": SettingBounds(1e-6, 1e12),
    "outlier_ratio": SettingBounds(0.0, 1e9),
    "step_tokens_max": SettingBounds(0, TOKENS_MAX),
    "steps_per_s_max": SettingBounds(1e-3, 1e6),
    "offences_max": SettingBounds(0, 1 << 20),
}
"""What `ProtocolSettings.check` enforces and `atoll config --describe` shows, in the order of the settings."""


class _SettingsMeta(msgspec.StructMeta):
    """Refuses a setting that there is not as one of our errors."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805  (whatever is given, to a class)
        names: tuple[str, ...] = cls.__struct_fields__
        if args:
            raise SettingsError("protocol settings are given by name", got=args, allowed="ProtocolSettings(quorum=2)")
        for name in kwargs:
            if name not in names:
                raise SettingsError.unknown(f"protocol.{name}", names)
        return super().__call__(**kwargs)


class ProtocolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_SettingsMeta):
    """The agreement of a run.

    Making one looks at names alone. A value that is out of range, such as a quorum of 0, is refused by `check`, which
    `atoll.join` calls, and all else that founds a run.

    Attributes:
        fragments: P, how many parts the model travels in.
        value_fragments: how many of those, the last ones, are merged by value; it follows from the founder's leaves
            (`atoll.client.parameters`).
        interval_steps: H, inner steps between two rounds of the same fragment.
        overlap_steps: tau, steps a round may take while learners go on.
        shards: parts of the synchronizer that the fragments are divided over; one process may serve several.
        quorum: K, contributions a round needs before its grace window opens.
        grace_gamma: share of the slack that a round may wait (Eq. 3), 0 <= gamma < 1.
        grace_cap_steps: longest grace, in median steps.
        average_decay: weight of the newest sample in the moving averages of Eq. 3.
        age_max: S_max, versions a late contribution may be behind and still enter the next round.
        age_damping: staleness weight of a late contribution, per version of age: 0 ignores it, 1 treats it as in time.
        age_law: "power": age_damping^age alone; "gate": times a cosine that falls from 1 at age 0 to 0 at age_max + 1.
        correction: "none", or "heloco": turn a pseudo-gradient that disagrees with the outer momentum (atoll.merge).
        merge: "mean" or "rda" (App. D.2) for tensors that are not merged directly.
        share_max: largest share of a round's weight that one learner may have; 1 for any (`atoll.merge.robust`).
        robust: "none"; "clip": shorten slices that are much longer than the round's median; "gate": leave out, as well, those
            that point away from the others'. It needs a quorum of three.
        outer: the outer optimizer: our own, one of a fixed list of optax's, or code of one's own: a callable of the rate
            that makes an optax transformation. Such code runs only in a process whose own settings name it.
        outer_lr: outer learning rate.
        outer_momentum: outer momentum, 0 for plain SGD.
        average_versions: horizon of an average of the global values that is kept beside them; 0 for none.
        adoption: "overwrite" (the paper), "blend" or "carry".
        blend_alpha: share of its own values a learner keeps when it blends.
        codec_up: encoding of pseudo-gradients.
        error_feedback: whether a learner adds what rounding took from a pseudo-gradient to the next one of the fragment.
        codec_down: encoding of what a new version adds to the one before; "f32" sends every version whole.
        keyframe_versions: how often a version is also stored whole, for learners that join (`atoll.run.delta_chain`).
        ending: "apart": learners that leave push once per fragment and rounds end as always; "together": what they trained
            after a push is pushed as well, and the last rounds wait for everybody who is still there.
        tokens_target: tokens after which the run drains; 0 runs until told.
        lease_s: seconds after which the lease of a shard that its owner does not renew may be taken by another.
        silence_s: seconds without a heartbeat after which a learner no longer counts as live.
        norm_max: largest L2 norm of one slice of a pseudo-gradient that is still believed.
        outlier_ratio: how many times longer than other learners' a pseudo-gradient may be per its steps; 0 for any length.
        protect: what becomes of a longer one: "clip" shortens it to that; "isolate" refuses it, and isolates an incarnation
            that sends such things again and again, for runs with strangers (`atoll.protocol.quarantine`).
        step_tokens_max: largest number of tokens of one inner step that is still believed; 0 for any.
        steps_per_s_max: largest number of inner steps per second of one learner that is still believed.
        offences_max: offences after which protect = isolate isolates an incarnation; 0 for never.
    """

    fragments: int = 24
    value_fragments: int = 0
    interval_steps: int = 24
    overlap_steps: int = 2
    shards: int = 2
    quorum: int = 1
    grace_gamma: float = 0.8
    grace_cap_steps: float = 1.0
    average_decay: float = 0.5
    age_max: int = 2
    age_damping: float = 0.25
    age_law: Literal["power", "gate"] = "power"
    correction: Literal["none", "heloco"] = "heloco"
    merge: Literal["mean", "rda"] = "rda"
    share_max: float = 1.0
    robust: Literal["none", "clip", "gate"] = "none"
    outer: str = "nesterov"
    outer_lr: float = 0.6
    outer_momentum: float = 0.3
    average_versions: int = 0
    adoption: Literal["overwrite", "blend", "carry"] = "overwrite"
    blend_alpha: float = 0.5
    codec_up: str = "int4"
    error_feedback: bool = False
    codec_down: str = "int4"
    keyframe_versions: int = 24
    ending: Literal["apart", "together"] = "apart"
    tokens_target: int = 0
    lease_s: float = 3.0
    silence_s: float = 5.0
    norm_max: float = 1e4
    outlier_ratio: float = 10.0
    protect: Literal["clip", "isolate"] = "clip"
    step_tokens_max: int = 0
    steps_per_s_max: float = 10_000.0
    offences_max: int = 3

    def check(self, learners: int | None = None) -> ProtocolSettings:
        """Return self, or raise `SettingsError` for the first relation that does not hold.

        `learners` (M) is the number expected, where it is known: a quorum above it could never be met.
        """
        self._check_types()
        for name, bounds in BOUNDS.items():
            high, why = bounds.high, bounds.why
            if isinstance(high, str):
                high = type(bounds.low)(getattr(self, high))
            if name == "quorum" and learners is not None:
                high, why = learners, "the number of learners"
            _within(name, getattr(self, name), bounds.low, high, why)
        self._check_outer()
        self._check_momentum()
        if self.robust != "none" and self.quorum < MAJORITY_MIN:
            raise SettingsError(
                f"protocol.robust = {self.robust} judges a contribution by the others of its round: two are no majority",
                got=f"quorum = {self.quorum}",
                allowed=f"a quorum of {MAJORITY_MIN} or more",
                todo=f"set protocol.quorum={MAJORITY_MIN}, or protocol.robust=none",
            )
        return self

    def _check_types(self) -> None:
        """Raise `SettingsError` for the first value of a wrong type: a struct that Python code makes checks none."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), ProtocolSettings)
        except msgspec.ValidationError as error:
            name = str(error).rpartition("$.")[2].rstrip("`")
            kind, value = get_type_hints(ProtocolSettings)[name], getattr(self, name)
            raise SettingsError(
                f"{name} cannot have such a value",
                got=f"{value!r} ({type(value).__name__})",
                allowed=", ".join(get_args(kind)) or kind.__name__,
                todo=f"correct protocol.{name}",
                setting=f"protocol.{name}",
            ) from error

    def _check_outer(self) -> None:
        if self.outer not in OUTERS and _OWN_CODE.fullmatch(self.outer) is None:
            raise SettingsError(
                "unknown outer optimizer",
                got=self.outer[:80],
                allowed=OUTER_ALLOWED,
                todo="correct protocol.outer",
                setting="protocol.outer",
            )

    @property
    def outer_is_native(self) -> bool:
        """Return whether the outer optimizer is our own: it steps number by number, and its state is a momentum at most."""
        return self.outer == NESTEROV

    def _check_momentum(self) -> None:
        kept = self.outer_is_native and self.outer_momentum > 0.0
        got = f"outer = {self.outer}, outer_momentum = {self.outer_momentum:g}"
        if self.correction == "heloco" and not kept:
            raise SettingsError(
                "protocol.correction = heloco compares pseudo-gradients with the outer momentum, and there is none",
                got=got,
                allowed="outer = nesterov with outer_momentum above 0",
                todo="set protocol.outer_momentum (0.3, say), or protocol.correction=none",
            )

    def of(self, fragment: int) -> ProtocolSettings:
        """Return the settings as they hold for `fragment`: other ones where it is merged by value."""
        return _by_value(self) if self.by_value(fragment) else self

    def by_value(self, fragment: int) -> bool:
        """Return whether `fragment` is merged by value."""
        return fragment >= self.fragments - self.value_fragments

    def shard_of(self, fragment: int) -> int:
        """Return which shard owns `fragment`: consecutive fragments go to different shards."""
        return fragment % self.shards

    def fragments_of(self, shard: int) -> tuple[int, ...]:
        """Return the fragments `shard` owns, in order."""
        return tuple(range(shard, self.fragments, self.shards))


@functools.lru_cache(maxsize=16)
def _by_value(settings: ProtocolSettings) -> ProtocolSettings:
    return msgspec.structs.replace(settings, **BY_VALUE)


def _within(name: str, got: float, low: float, high: float, why: str = "") -> None:
    """Raise `SettingsError` unless `low <= got <= high`; a NaN is never within."""
    if not low <= got <= high:
        raise SettingsError(
            f"{name} is out of range",
            got=got,
            allowed=f"{low}..{high}" + (f" ({why})" if why else ""),
            todo=f"set protocol.{name} within that range",
            setting=f"protocol.{name}",
        )
