"""One run of `atoll up` under a storm: three learners, two shards with a standby each, a broker of the bench's own.

Every learner, shard and standby reaches the broker through a relay of its own (`atoll up --via`), so that its link can be
cut or swallowed. Learners are paced (a step takes `PACE` times its own computing, as if its device were elsewhere), so
that the machine's cores do not decide. `atoll up` starts again what was killed; the broker is started again here. The
recorder listens at the broker itself: heartbeats, and taps that say which contributions were stored and that a head is new.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import AtollError
from atoll.base.machine import commit, machine
from atoll.base.parsing import parsed
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.local.options import shard_names, standby_names
from atoll.protocol.ledger import LEDGER_BYTES_MAX, FormerLives, FragmentLedger, SettledPushes
from atoll.run.heads import read_heads
from atoll.run.history import History
from atoll.run.record import read_run
from atoll.wire.events import event_of
from atoll.wire.limits import INFO_HEADER
from atoll.wire.messages import Beat, Event, Head, Lease, decode
from atoll.wire.subjects import Subjects
from benchmarks.faults.metrics import (
    FORMER,
    SCHEMA,
    Booked,
    Course,
    Extract,
    ExtractRound,
    ExtractShare,
    Made,
    Ranges,
    Refusal,
    Row,
    ranges,
)
from benchmarks.faults.storm import Planned, Storm, StormLinks, Victim, chosen, storm
from benchmarks.lib.harness import sources
from benchmarks.lib.runs import end_in_order, learner_names, read_report, up_command, wait_until

SHARDS, STANDBYS = 2, 1
PACE = 12.0
SETTINGS = ("model.size=xs", "protocol.interval_steps=16")
BEGIN_MAX_S = 240.0
CALM_S = 30.0
END_MAX_S = 300.0
LOOK_S = 2.0
SETTLED_S = 10.0
JUST_NOW_S = 3.0
GAUNTLET_LONGER = 2.0
READ_S = 120.0
EVENTS_MAX = 1 << 30

T = TypeVar("T")


def run_up(course: Course, corpus: Path, out: Path, planned: Sequence[Planned] | None = None) -> Extract:
    """Run one course and return its extract; `planned` is another forecast than the course's storm."""
    extract = Extract(course=course, sources=sources(), machine=machine(), commit=commit(), began_s=0.0)
    extract.schema = SCHEMA
    with tempfile.TemporaryDirectory() as store, EmbeddedBroker(Path(store)) as broker:
        with StormLinks(link_names(course), broker.port) as links:
            up = subprocess.Popen(command(course, corpus, out, broker.url, links))
            record = CourseRecorder(course.name, broker.url)
            try:
                ground = UpGround(broker, links, record, psutil.Process(up.pid))
                record.await_steps(course.learners, up)
                extract.began_s = time.time()
                # How many faults find nobody is not known before, so a gauntlet may go on for longer than planned.
                longest_s = course.seconds * (GAUNTLET_LONGER if course.kills_min else 1.0)
                drawn = storm(course.seed, course.per_minute, longest_s, course.partition_s)
                raging = Storm(ground, drawn if planned is None else planned)
                raging.rage(longest_s, course.kills_min)
                time.sleep(CALM_S)
                end_in_order(up, out, END_MAX_S)
                extract.faults, extract.missed = raging.faults, raging.missed
                record.enter_into(extract)
            finally:
                record.close()
                up.kill()
                up.wait()
        extract.report = kept(read_report(out))
        return extract


def link_names(course: Course) -> list[str]:
    """Return the processes that have a relay of their own."""
    return [*learner_names(course.learners), *shard_names(SHARDS), *standby_names(SHARDS, STANDBYS)]


def command(course: Course, corpus: Path, out: Path, url: str, links: StormLinks) -> list[str]:
    settings = (*SETTINGS, f"run={course.name}", f"data.dir={corpus}")
    paces = dict.fromkeys(learner_names(course.learners), PACE)
    flags = {"learners": course.learners, "shards": SHARDS, "standbys": STANDBYS, "tokens": 0, "seed": course.seed}
    return up_command(out, {**flags, "broker": url}, settings=settings, throttle=paces, via=links.urls)


def kept(report: dict[str, Any]) -> dict[str, Any]:
    fates = ("tokens_trained", "tokens_by_fate", "fates_exact", "fates_errors", "quarantined")
    names = (*fates, "validation", "goodput", "commits")
    return {name: report[name] for name in names}


