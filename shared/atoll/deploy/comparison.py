"""What runs, compared with a description: files, nodes, the run, synchronizers and learners.

It listens for as long as services need to say that they live (synchronizers and learners do so every few seconds), as the
operator, who may hear everything. Brokers tell their version when they greet, services when they claim their name. Settings of
single learners are not told to anybody, so they are compared where they are written: in the rendered files.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from atoll import __version__
from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, PeerMisbehaved
from atoll.base.regular_files import text_or_empty
from atoll.base.wording import counted, few
from atoll.bus.interface import Bus, CoreMessage, Subscription
from atoll.bus.nats.probe import BrokerProbe
from atoll.bus.open import open_bus, open_jetstream
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.door_checks import ExpectedDoor, doors_of
from atoll.deploy.findings import Finding, graded, of_error
from atoll.deploy.rendering import edits, rendered_texts
from atoll.deploy.run_checks import copies, founding, record_of
from atoll.deploy.seat import seat_of_service
from atoll.deploy.services import kinds, learners_at, nodes, places
from atoll.keys.identity import read_identity
from atoll.keys.rights import premerger_of
from atoll.run.record import read_members
from atoll.settings import bus_options
from atoll.wire.messages import Beat, Member, Presence, RunRecord, decode, encode
from atoll.wire.premerge import RegionAnswer, RegionAsk
from atoll.wire.subjects import Subjects

NAME: Final = "deploy-check"
PATIENCE_S: Final = 6.0
NAMED: Final = 8
STRANGERS_S: Final = 3.0
"""For so long we go on to listen when all that are described were heard: for others, who also speak every few seconds."""
BEATS_WAITING_MIN: Final = 1024
"""So many heartbeats may wait to be read, and two more for each learner that the description has."""


@dataclass(slots=True)
class HeardServices:
    """Who said something while we listened: synchronizers by name, and the ids of learners."""

    synchronizers: dict[str, Presence] = field(default_factory=dict)
    learners: dict[str, Beat] = field(default_factory=dict)


async def compared(described: DeploymentDescription, out: Path, wait_s: float) -> list[Finding]:
    """Return how the files in `out`, and what runs, differ from a description; services have `wait_s` to be heard.

    Raises:
        SettingsError: nothing is rendered in `out`.
    """
    findings = files(described, out)
    seat = seat_of_service(described, out, None, [])
    settings = seat.loaded.settings
    try:
        authority = read_identity(settings.broker.identity or out).authority
    except AtollError as error:
        return [*findings, of_error("keys", error, "atoll deploy render")]
    expected = ExpectedDoor(authority, seat.certificate, SystemClock().wall())
    found, usable = await asyncio.to_thread(doors_of, settings.broker.url, expected)
    findings += [finding for finding in found if finding.grade != "ok"]
    findings.append(graded("broker", _missing(described, usable), f"{usable} nodes", "start them; see above why not"))
    if not usable:
        return findings
    options = replace(bus_options(settings), patience_s=PATIENCE_S, total_s=PATIENCE_S)
    try:
        raw = await open_jetstream(settings.broker.url, described.run, name=NAME, options=options)
        bus = await open_bus(settings.broker.url, described.run, name=NAME, options=options)
    except AtollError as error:
        return [*findings, of_error("broker", error)]
    try:
        record, found = await record_of(bus, described.run)
        findings += found
        if record is not None:
            findings.append(founding(record, seat.loaded))
            findings += await copies(BrokerProbe(raw), described.run, described.hub.count)
        members = await read_members(bus, Subjects(described.run)) if record is not None else {}
        heard = await heard_services(bus, described, members, wait_s)
        findings += services_of(described, members, heard)
        if record is not None:
            findings += await premergers(bus, described, record, members)
    except AtollError as error:
        findings.append(of_error("run", error))
    finally:
        await bus.close()
        await raw.close()
    return findings


def files(described: DeploymentDescription, out: Path) -> list[Finding]:
    """Return whether the files in `out` are those of the description."""
    edited = edits(out)
    wanted = rendered_texts(described)
    stale = [name for name, text in wanted.items() if name not in edited and text_or_empty(out / name) != text]
    return [
        graded(
            "files",
            [f"edited by hand: {few(edited, NAMED)}"] if edited else [],
            "none is edited",
            "put it into the description",
        ),
        graded(
            "files",
            [f"not as described: {few(stale, NAMED)}"] if stale else [],
            f"{len(wanted)} are as described",
            "atoll deploy render",
        ),
    ]


def _missing(described: DeploymentDescription, usable: int) -> list[str]:
    count = len(nodes(described))
    return [f"{usable} of {count} nodes can be used"] if usable < count else []


async def heard_services(
    bus: Bus, described: DeploymentDescription, members: Mapping[str, Member | None], wait_s: float
) -> HeardServices:
    """Listen until all that the description has were heard and others had their time, for `wait_s` at most."""
    subjects, heard, complete = Subjects(described.run), HeardServices(), asyncio.Event()
    everybody = [name for place in places(described) for name in learners_at(described, place)]
    missing = {name for name in everybody if not ((one := members.get(name)) and one.left)}

    def on_presence(message: CoreMessage) -> None:
        presence = decode(Presence, message.data)
        if message.subject == subjects.presence(presence.name):
            heard.synchronizers[presence.name] = presence

    def on_beat(message: CoreMessage) -> None:
        beat = decode(Beat, message.data)
        if message.subject == subjects.beat(beat.learner):
            heard.learners[beat.learner] = beat
            missing.discard(beat.learner)

    async def hear(feed: Subscription, take: Callable[[CoreMessage], None]) -> None:
        async for message in feed:
            with contextlib.suppress(PeerMisbehaved):
                take(message)
            if len(heard.synchronizers) >= described.hub.synchronizers and not missing:
                complete.set()

    presences = await bus.listen(subjects.presence("*"))
    # A feed that is full loses its oldest message: the same learners each time, if all of them beat at one moment.
    beats = await bus.listen(subjects.beat("*"), len_max=BEATS_WAITING_MIN + 2 * len(everybody))
    hearing = asyncio.gather(hear(presences, on_presence), hear(beats, on_beat))
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await complete.wait()
                await asyncio.sleep(STRANGERS_S)
    finally:
        await presences.close()
        await beats.close()
        await hearing  # ends with its feeds, and says what went wrong with them
    return heard


def services_of(
    described: DeploymentDescription, members: Mapping[str, Member | None], heard: HeardServices
) -> list[Finding]:
    """Return whether those who were heard are those of the description, and of which versions they are."""
    present = {one.name: one for one in heard.synchronizers.values() if not one.leaving}
    wanted = described.hub.synchronizers
    lacking = [f"{len(present)} of {wanted} are heard"] if len(present) < wanted else []
    hosts = ", ".join(
        sorted(f"{one.host} (shards {few(map(str, one.owns), NAMED) or 'none'})" for one in present.values())
    )
    findings = [graded("synchronizers", lacking, f"{len(present)}: {hosts}", "start the others, or see their logs")]
    for place in places(described):
        learners = learners_at(described, place)
        if not learners:
            continue
        finished = [name for name in learners if (one := members.get(name)) is not None and one.left]
        silent = [name for name in learners if name not in heard.learners and name not in finished]
        never = [name for name in silent if name not in members]
        faults = [f"never came: {few(never, NAMED)}"] if never else []
        faults += [f"not heard: {few(gone, NAMED)}"] if (gone := [name for name in silent if name in members]) else []
        well = f"{len(learners) - len(finished)} train" + (f", {len(finished)} have left" if finished else "")
        findings.append(graded(place, faults, well, "start them, or run `atoll doctor` where they are"))
    described_names = {name for place in places(described) for name in kinds(described, place)}
    if strange := sorted(heard.learners.keys() - described_names):
        todo = "add them to the description, or revoke their keys"
        findings.append(Finding("FAIL", "learners", f"not in the description: {few(strange, NAMED)}", todo))
    told = {one.host: one.software for one in present.values()}
    told |= {name: one.software for name, one in members.items() if one is not None and name in heard.learners}
    return [*findings, _versions(told)]


async def premergers(
    bus: Bus, described: DeploymentDescription, record: RunRecord, members: Mapping[str, Member | None]
) -> list[Finding]:
    """Return whether the synchronizers of regions answer: a question without a manifest is answered at once.

    One whose learners have all left is not asked: it leaves with the run.
    """
    subjects, findings = Subjects(described.run), []
    question = encode(RegionAsk(verb="read", run_nonce=record.nonce))
    for place, region in described.regions.items():
        learners = learners_at(described, place)
        if not region.premerge or all((one := members.get(name)) is not None and one.left for name in learners):
            continue
        answer_at = subjects.premerge_answer(place, f"check-{secrets.token_hex(8)}")
        told = await bus.ask(subjects.premerge(place), question, timeout_s=PATIENCE_S, answer_at=answer_at)
        faults = [] if told is not None and _is_answer(told) else [f"{premerger_of(place)} does not answer"]
        todo = "start it, or run `atoll doctor` where it is"
        findings.append(graded(place, faults, f"{premerger_of(place)} answers", todo))
    return findings


def _is_answer(told: bytes) -> bool:
    with contextlib.suppress(PeerMisbehaved):
        decode(RegionAnswer, told)
        return True
    return False


def _versions(told: dict[str, str]) -> Finding:
    """Return whether all services are of our own version."""
    others: dict[str, list[str]] = {}
    for name, version in sorted(told.items()):
        if version != __version__:
            others.setdefault(version or "one that does not say", []).append(name)
    faults = [f"{version}: {few(names, NAMED)}" for version, names in others.items()]
    alike = f"{counted(len(told), 'service')} of {__version__}"
    return graded("versions", faults, alike, f"upgrade them to {__version__}, or this one")
