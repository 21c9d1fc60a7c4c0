"""From flags, environment, a file and an earlier run to one checked plan of a run on this machine.

Precedence, highest first: flags, `--set`, environment, the file, then one of three: the folder's `run.json` (for a run that
is continued), the run that `--like` names, or `atoll.local.run_settings`. A continued run may change only settings that its
processes have not agreed on. Any other difference is refused by name, because the run record on the broker would silently
win. A run that is begun like another is a new one: there everything may change.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.base.errors import SettingsError, redact
from atoll.bus.options import ADDRESSES, is_address
from atoll.local import run_settings
from atoll.local.own_brokers import BROKERS, RunKeys, check_same_brokers, copies_of, keys_for
from atoll.local.run_settings import RUN_AS_FOUND, EarlierRun, as_text, flat, read_earlier, without_derived
from atoll.model.model_files import check_model_files
from atoll.run.folder import EMBEDDED, SIMULATED, VALIDATION, RunFile, read_run_file
from atoll.settings import PLACES, PREFIX, GivenValues, Settings, SettingsFallback, given_values, load, place_path
from atoll.wire.subjects import token

VOCABULARY = "tokenizer.json"
_TARGET = "protocol.tokens_target"
_FIXED = ("run", "seed", "protocol.", "model.", "data.dir")
_OURS = ("broker.url", "learner.id", "synchronizer.", "up.out", "up.port", "up.via.")


@dataclass(frozen=True, slots=True)
class UpRequest:
    """The request, unchecked; None or empty for every option that was not given.

    `run` is the id if no setting names one; a `fresh` run takes nothing over from a run that `out` may hold.
    """

    config: Path | None = None
    assignments: tuple[str, ...] = ()
    again: bool = False
    resume: bool = False
    run: str = ""
    fresh: bool = False
    like: Path | None = None


@dataclass(frozen=True, slots=True)
class UpPlan:
    """The checked plan.

    Attributes:
        settings: the run's settings, complete; `learner.id` and `synchronizer.shard` are set per child.
        learners: ids of the learners, in order.
        out: the run's folder.
        broker: URL of a given broker, or None for our own.
        prepare: whether this run prepares the data itself.
        former: the run as the folder had it, or None for a new one.
        aside: whether a finished run in `out` is moved aside for this new one.
        resume: whether a run that the broker has lost is rebuilt from its archive.
        like: the earlier run that this new one is begun like, or None.
        keys: the folder of keys by which our own broker is locked, or None.
    """

    settings: Settings
    learners: tuple[str, ...]
    out: Path
    broker: str | None
    prepare: bool
    former: RunFile | None
    aside: bool = False
    resume: bool = False
    like: EarlierRun | None = None
    keys: Path | None = None

    def with_bulk(self, bulk: tuple[str, ...]) -> UpPlan:
        """Return this plan for a run whose further brokers answer at these addresses, if it has any."""
        broker = self.settings.broker.model_copy(update={"bulk": bulk})
        return replace(self, settings=self.settings.model_copy(update={"broker": broker})) if bulk else self

    @property
    def tokenizer(self) -> Path | None:
        """Return the vocabulary of the model that the run begins from, with which its text must be prepared, if it has one."""
        begun = self.settings.learner.initial_model
        file = None if begun is None else (begun if begun.is_dir() else begun.parent) / VOCABULARY
        return file.absolute() if file is not None and file.is_file() else None


def plan(request: UpRequest, environment: Mapping[str, str] | None = None) -> UpPlan:
    """Return the checked plan.

    Raises:
        SettingsError: a value is out of range, contradicts another, or cannot change in a run that exists.
    """
    environment = os.environ if environment is None else environment
    stated = given_values(request.config, request.assignments, environment)
    run = str(stated["run"][0]) if "run" in stated else request.run or f"up-{secrets.token_hex(4)}"
    out = Path(str(stated["up.out"][0])) if "up.out" in stated else Path("runs") / token(run, "run id")
    former, aside = _former(request, out)
    like = _earlier(request, former, out)
    loaded = load(request.config, request.assignments, environment, _fallback(former, like, run, stated))
    settings = loaded.settings
    if settings.learner.initial_model is not None:
        check_model_files(settings.learner.initial_model)
    count, shards = settings.up.learners, settings.protocol.shards
    loaded.check_learners(count)
    learners = tuple(f"learner-{i}" for i in range(1, count + 1))
    throttle = _throttle(settings.up.throttle, learners, stated)
    if former is not None:
        check_same_brokers(former, settings, out)
    copies = copies_of(settings, loaded.origins, stated)
    keys = keys_for(settings, out, stated, former, fresh=aside or request.fresh)
    locked = settings.up.locked if "broker.url" in stated else keys is not None
    _check_via(settings.up.via, (*learners, *shard_names(shards), *standby_names(shards, settings.up.standbys)))
    settings = _complete(settings, copies, keys, {"throttle": throttle, "locked": locked})
    result = UpPlan(
        settings=settings,
        learners=learners,
        out=out,
        broker=settings.broker.url if "broker.url" in stated else None,
        prepare="data.dir" not in loaded.origins,
        former=former,
        aside=aside,
        resume=request.resume,
        like=like,
        keys=keys,
    )
    if request.resume and former is None:
        raise SettingsError(
            "there is no run to resume", got=out, allowed="a folder with run.json", todo="correct --out"
        )
    _check_data(result)
    if former is not None:
        _check_unchanged(former, result, stated)
    return result


def _complete(settings: Settings, copies: int, keys: Path | None, up: Mapping[str, Any]) -> Settings:
    broker = {"replicas": copies} | ({} if keys is None else {"identity": RunKeys(keys, settings.run).operator})
    return settings.model_copy(
        update={"up": settings.up.model_copy(update=up), "broker": settings.broker.model_copy(update=broker)}
    )


def _former(request: UpRequest, out: Path) -> tuple[RunFile | None, bool]:
    former = read_run_file(out)
    if former is None or request.fresh:
        return None, False
    if request.again and _is_finished(former, int(former.settings.get(_TARGET, 0))):
        return None, True
    if not former.begun:
        return None, False
    if former.broker == SIMULATED:
        raise SettingsError(
            "this folder holds a simulated run, which has no broker to go on with", got=out, todo="choose another --out"
        )
    return former, False


def _earlier(request: UpRequest, former: RunFile | None, out: Path) -> EarlierRun | None:
    like = None if request.like is None else read_earlier(request.like)
    if former is not None and like is not None:
        raise SettingsError(
            "--like begins a new run, and this folder holds one",
            got=out,
            todo="choose another --out, or leave --like away",
        )
    return like


def shard_names(shards: int) -> tuple[str, ...]:
    """Return the names of the processes that serve shards first, one per shard."""
    return tuple(f"shard-{i}" for i in range(shards))


def standby_names(shards: int, standbys: int) -> dict[str, int]:
    """Return the names of the processes that stand by, and the shard that each wants."""
    return {f"standby-{shard}-{i}": shard for shard in range(shards) for i in range(1, standbys + 1)}


def kept_settings(up: UpPlan) -> dict[str, Any]:
    """Return the settings that `run.json` keeps and the report tells: all but those of one child and possible secrets.

    Paths are absolute, so that the run can be begun again from any folder.
    """
    kept = {name: value for name, value in flat(up.settings).items() if not name.startswith(_OURS)}
    return {
        name: place_path(value, Path.cwd()) if name in PLACES else value
        for name, value in kept.items()
        if value is not None
        and redact(value) == value
        and (name != "data.dir" or not up.prepare)
        and (name != "broker.identity" or up.keys is None)
    }


def _fallback(former: RunFile | None, like: EarlierRun | None, run: str, stated: GivenValues) -> SettingsFallback:
    """Return the settings that apply where none were given.

    Of the section `up` a continued run keeps its learners, its text and its brokers; the rest is a matter of each session.
    A rate that nobody said is that of the optimizer, which may change.
    """
    if former is not None:
        kept = {name: value for name, value in former.settings.items() if not name.startswith("up.")}
        kept = {name: value for name, value in kept.items() if name not in RUN_AS_FOUND}
        kept = without_derived(kept, "run.json", ("train.",))
        ours = {
            "run": former.run,
            "up.learners": former.learners,
            "up.corpus": former.corpus,
            **{name: former.settings.get(name, fewest) for name, fewest in BROKERS.items()},
        }
        return SettingsFallback("run.json", kept | ours)
    if like is not None:
        return like.fallback(run, stated)
    return run_settings.default_fallback(run_settings.stated_learners(stated), run=run)


def _throttle(factors: Mapping[str, float], learners: Collection[str], stated: GivenValues) -> dict[str, float]:
    """Return the factors of the learners that there are; refuse one of another learner, unless an earlier run had that."""
    for name in factors:
        if name not in learners and f"up.throttle.{name}" in stated:
            raise SettingsError("--throttle names nobody", got=name, allowed=", ".join(learners), todo="see --learners")
    return {name: factor for name, factor in factors.items() if name in learners}


def _check_via(addresses: Mapping[str, str], children: Collection[str]) -> None:
    for name, url in addresses.items():
        if not is_address(url):
            got = f"{name}={redact(url)}"
            raise SettingsError("--via is wrong", got=got, allowed=f"name={ADDRESSES}", todo="see --help")
        if name not in children:
            raise SettingsError("--via names nobody", got=name, allowed=", ".join(children), todo="see --learners")


def _check_data(up: UpPlan) -> None:
    """Refuse a corpus that does not exist, or that this run would not read; a run that goes on has its data already."""
    corpus = up.settings.up.corpus
    if corpus and not up.prepare:
        raise SettingsError(
            "--corpus and data.dir contradict each other", got=up.settings.data.dir, todo="give one of the two"
        )
    for path in corpus if up.former is None else ():
        if not path.exists():
            told = f" ({up.like.path} names it)" if up.like is not None else ""
            raise SettingsError("there is no such text", got=f"{path}{told}", todo="correct --corpus")


def _check_unchanged(former: RunFile, up: UpPlan, stated: GivenValues) -> None:
    now = flat(up.settings)
    for name, (_, origin) in stated.items():
        was = former.run if name == "run" else former.settings.get(name)
        fixed = name.startswith(_FIXED) and name != _TARGET
        if fixed and _comparable(name, was) != _comparable(name, now.get(name)):
            raise SettingsError(
                f"{name} cannot change in a run that exists",
                got=f"{as_text(now.get(name))} from {redact(origin)}",
                allowed=f"{as_text(was) or 'nothing'}, as {up.out / 'run.json'} says",
                todo="leave it away, or start a new run in another --out (all but id, seed, text, brokers, model.* and "
                "protocol.* may change, and --tokens)",
            )
    texts = [str(path.absolute()) for path in up.settings.up.corpus]
    if texts != former.corpus:
        raise SettingsError(
            "the corpus of a run cannot change",
            got=", ".join(texts),
            allowed=", ".join(former.corpus) or "Python's own source",
            todo="leave --corpus away",
        )
    if former.broker != EMBEDDED and up.broker is None:
        raise SettingsError("this run lives on a broker of yours", todo=f"give --broker {former.broker}")
    if former.broker == EMBEDDED and up.broker is not None:
        origin = redact(stated["broker.url"][1])
        raise SettingsError(
            "this run lives in its own broker's store",
            got=f"{redact(up.broker)} from {origin}",
            todo=_undo_of(origin, "broker.url"),
        )
    _check_target(former, up)


def _undo_of(origin: str, name: str) -> str:
    if origin.startswith(PREFIX):
        return f"unset {origin}"
    return f"omit {origin}" if origin.startswith("--") else f"take {name} out of {origin}"


def _check_target(former: RunFile, up: UpPlan) -> None:
    """Refuse a target that the run has reached: it would end at once. `--again` begins anew only what is finished."""
    target, own = up.settings.protocol.tokens_target, int(former.settings.get(_TARGET, 0))
    if not _is_finished(former, target):
        return
    got = f"{former.tokens} tokens trained, target {target}"
    allowed = f"a target above {former.tokens}, or 0 for none"
    if _is_finished(former, own):
        raise SettingsError(
            "this run has reached its target",
            got=got,
            allowed=allowed,
            todo=f"give a larger --tokens to continue it, --again to begin anew, or another --out; "
            f"its report is {up.out / 'report.html'}{_export_hint(up)}",
        )
    raise SettingsError(
        "this run is not finished, and has trained more than the new target",
        got=f"{got}; its own is {own or 'none'}",
        allowed=allowed,
        todo="leave --tokens away to continue it as it was, or give a larger one; --again begins anew only where a run is "
        "finished, so to begin anew choose another --out or move this folder away",
    )


def _export_hint(up: UpPlan) -> str:
    """Return how to write the model of a finished run out, if its folder has none: the export failed, or was killed."""
    if up.broker is not None or (up.out / VALIDATION).exists():
        return ""
    store, out, text = (shlex.quote(str(path)) for path in (up.out / "nats", up.out, f"data.dir={up.out / 'data'}"))
    broker, export = f"atoll broker --store {store}", f"atoll export --run {up.settings.run} --out {out} --set {text}"
    return f"; its model was not exported: `{broker}` and beside it `{export}` do that"


def _comparable(name: str, value: object) -> str:
    return as_text(place_path(value, Path.cwd()) if name in PLACES else value)


def _is_finished(former: RunFile, target: int) -> bool:
    return 0 < target <= former.tokens
