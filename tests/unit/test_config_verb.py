"""`atoll config`: every setting described, the same whether a person, an editor or a file is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.local import run_settings
from atoll.local.options import UpRequest, kept_settings, plan
from atoll.local.run_settings import flat
from atoll.protocol.settings import BOUNDS, OUTER_ALLOWED
from atoll.settings import load
from atoll.settings.catalogue import every_setting
from support.command_line import atoll

COMMENTED = re.compile(r"^#([\w.-]+ = .+)$", re.MULTILINE)
DESCRIBED = {setting.name: setting for setting in every_setting()}


def test_every_setting_that_there_is_is_described() -> None:
    """All that `atoll config` lists, no name twice; each with what it is and what is allowed."""
    names = [setting.name for setting in every_setting()]

    assert len(names) == len(set(names))
    assert flat(load(environment={}).settings).keys() - set(names) == set()
    assert [name for name, setting in DESCRIBED.items() if not setting.meaning or not setting.allowed] == []


@pytest.mark.parametrize(
    ("name", "default", "allowed", "variable"),
    [
        ("run", '"local"', "text", "ATOLL_RUN"),
        ("protocol.quorum", "1", "1 to 4,096", "ATOLL_PROTOCOL__QUORUM"),
        ("protocol.overlap_steps", "2", "1 to protocol.interval_steps", "ATOLL_PROTOCOL__OVERLAP_STEPS"),
        ("protocol.merge", '"rda"', "mean, rda", "ATOLL_PROTOCOL__MERGE"),
        ("protocol.codec_up", '"int4"', "f32, bf16, int8, int4, e3m0", "ATOLL_PROTOCOL__CODEC_UP"),
        ("protocol.codec_down", '"int4"', "f32, bf16, int8, int4, e3m0", "ATOLL_PROTOCOL__CODEC_DOWN"),
        ("protocol.outer", '"nesterov"', OUTER_ALLOWED, "ATOLL_PROTOCOL__OUTER"),
        ("learner.initial_model", "none", "a path", "ATOLL_LEARNER__INITIAL_MODEL"),
        ("learner.throttle", "1.0", "at least 1, at most 1,000", "ATOLL_LEARNER__THROTTLE"),
        ("archive.url", '""', "a folder or a URL", "ATOLL_ARCHIVE__URL"),
        ("up.corpus", "[]", "a list of paths", "ATOLL_UP__CORPUS"),
        ("up.throttle", "{}", "a table", "ATOLL_UP__THROTTLE"),
        ("model.size", '"s"', "xs, s, m, l, or a depth from 1 to 64", "ATOLL_MODEL__SIZE"),
        ("train.tokens_before", "0", "at least 0, at most 2^62", "ATOLL_TRAIN__TOKENS_BEFORE"),
        ("sim.kills", "[]", "a list of tables", "ATOLL_SIM__KILLS"),
        ("sim.link.latency_s", "0.001", "at least 0, at most 5", "ATOLL_SIM__LINK__LATENCY_S"),
    ],
)
def test_a_description_holds_default_bounds_and_variable(name: str, default: str, allowed: str, variable: str) -> None:
    one = DESCRIBED[name]

    assert (one.default, one.allowed, one.variable) == (default, allowed, variable)


def test_a_variable_that_is_told_works() -> None:
    """Every protocol setting is given by its variable, at a bound that stands in the table, and arrives."""
    for name, bounds in BOUNDS.items():
        if name in {"interval_steps", "fragments", "grace_cap_steps", "outer_momentum"}:  # others rest on them
            continue
        told = {DESCRIBED[f"protocol.{name}"].variable: str(bounds.low)}

        assert getattr(load(environment=told).settings.protocol, name) == bounds.low


def test_describe_tells_all_of_a_setting() -> None:
    done = atoll("config", "--describe", "protocol.quorum", "up", environment={"ATOLL_PROTOCOL__QUORUM": "2"})
    lines = [line.strip() for line in done.stdout.splitlines()]

    assert lines[:3] == [
        "protocol.quorum = 2  (ATOLL_PROTOCOL__QUORUM)",
        "K, contributions a round needs before its grace window opens.",
        "1 to 4,096; default 1; ATOLL_PROTOCOL__QUORUM",
    ]
    assert "up.learners = 3  (default)" in lines
    assert not [line for line in lines if line.startswith("train.")]


def test_names_choose_sections_and_settings() -> None:
    """Whole words alone: `up` is no prefix of another name."""
    done = atoll("config", "up", "train.rate", "--set", "up.throttle.learner-1=2")
    names = [line.split()[0] for line in done.stdout.splitlines()]

    assert set(names) == {"train.rate", "up.throttle.learner-1", "up.out", "up.dashboard"} | {
        f"up.{name}"
        for name in ["learners", "standbys", "brokers", "bulk_brokers", "minutes", "corpus", "port", "locked"]
    }


def test_a_name_that_is_none_is_refused_with_a_hint_at_config() -> None:
    """Somebody may mean a file."""
    done = atoll("config", "run.toml")

    assert done.returncode == 2
    assert "there is no such setting or section" in done.stderr
    assert "--config" in done.stderr


def test_up_shows_the_defaults_of_atoll_up() -> None:
    """With their origin; what is given goes before."""
    lines = atoll("config", "--up", "protocol", "--set", "protocol.quorum=2").stdout.splitlines()
    shown = {line.split()[0]: line.split(maxsplit=2)[2].split(maxsplit=1) for line in lines}

    assert shown["protocol.fragments"] == [str(run_settings.DEFAULTS["protocol.fragments"]), "atoll up"]
    assert shown["protocol.quorum"] == ["2", "--set protocol.quorum"]
    assert shown["protocol.age_max"][1] == "default"


def test_up_shows_what_follows_from_the_learners() -> None:
    """Four learners meet more often than three."""
    shown = [
        atoll("config", "--up", "protocol.interval_steps", *more).stdout.split()[2:]
        for more in ((), ("--set", "up.learners=4"))
    ]

    assert shown == [["5", "atoll", "up", "with", "3", "learners"], ["4", "atoll", "up", "with", "4", "learners"]]


def test_a_printed_file_says_what_follows_from_the_learners() -> None:
    """The value that stands there is that of so many; one that somebody gives is theirs, whoever joins."""
    about = "# This is the value of atoll up with 4 learners; with others it may be another.\n"
    learners = ("--set", "up.learners=4")

    assert f"{about}#interval_steps = 4\n" in atoll("config", "--up", "--toml", *learners).stdout
    given = atoll("config", "--up", "--toml", *learners, "--set", "protocol.interval_steps=9").stdout
    assert about not in given
    assert "\ninterval_steps = 9\n" in given


def test_a_printed_file_changes_nothing(tmp_path: Path) -> None:
    """`atoll up` with it is `atoll up` without, as printed, and with every value's comment taken away."""
    text = atoll("config", "--up", "--toml").stdout
    plain = plan(UpRequest(out=tmp_path / "run"), {})
    for number, content in enumerate((text, COMMENTED.sub(r"\1", without(text, "sim", "data")))):
        file = tmp_path / f"{number}.toml"
        file.write_text(content, encoding="utf-8")
        up = plan(UpRequest(config=file, out=tmp_path / "run"), {})

        assert kept_settings(up) | {"run": ""} == kept_settings(plain) | {"run": ""}
    assert set(COMMENTED.findall(text)) >= {'size = "s"', "fragments = 8", "learners = 3"}  # fmt: skip


