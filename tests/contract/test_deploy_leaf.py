"""A region with a broker of its own, started by the words that are rendered: compared with its description, and examined."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from atoll.client.membership import publish_origin
from atoll.deploy.checks import MachineView, Seat, seat_of_service
from atoll.deploy.description import DeploymentDescription, read_description
from atoll.deploy.examination import compare_deployment, examine
from atoll.deploy.rendering import render
from atoll.deploy.services import broker_command, leaf_of, nodes
from atoll.keys.identity import write_secret
from atoll.keys.roll import KeyFolder
from atoll.wire.messages import encode
from atoll.wire.subjects import Subjects
from support.clocks import ShiftedClock
from support.deployments import PROGRAM, free_port, open_signed
from support.founded_run import run_record
from support.links import unique_run
from support.saying_services import saying

pytestmark = [pytest.mark.connected, pytest.mark.second_tier]
LEARNERS = ("home-1", "home-2")
PREMERGER = "home-premerge"
SOON_S, POLL_S, LONG_S, SHORT_S = 120.0, 0.05, 60.0, 1.0
QUIET = MachineView(measures_link=False)


@pytest.fixture(autouse=True)
def _wall_jumps() -> None:
    """Certificates are judged by the time of day."""


@dataclass
class RegionDeployed:
    """A rendered deployment of a hub and one region, of which both brokers run."""

    described: DeploymentDescription
    out: Path
    hub: subprocess.Popen[bytes]

    @property
    def urls(self) -> tuple[str, str]:
        leaf = leaf_of(self.described, "home")
        assert leaf is not None
        return nodes(self.described)[0].address, leaf.address

    async def found(self) -> None:
        """Found the run as a learner of the region does, through its broker: the record, and version 0."""
        run = self.described.run
        bus = await open_signed(self.urls[1], run, self.out / "home/services/home-1/identity.toml")
        await bus.provision(64 << 20)
        record = run_record(run)
        await bus.put_record(Subjects(run).run_record, encode(record), expected=0)
        sizes = record.layout.fragment_sizes()
        await publish_origin(bus, record, {p: np.zeros(size, np.float32) for p, size in enumerate(sizes)})
        await bus.close()

    async def differing(self, wait_s: float) -> dict[str, str]:
        findings = await compare_deployment(self.described, self.out, wait_s)
        return {finding.about: finding.what for finding in findings if finding.grade == "FAIL"}

    async def faults(self, service: str) -> dict[str, str]:
        findings = await examine(seat_of_service(self.described, self.out, service, []), QUIET)
        return {finding.about: finding.what for finding in findings if finding.grade == "FAIL"}


@contextmanager
def started(words: Sequence[str], log: Path, said: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `atoll` with these words until we leave; yield once it has said something."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    with log.open("wb") as out, subprocess.Popen([PROGRAM, *words], stdout=out, stderr=out, env=environment) as process:
        try:
            deadline_s = time.monotonic() + SOON_S
            while said not in (text := log.read_text(encoding="utf-8", errors="replace")):
                assert process.poll() is None, text
                assert time.monotonic() < deadline_s, text
                time.sleep(POLL_S)
            yield process
        finally:
            process.terminate()


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[RegionDeployed]:
    port, leaf_port, own, corpus = free_port(), free_port(), free_port(), tmp_path / "corpus"
    corpus.mkdir()
    file = tmp_path / "deployment.toml"
    file.write_text(
        f'run = "{unique_run()}"\n[hub]\nhosts = ["127.0.0.1"]\nport = {port}\nleaf_port = {leaf_port}\nsynchronizers = 1\n'
        f'[regions.home]\nlearners = 2\nbroker = "leaf"\nhost = "127.0.0.1"\nport = {own}\npremerge = true\n'
        f'data = "{corpus}"\nsettings.learner.checkpoint_dir = "{tmp_path / "state"}"\n'
        "[settings]\nprotocol.fragments = 4\nprotocol.shards = 2\n",
        encoding="utf-8",
    )
    described, out = read_description(file), tmp_path / "out"
    render(described, out)
    leaf = leaf_of(described, "home")
    assert leaf is not None
    hub_door, door = out / "hub/services/broker", out / f"home/services/{leaf.name}"
    words = broker_command(described, nodes(described)[0], store=str(tmp_path / "hub"), keys=str(hub_door))
    with ExitStack() as ends:
        hub = ends.enter_context(started(words, tmp_path / "hub.log", "hub of regions"))
        words = broker_command(described, leaf, store=str(tmp_path / "leaf"), keys=str(door))
        ends.enter_context(started(words, tmp_path / "leaf.log", "region home"))
        yield RegionDeployed(described, out, hub)


async def test_a_region_runs_as_described_with_its_premerger_and_is_told_without(
    placed: RegionDeployed, tmp_path: Path
) -> None:
    await placed.found()
    words = ["synchronizer", "--config", str(placed.out / f"home/services/{PREMERGER}/atoll.toml")]
    async with saying(placed.described.run, placed.out, placed.urls, LEARNERS):
        with started(words, tmp_path / "premerger.log", "region.serving"):
            well = await placed.differing(LONG_S)
            seats = {name: await placed.faults(name) for name in ("home-broker", *LEARNERS, PREMERGER)}
        without = await placed.differing(SHORT_S)

    assert well == {}
    assert not any(seats.values()), seats
    assert without == {"home": f"{PREMERGER} does not answer"}


async def test_the_doctor_tells_of_a_region_whose_hub_is_away(placed: RegionDeployed) -> None:
    """At the seat of its broker: the hub's port for leaves, which nobody else there would look at."""
    placed.hub.terminate()
    placed.hub.wait()
    faults = await placed.faults("home-broker")

    assert faults == {f"127.0.0.1:{nodes(placed.described)[0].leaf_port}": "nobody listens on this port"}


