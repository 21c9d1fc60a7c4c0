"""`atoll report compare`: reports beside each other, and what is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import SettingsError
from atoll.report.comparison import read_report
from support.command_line import invoked


def written(folder: Path, **figures: Any) -> Path:  # noqa: ANN401
    folder.mkdir()
    told = {"run": folder.name, "ended": "finished", "tokens_trained": 1000, "wall_s": 50.0, "clock": "wall", **figures}
    (folder / "report.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


def test_two_runs_stand_beside_each_other(tmp_path: Path) -> None:
    """A folder, or its report; a figure that a report of an earlier release lacks is None, and a dash in the table."""
    more = {
        "validation": {"final_bits_per_byte": 3.5},
        "goodput": 0.91,
        "moved": {"bytes_per_token": 42.0},
        "commits": 7,
        "faults": 2,
        "learners": [{}, {}],
        "settings": {
            "model.layers": 4,
            "model.width": 96,
            "train.optimizer": "muon",
            "train.rate": 0.0032,
            "train.schedule": "wsd",
            "protocol.shards": 2,
        },
    }
    first, second = written(tmp_path / "new", **more), written(tmp_path / "old")
    words = ["report", "compare", str(first), str(second / "report.json")]
    new, old = json.loads(invoked([*words, "--json"]).stdout)
    shown = invoked(words).stdout.splitlines()

    assert (new["run"], new["tokens"], new["wall_s"], new["tokens_per_s"]) == ("new", 1000, 50.0, 20.0)
    assert (new["bits_per_byte"], new["goodput"], new["bytes_per_token"]) == (3.5, 0.91, 42.0)
    assert (new["commits"], new["faults"], new["learners"]) == (7, 2, 2)
    assert [new[name] for name in ("model", "optimizer", "rate", "schedule")] == ["4 x 96", "muon", 0.0032, "wsd"]
    assert [old[name] for name in ("model", "optimizer", "rate", "schedule")] == [None] * 4
    assert (old["tokens_per_s"], old["bits_per_byte"], old["faults"]) == (20.0, None, None)
    assert [line.split()[0] for line in shown] == ["run", "new", "old"]
    assert shown[1].split()[2:8] == ["4", "x", "96", "muon", "0.0032", "wsd"]
    assert "3.500" in shown[1]
    assert "91.0 %" in shown[1]
    assert " - " in shown[2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no report"),
        ("{", "not a report"),
        ("\0\xff", "not a report"),
        ("[]", "not a report"),
        ('{"tokens_trained": true}', "not a report"),
        ('{"tokens_trained": NaN}', "not a report"),
        (f'{{"tokens_trained": 1{"0" * 5000}}}', "not a report"),
        ('{"tokens_trained": 1, "wall_s": "long"}', "not a report"),
        ('{"tokens_trained": 1, "wall_s": 1e300}', "not a report"),
        ('{"tokens_trained": 1, "moved": {"bytes_per_token": []}}', "not a report"),
        (f'{{"tokens_trained": 1, "run": "{"a" * 5000}"}}', "not a report"),
        (f'{{"tokens_trained": 1, "more": {"[" * 100_000}}}', "not a report"),
        (f'{{"tokens_trained": 1, "learners": [{"[" * 100_000}]}}', "not a report"),
    ],
)
def test_what_is_no_report_is_refused_with_what_to_do(tmp_path: Path, content: str | None, said: str) -> None:
    """A run that goes on has none yet; another file is none, and a tampered one is as good as none."""
    if content is not None:
        (tmp_path / "report.json").write_text(content, encoding="utf-8")

    with pytest.raises(SettingsError, match=said):
        read_report(tmp_path)


def test_names_are_shown_as_they_are_and_stay_on_their_line(tmp_path: Path) -> None:
    """No markup, no control characters, no second row; a time next to nothing gives no speed."""
    name = "[red]a[/red]\x1b[2J\nb\u202e:smile:"
    folder = written(tmp_path / "r", run=name, ended="[/]", wall_s=1e-300)
    shown = invoked(["report", "compare", str(folder)])
    told = invoked(["report", "compare", str(folder), "--json"])

    assert shown.exit_code == 0
    assert r"[red]a[/red]\x1b[2J\nb\u202e:smile:" in shown.stdout
    assert "[/]" in shown.stdout
    assert len(shown.stdout.splitlines()) == 2
    [row] = json.loads(told.stdout)
    assert (row["run"], row["tokens_per_s"]) == (name, None)
