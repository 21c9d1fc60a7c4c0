"""A whole round as a shard merges it, beside what memory allows and what others do: `make bench-round`.

From eight contributions of four bits to the next values: the norms of all slices are held against the senders' claims, each
contribution is folded in (RDA, slices of four million numbers), then one step of Nesterov; in one process on all cores. The
round is done once more with every contribution judged (`atoll.merge.robust`), in turns with the plain one. The limit is the
compiled loop `a += s * d` on all cores, before and after every round. What a round must touch is counted in two ways:

    on arrival   each contribution is folded in by itself: its codes and scales read, the sum written by the first and read and
                 written by all others; the sum read for its length; sum, values and momentum read, values and momentum written
    at least     the codes and scales of all read once, the sum written once; the rest as above

Neither counts the check of the norms, the read before a write of a line of memory, or the product of the sum with its length.
Beside it: the same round as one plain `jax.jit`, and what others merge with (`benchmarks/peers`), a
weighted mean of float32 arrays without decoding, checking, RDA or a step.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit
from rich.progress import track

from atoll.base.large_arrays import Vector
from atoll.base.parallel import cores
from atoll.codec import FORMATS, Encoded
from atoll.codec.formats.interface import BLOCK, Bytes
from atoll.merge.fold import slice_norms, validated_norms
from atoll.merge.outer import Nesterov
from atoll.merge.robust import CollectedFold, fold_of
from atoll.model.layout import FragmentSlice
from atoll.protocol.settings import ProtocolSettings
from benchmarks.lib.compiled import compile_kernels
from benchmarks.lib.harness import Figure, at_least, fact, run_benchmark
from benchmarks.lib.runs import PEERS, peer_seconds

RATE, MOMENTUM = 0.6, 0.3
Timed = Callable[[], tuple[float, Vector]]


@dataclass(frozen=True, slots=True)
class RivalRound:
    """Codes and scales of int4 per contribution, their weights, values, momentum, and where slices begin."""

    codes: Sequence[Bytes]
    scales: Sequence[Vector]
    weights: Vector
    values: Vector
    momentum: Vector
    offsets: tuple[int, ...]


def jitted(work: RivalRound) -> Timed:
    """Return the round as one compiled function of all contributions, values and momentum donated, timed without compiling."""
    codes, scales = (jnp.asarray(np.stack(parts)) for parts in (work.codes, work.scales))
    lengths = np.diff([*work.offsets, work.values.size])
    step = jax.jit(partial(_step, lengths=tuple(int(length) for length in lengths)), donate_argnums=(3, 4))
    done: Any = jax.block_until_ready
    weights = jnp.asarray(work.weights)

    def run() -> tuple[float, Vector]:
        values, momentum = jnp.array(work.values), jnp.array(work.momentum)
        done((values, momentum))
        began_s = time.perf_counter()
        after = done(step(codes, scales, weights, values, momentum))
        took = time.perf_counter() - began_s
        return took, np.asarray(after[0])

    return run


def _step(
    codes: Any,  # noqa: ANN401  (arrays of JAX)
    scales: Any,  # noqa: ANN401
    weights: Any,  # noqa: ANN401
    values: Any,  # noqa: ANN401
    momentum: Any,  # noqa: ANN401
    lengths: tuple[int, ...],
) -> tuple[Any, Any]:
    pairs = codes.reshape(codes.shape[0], -1, BLOCK // 2)
    signed = jnp.concatenate([pairs & 15, pairs >> 4], axis=2).astype(jnp.float32) - 8.0
    vectors = (signed * scales[:, :, None]).reshape(codes.shape[0], -1)
    shares, cuts, merged = weights / weights.sum(), np.cumsum(lengths)[:-1], []
    for part in jnp.split(vectors, cuts, axis=1):
        norms = jnp.linalg.norm(part, axis=1)
        direction = (shares / norms) @ part
        merged.append((shares @ norms) / jnp.linalg.norm(direction) * direction)
    pseudo_gradient = jnp.concatenate(merged)
    pushed = MOMENTUM * momentum + pseudo_gradient
    return values - RATE * (pseudo_gradient + MOMENTUM * pushed), pushed


SIZES = {"64 MB": 1 << 24, "200 MB": 50 << 20}
M = 8
SLICE = 1 << 22
NORM_MAX = 1e6
PLAIN = ProtocolSettings(merge="rda", correction="none")
JUDGED = ProtocolSettings(merge="rda", correction="none", quorum=3, robust="gate", share_max=0.5)
JUDGED_MIN = 0.95
REPEATS = 9
RIVAL_REPEATS = 3
SHARE_MIN = 0.5
LIMIT_BYTES = 12.0


@dataclass(frozen=True, slots=True)
class MergeShard:
    """A shard's round at its end: contributions, the norms that their senders claim, weights, values and momentum."""

    slices: tuple[FragmentSlice, ...]
    sent: Sequence[Encoded]
    norms: Sequence[Sequence[float]]
    weights: Sequence[float]
    values: Vector
    momentum: Vector

    @classmethod
    def of(cls, elements: int, seed: int) -> MergeShard:
        """Draw a round: pseudo-gradients that agree somewhat, as those of learners do."""
        dice, form = np.random.default_rng(seed), FORMATS["int4"]
        common, values, momentum = (dice.standard_normal(elements, dtype=np.float32) for _ in range(3))
        slices = spans_of(elements)
        sent = [
            Encoded.of(np.float32(1e-3) * (common + dice.standard_normal(elements, dtype=np.float32)), form)
            for _ in range(M)
        ]
        norms = [slice_norms(slices, one) for one in sent]
        return cls(slices, sent, norms, [float(w) for w in dice.uniform(1.0, 4.0, M)], values, momentum)

    def merge(self, settings: ProtocolSettings = PLAIN) -> Vector:
        """Do the round and return the next values; nothing of ours changes."""
        fold = fold_of(self.slices, settings)
        for number, (sent, claimed, weight) in enumerate(zip(self.sent, self.norms, self.weights, strict=True)):
            norms = validated_norms(slice_norms(self.slices, sent), self.slices, claimed, NORM_MAX)
            if isinstance(fold, CollectedFold):
                fold.add(sent, norms, weight, learner=str(number))
            else:
                fold.add(sent, norms, weight)
        merged = fold.result().pseudo_gradient
        return Nesterov(RATE, MOMENTUM).update(self.values, merged, {"momentum": self.momentum})[0]

    def round(self) -> RivalRound:
        """Return the same for those who do it in another way."""
        return RivalRound(
            [one.codes for one in self.sent],
            [one.scales for one in self.sent],
            np.asarray(self.weights, np.float32),
            self.values,
            self.momentum,
            tuple(tensor_slice.offset for tensor_slice in self.slices),
        )


