"""The folders that a service must be given: those that its settings name, and that of the archive.

A unit or a container writes only where it is let, and a service fails late where it is not: a scratch file when a fragment is
large, a dump when there is a mistake to look at. So each target lets the service write to the folders of its settings (scratch
files, dumps of facts, checkpoints, profiles), beside its own state. Folders of temporary files are given already; a machine's
own user runs a task of SkyPilot and may write where that user may.

**The archive** is in an object store, or in a folder. Each target gives the folder of `archive.url` to the synchronizers, which
alone write run checkpoints, and lets them read that of `synchronizer.restore`. Services that are told of an archive and do not
use it (learners, the monitor, the synchronizer of a region) get nothing. All synchronizers need one and the same folder, since
a run checkpoint is complete when every shard is in it. A relative path would be another folder for each run file, `~` another
one for each user, and folders of temporary files are private to each service. Such places are refused when a deployment is
rendered, and so is any folder where services are pods.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from atoll.archive.object_store import FolderArchive, open_archive, resolved
from atoll.base.errors import SettingsError
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.services import PlannedService
from atoll.keys.rights import Kind
from atoll.settings.sections import ArchiveSettings, Section, SynchronizerSettings

_PLAIN: Final = re.compile(r"(/[\w.+@-]+)+/?")
"""Letters that mean nothing else to systemd (`%`, blanks), to compose (`:`, `$`) and to a shell."""
PLAIN_FOLDER: Final = "an absolute path of letters, digits and any of . _ + @ -"
_BY_HAND: Final = ("learner.checkpoint_dir", "learner.compile_cache")
"""These may be relative: beside the run file of a learner that a person starts by hand, as the page on deployments does."""
_EVERYBODY: Final = ("log.dump_dir",)
_SYNCHRONIZER: Final = (*_EVERYBODY, "synchronizer.scratch_dir")
_SETTINGS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "learner": (
        *_EVERYBODY,
        "learner.scratch_dir",
        "learner.checkpoint_dir",
        "learner.compile_cache",
        "learner.profile",
    ),
    "synchronizer": _SYNCHRONIZER,
    "premerger": _SYNCHRONIZER,
}
OBJECT_STORE: Final = "s3"
TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev", "/proc", "/run", "/sys")  # noqa: S108  (none of them is used here)
S = TypeVar("S", bound=Section)


def is_plain(folder: str) -> bool:
    """Return whether a folder's name means the same wherever it is written down (`PLAIN_FOLDER`)."""
    return _PLAIN.fullmatch(folder) is not None and ".." not in folder.split("/")


def own_folders(service: PlannedService, writable: Sequence[str]) -> list[str]:
    """Return the folders that a service must be given, once each; it may write below the `writable` ones anyway.

    Raises:
        SettingsError: a folder has no name that means the same wherever it is written down.
    """
    found: dict[str, None] = {}
    for setting in _SETTINGS.get(service.kind, ()):
        folder = _setting_of(service.settings, setting)
        if not isinstance(folder, str) or not folder:  # rendering tells of it where it tries run files
            continue
        if setting in _BY_HAND and not folder.startswith("/"):
            continue
        if not is_plain(folder):
            raise SettingsError(
                "a service cannot be let write into this folder",
                got=f"{setting} = {folder}",
                allowed=PLAIN_FOLDER,
                todo=f"correct {setting} in the settings of the description",
            )
        folder = posixpath.normpath(folder)
        if not any(f"{folder}/".startswith(f"{top}/") for top in writable):
            found[folder] = None
    return list(found)


def folders_of_container(service: PlannedService) -> list[str]:
    """Return the folders that a service in a container must be given beside its volume, which learners and monitors have."""
    state = ("/state",) if service.kind in ("learner", "reader") else ()
    return own_folders(service, ("/tmp", *state))  # noqa: S108  (of a container)


def _setting_of(tables: Mapping[str, Any], name: str) -> object:
    """Return what a run file says of a setting, None for nothing."""
    table, _, key = name.partition(".")
    there = tables.get(table)
    return there.get(key) if isinstance(there, Mapping) else None


@dataclass(frozen=True, slots=True)
class ArchiveFolders:
    """The folders that a synchronizer needs: one to write the archive, and one to rebuild a run; empty for none.

    A folder that is for both is in `written` alone.
    """

    written: str = ""
    read: str = ""


