"""The operator's folder of keys: the roll of who may enter, the authority, and the identities to hand out.

    roll.json                        names, kinds, runs and public keys; nothing secret
    authority.pem, authority.key     the authority; the key is secret
    broker.pem, broker.key           the broker's certificate; the key is secret
    root.key                         the key that vouches for every identity's signatures; secret, and none of the broker's
    identities/<run>/<name>.toml     what is handed to its holder, and may be deleted then

The broker reads `roll.json` and its own certificate, and looks at the roll all the time: a change takes effect at once.
Identities and the root need not be on its host. Each change reads the roll, changes it and writes it whole, under a lock.
Replacing a key leaves the old one valid for a while, so that a learner that trains can be given the new one in peace.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from atoll.base.errors import AtollError, EnvironmentFault, InUse, SettingsError
from atoll.base.files import TEXT_BYTES_MAX, NotRegular, NotText, TooLarge, hold, read_file, read_text, write_whole
from atoll.base.parsing import parsed
from atoll.base.wording import DAY_S
from atoll.keys.certificates import (
    Certified,
    broker_certificate,
    check_authority,
    check_hosts,
    check_shown,
    hosts_of,
    new_authority,
    serves_nodes,
)
from atoll.keys.doors import Entrant
from atoll.keys.identity import FOLDER_MODE, HeldIdentity, new_key, write_identity, write_secret
from atoll.keys.rights import EVERY_RUN, Kind, check_name
from atoll.keys.signatures import Root, Voucher, signing_public
from atoll.wire.subjects import HUB, REGION_NAMES, is_region_name

OPERATOR: Final = "operator"
BROKER: Final = "broker"
IDENTITY: Final = "identity.toml"
FOUNDS: Final = ("learner", "region")
LOOPBACK: Final = ("localhost", "127.0.0.1")
NOWHERE: Final[Mapping[str, str]] = {}
RENEWED_S: Final = 30 * DAY_S
"""A region's certificate that ends within so long is replaced."""
ROLL: Final = "roll.json"
ROOT: Final = "root.key"
AUTHORITY_KEY: Final = "authority.key"
ENTRIES_MAX: Final = 100_000
_PUBLIC: Final = r"^U[A-Z2-7]{55}$"
_STAMP_DIGITS: Final = 8
_ROLL_TAG: Final = re.compile(r"roll:(\d{1,12})-([0-9a-f]{8})")
_SOFTWARE_TAG: Final = re.compile(r"atoll:([0-9a-z.+-]{1,64})")


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One public key; times in seconds since the epoch, 0 for no end."""

    public: Annotated[str, msgspec.Meta(pattern=_PUBLIC)]
    made_at_s: float
    until_s: float = 0.0

    def holds(self, now_s: float) -> bool:
        """Return whether the key still opens the door."""
        return self.until_s == 0.0 or now_s < self.until_s


class RollEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One identity of the roll; a revoked one has no keys and keeps its name."""

    name: str
    kind: Kind
    run: str
    keys: tuple[KeyEntry, ...]
    founds: bool = False
    revoked_at_s: float = 0.0
    region: str = ""
    """Where a learner is: in this region, or at the `HUB`; empty where nobody has said it."""
    moved_at_s: float = 0.0
    """When that was changed last."""

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
            Entrant(one.name, one.kind, one.run, keys, founds=one.founds, region=one.region)
            for one in self.entries
            if (keys := tuple(key.public for key in one.keys if key.holds(now_s))) and not one.revoked_at_s
        ]

    def next_end_s(self, now_s: float) -> float:
        """Return when the next key ends, infinity if none does."""
        return min((key.until_s for one in self.entries for key in one.keys if key.until_s > now_s), default=inf)

    def ending(self, now_s: float, within_s: float) -> list[str]:
        """Return the runs and names of those whose last key ends within `within_s`."""
        valid = [one for one in self.entries if one.state(now_s) == "valid"]
        return [
            f"{one.run}/{one.name}" for one in valid if max(key.until_s or inf for key in one.keys) - now_s <= within_s
        ]


