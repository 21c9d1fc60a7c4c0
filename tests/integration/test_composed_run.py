"""`docker-compose.yml`, its services as processes: locked, each with its own identity, and it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import caches
from support.composed_run import BROKERS, LEAVES, NODES, RUN, ComposedRun
from support.whole_runs import SMALL, wait_for_line

pytestmark = pytest.mark.second_tier
SETTINGS = {f"ATOLL_{name.replace('.', '__').upper()}": value for name, value in (each.split("=") for each in SMALL)}


def test_three_islands_train_behind_a_locked_door(run_dir: Path) -> None:
    """Behind leaves of their own. Each has its own identity; a stranger is told; who is revoked is out, the others go on."""
    told = SETTINGS | {"ATOLL_LEARNER__COMPILE_CACHE": str(caches.PROGRAMS), "ATOLL_LEARNER__THROTTLE": "20"}
    learners = ("learner-a", "learner-b", "learner-c")
    with ComposedRun(run_dir, told) as run:
        run.begin("keys", "data", *BROKERS, "synchronizer-a", "synchronizer-b", *learners)
        for learner in learners:
            wait_for_line(run_dir / f"{learner}.log", "fragment.adopted", 2)
            run.await_health(learner)
        run.await_health("synchronizer-a")
        for leaf in LEAVES:
            wait_for_line(run_dir / f"{leaf}.log", "region.mirrored")
        run.begin("learner-a2")
        wait_for_line(run_dir / "learner-a2.log", "fragment.adopted")
        assert run.stop("learner-a2") == {"learner-a2": 0}
        again = run.ask("keys")
        assert "0 files changed" in again.stderr + again.stdout

        table = run.ask("watch", "top", "--once")
        assert table.returncode == 0, table.stderr
        assert {line.split()[0] for line in table.stdout.splitlines() if line.strip()} >= {"a", "b", "c"}
        exported = run.ask("export")
        assert exported.returncode == 0, exported.stderr
        assert (run.volume("model") / "model.safetensors").is_file()
        forbidden = run.ask("watch", "runs", "remove", RUN, "--yes")
        assert forbidden.returncode != 0
        assert "Traceback" not in forbidden.stderr
        stranger = run.ask("data", "top", "--once", "--run", RUN, "--broker", run.url)
        assert stranger.returncode != 0
        assert "broker.identity" in stranger.stderr

        revoked = run.ask("keys", "keys", "revoke", "/keys", "b", "--run", RUN)
        assert revoked.returncode == 0, revoked.stderr
        assert run.ask("keys").returncode == 0
        assert not (run.volume("identity-b") / "identity.toml").exists()
        wait_for_line(run_dir / "learner-b.log", "process.failed")
        assert "does not let us in" in run.log("learner-b")
        committed = run.log("synchronizer-a").count("round.committed")
        wait_for_line(run_dir / "synchronizer-a.log", "round.committed", committed + 2)

        assert run.stop("learner-a", "learner-c") == {"learner-a": 0, "learner-c": 0}
        fates = json.loads(run.ask("watch", "fates", "--json").stdout)
        assert {one["incarnation"].split("/")[0] for one in fates["incarnations"]} == {"a", "a2", "b", "c"}
        assert set(run.stop("synchronizer-a", "synchronizer-b").values()) == {0}
        assert set(run.stop(*LEAVES).values()) == {0}
        assert set(run.stop(*NODES).values()) == {0}
