"""What the numbers of a version must be, computed apart from production: float64, from the contributions that its head lists.

Decoding a frame is production's (`atoll.codec`), all arithmetic is not: weights, staleness weights, means, radial averages, the
correction, the outer step, its average, and the sum of what was rounded and what was kept for later. Where a run derives its
outer state, what was kept for later is nowhere to be read: it is computed here, from the beginning of each tenure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from atoll.codec import KEYFRAME, Encoded, FrameDecoder, format_of
from atoll.codec.arrays import unpack_arrays
from atoll.model.layout import FragmentSlice
from atoll.protocol.invariants import require
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import Included

# HeLoCo's constants, from its paper (arXiv 2606.00271) and not from the code that is checked here.
COSINE, SHRINK, SHRINK_MAX, ROTATE, DOUBT = 0.2, 0.5, 0.5, 1.0, 3.0

Numbers = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float32]
State = dict[str, npt.NDArray[Any]]

STATE_BYTES_MAX = 1 << 24
CLOSE = 2e-5
AT_A_LIMIT = 1e-6
"""By how much of itself and its step a number may lie on the other side of a limit of rounding."""
KEPT_IS_ROUNDED = 2.0**-5
"""By how much of the largest that is kept another number may be kept here: it is rounded to bfloat16 in every version."""
SHARES = (1.0, 0.25, 0.0625, 0.015625)
"""Shares of what is unsure by which a step may be nearer or further away."""


def decoded(pieces: list[bytes], elements: int, codec: str) -> Vector:
    frame = FrameDecoder(elements, codec)
    frame.take(list(enumerate(pieces)))
    return frame.vector.expanded()


def digest_of(values: Vector) -> str:
    """Return the digest that a head says."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).tobytes()))


@dataclass(slots=True)
class Version:
    """A version of a fragment as the broker has it: values, and the state that belongs to them."""

    number: int
    values: Vector
    state: State
    kept: Numbers | None = None
    """What rounding took until now, where only the owner knows it; NaN where it cannot be known here."""

    @property
    def unrounded(self) -> Numbers:
        """Return what the values would be without rounding."""
        exact = self.values.astype(np.float64)
        if self.kept is not None:
            return exact + self.kept
        return exact + self.state["carry"].astype(np.float64) if "carry" in self.state else exact


def staleness_weight(settings: ProtocolSettings, age: int) -> float:
    """Return how much of a late contribution is heard."""
    gate = 0.5 * (1.0 + math.cos(math.pi * age / (settings.age_max + 1))) if settings.age_law == "gate" else 1.0
    return float(settings.age_damping**age) * gate


def corrected(settings: ProtocolSettings, part: Numbers, momentum: Numbers) -> Numbers | None:
    """Return a slice bent towards the momentum; None where what is left of it is too little to say."""
    length, reference = float(np.linalg.norm(part)), float(np.linalg.norm(momentum))
    if settings.correction == "none" or length <= 1e-18 or reference <= 1e-18:
        return part
    cosine = float(part @ momentum) / (length * reference)
    if abs(cosine - COSINE) < 1e-6 or abs(cosine) < 1e-9:
        return None
    if cosine >= COSINE:
        return part
    confidence = length / (length + DOUBT * reference)
    if cosine < 0.0:
        beta = min(-SHRINK * cosine * confidence, SHRINK_MAX)
        bent: Numbers = part - (beta * cosine * length / reference) * momentum
        return bent if np.linalg.norm(bent) > 0.02 * length else None
    turn = min(ROTATE * (1.0 - cosine) * confidence, 1.0)
    mixed: Numbers = (1.0 - turn) * part / length + turn * momentum / reference
    return mixed * (length / float(np.linalg.norm(mixed)))


def merged(
    settings: ProtocolSettings,
    slices: tuple[FragmentSlice, ...],
    shares: list[tuple[Included, Vector]],
    momentum: Numbers | None,
) -> Numbers:
    """Return the merged pseudo-gradient; NaN where rounding alone decides."""
    fresh = [staleness_weight(settings, share.age) for share, _ in shares]
    weights = np.array([each * share.weight for each, (share, _) in zip(fresh, shares, strict=True)])
    learners = [share.learner for share, _ in shares]
    weights = shared(weights, learners, settings.share_max)
    result = np.zeros(shares[0][1].size)
    for piece in slices:
        here = slice(piece.offset, piece.offset + piece.size)
        raw = [vector[here].astype(np.float64) for _, vector in shares]
        factors = voices(settings, raw, learners)
        parts: list[Numbers] = []
        for part, factor in zip(raw, factors, strict=True):
            bent = part if momentum is None else corrected(settings, part, momentum[here])
            parts.append(np.full(piece.size, np.nan) if bent is None else factor * bent)
        result[here] = max(fresh) * _averaged(settings, piece, parts, weights * (factors > 0.0) + 0.0 * factors)
    return result


