"""How a model is divided into fragments: which rows of which tensor travel together.

Tensors go into P fragments by greedy bin packing, largest first, each into the lightest fragment. A tensor larger than a
part of the fair share is cut by rows first, so that no fragment is much larger than the mean; in the paper the embedding
stays whole and its fragment is far larger than the others (Fig. 9 of arXiv 2604.21428). Norms and directions of RDA are
then taken per slice. Everything is a pure function of the tensors' names, shapes and order: every process computes the
same layout, and its fingerprint is part of every message.

Only floating tensors are trained, so only they are merged. A tensor of another dtype (a counter, a mask) is carried: it
is in the layout and in the fingerprint, travels with version 0, and no displacement ever changes it.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from atoll.errors import SettingsError

PIECES_PER_SHARE = 16


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the parameter pytree: its path, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Return the length of the first axis; a scalar has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def floating(self) -> bool:
        """Return whether training changes it."""
        return "float" in self.dtype


class Slice(msgspec.Struct, frozen=True):
    """Rows `start <= r < stop` of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Span:
    """A slice inside its fragment's flat vector: elements `offset` to `offset + size`; `direct` merges by plain mean."""

    tensor_name: str
    start: int
    stop: int
    offset: int
    size: int
    direct: bool
    floating: bool


class Layout(msgspec.Struct, frozen=True):
    """The division of a model: tensors in pytree order, slices by fragment, names merged by the direct mean."""

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[tuple[Slice, ...], ...]
    direct: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that two layouts share only if they are equal."""
        return _fingerprint(self)

    def spans(self, fragment: int) -> tuple[Span, ...]:
        """Return the slices of `fragment` with their places in its flat vector."""
        return _spans(self)[fragment]

    def fragment_sizes(self) -> tuple[int, ...]:
        """Return the elements of each fragment."""
        return tuple(spans[-1].offset + spans[-1].size if spans else 0 for spans in _spans(self))


@functools.lru_cache(maxsize=16)
def _fingerprint(layout: Layout) -> str:
    return hashlib.sha256(msgspec.json.encode(layout)).hexdigest()[:16]


@functools.lru_cache(maxsize=16)
def _spans(layout: Layout) -> tuple[tuple[Span, ...], ...]:
    direct = set(layout.direct)
    found = []
    for fragment in layout.fragments:
        spans, offset = [], 0
        for piece in fragment:
            tensor = layout.tensors[piece.tensor]
            size = (piece.stop - piece.start) * (tensor.size // max(1, tensor.rows))
            spans.append(
                Span(tensor.name, piece.start, piece.stop, offset, size, tensor.name in direct, tensor.floating)
            )
            offset += size
        found.append(tuple(spans))
    return tuple(found)


def plan_layout(tensors: Sequence[TensorSpec], fragments: int, direct: Sequence[str] = ()) -> Layout:
    """Return the division of `tensors` into `fragments` non-empty fragments, balanced by elements.

    Raises:
        SettingsError: there are more fragments than rows to fill them, two tensors share a name, or `direct` names none.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise SettingsError("two tensors have the same name", got=sorted({n for n in names if names.count(n) > 1}))
    unknown = sorted(set(direct) - set(names))
    if unknown:
        raise SettingsError("no such tensor to merge directly", got=unknown, allowed=names[:8], todo="correct `direct`")
    pieces = _pieces(tensors, fragments)
    if fragments < 1 or len(pieces) < fragments:
        raise SettingsError(
            "the model cannot be divided into that many fragments",
            got=fragments,
            allowed=f"1..{len(pieces)} (rows of its tensors)",
            todo="lower protocol.fragments",
        )
    bins: list[list[Slice]] = [[] for _ in range(fragments)]
    lightest = [(0, number) for number in range(fragments)]
    for size, piece in sorted(pieces, key=lambda item: (-item[0], item[1].tensor, item[1].start)):
        weight, number = heapq.heappop(lightest)
        bins[number].append(piece)
        heapq.heappush(lightest, (weight + max(size, 1), number))
    return Layout(
        tensors=tuple(tensors),
        fragments=tuple(tuple(_joined(inside)) for inside in bins),
        direct=tuple(sorted(direct)),
    )


def _pieces(tensors: Sequence[TensorSpec], fragments: int) -> list[tuple[int, Slice]]:
    """Return (elements, slice) for every piece, tensors larger than a part of the fair share cut into equal rows."""
    total = sum(tensor.size for tensor in tensors)
    limit = max(1, total // (max(1, fragments) * PIECES_PER_SHARE))
    while True:
        found = []
        for number, tensor in enumerate(tensors):
            rows = tensor.rows
            parts = max(1, min(rows, -(-tensor.size // limit)))
            cuts = [rows * part // parts for part in range(parts + 1)]
            row = tensor.size // max(1, rows)
            found += [((b - a) * row, Slice(number, a, b)) for a, b in itertools.pairwise(cuts)]
        if len(found) >= fragments or limit == 1:
            return found
        limit = max(1, limit // 2)


def _joined(pieces: list[Slice]) -> list[Slice]:
    """Return the pieces in tensor order with neighbours joined, so that a fragment has as few slices as it can."""
    joined: list[Slice] = []
    for piece in sorted(pieces, key=lambda p: (p.tensor, p.start)):
        if joined and joined[-1].tensor == piece.tensor and joined[-1].stop == piece.start:
            joined[-1] = Slice(piece.tensor, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


def first_difference(ours: Layout, theirs: Layout) -> str:
    """Return one sentence that names the first thing in which two layouts differ, or the empty string."""
    return next(_differences(ours, theirs), "")


def _differences(ours: Layout, theirs: Layout) -> Iterator[str]:
    for number, (a, b) in enumerate(zip(ours.tensors, theirs.tensors, strict=False)):
        if a.name != b.name:
            yield f"tensor {number} is {a.name!r} here and {b.name!r} in the run"
        if a.shape != b.shape:
            yield f"{a.name!r} has shape {list(a.shape)} here and {list(b.shape)} in the run"
        if a.dtype != b.dtype:
            yield f"{a.name!r} is {a.dtype} here and {b.dtype} in the run"
    if len(ours.tensors) != len(theirs.tensors):
        yield f"{len(ours.tensors)} tensors here and {len(theirs.tensors)} in the run"
    if len(ours.fragments) != len(theirs.fragments):
        yield f"{len(ours.fragments)} fragments here and {len(theirs.fragments)} in the run"
    if ours.direct != theirs.direct:
        yield f"merged directly here: {list(ours.direct)}, in the run: {list(theirs.direct)}"
    for number, (mine, other) in enumerate(zip(ours.fragments, theirs.fragments, strict=False)):
        if mine != other:
            yield f"fragment {number} holds other slices here than in the run"
