"""A run in virtual time: production's drivers, a broker and links that fail, from one seed.

    found - storm (faults; what may never happen is checked at every durable change and every fact)
          - heal (no faults; every fragment must be committed again within a bound)
          - drain (everybody leaves; all must come to rest, and the ledger must be exact)

The world knows everything and tells nobody: processes learn what the broker and their own clocks tell them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.rebuild import rebuild
from atoll.base.clock import Identity
from atoll.base.errors import AtollError, IdentityTaken, ProtocolMisuse, RunWentBack, on_one_line
from atoll.bus.memory import StoredMessage
from atoll.client.optimizer_state import Borrowed
from atoll.client.parameters import rules_of
from atoll.local.console import ConsolePicture
from atoll.local.console_tables import TopMoment, status_of
from atoll.model.layout import Layout
from atoll.model.pytrees import describe
from atoll.protocol.invariants import InvariantBroken, require
from atoll.protocol.ledger import Ledger, close_together, settle
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History
from atoll.run.watch import Watch
from atoll.settings.sections import ArchiveSettings
from atoll_synchronizer.process import Host, wait_for_run
from atoll_synchronizer.region_service import RegionService
from schedules.archive import MemoryArchive
from schedules.broker import ScheduleBroker
from schedules.drawing import Plan
from schedules.faults import Happening
from schedules.hostile import HOSTILE, LIAR, HostilePeers
from schedules.learners import BLOCK_TOKENS, RULES, SEQUENCE, Learner
from schedules.network import Network, ScheduleBus
from schedules.processes import OUTSIDE, Process, ProcessLoop
from schedules.retained import check_rounds
from schedules.safety import LEASE_LOST, Safety
from schedules.storm import FaultStorm

RUN = "s"
REGION = "east"
NAMES = ("a", "b", "c", "d")
COMMIT_WITHIN_S = 120.0
VERSIONS_HEALED = 3
REST_WITHIN_S = 180.0
LOOK_S = 0.5
LOOKS_S = 10.0
GOODPUT_MAX = 0.05
RESTART_S = 2.0
WINDOWS = BLOCK_TOKENS // SEQUENCE


READ_AGAIN = (
    *("crashes of learners", "crashes of hosts", "freezes", "clock ahead", "ids taken over", "requests given up"),
    *("requests sent again", "data not returned", "stores lost", "disk full", "cut both ways", "cut up"),
    *("cut down", "broker away", "power cut"),
)
"""After these a learner may read what another has read, or read itself."""
LEFT_OVER = (
    *("crashes of learners", "crashes of hosts", "freezes", "requests given up", "requests sent again"),
    *("stores lost", "power cut", "host told to leave", "host added", "messages doubled"),
)
"""After these, or when an owner has lost its lease, a shard may leave behind what no head names. It ages out, or an heir
removes it once no head names anything of that tenure; the run may end before that."""


class NotLive(AtollError):
    """Faults are over, and still something that must happen does not happen."""


class HostProcess:
    """One synchronizer process."""

    def __init__(self, process: Process, bus: ScheduleBus, identity: Identity) -> None:
        self.process = process
        self.bus = bus
        self.identity = identity
        self.stop = asyncio.Event()
        self.told = False

    def leave(self) -> None:
        if not self.told:
            self.told = True
            self.stop.set()


class World:
    """One run on the running loop; everything that happens by chance is drawn from its seed."""

    def __init__(
        self, seed: int, settings: ProtocolSettings, plan: Plan, happenings: list[Happening], log: list[str] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self.run = RUN
        self.names = NAMES
        self.seed = seed
        self.loop = loop
        self.settings = settings
        self.plan = plan
        self.log = log
        self.tally: Counter[str] = Counter()
        self.dice = random.Random(f"{seed}/world")
        self.over: asyncio.Future[None] = loop.create_future()
        self.safety = Safety(RUN, self.tally)
        self.network = Network(loop, random.Random(f"{seed}/network"), self.tally, self.fail)
        self.broker = ScheduleBroker(loop, self.safety, self.tally)
        self.safety.broker = self.broker
        self.object_store = MemoryArchive(loop, random.Random(f"{seed}/archive"))
        self.processes: list[Process] = []
        self.hosts: list[HostProcess] = []
        self.region: Process | None = None
        self.learners: list[Learner] = []
        self.lives: list[Learner] = []
        self.disks: dict[str, Any] = {}
        self.draining = self.healed = self.rebuilding = self.rebuilds = False
        self.windows: Counter[tuple[int, int]] = Counter()
        self.cut_off_s: dict[Process, list[tuple[float, float]]] = {}
        """From when to when a synchronizer alone was cut off, seconds."""
        self.behind: dict[int, int] = {}
        """The versions that were visible before the broker's store was set back, of fragments that are older now."""
        self.ends: list[BaseException | None] = []
        """What processes have ended with since."""
        self.data_blocks, self.lease_blocks = plan.data_blocks, plan.lease_blocks
        self.storm = FaultStorm(self, happenings)
        self.hostile = HostilePeers(self)
        self.layout: Layout = rules_of(describe(self.params(random.Random(seed))), RULES).layout(
            describe(self.params(random.Random(seed))), settings.fragments
        )
        self._numbers: Counter[str] = Counter()
        self._steps_s = {name: 0.25 * 2.0 ** self.dice.uniform(-1.0, 1.0) for name in NAMES}

    # --- what happened ------------------------------------------------------------------------------------------------

    def note(self, who: str, *said: object) -> None:
        """Write a line into the log, if one is kept."""
        if self.log is not None:
            line = " ".join(str(each) for each in said)
            self.log.append(f"{self.loop.now_s:9.4f} {who:10} " + on_one_line(line))

    def fail(self, error: BaseException) -> None:
        """End the schedule with what must not be."""
        self.note("world", "ends with", repr(error))
        if not self.over.done():
            self.over.set_exception(error)

    def check(self, holds: bool, promise: str, got: object) -> None:  # noqa: FBT001  (reads as a sentence)
        """End the schedule unless something holds."""
        try:
            require(holds, promise, got)
        except InvariantBroken as error:
            self.fail(error)
            raise

    # --- what processes ask -------------------------------------------------------------------------------------------

    def params(self, dice: random.Random) -> dict[str, Any]:
        rows, numbers = self.plan.rows, np.random.default_rng(dice.getrandbits(32))
        shapes = {"e": (rows // 3, 4), "w": (rows, 9), "x": (5,), "y": ()}
        return {name: numbers.integers(-9, 10, shape).astype(np.float32) for name, shape in shapes.items()}

    def step_s_of(self, name: str) -> float:
        """Return how long a learner's steps take."""
        step_s: float = self._steps_s[name]
        return step_s

    def tokens_of(self, name: str, batch: Any) -> int:  # noqa: ANN401  (int32)
        """Return how many tokens a learner's batch has: never the same twice in a row, so that a mix-up shows."""
        if self.plan.tokenless and name == NAMES[1]:
            return 0
        return 8 + int(batch[0][0]) % 5

    def read(self, name: str, batch: Any) -> None:  # noqa: ANN401  (int32)
        """Note which windows of the data a learner reads."""
        del name
        for row in batch:
            block, at = divmod(int(row[0]), BLOCK_TOKENS)
            self.windows[block, at // SEQUENCE] += 1

    def check_loan(self, borrowed: Borrowed) -> None:
        """A borrowed state is whole, and of one step that its lender has made."""
        marks = {float(number) for array in borrowed.state.values() for number in array.reshape(-1)}
        self.check(len(marks) == 1 and min(marks) > 0.0, "what is lent is the state of one step", sorted(marks)[:4])

    def joined(self, learner: Learner) -> None:
        learner.joined = True
        learner.joined_s = self.loop.now_s
        self.tally["lives"] += 1
        self.lives.append(learner)

    def left(self, learner: Learner) -> None:
        self.tally["farewells"] += 1
        self.note(learner.process.name, "has left")

    # --- processes ----------------------------------------------------------------------------------------------------

    def _process(self, kind: str) -> tuple[Process, ScheduleBus, Identity]:
        self._numbers[kind] += 1
        name = f"{kind}.{self._numbers[kind]}"
        drift = self.storm.drift
        process = Process(name, self.loop, self.dice.uniform(0.0, 1e4), 1.0 + self.dice.uniform(-drift, drift))
        self.processes = [each for each in self.processes if each.alive or each.tasks] + [process]
        nonces = random.Random(f"{self.seed}/{name}/nonce")
        identity = Identity(name.replace(".", "-"), "h", self._numbers[kind], lambda size: nonces.randbytes(size).hex())
        self.note("world", "starts", name)
        return process, ScheduleBus(RUN, self.broker, self.network, process), identity

    def start_host(self) -> HostProcess:
        """Start another synchronizer process, a candidate for every shard."""
        process, bus, identity = self._process("host")
        host = HostProcess(process, bus, identity)
        self.hosts = [each for each in self.hosts if each.process.alive] + [host]
        self._spawn(process, bus, self._serve(host), lambda _: None)
        if self.draining:
            self.loop.after(1.0, host.leave)
        return host

    def start_region(self) -> None:
        process, bus, _ = self._process("region")
        self.region = process
        self._spawn(process, bus, self._fold(process, bus), lambda _: None)

    async def _fold(self, process: Process, bus: ScheduleBus) -> None:
        """As `atoll_synchronizer.process.serve_region`."""
        stop, ended = asyncio.Event(), "replaced"
        while ended == "replaced":
            record = await wait_for_run(bus, RUN, stop)
            if record is None:
                return
            service = RegionService(bus, record, REGION, process)
            ended = await service.serve(stop)
            self.tally["sums of a region"] += service.sums

    def region_of(self, name: str) -> str:
        """Return the region of a learner, if it is in one."""
        return REGION if self.plan.regional and name in NAMES[:2] else ""

    def start_learner(self, name: str) -> None:
        """Start a process that claims a learner's id, whoever has it now."""
        process, bus, identity = self._process(name)
        learner = Learner(self, process, name, bus, identity)
        self.learners = [*self.learning, learner]
        self._spawn(process, bus, learner.live(), lambda error: self._learner_ended(learner, error))

    def _spawn(
        self,
        process: Process,
        bus: ScheduleBus,
        work: Coroutine[Any, Any, None],
        then: Callable[[BaseException | None], None],
    ) -> None:
        def on_end(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            bus.sever()
            process.kill()
            self.note(process.name, "ends", "well" if error is None else f"with {type(error).__name__}: {error}")
            if self.behind:
                self.ends.append(error)
            if error is not None and self._is_bug(error):
                self.fail(error)
            else:
                then(error)

        process.spawn(work).add_done_callback(on_end, context=OUTSIDE)

    def _is_bug(self, error: BaseException) -> bool:
        """Return whether a process ended as none of ours may."""
        return (
            not isinstance(error, AtollError)
            or type(error) is AtollError
            or isinstance(error, ProtocolMisuse | InvariantBroken)
        )

    async def _serve(self, host: HostProcess) -> None:
        """As `atoll_synchronizer.process.serve`."""
        bus, process, every_s = host.bus, host.process, self.plan.archive_every_s
        if every_s and self.rebuilds:
            outcome = await rebuild(bus, CheckpointStore(self.object_store, RUN), process)
            self.tally["rebuilds"] += outcome.rebuilt
        record = await wait_for_run(bus, RUN, host.stop)
        if record is not None:
            archived = ArchiveSettings(url="memory", every_s=every_s, keep=2, contributions=self.plan.retains)
            archive = archived if every_s else ArchiveSettings()
            shards = tuple(range(self.settings.shards))
            await Host(bus, record, shards, process, archive, host.identity).serve(host.stop)
        await bus.close()

    def _learner_ended(self, learner: Learner, error: BaseException | None) -> None:
        """A learner that failed is started again, as `atoll up` does; one that left comes back when somebody starts it."""
        if isinstance(error, IdentityTaken):
            self.tally["ids taken over"] += 1
            return
        if error is not None:
            self.tally[f"learners ended by {type(error).__name__}"] += 1
            self.loop.after(RESTART_S * (0.5 + self.dice.random()), self.return_learner, learner)

    def return_learner(self, learner: Learner) -> None:
        """Start a learner again unless another process has its id, or all are leaving."""
        if self.draining or self.is_there(learner.name):
            return
        if self.rebuilding:
            self.loop.after(RESTART_S, self.return_learner, learner)
            return
        self.start_learner(learner.name)

    def kill(self, process: Process, why: str) -> None:
        """Kill a process; a supervisor starts it again somewhat later."""
        if not process.alive:
            return
        self.note("storm", "kills", process.name, why)
        process.kill()
        for host in self.hosts:
            if host.process is process:
                host.bus.sever()
                self.tally["crashes of hosts"] += 1
        for learner in self.learners:
            if learner.process is process:
                learner.bus.sever()
                self.tally["crashes of learners"] += 1
                if self.dice.random() < 0.5:
                    self.disks.pop(learner.name, None)
                self.loop.after(RESTART_S * (0.5 + self.dice.random()), self.return_learner, learner)

    @property
    def alive(self) -> list[Process]:
        """Return the processes that live, in the order of their beginning."""
        return [process for process in self.processes if process.alive]

    @property
    def learning(self) -> list[Learner]:
        """Return the learners whose process lives, those that an id was taken from and do not know it included."""
        return [learner for learner in self.learners if learner.process.alive]

    def named(self, name: str) -> Learner | None:
        """Return the newest process that lives under a learner's id."""
        return next((learner for learner in reversed(self.learning) if learner.name == name), None)

    def is_there(self, name: str) -> bool:
        """Return whether a process of a learner lives."""
        return self.named(name) is not None

    # --- a schedule ---------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Play the schedule to its end; raise what must not be."""
        self.loop.slow_threads = self.plan.slow_threads
        for _ in range(self.plan.hosts):
            self.start_host()
        for name in NAMES[: self.plan.learners]:
            self.start_learner(name)
        self._keep_hosts()
        if self.plan.regional:
            self._keep_region()
        self.storm.begin()
        await self._until(lambda: self.loop.now_s >= self.plan.storm_s, self.plan.storm_s + 1.0)
        if self.plan.tokenless:
            await self.stand_still()
            return
        if self.settings.tokens_target:
            await self.reach()
            return
        if self.behind:
            await self.end_behind()
            return
        await self.heal()
        await self.drain()

    async def _until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait until something holds, or the time is over; raise what ends the schedule."""
        deadline_s = self.loop.now_s + within_s
        while not holds():
            if self.loop.now_s >= deadline_s:
                return False
            await asyncio.wait({self.over}, timeout=LOOK_S)
            if self.over.done():
                self.over.result()
        return True

    async def heal(self) -> None:
        """End all faults and demand that every fragment is committed again; raise `NotLive`."""
        self.note("world", "heals")
        self.healed = True
        self.storm.heal()
        self._keep_learners()
        begun_s = self.loop.now_s
        whole = await self._until(lambda: len(self.safety.heads) == self.settings.fragments, COMMIT_WITHIN_S)
        if not whole:
            raise NotLive("with a learner that can found it a run is founded", got=sorted(self.safety.heads))
        before = {fragment: head.version for fragment, head in self.safety.heads.items()}

        def committed() -> bool:
            return all(self.safety.heads[p].version >= before[p] + VERSIONS_HEALED for p in before)

        if not await self._until(committed, COMMIT_WITHIN_S):
            still = sorted(p for p in before if self.safety.heads[p].version < before[p] + VERSIONS_HEALED)
            raise NotLive("with a quorum of live learners every fragment is committed", got=f"not {still}")
        self.tally["healing, ms"] += int(1e3 * (self.loop.now_s - begun_s))

    async def stand_still(self) -> None:
        """Look at the run as `atoll status` does; it must not be said to train, and who gives nothing must be named."""
        process, bus, _ = self._process("observer")
        view = History()
        watch = Watch(bus, RUN, view, process)
        process.spawn(watch.follow())
        began_s = process.monotonic()
        await self._until(lambda: self.loop.now_s > self.plan.storm_s + LOOKS_S, LOOKS_S + 1.0)
        picture = ConsolePicture(view, RUN, self.settings, began_s, process.monotonic())
        status = status_of(TopMoment(picture, process.wall()), "")
        self.note("world", "is told", status)
        told = "; ".join(status.waits_for)
        self.check(not self.tally["commits"], "nothing is merged of who counts no token", self.tally["commits"])
        self.check(status.standing == "waiting", "a run that merges nothing does not train", status.standing)
        named = f"steps of {NAMES[1]} count 0 tokens" in told
        self.check(named, "who keeps a run from its quorum is named", told)
        self.check(
            (picture.goodput or 0.0) < GOODPUT_MAX, "steps that nothing comes of are no goodput", picture.goodput
        )
        self.tally["stood still"] += 1

    async def end_behind(self) -> None:
        """Demand that everybody that has had more than the store holds ends, and says why; raise `NotLive`."""
        there = [*(host.process for host in self.hosts), *(learner.process for learner in self.learners)]
        if not await self._until(lambda: not any(process.alive for process in there), REST_WITHIN_S):
            alive = [process.name for process in there if process.alive]
            raise NotLive("who has had more than a store that went back ends", got=alive)
        others = [repr(error) for error in self.ends if not isinstance(error, RunWentBack)]
        self.check(not others, "who has had more than a store that went back says so", others)
        self.tally["ended by a store that went back"] += len(self.ends)

    async def reach(self) -> None:
        """End all faults and demand that the run reaches its target by what is merged, and ends; raise `NotLive`.

        What comes of learners that were cut off when their shards closed has no fate: such a run is not settled.
        """
        self.note("world", "heals")
        self.healed = True
        self.storm.heal()
        self._keep_learners()
        if not await self._until(lambda: self.counted >= self.settings.tokens_target, COMMIT_WITHIN_S):
            raise NotLive("a run whose learners train reaches its target", got=self.counted)
        self.draining = True
        if not await self._until(lambda: not self.learning, REST_WITHIN_S):
            raise NotLive("a learner of a run that is over leaves", got=[each.process.name for each in self.learning])
        self.tally["targets reached"] += 1

    @property
    def counted(self) -> int:
        """Return how far the run is by its heads."""
        return max((head.tokens_counted for head in self.safety.heads.values()), default=0)

    def check_end(self, who: str) -> None:
        """Whoever ends a run does so by its records."""
        if self.settings.tokens_target:
            reached = self.counted >= self.settings.tokens_target
            self.check(reached, "only the run's own records end a run", (who, self.counted))

    def _keep_learners(self) -> None:
        """See to it that one learner more than a quorum trains."""
        if self.draining:
            return
        absent = [name for name in NAMES if not self.is_there(name)]
        training = len({learner.name for learner in self.learning if not learner.stop.is_set()})
        if not self.rebuilding:
            for name in absent[: max(0, self.settings.quorum + 1 - training)]:
                self.start_learner(name)
        self.loop.after(2.0 * RESTART_S, self._keep_learners)

    def _keep_hosts(self) -> None:
        if self.behind:
            return
        there = [host for host in self.hosts if host.process.alive]
        wanted = min(2, self.plan.hosts)
        if self.draining:
            wanted = 0 if self._is_over() else 1
        if len(there) < wanted:
            self.start_host()
        self.loop.after(RESTART_S * (0.25 + self.dice.random()), self._keep_hosts)

    def _keep_region(self) -> None:
        if not self.draining and (self.region is None or not self.region.alive):
            self.start_region()
        self.loop.after(RESTART_S * (0.25 + self.dice.random()), self._keep_region)

    async def drain(self) -> None:
        """Ask everybody to leave, wait until all is at rest, and settle; raise `NotLive`."""
        self.note("world", "drains everybody")
        self.draining = True
        for learner in self.learning:
            learner.stop.set()
        if not await self._until(lambda: not self.learning, REST_WITHIN_S):
            raise NotLive("a learner that drains leaves", got=[learner.process.name for learner in self.learning])
        for host in self.hosts:
            host.leave()
        if not await self._until(self._at_rest, REST_WITHIN_S):
            raise NotLive("when everybody drains, all comes to rest", got=self._unrest())
        self._settle()

    def _queued(self) -> list[StoredMessage]:
        return [
            kept
            for stream in self.broker.streams.values()
            if stream.plan.retention == "workqueue"
            for kept in stream.kept.values()
            if not kept.msg_id.startswith(HOSTILE)
        ]

    def _is_over(self) -> bool:
        leases = [self.safety.leases.get(shard) for shard in range(self.settings.shards)]
        return not self._queued() and all(lease is not None and lease.closed for lease in leases)

    def _at_rest(self) -> bool:
        return self._is_over() and not any(host.process.alive for host in self.hosts)

    def _unrest(self) -> object:
        alive = [host.process.name for host in self.hosts if host.process.alive]
        return {"alive": alive, "queued": [kept.subject for kept in self._queued()]}

    # --- the end ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        whole, told = Ledger(), Ledger()
        ledgers = self.safety.durable.fragment_ledger
        close_together(ledgers, self.settings.fragments)
        for fragment_ledger in ledgers.values():
            fragment_ledger.enter_into(whole)
        for lease in self.safety.leases.values():
            if lease.ledger is not None and self.safety.run is not None and lease.run_nonce == self.safety.run.nonce:
                told.learn(lease.ledger)
        whole.learn(told)
        former, folded = self.safety.archived, whole.former
        whole.accounts.pop(f"{LIAR}/1", None)
        if not folded.covers(f"{LIAR}/1"):
            pushed = sum(tokens for name, tokens in self.safety.pushed.items() if folded.covers(name))
            due = self.safety.folded_before + pushed
            require(folded.settled == due, "every durable push of a former life has one fate", (folded, due))
        self.tally["lives folded"] += folded.lives
        for name, account in list(whole.accounts.items()):
            require(account.settled == self.safety.pushed[name], "every durable push has one fate", (name, account))
            if name in former:
                del whole.accounts[name]
        for name, tokens in self.safety.pushed.items():
            known = name in whole.accounts or name in former or folded.covers(name)
            require(known, "nobody that pushed is forgotten", (name, tokens))
        settled = settle(whole, self.settings.fragments)
        errors = [error for error in settled.errors if error.partition(":")[0] not in former]
        exact = not errors and sum(settled.fates.values()) == settled.trained
        require(exact, "fates add up to what was trained", settled)
        self._check_lives(whole)
        self._check_data()
        self._check_leftovers()
        if self.plan.retains:
            check_rounds(self.object_store, RUN, self.safety, self.tally)

    def _check_lives(self, whole: Ledger) -> None:
        """The ledger is exact for a learner that left, and never more than that for others."""
        nonce = None if self.safety.run is None else self.safety.run.nonce
        for learner in self.lives:
            session = learner.session
            if session is None or session.run.nonce != nonce:
                continue
            island, name = session.driver.machine, f"{learner.name}/{session.member.incarnation}"
            account = whole.accounts.get(name)
            if account is None and whole.former.covers(name):
                continue
            if account is None:
                require(not learner.left, "a learner that left is in the ledger", name)
                continue
            if learner.left:
                theirs = (island.tokens, island.pushed, island.superseded, island.refused_local)
                ours = (account.trained, account.pushed, account.superseded, account.refused_local)
                require(
                    account.left and ours == theirs,
                    "the ledger holds what a learner said as it left",
                    (name, ours, theirs),
                )
            require(account.trained <= island.tokens, "nothing is counted that was not trained", (name, account))

    def _check_data(self) -> None:
        ledger = self.safety.data
        if ledger is None:
            return
        nonce = None if self.safety.run is None else self.safety.run.nonce
        gone = {
            (learner.name, learner.session.member.incarnation)
            for learner in self.lives
            if learner.left and learner.session is not None and learner.session.run.nonce == nonce
        }
        if not self.tally["data not returned"]:
            held = [grant for grant in ledger.grants if grant.holder in gone]
            require(not held, "a learner that left holds no data", held)
        if self.tally["rebuilds"]:
            return
        for share in ledger.finished:
            if not share.learner:
                first, last = share.epoch * ledger.blocks, (share.epoch + 1) * ledger.blocks
                there = sum(first <= block < last for block, _ in self.windows)
                require(there >= WINDOWS * share.blocks, "what counts as read was read", (share, there, WINDOWS))

        if not any(self.tally[kind] for kind in READ_AGAIN):
            twice = [window for window, times in self.windows.items() if times > 1]
            require(not twice, "without faults no data is read twice", sorted(twice)[:4])

    def _check_leftovers(self) -> None:
        """Shards leave nothing behind that no head names, unless one of them died or was deposed over it."""
        stems = {
            kept.subject.rpartition(".")[0]
            for stream in self.broker.streams.values()
            for kept in stream.kept.values()
            if not self.safety.is_named(kept.subject) and ".ps.c." not in kept.subject and ".up.c." not in kept.subject
        }
        self.tally["blobs left over"] += len(stems)
        if not any(self.tally[kind] for kind in (*LEFT_OVER, *LEASE_LOST)):
            require(not stems, "nothing is left that no head names", sorted(stems)[:4])

    def bury(self) -> None:
        for process in self.processes:
            process.kill()
            process.bury()