def main(
    *, repeats: int = REPEATS, seed: int = 0, without_peers: Annotated[bool, "make no environments"] = False
) -> list[Figure]:
    compile_kernels()
    figures = []
    for name, elements in track(SIZES.items(), description="measuring"):
        figures += figures_of(name, elements, repeats, seed)
        if not without_peers:
            figures += [peer_figure(peer, name, elements, seed) for peer in PEERS]
    return figures


def figures_of(name: str, elements: int, repeats: int, seed: int) -> list[Figure]:
    """Return the figures of one size: ours, the limit, and what does the same in another way."""
    shard = MergeShard.of(elements, seed)
    total, vector = np.zeros(elements, np.float32), np.ones(elements, np.float32)
    limits, rounds, judged = [], [], []
    with ThreadPoolExecutor(cores()) as pool:
        for _ in range(repeats):
            limits.append(seconds(lambda: all_cores(pool, total, vector)))
            rounds.append(seconds(shard.merge))
            judged.append(seconds(lambda: shard.merge(JUDGED)))
        limits.append(seconds(lambda: all_cores(pool, total, vector)))
    versions = f"numpy {np.__version__}, jax {jax.__version__}, Python {platform.python_version()}"
    how = f"{elements / 1e6:.1f}M numbers, M = {M}, int4, {cores()} threads, best of {repeats}"
    rate = LIMIT_BYTES * elements / min(limits)
    shares = {words: touched(words) * elements / min(rounds) / rate for words in ("on arrival", "at least")}
    usual = touched("on arrival") / np.median(rounds) * np.median(limits) / LIMIT_BYTES
    kept = min(rounds) / min(judged)
    return [
        fact(f"{name}: a += s d on all cores", rate / 1e9, "GB/s", f"the limit, {how}"),
        fact(f"{name}: round", 1e3 * min(rounds), "ms", f"{how}; median {1e3 * np.median(rounds):.4g} ms"),
        at_least(
            f"{name}: share of the limit, folded in on arrival",
            shares["on arrival"],
            "of limit",
            SHARE_MIN,
            f"{touched('on arrival'):.4g} bytes a number; of medians {usual:.3g}",
        ),
        fact(
            f"{name}: share of the limit, every byte once",
            shares["at least"],
            "of limit",
            f"{touched('at least'):.4g} bytes a number",
        ),
        at_least(
            f"{name}: speed of the round with the gate",
            kept,
            "of the round's",
            JUDGED_MIN,
            f"{1e3 * min(judged):.4g} ms; of medians {np.median(rounds) / np.median(judged):.3g}",
        ),
        rival_figure(shard, name, min(rounds), versions),
    ]


