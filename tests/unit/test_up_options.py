"""The plan of a run: what stands where nobody said anything, and what may change in a run that exists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from atoll.base.errors import EnvironmentFault, SettingsError
from atoll.cli.options import with_flags
from atoll.keys.identity import read_identity
from atoll.local.options import UpPlan, kept_settings, plan
from atoll.local.services import Services
from atoll.run.folder import EMBEDDED, RunFile, RunFolder, move_aside
from support.up_requests import up_request


def former(out: Path, tokens: int, *assignments: str) -> UpPlan:
    """Leave a run of two learners in `out` that has trained `tokens` of a target of 1000."""
    up = plan(up_request(out=out, learners=2, assignments=("protocol.tokens_target=1000", *assignments)), {})
    file = RunFile(run=up.settings.run, learners=2, settings=kept_settings(up), broker=EMBEDDED, tokens=tokens)
    with RunFolder(out) as folder:
        folder.save(file)
    return up


def test_who_gave_a_broker_to_a_run_that_has_its_own_is_named(tmp_path: Path) -> None:
    """A variable that was exported long ago is not on the command line, nor is a file's line."""
    former(tmp_path / "run", 10)
    config = tmp_path / "run.toml"
    config.write_text("[broker]\nurl = 'nats://u:secret@a:1'\n", encoding="utf-8")
    url = "broker.url=nats://u:secret@a:1"
    for asked, environment, todo in (
        ({}, {"ATOLL_BROKER__URL": "nats://u:secret@a:1"}, "unset ATOLL_BROKER__URL"),
        ({"config": config}, {}, f"take broker.url out of {config}"),
        ({"assignments": (url,)}, {}, "omit --set broker.url"),
        ({"assignments": with_flags(None, broker__url="nats://a:1")}, {}, "omit --broker"),
    ):
        with pytest.raises(SettingsError, match="its own broker's store") as refusal:
            plan(up_request(out=tmp_path / "run", **asked), environment)

        assert refusal.value.todo == todo
        assert "secret" not in str(refusal.value)


def test_an_address_with_a_password_is_not_kept(tmp_path: Path) -> None:
    """`run.json` and the report are for others' eyes; the address of a broker must be said again anyway."""
    words = ('broker.bulk=["nats://u:SECRET@one:1"]', "broker.url=nats://u:SECRET@two:2")
    up = plan(up_request(out=tmp_path / "run", assignments=words), {})

    assert up.settings.broker.bulk == ("nats://u:SECRET@one:1",)
    assert "SECRET" not in str(kept_settings(up))


def test_what_is_said_goes_before_the_defaults(tmp_path: Path) -> None:
    """Flags before the environment, the environment before the defaults; 0 tokens means no target."""
    request = up_request(out=tmp_path / "run", assignments=("protocol.tokens_target=0",))
    up = plan(request, {"ATOLL_PROTOCOL__FRAGMENTS": "5", "ATOLL_PROTOCOL__TOKENS_TARGET": "7"})

    assert up.settings.protocol.tokens_target == 0
    assert up.settings.protocol.fragments == 5


def test_the_interval_follows_from_the_learners(tmp_path: Path) -> None:
    """By whatever they are said; an interval that is said stays, and so does that of a run that goes on with more."""
    out = tmp_path / "run"

    def interval(learners: int | None = None, *assignments: str, variables: Mapping[str, str] | None = None) -> int:
        asked = up_request(out=out, learners=learners, assignments=assignments)
        return plan(asked, variables or {}).settings.protocol.interval_steps

    assert [interval(number) for number in (1, 2, 3, 4, 16)] == [8, 8, 5, 4, 4]
    assert interval() == 5
    assert interval(None, "up.learners=4") == 4
    assert interval(variables={"ATOLL_UP__LEARNERS": "4"}) == 4
    assert interval(None, "up.learners=4.0") == 4, "what `load` takes for four"
    assert interval(4, "protocol.interval_steps=24") == 24
    former(out, 500)
    assert interval(4) == 8


def test_an_unfinished_run_is_continued_as_it_was(tmp_path: Path) -> None:
    begun = former(tmp_path / "run", 500, "protocol.fragments=6")
    up = plan(up_request(out=tmp_path / "run", again=True), {})

    assert up.former is not None
    assert not up.aside
    assert up.settings.run == begun.settings.run
    assert len(up.learners) == 2
    assert up.settings.protocol.fragments == 6


def test_a_run_that_never_began_binds_nobody(tmp_path: Path) -> None:
    """Its data could not be prepared, say: the next session has other text, other settings and nothing to resume."""
    up = plan(up_request(out=tmp_path / "run", learners=2), {})
    file = RunFile(run=up.settings.run, learners=2, settings=kept_settings(up), broker=EMBEDDED, begun=False)
    with RunFolder(tmp_path / "run") as folder:
        folder.save(file)
    text = tmp_path / "text"
    text.write_text("words", encoding="utf-8")
    again = plan(up_request(out=tmp_path / "run", corpus=(text,), assignments=("protocol.fragments=5",)), {})

    assert again.former is None
    assert again.settings.up.corpus == (text,)
    assert len(again.learners) == 3
    with pytest.raises(SettingsError, match="no run to resume"):
        plan(up_request(out=tmp_path / "run", resume=True), {})


