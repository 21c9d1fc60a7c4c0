"""Whole runs in virtual time with real gradients: the same bytes from the same seed, exact ledgers whatever befalls them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.base.errors import INTERRUPTED, AtollError, SettingsError
from atoll.bus.memory import MemoryBroker
from atoll.local.options import plan
from atoll.local.run_settings import flat, variables
from atoll.settings import load
from atoll_simulator import simulation
from atoll_simulator.loop import LoopClock
from atoll_simulator.scenario import Scenario, scenario_of
from atoll_simulator.workshop import SimulationResult, plan_run, run_sim
from atoll_simulator.world import ProcessLife, SimulatedWorld
from support.clocks import virtually
from support.simulated_runs import Simulate, assignments, events_of
from support.up_requests import up_request

SCHEMA = Path(atoll.__file__).parent / "report" / "report.schema.json"
FAULTS = """
[sim]
step_cv = 0.2
start_s = 0.5
joins = { learner-4 = 6.0 }
partitions = [{ who = ["learner-2"], at_s = 8.0, for_s = 4.0 }]
kills = [
    { who = "shard-0", at_s = 5.0, return_s = -1.0 },
    { who = "learner-3", at_s = 7.0, return_s = 2.0 },
    { who = "broker", at_s = 14.0, return_s = 2.0 },
]

[sim.speed]
learner-2 = 0.5

[sim.link]
latency_s = 0.002
up_mbit_s = 20
down_mbit_s = 50
loss = 0.02

