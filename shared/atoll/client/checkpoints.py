"""An island's own checkpoints: what its training loop needs to go on, beside the parameters, written by Orbax.

    DIR/<run>.<nonce>/<learner>/<incarnation and step as one number>/{state, note}

The step loop pays for one copy to host memory. A thread does the rest: the digest, and Orbax, which writes to a temporary
folder and renames it, so that a kill at any instant leaves the former checkpoint. The newest few are kept. A save that is under
way delays the next one.

Checkpoints hold no parameters: the run's heads are the parameters, and a learner that returns adopts them. What its former
life trained and had not pushed is lost, and counted as lost in that life's account; no checkpoint may bring it back under
another. So a checkpoint, however old, can overwrite nothing. It is adopted only if its note names this run, founding, model,
layout, learner and tree. A damaged one is skipped for the one before it. Orbax does not protect values by a checksum; the
note's digest does, and also the note itself, which holds the numbers and strings of a loop's state. What is not finite could
not be adopted, and is not written. A rebuilt run has a nonce of its own: until it has a checkpoint, those of its source are
read, and never written or removed.

The reference learner (`atoll_learner.keeper`) and a loop of one's own (`atoll.client.keeping`) use the same code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash

from atoll.base.errors import CheckpointError, PeerMisbehaved, StorageFull
from atoll.base.logs import get
from atoll.client.optimizer_state import Arrays, is_finite, rebuilt
from atoll.protocol.data import Key
from atoll.wire.messages import RunRecord

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

    from atoll.client.join import IslandHandle

log = get(__name__)

KEPT: Final = 2
NAMED_MAX: Final = 8
LIVES: Final = 1 << 32
"""Orbax numbers checkpoints and takes the largest for the newest: a later life is newer, whatever step it has come to."""


class DataPlace(msgspec.Struct, frozen=True):
    """How far one unit of data has been read."""

    unit: Key
    read: int
    of: int


class CheckpointNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint records about itself.

    Attributes:
        run, nonce, model, layout, learner: whose it is; `nonce` is that of the run's founding.
        incarnation: the life that wrote it.
        anchors: the versions of the fragments that its learner had adopted.
        steps, tokens: what this life had trained.
        run_tokens: what the run had trained, as far as the learner knew.
        saved_at_s: time of day, seconds.
        cursor: the place in leased data.
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
        """Return the newest one below our folder that is whole and of our `life`."""
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
                state = rebuilt(like, arrays)
            except PeerMisbehaved as error:  # it is whole, and not what is trained with now
                log.warning("checkpoint.refused", path=str(self.folder / str(number)), reason=str(error))
                continue
            size = sum(int(array.nbytes) for array in arrays.values())
            return LoadedCheckpoint(state, note, size, time.monotonic() - began_s)
        return None

    def warm(self) -> None:
        """Load Orbax in a thread: a training loop calls it once it steps, and no save of it waits for that."""
        threading.Thread(target=self._warm, name="checkpoint-warm", daemon=True).start()

    @staticmethod
    def _warm() -> None:
        import orbax.checkpoint  # noqa: F401, PLC0415

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

        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_numbered(arrays)), note=ocp.args.JsonSave(msgspec.to_builtins(note))
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
        """Return the finished checkpoints, newest first."""
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


def _numbered(arrays: Arrays) -> Arrays:
    """Return the arrays under names that can be file names anywhere."""
    return {f"{i:06d}": array for i, array in enumerate(arrays.values())}


def life_of(island: IslandHandle, learner: str, tree: dict[str, str] | None = None) -> CheckpointNote:
    """Return the note of an island's present life, before its first step."""
    run = island.run
    return CheckpointNote(
        run=run.run,
        nonce=run.nonce,
        model=run.model,
        layout=run.layout.fingerprint,
        learner=learner,
        incarnation=island.incarnation,
        anchors=(),
        steps=0,
        tokens=0,
        run_tokens=0,
        saved_at_s=0.0,
        tree=tree or {},
    )


def note_now(life: CheckpointNote, island: IslandHandle, steps: int, tokens: int) -> CheckpointNote:
    """Return the note of a checkpoint that a life makes now, after so many steps and tokens."""
    intervals = island.session.driver.machine.intervals
    return msgspec.structs.replace(
        life,
        anchors=tuple(intervals[p].anchor for p in sorted(intervals)),
        steps=steps,
        tokens=tokens,
        run_tokens=island.run_tokens,
        saved_at_s=time.time(),
    )


def rebuilt_from(run: RunRecord) -> str:
    """Return the nonce that a rebuilt run had before, or the empty string."""
    return run.rebuilt.source if run.rebuilt is not None else ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
