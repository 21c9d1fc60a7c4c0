"""Keeps the present session's entry in `run.json` true while the session goes on.

The file is written at the beginning, every few seconds and at the end. So the folder of a run whose `up` was killed still
knows how much was trained and committed (`atoll.local.run_store` compares the broker's store with it).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Final

import atoll
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, StorageFull, redact
from atoll.base.machine import commit
from atoll.local.options import UpPlan, kept_settings
from atoll.run.folder import EMBEDDED, RUNNING, RebuiltRecord, RunFile, RunFolder, SessionRecord
from atoll.run.history import History
from atoll.settings import named_code

SAVE_S: Final = 10.0


class Journal:
    """Writes one session of a run into the run's folder; `end` notes how the session came to its end."""

    def __init__(self, up: UpPlan, folder: RunFolder, view: History, clock: Clock) -> None:
        self._folder = folder
        self._view = view
        self._clock = clock
        self._learners = frozenset(up.learners)
        self._ended_lives: dict[str, int] = {}
        self._unsaved = False
        self._saved_s = clock.monotonic()
        self.began_s = clock.monotonic()
        self._session = SessionRecord(began_at_s=clock.wall())
        self.file = up.former or RunFile(
            run=up.settings.run,
            learners=len(up.learners),
            settings={},
            broker=EMBEDDED if up.broker is None else redact(up.broker),
            corpus=[str(path.absolute()) for path in up.settings.up.corpus],
            created_at_s=clock.wall(),
            begun=False,
        )
        self.file.learners, self.file.settings = len(up.learners), kept_settings(up)
        self.file.atoll, self.file.commit = atoll.__version__, commit()
        self.file.sessions.append(self._session)

    def begin(self) -> None:
        """Note, before anything of the run starts, that the run has begun."""
        self.file.begun = True
        self.save()

    def end(self, how: str) -> None:
        """Note how the session ended."""
        self._session.ended = how

    def fail(self) -> None:
        """Note that the session failed, unless its training has ended: what fails afterwards changes nothing of that."""
        if self._session.ended == RUNNING:
            self._session.ended = "failed"

    def note_rebuilt(self, record: RebuiltRecord) -> None:
        """Note that the run went back to a checkpoint: later commits no longer belong to it."""
        self._session.rebuilt = record
        self.file.tokens, self.file.versions = record.tokens, record.versions
        self.save()

    def save(self) -> None:
        """Write `run.json` as things stand. Raises `StorageFull` without room."""
        self._session.wall_s = self._clock.monotonic() - self.began_s
        self._session.bytes_up, self._session.bytes_down = self._view.moved_bytes
        self.file.tokens = max(self.file.tokens, self._view.run_tokens)
        self.file.versions = self.commits
        self._folder.save(self.file)

    @property
    def commits(self) -> int:
        """Return how many commits of all fragments were heard of, those of earlier sessions included."""
        return max(self.file.versions, sum(f.version for f in self._view.fragments.values()))

    def look(self, say: Callable[[str], None]) -> None:
        """Write as `keep` does, if it is time."""
        if self._clock.monotonic() - self._saved_s >= SAVE_S:
            self._saved_s = self._clock.monotonic()
            self.keep(say)

    def keep(self, say: Callable[[str], None]) -> None:
        """Write as `save` does; `say` once when that cannot be done: it ends nothing that goes on without it."""
        try:
            self.save()
        except AtollError as error:
            if not self._unsaved:
                full = isinstance(error, StorageFull)
                means = "nothing is merged or written until there is room" if full else "run.json stays as it is"
                say(f"{error}\nlearners go on; {means}")
            self._unsaved = True
        else:
            self._unsaved = False

    def note_end(self, name: str) -> bool:
        """Note that a child's life has ended; return whether it took a step, if it was a learner's: else it proved nothing."""
        learner = self._view.learners.get(name)
        life = None if learner is None else learner.latest
        incarnation = 0 if life is None else life.incarnation
        former, self._ended_lives[name] = self._ended_lives.get(name, 0), incarnation
        return name not in self._learners or (life is not None and incarnation > former and life.steps > 0)


def continuation(file: RunFile, out: Path) -> str:
    """Return the command that continues the run in a folder, as a line below what is said of it; "" if it is finished.

    The folder keeps the run's settings, so nothing else needs to be said again, but the address of a broker of yours, and
    code of yours: no file names that.
    """
    target = int(file.settings.get("protocol.tokens_target", 0))
    if 0 < target <= file.tokens:
        return ""
    broker = "" if file.broker == EMBEDDED else " --broker URL"
    again = (shlex.quote(f"{name}={value}") for name, value in named_code(file.settings).items())
    code = "".join(f" --set {one}" for one in again)
    return f"  to continue:   atoll up --out {shlex.quote(str(out))}{broker}{code}"