[sim.failures]
mtbi_s = 40
return_s = 1.5
"""


@pytest.fixture(scope="module")
def plain(simulate: Simulate) -> SimulationResult:
    return simulate(protocol__tokens_target=40_000)


def check_schema(out: Path) -> None:
    """Check the report against the schema that the reports of `atoll up` are checked against."""
    program = Path(sys.executable).parent / "check-jsonschema"
    check = [str(program), "--schemafile", str(SCHEMA), str(out / "report.json")]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=240, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.second_tier
def test_rare_heartbeats_make_as_many_rounds_from_the_first_second_on(simulate: Simulate) -> None:
    """Learners that compile for 3 s and tell of themselves every 12 s are called as often as those that tell every second."""

    def commits(silence_s: float) -> list[float]:
        compiling = {f"sim__compile_s__learner-{number}": 3.0 for number in (1, 2, 3)}
        ran = simulate(protocol__tokens_target=20_000, protocol__silence_s=silence_s, **compiling)
        events = events_of(ran)
        began_s = min(event["at_s"] for event in events if event["kind"] == "joined")
        return [event["at_s"] - began_s for event in events if event["kind"] == "round"]

    often, rarely = commits(5.0), commits(60.0)

    assert min(rarely) == pytest.approx(min(often), abs=0.5)
    assert len(rarely) >= 0.95 * len(often)


def test_a_run_without_faults_learns_and_every_token_is_merged(plain: SimulationResult) -> None:
    """Three learners at one speed: the loss falls, nobody waits, nothing is lost, the report is a report."""
    ran, report = plain, plain.report
    assert report is not None
    check_schema(ran.out)

    fates, validation = report["tokens_by_fate"], report["validation"]
    merged = [point["tokens_merged"] for point in validation["curve"]]

    assert validation["curve"][0]["bits_per_byte"] == validation["initial_bits_per_byte"], (
        "one measure for the same model"
    )
    assert ran.code == 0
    assert report["fates_exact"], report["fates_errors"]
    assert report["clock"] == "virtual"
    assert report["ended"] == "finished"
    assert fates["merged"] + fates["merged_late"] + fates["superseded"] == report["tokens_trained"] >= 40_000
    assert validation["final_bits_per_byte"] < 0.7 * validation["initial_bits_per_byte"]
    assert report["goodput"] > 0.95
    # One point before anything was merged, one at every twenty-fifth of the target, none a round late; one at the end.
    per_round = max(line["fields"]["tokens"] for line in events_of(ran) if line["kind"] == "round") / 4
    assert len(merged) > 25
    assert all(0 <= at - number * 1_600 <= per_round for number, at in enumerate(merged[:-1]))
    # 128 tokens a step, three learners, a step every 50 ms: the clock of the report is the simulated one.
    assert report["wall_s"] == pytest.approx(40_000 / (3 * 128) * 0.05, rel=0.25)
    links = {link["link"]: link for link in report["moved"]["links"]}
    assert {"learner-1", "learner-2", "learner-3", "shard-0"} <= links.keys()
    assert all(link["wire_up"] > link["payload_up"] > 0 for link in links.values())
    assert report["moved"]["times_less"] > report["moved"]["times_less_all_links"] > 1
    assert {"model.safetensors", "sample.txt", "report.html", "journal.jsonl"} <= {p.name for p in ran.out.iterdir()}


@pytest.mark.second_tier
def test_equal_seeds_give_equal_bytes_in_any_process(simulated_text: Path, tmp_path: Path) -> None:
    """Two interpreters with other hash seeds write the same event log, journal and report under every kind of fault."""
    config = tmp_path / "faults.toml"
    config.write_text(FAULTS, encoding="utf-8")
    told = [word for text in assignments(simulated_text) for word in ("--set", text)]
    words = ["sim", "train", "--config", str(config), "--learners", "4", "--standbys", "1", "--tokens", "50000"]

    def process(number: int) -> subprocess.Popen[str]:
        out = ["--out", str(tmp_path / str(number)), "--seed", "7"]
        command = [sys.executable, "-m", "atoll.cli", *words, *told, *out]
        environment = {**os.environ, "PYTHONHASHSEED": str(number)}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    processes = [process(1), process(2)]
    said = [one.communicate(timeout=240)[1] for one in processes]

    assert [one.returncode for one in processes] == [0, 0], said
    for name in ("events.jsonl", "journal.jsonl", "report.json", "validation.json"):
        first, second = ((tmp_path / str(number) / name).read_bytes() for number in (1, 2))
        assert first == second, name
    assert (tmp_path / "1" / "events.jsonl").stat().st_size > 20_000


@pytest.mark.second_tier
def test_kills_cuts_and_takeovers_leave_exact_books_and_nobody_waits(simulate: Simulate) -> None:
    """An owner dies for good, a broker for two seconds, learners at random; one is cut off and one comes later."""
    ran = simulate(learners=4, standbys=1, config=FAULTS, protocol__tokens_target=120_000)
    report = ran.report
    assert report is not None
    check_schema(ran.out)
    events = events_of(ran)
    journal = [json.loads(line) for line in (ran.out / "journal.jsonl").read_bytes().splitlines()]
    begin_s = events[0]["at_s"] - events[0]["at_s"] % 86_400
    rounds = [(event["at_s"] - begin_s, event["who"]) for event in events if event["kind"] == "round"]
    what = Counter(line["what"] for line in journal)

    assert report["fates_exact"], report["fates_errors"]
    assert sum(report["tokens_by_fate"].values()) == report["tokens_trained"]
    assert report["tokens_by_fate"]["lost"] > 0
    assert what["killed"] >= 4
    assert {"cut", "healed", "started", "left"} <= what.keys()
    # The standby of shard 0 serves within three leases of its owner's death, and goes on after the broker's.
    assert any(who == "shard-0" and 5.0 < at_s < 8.0 for at_s, who in rounds)
    assert any(who == "shard-0" and at_s > 16.0 for at_s, who in rounds)
    assert not [at_s for at_s, _ in rounds if 14.01 < at_s < 16.0]
    # No checkpoint here: a learner that returns starts from the state that a peer lends it over the bus.
    recovered = [event["fields"] for event in events if event["kind"] == "recovered"]
    assert "peer" in [one["source"] for one in recovered if one["incarnation"] > 1]
    assert "fresh" in [one["source"] for one in recovered if one["incarnation"] == 1]
    # Learners step on through all of it: what is missing of their time is death and return, which the journal counts.
    lives: dict[str, float] = {}
    lived_s = 0.0
    for line in journal:
        if line["who"].startswith("learner") and line["what"] in ("started", "killed", "left"):
            begun_s = lives.pop(line["who"], None)
            lived_s += line["at_s"] - begun_s if begun_s is not None else 0.0
            if line["what"] == "started":
                lives[line["who"]] = line["at_s"]
    stepped_s = sum(
        life["steps"] * (0.1 if learner["learner"] == "learner-2" else 0.05)
        for learner in report["learners"]
        for life in learner["incarnations"]
        if life["steps"]
    )
    starts = sum(line["what"] == "started" and line["who"].startswith("learner") for line in journal)
    assert stepped_s > 0.9 * (lived_s - 2.0 * starts)


def endless(simulated_text: Path, out: Path) -> list[str]:
    """Return the command of a run that only a signal ends."""
    told = [word for text in assignments(simulated_text) for word in ("--set", text)]
    return [sys.executable, "-m", "atoll.cli", "sim", "train", "--tokens", "100000000", "--out", str(out), *told]


@pytest.mark.second_tier
def test_a_signal_lets_everybody_leave_in_order(simulated_text: Path, tmp_path: Path) -> None:
    """Ctrl-C: what is trained is merged, the report is written, the exit code says that it was interrupted."""
    out = tmp_path / "run"
    with subprocess.Popen(endless(simulated_text, out), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " training · " in line and " 0 commits" not in line:
                process.send_signal(signal.SIGINT)
                break
        _, said = process.communicate(timeout=240)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))

    assert process.returncode == INTERRUPTED, said
    assert report["ended"] == "stopped"
    assert report["fates_exact"], report["fates_errors"]
    assert report["commits"] > 0


@pytest.mark.second_tier
def test_a_signal_before_the_first_step_is_not_lost(simulated_text: Path, tmp_path: Path) -> None:
    """Ctrl-C while JAX is loaded or the step is compiled: heard, though nobody is there yet who could act on it."""
    out = tmp_path / "run"
    log = out / "logs" / "sim.jsonl"
    with subprocess.Popen(endless(simulated_text, out), stderr=subprocess.PIPE, text=True) as process:
        while not log.exists() and process.poll() is None:
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=240)

    assert process.returncode == INTERRUPTED, said
    assert "Traceback" not in said


def killed(who: str, at_s: float) -> str:
    """Return a scenario in which `who` (names with commas between) dies for good."""
    table = ", ".join(f'{{ who = "{name}", at_s = {at_s}, return_s = -1.0 }}' for name in who.split(","))
    return f"[sim]\nkills = [{table}]\n"


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("who", "at_s", "said"),
    [
        ("learner-1,learner-2", 1.0, "none returns"),
        ("broker", 1.0, "nobody has trained"),
        ("broker", 4.3, "close its ledger"),
    ],
)
def test_a_run_that_cannot_end_well_fails_and_says_what_it_knows(
    who: str, at_s: float, said: str, simulate: Simulate, tmp_path: Path
) -> None:
    """Learners or broker gone for good, in the middle or while ledgers close: reported from what heads and event log hold."""
    out = tmp_path / "run"
    with pytest.raises(AtollError, match="did not finish") as error:
        simulate(learners=2, config=killed(who, at_s), out=out, protocol__tokens_target=20_000)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    check_schema(out)

    assert said in str(error.value)
    assert report["ended"] == "failed"
    assert sum(report["tokens_by_fate"].values()) == report["tokens_trained"] > 0
    assert report["commits"] > 0
    assert report["tokens_by_fate"]["merged"] > 0
    assert not [line for line in report["fates_errors"] if "after the ledgers were closed" in line]


@pytest.mark.second_tier
def test_a_run_in_which_nobody_ever_trains_fails(simulate: Simulate) -> None:
    with pytest.raises(AtollError, match="nothing was trained"):
        simulate(learners=2, config=killed("learner-1,learner-2", 0.0), protocol__tokens_target=20_000)


def test_a_run_in_which_nobody_trains_any_more_ends(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it waits for, it does not wait for ever."""
    monkeypatch.setattr(simulation, "IDLE_S", 20.0)
    config = killed("learner-1,learner-2", 1.0).replace("-1.0", "3000.0")

    with pytest.raises(AtollError, match="nobody has trained for 2"):
        simulate(learners=2, config=config, protocol__tokens_target=20_000)


