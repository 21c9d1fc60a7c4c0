"""The operator's folder of keys: the roll of who may enter, the authority, and the identities to hand out.

    roll.json                        names, kinds, runs and public keys; nothing secret
    authority.pem, authority.key     the authority; the key is secret
    broker.pem, broker.key           the broker's certificate; the key is secret
    root.key                         the key that vouches for every identity's signatures; secret, and none of the broker's
    identities/<run>/<name>.toml     what is handed to its holder, and may be deleted then

The broker reads `roll.json` and its own certificate, and never an identity or the root: those need not be on its host. It looks
at the roll all the time: a change of it takes effect at once, for those that are connected, too.

Each change reads the roll, changes it and writes it whole, while no other process may (`lock`). Replacing a key leaves the old
one valid for a while, so that a learner that trains can be given the new one in peace.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec

from atoll.base.atomic_files import hold, write_whole
from atoll.base.errors import EnvironmentFault, InUse, SettingsError
from atoll.keys.certificates import Certified, broker_certificate, new_authority
from atoll.keys.doors import Entrant
from atoll.keys.identity import FOLDER_MODE, HeldIdentity, new_key, write_identity, write_secret
from atoll.keys.rights import EVERY_RUN, Kind
from atoll.keys.signatures import Root, Voucher, signing_public
from atoll.wire.subjects import token

OPERATOR: Final = "operator"
ROLL: Final = "roll.json"
ROOT: Final = "root.key"
ENTRIES_MAX: Final = 100_000
_HOST: Final = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)
_PUBLIC: Final = r"^U[A-Z2-7]{55}$"


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One public key; times in seconds since the epoch, 0 for no end."""

    public: Annotated[str, msgspec.Meta(pattern=_PUBLIC)]
    made_at_s: float
    until_s: float = 0.0

    def holds(self, now_s: float) -> bool:
        """Return whether the key still opens the door."""
        return self.until_s == 0.0 or now_s < self.until_s


class RollEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One identity of the roll; a revoked one has no keys and keeps its name."""

    name: str
    kind: Kind
    run: str
    keys: tuple[KeyEntry, ...]
    founds: bool = False
    revoked_at_s: float = 0.0

    def state(self, now_s: float) -> str:
        """Return `valid`, `revoked` or `expired`."""
        if self.revoked_at_s:
            return "revoked"
        return "valid" if any(key.holds(now_s) for key in self.keys) else "expired"


class Roll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everybody who was ever let in, by run and name."""

    entries: Annotated[tuple[RollEntry, ...], msgspec.Meta(max_length=ENTRIES_MAX)] = ()

    def of(self, run: str, name: str) -> RollEntry | None:
        """Return one entry."""
        return next((one for one in self.entries if (one.run, one.name) == (run, name)), None)

    def replaced(self, entry: RollEntry) -> Roll:
        """Return the roll with `entry` in place of the one of its name, or added, in order."""
        others = [one for one in self.entries if (one.run, one.name) != (entry.run, entry.name)]
        return Roll(tuple(sorted((*others, entry), key=lambda one: (one.run, one.name))))

    def entrants(self, now_s: float) -> list[Entrant]:
        """Return who may enter now."""
        return [
            Entrant(one.name, one.kind, one.run, keys, founds=one.founds)
            for one in self.entries
            if (keys := tuple(key.public for key in one.keys if key.holds(now_s))) and not one.revoked_at_s
        ]

    def next_end_s(self, now_s: float) -> float:
        """Return when the next key ends, infinity if none does."""
        return min(
            (key.until_s for one in self.entries for key in one.keys if key.until_s > now_s), default=float("inf")
        )


