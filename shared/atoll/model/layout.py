"""The division of a model into fragments: which rows of which tensor travel together.

The tensors are laid out on a line, in their order, and the line is cut into P parts of equal length, each cut at the nearest
row. So a fragment holds few slices, which matters: an adoption touches every tensor its fragment has rows of, and norms and
directions of RDA are taken per slice. A slice that would be a sliver goes to its neighbour. (The paper packs whole tensors into
bins; there the embedding fills a fragment far larger than the others, Fig. 9 of arXiv 2604.21428.)

Everything is a pure function of the tensors' names, shapes and order: every process computes the same layout, and its
fingerprint is part of every message. Tensors that are merged *by value* (running statistics, say) come last on the line and
have the last fragments for themselves, because other settings hold for those. A leaf that is never merged is in no layout.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.quantities import COUNT_MAX, Count, Digest, Text

SLIVER = 0.01
AXES_MAX = 32


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the parameter pytree: its path, shape and dtype."""

    name: Text
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=AXES_MAX)]
    dtype: Text

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
        """Return whether its numbers can be averaged."""
        return "float" in self.dtype


Line = list[tuple[int, TensorSpec]]
"""Tensors in the order in which they are cut, each with its number."""


class FrozenLeaf(msgspec.Struct, frozen=True):
    """A leaf that every island holds and nobody sends: its name, and the digest of its shape, dtype and values."""

    name: Text
    digest: Digest


class Slice(msgspec.Struct, frozen=True):
    """Rows `start <= r < stop` of tensor number `tensor`."""

    tensor: Count
    start: Count
    stop: Count


@dataclass(frozen=True, slots=True)
class FragmentSlice:
    """A slice inside its fragment's flat vector: elements `offset` to `offset + size`; `direct` merges by plain mean."""

    tensor_name: str
    start: int
    stop: int
    offset: int
    size: int
    direct: bool

    @property
    def bounds(self) -> tuple[int, int]:
        """Return where it begins in the fragment's vector, and where it ends."""
        return self.offset, self.offset + self.size