def test_a_finished_run_is_refused_unless_told_to_begin_again(tmp_path: Path) -> None:
    begun = former(tmp_path / "run", 1000)
    with pytest.raises(SettingsError, match="reached its target") as refusal:
        plan(up_request(out=tmp_path / "run"), {})
    up = plan(up_request(out=tmp_path / "run", again=True), {})

    assert "--again" in str(refusal.value)
    assert f"`atoll broker --store {tmp_path / 'run' / 'nats'}`" in str(refusal.value), "its export failed"
    assert up.aside
    assert up.former is None
    assert up.settings.run != begun.settings.run
    assert len(up.learners) == 3


@pytest.mark.parametrize("again", [False, True])
def test_a_target_below_what_an_unfinished_run_has_trained_is_refused(tmp_path: Path, again: bool) -> None:  # noqa: FBT001
    """It is not finished by its own target, so --again would not move it aside, and the message does not say so."""
    former(tmp_path / "run", 500)
    with pytest.raises(SettingsError, match="not finished, and has trained more") as refusal:
        plan(up_request(out=tmp_path / "run", assignments=("protocol.tokens_target=300",), again=again), {})

    assert refusal.value.got == "500 tokens trained, target 300; its own is 1000"
    assert refusal.value.allowed == "a target above 500, or 0 for none"
    assert "choose another --out" in str(refusal.value)


def test_a_run_that_is_going_on_is_not_moved(tmp_path: Path) -> None:
    former(tmp_path / "run", 1000)
    with RunFolder(tmp_path / "run"), pytest.raises(EnvironmentFault, match="uses this folder"):
        move_aside(tmp_path / "run")


@pytest.mark.parametrize("assignment", ["protocol.fragments=3", "model.layers=2", "seed=9", "run=other"])
def test_what_processes_have_agreed_on_cannot_change(tmp_path: Path, assignment: str) -> None:
    """The run record would win silently, so the change is refused by name."""
    former(tmp_path / "run", 500)

    with pytest.raises(SettingsError, match=f"{assignment.partition('=')[0]} cannot change"):
        plan(up_request(out=tmp_path / "run", assignments=(assignment,)), {})


def test_a_larger_target_continues_a_finished_run(tmp_path: Path) -> None:
    former(tmp_path / "run", 1000)
    up = plan(up_request(out=tmp_path / "run", assignments=("protocol.tokens_target=3000",)), {})

    assert up.former is not None
    assert up.settings.protocol.tokens_target == 3000


@pytest.mark.parametrize("name", ["model.safetensors", "data/mine.csv", "notes.txt"])
def test_a_folder_with_somebodys_files_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "run" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SettingsError, match="something else"), RunFolder(tmp_path / "run"):
        pass

    assert sorted(tmp_path.rglob("*")) == before
    assert theirs.read_text(encoding="utf-8") == "precious"


def test_a_child_may_have_an_address_of_its_own(tmp_path: Path) -> None:
    """Learners, shards and standbys can be put behind a relay; everybody else goes straight to the broker."""
    via = ("learner-2=nats://127.0.0.1:1", "shard-1=nats://127.0.0.1:2", "standby-0-1=tls://relay:3")
    up = plan(up_request(out=tmp_path / "run", learners=2, standbys=1, via=via), {})
    with RunFolder(tmp_path / "run") as folder:
        services = Services(up, folder, "nats://127.0.0.1:9")

    assert services.learner("learner-2").environment["ATOLL_BROKER__URL"] == "nats://127.0.0.1:1"
    assert services.learner("learner-1").environment["ATOLL_BROKER__URL"] == "nats://127.0.0.1:9"
    assert services.synchronizer("shard-1", 1).environment["ATOLL_BROKER__URL"] == "nats://127.0.0.1:2"
    assert services.synchronizer("standby-0-1", 0).environment["ATOLL_BROKER__URL"] == "tls://relay:3"
    assert services.evaluator().environment["ATOLL_BROKER__URL"] == "nats://127.0.0.1:9"


