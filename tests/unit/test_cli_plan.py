"""`atoll plan` as a person meets it: its output, its mistakes, the file of a real run, and the examples of its page."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atoll.cli.main import build
from atoll.errors import SettingsError
from atoll.up.defaults import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "plan_12b.txt"
REWRITE = "ATOLL_REWRITE_GOLDEN"
TWELVE = (
    "plan 12B --step-s 5 --bandwidth 2Gbit,5Gbit --learners 4 --chips 512 --tokens 1T --chip-hour 1 --egress-gb 0.05"
)
SMALL = "plan 1B --step-s 1 --bandwidth 1Gbit"


def atoll(words: str) -> Result:
    """Run the command line in this process, without settings from the environment."""
    nothing = {name: None for name in os.environ if name.startswith("ATOLL_")}
    return CliRunner().invoke(build(), shlex.split(words), env=nothing)


def test_a_plan_reads_like_the_one_that_was_reviewed() -> None:
    """`ATOLL_REWRITE_GOLDEN=1` writes it anew; a review reads the difference."""
    told = atoll(TWELVE).output
    if os.environ.get(REWRITE):
        GOLDEN.write_text(f"> atoll {TWELVE}\n----\n{told}", encoding="utf-8")

    assert GOLDEN.read_text(encoding="utf-8").partition("\n----\n")[2] == told


def test_json_has_the_same_figures() -> None:
    document = json.loads(atoll(f"{SMALL} --json").output)

    assert document["question"]["parameters"] == 10**9
    assert document["regions"][0]["up"] == 1e9
    assert document["systems"][0]["name"] == "Atoll"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bandwidth fast", "--bandwidth is not understood"),
        ("--bandwidth 100", "--bandwidth is not understood"),
        ("--learners 0", "--learners is out of range"),
        ("--up bf17", "--up is no codec"),
        ("--down zip", "--down is no codec"),
        ("--overlap 99", "overlap_steps is out of range"),
        ("--tokens many", "--tokens is not understood"),
        ("--bandwidth-down 1Gbit,2Gbit", "as many regions up as down"),
        ("--mtbi-days 0", "time between interruptions"),
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


def test_the_file_of_a_real_run_says_how_it_trains(tmp_path: Path) -> None:
    """What the file does not say is as `atoll up` has it; a flag wins over the file."""
    file = tmp_path / "run.toml"
    file.write_text('[protocol]\nfragments = 12\ncodec_up = "int8"\n[broker]\nstream_bytes_max = 123456789\n')
    asked = json.loads(atoll(f"{SMALL} --json --config {file} --overlap 5").output)["question"]

    protocol = asked["protocol"]
    assert (protocol["fragments"], protocol["codec_up"], protocol["overlap_steps"]) == (12, "int8", 5)
    assert protocol["interval_steps"] == SETTINGS["protocol.interval_steps"]
    assert asked["tokens"] == SETTINGS["protocol.tokens_target"]
    assert asked["stream_bytes_max"] == 123456789


def test_without_a_file_a_run_is_the_protocols_default() -> None:
    protocol = json.loads(atoll(f"{SMALL} --json").output)["question"]["protocol"]

    assert (protocol["fragments"], protocol["interval_steps"], protocol["quorum"]) == (24, 24, 1)


def examples() -> list[tuple[str, list[str]]]:
    """Return the commands of the page and the lines that it shows of their output."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ atoll (plan .*)\n((?:.+\n)+?)```", page)
    return [(command, shown.splitlines()) for command, shown in blocks]


def test_the_page_has_examples() -> None:
    assert len(examples()) >= 6


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
