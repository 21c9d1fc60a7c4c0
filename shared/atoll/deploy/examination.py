"""The whole examination of one seat, and what runs compared with a description.

`examine` goes from the machine outward to the run, each step only if the one before it left something. A wrong address makes
every later question fail in the same way, so a person gets the first cause, and not its shadows.

`compare_deployment` looks at files, nodes, the run, synchronizers and learners. It listens for as long as services need to say
that they live (synchronizers and learners do so every few seconds), as the operator, who may hear everything. Brokers tell
their version when they greet, services when they claim their name. Settings of single learners are not told to anybody, so
they are compared where they are written: in the rendered files.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from atoll import __version__
from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, PeerMisbehaved
from atoll.base.files import text_or_empty
from atoll.base.wording import counted, few
from atoll.bus.interface import Bus, CoreMessage, Subscription
from atoll.bus.nats.administration import BrokerProbe
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.open import open_bus
from atoll.bus.options import ADDRESSES, BusOptions, addresses, is_address
from atoll.deploy.checks import (
    ExpectedDoor,
    Finding,
    MachineView,
    Seat,
    check_archive,
    check_clock,
    check_congestion,
    check_copies,
    check_disks,
    check_doors,
    check_founding,
    check_hub_link,
    check_link,
    check_region_identity,
    check_rights,
    check_role,
    check_secrets,
    error_finding,
    grade_faults,
    model_bytes,
    read_record,
    seat_of_service,
)
from atoll.deploy.description import DeploymentDescription
from atoll.deploy.rendering import edited_files, rendered_texts
from atoll.deploy.services import kinds, learners_at, nodes, places
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.rights import premerger_of
from atoll.run.record import read_members
from atoll.settings import Settings, bus_options
from atoll.wire.messages import Beat, Member, Presence, RegionAnswer, RegionAsk, RunRecord, decode, encode
from atoll.wire.subjects import Subjects

PATIENCE_S: Final = 6.0
DOCTOR: Final = "doctor"
DEPLOY_CHECK: Final = "deploy-check"
NAMED: Final = 8
STRANGERS_S: Final = 3.0
"""For so long we go on to listen when all that are described were heard: for others, who also speak every few seconds."""
BEATS_WAITING_MIN: Final = 1024
"""So many heartbeats may wait to be read, and two more for each learner that the description has."""


async def examine(seat: Seat, view: MachineView | None = None) -> list[Finding]:
    """Return what was found at `seat`."""
    view = view or MachineView()
    settings = seat.loaded.settings
    findings = list(check_secrets(seat.secrets))
    identity, wrong = _read_identity(settings.broker.identity, settings.run)
    region, wrong_there = _read_identity(seat.region_identity, settings.run)
    if region is not None:
        wrong_there = [check_region_identity(seat, region.kind, region.name)]
    findings += [*wrong, *wrong_there]
    wrong += [finding for finding in wrong_there if finding.grade == "FAIL"]
    if wrong:
        return [*findings, *_check_folders(seat, identity, view, 0), check_congestion(view, None)]
    if identity is not None:
        findings.append(check_role(seat, identity.kind, identity.name))
    if not all(is_address(url) for url in (settings.broker.url, *settings.broker.bulk)):
        findings.append(Finding("FAIL", "broker", f"{settings.broker.url!r} is no address", f"write it as {ADDRESSES}"))
        return findings
    reached, record, echo_s = await _examine_brokers(seat, identity, region, view)
    size_bytes = model_bytes(record)
    folders = _check_folders(seat, identity, view, size_bytes)
    return [*findings, *reached, *folders, check_congestion(view, echo_s)]


async def _examine_brokers(
    seat: Seat, identity: HeldIdentity | None, region: HeldIdentity | None, view: MachineView
) -> tuple[list[Finding], RunRecord | None, float | None]:
    """Examine the doors of all brokers, and what is behind those that can be used.

    Returns the findings, the run record, and the shortest echo in seconds.
    """
    broker = seat.loaded.settings.broker
    authority = seat.authority if identity is None else identity.authority
    expected = ExpectedDoor(authority, seat.certificate, view.clock.wall(), ours=seat.store is not None)
    findings, usable = await asyncio.to_thread(check_doors, broker.url, expected)
    record, echo_s = None, None
    if usable and seat.store is None:
        found, record, echo_s = await _examine_broker(seat, identity, view)
        findings += found
    if region is not None:
        there = ExpectedDoor(region.authority, seat.hub_certificate, expected.now_s)
        doors = [await asyncio.to_thread(check_doors, url, there) for url in seat.hubs]
        findings += [finding for found, _ in doors for finding in found]
        if usable and sum(listening for _, listening in doors):
            found, echo_s = await _examine_hub_link(seat, region, view)
            findings += found
    for url in broker.bulk or (record.bulk if record is not None else ()):
        found, _ = await asyncio.to_thread(check_doors, url, replace(expected, certificate="", ours=False))
        findings += found
    return findings, record, echo_s


def _check_folders(seat: Seat, identity: HeldIdentity | None, view: MachineView, model_bytes: int) -> Iterator[Finding]:
    """Yield what is found of the folders of a service; a run file alone does not tell what it does, and its identity does."""
    yield from check_disks(seat, view, model_bytes)
    yield from check_archive(seat, None if identity is None else identity.kind, view, model_bytes)


def _read_identity(path: Path | None, run: str) -> tuple[HeldIdentity | None, list[Finding]]:
    try:
        identity = None if path is None else read_identity(path)
        if identity is not None:
            identity.check_run(run)
    except AtollError as error:
        return None, [error_finding("identity", error)]
    return identity, []


async def _examine_broker(
    seat: Seat, identity: HeldIdentity | None, view: MachineView
) -> tuple[list[Finding], RunRecord | None, float | None]:
    settings = seat.loaded.settings
    hosts = (address.rpartition("@")[2].rpartition("//")[2] for address in addresses(settings.broker.url))
    try:
        async with _open_buses(settings, DOCTOR) as (raw, bus):
            probe = BrokerProbe(raw.connection)
            findings = [Finding("ok", "broker", f"lets us in at {', '.join(hosts)}, with JetStream")]
            record, found = await read_record(bus, settings.run)
            findings += found
            if record is not None:
                findings.append(check_founding(record, seat.loaded))
                findings += await check_copies(probe, settings.run, settings.broker.replicas)
            if identity is not None:
                kind, name = identity.kind, identity.name
                findings += await check_rights(probe, kind, settings.run, name, founds=identity.founds)
            findings.append(await check_clock(probe, settings.run, view))
            echo_s = None
            if view.measures_link:
                found, echo_s = await check_link(probe, model_bytes(record))
                findings += found
            return findings, record, echo_s
    except AtollError as error:
        return [error_finding("broker", error)], None, None


async def _examine_hub_link(seat: Seat, region: HeldIdentity, view: MachineView) -> tuple[list[Finding], float | None]:
    """Return what the broker of a region says of its hub: whether that lets the region in, its clock, the link and its echo."""
    settings = seat.loaded.settings
    options = BusOptions(patience_s=PATIENCE_S, total_s=PATIENCE_S, credentials=region.credentials())
    try:
        raw = await JetStreamBus.open(settings.broker.url, settings.run, name=DOCTOR, options=options)
    except AtollError as error:
        todo = "nats-server.log in the store of this broker says why; is the hub's roll the newest one, and the region on it?"
        return [error_finding("hub", error, todo)], None
    try:
        probe = BrokerProbe(raw.connection)
        findings = [
            Finding("ok", "hub", f"lets region {region.name} in"),
            await check_clock(probe, settings.run, view),
        ]
        if not view.measures_link:
            return findings, None
        measured, echo_s = await check_hub_link(probe, 0)
        return [*findings, *measured], echo_s
    finally:
        await raw.close()


@asynccontextmanager
async def _open_buses(settings: Settings, name: str) -> AsyncIterator[tuple[JetStreamBus, Bus]]:
    """Yield a bus for questions of our own, and one that checks signatures and knows further brokers, as services have it."""
    options = replace(bus_options(settings), patience_s=PATIENCE_S, total_s=PATIENCE_S)
    async with AsyncExitStack() as opened:
        raw = await JetStreamBus.open(settings.broker.url, settings.run, name=name, options=options)
        opened.push_async_callback(raw.close)
        bus = await open_bus(settings.broker.url, settings.run, name=name, options=options)
        opened.push_async_callback(bus.close)
        yield raw, bus


@dataclass(slots=True)
class HeardServices:
    """The services that said something while we listened: synchronizers by name, learners by id."""

    synchronizers: dict[str, Presence] = field(default_factory=dict)
    learners: dict[str, Beat] = field(default_factory=dict)


async def compare_deployment(described: DeploymentDescription, out: Path, wait_s: float) -> list[Finding]:
    """Return how the files in `out`, and what runs, differ from a description; services have `wait_s` to be heard.

    Raises:
        SettingsError: nothing is rendered in `out`.
    """
    findings = check_files(described, out)
    seat = seat_of_service(described, out, None, [])
    settings = seat.loaded.settings
    try:
        authority = read_identity(settings.broker.identity or out).authority
    except AtollError as error:
        return [*findings, error_finding("keys", error, "atoll deploy render")]
    expected = ExpectedDoor(authority, seat.certificate, SystemClock().wall())
    found, usable = await asyncio.to_thread(check_doors, settings.broker.url, expected)
    findings += [finding for finding in found if finding.grade != "ok"]
    lacking = [f"{usable} of {count} nodes can be used"] if usable < (count := len(nodes(described))) else []
    findings.append(grade_faults("broker", lacking, f"{usable} nodes", "start them; see above why not"))
    if not usable:
        return findings
    opened = False
    try:
        async with _open_buses(settings, DEPLOY_CHECK) as (raw, bus):
            opened = True
            record, found = await read_record(bus, described.run)
            findings += found
            if record is not None:
                findings.append(check_founding(record, seat.loaded))
                findings += await check_copies(BrokerProbe(raw.connection), described.run, described.hub.count)
            members = await read_members(bus, Subjects(described.run)) if record is not None else {}
            heard = await listen_for_services(bus, described, members, wait_s)
            findings += check_services(described, members, heard)
            if record is not None:
                findings += await check_premergers(bus, described, record, members)
    except AtollError as error:
        findings.append(error_finding("run" if opened else "broker", error))
    return findings


def check_files(described: DeploymentDescription, out: Path) -> list[Finding]:
    """Return whether the files in `out` are those of the description."""
    edited = edited_files(out)
    wanted = rendered_texts(described)
    stale = [name for name, text in wanted.items() if name not in edited and text_or_empty(out / name) != text]
    by_hand = [f"edited by hand: {few(edited, NAMED)}"] if edited else []
    others = [f"not as described: {few(stale, NAMED)}"] if stale else []
    return [
        grade_faults("files", by_hand, "none is edited", "put it into the description"),
        grade_faults("files", others, f"{len(wanted)} are as described", "atoll deploy render"),
    ]


async def listen_for_services(
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


def check_services(
    described: DeploymentDescription, members: Mapping[str, Member | None], heard: HeardServices
) -> list[Finding]:
    """Return whether those who were heard are those of the description, and of which versions they are."""
    present = {one.name: one for one in heard.synchronizers.values() if not one.leaving}
    learners = {place: learners_at(described, place) for place in places(described)}
    findings = [
        _check_synchronizers(described, present),
        *(_check_learners(place, names, members, heard) for place, names in learners.items() if names),
    ]
    described_names = {name for place in places(described) for name in kinds(described, place)}
    if strange := sorted(heard.learners.keys() - described_names):
        todo = "add them to the description, or revoke their keys"
        findings.append(Finding("FAIL", "learners", f"not in the description: {few(strange, NAMED)}", todo))
    software = {one.host: one.software for one in present.values()}
    software |= {name: one.software for name, one in members.items() if one is not None and name in heard.learners}
    return [*findings, _check_versions(software)]


def _check_synchronizers(described: DeploymentDescription, present: Mapping[str, Presence]) -> Finding:
    wanted = described.hub.synchronizers
    lacking = [f"{len(present)} of {wanted} are heard"] if len(present) < wanted else []
    hosts = ", ".join(
        sorted(f"{one.host} (shards {few(map(str, one.owns), NAMED) or 'none'})" for one in present.values())
    )
    return grade_faults("synchronizers", lacking, f"{len(present)}: {hosts}", "start the others, or see their logs")


def _check_learners(
    place: str, learners: list[str], members: Mapping[str, Member | None], heard: HeardServices
) -> Finding:
    finished = [name for name in learners if (one := members.get(name)) is not None and one.left]
    silent = [name for name in learners if name not in heard.learners and name not in finished]
    never = [name for name in silent if name not in members]
    lost = [name for name in silent if name in members]
    faults = [f"never came: {few(never, NAMED)}"] if never else []
    faults += [f"not heard: {few(lost, NAMED)}"] if lost else []
    well = f"{len(learners) - len(finished)} train" + (f", {len(finished)} have left" if finished else "")
    return grade_faults(place, faults, well, "start them, or run `atoll doctor` where they are")


async def check_premergers(
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
        findings.append(grade_faults(place, faults, f"{premerger_of(place)} answers", todo))
    return findings


def _is_answer(told: bytes) -> bool:
    with contextlib.suppress(PeerMisbehaved):
        decode(RegionAnswer, told)
        return True
    return False


def _check_versions(told: dict[str, str]) -> Finding:
    others: dict[str, list[str]] = {}
    for name, version in sorted(told.items()):
        if version != __version__:
            others.setdefault(version or "one that does not say", []).append(name)
    faults = [f"{version}: {few(names, NAMED)}" for version, names in others.items()]
    alike = f"{counted(len(told), 'service')} of {__version__}"
    return grade_faults("versions", faults, alike, f"upgrade them to {__version__}, or this one")