def shared(weights: Numbers, learners: list[str], share_max: float) -> Numbers:
    """Return the weights of contributions, where those of one learner together are one share."""
    names = sorted(set(learners))
    sums = np.array([sum(w for w, each in zip(weights, learners, strict=True) if each == name) for name in names])
    cut = dict(zip(names, capped(sums, share_max) / np.maximum(sums, 1e-300), strict=True))
    found: Numbers = weights * np.array([cut[learner] for learner in learners])
    return found


def capped(weights: Numbers, share_max: float) -> Numbers:
    """Return the weights cut at the level at which the heaviest has the largest share allowed, found by halving."""
    if share_max == 1.0 or not weights.any():
        return weights
    low, high = 0.0, float(weights.max())
    lightest = float(weights[weights > 0.0].min())
    for _ in range(200):
        level = 0.5 * (low + high)
        cut = np.minimum(weights, level)
        low, high = (level, high) if cut.max() <= share_max * cut.sum() else (low, level)
    return np.minimum(weights, max(high, lightest))


def voices(settings: ProtocolSettings, parts: list[Numbers], learners: list[str]) -> Numbers:
    """Return the factor of each part of a slice: 0 for one that is not heard, below 1 for one that is too long, or NaN."""
    factors = np.ones(len(parts))
    if settings.robust == "none" or len(set(learners)) < 3:
        return factors
    lengths = np.array([np.linalg.norm(part) for part in parts])
    votes = {name: 1.0 / learners.count(name) for name in learners}
    half, reached, middle = 0.5 * len(votes), 0.0, 0.0
    for length, learner in sorted(zip(lengths, learners, strict=True)):
        reached, middle = reached + votes[learner], float(length)
        if reached >= half - 1e-9:
            break
    longest = 2.0 * middle
    if longest > 1e-18:
        factors = np.minimum(1.0, longest / np.maximum(lengths, 1e-30))
    if settings.robust == "clip":
        return factors
    units = [
        part / length if length > 1e-18 else np.zeros_like(part) for part, length in zip(parts, lengths, strict=True)
    ]
    least = -max(0.05, 2.0 / math.sqrt(parts[0].size))
    agree = []
    for mine, unit in zip(learners, units, strict=True):
        others = np.sum([votes[who] * other for who, other in zip(learners, units, strict=True) if who != mine], axis=0)
        norm = float(np.linalg.norm(others))
        cosine = float(unit @ others) / norm if norm > 1e-6 else 0.0
        if abs(cosine - least) < 1e-5 or 1e-9 < norm < 1e-4:
            return np.full(len(parts), np.nan)
        agree.append(cosine >= least)
    heard = sum(votes[who] for who, agrees in zip(learners, agree, strict=True) if agrees)
    return np.where(agree, factors, 0.0) if heard > half + 1e-9 else factors


def _averaged(settings: ProtocolSettings, piece: FragmentSlice, parts: list[Numbers], weights: Numbers) -> Numbers:
    total = float(weights.sum())
    if total == 0.0:
        return np.zeros(piece.size)
    if np.isnan(weights).any():
        return np.full(piece.size, np.nan)
    heard = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight > 0.0]
    mean: Numbers = np.sum([weight * part for part, weight in heard], axis=0) / total
    if settings.merge == "mean" or piece.direct or len(parts) == 1 or np.isnan(mean).any():
        return mean
    lengths = [float(np.linalg.norm(part)) for part, _ in heard]
    radial = sum(weight * length for length, (_, weight) in zip(lengths, heard, strict=True)) / total
    directions = [
        weight * part / length for length, (part, weight) in zip(lengths, heard, strict=True) if length > 1e-18
    ]
    if not directions:
        return np.zeros(piece.size)
    direction: Numbers = np.sum(directions, axis=0) / total
    norm = float(np.linalg.norm(direction))
    if not norm > 1e-4:  # nothing but rounding is left, or NaN
        return np.full(piece.size, np.nan)
    scaled: Numbers = radial * direction / norm
    return scaled