def without(text: str, *sections: str) -> str:
    """Return a printed file less some sections: `sim` is for another verb, and a data.dir would say that data is there."""
    parts = re.split(r"(?m)^(?=\[\w+\]$)", text)
    return "".join(part for part in parts if part.partition("]")[0].lstrip("[") not in sections)


def test_a_printed_file_keeps_what_was_given(tmp_path: Path) -> None:
    """Values that were given stand as values, so the file asks for the same run."""
    asked = ("train.rate=0.01", "up.throttle.learner-2=4", 'up.corpus=["a b.txt"]', "sim.links.shard-0.latency_s=0.5")
    words = [word for text in asked for word in ("--set", text)]
    file = tmp_path / "run.toml"
    file.write_text(atoll("config", "--toml", *words).stdout, encoding="utf-8")
    settings = load(file, environment={}).settings

    assert settings.train["rate"] == 0.01
    assert settings.up.throttle == {"learner-2": 4.0}
    assert settings.up.corpus == (tmp_path / "a b.txt",)
    assert settings.sim == {"links": {"shard-0": {"latency_s": "0.5"}}}


@pytest.mark.parametrize("form", [[], ["--describe"], ["--toml"]])
def test_no_form_shows_a_password(form: list[str]) -> None:
    """Wherever an address may hold one."""
    words = [f"{name}=nats://ann:hunter2@host:1" for name in ("broker.url", "up.via.learner-1", "archive.url")]
    done = atoll("config", *form, *(word for text in words for word in ("--set", text)))

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("//***@host:1") == 3
    assert "hunter2" not in done.stdout


def test_a_printed_file_takes_no_struck_out_address_for_one(tmp_path: Path) -> None:
    """What is not shown is a comment that says where to write it; the file loads, with the default."""
    file = tmp_path / "run.toml"
    words = ["broker.url=nats://ann:hunter2@host:1", "run=mine"]
    file.write_text(atoll("config", "--toml", *(part for word in words for part in ("--set", word))).stdout, "utf-8")

    settings = load(file, environment={}).settings

    assert (settings.broker.url, settings.run) == (load(None, environment={}).settings.broker.url, "mine")
    assert "which is not shown: write it here, or in ATOLL_BROKER__URL.\n#url =" in file.read_text("utf-8")


def test_the_schema_for_editors_describes_every_setting() -> None:
    schema = json.loads(atoll("config", "--schema").stdout)
    for name, setting in DESCRIBED.items():
        place: dict[str, Any] = schema
        for key in name.split("."):
            place = place["properties"][key]
            place = schema["$defs"][place["$ref"].rpartition("/")[2]] if "$ref" in place else place

        assert setting.meaning in place["description"], name
        assert setting.variable in place["description"], name
