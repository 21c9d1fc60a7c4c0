"""All files of a deployment, written once, and again whenever the description changes.

    OUT/keys/                        the operator's folder of keys: it stays, and is copied nowhere
    OUT/kubernetes/base/             what all places in Kubernetes share
    OUT/PLACE/                       all that a place needs, and nothing of another one: copy this folder there
    OUT/PLACE/services/NAME/         one service: its run file, its identity; `broker` is the door of the broker's nodes, and
                                     `REGION-broker` the door and the identity of a region's own
    OUT/rendered.json                what was written, with digests

Rendering again changes what the description changes. Keys are made where they are missing and never replaced. A file that
somebody has edited is not overwritten: the rendering stops before it writes anything, and names it. A file that no description
asks for any more is removed if nobody has edited it; so is the identity of a learner that is gone, though its name stays on the
roll until it is revoked.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import tomli_w

from atoll.base.errors import AtollError, EnvironmentFault, InUse, SettingsError
from atoll.base.files import (
    TEXT_BYTES_MAX,
    NotRegular,
    TooLarge,
    hold,
    read_file,
    read_text,
    text_or_empty,
    write_whole,
)
from atoll.base.parsing import parsed
from atoll.base.wording import few
from atoll.deploy.description import DeploymentDescription, leaf_name
from atoll.deploy.kubernetes import base_files, kubernetes_files
from atoll.deploy.services import (
    IDENTITY_FILE,
    RUN_FILE,
    archive_folders,
    archive_notes,
    founders,
    hosts_of_broker,
    identities,
    kinds,
    leaf_of,
    learners_at,
    places,
    services,
)
from atoll.deploy.targets import compose_files, skypilot_files, systemd_files
from atoll.keys.certificates import hosts_of
from atoll.keys.identity import FOLDER_MODE
from atoll.keys.roll import (
    KeyFolder,
    ensure,
    hand_out_door,
    hand_out_identities,
    hand_out_identity,
    hand_out_region_door,
)
from atoll.settings import load
from atoll.wire.subjects import HUB

MANIFEST: Final = "rendered.json"
KEYS: Final = "keys"
SERVICES: Final = "services"
DOOR_FILES: Final = ("roll.json", "broker.pem", "broker.key", "authority.pem", IDENTITY_FILE)
_HEAD: Final = "# Written by `atoll deploy render`; change the description and render again.\n"


@dataclass(slots=True)
class Rendered:
    """The outcome of a rendering: paths below the folder."""

    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: int = 0
    notes: list[str] = field(default_factory=list)


class _Manifest(msgspec.Struct):
    """The content of `MANIFEST`: the run, and the digest of each file."""

    run: str
    files: dict[str, str]


def rendered_texts(described: DeploymentDescription) -> dict[str, str]:
    """Return the text of every file that the description alone decides, by its path below the folder; no secret is in them.

    Raises:
        SettingsError: a table of settings holds what no run file can, or the archive is where no synchronizer could keep it.
    """
    archive_folders(described)  # in Kubernetes no file follows from it: there it refuses a folder
    found: dict[str, str] = {}
    targets = {
        "compose": compose_files,
        "kubernetes": kubernetes_files,
        "skypilot": skypilot_files,
        "systemd": systemd_files,
    }
    for place, target in places(described).items():
        for name, text in targets[target](described, place).items():
            found[f"{place}/{name}"] = text
        for service in services(described, place):
            found[f"{place}/{SERVICES}/{service.name}/{RUN_FILE}"] = _HEAD + tomli_w.dumps(service.settings)
    if "kubernetes" in places(described).values():
        found |= {f"kubernetes/base/{name}": text for name, text in base_files().items()}
    return found


def render(described: DeploymentDescription, out: Path) -> Rendered:
    """Write the files of a deployment below `out`.

    Raises:
        SettingsError: a setting cannot be, a file was edited, or the keys there are of another deployment.
        EnvironmentFault: the folder cannot be used.
        InUse: another command writes there.
    """
    try:
        out.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        lock = hold(out / ".lock")
        if lock is None:
            raise InUse("another command renders into this folder", got=out, todo="wait until it is done")
        with lock:
            return _render(described, out)
    except OSError as error:
        raise EnvironmentFault(
            "the deployment cannot be written",
            got=f"{error.filename or out}: {error.strerror}",
            todo="see who owns the folder",
        ) from error


def _render(described: DeploymentDescription, out: Path) -> Rendered:
    wanted, former = rendered_texts(described), _manifest(out, described.run)
    if edited := [
        name for name in edited_files(out) if name in wanted and _digest(out / name) != _digest_of(wanted[name])
    ]:
        raise SettingsError(
            "these files were edited since they were rendered, and would be overwritten",
            got=", ".join(edited),
            todo="put the change into the description, then delete the file and render again",
        )
    done = Rendered(notes=archive_notes(described))
    _check_settings(wanted)
    write_whole(out / ".gitignore", b"keys/\nidentity.toml\nbroker.key\n.lock\n")
    _provide_keys(described, out, done)
    _remove_doors(described, out, done)
    for name, text in wanted.items():
        path = out / name
        if path.is_file() and text_or_empty(path) == text:
            done.kept += 1
            continue
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        write_whole(path, text.encode())
        done.written.append(name)
    for name in sorted(former.keys() - wanted.keys()):
        _remove(out, name, former[name], done)
    manifest = {name: _digest_of(text) for name, text in wanted.items()}
    write_whole(out / MANIFEST, (json.dumps({"run": described.run, "files": manifest}, indent=1) + "\n").encode())
    return done


def edited_files(out: Path) -> list[str]:
    """Return the files of the last rendering that are not as they were written; those that are gone do not count."""
    return [name for name, digest in _manifest(out).items() if (out / name).is_file() and _digest(out / name) != digest]


def _check_settings(wanted: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / RUN_FILE
        for name, text in wanted.items():
            if not name.endswith(f"/{RUN_FILE}"):
                continue
            file.write_text(text, encoding="utf-8")
            try:
                load(file, environment={})
            except AtollError as error:
                said = error.parts()
                got = said.get("got", "").replace(str(file), "the description")
                raise SettingsError(
                    f"a service would not take its settings: {error.what}",
                    got=f"{got} ({name})",
                    allowed=error.allowed,
                    todo="correct it in [settings], or in the settings of the region",
                ) from error


def _provide_keys(described: DeploymentDescription, out: Path, done: Rendered) -> None:
    folder = KeyFolder(out / KEYS)
    before = {one.name for one in folder.read().entries} if folder.roll_path.exists() else set()
    everybody = {name: kind for place in places(described) for name, kind in identities(described, place).items()}
    at = {
        name: HUB if leaf_of(described, place) is None else place
        for place in places(described)
        for name in learners_at(described, place)
    }
    ensure(folder, described.run, everybody, hosts_of_broker(described), founders(described), at)
    if new := [name for name in everybody if name not in before]:
        done.notes.append(f"new keys: {few(new, 8)}")
    done.notes += _key_notes(described, folder, everybody)
    for place in places(described):
        done.written += [str(path.relative_to(out)) for path in _hand_out_keys(described, folder, place, out)]


def _key_notes(described: DeploymentDescription, folder: KeyFolder, everybody: Container[str]) -> Iterator[str]:
    shown = set(hosts_of(read_text(folder.certificate_path)))
    if lacking := [host for host in hosts_of_broker(described) if host not in shown]:
        hosts = " ".join(f"--host {host}" for host in hosts_of_broker(described))
        yield (
            f"the broker's certificate is not for {', '.join(lacking)}; make another and render again: "
            f"atoll keys certificate {folder.path} {hosts}"
        )
    for entry in folder.read().entries:
        if entry.run == described.run and entry.name not in everybody and not entry.revoked_at_s:
            yield (
                f"{entry.name} may still enter; if it is gone: atoll keys revoke {folder.path} {entry.name} --run {entry.run}"
            )


def _hand_out_keys(described: DeploymentDescription, folder: KeyFolder, place: str, out: Path) -> list[Path]:
    into = out / place / SERVICES
    into.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    changed = hand_out_identities(folder, described.run, kinds(described, place), into)
    changed += hand_out_door(folder, into) if place == HUB else []
    if (leaf := leaf_of(described, place)) is not None:
        changed += hand_out_identity(folder, described.run, place, into / leaf.name)
        changed += hand_out_region_door(folder, leaf.name, (leaf.host,), into)
    return changed


def _remove(out: Path, name: str, digest: str, done: Rendered) -> None:
    path = out / name
    if not path.is_file():
        return
    if _digest(path) != digest:
        done.notes.append(f"{name} is not of this description any more; it was edited, so it stays")
        return
    for each in (path, path.parent / IDENTITY_FILE) if path.name == RUN_FILE else (path,):
        if each.exists():
            each.unlink()
            done.removed.append(str(each.relative_to(out)))
    while path.parent != out and not any(path.parent.iterdir()):
        path = path.parent
        path.rmdir()


def _remove_doors(described: DeploymentDescription, out: Path, done: Rendered) -> None:
    """Remove the doors of regions that have no broker of their own any more: each holds two secrets."""
    for door in sorted(out.glob(f"*/{SERVICES}/{leaf_name('*')}")):
        place = door.parent.parent.name
        if door.name != leaf_name(place) or leaf_of(described, place) is not None:
            continue
        for name in DOOR_FILES:
            if (door / name).is_file():
                (door / name).unlink()
                done.removed.append(str((door / name).relative_to(out)))
        if not any(door.iterdir()):
            door.rmdir()


def _manifest(out: Path, run: str | None = None) -> dict[str, str]:
    try:
        manifest = parsed(read_file(out / MANIFEST, TEXT_BYTES_MAX), _Manifest)
    except FileNotFoundError:
        return {}
    except (NotRegular, TooLarge, msgspec.MsgspecError):
        raise SettingsError(
            "the list of rendered files is damaged", got=out / MANIFEST, todo="delete it, and render again"
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            "the list of rendered files cannot be read",
            got=f"{out / MANIFEST}: {error.strerror}",
            todo="see who owns it",
        ) from error
    if run not in (None, manifest.run):
        raise SettingsError(
            "another run is rendered in this folder",
            got=f"{out} has run {manifest.run!r}",
            allowed=run,
            todo="choose another --out",
        )
    return manifest.files


def _digest(path: Path) -> str:
    return hashlib.sha256(read_file(path, TEXT_BYTES_MAX)).hexdigest()


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
