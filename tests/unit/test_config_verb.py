"""`atoll config`: every setting described, the same whether a person, an editor or a file is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.local.options import kept_settings, plan
from atoll.local.run_settings import flat
from atoll.protocol.settings import BOUNDS
from atoll.settings import load
from atoll.settings.catalogue import every_setting
from support.command_line import atoll
from support.up_requests import up_request

COMMENTED = re.compile(r"^#([\w.-]+ = .+)$", re.MULTILINE)
DESCRIBED = {setting.name: setting for setting in every_setting()}


def test_every_setting_that_there_is_is_described() -> None:
    """All that `atoll config` lists, no name twice; each with what it is and what is allowed."""
    names = [setting.name for setting in every_setting()]

    assert len(names) == len(set(names))
    assert flat(load(environment={}).settings).keys() - set(names) == set()
    assert [name for name, setting in DESCRIBED.items() if not setting.meaning or not setting.allowed] == []


def test_a_variable_that_is_told_works() -> None:
    """Every protocol setting is given by its variable, at a bound that stands in the table, and arrives."""
    for name, bounds in BOUNDS.items():
        if name in {"interval_steps", "fragments", "grace_cap_steps", "outer_momentum"}:  # others rest on them
            continue
        told = {DESCRIBED[f"protocol.{name}"].variable: str(bounds.low)}

        assert getattr(load(environment=told).settings.protocol, name) == bounds.low


def test_a_printed_file_changes_nothing(tmp_path: Path) -> None:
    """`atoll up` with it is `atoll up` without, as printed, and with every value's comment taken away."""
    text = atoll("config", "--up", "--toml").stdout
    plain = plan(up_request(out=tmp_path / "run"), {})
    for number, content in enumerate((text, COMMENTED.sub(r"\1", without(text, "sim", "data")))):
        file = tmp_path / f"{number}.toml"
        file.write_text(content, encoding="utf-8")
        up = plan(up_request(config=file, out=tmp_path / "run"), {})

        assert kept_settings(up) | {"run": ""} == kept_settings(plain) | {"run": ""}
    assert set(COMMENTED.findall(text)) >= {'size = "s"', "fragments = 8", "learners = 3"}  # fmt: skip


def without(text: str, *sections: str) -> str:
    """Return a printed file less some sections: `sim` is for another verb, and a data.dir would say that data is there."""
    parts = re.split(r"(?m)^(?=\[\w+\]$)", text)
    return "".join(part for part in parts if part.partition("]")[0].lstrip("[") not in sections)


def test_a_printed_file_keeps_what_was_given(tmp_path: Path) -> None:
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