class KeyFolder:
    """The operator's folder; see the module."""

    def __init__(self, path: Path) -> None:
        """Refer to a folder; nothing is read yet."""
        self.path = path
        self.certificate_path = path / "broker.pem"
        self.key_path = path / "broker.key"

    @property
    def roll_path(self) -> Path:
        """Return where the roll is."""
        return self.path / ROLL

    def create(self, hosts: Sequence[str], now_s: float) -> Path:
        """Make the folder, an authority, a broker's certificate for `hosts` and an operator; return the operator's identity.

        Raises:
            SettingsError: the folder holds keys already, or a host is neither a name nor an address.
        """
        check_hosts(hosts)
        if self.roll_path.exists():
            raise SettingsError(
                "this folder holds keys already",
                got=self.path,
                todo="add to them (`atoll keys add`), or choose another folder",
            )
        with _told(self.path):
            self.path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            write_whole(self.path / ".gitignore", b"*\n")
            authority = new_authority(f"Atoll authority of {hosts[0]}")
            self._write_certified("authority", authority)
            self._write_certified("broker", broker_certificate(authority, hosts))
            write_secret(self.path / ROOT, f"{Root.new_secret()}\n")
            self._write_roll(Roll())
        return self.add(OPERATOR, "operator", EVERY_RUN, now_s)

    def certify(self, hosts: Sequence[str]) -> None:
        """Replace the broker's certificate by one for `hosts`."""
        check_hosts(hosts)
        with self._changing():
            authority = Certified(*(self._text(f"authority.{end}") for end in ("pem", "key")))
            self._write_certified("broker", broker_certificate(authority, hosts))

    def read(self) -> Roll:
        """Return the roll.

        Raises:
            SettingsError: there is none, or it is damaged.
        """
        try:
            return msgspec.json.decode(self.roll_path.read_bytes(), type=Roll)
        except FileNotFoundError:
            raise SettingsError(
                "this folder holds no keys",
                got=self.path,
                todo="make them with `atoll keys new`, or correct the folder",
            ) from None
        except msgspec.DecodeError as error:
            raise SettingsError("the roll of keys is damaged", got=f"{self.roll_path}: {error}") from None
        except OSError as error:
            raise EnvironmentFault(
                "the roll of keys cannot be read", got=f"{self.roll_path}: {error.strerror}"
            ) from error

    def add(self, name: str, kind: Kind, run: str, now_s: float, *, founds: bool = False, until_s: float = 0.0) -> Path:
        """Let a new identity in and return the file that makes its holder that one.

        Raises:
            SettingsError: the name or run cannot be part of a subject, or the name is taken.
        """
        token(name, "name of an identity")
        if kind == "operator":
            run = EVERY_RUN
        else:
            token(run, "run id")
        with self._changing():
            roll = self.read()
            if (there := roll.of(run, name)) is not None:
                raise SettingsError(
                    f"run {run!r} has an identity of this name",
                    got=f"{there.kind} {name!r}, {there.state(now_s)}",
                    todo="choose another name, or give it a new key (`atoll keys rotate`)",
                )
            entry = RollEntry(name, kind, run, (), founds or kind == "operator")
            return self._issue(roll, entry, now_s, until_s)

    def rotate(self, name: str, run: str, now_s: float, *, overlap_s: float, until_s: float = 0.0) -> Path:
        """Give an identity a new key and return its file; former keys end after `overlap_s`. A revoked one is let in again."""
        with self._changing():
            roll, entry = self._found(name, run)
            end_s = now_s + overlap_s
            former = tuple(
                msgspec.structs.replace(key, until_s=min(key.until_s or end_s, end_s))
                for key in entry.keys
                if key.holds(now_s)
            )
            kept = former if overlap_s > 0.0 else ()
            return self._issue(roll, msgspec.structs.replace(entry, keys=kept, revoked_at_s=0.0), now_s, until_s)

    def revoke(self, name: str, run: str, now_s: float) -> None:
        """Let an identity in no more; its keys are forgotten, its name is kept."""
        with self._changing():
            roll, entry = self._found(name, run)
            self._write_roll(roll.replaced(msgspec.structs.replace(entry, keys=(), revoked_at_s=now_s)))
            self.identity_path(entry).unlink(missing_ok=True)

    def identity_path(self, entry: RollEntry) -> Path:
        """Return where the identity of an entry is written."""
        home = self.path / "identities"
        return (home if entry.run == EVERY_RUN else home / entry.run) / f"{entry.name}.toml"

    def _issue(self, roll: Roll, entry: RollEntry, now_s: float, until_s: float) -> Path:
        """Write a new key of an entry: first the identity, then the roll, so that no key without a holder opens the door."""
        pair = new_key()
        path, authority = self.identity_path(entry), self._text("authority.pem")
        root = self._root()
        voucher = root.vouch(
            Voucher(entry.name, entry.kind, entry.run, signing_public(pair.seed), entry.founds, until_s)
        )
        write_identity(
            path,
            HeldIdentity(
                entry.name, entry.kind, entry.run, pair.seed, authority, root.public, voucher, founds=entry.founds
            ),
        )
        entry = msgspec.structs.replace(entry, keys=(*entry.keys, KeyEntry(pair.public, now_s, until_s)))
        self._write_roll(roll.replaced(entry))
        return path

    def _root(self) -> Root:
        try:
            return Root(self._text(ROOT).strip())
        except ValueError:
            raise SettingsError(
                "the root key is damaged", got=self.path / ROOT, todo="restore it from a copy: every identity trusts it"
            ) from None

    def _found(self, name: str, run: str) -> tuple[Roll, RollEntry]:
        roll = self.read()
        entry = roll.of(run, name) or roll.of(EVERY_RUN, name)
        if entry is None:
            names = ", ".join(one.name for one in roll.entries if one.run in (run, EVERY_RUN))
            raise SettingsError(f"run {run!r} has no identity of this name", got=name, allowed=names or "it has none")
        return roll, entry

    def _write_roll(self, roll: Roll) -> None:
        tree = msgspec.to_builtins(roll)
        write_whole(self.roll_path, (json.dumps(tree, indent=1) + "\n").encode())

    def _write_certified(self, name: str, certified: Certified) -> None:
        write_secret(self.path / f"{name}.key", certified.key)
        write_whole(self.path / f"{name}.pem", certified.certificate.encode())

    def _text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the folder while it is changed."""
        if not self.path.is_dir():
            self.read()
        with _told(self.path):
            lock = hold(self.path / "lock")
            if lock is None:
                raise InUse("another command changes these keys", got=self.path, todo="wait until it is done")
            with lock:
                yield


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise `SettingsError` for what is neither a host name nor an address."""
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if not _HOST.fullmatch(host):
                raise SettingsError(
                    "this is no name of a host",
                    got=repr(host),
                    allowed="a name (hub.example.org) or an IP address",
                    todo="correct --host",
                ) from None


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Tell what the disk refuses as a fault of the machine."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            "the folder of keys cannot be used",
            got=f"{error.filename or path}: {error.strerror}",
            allowed="a folder that we may write to, with room",
        ) from error