class UpGround:
    """Finds who is meant among the children of one `atoll up`."""

    def __init__(self, broker: EmbeddedBroker, links: StormLinks, record: CourseRecorder, up: psutil.Process) -> None:
        self.broker = broker
        self.links = links
        self._record = record
        self._up = up

    def tick(self) -> None:
        """`atoll up` sees to its children itself."""

    def victim(self, planned: Planned) -> Victim | None:
        """Return the process that a role means now; owners are who the leases name."""
        if planned.role == "broker":
            return Victim("broker") if self.broker.pid else None
        children = {child_name(child): child.pid for child in self._up.children() if is_alive(child)}
        if planned.role == "learner":
            names = sorted(name for name in children if name.startswith("learner-"))
            if planned.act == "partition":
                names = [name for name in names if self._record.has_trained(name, SETTLED_S)]
            name = chosen(planned.pick, names)
            return Victim(name, children[name]) if name else None
        owners = self._record.owners()
        if planned.role == "standby":
            busy = set(owners.values())
            waiting = sorted(
                n for n, pid in children.items() if n.startswith(("shard-", "standby-")) and pid not in busy
            )
            name = chosen(planned.pick, waiting)
            return Victim(name, children[name]) if name else None
        shard = min(int(planned.pick * SHARDS), SHARDS - 1)
        serving = [name for name, pid in children.items() if pid == owners.get(shard)]
        return Victim(serving[0], children[serving[0]], shard) if serving else None


def child_name(child: psutil.Process) -> str:
    """Return what `atoll up` calls a child: the name of the file by which it shows that it lives."""
    try:
        return Path(child.environ().get("ATOLL_HEALTH_FILE", "")).name
    except psutil.Error:
        return ""


