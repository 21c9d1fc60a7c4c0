"""The command line as a person meets it: fast, and clear about mistakes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from atoll.base.errors import BrokerUnavailable
from atoll.bus.server import EmbeddedBroker
from atoll.cli.main import GROUPS, VERBS, build
from atoll.cli.reading import settings_of
from atoll.run.folder import RunFile
from support.command_line import atoll
from support.deployments import free_port
from support.links import GreetingServer

HEAVY = ("jax", "flax", "optax", "nats", "textual", "pyarrow", "tokenizers")


def process(*words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    command = [sys.executable, "-m", "atoll.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)


def test_building_the_command_line_loads_nothing_heavy() -> None:
    """What trains nothing must answer at once: no JAX, no broker client."""
    code = "import sys; from atoll.cli.main import build; build(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)

    assert not set(HEAVY) & set(done.stdout.split())
    assert build().info.name == "atoll"


def test_help_has_every_verb_under_its_heading_and_a_former_name_leads_to_the_present_one() -> None:
    """Verbs of services stand beside the kernel's; whoever types a name of before is told what does its work."""
    shown = process("--help").stdout
    headings = [f"\n{name.capitalize()}:\n" for name in GROUPS]
    below = dict(zip(GROUPS, re.split("|".join(headings), shown)[1:], strict=True))
    former = process("story", "round", "3/18")

    verbs = {name: verb.group for name, verb in VERBS.items()}
    verbs |= {"learner": "run", "evaluate": "watch", "attribute": "understand", "export": "keep", "plan": "plan"}
    assert [name for name, group in verbs.items() if not re.search(rf"^  {name} ", below[group], re.MULTILINE)] == []
    assert (former.returncode, "`atoll story` is `atoll why` now" in former.stderr) == (2, True)


def test_a_verb_that_waits_says_so_and_outlives_a_request_for_facts() -> None:
    """Half a minute of silence looks like a hang; SIGUSR1 is for services, and ends nobody else."""
    broker = f"nats://127.0.0.1:{free_port()}"
    words = ("why", "--run", "x", "--broker", broker, "--set", "broker.patience_s=4")
    command = [sys.executable, "-m", "atoll.cli", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        first = waiting.stderr.readline()
        waiting.send_signal(signal.SIGUSR1)
        rest = waiting.stderr.read()

    assert first == f"no broker answers at {broker} yet; trying for 4 s\n"
    assert f"no broker answers at {broker}\n" in rest
    assert waiting.returncode == BrokerUnavailable.exit_code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("up", "--set", "colour=blue"), "unknown setting colour"),
        (("up", "--set", "protocol.colour=blue"), "colour"),
        (("why", "--out", "nowhere"), "no run lies in this folder"),
        (("dashboard", "nowhere", "--broker", "nats://a:1"), "a folder says which run it holds"),
        (("dashboard", "--run", "a.b"), "run id"),
        (("up", "--learners", "2", "--set", "protocol.quorum=3"), "quorum"),
        (("up", "--throttle", "learner-9=5"), "learner-9"),
        (("up", "--corpus", "no/such/text"), "no such text"),
        (("data", "prepare", "no-such-file.txt", "--out", "x"), "no such file"),
        (("learner", "--set", "data.dir=nowhere"), "no token shards"),
        (("up", "--set", "data.dir=nowhere"), "no token shards"),
        (("synchronizer", "--set", "run=a.b"), "run id"),
        (("archive", "show", "nowhere"), "there is no archive here"),
        (("archive", "show", "ftp://host/x"), "no place for an archive"),
        (("up", "--resume"), "no run to resume"),
        (("tap", "foo bar"), "the tap is no filter of subjects"),
        (("tap", "--kind", "rounds"), "no tap has messages of this kind"),
        (("tap", "--learner", "a.b"), "learner cannot be part of a subject"),
        (("tap", "--fragment", "-1"), "--fragment"),
        (("tap", "--since", "5 fortnights"), "--since is not understood"),
        (("tap", "--no-follow"), "there is nothing to print"),
        (("runs", "taps", "demo", "all"), "taps have either"),
        (("up", "--brokers", "2"), "up.brokers"),
        (("broker", "--node", "1"), "--node is for a node of a cluster"),
        (("broker", "--route", "nats://a:1"), "--route is for a node of a cluster"),
        (("broker", "--cluster", "hub", "--node", "1"), "needs to know the others"),
        (("broker", "--cluster", "hub", "--node", "1", "--route", "a:1"), "no route to a node"),
    ],
)
def test_a_mistake_gets_one_screen_and_exit_code_2(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """What was got, what is allowed, what to do; never a traceback."""
    out = ("--out", str(tmp_path / "run")) if words[0] == "up" else ()
    done = atoll(*words, *out)

    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 24


def test_an_unreachable_broker_gets_exit_code_3(tmp_path: Path) -> None:
    port = free_port()
    done = process(
        "synchronizer", "--set", f"broker.url=nats://127.0.0.1:{port}", "--set", "broker.patience_s=1", "--shard", "0"
    )

    assert done.returncode == 3, done.stderr
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


async def test_a_broker_that_is_too_old_gets_exit_code_3() -> None:
    async with GreetingServer("2.9.10") as old:
        words = ("synchronizer", "--set", f"broker.url={old.url}", "--set", "broker.patience_s=2", "--shard", "0")
        done = await asyncio.to_thread(process, *words)

    assert done.returncode == 3, done.stderr
    assert "2.9" in done.stderr
    assert "2.12" in done.stderr


def test_a_busy_port_gets_exit_code_3(tmp_path: Path) -> None:
    """Somebody else listens there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = atoll("up", "--port", str(port), "--out", str(tmp_path / "run"))

    assert done.returncode == 3, done.stderr
    assert str(port) in done.stderr


def test_a_folder_of_a_run_without_its_broker_is_told_apart_from_a_run_that_goes_on(tmp_path: Path) -> None:
    """A store that is gone is no new store, and a store in use has an address once its broker answers."""
    record = RunFile(run="r", learners=1, settings={}, broker="embedded")
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(record))
    gone = atoll("why", "--out", str(tmp_path))
    assert gone.returncode == 2, gone.stderr
    assert "the broker's store of this run is gone" in gone.stderr
    assert not (tmp_path / "nats").exists()

    with EmbeddedBroker(tmp_path / "nats") as broker:
        silent = atoll("why", "--out", str(tmp_path))
        (tmp_path / "nats" / "url").write_text(broker.url, encoding="utf-8")
        answered = atoll("why", "--out", str(tmp_path))

    assert silent.returncode == 3, silent.stderr
    assert "another broker uses this directory" in silent.stderr
    assert answered.returncode == 2, answered.stderr
    assert "nobody has founded this run" in answered.stderr


def test_two_verbs_read_the_folder_of_a_run_that_is_over_at_a_time(tmp_path: Path) -> None:
    """The first starts the broker; the second finds it, whatever address a former one has left."""
    record = RunFile(run="r", learners=1, settings={}, broker="embedded")
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(record))
    (tmp_path / "nats").mkdir()
    left = tmp_path / "nats" / "url"
    left.write_text("nats://127.0.0.1:9", encoding="utf-8")
    with settings_of(tmp_path, None, None, None, None):
        answered = atoll("why", "--out", str(tmp_path))

    assert answered.returncode == 2, answered.stderr
    assert "nobody has founded this run" in answered.stderr
    assert left.read_text(encoding="utf-8") == "nats://127.0.0.1:9", "a run that is continued takes its former port"
