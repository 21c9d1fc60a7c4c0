"""What all processes of a run must agree on; written once into the run record by the founder.

Defaults are Decoupled DiLoCo's where it publishes them (tau = 2, K = 1 plus grace, AdamW inside, Nesterov outside) and
our own measurements where it does not (outer rate and momentum, merge, interval; see docs/results). Two relations
matter: the interval H must allow every fragment its turn, and the grace window may not exceed what overlap hides.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.quantities import FRAGMENTS_MAX, LEARNERS_MAX, RUN_TOKENS_MAX, TOKENS_MAX

KEYFRAME_VERSIONS_MAX: Final = 1024
MAJORITY_MIN: Final = 3
"""The least number of contributions of which most can be believed."""


class ProtocolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agreement of a run.

    Attributes:
        fragments: P, how many parts the model travels in.
        interval_steps: H, inner steps between two rounds of the same fragment.
        overlap_steps: tau, steps a round may take while learners go on.
        shards: synchronizer processes the fragments are divided over.
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
        outer: "nesterov", "optax:<name>" or "module:attr".
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
        outlier_ratio: how many times longer than the usual a pseudo-gradient may be per its steps; 0 for any length.
        step_tokens_max: largest number of tokens of one inner step that is still believed; 0 for any.
        steps_per_s_max: largest number of inner steps per second of one learner that is still believed.
        offences_max: offences after which an incarnation is isolated; 0 for never (`atoll.protocol.quarantine`).
    """

    fragments: int = 24
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
    codec_up: str = "bf16"
    error_feedback: bool = False
    codec_down: str = "f32"
    keyframe_versions: int = 48
    ending: Literal["apart", "together"] = "apart"
    tokens_target: int = 0
    lease_s: float = 3.0
    silence_s: float = 5.0
    norm_max: float = 1e4
    outlier_ratio: float = 10.0
    step_tokens_max: int = 0
    steps_per_s_max: float = 10_000.0
    offences_max: int = 3

    def check(self, learners: int | None = None) -> ProtocolSettings:
        """Return self, or raise `SettingsError` for the first relation that does not hold.

        `learners` (M) is the number expected, where it is known: a quorum above it could never be met.
        """
        _within("fragments", self.fragments, 1, FRAGMENTS_MAX)
        _within("interval_steps", self.interval_steps, 1, 100_000)
        _within("overlap_steps", self.overlap_steps, 1, self.interval_steps)
        _within("shards", self.shards, 1, self.fragments, "as many as there are fragments")
        top = LEARNERS_MAX if learners is None else learners
        _within("quorum", self.quorum, 1, top, "the number of learners" if learners is not None else "")
        _within("grace_gamma", self.grace_gamma, 0.0, 0.999, "below 1, so that a round ends inside its overlap")
        _within("grace_cap_steps", self.grace_cap_steps, 0.0, float(self.overlap_steps), "overlap_steps")
        _within("average_decay", self.average_decay, 0.001, 1.0)
        _within("age_max", self.age_max, 0, 1000)
        _within("age_damping", self.age_damping, 0.0, 1.0)
        _within("share_max", self.share_max, 1e-4, 1.0)
        _within("outer_lr", self.outer_lr, 1e-6, 100.0)
        _within("outer_momentum", self.outer_momentum, 0.0, 0.9999)
        _within("average_versions", self.average_versions, 0, 1 << 20)
        _within("blend_alpha", self.blend_alpha, 0.0, 1.0)
        _within("keyframe_versions", self.keyframe_versions, 1, KEYFRAME_VERSIONS_MAX)
        _within("tokens_target", self.tokens_target, 0, RUN_TOKENS_MAX)
        _within("lease_s", self.lease_s, 0.2, 3600.0)
        _within("silence_s", self.silence_s, 0.2, 3600.0)
        _within("norm_max", self.norm_max, 1e-6, 1e12)
        _within("outlier_ratio", self.outlier_ratio, 0.0, 1e9)
        _within("step_tokens_max", self.step_tokens_max, 0, TOKENS_MAX)
        _within("steps_per_s_max", self.steps_per_s_max, 1e-3, 1e6)
        _within("offences_max", self.offences_max, 0, 1 << 20)
        self._check_momentum()
        if self.robust != "none" and self.quorum < MAJORITY_MIN:
            raise SettingsError(
                f"protocol.robust = {self.robust} judges a contribution by the others of its round: two are no majority",
                got=f"quorum = {self.quorum}",
                allowed=f"a quorum of {MAJORITY_MIN} or more",
                todo=f"set protocol.quorum={MAJORITY_MIN}, or protocol.robust=none",
            )
        return self

    def _check_momentum(self) -> None:
        """Raise `SettingsError` where something rests on an outer momentum that there will not be."""
        kept = self.outer == "nesterov" and self.outer_momentum > 0.0
        got = f"outer = {self.outer}, outer_momentum = {self.outer_momentum:g}"
        if self.correction == "heloco" and not kept:
            raise SettingsError(
                "protocol.correction = heloco compares pseudo-gradients with the outer momentum, and there is none",
                got=got,
                allowed="outer = nesterov with outer_momentum above 0",
                todo="set protocol.outer_momentum (0.3, say), or protocol.correction=none",
            )

    def shard_of(self, fragment: int) -> int:
        """Return which shard owns `fragment`: consecutive fragments go to different shards."""
        return fragment % self.shards

    def fragments_of(self, shard: int) -> tuple[int, ...]:
        """Return the fragments `shard` owns, in order."""
        return tuple(range(shard, self.fragments, self.shards))


def _within(name: str, got: float, low: float, high: float, why: str = "") -> None:
    """Raise `SettingsError` unless `low <= got <= high`; a NaN is never within."""
    if not low <= got <= high:
        raise SettingsError(
            f"{name} is out of range",
            got=got,
            allowed=f"{low}..{high}" + (f" ({why})" if why else ""),
            todo=f"set protocol.{name} within that range",
        )