def archive_folders(described: DeploymentDescription) -> ArchiveFolders:
    """Return the folders that every synchronizer of the hub needs.

    Raises:
        SettingsError: a setting is no place for an archive, or a folder that not every synchronizer would find.
    """
    target, urls = described.hub.target, _archive_urls(described)
    found = {setting: _archive_folder(setting, url, target) for setting, url in urls.items()}
    written, read = found["archive.url"], found["synchronizer.restore"]
    return ArchiveFolders(written, "" if read == written else read)


def archive_notes(described: DeploymentDescription) -> list[str]:
    """Return what a person has to see to, which no file of ours can: that several machines have one folder."""
    folder, hosts = archive_folders(described).written, described.hub.hosts
    if not folder or len(hosts) == 1:
        return []
    todo = "mount one file system there on each that has a synchronizer, or no run checkpoint is complete"
    return [f"the archive is the folder {folder}, and the hub has {len(hosts)} machines: {todo}"]


def uses_object_store(described: DeploymentDescription) -> bool:
    """Return whether synchronizers write to an object store, or rebuild a run from one."""
    return any(_is_object_store_url(url) for url in _archive_urls(described).values())


def is_written(archive: ArchiveSettings) -> bool:
    """Return whether anything goes into an archive: run checkpoints, or rounds."""
    return bool(archive.url) and bool(archive.every_s or archive.contributions)


def archive_folder_of(url: str) -> Path | None:
    """Return the folder at an archive's URL; None for an object store.

    Raises:
        SettingsError: the URL is no place for an archive.
    """
    if _is_object_store_url(resolved(url)):
        return None
    store = open_archive(url)
    return Path(store.where) if isinstance(store, FolderArchive) else None


def _archive_urls(described: DeploymentDescription) -> dict[str, str]:
    """Return the places that the settings of all services name, by setting; an archive that nothing goes into is none."""
    archive = _validate_section(ArchiveSettings, described.settings.get("archive"))
    restore = _validate_section(SynchronizerSettings, described.settings.get("synchronizer")).restore
    return {"archive.url": archive.url if is_written(archive) else "", "synchronizer.restore": restore}


def _validate_section(kind: type[S], table: Any) -> S:  # noqa: ANN401  (as somebody wrote it)
    """Return a table of settings; one that cannot be as if it were empty: rendering tells of it where it tries run files."""
    try:
        return kind.model_validate(table or {})
    except ValidationError:
        return kind()


def _is_object_store_url(url: str) -> bool:
    try:
        return urlsplit(url).scheme == OBJECT_STORE
    except ValueError:  # `resolved` and `open_archive` say what is wrong with it
        return False


def _archive_folder(setting: str, url: str, target: str) -> str:
    """Return the folder that a setting names, empty for an object store and for nothing."""
    folder = archive_folder_of(url) if url else None
    if folder is None:
        return ""
    if target == "kubernetes":
        # A claim that pods on several machines can write to is a rare thing, and an object store outlives the cluster, too.
        raise SettingsError(
            "a folder of a pod is gone with the pod, and no archive",
            got=f"{setting} = {url}, and the hub is in Kubernetes",
            allowed="an object store: s3://bucket/prefix",
            todo=f"set {setting} to an object store in [settings]",
        )
    # Of a path the text as it was written: as a folder it is absolute already, counted from where we are.
    text = str(folder) if urlsplit(url).scheme else url
    if not is_plain(text):
        raise SettingsError(
            "synchronizers would not all find the archive in one folder",
            got=f"{setting} = {url}",
            allowed=f"{PLAIN_FOLDER}, or s3://bucket/prefix",
            todo=f"correct {setting} in [settings]",
        )
    text = posixpath.normpath(text)
    if any(f"{text}/".startswith(f"{top}/") for top in TEMPORARY):
        raise SettingsError(
            "what a service keeps in a folder of temporary files is gone with its service",
            got=f"{setting} = {url}",
            allowed=f"a folder outside {', '.join(TEMPORARY)}, or s3://bucket/prefix",
            todo=f"set {setting} to a folder that stays, such as /srv/archive",
        )
    return text
