"""A broker behind a locked door: it follows the roll.

The doors, and the certificate and key that they show, are written into the broker's store. Whenever the roll or the
certificate changes, or a key ends, they are written anew and the server takes them over: it disconnects at once whoever is
not on the roll any more, and nobody else. Only the connection of a leaf it lets stand (measured with nats-server 2.15), so a
hub is started again when the key of a region holds no more (`cuts_off`).

A mistake in the folder must not open or close the door. A file that cannot be used is told once, and what was there before it
goes on: a damaged roll does not keep a key from ending, and a certificate without its key does not keep a revoked identity in.
The nodes of a cluster read the same folder, or copies of it; one that does not know a newcomer yet refuses it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base import VERSION
from atoll.base.errors import AtollError, on_one_line
from atoll.base.files import write_whole
from atoll.base.logs import get
from atoll.base.wording import DAY_S
from atoll.keys.certificates import WARN_DAYS, ends_at_s, hosts_of, pin
from atoll.keys.doors import PENDING_MAX, Entrant, check_entrants, doors, remote, routes, tls
from atoll.keys.identity import HeldIdentity, write_secret
from atoll.keys.rights import ISOLATED, premerged
from atoll.keys.roll import KeyFolder, Roll, stamp_of, stamp_tags

CONFIG: Final = "doors.conf"
ROUTES: Final = "routes.conf"
LEAVES: Final = "leaves.conf"
REMOTE: Final = "remote.conf"
CERTIFICATE: Final = "broker.pem"
KEY: Final = "broker.key"
AUTHORITY: Final = "authority.pem"
KEY_WARN_DAYS: Final = 7
REFUSED_S: Final = 60.0

log = get(__name__)


@dataclass(frozen=True, slots=True)
class LockedRegion:
    """A region as its leaf must know it: its identity at the hub, the domain of its JetStream, the hub's addresses."""

    identity: HeldIdentity
    domain: str
    hubs: tuple[str, ...]