@dataclass(frozen=True, slots=True, order=True)
class RollStamp:
    """Stamp of the roll that a broker follows: its last change, in whole seconds since the epoch, and a digest of its entries.

    A roll is copied to the machine of every node, and a copy may be forgotten. So each server reports the stamp of its roll,
    and the version of Atoll that has started it, as tags. The digest tells two rolls apart that were changed at one time.
    """

    changed_s: int
    digest: str


def stamp_of(roll: Roll) -> RollStamp:
    """Return the stamp of a roll."""
    times = [max(entry.revoked_at_s, entry.moved_at_s) for entry in roll.entries]
    times += [key.made_at_s for entry in roll.entries for key in entry.keys]
    said = "\n".join(
        repr(
            (
                entry.run,
                entry.name,
                entry.kind,
                entry.founds,
                entry.revoked_at_s,
                entry.region,
                *((key.public, key.until_s) for key in entry.keys),
            )
        )
        for entry in roll.entries
    )
    return RollStamp(int(max(times, default=0.0)), hashlib.sha256(said.encode()).hexdigest()[:_STAMP_DIGITS])


def stamp_tags(stamp: RollStamp, software: str) -> str:
    """Return the line of nats-server's configuration that has it wear the stamp and a version of Atoll."""
    return f'server_tags: ["roll:{stamp.changed_s}-{stamp.digest}", "atoll:{software.lower()}"]\n'


def read_tags(tags: Iterable[str]) -> tuple[RollStamp | None, str]:
    """Return the stamp and the version that a server's tags tell: None and "" where they do not."""
    stamp, software = None, ""
    for tag in tags:
        if (roll := _ROLL_TAG.fullmatch(tag)) is not None:
            stamp = RollStamp(int(roll[1]), roll[2])
        elif (version := _SOFTWARE_TAG.fullmatch(tag)) is not None:
            software = version[1]
    return stamp, software


class Shown(NamedTuple):
    """Proof of a broker: its certificate and the key of it, and nodes the authority's certificate too, as PEM texts."""

    certificate: str
    key: str
    authority: str = ""


def check_place(kind: Kind, region: str) -> None:
    """Raise `SettingsError` unless an identity of this kind can be said to be there."""
    if region and kind != "learner":
        raise SettingsError(
            "only a learner is in a region", got=f"region {region!r} of kind {kind}", todo="leave the region away"
        )
    if region and region != HUB and not is_region_name(region):
        raise SettingsError(
            "a learner cannot be there",
            got=repr(region),
            allowed=f"{HUB}, for who connects to the hub itself, or the name of a region: {REGION_NAMES}",
        )


