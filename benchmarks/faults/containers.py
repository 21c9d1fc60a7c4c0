"""`docker-compose.yml` for real: `make compose-test` builds its images, runs it in podman, and breaks it as its pages say.

From nothing: a base image (`support.podman`), both images from the unmodified Dockerfile, and the unmodified file with a small
model. What goes on is read from the log lines of the services. Scenes, in this order:

    train      three islands, a falling loss
    faults     every container is killed and started again, then stopped and started, one at a time
    crash      a process dies inside its container, one of each kind
    cut        the leaf of an island is taken out of the WAN for a minute, and brought back
    export     the merged model comes out
    down, up   all containers go in good order, and come back
    reboot     all containers go at once, the volumes stay
    finished   a run that reaches its end stays over, also after a reboot

`--short` breaks one container of each kind, cuts for five seconds less and leaves the last scene out.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file

from atoll.base import VERSION
from benchmarks.lib.harness import RESULTS, Figure, Unfit, above_zero, at_most, exactly, fact, run_benchmark, true, zero
from benchmarks.lib.runs import environment
from support.composed_containers import ROOT, ComposedContainers, wait_until
from support.podman import BASE, Podman, unfit

NODES: Final = ("nats-1", "nats-2", "nats-3")
SYNCHRONIZERS: Final = ("synchronizer-a", "synchronizer-b")
LEAVES: Final = ("leaf-a", "leaf-b", "leaf-c")
LEARNERS: Final = ("learner-a", "learner-b", "learner-c")
ALL: Final = (*NODES, *SYNCHRONIZERS, *LEAVES, *LEARNERS)
ONE_OF_EACH: Final = ("nats-1", "synchronizer-a", "leaf-a", "learner-a")
CRASHED: Final = ("nats-3", "synchronizer-b", "leaf-c", "learner-c")
SMALL: Final = {
    "ATOLL_MODEL__SIZE": "xs",
    "ATOLL_TRAIN__BATCH": "4",
    "ATOLL_LEARNER__THROTTLE": "8",
    "ATOLL_LEARNER__THREADS": "1",
}
TARGET_TOKENS: Final = 60_000
ISLAND: Final = "b"
WARM_COMMITS: Final = 12
AWAY_COMMITS: Final = 2
BEGIN_S, HEALTHY_S, GOES_ON_S, CURRENT_S, OVER_S = 420.0, 120.0, 60.0, 120.0, 420.0
CUT_S: Final = 60.0
STALE_S: Final = 55.0
"""After so long without an answer a health check must fail: a silent link counts as cut after 30 s, and `atoll health` allows
15 s more."""
TRIES: Final = 5


class Scenes:
    """One project's life, scene by scene."""

    def __init__(self, engine: Podman, compose: Path, seed: int, *, short: bool) -> None:
        """Prepare; nothing runs yet."""
        self._engine = engine
        self._compose = compose
        self._settings = SMALL | {"ATOLL_SEED": str(seed)}
        self._short = short
        self._versions: dict[int, int] = {}
        self._run = ComposedContainers(engine, compose, self._settings)

    def play(self, figures: list[Figure]) -> None:
        """Play every scene, and add each one's figures. Raises `SystemExit` when something does not come in time."""
        scenes: list[Callable[[], list[Figure]]] = [self._train, self._faults, self._crash, self._cut, self._export]
        scenes += [self._down_and_up, self._reboot, *([] if self._short else [self._finished])]
        for scene in scenes:
            told = scene()
            figures += told
            for each in told:
                print(f"  {each.name}: {each.value:.4g} {each.unit}", flush=True)

    def keep_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for service in ("keys", "data", *ALL):
            (folder / f"{service}.log").write_text(self._run.said(service), encoding="utf-8")

    def _train(self) -> list[Figure]:
        began_s = time.time()
        self._run.up()
        wait_until("rounds are committed", lambda: len(self._commits(began_s)) >= WARM_COMMITS, BEGIN_S)
        wait_until("every health check says yes", lambda: all(map(self._run.is_healthy, ALL)), HEALTHY_S)
        wait_until("every loss falls", lambda: all(self._loss_falls(name) for name in LEARNERS), BEGIN_S)
        took_s = self._commits(began_s)[0]["at_s"] - began_s
        return [
            fact("up to the first round", took_s, "s", "images are there, volumes are empty"),
            exactly("islands whose loss falls", 3, "of 3", 3, "first step beside the latest"),
        ]

    def _faults(self) -> list[Figure]:
        figures = []
        for word, how in (("kill", "SIGKILL"), ("stop", "SIGTERM, in good order")):
            waits = {name: self._without(word, name) for name in (ONE_OF_EACH if self._short else ALL)}
            worst = max(waits, key=lambda name: waits[name])
            told = f"{how}; {len(waits)} containers in turn; longest without {worst}"
            figures.append(at_most(f"{word}: rounds go on after", waits[worst], "s", GOES_ON_S, told))
        return figures

    def _without(self, word: str, name: str) -> float:
        """Take a container away and bring it back; return after how long the others had committed again."""
        self._run.compose(word, name)
        began_s = time.time()
        wait_until(f"{name} is away", lambda: not self._run.is_running(name), HEALTHY_S)
        wait_until(f"rounds go on without {name}", lambda: len(self._commits(began_s)) >= AWAY_COMMITS, 2 * GOES_ON_S)
        took_s = float(self._commits(began_s)[AWAY_COMMITS - 1]["at_s"]) - began_s
        # The pages bring a learner back by `up -d`, and the others by `start`.
        self._run.compose(*(("up", "-d", "--no-deps") if name in LEARNERS else ("start",)), name)
        back_s = wait_until(f"{name} is healthy again", lambda: self._run.is_healthy(name), HEALTHY_S)
        print(f"  {word} {name}: two commits after {took_s:.1f} s, healthy {back_s:.1f} s after its start", flush=True)
        return took_s

    def _crash(self) -> list[Figure]:
        """A process dies inside its container: the engine starts it again, because nobody asked for its end."""
        waits = {name: self._crashed(name) for name in CRASHED}
        worst = max(waits, key=lambda name: waits[name])
        how = f"restart: unless-stopped; {len(waits)} containers in turn, until healthy; longest {worst}"
        return [fact("crash: the engine brings it back after", waits[worst], "s", how)]

    def _crashed(self, name: str) -> float:
        began_s, before = time.time(), self._run.state(name)["RestartCount"]
        self._engine.ask("exec", self._run.container(name), "sh", "-c", "kill -9 -1", check=False)
        wait_until(
            f"{name}, whose process died, is started again",
            lambda: self._run.state(name)["RestartCount"] > before,
            HEALTHY_S,
        )
        wait_until(f"{name} is healthy after its crash", lambda: self._run.is_healthy(name), HEALTHY_S)
        back_s = time.time() - began_s
        wait_until("rounds go on", lambda: len(self._commits(began_s)) >= AWAY_COMMITS, 2 * GOES_ON_S)
        return back_s

    def _cut(self) -> list[Figure]:
        name, leaf, cut_s = f"learner-{ISLAND}", f"leaf-{ISLAND}", STALE_S if self._short else CUT_S
        self._run.cut(ISLAND)
        began_s = time.time()
        wait_until("the time of the cut is over", lambda: time.time() - began_s >= cut_s, 2 * CUT_S)
        unwell = [each for each in (name, leaf) if not self._run.is_healthy(each)]
        trained = sum(1 for _ in self._run.events(name, "learner.progress", began_s + cut_s / 2))
        meanwhile = [each["at_s"] for each in self._commits(began_s)]
        pause_s = max((b - a for a, b in zip([began_s, *meanwhile], [*meanwhile, time.time()], strict=True)))
        reached = dict(self._versions)
        healed_s = time.time()
        self._run.heal(ISLAND)

        def is_current() -> bool:
            holds: dict[int, int] = {}
            for each in self._run.events(name, "fragment.adopted", healed_s):
                holds[each["fragment"]] = max(each["version"], holds.get(each["fragment"], 0))
            newest = all(holds.get(fragment, 0) >= version for fragment, version in reached.items())
            return newest and self._merges(healed_s)

        wait_until("the island is current again", is_current, 2 * CURRENT_S)
        current_s = time.time() - healed_s
        wait_until(
            "the island is healthy again", lambda: self._run.is_healthy(name) and self._run.is_healthy(leaf), HEALTHY_S
        )
        waited = sum(int(each["messages"]) for each in self._run.events(leaf, "region.caught_up", healed_s))
        exact = self._fates_are_exact()
        return [
            above_zero("cut: commits of the others meanwhile", len(meanwhile), "", f"{cut_s:g} s"),
            at_most("cut: longest pause of the others", pause_s, "s", GOES_ON_S, ""),
            exactly("cut: health checks that fail", len(unwell), "", 2, "its learner, its leaf"),
            above_zero("cut: reports of its learner's steps", trained, "", "in the second half of the cut"),
            above_zero("cut: messages that waited at its leaf", waited, "", "`region.caught_up`"),
            at_most(
                "cut: current again after the heal",
                current_s,
                "s",
                CURRENT_S,
                "it has adopted what was newest of each fragment at the heal, and a push of it is merged",
            ),
            true("cut: every token has one fate", exact, "`watch fates --json`, each incarnation"),
        ]

    def _export(self) -> list[Figure]:
        """By the words of the page; podman-compose would wait for the end of what `export` depends on, too."""
        self._run.compose("up", "--no-deps", "export")
        out = self._engine.folder / "model"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        self._engine.ask("cp", f"{self._run.container('export')}:/model/.", str(out))
        model = out / "model.safetensors"
        tensors = load_file(model) if model.is_file() else {}
        finite = sum(bool(np.isfinite(tensor.astype(np.float32)).all()) for tensor in tensors.values())
        size_mb = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        told = f"`up export`, then `cp`; {finite} of {len(tensors)} tensors are finite"
        return [Figure("export: the merged model", size_mb, "MB", "> 0", 0 < len(tensors) == finite, told)]

    def _down_and_up(self) -> list[Figure]:
        self._commits(0.0)  # with the containers go their logs
        self._run.compose("down")
        return [self._goes_on("down and up", "`down`, `up -d`")]

    def _reboot(self) -> list[Figure]:
        self._commits(0.0)
        self._engine.ask("rm", "--all", "--force", "--time", "0")
        return [self._goes_on("reboot", "all containers removed at once by SIGKILL, volumes stay, `up -d`")]

    def _goes_on(self, what: str, how: str) -> Figure:
        """Start everything again: the same run must go on from where it was, not from nothing."""
        before = dict(self._versions)
        began_s = time.time()
        self._run.up()
        wait_until(f"rounds go on after {what}", lambda: len(self._commits(began_s)) >= AWAY_COMMITS, BEGIN_S)
        first = self._commits(began_s)[0]
        # Not by the tokens of the run: a shard that begins anew may know of fewer than the other one did.
        holds = first["version"] > before[first["fragment"]]
        return Figure(f"{what}: first round after", first["at_s"] - began_s, "s", "the same run", holds, how)

    def _finished(self) -> list[Figure]:
        """A run with an end, from nothing: its services stay, are not started again, and a reboot does not wake it."""
        self._run.compose("down", "-v")
        settings = self._settings | {"ATOLL_PROTOCOL__TOKENS_TARGET": str(TARGET_TOKENS)}
        self._run = ComposedContainers(self._engine, self._compose, settings)
        services = (*SYNCHRONIZERS, *LEARNERS)

        def all_stay() -> bool:
            return all(any(self._run.events(name, "process.resting")) for name in services)

        self._run.up()
        wait_until("the run is over and its services stay", all_stay, OVER_S)
        restarts = sum(self._run.state(name)["RestartCount"] for name in services)
        self._engine.ask("rm", "--all", "--force", "--time", "0")
        began_s = time.time()
        self._run.up()
        wait_until("its services stay after a reboot, too", all_stay, OVER_S)
        rounds = len(self._commits(began_s))
        restarts += sum(self._run.state(name)["RestartCount"] for name in services)
        return [
            zero("finished: containers started again", restarts, "", "RestartCount"),
            zero("finished: rounds after a reboot", rounds, "", "the run is over"),
        ]

    def _commits(self, since_s: float) -> list[dict[str, Any]]:
        """Return the rounds that shards have committed since a time, in order; keep how far each fragment is."""
        found = [each for name in SYNCHRONIZERS for each in self._run.events(name, "round.committed", since_s)]
        for each in found:
            self._versions[each["fragment"]] = max(each["version"], self._versions.get(each["fragment"], 0))
        return sorted(found, key=lambda each: float(each["at_s"]))

    def _merges(self, since_s: float) -> bool:
        return any(f"/{ISLAND}/" in push for each in self._commits(since_s) for push in each["pushes"])

    def _loss_falls(self, name: str) -> bool:
        first = [each["loss"] for each in self._run.events(name, "learner.first_step")]
        later = [each["loss"] for each in self._run.events(name, "learner.progress")]
        return bool(first and later) and later[-1] < first[0]

    def _fates_are_exact(self) -> bool:
        """Return whether the fates of each incarnation sum up to what it trained; the ledger may change while it is read."""
        for _ in range(TRIES):
            ledger = json.loads(self._run.compose("run", "--rm", "--no-deps", "-T", "watch", "fates", "--json").stdout)
            rows = ledger["incarnations"]
            if all(sum(row["fates"].values()) == ledger["fragments"] * row["trained"] for row in rows):
                return True
        return False