def leaf_seat(placed: RegionDeployed) -> Seat:
    return seat_of_service(placed.described, placed.out, "home-broker", [])


async def about_identity(seat: Seat) -> list[tuple[str, str]]:
    wrong = [finding for finding in await examine(seat, QUIET) if finding.grade == "FAIL"]
    assert all(finding.todo for finding in wrong), wrong
    return [(finding.about, finding.what) for finding in wrong]


async def test_the_doctor_names_a_wrong_identity_of_a_region(placed: RegionDeployed, tmp_path: Path) -> None:
    """Text that is none, another region's, a learner's, another run's, and one that another authority has made."""
    seat, run = leaf_seat(placed), placed.described.run
    mine, strange = placed.out / "home/services/home-broker/identity.toml", KeyFolder(tmp_path / "strange")
    strange.create(["127.0.0.1"], time.time())
    strange.add("home", "region", run, time.time())
    own = KeyFolder(placed.out / "keys")
    own.add("elsewhere", "region", run, time.time())
    own.add("home", "region", "another", time.time())
    garbage = tmp_path / "garbage.toml"
    write_secret(garbage, "garbage")
    found = {
        name: await about_identity(replace(seat, region_identity=path))
        for name, path in {
            "right": mine,
            "garbage": garbage,
            "gone": tmp_path / "gone.toml",
            "elsewhere": own.path / "identities" / run / "elsewhere.toml",
            "learner": placed.out / "home/services/home-1/identity.toml",
            "run": own.path / "identities/another/home.toml",
            "strange": strange.path / "identities" / run / "home.toml",
        }.items()
    }

    assert found["right"] == []
    assert {
        name: [about for about, _ in found[name]] for name in ("garbage", "gone", "elsewhere", "learner", "run")
    } == {name: ["identity"] for name in ("garbage", "gone", "elsewhere", "learner", "run")}
    assert found["elsewhere"][0][1] == "that of region elsewhere, and this is the broker of region home"
    assert found["run"][0][1].startswith("this identity is of another run")
    hub = f"127.0.0.1:{nodes(placed.described)[0].leaf_port}"
    [(about, what)] = found["strange"]
    assert about == hub
    assert "of another authority than our identity's" in what


async def test_the_doctor_measures_the_link_of_a_region_and_its_clock(placed: RegionDeployed) -> None:
    """At its broker and at a learner that founds: the time of the hub, and the link to it, not the one to the leaf."""
    await placed.found()
    days = [
        [one for one in await examine(seat, replace(QUIET, clock=ShiftedClock(86400.0))) if one.about == "clock"]
        for seat in (leaf_seat(placed), seat_of_service(placed.described, placed.out, "home-1", []))
    ]
    at_leaf = {one.about: one for one in await examine(leaf_seat(placed))}
    learner = {one.about: one for one in await examine(seat_of_service(placed.described, placed.out, "home-1", []))}

    assert [[one.grade for one in found] for found in days] == [["FAIL"], ["FAIL"]]
    assert all(found[0].what.startswith("ours is 24 h ahead of") for found in days), days
    assert (at_leaf["hub"].grade, at_leaf["hub"].what) == ("ok", "lets region home in")
    assert at_leaf["clock"].grade == learner["clock"].grade == "ok"
    for told in (at_leaf["link to the hub"], learner["link to the hub"]):
        assert "ms there and back; up " in told.what
        assert told.grade in ("ok", "note")  # a busy machine may be slow
    assert learner["link"].what.startswith("to the region's broker: ")


async def test_the_seat_of_a_region_whose_broker_does_not_run_yet_is_examined(placed: RegionDeployed) -> None:
    """Before its start: a note says that nobody listens there, and the hub's port is looked at."""
    port = free_port()
    seat = seat_of_service(placed.described, placed.out, "home-broker", [f"broker.url=tls://127.0.0.1:{port}"])
    findings = await examine(seat, QUIET)

    assert [one for one in findings if one.grade == "FAIL"] == []
    assert [one.grade for one in findings if one.about == f"127.0.0.1:{port}"] == ["note"]
    assert f"127.0.0.1:{nodes(placed.described)[0].leaf_port}" in {one.about for one in findings}
