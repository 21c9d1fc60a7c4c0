"""A run in virtual time: production machines, the drivers' order of effects, a broker, links that fail, from one seed.

    found - storm (faults; every promise checked at every durable change and every fact)
          - heal (no faults; every shard must commit again within a bound)
          - drain (everybody leaves; all must come to rest, and the books must be exact)

The world knows everything and tells nobody: processes learn what the broker and their own clocks tell them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import msgspec

from atoll.base.errors import AtollError
from atoll.protocol.ledger import Ledger, Settlement
from atoll.protocol.settings import ProtocolSettings
from atoll.sim.dst.broker import Broker, Queue
from atoll.sim.dst.candidate import Candidate
from atoll.sim.dst.faults import Faults
from atoll.sim.dst.learner import Learner
from atoll.sim.dst.lease import Lease, lease_name
from atoll.sim.dst.line import Line
from atoll.sim.dst.network import Network
from atoll.sim.dst.process import Clock, Process
from atoll.sim.dst.promises import Promises
from atoll.sim.dst.reader import queue_name
from atoll.sim.dst.store import Frame, Head, head_name
from atoll.sim.dst.storm import RESTART_S, Storm
from atoll.sim.dst.telling import told
from atoll_simulator.engine import Engine

NAMES = ("a", "b", "c", "d")
COMMIT_WITHIN_S = 120.0
VERSIONS_HEALED = 3
REST_WITHIN_S = 180.0


class NotLive(AtollError):
    """Faults are over, and still something that must happen does not happen."""


class World:
    """One run; `dice` is the only source of chance."""

    def __init__(
        self,
        settings: ProtocolSettings,
        faults: Faults,
        dice: random.Random,
        *,
        candidates: int = 2,
        log: list[tuple[float, tuple[object, ...]]] | None = None,
    ) -> None:
        """Found the run: heads of version 0, empty queues, candidates for every shard."""
        self.settings = settings
        self.faults = faults
        self.dice = dice
        self.log = log
        self.tally: Counter[str] = Counter()
        self.engine = Engine()
        self.network = Network(self.engine, dice, faults, self.tally)
        self.promises = Promises(dict.fromkeys(range(settings.fragments), 0))
        self.broker = Broker(self.network, self.promises, self.tally)
        self.storm = Storm(self)
        self.names = NAMES
        self.processes: list[Process] = []
        self.learners: dict[str, Learner] = {}
        self.started: list[Learner] = []
        self.lives: list[Learner] = []
        self.candidates: list[Candidate] = []
        self.draining = False
        self._numbers: Counter[str] = Counter()
        self._steps_s = {name: float(2.0 ** dice.uniform(-1.0, 1.0)) for name in NAMES}
        for fragment in range(settings.fragments):
            stem = f"gl/{fragment}/0"
            self.broker.blobs[stem] = Frame("", frozenset())
            self.broker.put(head_name(fragment), Head(fragment=fragment, version=0, epoch=0, frame=stem), 0, "founder")
        for shard in range(settings.shards):
            self.broker.queues[queue_name(shard)] = Queue()
            for _ in range(candidates):
                self.start_candidate(shard)

    # --- who is there -------------------------------------------------------------------------------------------------

    def start_candidate(self, shard: int) -> None:
        """Start another candidate for a shard."""
        process = self._process(f"shard{shard}.{self.number('candidate')}")
        candidate = Candidate(self, process, shard, Line(process, self.network, self.broker))
        self.candidates = [each for each in self.candidates if each.process.alive] + [candidate]
        process.spawn(candidate.live())
        if self.draining:
            candidate.drain()

    def start_learner(self, name: str) -> None:
        """Start a process that claims a learner's id, whoever has it now."""
        process = self._process(f"{name}.{self.number(name)}")
        learner = self.learners[name] = Learner(self, process, name, Line(process, self.network, self.broker))
        self.started = [*self.learning, learner]
        self.note("world", "starts", process.name)
        process.spawn(learner.live())

    @property
    def learning(self) -> list[Learner]:
        """Return the learners whose process lives, those that an id was taken from and do not know it included."""
        return [learner for learner in self.started if learner.process.alive]

    def is_there(self, name: str) -> bool:
        """Return whether the newest process of a learner lives."""
        return name in self.learners and self.learners[name].process.alive

    def drain_learner(self, name: str) -> None:
        """Ask a learner to leave; it does after its present step."""
        self.note("world", "drains", name)
        self.learners[name].drain_wanted = True

    def kill(self, process: Process, why: str) -> None:
        """Kill a process; a candidate is started again somewhat later, as a supervisor would."""
        self.note("storm", "kills", process.name, why)
        self.tally["crashes of candidates" if process.name.startswith("shard") else "crashes of learners"] += 1
        process.crash()

    def joined(self, learner: Learner) -> None:
        """Remember a life, for the books at the end."""
        self.tally["lives"] += 1
        self.lives.append(learner)

    def left(self, learner: Learner) -> None:
        """Note a learner that said farewell."""
        self.tally["farewells"] += 1
        self.note("world", "hears the farewell of", learner.process.name)

    def _process(self, name: str) -> Process:
        drift = self.faults.drift
        clock = Clock(self.engine, self.dice.uniform(0.0, 1e4), 1.0 + self.dice.uniform(-drift, drift))
        process = Process(name, self.engine, clock)
        self.processes = [each for each in self.processes if each.alive] + [process]
        self.storm.arm(process)
        return process

    # --- chance, numbers, notes -----------------------------------------------------------------------------------------

    def happens(self, share: float) -> bool:
        """Return True for `share` of all questions."""
        return share > 0.0 and self.dice.random() < share

    def number(self, kind: str) -> int:
        """Return 1, 2, 3 ... for every kind of thing."""
        self._numbers[kind] += 1
        return self._numbers[kind]

    def step_s_of(self, name: str) -> float:
        """Return how long a learner's steps take."""
        return self._steps_s[name]

    def note(self, *said: object) -> None:
        """Write a line into the log, if one is kept; it is put into words when somebody reads it."""
        if self.log is not None:
            self.log.append((self.engine.now_s, said))

    # --- a schedule -----------------------------------------------------------------------------------------------------

    def rage(self, for_s: float) -> None:
        """Let the storm happen for so long, and let what dies among the candidates be started again."""
        self.storm.begin()
        self._keep_candidates()
        self.engine.run(self.engine.now_s + for_s)

    def heal(self) -> None:
        """End all faults and demand that every fragment is committed again; raise `NotLive`."""
        self.note("world", "heals")
        self.storm.heal()
        self._keep_learners()
        before = dict(self.promises.durable.versions)
        begun_s = self.engine.now_s
        wanted = set(before)

        def committed() -> bool:
            now = self.promises.durable.versions
            return all(now[p] >= before[p] + VERSIONS_HEALED for p in wanted)

        if not self.engine.run(self.engine.now_s + COMMIT_WITHIN_S, committed):
            still = sorted(p for p in wanted if self.promises.durable.versions[p] < before[p] + VERSIONS_HEALED)
            raise NotLive("with a quorum of live learners every fragment is committed", got=f"not {still}")
        self.tally["heal_ms"] += int(1e3 * (self.engine.now_s - begun_s))

    def drain(self) -> Settlement:
        """Ask everybody to leave, wait until all is at rest, and return the settlement; raise `NotLive`."""
        self.note("world", "drains everybody")
        self.draining = True
        for learner in self.learning:
            self.note("world", "drains", learner.process.name)
            learner.drain_wanted = True
        if not self.engine.run(self.engine.now_s + REST_WITHIN_S, lambda: not self.learning):
            raise NotLive("a learner that drains leaves", got=[learner.process.name for learner in self.learning])
        for candidate in self.candidates:
            candidate.process.tell(candidate.drain)
        if not self.engine.run(self.engine.now_s + REST_WITHIN_S, self._at_rest):
            raise NotLive("when everybody drains, all comes to rest", got=self._unrest())
        return self._settlement()

    def _keep_candidates(self) -> None:
        """Start a candidate again some time after one has died."""
        for shard in range(self.settings.shards):
            there = sum(candidate.process.alive for candidate in self.candidates if candidate.shard == shard)
            if there < (1 if self.draining else 2) and not self._is_over(shard):
                self.start_candidate(shard)
        self.engine.after(self.dice.expovariate(1.0 / RESTART_S), self._keep_candidates)

    def _keep_learners(self) -> None:
        """See to it that one learner more than a quorum trains: who was told to leave or is in quarantine is no help."""
        if self.draining:
            return
        absent = [name for name in self.names if not self.is_there(name)]
        training = sum(not self.learners[name].drain_wanted for name in self.names if name not in absent)
        for name in absent[: max(0, self.settings.quorum + 1 - training)]:
            self.start_learner(name)
        self.engine.after(RESTART_S, self._keep_learners)

    def _at_rest(self) -> bool:
        alive = any(candidate.process.alive for candidate in self.candidates)
        return not alive and all(map(self._is_over, range(self.settings.shards)))

    def _is_over(self, shard: int) -> bool:
        """Return whether there is nothing left to own: an owner may have closed its books too early, by a wrong clock."""
        lease: Lease | None = self.broker.get(lease_name(shard)).value
        closed = lease is not None and lease.closed and not self.broker.queues[queue_name(shard)].messages
        return self.draining and closed and not self.learning

    def _unrest(self) -> object:
        alive = [candidate.process.name for candidate in self.candidates if candidate.process.alive]
        queued = {name: len(queue.messages) for name, queue in self.broker.queues.items()}
        return {"alive": alive, "queued": queued}

    def _settlement(self) -> Settlement:
        """Compare the books of both sides, and with what the world knows."""
        ledgers = []
        for shard in range(self.settings.shards):
            lease: Lease = self.broker.get(lease_name(shard)).value
            ledgers.append(msgspec.json.decode(lease.ledger, type=Ledger))
        self.promises.check_lives(((f"{x.name}/{x.incarnation}", x.machine, x.left) for x in self.lives), ledgers)
        return self.promises.settlement(ledgers, self.settings.fragments)


def lines(log: Iterable[tuple[float, tuple[object, ...]]]) -> list[str]:
    """Return a log in words."""
    return [f"{at_s:9.4f} {told(said)}" for at_s, said in log]
