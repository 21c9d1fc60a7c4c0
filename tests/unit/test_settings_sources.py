"""What files, variables and flags may say together, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.errors import SettingsError
from atoll.settings import load


def test_the_value_of_a_misspelt_name_is_not_repeated() -> None:
    """It may be a secret; the place where it stands is enough to find it."""
    for assignments, environment in ((["broker.pasword=hunter2"], {}), ([], {"ATOLL_BROKER__PASWORD": "hunter2"})):
        with pytest.raises(SettingsError, match=r"unknown setting broker\.pasword") as refused:
            load(None, assignments, environment)

        assert "hunter2" not in refused.value.explain()


def test_an_unknown_table_is_refused_also_when_it_is_empty(tmp_path: Path) -> None:
    """Whoever wrote it believes that it does something."""
    config = tmp_path / "run.toml"
    config.write_text("[brokers]\n", encoding="utf-8")

    with pytest.raises(SettingsError, match="unknown setting brokers"):
        load(config, [], {})


def test_an_empty_table_that_exists_contradicts_nothing(tmp_path: Path) -> None:
    """A file may name a section and leave it at that."""
    config = tmp_path / "run.toml"
    config.write_text("[broker]\n", encoding="utf-8")

    assert load(config, ["broker.patience_s=7"], {}).settings.broker.patience_s == 7.0


@pytest.mark.parametrize("name", ["data.dir", "learner.checkpoint_dir", "log.dump_dir"])
def test_an_empty_path_is_not_the_working_directory(name: str) -> None:
    """`--set data.dir=$DIR` with a variable that is not set."""
    with pytest.raises(SettingsError, match=f"{name} is wrong: a path cannot be empty"):
        load(None, [f"{name}="], {})


def test_a_name_is_a_value_or_a_table_and_not_both(tmp_path: Path) -> None:
    """Both places are named; neither wins in silence."""
    config = tmp_path / "run.toml"
    config.write_text('broker = "nats://x:4222"\n', encoding="utf-8")

    with pytest.raises(SettingsError, match="a value in one place and a table in another") as refused:
        load(config, ["broker.url=nats://y:4222"], {})

    assert str(config) in refused.value.explain()
    assert "--set broker.url" in refused.value.explain()
