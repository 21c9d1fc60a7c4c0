"""The folders that a service writes to because its settings name them: scratch files, dumps of facts, checkpoints, profiles.

A unit or a container writes only where it is let, and a service fails late where it is not: a scratch file when a fragment is
large, a dump when there is a mistake to look at. So each target lets the service write to these folders, beside its own state.
Folders of temporary files are given already; a machine's own user runs a task of SkyPilot and may write where that user may.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from atoll.base.errors import SettingsError
from atoll.deploy.services import PlannedService
from atoll.keys.rights import Kind

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
        folder = _setting(service.settings, setting)
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


def _setting(tables: Mapping[str, Any], name: str) -> object:
    """Return what a run file says of a setting, None for nothing."""
    table, _, key = name.partition(".")
    there = tables.get(table)
    return there.get(key) if isinstance(there, Mapping) else None
