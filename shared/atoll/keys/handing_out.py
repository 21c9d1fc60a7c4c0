"""Each program finds its own identity in a folder of its own, and the broker its door: what containers mount.

    INTO/<name>/identity.toml                       one identity, and nothing else
    INTO/broker/roll.json, broker.pem, broker.key, authority.pem   all that a broker needs of the operator's folder
    INTO/<region>/identity.toml, and the same four names           all that the leaf of a region needs

The certificate of a region is its own. A holder of the key of the hub's is a node of the hub's cluster (`doors.routes`) and can
pass for the hub, so it goes to no region.

The operator's folder stays where it is, on no other program's mount: it has the root key and everybody's identity. The copies
are made as often as one likes. A file that has not changed is not touched, so a broker that follows its door does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from atoll.base.atomic_files import write_whole
from atoll.base.errors import AtollError, SettingsError
from atoll.base.regular_files import TEXT_BYTES_MAX, read_file, read_text
from atoll.base.units import DAY_S
from atoll.keys.certificates import hosts_of
from atoll.keys.identity import FOLDER_MODE, write_secret
from atoll.keys.rights import EVERY_RUN, Kind
from atoll.keys.roll import KeyFolder, Roll

BROKER: Final = "broker"
IDENTITY: Final = "identity.toml"
FOUNDS: Final = ("learner", "region")
LOOPBACK: Final = ("localhost", "127.0.0.1")
NOWHERE: Final[Mapping[str, str]] = {}
RENEWED_S: Final = 30 * DAY_S
"""A region's certificate that ends within so long is replaced."""


def ensure(
    folder: KeyFolder,
    run: str,
    kinds: Mapping[str, Kind],
    hosts: Sequence[str],
    founders: Collection[str] | None = None,
    regions: Mapping[str, str] = NOWHERE,
) -> None:
    """Make the folder of keys, and the identities of a run that are not on its roll yet; `kinds` by name.

    Those learners may found the run that `founders` names, themselves or through their region; without it all may, and any may
    be first. `regions` says of learners where they are, also of those that are on the roll. An identity that was revoked stays
    so.

    Raises:
        SettingsError: a name is on the roll as another kind.
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

    Raises `SettingsError` for a name that the broker's folder has, and for a host that can be none.
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
    """Have a door in the folder of a region whose broker is reached at `hosts`, and on its machine; return what changed.

    Raises `SettingsError` for a host that is neither a name nor an address.
    """
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
