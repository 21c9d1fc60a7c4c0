"""`atoll deploy check` says how what runs differs from its description: files, nodes, run, services and their versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from atoll import __version__
from atoll.bus.interface import CoreMessage
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.deploy import examination
from atoll.deploy.checks import Finding
from atoll.deploy.description import read_description
from atoll.deploy.examination import compare_deployment
from atoll.wire.messages import Presence, encode
from atoll.wire.subjects import Subjects
from support.command_line import atoll
from support.deployments import Deployed, deployed_here
from support.saying_services import beat_of, saying

pytestmark = pytest.mark.connected
LONG_S, SHORT_S = 30.0, 1.0


@pytest.fixture(autouse=True)
def _wall_jumps() -> None:
    """Certificates are judged by the time of day."""


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    with deployed_here(tmp_path) as made:
        asyncio.run(made.found())
        yield made


async def differing(deployed: Deployed, wait_s: float = LONG_S) -> dict[str, str]:
    findings = await compare_deployment(read_description(deployed.file), deployed.out, wait_s)
    wrong: list[Finding] = [finding for finding in findings if finding.grade == "FAIL"]
    assert all(finding.todo for finding in wrong)
    return {finding.about: finding.what for finding in wrong}


def services(
    deployed: Deployed, learners: tuple[str, ...], software: str = __version__
) -> AbstractAsyncContextManager[None]:
    """Let a synchronizer and some learners say again and again that they live; home-3 has left."""
    return saying(
        deployed.run, deployed.out, (deployed.url, deployed.url), learners, left=("home-3",), software=software
    )


async def test_what_runs_as_described_differs_in_nothing(deployed: Deployed) -> None:
    """Whoever has left is no fault; everybody else is heard, and the check ends as soon as all are."""
    async with services(deployed, ("home-1", "home-2")):
        assert await differing(deployed) == {}


async def listened(broker: MemoryBroker) -> None:
    async with asyncio.timeout(LONG_S):
        while len(broker.feeds) < 2:  # noqa: ASYNC110  (a feed that is opened sets no event)
            await asyncio.sleep(0)


async def test_every_learner_of_a_crowd_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 say one word each, all at the same moment, and the synchronizer says its own after them."""
    monkeypatch.setattr(examination, "STRANGERS_S", 0.0)
    file = tmp_path / "crowd.toml"
    file.write_text(
        'run = "crowd"\n[hub]\nhosts = ["hub.example.org"]\nsynchronizers = 1\n'
        "[regions.here]\nlearners = 1000\n[regions.there]\nlearners = 1000\n",
        encoding="utf-8",
    )
    described, subjects, broker = read_description(file), Subjects("crowd"), MemoryBroker()
    names = [f"{place}-{number}" for place in ("here", "there") for number in range(1, 1001)]
    bus = MemoryBus("crowd", broker)
    hearing = asyncio.create_task(examination.listen_for_services(bus, described, {}, LONG_S))
    await listened(broker)
    for name in names:
        broker.core_message(CoreMessage(subjects.beat(name), encode(beat_of(name))))
    presence = Presence(name="h-1", wants=(0,), owns=(0,), host="h", pid=1, software=__version__)
    broker.core_message(CoreMessage(subjects.presence("h-1"), encode(presence)))
    heard = await hearing
    await bus.close()

    assert set(heard.learners) == set(names)
    assert set(heard.synchronizers) == {"h-1"}


async def test_words_that_are_nobodys_own_are_not_heard(tmp_path: Path) -> None:
    """A beat in the name of another, and bytes that are no beat; then listening ends when its time is over."""
    file = tmp_path / "two.toml"
    file.write_text('run = "two"\n[hub]\nhosts = ["hub.example.org"]\n[regions.here]\nlearners = 2\n', encoding="utf-8")
    subjects, broker = Subjects("two"), MemoryBroker()
    bus = MemoryBus("two", broker)
    hearing = asyncio.create_task(examination.listen_for_services(bus, read_description(file), {}, 0.2))
    await listened(broker)
    broker.core_message(CoreMessage(subjects.beat("here-1"), encode(beat_of("here-2"))))
    broker.core_message(CoreMessage(subjects.beat("here-2"), b"nonsense"))
    heard = await hearing
    await bus.close()

    assert (heard.learners, heard.synchronizers) == ({}, {})


async def test_services_that_are_missing_or_too_many_are_named(deployed: Deployed) -> None:
    """One that was there and is silent, one that never came, and one that no description has."""
    async with services(deployed, ("home-1", "home-2")):
        pass
    text = deployed.file.read_text(encoding="utf-8")
    deployed.file.write_text(text.replace("learners = 3", "learners = 4"), encoding="utf-8")
    deployed.follow()
    async with services(deployed, ("home-1",)):
        missing = await differing(deployed, SHORT_S)
    deployed.file.write_text(text.replace("learners = 3", "learners = 1"), encoding="utf-8")
    async with services(deployed, ("home-1", "home-2")):
        deployed.follow()
        strange = await differing(deployed, SHORT_S)

    assert missing == {"home": "never came: home-4; not heard: home-2"}
    assert strange == {"learners": "not in the description: home-2"}


async def test_settings_versions_and_files_that_differ_are_told(deployed: Deployed) -> None:
    text = deployed.file.read_text(encoding="utf-8")
    (deployed.out / "home/services/home-1/atoll.toml").write_text("run = 'x'\n", encoding="utf-8")
    deployed.file.write_text(
        text.replace("fragments = 4", "fragments = 8").replace("learners = 3", "learners = 2"), encoding="utf-8"
    )
    async with services(deployed, ("home-1", "home-2"), software="0.0.9"):
        found = await compare_deployment(read_description(deployed.file), deployed.out, LONG_S)
    wrong = [(finding.about, finding.what) for finding in found if finding.grade == "FAIL"]

    assert ("files", "edited by hand: home/services/home-1/atoll.toml") in wrong
    assert (
        "files",
        "not as described: hub/services/synchronizer-1/atoll.toml, home/services/home-2/atoll.toml",
    ) in wrong
    assert ("founding", "protocol.fragments is 4 in the run and 8 here") in wrong
    assert ("versions", "0.0.9: h, home-1, home-2") in wrong


async def test_a_synchronizer_that_is_not_there_and_a_broker_that_is_away(deployed: Deployed) -> None:
    silent = await differing(deployed, SHORT_S)
    deployed.server.stop()
    away = await differing(deployed)
    deployed.server.start()

    assert silent["synchronizers"] == "0 of 1 are heard"
    assert silent["home"] == "never came: home-1, home-2, home-3"
    assert away == {f"127.0.0.1:{deployed.port}": "nobody listens on this port", "broker": "0 of 1 nodes can be used"}


def test_the_verb_leaves_with_1_if_anything_differs(deployed: Deployed) -> None:
    """And counts it; a description that was never rendered is one message."""
    words = ("deploy", "check", str(deployed.file), "--wait", "1")
    done = atoll(*words, "--out", str(deployed.out))
    never = atoll(*words, "--out", str(deployed.out / "nowhere"))

    assert done.returncode == 1, done.stderr
    assert "FAIL  synchronizers: 0 of 1 are heard\n      to do: " in done.stdout
    assert never.returncode == 1
    assert "atoll deploy render" in never.stdout