class KeyFolder:
    """The operator's folder; see the module."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.roll_path = path / ROLL
        self.certificate_path = path / "broker.pem"
        self.key_path = path / "broker.key"
        self.authority_path = path / "authority.pem"

    def create(self, hosts: Sequence[str], now_s: float) -> Path:
        """Make the folder, an authority, a broker's certificate for `hosts` and an operator; return the operator's identity."""
        check_hosts(hosts)
        if self.roll_path.exists():
            raise SettingsError(
                "this folder holds keys already",
                got=self.path,
                todo="add to them (`atoll keys add`), or choose another folder",
            )
        with _disk_faults(self.path):
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
        with self._changing():
            self._write_certified("broker", self.certified(hosts))

    def certified(self, hosts: Sequence[str]) -> Certified:
        """Return a new certificate of a broker at `hosts`, signed by this folder's authority; nothing is written."""
        check_hosts(hosts)
        authority = Certified(self._authority(), self._text(AUTHORITY_KEY))
        try:
            return broker_certificate(authority, hosts)
        except ValueError as error:
            raise SettingsError(
                "the authority of this folder signs no certificate",
                got=f"{self.path / AUTHORITY_KEY}: {error}",
                allowed="the key that `atoll keys new` made with authority.pem, without a passphrase",
                todo="restore it from a copy; or have your own authority sign, and replace broker.pem and broker.key",
            ) from None

    def read(self) -> Roll:
        """Return the roll; raise `SettingsError` if there is none, or it is damaged."""
        try:
            return parsed(read_file(self.roll_path, TEXT_BYTES_MAX), Roll)
        except FileNotFoundError:
            raise SettingsError(
                "this folder holds no keys",
                got=self.path,
                todo="make them with `atoll keys new`, or correct the folder",
            ) from None
        except msgspec.DecodeError as error:
            raise SettingsError("the roll of keys is damaged", got=f"{self.roll_path}: {error}") from None
        except (NotRegular, TooLarge) as error:
            raise SettingsError("the roll of keys is damaged", got=f"{self.roll_path}: {error.strerror}") from None
        except OSError as error:
            raise EnvironmentFault(
                "the roll of keys cannot be read", got=f"{self.roll_path}: {error.strerror}"
            ) from error

    def shown(self, now_s: float, *, node: bool = False) -> Shown:
        """Return what the broker shows at its door, and to the others if it is a `node`; raise `SettingsError` if it cannot."""
        certificate, key = self._text(self.certificate_path.name), self._text(self.key_path.name)
        try:
            check_shown(Certified(certificate, key), now_s)
        except ValueError as error:
            raise SettingsError(
                "the broker's certificate cannot be used",
                got=f"{self.certificate_path}, {self.key_path}: {error}",
                allowed="a certificate in PEM that holds, and its own key without a passphrase",
                todo="replace both files, or make new ones (`atoll keys certificate`)",
            ) from None
        if not node:
            return Shown(certificate, key)
        if not self.authority_path.is_file():
            raise SettingsError(
                "nodes of a cluster need the certificate of their authority",
                got=f"no {self.authority_path}",
                todo="copy authority.pem from the operator's folder",
            )
        if not serves_nodes(certificate):
            raise SettingsError(
                "the broker's certificate is for servers alone, and nodes of a cluster are clients of each other, too",
                got=self.certificate_path,
                allowed="one for clientAuth and serverAuth",
                todo="make another (`atoll keys certificate`), or bring one that says so",
            )
        return Shown(certificate, key, self._authority())

    def add(  # noqa: PLR0913  (one for each column of the roll)
        self,
        name: str,
        kind: Kind,
        run: str,
        now_s: float,
        *,
        founds: bool = False,
        until_s: float = 0.0,
        region: str = "",
    ) -> Path:
        """Let a new identity in and return the file that makes its holder that one; `region` says where a learner is."""
        run = EVERY_RUN if kind == "operator" else run
        check_name(kind, run, name)
        check_place(kind, region)
        with self._changing():
            roll = self.read()
            if (there := roll.of(run, name)) is not None:
                raise SettingsError(
                    f"run {run!r} has an identity of this name",
                    got=f"{there.kind} {name!r}, {there.state(now_s)}",
                    todo="choose another name, or give it a new key (`atoll keys rotate`)",
                )
            entry = RollEntry(name, kind, run, (), founds or kind == "operator", region=region)
            return self._issue(roll, entry, now_s, until_s)

    def rotate(
        self, name: str, run: str, now_s: float, *, overlap_s: float, until_s: float = 0.0, readmit: bool = False
    ) -> Path:
        """Give an identity a new key and return its file; former keys end after `overlap_s`."""
        with self._changing():
            roll, entry = self._found(name, run)
            if entry.revoked_at_s and not readmit:
                raise SettingsError(
                    "this identity is revoked, and a new key would let it in again",
                    got=f"{entry.kind} {name!r} of run {entry.run!r}",
                    todo="give --readmit if that is meant",
                )
            end_s = now_s + overlap_s
            former = tuple(
                msgspec.structs.replace(key, until_s=min(key.until_s or end_s, end_s))
                for key in entry.keys
                if key.holds(now_s)
            )
            kept = former if overlap_s > 0.0 else ()
            return self._issue(roll, msgspec.structs.replace(entry, keys=kept, revoked_at_s=0.0), now_s, until_s)

    def move(self, name: str, run: str, region: str, now_s: float) -> None:
        """Say where a learner is from now on: in a region, at the `HUB`, or with "" that nobody knows."""
        with self._changing():
            roll, entry = self._found(name, run)
            check_place(entry.kind, region)
            self._write_roll(roll.replaced(msgspec.structs.replace(entry, region=region, moved_at_s=now_s)))

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
        path, authority = self.identity_path(entry), self._authority()
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

    def _authority(self) -> str:
        text = self._text(self.authority_path.name)
        try:
            check_authority(text)
        except ValueError:
            raise SettingsError(
                "the certificate of the authority is damaged",
                got=self.authority_path,
                allowed="a certificate in PEM",
                todo="restore it from a copy: identities with another one refuse the broker",
            ) from None
        return text

    def _text(self, name: str) -> str:
        path = self.path / name
        try:
            return read_text(path)
        except FileNotFoundError:
            raise SettingsError(
                "a file of this folder of keys is missing", got=f"no {path}", todo=f"restore {name} from a copy"
            ) from None
        except (NotRegular, NotText, TooLarge) as error:
            raise SettingsError(
                "a file of this folder of keys is damaged",
                got=f"{path}: {'no text' if isinstance(error, NotText) else error.strerror}",
                todo=f"restore {name} from a copy",
            ) from None
        except OSError as error:
            raise EnvironmentFault(
                "a file of this folder of keys cannot be read", got=f"{path}: {error.strerror}"
            ) from error

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the folder while it is changed; only the operator's own is, with the root key in it."""
        if not self.roll_path.exists():
            self.read()
        if not (self.path / ROOT).exists():
            raise SettingsError(
                "this folder of keys has no root key, so it is a copy for a broker",
                got=f"no {self.path / ROOT}",
                allowed="changes in the operator's own folder",
                todo="change that one and copy it again; if this is the operator's, restore root.key from a backup",
            )
        with _disk_faults(self.path):
            lock = hold(self.path / "lock")
            if lock is None:
                raise InUse("another command changes these keys", got=self.path, todo="wait until it is done")
            with lock:
                yield