def check_step(
    settings: ProtocolSettings, slices: tuple[FragmentSlice, ...], before: Version, after: Version, shares: list[Any]
) -> None:
    """Check that a version is the outer step from the one before with what its head lists."""
    momentum = before.state["momentum"].astype(np.float64) if "momentum" in before.state else None
    rate, mu = (float(np.float32(each)) for each in (settings.outer_lr, settings.outer_momentum))
    push = merged(settings, slices, shares, momentum)
    target = before.unrounded - rate * push
    if momentum is not None:
        following = mu * momentum + push
        target = target - rate * mu * following
    if before.kept is not None:
        _check_rounded(settings, before, after, target)
        return
    if momentum is not None:
        kept = after.state["momentum"].astype(np.float64)
        _close("the momentum of a version is that of its step", kept, following, 1.0)
    slack = (
        1.0
        if "carry" not in after.state
        else 1.0 + 200.0 * float(np.abs(after.state["carry"].astype(np.float64)).max())
    )
    _close("the values of a version are those of its step", after.unrounded, target, slack)
    _check_average(settings, before, after)


def _check_rounded(settings: ProtocolSettings, before: Version, after: Version, target: Numbers) -> None:
    """Check that a version is its target, rounded as a delta in the run's codec, and note what rounding has kept.

    Where a number, or the step of its block, lies at a limit of rounding, float64 and production may see it on either side. So
    each number must be that of the target, or of one that is a little nearer or further away: by all that is unsure or by less,
    because all of it may be more than one step of a block's scale. What is kept is rounded in every version, and may come out
    otherwise here; a few numbers may therefore be the next ones.
    """
    known = ~np.isnan(target)
    step = np.where(known, target - before.values, 0.0)
    kept = np.zeros(1) if before.kept is None else np.nan_to_num(before.kept)
    unsure = np.sign(step) * (
        AT_A_LIMIT * (np.abs(step) + np.abs(before.values)) + KEPT_IS_ROUNDED * np.abs(kept).max()
    )
    if known.all():  # a number that is not known here may set the step of its whole block
        limit = CLOSE * (1.0 + float(np.abs(after.values).max()))
        nearest, furthest, strayed, most = np.full(step.size, np.inf), 0.0, step.size, 2 + step.size // 20
        for share in (0.0, *SHARES, *(-share for share in SHARES)):
            wanted = (before.values + step + share * unsure).astype(np.float32)
            rounded, delta = wanted.copy(), Encoded.blank(format_of(settings.codec_down), wanted.size)
            delta.format.check(delta.settle(before.values, rounded, np.empty(wanted.size, np.uint16)))
            nearest = np.minimum(nearest, np.abs(after.values.astype(np.float64) - rounded))
            furthest = max(furthest, 2.1 * float(np.abs(wanted - rounded).max()))
            strayed = int((nearest > limit).sum())
            if strayed <= most:
                break
        worst = float(nearest.max())
        found = (strayed, step.size, worst, furthest + limit)
        require(strayed <= most, "a version is its step, rounded to what is sent", found)
        require(worst <= furthest + limit, "a version is its step, but for rounding", found)
    after.kept = (target - after.values).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def derived_momentum(settings: ProtocolSettings, momentum: Numbers, before: Vector, after: Vector) -> Numbers:
    """Return the momentum after a version, by the values of both; the outer step solved for it."""
    stepped = (before.astype(np.float64) - after.astype(np.float64)) / settings.outer_lr
    found: Numbers = (settings.outer_momentum * momentum + stepped) / (1.0 + settings.outer_momentum)
    return found


def _check_average(settings: ProtocolSettings, before: Version, after: Version) -> None:
    if not settings.average_versions:
        return
    gain = 1.0 / settings.average_versions
    weight = (1.0 - gain) * float(before.state["average_weight"]) + gain
    former, values = before.state["average"].astype(np.float64), after.values.astype(np.float64)
    wanted = former + (gain / weight) * (values - former)
    _close("the average of a version follows its values", after.state["average"].astype(np.float64), wanted, 1.0)


def _close(what: str, got: Numbers, wanted: Numbers, slack: float) -> None:
    known = ~np.isnan(wanted)
    scale = CLOSE * slack * (1.0 + (np.abs(wanted[known]).max() if known.any() else 0.0))
    worst = float(np.abs(got - wanted)[known].max()) if known.any() else 0.0
    require(worst <= scale, what, (worst, scale))


def state_of(data: bytes) -> State:
    """Return the arrays of an outer state."""
    return unpack_arrays(data, STATE_BYTES_MAX)


def initial_state(settings: ProtocolSettings, values: Vector, *, derived: bool) -> State:
    """Return the state of version 0, where the run derives it without what is kept."""
    state: State = {}
    if settings.outer_momentum:
        state["momentum"] = np.zeros(values.size, dtype=np.float32)
    if settings.codec_down != KEYFRAME and not derived:
        state["carry"] = np.zeros(values.size, dtype=np.float32)
    if settings.average_versions:
        state["average"], state["average_weight"] = values, np.zeros(())
    return state
