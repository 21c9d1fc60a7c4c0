"""`atoll doctor` finds planted faults, each by its first cause and with what mends it; and nothing where nothing is wrong."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from atoll.bus.nats.administration import BrokerProbe, LinkMeasured
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.options import BusOptions
from atoll.bus.server import EmbeddedBroker
from atoll.bus.streams import stream_plan
from atoll.deploy.checks import (
    Finding,
    MachineView,
    Seat,
    as_date,
    check_congestion,
    check_hub_link,
    check_rights,
    seat_of_file,
)
from atoll.deploy.examination import examine
from atoll.keys.certificates import Certified
from atoll.keys.identity import read_identity, write_secret
from atoll.keys.roll import KeyFolder
from atoll.wire.messages import SCHEMA_NEWEST, encode
from atoll.wire.subjects import Subjects
from support.clocks import ShiftedClock
from support.command_line import atoll
from support.deployments import Deployed, deployed_here, free_port, open_signed
from support.founded_run import run_record
from support.locked_brokers import LockedBroker
from support.regions import RelayedRegion
from support.wan import Wire, inside, unfit, wan

MIB = 1 << 20
LOOKS = 5
QUIET = MachineView(measures_link=False)
pytestmark = pytest.mark.connected


@pytest.fixture(autouse=True)
def _wall_jumps() -> None:
    """The clock of this machine is compared with the broker's, so it must be true."""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed_here(tmp_path_factory.mktemp("deployed")) as made:
        asyncio.run(made.found())
        yield made


def failed(findings: list[Finding]) -> list[Finding]:
    wrong = [finding for finding in findings if finding.grade == "FAIL"]
    assert all(finding.todo for finding in wrong), wrong
    return wrong


async def faults(seat: Seat, outlook: MachineView = QUIET) -> list[tuple[str, str]]:
    """Return what is wrong at a seat: what about, and what."""
    return [(finding.about, finding.what) for finding in failed(await examine(seat, outlook))]


@pytest.mark.parametrize("service", ["home-1", "synchronizer-1", None])
async def test_nothing_is_found_where_nothing_is_wrong(deployed: Deployed, service: str | None) -> None:
    """Every check is made, and none fails; the link, the clock and the founding are told with figures."""
    findings = await examine(deployed.seat(service))
    told = {finding.about: finding for finding in findings}

    assert failed(findings) == []
    assert {
        *("secret", "identity", "broker", "run", "founding", "copies", "rights", "clock", "link"),
        "congestion control",
    } <= set(told)
    assert "Mbit/s" in told["link"].what or "Gbit/s" in told["link"].what
    assert told["clock"].grade == "ok"


async def test_a_node_of_the_broker_is_a_seat(deployed: Deployed) -> None:
    """It is nobody, so nothing is asked behind the door: its key, its certificate and its disk are looked at."""
    findings = await examine(deployed.seat("broker-1"), QUIET)
    full = await faults(deployed.seat("broker-1"), replace(QUIET, free=lambda _: 1 << 20))
    key = deployed.out / "hub/services/broker/broker.key"
    key.chmod(0o640)
    readable = await faults(deployed.seat("broker-1"))
    key.chmod(0o600)

    assert failed(findings) == []
    assert {"secret", f"127.0.0.1:{deployed.port}", "disk"} <= {finding.about for finding in findings}
    assert [about for about, _ in full] == ["disk"]
    assert [about for about, _ in readable] == ["secret"]


async def looked(url: str, run: str) -> LinkMeasured | None:
    bus = await JetStreamBus.open(url, run, name="test")
    try:
        return await BrokerProbe(bus.connection).link()
    finally:
        await bus.close()


@pytest.mark.wan
@pytest.mark.second_tier
def test_a_link_is_measured_as_it_is(tmp_path: Path, run: str) -> None:
    """20 Mbit/s each way and 40 ms there and back; what is measured is less than the wire carries, and most of it."""
    if reason := unfit():
        pytest.skip(reason)
    with wan({"hub": None, "far": Wire(bits_s=20e6, delay_s=0.02, loss=0.0, queue_s=0.1)}, 0) as there:
        with inside(there.namespaces["hub"]):
            broker = EmbeddedBroker(tmp_path / "nats", 4222, host=there.addresses["hub"]).start()
        try:
            with inside(there.namespaces["far"]):
                looks = [look for _ in range(LOOKS) if (look := asyncio.run(looked(broker.url, run))) is not None]
        finally:
            broker.stop()

    assert looks
    assert min(look.echo_s for look in looks) >= 0.04
    assert all(0.0 < each < 21e6 for look in looks for each in (look.up_bits_per_s, look.down_bits_per_s))
    # A busy machine slows a look; the best of them is near what the wire carries.
    assert max(look.up_bits_per_s for look in looks) > 12e6
    assert max(look.down_bits_per_s for look in looks) > 12e6


