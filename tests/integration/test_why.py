"""Why a round waited, from the machines over the event log to the words that `atoll why` prints, on both brokers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import structlog
from typer.testing import CliRunner

from atoll.base.background_tasks import LoopThread
from atoll.base.clock import SystemClock
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.cli.main import build
from atoll.cli.story import why_lines
from atoll.client.join import join
from atoll.client.options import JoinOptions
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.events import Names, PublishCall, RoundNeeds, id_of
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard
from atoll.run.decisions import describe_wait
from atoll.run.history import History
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects
from atoll_synchronizer.process import serve_run
from atoll_synchronizer.round_report import GrowingIntervals, RoundReporter
from atoll_synchronizer.shard_context import EventLog, ShardContext

SETTINGS = ProtocolSettings(
    fragments=2, shards=1, interval_steps=2, quorum=2, outer_momentum=0.9, tokens_target=400, silence_s=5.0
)
Opener = Callable[[], Coroutine[Any, Any, Bus]]


def trained(run: str, opener: Opener, home: LoopThread) -> None:
    shard = home.submit(serve_run(opener, run, shard=0))
    errors: list[BaseException] = []

    def train(learner: str) -> None:
        try:
            params = {"w": jnp.zeros((8, 2)), "v": jnp.zeros((5,))}
            with join(
                opener,
                run=run,
                learner=learner,
                params=params,
                protocol=SETTINGS,
                options=JoinOptions(home=home, log_adoptions=True),
            ) as island:
                params = island.params
                while not island.done:
                    params = jax.tree.map(lambda leaf: leaf + 0.1 * (1.0 - leaf), params)
                    threading.Event().wait(0.01)
                    params = island.step(params, tokens=4)
        except Exception as error:  # noqa: BLE001  (whatever ends a learner's thread fails the test)
            errors.append(error)

    threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240.0)

    assert not errors
    assert shard.result(timeout=240.0) == "token target reached"


def read(run: str, opener: Opener, home: LoopThread) -> History:
    async def read_it() -> History:
        history, bus = History(), await opener()
        try:
            await history.read(bus, Subjects(run))
        finally:
            await bus.close()
        return history

    return home.submit(read_it()).result(240.0)


def test_every_round_of_a_run_says_why_it_waited_and_what_caused_it(home: LoopThread, run: str) -> None:
    """In memory: log line and event have the same reason, and the chain goes from the call to the adoption."""
    broker = MemoryBroker()

    async def opener() -> Bus:
        return MemoryBus(run, broker)

    with structlog.testing.capture_logs() as logged:
        trained(run, opener, home)
    history = read(run, opener, home)
    committed = {(line["fragment"], line["version"]): line for line in logged if line["event"] == "round.committed"}
    adopted = {line["cause_id"] for line in logged if line["event"] == "fragment.adopted"}

    assert len(history.rounds) == len(committed) >= 4
    for line in history.rounds:
        made, why = line.round, line.round.why
        assert why is not None
        told = committed[made.fragment, made.version]
        assert told["why"] == "; ".join(describe_wait(why).values())
        assert told["id"] == id_of("commit", made.fragment, made.version)
        assert told["cause_id"] == made.cause_id
        assert made.cause_id.partition("/")[0] in {"push", "grace", "due", "beat", "bye", "queue"}
        for share in made.contributors:
            assert share.cause_id.partition("/")[0] in {"call", "head", "drain"}
        assert why.end == made.end
        assert why.quorum_wait_s == pytest.approx(made.quorum_wait_s, abs=1e-3)
    assert adopted <= {id_of("head", line.round.fragment, line.round.version) for line in history.rounds}
    assert adopted


@pytest.mark.connected
async def test_the_command_says_why_a_round_of_a_real_broker_waited(broker: EmbeddedBroker, run: str) -> None:
    home = LoopThread("world")

    async def opener() -> Bus:
        return await open_bus(broker.url, run, name="test")

    await asyncio.to_thread(trained, run, opener, home)
    history = await asyncio.to_thread(read, run, opener, home)
    await asyncio.to_thread(home.stop)
    first = history.find(0, 1)
    assert first is not None
    where = ["--run", run, "--broker", broker.url]

    def asked(*words: str) -> Any:  # noqa: ANN401  (typer's result)
        return CliRunner().invoke(build(), [*words, *where])

    one = await asyncio.to_thread(asked, "why", "--fragment", "0", "--version", "1")
    assert one.exit_code == 0, one.output
    assert first.round.why is not None
    # On a busy machine a timer is late, and the round says that.
    for words in ("why it waited", "what caused what", *describe_wait(first.round.why).values()):
        assert words in one.output
    for share in first.round.contributors:
        push = id_of("push", share.learner, share.incarnation, 0, share.push)
        assert f"{share.cause_id:<28} -> {push}" in one.output
    assert f"{'commit/0/1':<28} -> head/0/1" in one.output
    whole = await asyncio.to_thread(asked, "why")
    assert f" of {len(history.rounds)} rounds " in whole.output
    assert "from the call of a round until its version was visible, and while its shard had no owner" in whole.output
    missing = await asyncio.to_thread(asked, "why", "--fragment", "0", "--version", "999")
    assert missing.exit_code != 0
    assert "tells of no such round" in str(missing.exception)
    missing = await asyncio.to_thread(asked, "why", "--fragment", "9")
    assert "no round of this fragment" in str(missing.exception)
    assert "fragments 0 to 1" in str(missing.exception)


async def test_a_round_that_still_waits_is_told_by_its_last_call(run: str) -> None:
    bus = MemoryBus(run, MemoryBroker())
    layout = plan_layout([TensorSpec("w", (8,), "float32")], 1)
    record = RunRecord(run=run, founder="a", nonce="n", founded_at_s=0.0, layout=layout, protocol=SETTINGS)
    context = ShardContext(bus, record, 1, SystemClock())
    event_log = EventLog(bus, record.subjects, context.name, context.clock)
    report = RoundReporter(context, Shard(SETTINGS, 0, {0: 0, 1: 0}), event_log)
    for attempt in (2, 3, 4):
        needs = RoundNeeds(quorum=2, contributed=1, unanswered=Names.of(["b"]), live=2)
        await report.record_wait(PublishCall(fragment=1, version=17, attempt=attempt, run_tokens=0, needs=needs))
    history = History()
    history.take("ev.left.a", b"no event")
    await history.read(bus, record.subjects)

    assert why_lines(history, 1, 18) == [
        "fragment 1: version 18 is not there yet; call 4: it needs 2 of 2 live learners, and has 1; not yet b (call/1/17/4)"
    ]
    assert why_lines(history, None, None) == ["no round has ended yet"]


def test_a_wait_that_comes_again_and_again_is_logged_at_growing_intervals() -> None:
    """157 lines in ten minutes say no more than six; what was left out is counted, a long wait is said, a pause begins anew."""
    waits = GrowingIntervals()
    said = [(second, waits.take_unsaid()) for second in range(0, 628, 4) if waits.is_due(float(second), is_long=False)]
    out_of_turn = waits.is_due(629.0, is_long=True)
    unsaid = waits.take_unsaid()

    assert said == [(0, 0), (12, 2), (32, 4), (72, 9), (152, 19), (312, 39)]
    assert (out_of_turn, unsaid) == (True, 78)
    assert not waits.is_due(630.0, is_long=False)
    assert waits.is_due(1300.0, is_long=False)


def test_a_dump_is_replayed_by_the_command(tmp_path: Path) -> None:
    from atoll.base import fact_dumps  # noqa: PLC0415
    from atoll.protocol.events import Committed, TimerFired  # noqa: PLC0415
    from atoll.protocol.recorder import FactRecorder  # noqa: PLC0415

    fact_dumps.policy.folder = tmp_path
    try:
        recorder = FactRecorder("shard-0", Shard(SETTINGS, 0, {0: 0, 1: 0}))
        recorder.handle(TimerFired(at_s=1.0, name="due/0"))
        sound = fact_dumps.dump(recorder, "somebody asked")
        with pytest.raises(Exception, match="durable"):
            recorder.handle(Committed(at_s=2.0, fragment=0, version=1))
        broken = fact_dumps.dump(recorder, "it broke")
    finally:
        fact_dumps.policy.folder = None

    assert sound is not None
    assert broken is not None
    fine, again = (CliRunner().invoke(build(), ["replay", str(path)]) for path in (sound, broken))
    assert (fine.exit_code, again.exit_code) == (0, 1)
    assert "TimerFired(due/0) -> nothing" in fine.output
    assert "BREAKS: ProtocolMisuse" in again.output