@contextmanager
def _disk_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            "the folder of keys cannot be used",
            got=f"{error.filename or path}: {error.strerror}",
            allowed="a folder that we may write to, with room",
        ) from error


# Each program finds its own identity in a folder of its own, and the broker its door: what containers mount.
#
#     INTO/<name>/identity.toml                                      one identity, and nothing else
#     INTO/broker/roll.json, broker.pem, broker.key, authority.pem   all that a broker needs of the operator's folder
#     INTO/<region>/identity.toml, and the same four names           all that the leaf of a region needs
#
# The certificate of a region is its own: a holder of the key of the hub's is a node of the hub's cluster (`doors.routes`) and
# can pass for the hub. The operator's folder, with the root key, is on no other program's mount. The copies are made as often
# as one likes: a file that has not changed is not touched, so a broker that follows its door does not notice.


def ensure(
    folder: KeyFolder,
    run: str,
    kinds: Mapping[str, Kind],
    hosts: Sequence[str],
    founders: Collection[str] | None = None,
    regions: Mapping[str, str] = NOWHERE,
) -> None:
    """Make the folder of keys, and the identities of a run that are not on its roll yet; `kinds` by name.

    Those learners may found the run that `founders` names, themselves or through their region; without it all may. `regions`
    says of learners where they are, also of those on the roll. An identity that was revoked stays so. Raises `SettingsError`
    if a name is on the roll as another kind.
    """
    now_s = time.time()
    if not folder.roll_path.exists():
        folder.create(hosts, now_s)
    roll = folder.read()
    for name, kind in kinds.items():
        there = roll.of(run, name) or roll.of(EVERY_RUN, name)
        if there is None:
            founds = kind in FOUNDS and (founders is None or name in founders)
            folder.add(name, kind, run, now_s, founds=founds, region=regions.get(name, ""))
        elif there.kind != kind:
            raise SettingsError(
                f"the roll has {name!r} as another kind", got=kind, allowed=there.kind, todo="choose another name"
            )
        elif there.region != regions.get(name, there.region):
            folder.move(name, run, regions[name], now_s)


