"""Checkpoints of an island: what its training loop needs to go on, beside the parameters, written by Orbax.

    kept = island.checkpoints("checkpoints", like={"opt": opt_state, "key": key, "read": 0}, lend="opt")
    opt_state, key, read = (kept.restored[name] for name in ("opt", "key", "read"))
    ...
        kept.save({"opt": opt_state, "key": key, "read": read})        # after each step

    DIR/<run>.<nonce>/<learner>/<incarnation and step as one number>/{state, note}

`LoopCheckpoints` is for a loop of one's own, and `Checkpoints` the files, which the reference learner
(`atoll_learner.checkpoints`) uses without it. The step loop pays for one copy to host memory. A thread does the rest: the
digest, and Orbax, which writes to a temporary folder and renames it, so that a kill leaves the former checkpoint.

Checkpoints hold no parameters: the run's heads are the parameters, and a learner that returns adopts them. Steps that its
former life trained and had not pushed are lost, and counted as lost in that life's account. So a checkpoint, however old, can
overwrite nothing. It is adopted only if its note names this run, founding, model, layout, learner and tree. A damaged one is
skipped for the one before it. Orbax does not protect values by a checksum; the note's digest does, and also the note itself,
which holds the numbers and strings of a loop's state. A state that is not finite is not written. A rebuilt run has a nonce of
its own: until it has a checkpoint, those of its source are read, and never written or removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash

from atoll.base.errors import CheckpointError, PeerMisbehaved, SettingsError, StorageFull
from atoll.base.logs import get
from atoll.client.optimizer_state import Arrays, Borrowed, host_copy, is_finite, rebuild_state
from atoll.model.tree_walk import flatten, is_array, is_jax_array
from atoll.protocol.data import Key
from atoll.protocol.island import Island
from atoll.wire.events import RecoveredEvent
from atoll.wire.messages import RunRecord

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

    from atoll.client.session import Session

log = get(__name__)

KEPT: Final = 2
NAMED_MAX: Final = 8
LIVES: Final = 1 << 32
"""Orbax numbers checkpoints and takes the largest for the newest: a later life is newer, whatever step it has come to."""
EVERY_S: Final = 20.0
LEAVE_S: Final = 30.0
"""Longest wait of an island that leaves for its last checkpoint, seconds."""

Plain = bool | int | float | str


class LoopCheckpoints:
    """The state of one incarnation's loop, kept in checkpoints: for the training thread.

    `like` is any pytree: arrays of JAX and NumPy, typed keys of random numbers, plain numbers and strings. `restored` is the
    newest whole checkpoint of this learner in this run; else, where `lend` names the entry with the optimizer's state, `like`
    with a peer's state in its place; else `like` itself. Only optimizer state is lent: two islands with one key would draw the
    same numbers, with one place in the data read the same data. The last state is written when the island leaves in good order.

    Attributes:
        restored: the state to begin with, as `like`.
        source: where it is from: "checkpoint", "peer" or "fresh".
        age_tokens: how far the run is past it, tokens; 0 for a fresh one.
    """

    def __init__(  # noqa: PLR0913  (what an island gives, and what its loop says)
        self,
        session: Session,
        recover: Callable[[Any], Borrowed | None],
        note: Callable[[RecoveredEvent], None],
        folder: Path | str,
        like: Any,  # noqa: ANN401  (the caller's pytree)
        *,
        lend: str = "",
        every_s: float = EVERY_S,
        kept: int = KEPT,
    ) -> None:
        self._session = session
        self._lend = lend
        self._every_s = every_s
        self._state = LoopState(like)
        _check(like, lend, every_s, kept)
        run, member = session.run, session.member
        self._life = life_of(run, member.learner, member.incarnation, self._state.kinds)
        self._store = Checkpoints(_make_folder(Path(folder)), self._life, rebuilt_from(run), kept)
        self._arrays: Arrays | None = None
        self._last: Any = None
        self._saves = 0
        self._began_s = 0.0
        self.restored: Any = like
        self.source = "fresh"
        self.age_tokens = 0
        note(self._restore(like, recover))

    def save(self, state: Any) -> None:  # noqa: ANN401  (as `like`)
        """Note the state after a completed step, and begin a checkpoint if one is due; else this costs a look at the clock.

        `state` may be donated to the next step, or changed in place by it.

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
            self._session.lender.share(state[self._lend], donated=True)
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
        began_s = time.monotonic()
        arrays, plain = self._state.split(state)
        if poor := next((name for name, value in plain.items() if not _is_real(value)), None):
            log.warning("checkpoint.not_kept", step=self._saves, leaf=poor, reason="NaN or an infinity")
            return
        # Nothing is being written, so the memory of the former copy is free.
        self._arrays = host_copy(arrays, self._arrays)
        copied_s = time.monotonic() - began_s
        machine, run_tokens = self._session.driver.machine, self._session.driver.progress.tokens
        note = note_now(self._life, machine, steps=self._saves, tokens=machine.tokens, run_tokens=run_tokens)
        self._store.save(self._arrays, msgspec.structs.replace(note, plain=plain), copied_s)

    def _restore(self, like: Any, recover: Callable[[Any], Borrowed | None]) -> RecoveredEvent:  # noqa: ANN401
        driver, incarnation = self._session.driver, self._session.member.incarnation
        own = self._store.load(self._state.split(like)[0])
        if own is not None and not self._state.fits(own.note.plain):
            log.warning("checkpoint.refused", reason="its numbers and strings are not those that its tree names")
            own = None
        if own is not None:
            self.source, self.age_tokens = "checkpoint", age_of(own, driver.progress.tokens)
            self.restored = self._state.whole(own.state, own.note.plain)
            return checkpoint_recovery(incarnation, own, self.age_tokens)
        may_borrow = self._lend and driver.progress.tokens > 0 and not driver.done
        borrowed = recover(like[self._lend]) if may_borrow else None
        if borrowed is None:
            return fresh_recovery(incarnation)
        recovered = loan_recovery(incarnation, borrowed, driver.progress.tokens)
        self.source, self.age_tokens = "peer", recovered.age_tokens or 0
        self.restored = {**like, self._lend: borrowed.state}
        return recovered