FOLDER = Path("build/containers")
IMAGES = {"synchronizer": f"atoll-synchronizer:{VERSION}", "learner": f"atoll-learner:{VERSION}"}
SIZES_MB = {"synchronizer": 350.0, "learner": 800.0}
"""Goals. Half of the synchronizer's image is Python and its Debian; XLA is 240 MB of the learner's."""
INSTALLED = "import importlib.metadata as m; print(' '.join(sorted(d.name.lower() for d in m.distributions())))"
LISTED = (
    "import sys; sys.path.append('/tools'); from cyclonedx_py._internal.cli import run; "
    "sys.exit(run(argv=['environment', '--of', 'JSON', '/opt/atoll/bin/python']))"
)


def main(*, seed: int = 0, short: bool = False) -> list[Figure]:
    if reason := unfit():
        raise Unfit(reason)
    engine, tools = Podman(FOLDER), Path(environment("compose"))
    engine.clear()
    figures = images(engine, tools)
    scenes = Scenes(engine, tools.with_name("podman-compose"), seed, short=short)
    failed = ""
    try:
        scenes.play(figures)
    except SystemExit as error:
        # A scene that fails takes nothing from those before it: half an hour's figures are written all the same.
        failed = str(error)
    finally:
        scenes.keep_logs(FOLDER / "logs")
        engine.clear()
    figures.append(zero("scene that failed", bool(failed), "", failed or "all were played"))
    return figures