def touched(words: str) -> float:
    """Return the bytes a number that a round must touch, counted in one of two ways."""
    codes = FORMATS["int4"].size(SLICE) / SLICE
    sums = 4.0 + 8.0 * (M - 1) if words == "on arrival" else 4.0
    return M * codes + sums + 4.0 + 20.0


def rival_figure(shard: MergeShard, name: str, ours_s: float, versions: str) -> Figure:
    """Return how long the same round takes as plain `jax.jit`, and how far its values are from ours."""
    ours, work = shard.merge(), jitted(shard.round())
    apart = float(np.abs(work()[1] - ours).max())
    took = min(work()[0] for _ in range(RIVAL_REPEATS))
    how = f"{took / ours_s:.1f} times ours; values differ by {apart:.1g} at most; {versions}, best of {RIVAL_REPEATS}"
    return fact(f"{name}: the same as plain jax.jit, donated", 1e3 * took, "ms", how)


def peer_figure(peer: str, name: str, elements: int, seed: int) -> Figure:
    """Return how long another project's weighted mean takes, in an environment of its own."""
    took, words = peer_seconds(peer, M, elements, seed)
    return fact(f"{name}: {peer}, weighted mean only", 1e3 * took, "ms", words)


@njit(nogil=True, error_model="numpy")
def in_place(total: Vector, vector: Vector, factor: np.float32) -> None:
    """Do `total += factor * vector`: the limit."""
    for i in range(total.size):
        total[i] += factor * vector[i]


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def all_cores(pool: ThreadPoolExecutor, total: Vector, vector: Vector) -> None:
    cuts = [total.size * number // cores() for number in range(cores() + 1)]
    half = np.float32(0.5)
    for done in [pool.submit(in_place, total[a:b], vector[a:b], half) for a, b in itertools.pairwise(cuts)]:
        done.result()


def spans_of(elements: int) -> tuple[FragmentSlice, ...]:
    """Return slices of `SLICE` numbers; the last may be shorter."""
    offsets = range(0, elements, SLICE)
    sizes = [min(SLICE, elements - at) for at in offsets]
    return tuple(
        FragmentSlice(f"w{at}", 0, size, at, size, direct=False) for at, size in zip(offsets, sizes, strict=True)
    )


if __name__ == "__main__":
    run_benchmark("bench-round", main)
