"""Checkpoints of a loop of one's own: two lines, and a run whose every island died goes on where it was.

    kept = island.checkpoints("checkpoints", like={"opt": opt_state, "key": key, "read": 0}, lend="opt")
    opt_state, key, read = (kept.restored[name] for name in ("opt", "key", "read"))
    ...
        kept.save({"opt": opt_state, "key": key, "read": read})        # after each step

`like` is any pytree: arrays of JAX and NumPy, typed keys of random numbers, plain numbers and strings (the state of a NumPy
generator has both). `restored` is the newest whole checkpoint of this learner in this run; else, where `lend` names the entry
with the optimizer's state, `like` with a peer's state in its place; else `like` itself. Only optimizer state is lent: two
islands with one key would draw the same numbers, with one place in the data read the same data.

`save` keeps a reference and looks at the clock. When a checkpoint is due it copies the state to host memory, and a thread
writes it. The last state is written when the island leaves in good order. After a kill the loop reads again what it had read
since its last checkpoint: at most `every_s` seconds of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.logs import get
from atoll.client.checkpoints import KEPT, Checkpoints, LoadedCheckpoint, life_of, note_now, rebuilt_from
from atoll.client.optimizer_state import Arrays, host_copy
from atoll.model.tree_walk import flatten, is_array, is_jax_array

if TYPE_CHECKING:
    from atoll.client.join import IslandHandle
    from atoll.client.peer_recovery import Borrowed

log = get(__name__)

EVERY_S: Final = 20.0
LEAVE_S: Final = 30.0
"""How long an island that leaves waits for its last checkpoint, seconds."""

FRESH_FACTS: Final[Mapping[str, str | int | float]] = {"bytes": 0, "age_tokens": 0, "took_s": 0.0}
"""What log and event log say of a start without a former state."""

Plain = bool | int | float | str


class LoopState:
    """The tree of what a loop keeps: names and kinds of its leaves, taken from `like`."""

    def __init__(self, like: Any) -> None:  # noqa: ANN401  (the caller's pytree)
        """Take the tree of these.

        Raises:
            SettingsError: a leaf cannot be kept, or two have one name.
        """
        named, self._shape = flatten(like)
        self._leaves = dict(named)
        self.kinds = {name: _kind(name, leaf) for name, leaf in named}
        if len(self.kinds) != len(named) or not named:
            raise SettingsError(
                "the state of a loop is a tree of leaves with different names",
                got="two leaves of one name" if named else "no leaf",
                todo="keep the optimizer's state in it, say: like={'opt': opt_state}",
            )

    def split(self, state: Any) -> tuple[dict[str, Any], dict[str, Plain]]:  # noqa: ANN401
        """Return the arrays of such a state by name, without the empty ones, and its numbers and strings.

        Raises:
            SettingsError: it is another tree.
        """
        leaves, shape = self._shape.leaves_of(state)
        kinds = (
            [] if shape != self._shape else [_kind(name, leaf) for name, leaf in zip(self.kinds, leaves, strict=True)]
        )
        if kinds != list(self.kinds.values()):
            raise SettingsError(
                "this is not the state that `like` has promised",
                got=self._difference(state),
                todo="save what `like` is like",
            )
        named = dict(zip(self.kinds, leaves, strict=True))
        plain = {name: leaf for name, leaf in named.items() if isinstance(leaf, Plain) and not is_array(leaf)}
        return {name: leaf for name, leaf in named.items() if name not in plain and _size(leaf)}, plain

    def fits(self, plain: Mapping[str, Plain]) -> bool:
        """Return whether these are exactly the numbers and strings of this tree, each of its kind and finite."""
        due = {name: type(leaf).__name__ for name, leaf in self._leaves.items() if not is_array(leaf)}
        return {name: type(value).__name__ for name, value in plain.items()} == due and all(
            map(_is_real, plain.values())
        )

    def whole(self, arrays: Mapping[str, Any], plain: Mapping[str, Plain]) -> Any:  # noqa: ANN401
        """Return the state of these leaves; an empty array is that of `like`."""
        return self._shape.whole([{**self._leaves, **arrays, **plain}[name] for name in self.kinds])

    def _difference(self, state: Any) -> str:  # noqa: ANN401
        named, _ = self._shape.of(state)
        found = {name: _kind(name, leaf) for name, leaf in named}
        for name in sorted(found.keys() | self.kinds.keys()):
            got, wanted = found.get(name, "not there"), self.kinds.get(name, "not there")
            if got != wanted:
                return f"the leaf {name!r} is {got}, and in `like` {wanted}"
        return "other containers than those of `like`"


class LoopCheckpoints:
    """What one incarnation keeps of its loop; for the training thread.

    Attributes:
        restored: the state to begin with, as `like`.
        source: where it is from: "checkpoint", "peer" or "fresh".
        age_tokens: how far the run is past it, tokens; 0 for a fresh one.
    """

    def __init__(
        self,
        island: IslandHandle,
        folder: Path | str,
        like: Any,  # noqa: ANN401  (the caller's pytree)
        *,
        lend: str = "",
        every_s: float = EVERY_S,
        kept: int = KEPT,
    ) -> None:
        """Find the place and restore; see `IslandHandle.checkpoints`."""
        self._island = island
        self._lend = lend
        self._every_s = every_s
        self._state = LoopState(like)
        _check(like, lend, every_s, kept)
        self._life = life_of(island, island.session.learner, self._state.kinds)
        self._store = Checkpoints(_usable(Path(folder)), self._life, rebuilt_from(island.run), kept)
        self._arrays: Arrays | None = None
        self._last: Any = None
        self._saves = 0
        self._began_s = 0.0
        self.restored: Any = like
        self.source = "fresh"
        self.age_tokens = 0
        self._restore(like)

    def save(self, state: Any) -> None:  # noqa: ANN401  (as `like`)
        """Note the state after a completed step, and begin a checkpoint if one is due.

        Until then this costs a look at the clock. `state` may be donated to the next step, or changed in place by it.

        Raises:
            SettingsError: the first state, or one that is due, is another tree than `like`.
        """
        now_s = time.monotonic()
        if not self._saves:
            self._state.split(state)
            self._began_s = now_s
        self._saves += 1
        self._last = state
        if self._lend:
            self._island.share(state[self._lend])
        if now_s - self._began_s >= self._every_s and not self._store.busy:
            self._began_s = now_s
            self._begin(state)

    def finish(self, within_s: float = LEAVE_S) -> bool:
        """Wait for the checkpoint that is being written; return whether none is left."""
        return self._store.finish(within_s)

    def leave(self, within_s: float = LEAVE_S) -> None:
        """Write the state that was given last, within so many seconds. The island calls this when it leaves in good order."""
        deadline_s = time.monotonic() + within_s
        if not self._saves:
            return
        if self._store.finish(within_s):
            try:
                self._begin(self._last)
            except (RuntimeError, SettingsError) as error:  # donated to a step whose result was never saved
                log.warning("checkpoint.failed", step=self._saves, reason=str(error).splitlines()[0])
                return
        if not self._store.finish(deadline_s - time.monotonic()):
            log.warning("checkpoint.unfinished", reason=f"it takes longer than {within_s:g} s")

    def _begin(self, state: Any) -> None:  # noqa: ANN401
        """Copy a state to host memory and let the thread write it."""
        began_s = time.monotonic()
        arrays, plain = self._state.split(state)
        if poor := next((name for name, value in plain.items() if not _is_real(value)), None):
            log.warning("checkpoint.not_kept", step=self._saves, leaf=poor, reason="NaN or an infinity")
            return
        # Nothing is being written, so the memory of the former copy is free.
        self._arrays = host_copy(arrays, self._arrays)
        copied_s = time.monotonic() - began_s
        machine = self._island.session.driver.machine
        note = note_now(self._life, self._island, self._saves, machine.tokens)
        self._store.save(self._arrays, msgspec.structs.replace(note, plain=plain), copied_s)

    def _restore(self, like: Any) -> None:  # noqa: ANN401
        """Take the best state there is, and tell log and event log which it was."""
        island = self._island
        own = self._store.load(self._state.split(like)[0])
        if own is not None and not self._state.fits(own.note.plain):
            log.warning("checkpoint.refused", reason="its numbers and strings are not those that its tree names")
            own = None
        if own is not None:
            self.source, self.age_tokens = "checkpoint", age_of(own, island.run_tokens)
            self.restored = self._state.whole(own.state, own.note.plain)
            island.note_recovery("checkpoint", **checkpoint_facts(own, self.age_tokens))
            return
        borrowed = island.recovered_state(like[self._lend]) if self._lend and self._may_borrow() else None
        if borrowed is None:
            island.note_recovery("fresh", **FRESH_FACTS)
            return
        facts = loan_facts(borrowed, island.run_tokens)
        self.source, self.age_tokens = "peer", int(facts["age_tokens"])
        self.restored = {**like, self._lend: borrowed.state}
        island.note_recovery("peer", **facts)

    def _may_borrow(self) -> bool:
        """Return whether a peer can have something to lend."""
        return self._island.run_tokens > 0 and not self._island.done


def age_of(own: LoadedCheckpoint, run_tokens: int) -> int:
    """Return how far the run is from where it was; heads know a little less than its learners did, which is no age."""
    passed = run_tokens - own.note.run_tokens
    return abs(passed) if own.rebuilt_since else max(0, passed)


def checkpoint_facts(own: LoadedCheckpoint, age_tokens: int) -> dict[str, str | int | float]:
    """Return the fields that log and event log carry about a checkpoint that is adopted."""
    return {
        "former": own.note.incarnation,
        "steps": own.note.steps,
        "age_tokens": age_tokens,
        "bytes": own.size_bytes,
        "took_s": round(own.took_s, 3),
    }


def loan_facts(borrowed: Borrowed, run_tokens: int) -> dict[str, str | int | float]:
    """Return the fields that log and event log carry about a loan, in a run that is at `run_tokens`."""
    return {
        "peer": borrowed.lender,
        "steps": borrowed.steps,
        "age_tokens": max(0, run_tokens - borrowed.run_tokens),
        "bytes": borrowed.size_bytes,
        "took_s": round(borrowed.took_s, 3),
    }


def _check(like: Any, lend: str, every_s: float, kept: int) -> None:  # noqa: ANN401
    """Raise `SettingsError` for the first argument that makes no sense."""
    if lend and not (isinstance(like, dict) and lend in like):
        names = ", ".join(map(str, like)) if isinstance(like, dict) else "a dict of parts"
        raise SettingsError("`lend` names an entry of `like`", got=repr(lend), allowed=names, todo="correct `lend`")
    if not isinstance(every_s, int | float) or not 0.0 <= every_s <= 86_400.0:
        raise SettingsError("every_s is out of range", got=every_s, allowed="0..86400 seconds", todo="correct every_s")
    if not isinstance(kept, int) or not 1 <= kept <= 1000:
        raise SettingsError("kept is out of range", got=kept, allowed="1..1000 checkpoints", todo="correct kept")


def _usable(folder: Path) -> Path:
    """Return a folder that is there; raise `SettingsError` where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            "this folder cannot hold checkpoints",
            got=f"{folder}: {error.strerror}",
            allowed="a folder that this user may write to",
            todo="name another folder",
        ) from error
    return folder


def _kind(name: str, leaf: Any) -> str:  # noqa: ANN401  (any leaf)
    """Return the kind of a leaf, which a checkpoint must share; raise `SettingsError` for what cannot be kept."""
    if is_array(leaf):
        numbers = is_jax_array(leaf) or (leaf.dtype.kind not in "OSUMmc" and not leaf.dtype.names)
        fault = "" if numbers else f"{leaf.dtype} is no kind of number"
        kind = f"{leaf.dtype}{list(leaf.shape)}"
    else:
        fault = "" if isinstance(leaf, Plain) else f"{type(leaf).__name__} cannot be kept"
        kind = type(leaf).__name__
    if fault:
        raise SettingsError(
            "a leaf of this state cannot be kept in a checkpoint",
            got=f"{name}: {fault}",
            allowed="arrays of NumPy or JAX, keys of random numbers, numbers and strings",
            todo="keep what it is made of; of a NumPy generator that is rng.bit_generator.state",
        )
    return kind


def _size(leaf: Any) -> int:  # noqa: ANN401  (an array)
    return math.prod(leaf.shape)


def _is_real(value: Plain) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
