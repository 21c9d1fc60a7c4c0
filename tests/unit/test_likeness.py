"""`--like`: what a new run takes from an earlier one, what goes before that, and what is said where the two differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import atoll as package
from atoll.base import machine
from atoll.base.errors import SettingsError
from atoll.local.options import UpPlan, kept_settings, plan
from atoll.local.run_settings import read_earlier
from atoll.report.collect import BrokerFacts, collect
from atoll.run.folder import EMBEDDED, RunFile, RunFolder
from atoll.run.history import History
from support.up_requests import up_request

ASKED = ("protocol.fragments=6", "model.size=m", "model.ffn=96", "train.rate=0.01", "seed=9", "run=first")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("words", encoding="utf-8")
    return path


@pytest.fixture
def first(tmp_path: Path, text: Path) -> UpPlan:
    asked = up_request(
        out=tmp_path / "first",
        learners=2,
        minutes=4,
        standbys=1,
        corpus=(text,),
        throttle=("learner-2=3",),
        via=("learner-1=nats://127.0.0.1:7",),
        port=4444,
        assignments=ASKED,
    )
    up = plan(asked, {})
    settings = kept_settings(up)
    texts = [str(path.absolute()) for path in up.settings.up.corpus]
    file = RunFile(run="first", learners=2, settings=settings, broker=EMBEDDED, corpus=texts, tokens=10**9)
    file.atoll, file.commit = package.__version__, machine.commit()
    with RunFolder(up.out) as folder:
        folder.save(file)
        folder.write("report.json", json.dumps(collect(History(), file, BrokerFacts("abc"), validation={})).encode())
    return up


def begin_like(path: Path, out: Path, *assignments: str, **asked: Any) -> UpPlan:  # noqa: ANN401  (fields of the request)
    """Return the plan of a new run in `out`."""
    return plan(up_request(out=out, like=path, assignments=assignments, **asked), {})


@pytest.mark.parametrize("name", ["report.json", "run.json", ""])
def test_a_new_run_is_set_as_the_one_of_the_file(tmp_path: Path, first: UpPlan, name: str) -> None:
    up = begin_like(first.out / name, tmp_path / "second")
    mine, theirs = kept_settings(up), kept_settings(first)

    assert up.former is None
    assert up.settings.run != "first"
    assert mine | {"run": "first"} == theirs
    assert (up.learners, up.settings.up.throttle, up.settings.up.corpus) == (
        first.learners,
        first.settings.up.throttle,
        first.settings.up.corpus,
    )
    assert (up.settings.up.minutes, up.settings.up.standbys) == (4.0, 1)
    assert (up.settings.up.port, up.settings.up.via, up.broker) == (0, {}, None)


def test_flags_assignments_and_a_file_go_before_the_earlier_run(tmp_path: Path, first: UpPlan) -> None:
    file = tmp_path / "change.toml"
    file.write_text("seed = 4\n[train]\nrate = 0.02\n[up]\nlearners = 5\n", encoding="utf-8")
    up = begin_like(first.out, tmp_path / "second", "train.rate=0.03", config=file, throttle=("learner-2=1",))

    assert (up.settings.seed, len(up.learners)) == (4, 5)
    assert up.settings.train["rate"] == 0.03
    assert up.settings.up.throttle == {"learner-2": 1.0}
    assert up.settings.protocol.fragments == 6


def test_another_size_takes_all_that_follows_from_it_along(tmp_path: Path, first: UpPlan) -> None:
    """The width that followed from the earlier size is not a wish; the ffn that somebody gave is one."""
    up = begin_like(first.out, tmp_path / "second", "model.size=xs")
    plain = plan(up_request(out=tmp_path / "third", assignments=("model.size=xs", "model.ffn=96")), {})

    assert first.settings.model["layers"] == 8
    assert up.settings.model == plain.settings.model


def test_a_text_replaces_shards_and_shards_a_text(tmp_path: Path, first: UpPlan, text: Path) -> None:
    shards = begin_like(first.out, tmp_path / "second", "data.dir=elsewhere")
    kept = kept_settings(shards)
    (tmp_path / "report.json").write_text(
        json.dumps({"run": "second", "settings": kept, "tokens_by_fate": {}}), encoding="utf-8"
    )
    again = begin_like(tmp_path / "report.json", tmp_path / "third")
    back = begin_like(tmp_path / "report.json", tmp_path / "third", corpus=(text,))

    assert (shards.prepare, shards.settings.up.corpus) == (False, ())
    assert again.settings.data.dir == Path("elsewhere").absolute()
    assert (back.prepare, back.settings.up.corpus) == (True, (text,))


def test_a_folder_that_holds_a_run_cannot_begin_another(first: UpPlan) -> None:
    with pytest.raises(SettingsError, match="--like begins a new run"):
        begin_like(first.out, first.out)

    assert begin_like(first.out, first.out, again=True).aside


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no run to begin like"),
        ("nothing", "neither a report nor a run.json"),
        ("[]", "neither a report nor a run.json"),
        (json.dumps({"run": "r", "settings": {}, "tokens_by_fate": {}}), "with how many learners"),
    ],
)
def test_what_tells_of_no_run_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=said):
        read_earlier(path)