def hand_out(
    folder: KeyFolder, run: str, names: Iterable[str], into: Path, regions: Mapping[str, Sequence[str]] | None = None
) -> list[Path]:
    """Copy each identity of a run into its holder's folder, and doors into those of brokers; return the files that changed.

    `regions` says by which hosts the broker of each region is reached.
    """
    changed = hand_out_identities(folder, run, names, into)
    for name, hosts in (regions or {}).items():
        changed += hand_out_region_door(folder, name, hosts, into)
    return [*changed, *hand_out_door(folder, into)]


def hand_out_identities(folder: KeyFolder, run: str, names: Iterable[str], into: Path) -> list[Path]:
    """Copy each identity of a run into its holder's folder; return the files that changed. That of a revoked one goes."""
    changed: list[Path] = []
    roll = folder.read()
    for name in names:
        if name == BROKER:
            raise SettingsError(
                "the folder of this name is the broker's", got=name, todo="choose another name for the identity"
            )
        changed += hand_out_identity(folder, run, name, into / name, roll)
    return changed


def hand_out_identity(folder: KeyFolder, run: str, name: str, holder: Path, roll: Roll | None = None) -> list[Path]:
    """Copy an identity into its holder's folder; return the file if it changed. That of a revoked one goes.

    One that was deleted here, as its operator is told to do once its holder has it, stays where it is.
    """
    issued, held = folder.path / "identities" / run / f"{name}.toml", _place(holder) / IDENTITY
    entry = (roll or folder.read()).of(run, name)
    if entry is None or entry.revoked_at_s:
        held.unlink(missing_ok=True)
    elif issued.exists() and _differs(issued, held):
        write_secret(held, read_text(issued))
        return [held]
    return []


def hand_out_door(folder: KeyFolder, into: Path) -> list[Path]:
    """Copy the door into the broker's folder; return the files that changed."""
    door = _place(into / BROKER)
    changed = _copy(folder.authority_path, door)
    if _differs(folder.key_path, door / folder.key_path.name):
        write_secret(door / folder.key_path.name, read_text(folder.key_path))
        changed.append(door / folder.key_path.name)
    # The roll is last: a broker that sees a new roll finds the certificate beside it.
    return [*changed, *_copy(folder.certificate_path, door), *_copy(folder.roll_path, door)]


def hand_out_region_door(folder: KeyFolder, name: str, hosts: Sequence[str], into: Path) -> list[Path]:
    """Have a door in the folder of a region whose broker is reached at `hosts`, and on its machine; return what changed."""
    door, hosts = KeyFolder(_place(into / name)), tuple(dict.fromkeys((*hosts, *LOOPBACK)))
    changed = _copy(folder.authority_path, door.path)
    if changed or not _serves(door, hosts):
        own = folder.certified(hosts)
        write_secret(door.key_path, own.key)
        write_whole(door.certificate_path, own.certificate.encode())
        changed += [door.key_path, door.certificate_path]
    return [*changed, *_copy(folder.roll_path, door.path)]


def _serves(door: KeyFolder, hosts: Sequence[str]) -> bool:
    try:
        return set(hosts_of(door.shown(time.time() + RENEWED_S).certificate)) == set(hosts)
    except AtollError:
        return False


def _copy(source: Path, folder: Path) -> list[Path]:
    copy = folder / source.name
    if not _differs(source, copy):
        return []
    write_whole(copy, read_file(source, TEXT_BYTES_MAX))
    return [copy]


def _place(folder: Path) -> Path:
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    return folder


def _differs(source: Path, copy: Path) -> bool:
    return not copy.exists() or read_file(copy, TEXT_BYTES_MAX) != read_file(source, TEXT_BYTES_MAX)
