"""From flags, environment and an older `run.json` to one checked plan of a run on this machine.

Precedence, highest first: flags and `--set`, environment, `--config`, then the folder's `run.json` (for a continued run) or
`atoll.local.defaults`. A continued run may change only settings that its processes have not agreed on. Any other
difference is refused by name, because the run record on the broker would silently win.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.base.errors import SettingsError
from atoll.bus.open import ADDRESSES, is_address
from atoll.local import defaults
from atoll.local.environment import as_text, flat, redacted
from atoll.run.folder import EMBEDDED, SIMULATED, RunFile, read_run_file
from atoll.settings import LoadedSettings, Settings, load

LEARNERS_MAX = 64
STANDBYS_MAX = 4
THROTTLE_MAX = 1000.0
_TARGET = "protocol.tokens_target"
_FIXED = ("run", "seed", "protocol.", "model.", "data.dir")
_OURS = ("broker.url", "learner.id", "synchronizer.")


@dataclass(frozen=True, slots=True)
class UpRequest:
    """The request, unchecked; None or empty for every option that was not given.

    `run` is the id if no setting names one; a `fresh` run takes nothing over from a run that `out` may hold.
    """

    learners: int | None = None
    out: Path | None = None
    port: int | None = None
    minutes: float | None = None
    corpus: tuple[Path, ...] = ()
    throttle: tuple[str, ...] = ()
    via: tuple[str, ...] = ()
    config: Path | None = None
    assignments: tuple[str, ...] = ()
    again: bool = False
    standbys: int = 0
    resume: bool = False
    run: str = ""
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class UpPlan:
    """The checked plan.

    Attributes:
        settings: the run's settings, complete; `learner.id` and `synchronizer.shard` are set per child.
        learners: ids of the learners, in order.
        throttle: factor by learner id, for learners that are slowed down.
        via: broker URL by child, for children that use another address than the rest.
        out: the run's folder.
        broker: URL of a given broker, or None for our own.
        port: port of our own broker, 0 for a free one.
        minutes: how long to train at most, 0 for no bound.
        corpus: what to prepare data from; empty means Python's own source.
        prepare: whether this run prepares the data itself.
        former: the run as the folder had it, or None for a new one.
        aside: whether a finished run in `out` is moved aside for this new one.
        standbys: how many more processes want each shard, beside its owner.
        resume: whether a run that the broker has lost is rebuilt from its archive.
    """

    settings: Settings
    learners: tuple[str, ...]
    throttle: Mapping[str, float]
    via: Mapping[str, str]
    out: Path
    broker: str | None
    port: int
    minutes: float
    corpus: tuple[Path, ...]
    prepare: bool
    former: RunFile | None
    aside: bool = False
    standbys: int = 0
    resume: bool = False


def plan(request: UpRequest, environment: Mapping[str, str] | None = None) -> UpPlan:
    """Return the checked plan.

    Raises:
        SettingsError: a value is out of range, contradicts another, or cannot change in a run that exists.
    """
    environment = os.environ if environment is None else environment
    given = load(request.config, request.assignments, environment)
    run = given.settings.run if "run" in given.origins else request.run or f"up-{secrets.token_hex(4)}"
    out = request.out if request.out is not None else Path("runs") / run
    former = read_run_file(out)
    aside = request.again and former is not None and _is_finished(former, int(former.settings.get(_TARGET, 0)))
    former = None if aside or request.fresh or (former is not None and not former.begun) else former
    if former is not None and former.broker == SIMULATED:
        raise SettingsError(
            "this folder holds a simulated run, which has no broker to go on with", got=out, todo="choose another --out"
        )
    unsaid = [f"{name}={as_text(value)}" for name, value in _defaults(former, run).items() if name not in given.origins]
    loaded = load(request.config, [*(text for text in unsaid if text[-1] != "="), *request.assignments], environment)
    settings = loaded.settings
    count = _learners(request, former)
    settings.protocol.check(count)
    learners = tuple(f"learner-{i}" for i in range(1, count + 1))
    shards, standbys = settings.protocol.shards, _standbys(request.standbys)
    result = UpPlan(
        settings=settings,
        learners=learners,
        throttle=_throttle(request.throttle, learners),
        via=_via(request.via, (*learners, *shard_names(shards), *standby_names(shards, standbys))),
        out=out,
        broker=settings.broker.url if "broker.url" in given.origins else None,
        port=request.port or 0,
        minutes=_minutes(request.minutes),
        corpus=request.corpus,
        prepare="data.dir" not in loaded.origins,
        former=former,
        aside=aside,
        standbys=standbys,
        resume=request.resume,
    )
    _check_data(result)
    if request.resume and former is None:
        raise SettingsError(
            "there is no run to resume", got=out, allowed="a folder with run.json", todo="correct --out"
        )
    if former is not None:
        _check_unchanged(former, result, given)
        result = replace(result, corpus=tuple(Path(path) for path in former.corpus))
    return result


def shard_names(shards: int) -> tuple[str, ...]:
    """Return the names of the processes that serve shards first, one per shard."""
    return tuple(f"shard-{i}" for i in range(shards))


def standby_names(shards: int, standbys: int) -> dict[str, int]:
    """Return the names of the processes that stand by, and the shard that each wants."""
    return {f"standby-{shard}-{i}": shard for shard in range(shards) for i in range(1, standbys + 1)}


def kept_settings(up: UpPlan) -> dict[str, Any]:
    """Return the settings that `run.json` keeps: all but those that belong to one child or may hold a secret."""
    kept = {name: value for name, value in flat(up.settings).items() if not name.startswith(_OURS)}
    return {name: value for name, value in kept.items() if value is not None and (name != "data.dir" or not up.prepare)}


def _defaults(former: RunFile | None, run: str) -> dict[str, Any]:
    """Return the settings that apply where none were given."""
    if former is not None:
        return {**former.settings, "run": former.run}
    return {**defaults.SETTINGS, "run": run}


def _learners(request: UpRequest, former: RunFile | None) -> int:
    fallback = former.learners if former is not None else defaults.LEARNERS
    count = fallback if request.learners is None else request.learners
    if not 1 <= count <= LEARNERS_MAX:
        raise SettingsError(
            "that many learners cannot run here", got=count, allowed=f"1..{LEARNERS_MAX}", todo="set --learners"
        )
    return count


def _standbys(count: int) -> int:
    if not 0 <= count <= STANDBYS_MAX:
        raise SettingsError(
            "that many standbys make no sense", got=count, allowed=f"0..{STANDBYS_MAX}", todo="--standbys"
        )
    return count


def _minutes(minutes: float | None) -> float:
    if minutes is None:
        return 0.0
    if not 0.0 < minutes <= 60 * 24 * 365:
        raise SettingsError(
            "--minutes is out of range", got=minutes, allowed="above 0, at most a year", todo="set --minutes"
        )
    return minutes


def _throttle(texts: tuple[str, ...], learners: tuple[str, ...]) -> dict[str, float]:
    """Return the factors of `name=factor` texts."""
    factors: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            factor = float(number) if equals else 0.0
        except ValueError:
            factor = 0.0
        if not 1.0 <= factor <= THROTTLE_MAX:
            raise SettingsError(
                "--throttle is wrong", got=text, allowed=f"learner=factor, 1..{THROTTLE_MAX:g}", todo="see --help"
            )
        if name not in learners:
            raise SettingsError("--throttle names nobody", got=name, allowed=", ".join(learners), todo="see --learners")
        factors[name] = factor
    return factors


def _via(texts: tuple[str, ...], children: tuple[str, ...]) -> dict[str, str]:
    """Return the addresses of `name=url` texts."""
    addresses: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or not is_address(url):
            raise SettingsError("--via is wrong", got=redacted(text), allowed=f"name={ADDRESSES}", todo="see --help")
        if name not in children:
            raise SettingsError("--via names nobody", got=name, allowed=", ".join(children), todo="see --learners")
        addresses[name] = url
    return addresses


def _check_data(up: UpPlan) -> None:
    """Refuse a corpus that does not exist, or that this run would not read."""
    if up.corpus and not up.prepare:
        raise SettingsError(
            "--corpus and data.dir contradict each other", got=up.settings.data.dir, todo="give one of the two"
        )
    for path in up.corpus:
        if not path.exists():
            raise SettingsError("there is no such text", got=path, todo="correct --corpus")


def _check_unchanged(former: RunFile, up: UpPlan, given: LoadedSettings) -> None:
    """Refuse to continue `former` with a change in anything that its processes have agreed on."""
    now = flat(up.settings)
    for name, origin in given.origins.items():
        was = former.run if name == "run" else former.settings.get(name)
        fixed = name.startswith(_FIXED) and name != _TARGET
        if fixed and as_text(was) != as_text(now.get(name)):
            raise SettingsError(
                f"{name} cannot change in a run that exists",
                got=f"{as_text(now.get(name))} from {redacted(origin)}",
                allowed=f"{as_text(was) or 'nothing'}, as {up.out / 'run.json'} says",
                todo="leave it away, or start a new run in another --out (learners, tokens, minutes, throttle, "
                "via, train.* and log.* may change)",
            )
    texts = [str(path.absolute()) for path in up.corpus]
    if texts and texts != former.corpus:
        raise SettingsError(
            "the corpus of a run cannot change",
            got=", ".join(texts),
            allowed=", ".join(former.corpus) or "Python's own source",
            todo="leave --corpus away",
        )
    if former.broker != EMBEDDED and up.broker is None:
        raise SettingsError("this run lives on a broker of yours", todo=f"give --broker {former.broker}")
    if former.broker == EMBEDDED and up.broker is not None:
        raise SettingsError("this run lives in its own broker's store", got=redacted(up.broker), todo="omit --broker")
    target = up.settings.protocol.tokens_target
    if _is_finished(former, target):
        raise SettingsError(
            "this run has reached its target",
            got=f"{former.tokens} tokens trained, target {target}",
            allowed=f"a target above {former.tokens}, or 0 for none",
            todo=f"give a larger --tokens to continue it, --again to begin anew, or another --out; "
            f"its report is {up.out / 'report.html'}",
        )


def _is_finished(former: RunFile, target: int) -> bool:
    return 0 < target <= former.tokens
