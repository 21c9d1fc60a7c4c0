"""What a doctor asks the broker as its seat's identity: rights, clock, link, and whether the run is what the seat takes it for.

A person's settings of the protocol count only at the founding. So they are compared with the run record, as far as they were
given: whoever joins a run that was founded otherwise trains with the founder's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import msgspec

from atoll.base.errors import AtollError
from atoll.base.units import as_bytes, as_rate, as_time
from atoll.base.wording import counted
from atoll.bus.interface import Bus
from atoll.bus.nats.probe import BrokerProbe, LinkMeasured
from atoll.bus.streams import stream_of, stream_plan
from atoll.deploy.findings import Finding, as_date, graded, of_error
from atoll.keys.rights import Kind, Rights, rights_of
from atoll.run.record import read_run
from atoll.settings import LoadedSettings
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import Subjects
from atoll.wire.version import SCHEMA_NEWEST, SCHEMA_OLDEST

OFF_S: Final = 10.0
"""Clocks further apart than this make times in logs and reports lie, and end keys at another moment than the operator means."""
SLOW_BITS_PER_S: Final = 1e6
FLOAT_BYTES: Final = 4
LINK_TO_HUB: Final = "link to the hub"


async def clock(probe: BrokerProbe, run: str, wall: Callable[[], float], *, sets_clock: bool | None) -> Finding:
    """Return how far our clock is from the broker's; where that says nothing, whether the kernel has its clock set."""
    # Of all streams the one of which a region may ask, too.
    found = await probe.time(stream_of(stream_plan(run), Subjects(run).run_record).name, wall)
    if found is None:
        untold = "the broker tells its time to founders, synchronizers and operators of a founded run"
        kept = {True: "follows a time server", False: "follows no time server", None: "does not say whose time it has"}
        says = f"this machine says {as_date(wall())}, and {kept[sets_clock]}"
        return Finding("note", "clock", f"{untold}; {says}")
    said = f"{as_time(abs(found.ahead_s))} {'behind' if found.ahead_s > 0 else 'ahead of'} the broker's"
    if abs(found.ahead_s) - found.within_s >= OFF_S:
        todo = "let this machine, or the broker's, follow a time server (chrony, or `timedatectl set-ntp true`)"
        return Finding("FAIL", "clock", f"ours is {said}", todo)
    return Finding("ok", "clock", f"within {as_time(max(0.1, abs(found.ahead_s) + found.within_s))} of the broker's")


async def rights(probe: BrokerProbe, kind: Kind, run: str, name: str, *, founds: bool) -> list[Finding]:
    """Return whether the broker lets this identity do what its kind must, and keeps it from what it must not."""
    needed = _needed(kind, run, name, founds=founds)
    denied, unheard = [], 0
    for subject in needed.stores:
        if (allowed := await probe.may_store(_one(subject))) is False:
            denied.append(f"publish {subject}")
        unheard += allowed is None
    denied += [f"subscribe {subject}" for subject in needed.hears if not await probe.may_hear(subject)]
    told = f"{counted(len(needed.stores), 'subject')} to publish on, {len(needed.hears)} to hear"
    todo = "ask the operator for an identity of the right kind; is the broker's roll the newest one?"
    found = [graded("rights", denied, f"{kind}: {told}", todo)]
    if unheard and not denied:
        found.append(
            Finding("note", "rights", f"{unheard} of these subjects have no stream yet: the run is not founded")
        )
    if kind == "learner" and await probe.may_hear(f"{Subjects(run).prefix}.up.>"):
        what = "this learner may hear what others send: the broker has no locked door for it"
        found.append(Finding("FAIL", "rights", what, "start the broker with --keys"))
    return found


def _needed(kind: Kind, run: str, name: str, *, founds: bool) -> Rights:
    s = Subjects(run)
    if kind in ("synchronizer", "operator"):
        return Rights(stores=(s.head("*"), s.lease(0), s.event("*", "shard-0")), hears=(f"{s.prefix}.>",))
    return rights_of(kind, run, name, founds=founds)


def _one(pattern: str) -> str:
    """Return one subject of a pattern."""
    return ".".join("0" if level in ("*", ">") else level for level in pattern.split("."))


async def link(probe: BrokerProbe, model_bytes: int) -> tuple[list[Finding], float | None]:
    """Return what the link carries each way, and the shortest echo in seconds (None if nothing came back)."""
    found = await probe.link()
    if found is None:
        todo = "see whether something on the way ends connections that carry much"
        return [Finding("FAIL", "link", "a few megabytes did not come back within seconds", todo)], None
    slow = min(found.up_bits_per_s, found.down_bits_per_s) < SLOW_BITS_PER_S
    said = _said(found, 0 if probe.in_region else model_bytes)
    findings = [_link("link", f"to the region's broker: {said}" if probe.in_region else said, slow=slow)]
    if not probe.in_region:
        return findings, found.echo_s
    to_hub, echo_s = await hub_link(probe, model_bytes)
    return [*findings, *to_hub], echo_s