@pytest.mark.second_tier
async def test_the_link_of_a_region_is_measured_and_not_the_way_to_its_leaf(tmp_path: Path, run: str) -> None:
    """2 Mbit/s to the hub: what is measured is less than the relay carries, and most of it; a cut is told."""
    with RelayedRegion(tmp_path, bytes_s=250e3) as there:
        bus = await JetStreamBus.open(there.leaf.url, run, name="test")
        slow, _ = await check_hub_link(BrokerProbe(bus.connection), 1 << 20)
        looks = [look for _ in range(LOOKS) if (look := await BrokerProbe(bus.connection).hub_link()) is not None]
        there.cut()
        away, _ = await check_hub_link(BrokerProbe(bus.connection), 0)
        await bus.close()

    assert all(look.up_bits_per_s < 2.4e6 for look in looks)
    assert max(look.up_bits_per_s for look in looks) > 0.8e6
    assert "all parameters in float32 take" in slow[0].what
    assert [finding.grade for finding in away] == ["FAIL"]


async def stored(bus: JetStreamBus, run: str) -> dict[str, object]:
    told = {plan.name: await BrokerProbe(bus.connection).stream(plan.name) for plan in stream_plan(run)}
    return {
        name: {key: one["state"][key] for key in ("messages", "bytes", "last_seq")} for name, one in told.items() if one
    }


@pytest.mark.parametrize("service", ["home-1", "synchronizer-1", None])
async def test_an_examination_leaves_no_trace(deployed: Deployed, service: str | None) -> None:
    operator = read_identity(deployed.out / "keys/identities/operator.toml").credentials()
    bus = await JetStreamBus.open(deployed.url, deployed.run, name="test", options=BusOptions(credentials=operator))
    before = await stored(bus, deployed.run)
    await examine(deployed.seat(service))
    after = await stored(bus, deployed.run)
    await bus.close()

    assert len(before) == len(stream_plan(deployed.run))
    assert after == before


@pytest.mark.second_tier
async def test_rights_at_a_cluster_are_told_without_a_trace(tmp_path: Path, run: str) -> None:
    """With three copies of each stream; a learner has all of its rights, a reader none of a learner's."""
    with LockedBroker(tmp_path, 3) as locked:
        locked.add(run, "a", founds=True)
        locked.add(run, "eye", "reader")
        founder = await locked.bus(run, locked.identity(run, "a"))
        await founder.provision(64 * MIB)
        eye, operator = await locked.bus(run, locked.identity(run, "eye")), await locked.bus(run, locked.operator)
        before = await stored(operator, run)
        own = await check_rights(BrokerProbe(founder.connection), "learner", run, "a", founds=True)
        others = await check_rights(BrokerProbe(eye.connection), "learner", run, "a", founds=True)
        after = await stored(operator, run)
        for bus in (founder, eye, operator):
            await bus.close()

    assert [finding.grade for finding in own] == ["ok"]
    assert others[0].grade == "FAIL"
    assert f"publish atoll.{run}.up.c.a.>" in others[0].what
    assert after == before


async def test_a_learner_that_may_not_found_is_not_missed_rights(deployed: Deployed) -> None:
    path = deployed.file
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text + f'\n[regions.guests]\nlearners = 1\nfounds = false\ndata = "{path.parent / "corpus"}"\n',
        encoding="utf-8",
    )
    deployed.follow()
    findings = await examine(deployed.seat("guests-1"), QUIET)
    path.write_text(text, encoding="utf-8")

    assert failed(findings) == []
    assert [finding.grade for finding in findings if finding.about == "clock"] == ["note"]


# --- the planted faults --------------------------------------------------------------------------------------------------


async def test_a_host_that_nobody_knows(deployed: Deployed) -> None:
    """Its name is told; nothing else is blamed."""
    [(about, what)] = await faults(deployed.seat("home-1", "broker.url=tls://no-such-hub.invalid:4222"))

    assert about == "no-such-hub.invalid:4222"
    assert "no-such-hub.invalid" in what