@pytest.mark.parametrize(
    ("via", "complaint"),
    [
        ("learner-9=nats://127.0.0.1:1", "--via names nobody"),
        ("standby-0-1=nats://127.0.0.1:1", "--via names nobody"),
        ("learner-1", "--via is wrong"),
        ("learner-1=127.0.0.1:1", "--via is wrong"),
        ("learner-1=http://127.0.0.1:1", "--via is wrong"),
    ],
)
def test_an_address_for_nobody_or_of_no_broker_is_refused(tmp_path: Path, via: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        plan(up_request(out=tmp_path / "run", learners=2, via=(via,)), {})


def test_a_locked_broker_stays_locked_and_an_open_one_open(tmp_path: Path) -> None:
    """What is stored belongs to the accounts of the door, so the folder decides; our own identity is not kept in `run.json`."""
    for opened in ({"locked": False}, {"brokers": 3, "assignments": ("up.locked=false",)}):
        up = plan(up_request(out=tmp_path / "open", **opened), {})
        assert (up.keys, up.settings.up.locked, up.settings.broker.identity) == (None, False, None)
        assert "is open to every user" in Services(up, RunFolder(up.out), "nats://a:1").greeting()[1]
    up = plan(up_request(out=tmp_path / "run"), {})
    with RunFolder(up.out) as folder:
        Services(up, folder).make_keys()
        Services(up, folder).make_keys()
    assert up.keys == tmp_path / "run" / "keys"
    assert up.settings.broker.identity is not None
    assert read_identity(up.settings.broker.identity).kind == "operator"
    assert "broker.identity" not in kept_settings(up)
    assert plan(up_request(out=tmp_path / "run"), {}).keys == up.keys
    with pytest.raises(SettingsError, match="was begun locked"):
        plan(up_request(out=tmp_path / "run", locked=False), {})
    (tmp_path / "begun" / "nats").mkdir(parents=True)
    (tmp_path / "begun" / "nats" / "nats-server.log").touch()
    with pytest.raises(SettingsError, match="was begun open"):
        plan(up_request(out=tmp_path / "begun", locked=True), {})
    assert plan(up_request(out=tmp_path / "begun"), {}).keys is None
    assert plan(up_request(out=tmp_path / "nodes", brokers=3), {}).keys == tmp_path / "nodes" / "keys"


def test_a_run_that_goes_on_keeps_its_open_door(tmp_path: Path) -> None:
    """Its archive is not signed, so that it stays open also if its broker's store is lost; --again begins anew, locked."""
    former(tmp_path / "run", 500, "up.locked=false")

    assert plan(up_request(out=tmp_path / "run"), {}).keys is None
    assert (
        plan(up_request(out=tmp_path / "new", like=tmp_path / "run" / "run.json"), {}).keys == tmp_path / "new" / "keys"
    )
    with pytest.raises(SettingsError, match="was begun open"):
        plan(up_request(out=tmp_path / "run", locked=True), {})
    former(tmp_path / "done", 1000, "up.locked=false")
    assert plan(up_request(out=tmp_path / "done", again=True), {}).keys == tmp_path / "done" / "keys"


def test_as_many_copies_as_brokers_unless_it_is_said(tmp_path: Path) -> None:
    """One broker keeps one copy, three keep three, or fewer; hosts get ports of their own, and a run keeps its brokers."""
    one, three = (plan(up_request(out=tmp_path / str(n), brokers=n, port=5000), {}) for n in (1, 3))
    fewer = plan(up_request(out=tmp_path / "fewer", brokers=3, assignments=("broker.replicas=1",)), {})
    with RunFolder(tmp_path / "3") as folder:
        hosts = Services(three, folder).broker()
        children = Services(three, folder, "nats://a:1,nats://b:2").learner("learner-1").environment

    assert [up.settings.broker.replicas for up in (one, three, fewer)] == [1, 3, 1]
    assert [host.name for host in hosts] == ["broker-1", "broker-2", "broker-3"]
    assert [host.command[5] for host in hosts] == ["5000", "5001", "5002"]
    assert (children["ATOLL_BROKER__URL"], children["ATOLL_BROKER__REPLICAS"]) == ("nats://a:1,nats://b:2", "3")


@pytest.mark.parametrize(
    ("brokers", "assignment", "complaint"),
    [
        (3, "broker.url=nats://a:1", "--brokers and --broker contradict"),
        (1, "broker.replicas=3", "fewer brokers than copies"),
        (3, "broker.replicas=5", "fewer brokers than copies"),
        (2, "seed=1", "--brokers is wrong"),
        (1, "broker.replicas=2", "broker.replicas is wrong"),
    ],
)
def test_copies_that_cannot_be_are_refused(tmp_path: Path, brokers: int, assignment: str, complaint: str) -> None:
    """More than there are nodes, an even number, or of a broker that is somebody else's."""
    with pytest.raises(SettingsError, match=complaint):
        plan(up_request(out=tmp_path / "run", brokers=brokers, assignments=(assignment,)), {})


def test_the_brokers_of_a_run_cannot_change(tmp_path: Path) -> None:
    up = plan(up_request(out=tmp_path / "run", brokers=3), {})
    with RunFolder(tmp_path / "run") as folder:
        folder.save(RunFile(run=up.settings.run, learners=3, settings=kept_settings(up), broker=EMBEDDED, tokens=5))
    again = plan(up_request(out=tmp_path / "run"), {})

    assert (again.settings.up.brokers, again.settings.broker.replicas) == (3, 3)
    with pytest.raises(SettingsError, match=r"brokers of a run cannot change"):
        plan(up_request(out=tmp_path / "run", brokers=1), {})