def test_without_a_target_the_model_is_measured_once_in_an_interval(simulate: Simulate) -> None:
    """Not at every round: 8 steps of 128 tokens of two learners, and the two measurements at the ends."""
    ran = simulate(learners=2, protocol__tokens_target=0, sim__max_s=4)
    assert ran.report is not None
    trained, curve = ran.report["tokens_trained"], ran.report["validation"]["curve"]

    assert 3 <= len(curve) <= trained // (2 * 8 * 128) + 2
    assert ran.report["rounds"]["count"] > 2 * len(curve)


def test_kills_of_the_broker_in_one_moment_are_two_kills() -> None:
    async def main() -> list[bool]:
        kills = [
            {"who": "broker", "at_s": at_s, "return_s": for_s} for at_s, for_s in ((1000.001, 9.0), (1000.002, 1.0))
        ]
        loop, lives = asyncio.get_running_loop(), []
        world = SimulatedWorld("r", 0, Scenario(kills=kills), MemoryBroker(), LoopClock(loop))

        async def serve(life: ProcessLife) -> None:
            lives.append(life)
            await life.stop.wait()

        world.add("learner-1", serve)
        world.begin()
        whole = []
        for at_s in (999.0, 1005.0, 1010.0):
            await asyncio.sleep(at_s - loop.time())
            whole.append(lives[0].bus.link.whole)
        world.end()
        return whole

    assert virtually(main()) == [True, False, True]