async def test_a_port_that_nobody_has(deployed: Deployed) -> None:
    [(_, what)] = await faults(deployed.seat("home-1", f"broker.url=tls://127.0.0.1:{free_port()}"))

    assert what == "nobody listens on this port"


async def test_one_closed_port_of_three(deployed: Deployed) -> None:
    closed = free_port()
    findings = await examine(deployed.seat("home-1", f"broker.url={deployed.url},tls://127.0.0.1:{closed}"), QUIET)

    assert [finding.about for finding in failed(findings)] == [f"127.0.0.1:{closed}"]
    assert "founding" in {finding.about for finding in findings}


async def test_a_server_that_says_nothing(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the connection, and nobody speaks: frozen, or something else."""
    monkeypatch.setattr("atoll.deploy.checks.WAIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        [(_, what)] = await faults(deployed.seat("home-1", f"broker.url=tls://127.0.0.1:{silent.getsockname()[1]}"))

    assert "does not greet" in what


def ended(authority: Certified, host: str) -> Certified:
    signer = serialization.load_pem_private_key(authority.key.encode(), None)
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(issuer.subject)
        .issuer_name(issuer.subject)
        .public_key(issuer.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now - timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    )
    return Certified(made.public_bytes(serialization.Encoding.PEM).decode(), authority.key)


def showing(folder: Path, shown: Certified) -> EmbeddedBroker:
    folder.mkdir()
    (folder / "shown.pem").write_text(shown.certificate, encoding="utf-8")
    write_secret(folder / "shown.key", shown.key)
    (folder / "tls.conf").write_text(
        f"tls {{ cert_file: {json.dumps(str(folder / 'shown.pem'))}, key_file: {json.dumps(str(folder / 'shown.key'))} }}\n",
        encoding="utf-8",
    )
    return EmbeddedBroker(folder / "store", include=folder / "tls.conf")


async def test_a_certificate_that_has_ended(deployed: Deployed, tmp_path: Path) -> None:
    keys = deployed.out / "keys"
    authority = Certified(*((keys / f"authority.{kind}").read_text(encoding="utf-8") for kind in ("pem", "key")))
    with showing(tmp_path / "ended", ended(authority, "127.0.0.1")) as server:
        findings = failed(await examine(deployed.seat("home-1", f"broker.url={server.url}"), QUIET))

    assert [finding.what.partition(" on ")[0] for finding in findings] == ["its certificate ended"]
    assert "atoll keys certificate" in findings[0].todo
    assert findings[0].todo.startswith("look at this machine's clock: it says ")


async def test_a_clock_that_is_a_day_behind_is_no_other_authority(deployed: Deployed) -> None:
    """By it the certificate does not hold yet: the clock is what to look at, and it is told."""
    behind = ShiftedClock(-86400.0)
    [wrong] = failed(await examine(deployed.seat("home-1"), replace(QUIET, clock=behind)))

    assert wrong.what.startswith("its certificate holds only from ")
    assert wrong.todo == f"look at this machine's clock: it says {as_date(behind.wall())}"


async def test_an_authority_that_does_not_hold_yet_is_no_other_authority(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = ssl.SSLCertVerificationError(1, "certificate is not yet valid")
    early.verify_code, early.verify_message = 9, "certificate is not yet valid"
    monkeypatch.setattr("atoll.deploy.checks._tls_error", lambda *_: early)
    [wrong] = failed(await examine(deployed.seat("home-1"), QUIET))

    assert wrong.what.endswith("does not hold at this time: certificate is not yet valid")
    assert wrong.todo.startswith("look at this machine's clock")


async def test_a_certificate_that_ends_soon_is_a_note(deployed: Deployed) -> None:
    """As seen in 800 days; in 900 it has ended."""
    soon = await examine(deployed.seat(), replace(QUIET, clock=ShiftedClock(800 * 86400.0)))
    late = await examine(deployed.seat(), replace(QUIET, clock=ShiftedClock(900 * 86400.0)))

    assert [finding.grade for finding in soon if "its certificate ends" in finding.what] == ["note"]
    assert any("its certificate ended on" in finding.what for finding in failed(late))


async def test_another_certificate_than_that_of_the_folder(deployed: Deployed) -> None:
    """It was made anew, and is not yet on the broker's machine; or somebody else answers."""
    copied = deployed.out / "hub/services/broker/broker.pem"
    newer = KeyFolder(deployed.out / "keys")
    before = {path: path.read_bytes() for path in (newer.certificate_path, newer.key_path)}
    newer.certify(["127.0.0.1"])
    seat = replace(deployed.seat(), certificate=newer.certificate_path.read_text(encoding="utf-8"))
    for path, content in before.items():
        path.write_bytes(content)
    [(_, what)] = await faults(seat)

    assert copied.read_bytes() == before[newer.certificate_path]
    assert "another certificate" in what


async def test_a_broker_of_another_authority(deployed: Deployed, tmp_path: Path) -> None:
    """A stranger's broker at our address: the identity does not believe it, and nothing is told to it."""
    stranger = KeyFolder(tmp_path / "keys")
    stranger.create(["127.0.0.1"], time.time())
    shown = Certified(*(path.read_text(encoding="utf-8") for path in (stranger.certificate_path, stranger.key_path)))
    with showing(tmp_path / "stranger", shown) as server:
        seat = replace(deployed.seat("home-1", f"broker.url={server.url}"), certificate="")
        [(_, what)] = await faults(seat)

    assert "of another authority" in what


async def test_a_name_that_the_certificate_lacks(deployed: Deployed) -> None:
    [(_, what)] = await faults(deployed.seat("home-1", f"broker.url=tls://localhost:{deployed.port}"))

    assert what == "its certificate is not for localhost, but for 127.0.0.1"


async def test_a_key_that_is_revoked(deployed: Deployed, tmp_path: Path) -> None:
    kept = tmp_path / "kept.toml"
    write_secret(kept, deployed.identity("home-3").read_text(encoding="utf-8"))
    KeyFolder(deployed.out / "keys").revoke("home-3", deployed.run, time.time())
    deployed.follow()
    seat = deployed.seat("home-3", f"broker.identity={kept}")
    findings = failed(await examine(replace(seat, secrets=(kept,)), QUIET))

    assert [finding.about for finding in findings] == ["broker"]
    assert "does not let us in" in findings[0].what
    assert "atoll keys rotate" in findings[0].todo
    assert [about for about, _ in await faults(deployed.seat("home-3"))][:1] == ["secret"]


async def test_a_key_whose_rights_are_others(deployed: Deployed) -> None:
    roll = deployed.out / "hub/services/broker/roll.json"
    before = roll.read_text(encoding="utf-8")
    entries = json.loads(before)
    next(one for one in entries["entries"] if one["name"] == "home-2")["kind"] = "reader"
    roll.write_text(json.dumps(entries), encoding="utf-8")
    if deployed.door.has_changed():
        deployed.server.reload()
    found = failed(await examine(deployed.seat("home-2"), QUIET))
    roll.write_text(before, encoding="utf-8")
    if deployed.door.has_changed():
        deployed.server.reload()

    assert any(f"publish atoll.{deployed.run}.up.c.home-2.>" in one.what for one in found if one.about == "rights")


@pytest.mark.parametrize("by_s", [30.0, -30.0])
async def test_a_clock_that_is_off_by_half_a_minute(deployed: Deployed, by_s: float) -> None:
    [(about, what)] = await faults(deployed.seat(), replace(QUIET, clock=ShiftedClock(by_s)))

    assert about == "clock"
    assert what.startswith(f"ours is 30 s {'ahead of' if by_s > 0 else 'behind'}")


async def test_a_broker_that_takes_small_messages_only(tmp_path: Path, run: str) -> None:
    (tmp_path / "small.conf").write_text("max_payload: 1MB\n", encoding="utf-8")
    with EmbeddedBroker(tmp_path / "store", include=tmp_path / "small.conf") as server:
        found = await faults(seat_of_file(None, [f"run={run}", f"broker.url={server.url}"]))

    assert [what for _, what in found] == ["it takes messages of 1048576 bytes at most, and chunks need 1114112"]


async def test_a_disk_that_is_full(deployed: Deployed) -> None:
    state = deployed.seat().loaded.settings.learner.checkpoint_dir
    view = MachineView(free=lambda path: 1000 if path == state else 1 << 40)
    [(about, what)] = await faults(deployed.seat(), replace(QUIET, free=view.free))

    assert (about, what) == ("disk", f"1.0 kB free at {state}, 209.7 MB wanted")


def read_only(folder: Path) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))


