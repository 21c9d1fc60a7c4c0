"""A token source of a person's own for the reference learner: `data.source = "module:attribute"`.

The attribute is called once per life of a learner (`TokenSource`) and returns an iterable of windows. Nothing is leased: which
learner reads what, and mixing, are the source's own affair. How many windows were read is kept with the learner's checkpoint.
After a restart the source is asked to begin there; without a checkpoint it begins at 0. Vocabulary, tokenizer and held-out
text are still those of `data.dir`, and all learners of a run name the same source.

`examples/grain_source.py` is such a source, with Grain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from atoll.base.errors import DataError
from atoll.base.logs import get
from atoll.protocol.data import Key, Progress
from atoll_learner.plug_ins import callable_of, describe_failure

log = get(__name__)

UNIT: Final[Key] = (0, 0, 1)
"""The unit of the whole stream in a checkpoint, which knows of units and windows."""
WINDOWS_MAX: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """Request to a source.

    Attributes:
        learner: id of the learner; two learners that read the same text only learn it twice.
        seed: seed of the run.
        sequence: tokens that a window is trained on; it has one more, the last target.
        vocab: tokens are from 0 to one less.
        start: windows of this stream that were read before; the first to return is number `start`.
    """

    learner: str
    seed: int
    sequence: int
    vocab: int
    start: int


class TokenSource(Protocol):
    """A function that returns the windows of one learner, each integers of shape (sequence + 1,).

    For equal requests it must return the same windows, and for a later `start` the rest of them. It is read in the training
    thread: what takes long should be read ahead by threads or processes of its own. If it ends, the learner leaves.
    """

    def __call__(self, request: SourceRequest) -> Iterable[npt.ArrayLike]:
        """Return the windows from number `request.start` on."""


def fingerprint_with(source: str, data: str) -> str:
    """Return the fingerprint of data of which only vocabulary and held-out text are read, beside the name of a source."""
    return hashlib.sha256(f"{source} {data}".encode()).hexdigest()[:32]


class SourceFeed:
    """Batches int32 (batch, sequence + 1) from a source, with the number of windows as the whole cursor."""

    def __init__(self, source: str, request: SourceRequest, batch: int) -> None:
        """Load the source and ask it for its windows.

        Raises:
            SettingsError: there is no such source.
            DataError: it failed.
        """
        function: Callable[[SourceRequest], Any] = callable_of(source, "data.source")
        self._source = source
        self._request = request
        self._batch = batch
        self._read = request.start
        try:
            self._windows = iter(function(request))
        except Exception as error:
            raise self._failed(error) from error

    def next(self, give_up: Callable[[], bool]) -> npt.NDArray[np.int32] | None:
        """Return the next batch; None once the source has ended, or if `give_up` says so.

        Raises:
            DataError: the source failed, or a window is not what it should be.
        """
        rows: list[npt.NDArray[np.int32]] = []
        while len(rows) < self._batch and not give_up():
            try:
                rows.append(self._checked(next(self._windows)))
            except StopIteration:
                log.info("data.source_ended", source=self._source, windows=self._read)
                return None
            except DataError:
                raise
            except Exception as error:
                raise self._failed(error) from error
        if len(rows) < self._batch:
            return None
        self._read += self._batch
        return np.stack(rows)

    @property
    def cursor(self) -> Progress:
        """Return how far the source is read, for a checkpoint."""
        return {UNIT: (self._read, WINDOWS_MAX)}

    def close(self, within_s: float) -> bool:
        """Close the source, if it can be closed; return False, because only the checkpoint knows how far it is read."""
        del within_s
        if close := getattr(self._windows, "close", None):
            close()
        return False

    def _checked(self, window: object) -> npt.NDArray[np.int32]:
        array = np.asarray(window)
        wanted, vocab = (self._request.sequence + 1,), self._request.vocab
        kind = array.dtype.kind in "iu"
        if not kind or array.shape != wanted or int(array.min()) < 0 or int(array.max()) >= vocab:
            held = f", tokens {array.min()}..{array.max()}" if kind and array.size else ""
            raise DataError(
                f"the token source {self._source} returned no window",
                got=f"{array.dtype} {array.shape}{held}",
                allowed=f"integers {wanted}, tokens 0..{vocab - 1}",
                todo="return windows of train.sequence + 1 tokens of the vocabulary of data.dir",
            )
        return array.astype(np.int32)

    def _failed(self, error: BaseException) -> DataError:
        return DataError(f"the token source {self._source} failed", got=describe_failure(error), todo="mend it")


def start_of(cursor: Progress) -> int:
    """Return how many windows a checkpoint's cursor says were read."""
    return cursor[UNIT][0] if UNIT in cursor and cursor[UNIT][1] == WINDOWS_MAX else 0
