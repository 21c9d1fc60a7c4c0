"""The extra that is named is the smallest one that brings what is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from atoll.base import extras
from atoll.base.exits import run_guarded

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def asking(package: str, name: str) -> ModuleNotFoundError:
    try:
        exec(f"raise ModuleNotFoundError(name={package!r})", {"__name__": name})  # noqa: S102  (a frame of another module)
    except ModuleNotFoundError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("package", "asked_by", "extra"),
    [
        ("jax.numpy", "atoll.client.join", "island"),
        ("jax", "atoll_learner.train", "learner"),
        ("jax", "atoll_simulator.learner", "simulator"),
        ("orbax.checkpoint", "atoll_learner.checkpoints", "learner"),
        ("optax", "atoll.merge.outer", "learner"),
        ("tokenizers", "atoll_learner.data.tokenizer", "bpe"),
        ("pyarrow", "atoll_learner.data.sources", "parquet"),
        ("numba", "atoll.codec.kernels.compiled", "synchronizer"),
        ("uvicorn", "atoll_monitor.http_server", "monitor"),
        ("opentelemetry.sdk", "atoll_monitor.traces", "traces"),
    ],
)
def test_the_smallest_extra_is_named(package: str, asked_by: str, extra: str) -> None:
    told = extras.missing_extra(asking(package, asked_by))

    assert told is not None
    assert told.todo == f"pip install 'atoll[{extra}]'"
    assert package.partition(".")[0] in told.what
    assert extra in tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def test_what_no_extra_brings_stays_an_error_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """A package that nobody declared is a bug: it shows its traceback. One of an extra is told, and ends with 2."""
    with pytest.raises(ModuleNotFoundError):
        run_guarded(lambda: __import__("no_such_package_of_anybody"))

    def needs() -> None:
        raise asking("pyarrow", "atoll_learner.data.sources")

    with pytest.raises(SystemExit) as left:
        run_guarded(needs)
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].strip() == "to do:   pip install 'atoll[parquet]'"