async def test_an_archive_that_is_a_folder_is_written_to_at_the_seat_of_a_synchronizer(
    deployed: Deployed, tmp_path: Path
) -> None:
    """It is there and can be written to, and that leaves no trace; its disk has room for the checkpoints."""
    folder = tmp_path / "archive"
    folder.mkdir()
    for url in (str(folder), folder.as_uri()):
        found = await examine(deployed.seat("synchronizer-1", f"archive.url={url}"), QUIET)
        told = [(one.grade, one.what) for one in found if one.about == "archive"]
        assert failed(found) == []
        assert told == [("ok", f"user {os.geteuid()} can write into {folder}")]
        assert [one.what for one in found if one.about == "disk" and str(folder) in one.what]
    assert list(folder.iterdir()) == []
    full = MachineView(free=lambda path: 1000 if path == folder else 1 << 40)
    seat = deployed.seat("synchronizer-1", f"archive.url={folder}")
    assert await faults(seat, replace(QUIET, free=full.free)) == [("disk", f"1.0 kB free at {folder}, 209.7 MB wanted")]


async def test_an_archive_that_nothing_can_be_written_to(deployed: Deployed, tmp_path: Path) -> None:
    """A folder that is not there, a file in its place, one that can only be read, and a URL that is none."""
    (tmp_path / "file").touch()
    missing, file = (deployed.seat("synchronizer-1", f"archive.url={tmp_path / name}") for name in ("gone", "file"))
    closed = deployed.seat("synchronizer-1", f"archive.url={tmp_path}")
    [(_, wrong)] = await faults(deployed.seat("synchronizer-1", "archive.url=ftp://host/archive"))

    assert await faults(missing) == [("archive", f"no folder {tmp_path / 'gone'}")]
    assert not (tmp_path / "gone").exists()
    assert await faults(file) == [("archive", f"no folder {tmp_path / 'file'}")]
    assert await faults(closed, replace(QUIET, write=read_only)) == [
        ("archive", f"user {os.geteuid()} cannot write into {tmp_path}: Read-only file system")
    ]
    assert wrong.startswith("this is no place for an archive")