def is_alive(child: psutil.Process) -> bool:
    try:
        return child.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class CourseRecorder:
    """Listens to one run from beside the broker, and reads its event log and its ledger at the end."""

    def __init__(self, run: str, url: str) -> None:
        self._home = LoopThread("recorder")
        self._subjects = Subjects(run)
        self._run = run
        self._beats: dict[str, list[Row]] = defaultdict(list)
        self._stored: dict[str, dict[int, int]] = defaultdict(dict)
        self._made: dict[tuple[int, int, str], Made] = {}
        self._bus: Bus = self._wait(open_bus(url, run, name="recorder"), READ_S)
        hearing = (self._hear_beats, self._hear_queue, self._hear_heads)
        self._hearing = [self._home.submit(hear()) for hear in hearing]

    def await_steps(self, learners: int, up: subprocess.Popen[bytes]) -> None:
        wait_until("a step of every learner", lambda: len(self._stepping()) >= learners, BEGIN_MAX_S, up)

    def _stepping(self) -> set[str]:
        return {life.rpartition("/")[0] for life, rows in list(self._beats.items()) if rows and rows[-1][1] > 0}

    def has_trained(self, learner: str, for_s: float) -> bool:
        """Return whether the present life of a learner was heard just now and has taken steps for so long."""
        lives = {
            int(life.rpartition("/")[2]): rows
            for life, rows in list(self._beats.items())
            if life.startswith(f"{learner}/")
        }
        rows = [row for row in lives[max(lives)] if row[1] > 0] if lives else []
        return bool(rows) and rows[-1][0] - rows[0][0] >= for_s and time.time() - rows[-1][0] <= JUST_NOW_S

    def owners(self) -> dict[int, int]:
        """Return the process id of each shard's owner, as far as the leases can be read now."""
        return {shard: lease.pid for shard, lease in self._leases().items()}

    def _leases(self) -> dict[int, Lease]:
        async def read() -> dict[int, Lease]:
            found = {}
            for shard in range(SHARDS):
                record = await self._bus.get_record(self._subjects.lease(shard))
                if record is not None:
                    found[shard] = decode(Lease, record.data)
            return found

        try:
            return self._wait(read(), LOOK_S)
        except (AtollError, TimeoutError):
            return {}

    def enter_into(self, extract: Extract) -> None:
        """Enter what was heard, and what the event log and the ledgers say."""
        for hearing in self._hearing:
            if hearing.done():
                hearing.result()
        began_s = extract.began_s
        extract.lives = {
            life: [(round(at_s - began_s, 3), steps, tokens, step_s) for at_s, steps, tokens, step_s in sorted(rows)]
            for life, rows in sorted(self._beats.items())
        }
        extract.acknowledged = {key: ranges(found) for key, found in sorted(self._stored.items())}
        extract.stored = {key: sorted(found.items()) for key, found in sorted(self._stored.items())}
        self._wait(self._read(extract), READ_S)
        extract.made = [made for _, made in sorted(self._made.items())]

    def close(self) -> None:
        for hearing in self._hearing:
            hearing.cancel()
        self._wait(self._bus.close(), READ_S)
        self._home.stop()

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = self._home.submit(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    async def _hear_beats(self) -> None:
        async for core_message in await self._bus.listen(self._subjects.beat("*")):
            beat = decode(Beat, core_message.data)
            row = (beat.at_s, beat.step, beat.tokens, round(beat.step_s, 4))
            self._beats[f"{beat.learner}/{beat.incarnation}"].append(row)

    async def _hear_queue(self) -> None:
        """Note every contribution that the broker has stored: its subject names the learner, its header the rest."""
        async for core_message in await self._bus.listen(self._subjects.tap("up.m.>"), len_max=1 << 16):
            if ".bye." not in core_message.subject:
                info = msgspec.json.decode(core_message.headers[INFO_HEADER])
                life = f"{core_message.subject.rpartition('.')[2]}/{info['incarnation']}/{info['fragment']}"
                self._stored[life][int(info["push"])] = int(info["tokens"])

    async def _hear_heads(self) -> None:
        """Read every head that is announced; one that the next replaces before it is read is not in what was made."""
        async for core_message in await self._bus.listen(self._subjects.tap("gl.head.*"), len_max=1 << 16):
            with contextlib.suppress(AtollError):
                record = await self._bus.get_record(self._subjects.head(core_message.subject.rpartition(".")[2]))
                if record is not None:
                    self._note(decode(Head, record.data))

    def _note(self, head: Head) -> None:
        shares = [ExtractShare(i.learner, i.incarnation, i.push, i.age, i.tokens) for i in head.included]
        key = (head.fragment, head.version, head.digest)
        self._made[key] = Made(*key, shares)

    async def _read(self, extract: Extract) -> None:
        began_s = extract.began_s
        events = {kind: await self._events(kind) for kind in ("round", "refused", "ledger")}
        extract.rounds = [round_of(event, began_s) for event in events["round"]]
        extract.refusals = [each for event in events["refused"] for each in refusals_of(event, began_s)]
        history = History()
        for event in events["ledger"]:
            history.on_event(event)
        extract.ledger = history.closed_ledger()
        run = await read_run(self._bus, self._subjects)
        if run is None:
            raise SystemExit("the run has no record")
        extract.fragments, extract.age_damping = len(run.layout.fragments), run.protocol.age_damping
        for fragment, head in (await read_heads(self._bus, run)).items():
            self._note(head)
            extract.heads[fragment], extract.merged[fragment] = head.version, head.tokens_merged
            if head.fragment_ledger is not None:
                frozen = await self._bus.get_blob(head.fragment_ledger, LEDGER_BYTES_MAX)
                fragment_ledger = parsed(frozen, FragmentLedger)
                extract.settled |= {
                    f"{who}/{fragment}": pushes_of(account) for who, account in fragment_ledger.settled.items()
                }
                extract.booked |= {
                    f"{who}/{fragment}": booked_of(account) for who, account in fragment_ledger.settled.items()
                }
                if fragment_ledger.former.lives:
                    extract.booked[f"{FORMER}/{fragment}"] = booked_of(fragment_ledger.former)

    async def _events(self, kind: str) -> list[Event]:
        return [
            event_of(e.subject, e.data)
            for e in await self._bus.replay(self._subjects.event(kind, "*"), limit=EVENTS_MAX)
        ]


def booked_of(account: SettledPushes | FormerLives) -> Booked:
    return Booked(account.merged, account.merged_late, sum(account.refused.values()))


def pushes_of(account: SettledPushes) -> Ranges:
    return [list(pair) for pair in account.pushes]


def round_of(event: Event, began_s: float) -> ExtractRound:
    fields = {name: msgspec.json.decode(raw) for name, raw in event.fields.items()}
    found = [
        ExtractShare(share["learner"], share["incarnation"], share["push"], share["age"], share["tokens"])
        for share in fields["contributors"]
    ]
    return ExtractRound(round(event.at_s - began_s, 3), event.who, fields["fragment"], fields["version"], found)


def refusals_of(event: Event, began_s: float) -> list[Refusal]:
    at_s = round(event.at_s - began_s, 3)
    rows = msgspec.json.decode(event.fields["refusals"])
    return [
        Refusal(at_s, row["learner"], row["incarnation"], row["fragment"], row["push"], row["reason"]) for row in rows
    ]