class LoopState:
    """The tree of what a loop keeps: names and kinds of its leaves, taken from `like`."""

    def __init__(self, like: Any) -> None:  # noqa: ANN401  (the caller's pytree)
        """Take the tree of these; raise `SettingsError` for a leaf that cannot be kept, or two of one name."""
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
        """Return the non-empty arrays of such a state by name, and its other leaves; raise `SettingsError` for another tree."""
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
        return {name: leaf for name, leaf in named.items() if name not in plain and math.prod(leaf.shape)}, plain

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


class DataPlace(msgspec.Struct, frozen=True):
    """Progress of reading in one unit of data."""

    unit: Key
    read: int
    of: int


class CheckpointNote(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's record of itself: whose it is (`nonce`: the run's founding), and what the life that wrote it had.

    Attributes:
        anchors: the versions of the fragments that its learner had adopted.
        steps, tokens: what this life had trained.
        run_tokens: what the run had trained, as far as the learner knew.
        tree: the kind of every leaf by name; empty where only the arrays themselves are compared.
        plain: the leaves that are no arrays, by name.
        names: the names of the arrays, in order.
        digest: the digest of their values and of all else in this note.
    """

    run: str
    nonce: str
    model: str
    layout: str
    learner: str
    incarnation: int
    anchors: tuple[int, ...]
    steps: int
    tokens: int
    run_tokens: int
    saved_at_s: float
    cursor: tuple[DataPlace, ...] = ()
    tree: dict[str, str] = {}
    plain: dict[str, bool | int | float | str] = {}
    names: tuple[str, ...] = ()
    digest: str = ""

    def stranger(self, other: CheckpointNote) -> str:
        """Return the first thing in which this checkpoint is of another learner, run or model than `other`'s, or ""."""
        for name in ("run", "nonce", "model", "layout", "learner"):
            got, wanted = getattr(self, name), getattr(other, name)
            if got != wanted:
                return f"its {name} is {got!r} and not {wanted!r}"
        return ""

    def difference(self, other: CheckpointNote) -> str:
        """Return the first thing in which this checkpoint is not that of `other`'s life or a former one, or ""."""
        if strange := self.stranger(other):
            return strange
        for name in sorted(self.tree.keys() | other.tree.keys()):
            kept, asked = self.tree.get(name, "not there"), other.tree.get(name, "not there")
            if kept != asked:
                return f"its leaf {name!r} is {kept} and in this loop {asked}"
        return ""

    @property
    def progress(self) -> dict[Key, tuple[int, int]]:
        """Return the cursor as the data ledger wants it."""
        return {place.unit: (place.read, place.of) for place in self.cursor}


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A valid checkpoint of this learner: the state as a pytree, its note, bytes, and the seconds that loading took.

    `rebuilt_since` tells that it is from before the run was rebuilt.
    """

    state: Any
    note: CheckpointNote
    size_bytes: int
    took_s: float
    rebuilt_since: bool = False


class Checkpoints:
    """The checkpoints of one learner in one run. For one thread, which saves and loads."""

    def __init__(self, folder: Path, life: CheckpointNote, rebuilt_from: str = "", kept: int = KEPT) -> None:
        """Name the place; `life` is a note of the present life, `rebuilt_from` the nonce its run had before, if any.

        The newest `kept` checkpoints stay.
        """
        self._root = folder.absolute()
        self._life = life
        self._kept = kept
        self.folder = self._root / f"{life.run}.{life.nonce}" / life.learner
        former = msgspec.structs.replace(life, nonce=rebuilt_from)
        self._former = Checkpoints(folder, former) if rebuilt_from else None
        self._writing: threading.Thread | None = None
        self._newest = 0
        # Orbax logs a page of traceback for each error that it raises as well; ours is one line.
        logging.getLogger("absl").setLevel(logging.CRITICAL)

    def load(self, like: Any) -> LoadedCheckpoint | None:  # noqa: ANN401  (any pytree)
        """Return the newest checkpoint that is whole and ours, as a state like `like`; None when there is none."""
        if (loaded := self._load(like)) is not None or self._former is None:
            return loaded
        former = self._former.load(like)
        return None if former is None else replace(former, rebuilt_since=True)

    def place(self) -> dict[Key, tuple[int, int]]:
        """Return the place in the data of our newest checkpoint, whatever optimizer it is of; nothing where there is none."""
        for number in self._numbers() if self._exists() else ():
            with contextlib.suppress(CheckpointError):
                note = self._read_note(number)
                if not note.stranger(self._life):
                    return note.progress
        return {}

    def _load(self, like: Any) -> LoadedCheckpoint | None:  # noqa: ANN401
        if not self._exists():
            return None
        began_s = time.monotonic()
        for number in self._numbers():
            try:
                note = self._read_note(number)
                if difference := note.difference(self._life):
                    log.warning("checkpoint.refused", path=str(self.folder / str(number)), reason=difference)
                    continue
                arrays = self._read_state(number, note)
            except CheckpointError as error:
                log.warning("checkpoint.damaged", path=str(self.folder / str(number)), reason=str(error))
                continue
            try:
                state = rebuild_state(like, arrays)
            except PeerMisbehaved as error:  # it is whole, and not what is trained with now
                log.warning("checkpoint.refused", path=str(self.folder / str(number)), reason=str(error))
                continue
            size = sum(int(array.nbytes) for array in arrays.values())
            return LoadedCheckpoint(state, note, size, time.monotonic() - began_s)
        return None

    def warm(self) -> None:
        """Load Orbax in a thread: a training loop calls it once it steps, and no save of it waits for that."""
        threading.Thread(target=import_module, args=("orbax.checkpoint",), name="checkpoint-warm", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Return whether a save is under way."""
        return self._writing is not None and self._writing.is_alive()

    def save(self, arrays: Arrays, note: CheckpointNote, copied_s: float = 0.0) -> None:
        """Begin to write `arrays` (copied in `copied_s`, never changed again) unless a save is under way."""
        if self.busy:
            return
        if (number := note.incarnation * LIVES + note.steps) != self._newest:
            self._newest = number
            self._writing = threading.Thread(
                target=self._write, args=(number, arrays, note, copied_s), name="checkpoint", daemon=True
            )
            self._writing.start()

    def finish(self, within_s: float) -> bool:
        """Wait for the save under way; say whether none is left."""
        if self._writing is not None:
            self._writing.join(max(0.0, within_s))
        return not self.busy

    def _write(self, number: int, arrays: Arrays, note: CheckpointNote, copied_s: float) -> None:
        """Write one checkpoint; a full disk costs the checkpoint, not the learner. Runs in a thread."""
        began_s = time.monotonic()
        if poor := next((name for name, array in arrays.items() if not is_finite(array)), None):
            log.warning("checkpoint.not_kept", step=note.steps, leaf=poor, reason="NaN or an infinity in it")
            return
        note = msgspec.structs.replace(note, names=tuple(arrays))
        note = msgspec.structs.replace(note, digest=digest_of(arrays, note))
        size = sum(int(array.nbytes) for array in arrays.values())
        import orbax.checkpoint as ocp  # noqa: PLC0415  (half a second, which no first step waits for)

        numbered = {f"{i:06d}": array for i, array in enumerate(arrays.values())}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(numbered), note=ocp.args.JsonSave(msgspec.to_builtins(note))
        )
        try:
            with self._manager() as manager:  # it removes what is left of a save that failed
                _check_room(self.folder, size)
                # Orbax passes over a number below the largest in the folder, whatever made that one; ours must be written.
                written = manager.save(number, args=items, force=True)
        except Exception as error:  # noqa: BLE001  (Orbax and TensorStore raise what they like, a full disk among it)
            log.warning("checkpoint.failed", step=note.steps, reason=_first_line(error))
            return
        if not written:
            reason = f"Orbax did not write it; is a checkpoint in {self.folder} that is not of this learner?"
            log.warning("checkpoint.failed", step=note.steps, reason=reason)
            return
        took_s = round(time.monotonic() - began_s, 3)
        log.info("checkpoint.saved", step=note.steps, bytes=size, copied_s=round(copied_s, 5), took_s=took_s)

    def _numbers(self) -> list[int]:
        try:
            with self._manager() as manager:
                return sorted(manager.all_steps(), reverse=True)
        except Exception as error:  # noqa: BLE001
            log.warning("checkpoint.unreadable", path=str(self.folder), reason=_first_line(error))
            return []

    def _read_note(self, number: int) -> CheckpointNote:
        import orbax.checkpoint as ocp  # noqa: PLC0415

        try:
            with self._manager() as manager:
                found = manager.restore(number, args=ocp.args.Composite(note=ocp.args.JsonRestore()))
            return msgspec.convert(found["note"], CheckpointNote)
        except Exception as error:
            raise CheckpointError("the note of this checkpoint cannot be read", got=_first_line(error)) from error

    def _read_state(self, number: int, note: CheckpointNote) -> Arrays:
        import orbax.checkpoint as ocp  # noqa: PLC0415

        try:
            with self._manager() as manager:
                found = manager.restore(number, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
            arrays = {name: found["state"][f"{i:06d}"] for i, name in enumerate(note.names)}
        except Exception as error:
            raise CheckpointError("the state of this checkpoint cannot be read", got=_first_line(error)) from error
        if (digest := digest_of(arrays, note)) != note.digest:
            raise CheckpointError(
                "the values or the note are not those that were written", got=digest, allowed=note.digest
            )
        return arrays

    def _manager(self) -> ocp.CheckpointManager:
        import orbax.checkpoint as ocp  # noqa: PLC0415

        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._kept, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        return ocp.CheckpointManager(self.folder, options=options)

    def _exists(self) -> bool:
        """Return whether our folder is there; if not, name those of other runs, as many as a person wants to read."""
        try:
            if self.folder.is_dir():
                return True
            found = sorted(p.name for p in self._root.iterdir() if p.is_dir()) if self._root.is_dir() else []
        except OSError as error:
            todo = "let this user read, search and write the folder, or name another (learner.checkpoint_dir)"
            log.warning("checkpoint.unreadable", path=str(self._root), reason=_first_line(error), todo=todo)
            return False
        known = {place.folder.parent.name for place in (self, self._former) if place is not None}
        if others := [name for name in found if name not in known][:NAMED_MAX]:
            log.warning("checkpoint.other_runs", folder=str(self._root), found=others, wanted=self.folder.parent.name)
        return False


def life_of(run: RunRecord, learner: str, incarnation: int, tree: dict[str, str] | None = None) -> CheckpointNote:
    """Return the note of a learner's present life, before its first step."""
    return CheckpointNote(
        run=run.run,
        nonce=run.nonce,
        model=run.model,
        layout=run.layout.fingerprint,
        learner=learner,
        incarnation=incarnation,
        anchors=(),
        steps=0,
        tokens=0,
        run_tokens=0,
        saved_at_s=0.0,
        tree=tree or {},
    )


def note_now(life: CheckpointNote, machine: Island, *, steps: int, tokens: int, run_tokens: int) -> CheckpointNote:
    """Return the note of a checkpoint that a life makes now, after so many steps and tokens."""
    intervals = machine.intervals
    return msgspec.structs.replace(
        life,
        anchors=tuple(intervals[p].anchor for p in sorted(intervals)),
        steps=steps,
        tokens=tokens,
        run_tokens=run_tokens,
        saved_at_s=time.time(),
    )


def rebuilt_from(run: RunRecord) -> str:
    """Return the nonce that a rebuilt run had before, or the empty string."""
    return run.rebuilt.source if run.rebuilt is not None else ""


def age_of(own: LoadedCheckpoint, run_tokens: int) -> int:
    """Return how far the run is from where it was; heads know a little less than its learners did, which is no age."""
    passed = run_tokens - own.note.run_tokens
    return abs(passed) if own.rebuilt_since else max(0, passed)


def fresh_recovery(incarnation: int) -> RecoveredEvent:
    """Return the event of an incarnation that begins with a fresh state."""
    return RecoveredEvent(
        source="fresh", incarnation=incarnation, former=None, peer=None, steps=None, age_tokens=0, bytes=0, took_s=0.0
    )


def checkpoint_recovery(incarnation: int, own: LoadedCheckpoint, age_tokens: int) -> RecoveredEvent:
    """Return the event of an incarnation that begins with its own checkpoint."""
    return RecoveredEvent(
        source="checkpoint",
        incarnation=incarnation,
        former=own.note.incarnation,
        peer=None,
        steps=own.note.steps,
        age_tokens=age_tokens,
        bytes=own.size_bytes,
        took_s=round(own.took_s, 3),
    )


def loan_recovery(incarnation: int, borrowed: Borrowed, run_tokens: int) -> RecoveredEvent:
    """Return the event of an incarnation that begins with a peer's state, in a run that is at `run_tokens`."""
    return RecoveredEvent(
        source="peer",
        incarnation=incarnation,
        former=None,
        peer=borrowed.lender,
        steps=borrowed.steps,
        age_tokens=max(0, run_tokens - borrowed.run_tokens),
        bytes=borrowed.size_bytes,
        took_s=round(borrowed.took_s, 3),
    )


def digest_of(arrays: Mapping[str, Any], note: CheckpointNote) -> str:
    """Return the xxh3-128, in hex, of a note but for its digest, and of names, dtypes, shapes and bytes of its arrays."""
    said = msgspec.to_builtins(msgspec.structs.replace(note, digest=""))
    digest = xxhash.xxh3_128(json.dumps(said, sort_keys=True).encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(memoryview(array.reshape(-1).view("u1")))
    return digest.hexdigest()


def _check_room(folder: Path, size: int) -> None:
    """Raise `StorageFull` unless a disk has room for so many bytes; Orbax, which may need fewer, meets a full one loudly."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise StorageFull(f"{free} bytes are free for a checkpoint of {size}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _check(like: Any, lend: str, every_s: float, kept: int) -> None:  # noqa: ANN401
    if lend and not (isinstance(like, dict) and lend in like):
        names = ", ".join(map(str, like)) if isinstance(like, dict) else "a dict of parts"
        raise SettingsError("`lend` names an entry of `like`", got=repr(lend), allowed=names, todo="correct `lend`")
    if not isinstance(every_s, int | float) or not 0.0 <= every_s <= 86_400.0:
        raise SettingsError("every_s is out of range", got=every_s, allowed="0..86400 seconds", todo="correct every_s")
    if not isinstance(kept, int) or not 1 <= kept <= 1000:
        raise SettingsError("kept is out of range", got=kept, allowed="1..1000 checkpoints", todo="correct kept")


def _make_folder(folder: Path) -> Path:
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


def _is_real(value: Plain) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