def test_events_may_be_told_on_the_command_line_and_slow_links_are_named(tmp_path: Path) -> None:
    """Lists as JSON; a bandwidth at which the real bus would send again gets a sentence."""
    told = ('sim.kills=[{"who": "learner-1", "at_s": 1}]', "sim.links.shard-0.up_mbit_s=0.5", "sim.link.up_mbit_s=20")
    _, scenario = plan_run(up_request(out=tmp_path / "run", assignments=told))

    assert [(kill.who, kill.at_s) for kill in scenario.kills] == [("learner-1", 1.0)]
    assert [line.split()[0] for line in scenario.slow_links()] == ["sim.links.shard-0"]


@pytest.mark.second_tier
def test_a_run_that_is_there_is_not_overwritten(plain: SimulationResult) -> None:
    """Neither by another simulation nor by `atoll up`, which could not continue it."""
    with pytest.raises(SettingsError, match="holds a run already"):
        run_sim(up_request(out=plain.out))
    with pytest.raises(SettingsError, match="simulated run"):
        plan(up_request(out=plain.out), {})


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("sim.step_s=0", "sim.step_s is out of range"),
        ("sim.failures.mtbi_s=0.001", "leaves no time for a step"),
        ("seed=99999999999999999999", "seed is out of range"),
        ("sim.step_z=1", "unknown setting sim.step_z"),
        ("sim.speed.learner-9=1", "sim.speed names nobody"),
        ("sim.speed.learner-1=0", "sim.speed.learner-1 is out of range"),
        ("sim.link.loss=1.5", "sim.link.loss is out of range"),
        ("sim.links.nobody.latency_s=1", "sim.links names nobody"),
        ("sim.link.latency_s=3600", "sim.link.latency_s is out of range"),
        ("sim.link.up_mbit_s=1e-320", "without bound"),
        ("sim.links.shard-0.down_mbit_s=0.0001", "without bound"),
        ("sim.kills=learner-1", "or JSON here"),
        ("protocol.tokens_target=0", "would never end"),
        ("model.widht=3", "unknown setting model.widht"),
    ],
)
def test_wrong_settings_are_refused_by_name(told: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=said):
        plan_run(up_request(out=tmp_path / "run", assignments=(told,)))


def test_atoll_up_accepts_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(FAULTS, encoding="utf-8")
    up = plan(up_request(learners=4, config=file, out=tmp_path / "run"), {})

    children = load(environment=variables(flat(up.settings))).settings
    assert up.settings.sim["speed"] == {"learner-2": 0.5}
    assert children.sim["speed"] == {"learner-2": "0.5"}
    assert children.protocol == up.settings.protocol


def test_a_scenario_names_only_who_is_there() -> None:
    """Kills and cuts of shards, standbys and the broker are fine; of anybody else they are a mistake."""
    there: dict[str, Any] = {"kills": [{"who": "broker", "at_s": 1.0}, {"who": "shard-0", "at_s": 1.0}]}
    assert len(scenario_of(there, ["learner-1"], ["shard-0"]).kills) == 2
    for table in (
        {"kills": [{"who": "shard-7", "at_s": 1.0}]},
        {"partitions": [{"who": ["broker"], "at_s": 1.0, "for_s": 1.0}]},
        {"leaves": {"shard-0": 1.0}},
        {"joins": {"learner-1": 3.0}},
    ):
        with pytest.raises(SettingsError):
            scenario_of(table, ["learner-1"], ["shard-0"])
    assert Scenario().link_of("learner-1").latency_s > 0
