"""A whole run in one file: the section `[up]`, what goes before what, and where its paths lead."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.errors import SettingsError
from atoll.local.options import kept_settings, plan
from atoll.run.folder import EMBEDDED, RunFile, RunFolder
from atoll.settings import PLACES, load
from atoll.settings.sections import UP_LEARNERS_MAX, UP_STANDBYS_MAX
from support.up_requests import up_request

FILE = """
run = "mine"

[up]
learners = 4
standbys = 1
minutes = 7.5
corpus = ["text"]
throttle = { learner-3 = 5, learner-4 = 2 }
via = { learner-1 = "nats://127.0.0.1:7422" }
port = 4333
out = "made"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_a_file_describes_a_whole_run(file: Path) -> None:
    """Everything that `atoll up` takes as a flag, and paths as seen from the file's folder."""
    up = plan(up_request(config=file), {})

    assert up.settings.run == "mine"
    assert up.learners == ("learner-1", "learner-2", "learner-3", "learner-4")
    assert (up.settings.up.standbys, up.settings.up.minutes, up.settings.up.port) == (1, 7.5, 4333)
    assert (up.out, up.settings.up.corpus) == (file.parent / "made", (file.parent / "text",))
    assert (up.settings.up.throttle, up.settings.up.via) == (
        {"learner-3": 5.0, "learner-4": 2.0},
        {"learner-1": "nats://127.0.0.1:7422"},
    )
    assert up.settings.protocol.fragments == 8, "where the file says nothing the defaults of `atoll up` hold"


def test_flags_go_before_assignments_those_before_variables_and_those_before_the_file(file: Path) -> None:
    variables, assignments = {"ATOLL_UP__LEARNERS": "6"}, ("up.learners=5",)
    asked = up_request(config=file, learners=7, assignments=assignments)

    assert len(plan(asked, variables).learners) == 7
    assert len(plan(up_request(config=file, assignments=assignments), variables).learners) == 5
    assert len(plan(up_request(config=file), variables).learners) == 6
    assert len(plan(up_request(config=file), {}).learners) == 4


def test_a_flag_for_one_learner_leaves_the_others_as_the_file_has_them(file: Path) -> None:
    other = file.parent / "other.txt"
    other.touch()
    up = plan(
        up_request(config=file, throttle=("learner-4=3",), corpus=(other,)), {"ATOLL_UP__THROTTLE__LEARNER-3": "9"}
    )

    assert up.settings.up.throttle == {"learner-3": 9.0, "learner-4": 3.0}
    assert up.settings.up.corpus == (other,)


def test_paths_count_from_the_file_in_a_file_and_from_here_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every setting that is a path, an archive's folder too; what is absolute or a URL stays as it is."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "there"
    folder.mkdir()
    sections: dict[str, list[str]] = {}
    for name in sorted(PLACES - {"up.corpus", "health_file", "model.config"}):
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f'{key} = "x"')
    tables = "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items())
    (folder / "run.toml").write_text(f'health_file = "x"\n{tables}\n', encoding="utf-8")
    loaded = load(Path("there/run.toml"), environment={}).settings

    assert loaded.health_file == loaded.data.dir == loaded.learner.checkpoint_dir == loaded.up.out == Path("there/x")
    assert loaded.archive.url == loaded.synchronizer.restore == "there/x"
    assert load(None, ["data.dir=x"], {"ATOLL_UP__OUT": "y"}).settings.data.dir == Path("x")
    (folder / "model.toml").write_text('[model]\nconfig = "x"\n', encoding="utf-8")
    with pytest.raises(SettingsError, match="there/x"):
        load(Path("there/model.toml"), environment={})
    (folder / "other.toml").write_text('[data]\ndir = "/x"\n[archive]\nurl = "s3://bucket/x"\n', encoding="utf-8")
    other = load(folder / "other.toml", environment={}).settings
    assert (other.data.dir, other.archive.url) == (Path("/x"), "s3://bucket/x")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"learners = {UP_LEARNERS_MAX + 1}", "up.learners is out of range"),
        (f"standbys = {UP_STANDBYS_MAX + 1}", "up.standbys is out of range"),
        ("throttle = { learner-1 = 0.5 }", "up.throttle.learner-1 is wrong"),
        ("throttle = { learner-9 = 2 }", "names nobody"),
        ("colour = 1", "unknown setting up.colour"),
    ],
)
def test_a_mistake_in_the_section_is_refused(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[up]\n{line}\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=said):
        plan(up_request(config=path, out=tmp_path / "run"), {})


def test_a_run_goes_on_with_the_same_file(file: Path) -> None:
    """What the file says is what the run was begun with; its text may have gone since, for its data is there."""
    begun = plan(up_request(config=file), {})
    texts = [str(path.absolute()) for path in begun.settings.up.corpus]
    kept = RunFile(run="mine", learners=4, settings=kept_settings(begun), broker=EMBEDDED, corpus=texts, tokens=5)
    with RunFolder(begun.out) as folder:
        folder.save(kept)
    (file.parent / "text").rmdir()
    up = plan(up_request(config=file), {})

    assert up.former is not None
    assert up.settings == begun.settings
    with pytest.raises(SettingsError, match="the corpus of a run cannot change"):
        plan(up_request(config=file, corpus=(file,)), {})
