"""`atoll broker status` on a real cluster: every node's roll, version and peers; an old roll and a lost node are seen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from atoll import __version__
from atoll.bus.server import EmbeddedBroker
from support.command_line import CommandResult, atoll
from support.locked_brokers import POLL_S, SOON_S, LockedBroker

pytestmark = [pytest.mark.connected]
NODES = 3
STREAM_BYTES_MAX = 1 << 26


@pytest.fixture(autouse=True)
def _wall_jumps() -> None:
    """Certificates are judged by the time of day."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedBroker]:
    """A locked cluster of three nodes, which runs and keeps something: one that has never agreed elects no second leader."""
    with LockedBroker(tmp_path_factory.mktemp("cluster"), NODES) as made:
        asyncio.run(founded(made))
        yield made


async def founded(cluster: LockedBroker) -> None:
    bus = await cluster.bus("mine", cluster.operator)
    try:
        await bus.provision(STREAM_BYTES_MAX)
    finally:
        await bus.close()


def asked(cluster: LockedBroker, *words: str, identity: Path | None = None) -> CommandResult:
    mine = identity or cluster.keys.path / "identities" / "operator.toml"
    return atoll("broker", "status", "--broker", cluster.url, *words, environment={"ATOLL_BROKER__IDENTITY": str(mine)})


def rows(done: CommandResult) -> dict[str, dict[str, Any]]:
    assert done.stdout, done.stderr
    return {row["node"] or row["address"]: row for row in json.loads(done.stdout)}


def await_well(cluster: LockedBroker) -> dict[str, dict[str, Any]]:
    """Return the rows once all nodes are connected to each other and follow one roll."""
    deadline_s = time.monotonic() + SOON_S
    while (done := asked(cluster, "--json")).returncode != 0:
        assert time.monotonic() < deadline_s, done.stdout + done.stderr
        time.sleep(POLL_S)
    return rows(done)


def test_every_node_tells_its_roll_its_versions_and_its_peers(cluster: LockedBroker) -> None:
    before_s = int(time.time()) - 600
    found = await_well(cluster)
    table = asked(cluster, "--keys", str(cluster.keys.path))

    assert len(found) == NODES
    for name, row in found.items():
        assert set(row["peers"]) == found.keys() - {name}
        assert (row["atoll"], row["faults"]) == (__version__, [])
        assert row["nats_server"].startswith("2.")
        assert before_s < row["roll_changed_s"] <= time.time()
    assert {row["address"] for row in found.values()} == {f"127.0.0.1:{server.port}" for server in cluster.servers}
    assert len({row["roll_digest"] for row in found.values()}) == 1
    assert (table.returncode, table.stderr) == (0, "")
    lines = table.stdout.splitlines()
    assert len(lines) == 1 + NODES
    for line, (name, row) in zip(lines[1:], sorted(found.items()), strict=True):
        changed = datetime.fromtimestamp(row["roll_changed_s"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        assert all(word in line for word in (name, row["address"], changed, row["roll_digest"], __version__))
        assert line.rstrip().endswith("ok")


def test_a_node_with_an_old_roll_is_seen(cluster: LockedBroker) -> None:
    """It leaves with 1, names that node and says what to do. With --keys, a roll that no node has is seen."""
    digest = await_well(cluster).popitem()[1]["roll_digest"]
    cluster.keys.add("ada", "learner", "mine", time.time() + 1.0)
    unknown = asked(cluster)
    forgotten = asked(cluster, "--keys", str(cluster.keys.path), "--json")
    late = cluster.servers[-1]
    for door, server in zip(cluster.doors[:-1], cluster.servers[:-1], strict=True):
        assert door.has_changed()
        server.reload()
    old, table = asked(cluster, "--json"), asked(cluster)
    cluster.follow()

    assert unknown.returncode == 0
    assert [row["faults"] for row in rows(forgotten).values()] == [["old roll"]] * NODES
    (stale,) = [row for row in rows(old).values() if row["faults"]]
    assert (old.returncode, table.returncode) == (1, 1)
    assert (stale["address"], stale["roll_digest"], stale["faults"]) == (f"127.0.0.1:{late.port}", digest, ["old roll"])
    assert "old roll" in table.stdout
    assert "to do: copy roll.json" in table.stdout
    assert await_well(cluster).popitem()[1]["roll_digest"] != digest


def test_a_node_that_is_away_is_a_line_of_its_own(cluster: LockedBroker) -> None:
    await_well(cluster)
    lost = cluster.servers[0]
    lost.kill()
    done = asked(cluster, "--json")
    lost.restart()
    found = rows(done)

    assert done.returncode == 1
    assert found[f"127.0.0.1:{lost.port}"]["faults"] == ["nobody answers here"]
    others = {name: row for name, row in found.items() if row["node"]}
    assert len(others) == NODES - 1
    assert len(await_well(cluster)) == NODES


def test_only_an_operator_may_ask_and_only_a_locked_broker_tells(cluster: LockedBroker, tmp_path: Path) -> None:
    shard = cluster.add("mine", "shard", "synchronizer")
    refused = asked(cluster, identity=shard)
    with EmbeddedBroker(tmp_path / "open") as server:
        nobody = atoll("broker", "status", "--broker", server.url)

    assert (refused.returncode, nobody.returncode) == (2, 2)
    assert "`atoll broker status` asks what only an operator may" in refused.stderr
    assert "this broker does not say what its nodes are" in nobody.stderr
    assert "Traceback" not in refused.stderr + nobody.stderr