async def hub_link(probe: BrokerProbe, model_bytes: int) -> tuple[list[Finding], float | None]:
    """Return what the link of a region carries to its hub, and the hub's shortest echo in seconds, as `link` does."""
    found = await probe.hub_link()
    if found is None:
        todo = "see whether the link is cut or full, and what nats-server.log in the store of the region's broker says"
        return [Finding("FAIL", LINK_TO_HUB, "the hub did not answer through it within seconds", todo)], None
    moved = as_bytes(found.bytes_moved)
    said = f"{1000 * found.echo_s:.1f} ms there and back; up {as_rate(found.up_bits_per_s)} ({moved} moved)"
    if model_bytes:
        said += f"; all parameters in float32 take {as_time(8 * model_bytes / found.up_bits_per_s)} up"
    return [_link(LINK_TO_HUB, said, slow=found.up_bits_per_s < SLOW_BITS_PER_S)], found.echo_s


def _link(about: str, said: str, *, slow: bool) -> Finding:
    todo = "`atoll plan` says what rate a run needs" if slow else ""
    return Finding("note" if slow else "ok", about, said, todo)


def _said(found: LinkMeasured, model_bytes: int) -> str:
    said = (
        f"{1000 * found.echo_s:.1f} ms there and back; up {as_rate(found.up_bits_per_s)}, down at least "
        f"{as_rate(found.down_bits_per_s)} ({as_bytes(found.bytes_moved)} moved)"
    )
    if model_bytes:
        said += f"; all parameters in float32 take {as_time(8 * model_bytes / found.up_bits_per_s)} up"
    return said


async def record_of(bus: Bus, run: str) -> tuple[RunRecord | None, list[Finding]]:
    """Return the run record, if there is one that this Atoll reads, and what stands against it."""
    try:
        record = await read_run(bus, Subjects(run))
    except AtollError as error:
        return None, [of_error("run", error)]
    if record is None:
        return None, [
            Finding("note", "run", f"{run} is not founded yet: its first learner with the right to it does that")
        ]
    said = f"{run}, founded by {record.founder}, wire version {record.schema} (we speak {SCHEMA_OLDEST} to {SCHEMA_NEWEST})"
    return record, [Finding("ok", "run", said)]


def founding(record: RunRecord, loaded: LoadedSettings) -> Finding:
    """Return how the run's protocol differs from the settings that were given for it."""
    return graded(
        "founding",
        differences(record, loaded),
        "the run's protocol is as our settings say, as far as they say anything",
        "the founder's hold for the whole run: correct the settings, or found another run",
    )


def differences(record: RunRecord, loaded: LoadedSettings) -> list[str]:
    """Return one phrase for each setting of the protocol that was given and is another one in the run."""
    theirs = msgspec.to_builtins(record.protocol)
    ours = msgspec.to_builtins(loaded.settings.protocol)
    names = sorted({name.split(".")[1] for name in loaded.origins if name.startswith("protocol.")})
    return [
        f"protocol.{name} is {json.dumps(theirs[name])} in the run and {json.dumps(ours[name])} here"
        for name in names
        if name in theirs and theirs[name] != ours[name]
    ]


async def copies(probe: BrokerProbe, run: str, wanted: int) -> list[Finding]:
    """Return whether the run's streams have as many copies as our settings say; nothing if we may not ask."""
    found: dict[str, int] = {}
    for plan in stream_plan(run):
        told = await probe.stream(plan.name)
        if told is not None:
            config: dict[str, Any] = told.get("config") or {}
            found[plan.name] = int(config.get("num_replicas") or 1)
    if not found:
        return []
    fewer = [f"{name} has {count} of {wanted} copies" for name, count in found.items() if count < wanted]
    todo = (
        "a run keeps the copies of its founding: found it anew with broker.replicas, or `nats stream update --replicas`"
    )
    alike = f"{counted(len(found), 'stream')} of {counted(min(found.values()), 'copy', 'copies')}"
    return [graded("copies", fewer, alike, todo)]


def model_bytes(record: RunRecord | None) -> int:
    """Return the bytes of the run's parameters in float32; 0 if there is no run."""
    return 0 if record is None else FLOAT_BYTES * sum(record.layout.fragment_sizes())
