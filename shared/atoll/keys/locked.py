"""A broker behind a locked door: it follows the roll.

The doors are written into the broker's store as configuration, which names public keys only. Whenever the roll or the
certificate changes, or a key ends, they are written anew and the server takes them over: it disconnects at once whoever is
not on the roll any more, and nobody else.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from atoll.base.atomic_files import write_whole
from atoll.base.errors import AtollError, on_one_line
from atoll.base.logs import get
from atoll.keys.doors import Entrant, doors
from atoll.keys.roll import KeyFolder

CONFIG: Final = "doors.conf"

log = get(__name__)


class LockedDoor:
    """Keeps the doors of one broker as the roll says."""

    def __init__(self, folder: KeyFolder, store: Path) -> None:
        """Read the roll and write the doors; raise `SettingsError` if the folder holds no keys."""
        self._folder = folder
        self.config = store / CONFIG
        self._stamp: tuple[int, ...] = ()
        self._until_s = 0.0
        self._entrants: list[Entrant] = []
        self.has_changed()

    @property
    def entrants(self) -> int:
        """Return how many identities may enter."""
        return len(self._entrants)

    def has_changed(self) -> bool:
        """Return whether the server must read its configuration again, which is then written.

        A roll that cannot be read changes nothing: a mistake of the operator must not open or close the door.
        """
        now_s, stamp = time.time(), self._stamps()
        if stamp == self._stamp and now_s < self._until_s:
            return False
        try:
            roll = self._folder.read()
        except AtollError as error:
            if not self._stamp:
                raise
            if stamp != self._stamp:
                log.warning("keys.unreadable", reason=on_one_line(str(error)), holds="the former roll")
            self._stamp = stamp
            return False
        first, former, self._entrants = not self._stamp, self._entrants, roll.entrants(now_s)
        self._until_s = roll.next_end_s(now_s)
        renewed, self._stamp = stamp[1:] != self._stamp[1:], stamp
        if not first and former == self._entrants and not renewed:
            return False
        text = doors(self._entrants, self._folder.certificate_path.absolute(), self._folder.key_path.absolute())
        self.config.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.config, text.encode())
        if not first:
            log.info("keys.changed", identities=len(self._entrants), before=len(former))
        return True

    def _stamps(self) -> tuple[int, ...]:
        """Return when the roll and the certificate were written last; 0 for what is not there."""
        return tuple(
            _written_ns(path) for path in (self._folder.roll_path, self._folder.certificate_path, self._folder.key_path)
        )


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