def images(engine: Podman, tools: Path) -> list[Figure]:
    engine.make_base()
    base_mb = engine.size(BASE)
    figures = [fact("base image", base_mb, "MB", "a stand-in of Debian's packages")]
    for target, image in IMAGES.items():
        began_s = time.monotonic()
        engine.build(ROOT, image, target)
        print(f"{image} built in {time.monotonic() - began_s:.0f} s", flush=True)
        size_mb, goal_mb = engine.size(image), SIZES_MB[target]
        how = f"with its Python; {size_mb - base_mb:.0f} MB of it are ours and our dependencies'"
        figures.append(at_most(f"image, {target}", size_mb, "MB", goal_mb, how))
        figures.append(bill_of_materials(engine, tools, target, image))
    with_jax = "jax" in engine.in_image(IMAGES["synchronizer"], INSTALLED).split()
    figures.append(zero("jax in the synchronizer's image", with_jax, "", "distributions"))
    return figures


def bill_of_materials(engine: Podman, tools: Path, target: str, image: str) -> Figure:
    (packages,) = tools.parents[1].glob("lib/python*/site-packages")
    listed = engine.in_image(image, LISTED, [f"{packages.absolute()}:/tools:ro"])
    path = RESULTS / f"sbom-{target}.cdx.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(listed + "\n", encoding="utf-8")
    named = {component["name"].lower() for component in json.loads(listed)["components"]}
    missing = set(engine.in_image(image, INSTALLED).split()) - named
    how = f"CycloneDX, {path}" + (f"; missing: {', '.join(sorted(missing))}" if missing else "")
    return Figure(f"bill of materials, {target}", float(len(named)), "packages", "all installed", not missing, how)


if __name__ == "__main__":
    run_benchmark("compose-test", main)
