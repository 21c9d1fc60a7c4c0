"""The programs of a run on this machine, as plans for the process group.

A program is configured through its environment (`atoll.local.run_settings`): the resolved settings of the run, with its own
on top. Programs run under this very interpreter.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import redact
from atoll.base.files import read_text
from atoll.base.machine import huge_pages
from atoll.base.wording import counted
from atoll.bus.server import ClusterNode, node_store, planned_nodes
from atoll.keys.rights import Kind
from atoll.local.brokers import host_command
from atoll.local.options import UpPlan, shard_names, standby_names
from atoll.local.own_brokers import RunKeys
from atoll.local.processes import ChildPlan, ProcessGroup
from atoll.local.program_cache import program_cache
from atoll.local.run_settings import EVALUATE_CORES_MAX, EVALUATE_EVERY_S, flat, variables, without_settings
from atoll.local.run_store import archive_url
from atoll.run.folder import RunFolder
from atoll.settings.sections import MonitorSettings

BROKER: Final = "broker"
BULK: Final = "bulk"
EVALUATOR: Final = "evaluator"
DATA: Final = "data"
EXPORT: Final = "export"
DASHBOARD: Final = "dashboard"
RESTARTS_MAX: Final = 5
LEARNERS_LEAVE_S: Final = 75.0
LEAVE_SHARE: Final = 1.25
"""Of the time that a learner has to leave (`learner.drain_s`), after which it is killed: its last checkpoint has some more."""
SYNCHRONIZERS: Final = "synchronizers"


class Services:
    """The plans of one run; `url` is the broker's address, once it is known.

    Attributes:
        shards: names of the processes that serve shards first, one per shard.
        standbys: names of the processes that stand by, and the shard that each wants.
        home: names of the hosts of the broker that is the run's home, one per node, if it is our own.
        brokers: those, and the hosts of the further brokers that keep fragments.
        url_files: the files to which these hosts write their addresses.
        learners_leave_s: how long learners may take to leave: as they were told to at most, with their last checkpoint.
        data_dir: folder of the token shards.
        page_url: the file to which the monitor that shows the run writes its address.
    """

    def __init__(self, up: UpPlan, folder: RunFolder, url: str = "") -> None:
        self._up = up
        self._folder = folder
        self._url = url
        self._keys = None if up.keys is None else RunKeys(up.keys, up.settings.run)
        ours = up.settings.up
        self.shards = shard_names(up.settings.protocol.shards)
        self.standbys = standby_names(up.settings.protocol.shards, ours.standbys)
        numbers, store = range(1, ours.brokers + 1), folder.path("nats").absolute()
        self.home = (BROKER,) if ours.brokers == 1 else tuple(f"{BROKER}-{node}" for node in numbers)
        further = tuple(f"{BULK}-{number}" for number in range(1, ours.bulk_brokers + 1))
        self.brokers = self.home + further
        homes = [store] if ours.brokers == 1 else [node_store(store, node) for node in numbers]
        self._stores = [*homes, *(store / name for name in further)]
        self.url_files = tuple(each / "url" for each in self._stores)
        self.learners_leave_s = max(LEARNERS_LEAVE_S, LEAVE_SHARE * up.settings.learner.drain_s)
        self.data_dir = (folder.path("data") if up.prepare else up.settings.data.dir).absolute()
        self.page_url = folder.path("logs", f"{DASHBOARD}.url").absolute()

    def needs(self, name: str, fleet: ProcessGroup) -> bool:
        """Return whether the run is over without a child: it survives a learner or broker of several, and the evaluator."""
        if name in (EVALUATOR, EXPORT, DATA, DASHBOARD) or name in self.standbys:
            return False
        if name in self.home:
            return 2 * len(fleet.alive(self.home)) <= len(self.home)
        if name not in self._up.learners:
            return True
        others = [learner for learner in self._up.learners if learner != name]
        return not fleet.alive(others) and not any(fleet.codes(other)[-1:] == (0,) for other in others)

    def addresses(self) -> tuple[str, tuple[str, ...]]:
        """Return the addresses of our own brokers, which answer: that of the home, and those of the further ones."""
        told = [read_text(file) for file in self.url_files]
        return ",".join(told[: len(self.home)]), tuple(told[len(self.home) :])

    def make_keys(self) -> None:
        """Make the keys of a locked broker, those of learners that were added among them; an open one has none."""
        if self._keys is not None:
            kinds: dict[str, Kind] = {SYNCHRONIZERS: "synchronizer", EVALUATOR: "evaluator", EXPORT: "reader"}
            self._keys.make({**dict.fromkeys(self._up.learners, "learner"), **kinds})

    def greeting(self) -> list[str]:
        """Return the lines that tell a person what runs where, who may enter, and how to watch it."""
        run, url = self._up.settings.run, redact(self._url)
        train = self._up.settings.train
        inner = f"{train['optimizer']} at a rate of {train['rate']:g}"
        pace = f"each fragment merged every {self._up.settings.protocol.interval_steps} steps"
        lines = [f"run {run}: {counted(len(self._up.learners), 'learner')}, {inner}, {pace}, {url}"]
        if self._up.broker is None and self._keys is None:
            lines.append("its broker is open to every user of this machine")
        # The folder has the identity that a locked broker asks for.
        place = f"--run {run} --broker {url}" if self._keys is None else f"--out {self._up.out}"
        return [*lines, f"watch it with: {_program()} tap {place}"]

    def broker(self) -> list[ChildPlan]:
        """Return the plan of each host of our own broker. If it cannot start once, it would not start twice."""
        nodes: list[ClusterNode | None] = [None] * len(self.brokers)
        if len(self.home) > 1:
            nodes[: len(self.home)] = planned_nodes(self._folder.path("nats").absolute(), len(self.home))
        plans = []
        for number, (name, store, node) in enumerate(zip(self.brokers, self._stores, nodes, strict=True)):
            port = self._up.settings.up.port
            port += number if port else 0
            command = host_command(store, store / "url", port, node, self._up.keys)
            plans.append(ChildPlan(name, command, without_settings(os.environ)))
        return plans

    def prepare(self) -> ChildPlan:
        """Return the plan that makes token shards of the corpus."""
        inputs = [str(path.absolute()) for path in self._up.settings.up.corpus] or ["--stdlib"]
        theirs = ["--tokenizer", str(self._up.tokenizer)] if self._up.tokenizer else []
        return self._verb(DATA, "data", "prepare", *inputs, *theirs, "--out", str(self.data_dir))

    def check_data(self) -> ChildPlan:
        """Return the plan that checks token shards which are there."""
        return self._verb(DATA, "data", "show", str(self.data_dir))

    def export(self) -> ChildPlan:
        """Return the plan that writes the merged model to the run's folder, where the evaluator did not."""
        return self._verb(EXPORT, "export", "--out", str(self._folder.out.absolute()))

    def evaluator(self) -> ChildPlan:
        """Return the plan of the process that measures the merged model while the run goes on, and writes it out at the end."""
        pace = ("--every", f"{EVALUATE_EVERY_S:g}", "--cores-max", f"{EVALUATE_CORES_MAX:g}")
        words = (*pace, "--export", str(self._folder.out.absolute()))
        return self._verb(EVALUATOR, "evaluate", *words, restarts_max=RESTARTS_MAX)

    def dashboard(self) -> ChildPlan:
        """Return the plan of that monitor; the port that every monitor has unless it is told may be taken."""
        port = self._up.settings.monitor.port
        own = {
            **self._identity(EXPORT),
            "monitor.port": 0 if port == MonitorSettings().port else port,
            "monitor.url_file": str(self.page_url),
            "up.out": str(self._folder.out.absolute()),
            "monitor.folder": str(self._folder.path("logs", "monitor").absolute()),
        }
        return ChildPlan(DASHBOARD, (sys.executable, "-m", "atoll_monitor"), self._environment(own))

    def synchronizer(self, name: str, number: int) -> ChildPlan:
        """Return the plan of a process that wants shard `number`."""
        own = {
            **self._link(name),
            **self._identity(SYNCHRONIZERS),
            "synchronizer.shard": number,
            "health_file": str(self._folder.path("health", name).absolute()),
        }
        command = (sys.executable, "-m", "atoll_synchronizer")
        return ChildPlan(name, command, self._environment(own), restarts_max=RESTARTS_MAX)

    def learner(self, learner: str) -> ChildPlan:
        """Return the plan of one learner; the processor's cores are divided evenly unless threads are set."""
        told = self._up.settings.learner
        cores = os.cpu_count() or 1
        own = {
            **self._link(learner),
            **self._identity(learner),
            "learner.id": learner,
            "health_file": str(self._folder.path("health", learner).absolute()),
            "learner.threads": told.threads or max(1, cores // len(self._up.learners)),
            "learner.throttle": self._up.settings.up.throttle.get(learner, told.throttle),
            "learner.checkpoint_dir": str((told.checkpoint_dir or self._folder.path("checkpoints")).absolute()),
            **({"learner.initial_model": str(told.initial_model.absolute())} if told.initial_model else {}),
        }
        command = (sys.executable, "-m", "atoll_learner")
        environment = self._environment(own) | huge_pages(os.environ)
        return ChildPlan(learner, command, environment, restarts_max=RESTARTS_MAX)

    def _link(self, name: str) -> dict[str, str]:
        via = self._up.settings.up.via
        return {"broker.url": via[name]} if name in via else {}

    def _identity(self, name: str) -> dict[str, str]:
        return {} if self._keys is None else {"broker.identity": str(self._keys.identity_of(name))}

    def _verb(self, name: str, *words: str, restarts_max: int = 0) -> ChildPlan:
        command = (sys.executable, "-m", "atoll.cli", *words)
        own = self._identity(name) if name in (EVALUATOR, EXPORT) else {}
        return ChildPlan(name, command, self._environment(own) | huge_pages(os.environ), restarts_max=restarts_max)

    def _environment(self, own: Mapping[str, Any]) -> dict[str, str]:
        cache = self._up.settings.learner.compile_cache or program_cache(self._folder.out)
        shared: dict[str, Any] = {
            "data.dir": str(self.data_dir),
            "learner.compile_cache": str(cache.absolute()),
            "log.format": "json",
            "log.dump_dir": str(self._folder.path("logs").absolute()),
            "archive.url": archive_url(self._up),
        }
        if self._url:
            shared["broker.url"] = self._url
        # The section is ours alone, and `up.via` may hold a secret that is meant for one child.
        values = {name: value for name, value in flat(self._up.settings).items() if not name.startswith("up.")}
        values |= {**shared, **own}
        # The threads of NumPy's algebra spin while they wait: on cores that also train a norm takes 200 times as long.
        return {
            "OPENBLAS_NUM_THREADS": "1",
            **without_settings(os.environ),
            "PYTHONUNBUFFERED": "1",
            **variables(values),
        }


def _program() -> str:
    if shutil.which("atoll"):
        return "atoll"
    program = Path(sys.executable).with_name("atoll")
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