async def test_an_archive_is_looked_at_where_a_synchronizer_is_by_its_identity(
    deployed: Deployed, tmp_path: Path
) -> None:
    """A run file alone does not tell what its service does. Others get the same setting, and write to no archive."""
    gone = [f"archive.url={tmp_path / 'gone'}"]
    file = deployed.out / "hub/services/synchronizer-1/atoll.toml"

    assert await faults(seat_of_file(file, gone)) == [("archive", f"no folder {tmp_path / 'gone'}")]
    assert await faults(seat_of_file(file, [*gone, "archive.every_s=0"])) == []
    assert await faults(seat_of_file(file, ["archive.url=s3://bucket/archive"])) == []
    assert await faults(deployed.seat("home-1", *gone)) == []
    assert await faults(deployed.seat(None, *gone)) == []


async def test_token_shards_that_are_not_there(deployed: Deployed) -> None:
    """A learner without text would end at its start."""
    [(about, _)] = await faults(deployed.seat("home-1", "data.dir=nowhere"))

    assert about == "data"


async def test_a_key_that_others_may_read(deployed: Deployed) -> None:
    path = deployed.identity("home-1")
    path.chmod(0o644)
    findings = failed(await examine(deployed.seat(), QUIET))
    path.chmod(0o600)

    assert [finding.about for finding in findings] == ["secret", "identity"]
    assert "mode 0644" in findings[0].what
    assert "keys rotate" in findings[0].todo


async def test_the_identity_of_another(deployed: Deployed) -> None:
    other = await faults(deployed.seat("home-1", f"broker.identity={deployed.identity('home-2')}"))
    shard = deployed.out / "hub/services/synchronizer-1/identity.toml"
    kind = await faults(deployed.seat("home-1", f"broker.identity={shard}"))
    run = await faults(deployed.seat("home-1", "run=another"))
    operator = await examine(
        deployed.seat("home-1", f"broker.identity={deployed.out / 'keys/identities/operator.toml'}"), QUIET
    )

    assert ("identity", "that of learner home-2, and the service is learner home-1") in other
    assert ("identity", "that of a synchronizer, and the service is a learner") in kind
    assert run[0][1].startswith("this identity is of another run")
    assert [finding.grade for finding in operator if finding.about == "identity"] == ["note"]


async def founded_openly(url: str, run: str, data: bytes) -> None:
    bus = await open_signed(url, run)
    await bus.provision(64 * MIB)
    await bus.put_record(Subjects(run).run_record, data, expected=0)
    await bus.close()


