"""`atoll plan` as a person meets it: its output, its mistakes, the file of a real run, and the examples of its page."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import Result

from atoll.base.errors import SettingsError
from atoll.local.run_settings import default_settings
from atoll_simulator.planner.cautions import NO_WAY
from support.command_line import invoked

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "plan_12b.txt"
REWRITE = "ATOLL_REWRITE_GOLDEN"
TWELVE = (
    "plan 12B --step-s 5 --bandwidth 2Gbit,5Gbit --learners 4 --chips 512 --tokens 1T --chip-hour 1 --egress-gb 0.05"
)
SMALL = "plan 1B --step-s 1 --bandwidth 1Gbit"
WHOLE = "--up bf16 --down f32"
"""With four bits few links are too slow."""


def atoll(words: str) -> Result:
    """Run the command line in this process, without settings from the environment."""
    nothing = {name: None for name in os.environ if name.startswith("ATOLL_")}
    return invoked(shlex.split(words), nothing)


def test_a_plan_reads_like_the_one_that_was_reviewed() -> None:
    """`ATOLL_REWRITE_GOLDEN=1` writes it anew; a review reads the difference."""
    told = atoll(TWELVE).output
    if os.environ.get(REWRITE) == "1":
        GOLDEN.write_text(f"> atoll {TWELVE}\n----\n{told}", encoding="utf-8")
        pytest.skip("rewritten, not checked")

    assert GOLDEN.read_text(encoding="utf-8").partition("\n----\n")[2] == told


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bandwidth fast", "--bandwidth is not understood"),
        ("--learners 0", "--learners is out of range"),
        ("--up bf17", "--up is no codec"),
        ("--overlap-steps 99", "--overlap-steps is out of range"),
        ("--rtt-ms 200000", "got:     200000"),
        ("--shard-memory-gb 0", "got:     0"),
        ("--tokens 1e24", "below 1e+24"),
        ("--mtbi-days -1", "got:     -1"),
        ("--upscale-s 1e306", "--upscale-s is out of range"),
        ("--learners 1 --bandwidth 1Gbit,2Gbit", "regions without a learner"),
        ("--tokens many", "--tokens is not understood"),
        ("--bandwidth 1Gbit,2Gbit --bandwidth-down 1Gbit,2Gbit,3Gbit", "as many regions up as down"),
        ("--mtbi-days 9 --loss-per-hour 0.1", "given twice"),
        ("--set colour=blue", "unknown setting colour"),
        ("--config nowhere.toml", "cannot read the configuration"),
    ],
)
def test_a_wrong_flag_is_refused_with_what_to_do(flags: str, said: str) -> None:
    refused = atoll(f"{SMALL} {flags}").exception

    assert isinstance(refused, SettingsError)
    assert said in refused.explain()
    assert refused.exit_code == 2
    assert None not in {refused.got, refused.todo}


@pytest.mark.parametrize(
    "flags",
    [
        "--chips 2.4M --admission-s 0 --upscale-s 300",
        "--chips 1000000M --mtbi-days 0.001",
        "--loss-per-hour 60 --learners 4096",
        "--learners 4096 --quorum 4096 --chips 100k",
        "--tokens 1T --chips 2.4M --admission-s 0",
    ],
)
def test_flags_that_are_allowed_make_a_plan(flags: str) -> None:
    told = atoll(f"{SMALL} {flags}")

    assert told.exception is None
    assert "nan" not in told.output


TROUBLED = {
    "quorum above M": "plan 1B --step-s 2 --bandwidth 10Gbit --quorum 9",
    "H below P": "plan 1B --step-s 2 --bandwidth 10Gbit --interval-steps 12",
    "one learner": "plan 1B --step-s 2 --bandwidth 10Gbit --learners 1",
    "does not fit the interval": "plan 1B --step-s 2 --bandwidth 500Mbit,4Gbit",
    "not within the overlap": "plan 1B --step-s 2 --bandwidth 400Mbit --interval-steps 48",
    "bound by loss": "plan 100M --step-s 5 --bandwidth 100Mbit,200Mbit --loss 0.0001",
    "control starves": "plan 1M --step-s 2 --bandwidth 5Mbit,10Mbit",
    "hub saturated, in": "plan 1B --step-s 2 --bandwidth 10Gbit --hub-in 1Gbit --hub-out 40Gbit",
    "hub saturated, out": "plan 1B --step-s 2 --bandwidth 10Gbit --learners 1 --hub-in 10Gbit --hub-out 600Mbit",
    "fragment too large": "plan 400B --step-s 200 --bandwidth 100Gbit --fragments 4 "
    "--interval-steps 4000 --overlap-steps 10 --set broker.stream_bytes_max=100000000000000 --shard-memory-gb 10000",
    "stream too small": "plan 12B --step-s 20 --bandwidth 10Gbit --shard-memory-gb 100 "
    "--set broker.stream_bytes_max=8589934592",
    "synchronizer's memory": "plan 1B --step-s 2 --bandwidth 10Gbit --shard-memory-gb 3.5",
    "goodput low": "plan 1B --step-s 2 --bandwidth 10Gbit --learners 8 --chips 3000000",
    "quorum rarely met": "plan 1B --step-s 10 --bandwidth 10Gbit --quorum 8 --loss-per-hour 5 --return-s 36000",
}
MORE_TROUBLE = [
    ("goodput low", "plan 1B --step-s 2 --bandwidth 10Gbit --learners 4 --chips 20M"),
    ("goodput low", "plan 1B --step-s 2 --bandwidth 10Gbit --loss-per-hour 30"),
    ("goodput low", "plan 1B --step-s 2 --bandwidth 10Gbit --mtbi-days 0.001"),
    ("does not fit the interval", "plan 1000B --step-s 0.001 --bandwidth 1Mbit"),
    ("does not fit the interval", "plan 1B --step-s 2 --bandwidth 10Gbit --hub-out 100Mbit"),
    ("not within the overlap", "plan 1B --step-s 0.1 --bandwidth 10Gbit --rtt-ms 500"),
    ("not within the overlap", "plan 1B --step-s 0.5 --bandwidth 100Gbit --rtt-ms 200"),
    ("not within the overlap", "plan 1B --step-s 0.5 --bandwidth 100Gbit --merge-s 2"),
    ("bound by loss", "plan 1B --step-s 60 --bandwidth 10Gbit --learners 3 --loss 0.01"),
    ("hub saturated, in", "plan 1B --step-s 2 --bandwidth 10Gbit --learners 1 --hub-in 1Mbit"),
]


def kinds(command: str) -> dict[str, str]:
    """Return the kinds of cautions that a plan has, and to what each says that things should be changed."""
    told = atoll(f"{command} --json")
    assert told.exception is None, told.exception
    return {caution["kind"]: caution["to"] for caution in json.loads(told.output)["cautions"]}


@pytest.mark.parametrize(("kind", "command"), [*TROUBLED.items(), *MORE_TROUBLE])
def test_whatever_a_caution_advises_is_accepted_and_helps(kind: str, command: str) -> None:
    """Every way is added to the command as it is told; the caution goes, and no other comes."""
    before = kinds(f"{command} {WHOLE}")
    ways = [] if before[kind] == NO_WAY else before[kind].split(", or ")

    assert ways or command not in TROUBLED.values()
    for way in ways:
        after = kinds(f"{command} {WHOLE} {way}")
        assert kind not in after, way
        assert after.keys() <= before.keys()


def test_the_file_of_a_real_run_says_how_it_trains(tmp_path: Path) -> None:
    """What the file does not say is as `atoll up` has it; a flag wins over the file."""
    file = tmp_path / "run.toml"
    file.write_text('[protocol]\nfragments = 12\ncodec_up = "int8"\n[broker]\nstream_bytes_max = 123456789\n')
    asked = json.loads(atoll(f"{SMALL} --json --config {file} --overlap-steps 3").output)["question"]

    protocol = asked["protocol"]
    assert (protocol["fragments"], protocol["codec_up"], protocol["overlap_steps"]) == (12, "int8", 3)
    assert protocol["interval_steps"] == default_settings(asked["learners"])["protocol.interval_steps"]
    assert asked["tokens"] == default_settings(asked["learners"])["protocol.tokens_target"]
    assert asked["stream_bytes_max"] == 123456789


def examples() -> list[tuple[str, list[str]]]:
    """Return the commands of the page and the lines that it shows of their output."""
    page = (ROOT / "docs" / "explanation" / "planning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ atoll (plan .*)\n((?:.+\n)+?)```", page)
    return [(command, shown.splitlines()) for command, shown in blocks]


@pytest.mark.parametrize(
    ("command", "shown"), examples(), ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_the_page_shows_what_the_command_says(command: str, shown: list[str]) -> None:
    """Every line that is shown is in the output, in that order; only the width of columns may differ."""
    told = [" ".join(line.split()) for line in atoll(command).output.splitlines()]
    at = 0
    for line in (" ".join(line.split()) for line in shown):
        assert line in told[at:], line
        at = told.index(line, at) + 1


def test_the_learners_of_a_described_run_are_those_that_it_begins_with(tmp_path: Path) -> None:
    """So its interval is that of `atoll up`; the flag goes before, and without a run there are eight."""
    file = tmp_path / "run.toml"
    file.write_text("[up]\nlearners = 2\n[protocol]\noverlap_steps = 6\n", encoding="utf-8")

    def asked(words: str) -> tuple[int, int]:
        question = json.loads(atoll(f"{SMALL} --json {words}").output)["question"]
        return question["learners"], question["protocol"]["interval_steps"]

    assert asked(f"--config {file}") == (2, 8)
    assert asked(f"--config {file} --learners 4 --interval-steps 12") == (4, 12)
    file.write_text("[up]\nlearners = 2\n", encoding="utf-8")
    assert asked(f"--config {file} --learners 3") == (3, 5)
    assert asked("--set up.learners=4") == (4, 24)
    assert asked("") == (8, 24)
