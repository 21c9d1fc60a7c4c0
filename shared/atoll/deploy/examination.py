"""The whole examination of one seat: from the machine outward to the run, each step only if the one before it left something.

A wrong address makes every later question fail in the same way. So a person gets the first cause, and not its shadows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from atoll.base.clock import Clock, SystemClock
from atoll.base.errors import AtollError
from atoll.bus.addresses import ADDRESSES, addresses, is_address
from atoll.bus.interface import Bus
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.nats.probe import BrokerProbe
from atoll.bus.open import open_bus, open_jetstream
from atoll.bus.options import BusOptions
from atoll.deploy.door_checks import ExpectedDoor, doors_of
from atoll.deploy.findings import Finding, of_error
from atoll.deploy.machine_checks import MachineView, archive, congestion, disks, region_of, role_of, secrets
from atoll.deploy.run_checks import clock, copies, founding, hub_link, link, model_bytes, record_of, rights
from atoll.deploy.seat import Seat
from atoll.keys.identity import HeldIdentity, read_identity
from atoll.settings import Settings, bus_options
from atoll.wire.messages import RunRecord

PATIENCE_S: Final = 6.0
NAME: Final = "doctor"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the examination sees of the machine, and the clock that it compares with the broker's."""

    machine: MachineView = field(default_factory=MachineView)
    clock: Clock = field(default_factory=SystemClock)
    measures_link: bool = True


async def examined(seat: Seat, outlook: Outlook | None = None) -> list[Finding]:
    """Return what was found at `seat`."""
    outlook = outlook or Outlook()
    settings = seat.loaded.settings
    findings = list(secrets(seat.secrets))
    identity, wrong = _identity(settings.broker.identity, settings.run)
    region, wrong_there = _identity(seat.region_identity, settings.run)
    if region is not None:
        wrong_there = [region_of(seat, region.kind, region.name)]
    findings += [*wrong, *wrong_there]
    wrong += [finding for finding in wrong_there if finding.grade == "FAIL"]
    if wrong:
        return [*findings, *_disks(seat, identity, outlook, 0), congestion(outlook.machine, None)]
    if identity is not None:
        findings.append(role_of(seat, identity.kind, identity.name))
    if not all(is_address(url) for url in (settings.broker.url, *settings.broker.bulk)):
        findings.append(Finding("FAIL", "broker", f"{settings.broker.url!r} is no address", f"write it as {ADDRESSES}"))
        return findings
    authority = seat.authority if identity is None else identity.authority
    expected = ExpectedDoor(authority, seat.certificate, outlook.clock.wall(), ours=seat.store is not None)
    found, usable = await asyncio.to_thread(doors_of, settings.broker.url, expected)
    findings += found
    record, echo_s = None, None
    if usable and seat.store is None:
        reached, record, echo_s = await _behind_the_door(seat, identity, outlook)
        findings += reached
    if region is not None:
        there = ExpectedDoor(region.authority, seat.hub_certificate, expected.now_s)
        to_hub = 0
        for url in seat.hubs:
            found, listening = await asyncio.to_thread(doors_of, url, there)
            findings += found
            to_hub += listening
        if usable and to_hub:
            reached, echo_s = await _through_the_leaf(seat, region, outlook)
            findings += reached
    for url in settings.broker.bulk or (record.bulk if record is not None else ()):
        found, _ = await asyncio.to_thread(doors_of, url, replace(expected, certificate="", ours=False))
        findings += found
    return [*findings, *_disks(seat, identity, outlook, model_bytes(record)), congestion(outlook.machine, echo_s)]


def _disks(seat: Seat, identity: HeldIdentity | None, outlook: Outlook, model_bytes: int) -> Iterator[Finding]:
    """Yield what is found of the folders of a service; a run file alone does not tell what it does, and its identity does."""
    yield from disks(seat, outlook.machine, model_bytes)
    yield from archive(seat, None if identity is None else identity.kind, outlook.machine, model_bytes)


def _identity(path: Path | None, run: str) -> tuple[HeldIdentity | None, list[Finding]]:
    """Return the identity in a file, None for none, and what is wrong with it."""
    try:
        identity = None if path is None else read_identity(path)
        if identity is not None:
            identity.check_run(run)
    except AtollError as error:
        return None, [of_error("identity", error)]
    return identity, []


async def _behind_the_door(
    seat: Seat, identity: HeldIdentity | None, outlook: Outlook
) -> tuple[list[Finding], RunRecord | None, float | None]:
    """Return what the broker says once it has let us in, the run record, and the shortest echo in seconds."""
    settings = seat.loaded.settings
    options = replace(bus_options(settings), patience_s=PATIENCE_S, total_s=PATIENCE_S)
    try:
        async with _buses(settings, options) as (raw, bus):
            probe = BrokerProbe(raw)
            findings = [Finding("ok", "broker", f"lets us in at {_hosts(settings)}, with JetStream")]
            record, found = await record_of(bus, settings.run)
            findings += found
            if record is not None:
                findings.append(founding(record, seat.loaded))
                findings += await copies(probe, settings.run, settings.broker.replicas)
            if identity is not None:
                kind, name = identity.kind, identity.name
                findings += await rights(probe, kind, settings.run, name, founds=identity.founds)
            findings.append(await _clock(probe, settings.run, outlook))
            echo_s = None
            if outlook.measures_link:
                found, echo_s = await link(probe, model_bytes(record))
                findings += found
            return findings, record, echo_s
    except AtollError as error:
        return [of_error("broker", error)], None, None


async def _through_the_leaf(seat: Seat, region: HeldIdentity, outlook: Outlook) -> tuple[list[Finding], float | None]:
    """Return what the broker of a region says of its hub: whether that lets the region in, its clock, the link and its echo."""
    settings = seat.loaded.settings
    options = BusOptions(patience_s=PATIENCE_S, total_s=PATIENCE_S, credentials=region.credentials())
    try:
        raw = await open_jetstream(settings.broker.url, settings.run, name=NAME, options=options)
    except AtollError as error:
        todo = "nats-server.log in the store of this broker says why; is the hub's roll the newest one, and the region on it?"
        return [of_error("hub", error, todo)], None
    try:
        probe = BrokerProbe(raw)
        findings = [Finding("ok", "hub", f"lets region {region.name} in"), await _clock(probe, settings.run, outlook)]
        if not outlook.measures_link:
            return findings, None
        measured, echo_s = await hub_link(probe, 0)
        return [*findings, *measured], echo_s
    finally:
        await raw.close()


async def _clock(probe: BrokerProbe, run: str, outlook: Outlook) -> Finding:
    return await clock(probe, run, outlook.clock.wall, sets_clock=outlook.machine.sets_clock())


@asynccontextmanager
async def _buses(settings: Settings, options: BusOptions) -> AsyncIterator[tuple[JetStreamBus, Bus]]:
    """Yield a bus for questions of our own, and one that checks signatures and knows further brokers, as services have it."""
    async with AsyncExitStack() as opened:
        raw = await open_jetstream(settings.broker.url, settings.run, name=NAME, options=options)
        opened.push_async_callback(raw.close)
        bus = await open_bus(settings.broker.url, settings.run, name=NAME, options=options)
        opened.push_async_callback(bus.close)
        yield raw, bus


def _hosts(settings: Settings) -> str:
    return ", ".join(address.rpartition("@")[2].rpartition("//")[2] for address in addresses(settings.broker.url))
