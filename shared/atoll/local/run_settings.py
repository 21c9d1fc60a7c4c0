"""The settings of a run of `atoll up`: its own defaults, those of an earlier run (`--like`), and how its children get them.

**Defaults** make a run of about five minutes on two cores (docs/adr/0056 and 0063). The model is the learner's size "s"; its
rate and schedule are the learner's (`atoll_learner.train_settings`). With an interval of a few steps an overwrite would throw
away much of the training, so adoption carries it over, and few learners that meet so often do better with the mean of their
pseudo-gradients than with RDA. The interval follows from the number of learners, who share a run's tokens: 16 steps divided by
them, so that rounds and their costs follow from the tokens alone; at least four steps, in which the eight fragments make two
rounds a step, and at most eight (docs/adr/0064).

**A run like an earlier one** takes the settings of that run's `report.json` or `run.json`, but for what belongs to that one
run: its id, its folder, its broker with its door, and the relays to it. Flags, `--set`, environment and `--config` go before. A
value that merely followed from another setting (the width from `model.size`) follows again. Where Atoll's version, the commit
or the text is another, the new run may end elsewhere, and `differences` and `text_difference` say so.

**Children** get the whole resolved configuration as `ATOLL_…` variables and none of the parent's own, so a child runs with
exactly what `run.json` holds. Secrets in a broker's URL reach children only.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import ValidationError

import atoll
from atoll.base.errors import SettingsError
from atoll.base.files import NotRegular, TooLarge, is_folder, read_file
from atoll.base.machine import EDITED, UNKNOWN, commit
from atoll.base.parsing import parsed
from atoll.base.wording import counted
from atoll.run.folder import EMBEDDED, RunFile
from atoll.settings import PREFIX, Settings, SettingsFallback, load, variable
from atoll.settings.sections import UpSettings

DEFAULT_ORIGIN: Final = "atoll up"
"""The origin of these values, as `atoll config --up` calls it."""
DEFAULTS: Final[dict[str, Any]] = {
    "model.size": "s",
    "protocol.fragments": 8,
    "protocol.overlap_steps": 2,
    "protocol.adoption": "carry",
    "protocol.merge": "mean",
    "protocol.shards": 2,
    "protocol.quorum": 1,
    "protocol.tokens_target": 2_500_000,
    "archive.every_s": 30,
}
"""The settings that follow from no other."""
FOLLOWING: Final = ("protocol.interval_steps",)
"""The settings that follow from the number of learners."""
INTERVAL_OF_ALL: Final = 16
"""Steps of all learners together, in the mean, from one round of a fragment to the next."""
INTERVAL_MIN: Final = 4
INTERVAL_MAX: Final = 8
EVALUATE_EVERY_S: Final = 15.0
EVALUATE_CORES_MAX: Final = 0.1
"""Of a core, in the mean: what an evaluator takes, learners on the same machine do not have."""
REPORT_BYTES_MAX: Final = 64 << 20
"""A report is some hundred kilobytes; no report of ours is larger."""
RUN_AS_FOUND: Final = ("learner.compile_cache",)
"""Folders of which JAX runs what it finds there: no file names one."""
_DERIVED: Final = ("model.", "train.")
_SOURCES: Final = ("model.size", "train.optimizer")
"""The settings from which others follow."""
_NOT_TAKEN: Final = ("run", "health_file", "up.locked", *RUN_AS_FOUND)


def default_settings(learners: int) -> dict[str, Any]:
    """Return the settings of a run that begins with so many learners, by dotted name."""
    interval = min(INTERVAL_MAX, max(INTERVAL_MIN, INTERVAL_OF_ALL // max(1, learners)))
    return DEFAULTS | {"protocol.interval_steps": interval}


def stated_learners(stated: Mapping[str, tuple[Any, str]]) -> int:
    """Return the learners that a run begins with where so much was `stated` (`atoll.settings.given_values`)."""
    told = {"learners": stated["up.learners"][0]} if "up.learners" in stated else {}
    try:
        return UpSettings.model_validate(told).learners
    except ValidationError:  # `load` will refuse it, and with the widest interval nothing else before it
        return 1


def default_fallback(learners: int, **more: Any) -> SettingsFallback:  # noqa: ANN401  (values of settings)
    """Return what holds in a run of so many learners where nothing was said: `default_settings` them, and `more`."""
    follows = f"{DEFAULT_ORIGIN} with {counted(learners, 'learner')}"
    return SettingsFallback(DEFAULT_ORIGIN, default_settings(learners) | more, dict.fromkeys(FOLLOWING, follows))


class _ReportedRun(msgspec.Struct, kw_only=True):
    """The fields of a report that matter here."""

    run: str
    settings: dict[str, Any]
    tokens_by_fate: dict[str, int]
    atoll: str = ""
    commit: str | None = None
    data_source_hash: str = ""


class _ShardHashes(msgspec.Struct):
    """The fields of the description of token shards that tell one text from another."""

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
        told = without_derived(kept, str(self.path), _DERIVED)
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

    def text_difference(self, data_dir: Path) -> str:
        """Return one sentence if the token shards in `data_dir` are not of the earlier run's text, else nothing."""
        if not self.data:
            return ""
        try:
            meta = parsed(read_file(data_dir / "meta.json", REPORT_BYTES_MAX), _ShardHashes)
        except (OSError, msgspec.MsgspecError):
            return ""
        same = self.data in (meta.source, meta.fingerprint)
        return "" if same else f"the text is not that of {self.run}: it has changed since, or is another"


def without_derived(settings: dict[str, Any], origin: str, sections: tuple[str, ...]) -> dict[str, Any]:
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
        data = read_file(file, REPORT_BYTES_MAX)
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
    return _from_report(file, data) or _from_run_file(file, data)


def _from_report(file: Path, data: bytes) -> EarlierRun | None:
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


def _from_run_file(file: Path, data: bytes) -> EarlierRun:
    try:
        run = parsed(data, RunFile)
    except msgspec.MsgspecError as error:
        raise SettingsError(
            f"{file} is neither a report nor a run.json of ours", got=error, todo="correct --like"
        ) from error
    told = {"up.learners": run.learners, "up.corpus": run.corpus} | run.settings
    return EarlierRun(file, run.run, told, run.atoll, run.commit or UNKNOWN, broker=run.broker)


def flat(settings: Settings) -> dict[str, Any]:
    """Return every setting by its dotted name, as JSON values, in the order of the sections."""
    tree = settings.model_dump(mode="json", exclude={"protocol"})
    tree["protocol"] = msgspec.to_builtins(settings.protocol)
    leaves: dict[str, Any] = {}
    for section in Settings.model_fields:
        _collect(tree[section], section, leaves)
    return leaves


def _collect(value: object, name: str, leaves: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _collect(inner, f"{name}.{key}", leaves)
    else:
        leaves[name] = value


def as_text(value: object) -> str:
    """Return a setting as an environment variable or a `--set` writes it; None is empty."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted settings as environment variables; those without a value are left to their default."""
    return {variable(name): text for name, value in values.items() if (text := as_text(value))}


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` less every variable that is a setting."""
    return {name: text for name, text in environment.items() if not name.startswith(PREFIX)}