class Layout(msgspec.Struct, frozen=True, dict=True):
    """The division of a model: tensors in pytree order, slices by fragment.

    `direct` names the tensors whose pseudo-gradients take the plain mean, `by_value` those whose values do.
    """

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[tuple[Slice, ...], ...]
    direct: tuple[Text, ...] = ()
    by_value: tuple[Text, ...] = ()

    def fault(self) -> str:
        """Return why this divides no model, or the empty string: every row belongs to exactly one slice, in order."""
        names = {tensor.name for tensor in self.tensors}
        if len(names) != len(self.tensors):
            return "two tensors have the same name"
        if sum(tensor.size for tensor in self.tensors) > COUNT_MAX:
            return "the tensors have too many elements"
        if not all(tensor.floating for tensor in self.tensors):
            return "a tensor is not floating"
        return self._fault_of_slices() or self._fault_of_kinds()

    def _fault_of_slices(self) -> str:
        pieces = iter(piece for inside in self.fragments for piece in inside)
        piece = next(pieces, None)
        for number, _ in on_the_line(self.tensors, self.by_value):
            row, rows = 0, self.tensors[number].rows
            while piece is not None and piece.tensor == number:
                if piece.start != row or not row <= piece.stop <= rows:
                    return f"rows {piece.start} to {piece.stop} of tensor {number}, where row {row} of {rows} is due"
                row, piece = piece.stop, next(pieces, None)
            if row < rows and piece is not None:
                return f"a slice of tensor {piece.tensor}, where row {row} of tensor {number} is due"
            if row < rows:
                return f"no slice holds row {row} of tensor {number}"
        return "" if piece is None else f"a slice of tensor {piece.tensor} is not in order"

    def _fault_of_kinds(self) -> str:
        named = self._numbers_by_value()
        last = len(self.fragments) - self.value_fragments
        for number, inside in enumerate(self.fragments):
            if any((piece.tensor in named) != (number >= last) for piece in inside) or (number >= last and not inside):
                return f"fragment {number} holds tensors merged by value and others"
        return ""

    @property
    def value_fragments(self) -> int:
        """Return how many fragments, the last ones, are merged by value."""
        named = self._numbers_by_value()
        return sum(any(piece.tensor in named for piece in inside) for inside in self.fragments)

    def _numbers_by_value(self) -> set[int]:
        return {number for number, tensor in enumerate(self.tensors) if tensor.name in self.by_value}

    def rule_of(self, name: str) -> str:
        """Return the name of the rule by which a tensor is merged."""
        return "mean" if name in self.by_value else "direct" if name in self.direct else "pseudo_gradient"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return 16 hex digits that two layouts share only if they are equal."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    # What follows is kept: every message asks for it, and even to hash a layout takes as long as it has tensors.

    def slices(self, fragment: int) -> tuple[FragmentSlice, ...]:
        """Return the slices of `fragment` with their places in its flat vector."""
        return self._slices[fragment]

    def fragment_sizes(self) -> tuple[int, ...]:
        """Return the elements of each fragment."""
        return self._sizes

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(slices[-1].offset + slices[-1].size if slices else 0 for slices in self._slices)

    @functools.cached_property
    def _slices(self) -> tuple[tuple[FragmentSlice, ...], ...]:
        direct = set(self.direct)
        found = []
        for fragment in self.fragments:
            slices, offset = [], 0
            for piece in fragment:
                tensor = self.tensors[piece.tensor]
                size = (piece.stop - piece.start) * (tensor.size // max(1, tensor.rows))
                slices.append(FragmentSlice(tensor.name, piece.start, piece.stop, offset, size, tensor.name in direct))
                offset += size
            found.append(tuple(slices))
        return tuple(found)


def plan_layout(
    tensors: Sequence[TensorSpec], fragments: int, direct: Sequence[str] = (), by_value: Sequence[str] = ()
) -> Layout:
    """Return the division of `tensors` into `fragments` non-empty fragments, balanced by elements.

    Tensors merged `by_value` get a share of the fragments, at least one, as large as theirs of the elements.

    Raises:
        SettingsError: the fragments cannot all be filled, two tensors share a name, or `direct` or `by_value` names none.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise SettingsError("two tensors have the same name", got=sorted({n for n in names if names.count(n) > 1}))
    if other := [tensor.name for tensor in tensors if not tensor.floating]:
        raise SettingsError("only floating tensors can be merged", got=other[:8], todo="leave them out of the layout")
    if unknown := sorted({*direct, *by_value} - set(names)):
        raise SettingsError(
            "no such tensor to merge", got=unknown, allowed=names[:8], todo="correct the rules of leaves"
        )
    rows = max(1, sum(tensor.rows for tensor in tensors))
    if not 1 <= fragments <= rows:
        raise SettingsError(
            "the model cannot be divided into that many fragments",
            got=fragments,
            allowed=f"1..{rows} (rows of its tensors)",
            todo="lower protocol.fragments",
        )
    line = on_the_line(tensors, by_value)
    trained, valued = line[: len(line) - len(set(by_value))], line[len(line) - len(set(by_value)) :]
    theirs = _fragments_by_value(trained, valued, fragments)
    parts = [*(_cut(trained, fragments - theirs) if trained else ()), *(_cut(valued, theirs) if valued else ())]
    return Layout(
        tensors=tuple(tensors),
        fragments=tuple(tuple(inside) for inside in parts),
        direct=tuple(sorted(direct)),
        by_value=tuple(sorted(by_value)),
    )


def on_the_line(tensors: Sequence[TensorSpec], by_value: Sequence[str]) -> Line:
    """Return the tensors, numbered, in the order in which they are cut: those merged by value come last."""
    last = set(by_value)
    return sorted(enumerate(tensors), key=lambda numbered: numbered[1].name in last)


def _fragments_by_value(trained: Line, valued: Line, fragments: int) -> int:
    if not (trained and valued):
        return fragments if valued else 0
    if fragments == 1:
        raise SettingsError(
            "tensors that are merged by value have fragments of their own",
            got="fragments = 1",
            allowed="2 or more",
            todo="raise protocol.fragments",
        )
    rows, theirs = (max(1, sum(tensor.rows for _, tensor in part)) for part in (trained, valued))
    elements, few = (sum(tensor.size for _, tensor in part) for part in (trained, valued))
    fair = round(fragments * few / max(1, elements + few))
    return max(1, fragments - rows, min(fair, theirs, fragments - 1))


@dataclass(frozen=True, slots=True)
class _Rest:
    """The rest of a line: its elements and rows, and the fragments to fill; `target` is the fair size of the next one."""

    elements: int
    rows: int
    fragments: int

    @property
    def target(self) -> float:
        return self.elements / self.fragments


def _cut(tensors: Line, fragments: int) -> Iterator[list[Slice]]:
    line = _Rest(sum(tensor.size for _, tensor in tensors), sum(tensor.rows for _, tensor in tensors), fragments)
    inside: list[Slice] = []
    taken = filled = 0
    for number, tensor in tensors:
        start, row = 0, tensor.size // max(1, tensor.rows)
        if tensor.rows == 0:
            inside.append(Slice(number, 0, 0))
        while start < tensor.rows:
            count = _fitting(line.target - filled, row, tensor.rows - start, line, taken)
            if count:
                inside.append(Slice(number, start, start + count))
                start, taken, filled = start + count, taken + count, filled + count * row
            if line.fragments > 1 and (start < tensor.rows or line.rows - taken == line.fragments - 1):
                yield inside
                line = _Rest(line.elements - filled, line.rows - taken, line.fragments - 1)
                inside, taken, filled = [], 0, 0
    yield inside


def _fitting(room: float, row: int, rows: int, line: _Rest, taken: int) -> int:
    """Return how many of a tensor's next `rows` rows, of `row` elements, the present fragment takes beside what it has.

    As many as come nearest to its `room`; all when the rest, none when the part would be a sliver; at least one into an
    empty fragment; never so many that a later fragment would stay empty.
    """
    most = min(rows, line.rows - taken - (line.fragments - 1))
    if line.fragments == 1 or row == 0:
        return most
    sliver = SLIVER * line.target
    if (rows * row) <= room + sliver:
        return most
    near = math.floor(room / row + 0.5)
    if near * row < sliver:
        near = 0
    return min(most, max(near, 0 if taken else 1))


def first_difference(ours: Layout, theirs: Layout) -> str:
    """Return one sentence that names the first thing in which two layouts differ, or the empty string."""
    return next(_differences(ours, theirs), "")


def _tensor_difference(number: int, ours: TensorSpec, theirs: TensorSpec) -> str:
    if ours.name != theirs.name:
        return f"tensor {number} is {ours.name!r} here and {theirs.name!r} in the run"
    if ours.shape != theirs.shape:
        return f"{ours.name!r} has shape {list(ours.shape)} here and {list(theirs.shape)} in the run"
    return f"{ours.name!r} is {ours.dtype} here and {theirs.dtype} in the run"


def _differences(ours: Layout, theirs: Layout) -> Iterator[str]:
    for number, (a, b) in enumerate(zip(ours.tensors, theirs.tensors, strict=False)):
        if a != b:
            yield _tensor_difference(number, a, b)
    if len(ours.tensors) != len(theirs.tensors):
        yield f"{len(ours.tensors)} tensors here and {len(theirs.tensors)} in the run"
    if len(ours.fragments) != len(theirs.fragments):
        yield f"{len(ours.fragments)} fragments here and {len(theirs.fragments)} in the run"
    for how, named, others in (("directly", ours.direct, theirs.direct), ("by value", ours.by_value, theirs.by_value)):
        if named != others:
            yield f"merged {how} here: {list(named)}, in the run: {list(others)}"
    for number, (mine, other) in enumerate(zip(ours.fragments, theirs.fragments, strict=False)):
        if mine != other:
            yield f"fragment {number} holds other slices here than in the run"