async def test_a_run_of_a_wire_version_that_we_do_not_speak(broker: EmbeddedBroker, run: str) -> None:
    record = encode(run_record(run)).replace(f'"schema":{SCHEMA_NEWEST}'.encode(), b'"schema":99')
    await founded_openly(broker.url, run, record)
    findings = failed(await examine(seat_of_file(None, [f"run={run}", f"broker.url={broker.url}"]), QUIET))

    assert [finding.about for finding in findings] == ["run"]
    assert "wire version" in findings[0].what
    assert "99" in findings[0].what
    assert findings[0].todo == "upgrade this process"


async def test_a_run_that_was_founded_with_other_settings(deployed: Deployed) -> None:
    """Each setting that was given and does not hold; what was not given is the founder's affair."""
    [(about, what)] = await faults(deployed.seat("home-1", "protocol.fragments=8", "protocol.quorum=2"))

    assert about == "founding"
    assert what == "protocol.fragments is 4 in the run and 8 here; protocol.quorum is 1 in the run and 2 here"


async def test_a_run_with_fewer_copies_than_are_wanted(deployed: Deployed) -> None:
    [(about, what)] = await faults(deployed.seat("home-1", "broker.replicas=3"))

    assert about == "copies"
    assert "has 1 of 3 copies" in what


async def test_fragments_on_other_brokers_than_we_know(broker: EmbeddedBroker, run: str, tmp_path: Path) -> None:
    gone = f"nats://127.0.0.1:{free_port()}"
    with EmbeddedBroker(tmp_path / "bulk") as bulk:
        spread = msgspec.structs.replace(run_record(run), bulk=(bulk.url,))
        await founded_openly(broker.url, run, encode(spread))
        here = [f"run={run}", f"broker.url={broker.url}"]
        well = await faults(seat_of_file(None, here))
        more = await faults(seat_of_file(None, [*here, f'broker.bulk=["{bulk.url}", "{bulk.url}"]']))
        away = await faults(seat_of_file(None, [*here, f'broker.bulk=["{gone}"]']))

    assert well == []
    assert any("another number of brokers" in what for _, what in more)
    assert away == [(gone.removeprefix("nats://"), "nobody listens on this port")]


async def test_a_kernel_without_bbr_on_a_far_link(tmp_path: Path) -> None:
    """A note with what to type; on a near link, or where connections can ask for it, it is no matter."""
    (tmp_path / "tcp_congestion_control").write_text("cubic\n", encoding="utf-8")
    available = tmp_path / "tcp_available_congestion_control"
    available.write_text("reno cubic\n", encoding="utf-8")
    view = MachineView(kernel=tmp_path)
    far, unknown, near = (check_congestion(view, echo_s) for echo_s in (0.05, None, 0.0002))
    available.write_text("reno cubic bbr\n", encoding="utf-8")

    assert [one.grade for one in (far, unknown, near, check_congestion(view, 0.05))] == ["note", "note", "ok", "ok"]
    assert "tcp_bbr" in far.todo
    assert check_congestion(MachineView(kernel=tmp_path / "none"), 0.05).grade == "note"


def test_the_verb_leaves_with_3_and_says_what_to_do(deployed: Deployed) -> None:
    words = ("doctor", "--deployment", str(deployed.file), "--out", str(deployed.out), "--service", "home-1")
    well = atoll(*words)
    wrong = atoll(*words, "--set", "protocol.fragments=8")
    run_file = deployed.identity("home-1").with_name("atoll.toml")
    told = atoll("doctor", "--config", str(run_file), "--json")

    assert (well.returncode, wrong.returncode, told.returncode) == (0, 3, 0), well.stdout + told.stdout
    assert "FAIL  founding: protocol.fragments is 4 in the run and 8 here\n      to do: " in wrong.stdout
    assert {"grade", "about", "what", "todo"} == set(json.loads(told.stdout)[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--service", "x"), "give --deployment"),
        (("--deployment", "nowhere.toml"), "cannot read the description"),
        (("--deployment", "FILE", "--service", "nobody"), "no such service"),
        (("--deployment", "FILE", "--service", "home-1", "--out", "nowhere"), "not rendered"),
        (("--deployment", "FILE", "--config", "x.toml"), "two answers"),
    ],
)
def test_a_seat_that_cannot_be_taken_is_one_message(deployed: Deployed, words: tuple[str, ...], said: str) -> None:
    """With exit code 2, and no traceback."""
    done = atoll("doctor", *(word.replace("FILE", str(deployed.file)) for word in words))

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
