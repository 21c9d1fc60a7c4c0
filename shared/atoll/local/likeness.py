"""`atoll up --like`: a new run, set as an earlier one was.

What is read is the earlier run's `report.json` or `run.json`, or the folder that holds them. Both tell every setting, those of
the section `up` included. A new run takes all of them but what belongs to that one run: its id, its folder, its broker with its
door, and the relays to it. Flags, `--set`, environment and `--config` go before, as everywhere.

What merely followed from another setting (the width from `model.size`, the rate from the inner optimizer) is not taken over: it
follows again. So `--like report.json --set model.size=m` begins a larger model, and not a mixture of two.

Settings do not make a run alone. If Atoll's version or commit is another, or the text is, the new run may end elsewhere, and
`differences` and `other_text` say so.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

import atoll
from atoll.base.errors import SettingsError
from atoll.base.parsing import parsed
from atoll.base.provenance import EDITED, UNKNOWN, commit
from atoll.base.regular_files import NotRegular, TooLarge, is_folder, read_file
from atoll.local.environment import flat
from atoll.run.folder import EMBEDDED, RunFile
from atoll.settings import SettingsFallback, load

BYTES_MAX: Final = 64 << 20
"""A report is some hundred kilobytes; no report of ours is larger."""
RUN_AS_FOUND: Final = ("learner.compile_cache",)
"""Folders of which JAX runs what it finds there: no file names one."""
_DERIVED: Final = ("model.", "train.")
_SOURCES: Final = ("model.size", "train.optimizer")
"""The settings from which others follow."""
_NOT_TAKEN: Final = ("run", "health_file", "up.locked", *RUN_AS_FOUND)


class _ReportedRun(msgspec.Struct, kw_only=True):
    """The fields of a report that matter here."""

    run: str
    settings: dict[str, Any]
    tokens_by_fate: dict[str, int]
    atoll: str = ""
    commit: str | None = None
    data_source_hash: str = ""


class _ShardHashes(msgspec.Struct):
    """What tells one text from another, of the description of token shards."""

    source: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """The run that a new one is begun like, as the file at `path` tells it.

    `settings` are dotted names; `data` is a hash of its text, empty if it is not known; `broker` is "embedded", "simulated",
    a URL without secrets, or empty if the file does not tell.
    """

    path: Path
    run: str
    settings: dict[str, Any]
    atoll: str
    commit: str
    data: str = ""
    broker: str = ""

    def fallback(self, run: str, stated: Container[str]) -> SettingsFallback:
        """Return the settings of the new run `run` for all that was not `stated` for it."""
        kept = {name: value for name, value in self.settings.items() if name not in _NOT_TAKEN}
        # Somebody who names a text has no use for the other run's shards, nor the other way round.
        for theirs, ours in (("data.dir", "up.corpus"), ("up.corpus", "data.dir")):
            if ours in stated:
                kept.pop(theirs, None)
        told = without_what_follows(kept, str(self.path), _DERIVED)
        return SettingsFallback(str(self.path), told | {"run": run})

    def differences(self) -> list[str]:
        """Return one sentence for each thing beside the settings in which the new run differs from the earlier one."""
        told = []
        if self.atoll != atoll.__version__:
            told.append(
                f"{self.run} was made with Atoll {self.atoll or 'of an unknown version'}, this is {atoll.__version__}"
            )
        here = commit()
        # Two edited trees of one commit, and two packages without one, need not be the same.
        if self.commit != here or here.endswith(EDITED) or here == UNKNOWN:
            told.append(f"{self.run} was made at commit {self.commit}, this is commit {here}: results may differ")
        if self.broker and self.broker != EMBEDDED:
            told.append(f"the broker of {self.run} ({self.broker}) is not taken over; --broker names one")
        return told

    def other_text(self, data_dir: Path) -> str:
        """Return one sentence if the token shards in `data_dir` are not of the earlier run's text, else nothing."""
        if not self.data:
            return ""
        try:
            meta = parsed(read_file(data_dir / "meta.json", BYTES_MAX), _ShardHashes)
        except (OSError, msgspec.MsgspecError):
            return ""
        same = self.data in (meta.source, meta.fingerprint)
        return "" if same else f"the text is not that of {self.run}: it has changed since, or is another"


def without_what_follows(settings: dict[str, Any], origin: str, sections: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of a run by dotted names, but for those of `sections` that follow from `_SOURCES` or are defaults."""
    sources: dict[str, Any] = {name: settings[name] for name in _SOURCES if name in settings}
    follows = flat(load(environment={}, fallback=SettingsFallback(origin, sources)).settings)
    return {
        name: value
        for name, value in settings.items()
        if name in sources or not name.startswith(sections) or follows.get(name) != value
    }


def read_earlier(path: Path) -> EarlierRun:
    """Return the earlier run that `path` tells of: a report.json, a run.json, or the folder of a run.

    Raises:
        SettingsError: there is no such file, it is neither of the two, or it does not tell how its run was begun.
    """
    file = path
    if is_folder(path):
        file = next((path / name for name in ("report.json", "run.json") if (path / name).is_file()), path / "run.json")
    try:
        data = read_file(file, BYTES_MAX)
    except NotRegular:
        raise SettingsError("this is no file to begin like", got=file, todo="correct --like") from None
    except TooLarge:
        raise SettingsError(f"{file} is too large to be a report", todo="correct --like") from None
    except OSError as error:
        raise SettingsError(
            "there is no run to begin like",
            got=f"{file}: {error.strerror}",
            allowed="a report.json, a run.json, or the folder of a run",
            todo="correct --like",
        ) from error
    return _of_report(file, data) or _of_run_file(file, data)


def _of_report(file: Path, data: bytes) -> EarlierRun | None:
    """Return the run of a report, None if this is no report."""
    try:
        report = parsed(data, _ReportedRun)
    except msgspec.MsgspecError:
        return None
    if "up.learners" not in report.settings:
        raise SettingsError(
            f"{file} does not say with how many learners its run was begun",
            got=f"a report of Atoll {report.atoll or 'of an unknown version'}",
            allowed="a report of this version, or the run.json beside it",
            todo="give --like its run.json",
        )
    known = report.commit or UNKNOWN
    return EarlierRun(file, report.run, report.settings, report.atoll, known, report.data_source_hash)


def _of_run_file(file: Path, data: bytes) -> EarlierRun:
    try:
        run = parsed(data, RunFile)
    except msgspec.MsgspecError as error:
        raise SettingsError(
            f"{file} is neither a report nor a run.json of ours", got=error, todo="correct --like"
        ) from error
    told = {"up.learners": run.learners, "up.corpus": run.corpus} | run.settings
    return EarlierRun(file, run.run, told, run.atoll, run.commit or UNKNOWN, broker=run.broker)