class LockedDoor:
    """Keeps the doors of one broker as the roll says."""

    def __init__(
        self,
        folder: KeyFolder,
        store: Path,
        *,
        node: bool = False,
        hub: bool = False,
        region: LockedRegion | None = None,
    ) -> None:
        """Read the roll and write the doors, also those between nodes for a `node`, and for leaves if it is a `hub` of regions.

        The leaf of a `region` lets in who is isolated, of that run: of premergers its own, of learners none that is elsewhere.
        Raises `SettingsError` if the folder holds no keys, or a roll or a certificate that cannot be used.
        """
        self._folder = folder
        self._store = store.absolute()
        self.config = self._store / CONFIG
        self.routes = self._store / ROUTES if node else None
        self.leaves = self._store / LEAVES if hub else None
        self.remote = self._store / REMOTE if region else None
        self._region = region
        self._stamp = self._stamps()
        self._roll = self._checked_roll()
        self._shown = folder.shown(time.time(), node=node)
        self._until_s = self._warned_at_s = self._keys_warned_at_s = 0.0
        self._failing = False
        self._entrants: list[Entrant] = []
        self._written: dict[Path, str] = {}
        self._former: dict[Path, str] = {}
        self._refused: dict[Path, str] = {}
        self._refused_s = 0.0
        self._again = False
        self._cuts_off = False
        self._store.mkdir(parents=True, exist_ok=True)
        self._write(self._door_files(time.time()))
        self._mind_certificate(time.time())
        self._mind_keys(time.time())

    @property
    def entrants(self) -> int:
        """Return how many identities may enter."""
        return len(self._entrants)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names and addresses in the broker's certificate."""
        return hosts_of(self._shown.certificate)

    def left_s(self, now_s: float) -> float:
        """Return for how many seconds the broker's certificate still holds."""
        return ends_at_s(self._shown.certificate) - now_s

    def has_changed(self) -> bool:
        """Return whether the server must read its configuration again, which is then written."""
        now_s, stamp = time.time(), self._stamps()
        self._mind_certificate(now_s)
        self._mind_keys(now_s)
        if stamp == self._stamp and now_s < self._until_s and not self._is_due(now_s):
            return False
        if stamp != self._stamp:
            self._stamp = stamp
            self._look(now_s)
        before, regions, wanted = names_of(self._entrants), self._region_keys(), self._door_files(now_s)
        self._cuts_off = self._cuts_off or not regions <= self._region_keys()
        if (wanted == self._written and not self._again) or (wanted == self._refused and not self._is_due(now_s)):
            return False
        try:
            self._write(wanted)
        except OSError as error:
            self._until_s = 0.0  # the next look tries again: a disk that is full gets room
            if not self._failing:
                log.warning("keys.not_written", reason=f"{error.filename}: {error.strerror}", holds="the former doors")
            self._failing = True
            return False
        self._failing, self._again, self._refused = False, False, {}
        now = names_of(self._entrants)
        log.info("keys.changed", identities=len(now), added=sorted(now - before), gone=sorted(before - now))
        return True

    def cuts_off(self) -> bool:
        """Return once whether a leaf may be connected whose key holds no more: only a new start of the server ends that."""
        cuts_off, self._cuts_off = self._cuts_off, False
        return cuts_off

    def _region_keys(self) -> set[str]:
        if self.leaves is None:
            return set()
        return {key for one in self._entrants if one.kind == "region" for key in one.keys}

    def put_back(self) -> None:
        """Write the doors again that were there before the last change, which the server has refused; try it again later."""
        self._refused, self._refused_s = self._written, time.time()
        self._write(self._former)

    def tell_again(self) -> None:
        """Say at the next look that the doors have changed: nobody knows whether the server took them over."""
        self._again, self._until_s = True, 0.0

    def _is_due(self, now_s: float) -> bool:
        """Return whether doors that the server has refused are to be tried again: nobody who was let go may stay for long."""
        return bool(self._refused) and now_s - self._refused_s >= REFUSED_S

    def _look(self, now_s: float) -> None:
        try:
            self._roll = self._checked_roll()
        except AtollError as error:
            log.warning("keys.unreadable", reason=on_one_line(str(error)), holds="the former roll")
        try:
            self._shown = self._folder.shown(now_s, node=self.routes is not None)
            self._warned_at_s = 0.0
        except AtollError as error:
            log.warning("keys.unreadable", reason=on_one_line(str(error)), holds="the former certificate")

    def _checked_roll(self) -> Roll:
        roll = self._folder.read()
        # At no moment are there more entrants than if no key ended.
        check_entrants(roll.entrants(0.0))
        return roll

    def _door_files(self, now_s: float) -> dict[Path, str]:
        self._entrants, self._until_s = self._roll.entrants(now_s), self._roll.next_end_s(now_s)
        certificate, key = self._store / CERTIFICATE, self._store / KEY
        files = {key: self._shown.key, certificate: self._shown.certificate}
        authority = self._store / AUTHORITY
        if self.leaves is not None:
            files[self.leaves] = tls(certificate, key)
        if self._region is not None and self.remote is not None:
            mine = self._region.identity
            seen = [one for one in self._entrants if one.run == mine.run and _belongs(one, self._region.domain)]
            keeper = Entrant(mine.name, mine.kind, mine.run, (mine.credentials().public,))
            self._entrants = [*seen, keeper]
            files |= {authority: mine.authority, self.remote: remote(self._region.hubs, mine.seed, authority)}
        if self.routes is not None:
            files |= {
                authority: self._shown.authority,
                self.routes: routes(certificate, key, authority, pin(self._shown.certificate)),
            }
        bound = "" if self.routes or self.leaves or self.remote else PENDING_MAX
        domain = self._region.domain if self._region is not None else ""
        stamp = stamp_tags(stamp_of(self._roll), VERSION)
        return files | {self.config: bound + stamp + doors(self._entrants, certificate, key, domain)}

    def _write(self, files: dict[Path, str]) -> None:
        for path, text in files.items():
            if path.name in (KEY, REMOTE):
                write_secret(path, text)
            else:
                write_whole(path, text.encode())
        if files != self._written:
            self._former, self._written = self._written, files

    def _mind_certificate(self, now_s: float) -> None:
        """Warn once a day that the certificate will end, or has: from then on nobody can connect."""
        days = self.left_s(now_s) / DAY_S
        if days > WARN_DAYS or now_s - self._warned_at_s < DAY_S:
            return
        self._warned_at_s = now_s
        log.warning(
            "keys.certificate_ends",
            days=round(days, 1),
            todo="make another: atoll keys certificate FOLDER, with --host for each name; nothing is restarted",
        )

    def _mind_keys(self, now_s: float) -> None:
        """Warn once a day of identities whose last key will end: from then on they are kept out."""
        if now_s - self._keys_warned_at_s < DAY_S:
            return
        self._keys_warned_at_s = now_s
        if names := self._roll.ending(now_s, KEY_WARN_DAYS * DAY_S):
            log.warning(
                "keys.ending",
                identities=names,
                days=KEY_WARN_DAYS,
                todo="give them others while they train: atoll keys rotate FOLDER NAME --run RUN",
            )

    def _stamps(self) -> tuple[tuple[int, ...], ...]:
        """Return what tells one content of the files from another; a coarse clock gives two of them one time."""
        folder = self._folder
        paths = (folder.roll_path, folder.certificate_path, folder.key_path, folder.authority_path)
        return tuple(_stamp(path) for path in paths)


def _belongs(one: Entrant, region: str) -> bool:
    if one.kind == "premerger":
        return premerged(one.name) == region
    return one.may_be_in(region) if one.kind == "learner" else one.kind in ISOLATED


def names_of(entrants: list[Entrant]) -> set[str]:
    """Return the runs and names of those who may enter."""
    return {f"{one.run}/{one.name}" for one in entrants}


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        seen = path.stat()
    except OSError:
        return ()
    return seen.st_mtime_ns, seen.st_ino, seen.st_size
