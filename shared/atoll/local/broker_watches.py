"""Two states in which a server lives and does not serve; each is mended by a restart, which loses nothing.

**Its disk was full.** It refuses every write, also when there is room again, because it remembers the first error of a file
until it restarts. It has acknowledged nothing since.

**It is frozen**: stopped, or hung. It holds its connections and says nothing. As a node of a cluster it does harm when it goes
on: in its eyes every leader has been silent, so it stands for election in every group, in a newer term. That unseats all the
leaders that served meanwhile, and commits pause for another 4 to 9 seconds. A node that is started anew listens first. Silence
alone proves nothing: strangers may crowd the door, or our own question may fail. A frozen server has no processor time either.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.base.logs import get
from atoll.bus.server_log import FULL, LogReader, own_words

log = get(__name__)

ROOM_BYTES: Final = 64 << 20
PROBE_EVERY_S: Final = 2.0
FROZEN_S: Final = 8.0
AGAIN_S: Final = 120.0
"""A server that is only slow, on a machine with too much to do, gets no faster by restarts."""


class RoomWatch:
    """Tells when a server that ran out of disk has room again, by the server's own words in its log."""

    def __init__(self, log_path: Path) -> None:
        """Begin at the present end of the log."""
        self._log = LogReader(log_path)
        self._folder = log_path.parent
        self._is_full = False

    def is_back(self) -> bool:
        """Return True once after each time that the disk was full, as soon as it has `ROOM_BYTES` of room."""
        if not self._is_full and any(FULL in word for word in own_words(self._log.news())):
            self._is_full = True
            todo = f"make {ROOM_BYTES >> 20} MiB of room in {self._folder}: nothing is lost, and the server starts again then"
            log.error("broker.disk_full", free_bytes=self._free_bytes(), todo=todo)
        if not self._is_full or self._free_bytes() < ROOM_BYTES:
            return False
        self._is_full = False
        return True

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free


def processor_s(pid: int) -> float | None:
    """Return the processor time that a process has had, in seconds; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, LookupError):
        return None


class SilenceWatch:
    """Tells when a server has said nothing and done nothing for `FROZEN_S`, and then not again for `AGAIN_S`."""

    def __init__(
        self,
        asked: Callable[[], bool | None],
        worked_s: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with a server that answers.

        Args:
            asked: returns whether it answers now, None if it could not be asked.
            worked_s: returns its processor time, None if nobody knows.
            clock: seconds.
        """
        self._asked = asked
        self._worked_s = worked_s
        self._clock = clock
        self._awake_s = self._probed_s = clock()
        self._work_s: float | None = None
        self._told_s = float("-inf")
        self.answers = True

    def is_frozen(self) -> bool:
        """Ask the server, if it is time to; return True if it should be started anew."""
        now_s = self._clock()
        if now_s - self._probed_s >= PROBE_EVERY_S:
            self._probed_s = now_s
            was_silent, self.answers = not self.answers, self._asked() is not False
            work_s = self._worked_s()
            # We may have been frozen with it: its silence counts from the first question that it leaves open.
            if self.answers or not was_silent or work_s is None or work_s != self._work_s:
                self._awake_s, self._work_s = now_s, work_s
        if self._clock() - self._awake_s < FROZEN_S or now_s - self._told_s < AGAIN_S:
            return False
        self._told_s, self._awake_s, self.answers = now_s, now_s, True
        return True
