"""A real Prometheus beside a real run: alerts fire when parts are killed and end when they are back; dashboards have data."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from atoll.bus.interface import Bus
from atoll.protocol.events import PushKey
from atoll.run.record import read_run
from atoll.wire.events import EVALUATOR
from atoll.wire.messages import encode
from atoll.wire.subjects import Subjects
from support.deployments import open_signed
from support.events import event
from support.grafana import queries
from support.monitored_run import WHY_WITHOUT, WITHOUT, PrometheusProcess, SteadyRun, monitoring, until

pytestmark = [pytest.mark.connected, pytest.mark.second_tier, pytest.mark.skipif(WITHOUT, reason=WHY_WITHOUT)]

Watched = tuple[SteadyRun, PrometheusProcess]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A run that trains, its monitor, and a Prometheus that has seen it commit."""
    folder = tmp_path_factory.mktemp("prometheus")
    with SteadyRun(folder) as run:
        endpoints = f'monitor.endpoints=["{run.endpoint}"]'
        with (
            monitoring(folder, run.run, run.broker.url, run.reader, endpoints) as monitor,
            PrometheusProcess(folder, monitor.url) as prometheus,
        ):
            until("both learners are heard", lambda: bool(prometheus.data("sum(atoll_learner_up) == 2")))
            until("versions are committed", lambda: bool(prometheus.data("atoll_commits_total > 4")))
            until("all is quiet", lambda: prometheus.firing() == {})
            yield run, prometheus


def test_a_killed_learner_is_told_by_its_name_until_it_is_back(watched: Watched) -> None:
    """The other one trains on, so nothing else fires."""
    run, prometheus = watched
    run.kill("b")
    until("the loss is told", lambda: "AtollLearnerLost" in prometheus.firing())
    firing = prometheus.firing()
    run.start("b")
    until("nothing fires", lambda: prometheus.firing() == {})

    assert firing.keys() == {"AtollLearnerLost"}
    assert firing["AtollLearnerLost"]["learner"] == "b"
    assert firing["AtollLearnerLost"]["run"] == run.run


def test_a_killed_synchronizer_is_told_and_so_is_what_follows(watched: Watched) -> None:
    """First that there is none, then that nothing is committed; one that comes back ends both."""
    run, prometheus = watched
    run.kill("s")
    until("both are told", lambda: {"AtollNoSynchronizer", "AtollNoCommits"} <= prometheus.firing().keys())
    run.start("s")
    until("nothing fires", lambda: prometheus.firing() == {})


def test_a_killed_broker_is_told_once_and_not_for_every_learner(watched: Watched) -> None:
    """Nobody is heard without it; the alerts of learners and rounds hold back, so a person sees what it is."""
    run, prometheus = watched
    run.broker.servers[0].kill()
    until("it is told", lambda: {"AtollBrokerUnreachable", "AtollBrokerDown"} <= prometheus.firing().keys())
    firing = prometheus.firing().keys()
    run.broker.servers[0].start()
    until("nothing fires", lambda: prometheus.firing() == {})

    assert firing <= {"AtollBrokerUnreachable", "AtollBrokerDown"}


async def tell(bus: Bus, run: str, kind: str, who: str, **fields: object) -> None:
    line = encode(event(kind, who, time.time(), **fields))
    await bus.publish(Subjects(run).event(kind, who), line, msg_id=f"test-{kind}", info={})


async def test_every_query_of_every_dashboard_has_data(watched: Watched) -> None:
    """Of a run in which something was refused, dropped and measured; the queries are asked as Grafana would ask them."""
    run, prometheus = watched
    keys = run.broker.keys.path / "identities" / run.run
    shard = await open_signed(run.broker.url, run.run, keys / "s.toml")
    try:
        assert await read_run(shard, Subjects(run.run)) is not None
        await tell(
            shard, run.run, "refused", "shard-0", refusals=[{**PushKey("a", 1, 0, 1)._asdict(), "reason": "stale"}]
        )
        await tell(shard, run.run, "junk", "shard-0", messages=1, reasons={"malformed": 1})
    finally:
        await shard.close()
    evaluator = run.broker.add(run.run, "judge", "evaluator")
    judge = await open_signed(run.broker.url, run.run, evaluator)
    try:
        await tell(judge, run.run, "validation", EVALUATOR, run_tokens=1, bits_per_byte=3.5)
    finally:
        await judge.close()
    lacking = dict(queries(run.run, "10s"))
    asked = len(lacking)

    def answered() -> bool:
        for title, query in list(lacking.items()):
            if prometheus.data(query):
                del lacking[title]
        return not lacking

    try:
        until("every query has data", answered)
    finally:
        assert lacking == {}
    assert asked > 40
