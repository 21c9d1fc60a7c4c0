"""What happens to the processes, links and the broker of a world, from the list that was drawn for it.

Nothing outlasts the storm but its consequences: `heal` ends every fault, and whatever is dead is started again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atoll.archive.checkpoint_store import CheckpointStore
from schedules.broker import WatchedStream
from schedules.faults import Happening
from schedules.network import DOWN, UP, LinkFaults
from schedules.processes import NEVER, Process
from schedules.safety import SetBack

if TYPE_CHECKING:
    from schedules.learners import Learner
    from schedules.world import World

SHARES = {
    "messages lost": "lost_messages",
    "requests lost": "lost_requests",
    "answers lost": "lost_answers",
    "messages doubled": "duplicates",
    "messages slow": "slow",
    "messages late": "delay_s",
}
"""Kinds that are faults of links: which share of all messages they change."""
WAYS = {"cut both ways": (UP, DOWN), "cut up": (UP,), "cut down": (DOWN,)}
RECONNECT_S = 1.0
DRIFT = 0.1


class FaultStorm:
    """The faults of one world, from `begin` to `heal`."""

    def __init__(self, world: World, happenings: list[Happening]) -> None:
        self.world = world
        self.happenings = happenings
        self.drift = DRIFT if any(each.kind.startswith("clock") for each in happenings) else 0.0
        self._raging = False
        self._acts: dict[str, Callable[[Happening], None]] = {
            "broker away": self._crash_broker,
            "broker gone": self._crash_broker,
            "synchronizer cut off": self._cut_host,
            "learner cut off": self._cut_learner,
            "store set back": self._copy_store,
            "power cut": self._cut_power,
            "disk full": self._fill_disk,
            "leader lost": self._lose_leader,
            "crash": self._kill,
            "crash at an await": self._kill_later,
            "freeze": self._freeze_someone,
            "freeze at an await": self._freeze_later,
            "clock ahead": self._jump,
            "wall clock set": self._set_wall,
            "join": self._join,
            "leave": self._leave,
            "id taken over": self._replace,
            "host told to leave": self._retire,
            "host added": self._add_host,
            "not finite": self._spoil,
            "chunk damaged": self._damage,
            "archive away": self._archive_away,
            "store lost": self._lose_store,
            "hostile messages": self._send_hostile,
            "hostile learner": self._send_hostile,
            "hostile records": self._send_hostile,
        }

    def begin(self) -> None:
        self._raging = True
        for happening in self.happenings:
            self.world.loop.at(happening.at_s, self._happen, happening)

    def heal(self) -> None:
        self._raging = False
        world = self.world
        world.network.link_faults = LinkFaults()
        for way in (UP, DOWN):
            world.network.cut[way].clear()
        now_s = world.loop.now_s
        for process, times in world.cut_off_s.items():
            world.cut_off_s[process] = [(first_s, min(last_s, now_s)) for first_s, last_s in times]
        world.broker.full = world.object_store.away = False
        world.broker.restart()
        for stream in world.broker.streams.values():
            if isinstance(stream, WatchedStream):
                self._elect(stream)
        for process in world.alive:
            process.doom_at = NEVER
            process.thaw()

    def _happen(self, happening: Happening) -> None:
        if not self._raging:
            return
        self.world.note("storm", happening.told())
        self.world.tally[happening.kind] += 1
        if happening.kind in SHARES:
            self._change_link(happening)
        elif happening.kind in WAYS:
            self._cut(happening, self._someone(happening), WAYS[happening.kind])
        else:
            self._acts[happening.kind](happening)

    def _pick(self, happening: Happening, among: list[Process]) -> Process | None:
        return among[int(happening.who * len(among))] if among else None

    def _someone(self, happening: Happening) -> Process | None:
        return self._pick(happening, self.world.alive)

    def _learner(self, happening: Happening) -> Learner | None:
        learning = self.world.learning
        return learning[int(happening.who * len(learning))] if learning else None

    # --- messages, links, the broker ----------------------------------------------------------------------------------

    def _change_link(self, happening: Happening) -> None:
        field, network = SHARES[happening.kind], self.world.network
        network.link_faults = replace(network.link_faults, **{field: min(0.5, happening.strong)})
        self.world.loop.after(happening.for_s, self._clear, field)

    def _clear(self, field: str) -> None:
        network = self.world.network
        network.link_faults = replace(network.link_faults, **{field: getattr(LinkFaults(), field)})

    def _cut(self, happening: Happening, process: Process | None, ways: tuple[str, ...]) -> None:
        if process is None:
            return
        for way in ways:
            cut = self.world.network.cut[way]
            cut[process] = cut.get(process, 0) + 1
        self.world.loop.after(happening.for_s, self._mend, process, happening, ways)

    def _cut_host(self, happening: Happening) -> None:
        """A synchronizer alone loses its link to the broker, and nobody tells it."""
        hosts = [host.process for host in self.world.hosts if host.process.alive]
        process = self._pick(happening, hosts)
        if process is not None:
            now_s = self.world.loop.now_s
            self.world.cut_off_s.setdefault(process, []).append((now_s, now_s + happening.for_s))
        self._cut(happening, process, (UP, DOWN))

    def _cut_learner(self, happening: Happening) -> None:
        learner = self._learner(happening)
        self._cut(happening, None if learner is None else learner.process, (UP, DOWN))

    def _mend(self, process: Process, happening: Happening, ways: tuple[str, ...]) -> None:
        for way in ways:
            cut = self.world.network.cut[way]
            if cut.get(process):
                cut[process] -= 1
        if happening.for_s > RECONNECT_S:
            for bus in [host.bus for host in self.world.hosts if host.process is process]:
                bus.reconnect()

    def _crash_broker(self, happening: Happening) -> None:
        if self.world.broker.up:
            self.world.broker.crash()
            self.world.loop.after(happening.for_s, self.world.broker.restart)

    def _cut_power(self, happening: Happening) -> None:
        """The broker dies with its machine: chunks that nothing names yet may be gone, although it acknowledged them."""
        world = self.world
        if not world.broker.up:
            return
        world.broker.crash()
        world.safety.power_cuts += 1
        lost = world.broker.lose_chunks(world.loop.now_s - happening.strong, world.safety.is_named)
        world.tally["acknowledged chunks lost"] += lost
        world.loop.after(happening.for_s, world.broker.restart)

    def _copy_store(self, happening: Happening) -> None:
        """Somebody copies the broker's store, and some time later restores it from that copy, over what came since."""
        world = self.world
        heads = world.safety.heads
        if world.behind or not self._raging:
            return
        if len(heads) < world.settings.fragments or not all(head.version for head in heads.values()):
            world.loop.after(1.0, self._copy_store, happening)
            return
        versions, copy = {p: head.version for p, head in heads.items()}, world.broker.copy()
        world.loop.after(happening.for_s, self._set_back, versions, copy)

    def _set_back(self, versions: dict[int, int], copy: dict[str, tuple[Any, ...]]) -> None:
        world = self.world
        had = {p: head.version for p, head in world.safety.heads.items() if head.version > versions[p]}
        if not had or world.behind:
            return
        world.note("storm", "sets the store back", versions, had)
        world.tally["stores set back"] += 1
        world.behind, world.rebuilding = had, True
        world.broker.crash()
        world.broker.go_back(copy)
        world.broker.witness = SetBack(world.safety.subjects, had)
        world.loop.after(1.0, world.broker.restart)

    def _fill_disk(self, happening: Happening) -> None:
        self.world.broker.full = True
        self.world.loop.after(happening.for_s, self._empty_disk)

    def _empty_disk(self) -> None:
        self.world.broker.full = False

    def _lose_leader(self, happening: Happening) -> None:
        """The node that leads a stream dies: one that follows takes its place, after a while."""
        broker = self.world.broker
        names = sorted(broker.streams)
        stream = broker.streams[names[int(happening.who * len(names))]] if names else None
        if isinstance(stream, WatchedStream) and stream.proposed is None:
            broker.lose_leader(stream)
            self.world.loop.after(happening.for_s, self._elect, stream)

    def _elect(self, stream: WatchedStream) -> None:
        if stream.proposed is not None:
            self.world.network.elect(stream, self.world.broker)

    def _damage(self, happening: Happening) -> None:
        stream = next(s for name, s in self.world.broker.streams.items() if name.endswith("_UPC"))
        chunks = sorted(stream.kept)
        if chunks:
            kept = stream.kept[chunks[int(happening.who * len(chunks))]]
            data = bytearray(kept.data)
            data[int(happening.who * 7919) % len(data)] ^= 4
            stream.kept[kept.sequence] = replace(kept, data=bytes(data))

    def _send_hostile(self, happening: Happening) -> None:
        self.world.hostile.begin(happening.kind, max(0.2, happening.strong))

    def _archive_away(self, happening: Happening) -> None:
        self.world.object_store.away = True
        self.world.loop.after(happening.for_s, self._archive_back)

    def _archive_back(self) -> None:
        self.world.object_store.away = False

    def _lose_store(self, happening: Happening) -> None:
        """The broker's disk dies; its place is taken by an empty one, and whoever serves a shard restores the run."""
        world = self.world
        if not world.plan.archive_every_s or world.rebuilds or world.object_store.away:
            return
        if not any(checkpoint.complete for checkpoint in CheckpointStore(world.object_store, world.run).checkpoints()):
            return
        world.tally["stores lost"] += 1
        world.rebuilding = world.rebuilds = True
        world.broker.crash()
        world.broker.lose_all(world.run)
        world.safety.lost()
        for host in list(world.hosts):
            if world.dice.random() < 0.7:
                world.kill(host.process, "with the broker's machine")
        world.safety.on_head.append(lambda _: self._rebuilt())
        world.loop.after(happening.for_s, world.broker.restart)

    def _rebuilt(self) -> None:
        if len(self.world.safety.heads) == self.world.settings.fragments - 1:
            self.world.loop.after(0.5, self._welcome)

    def _welcome(self) -> None:
        self.world.rebuilding = False

    # --- processes ----------------------------------------------------------------------------------------------------

    def _kill(self, happening: Happening) -> None:
        process = self._someone(happening)
        if process is not None:
            self.world.kill(process, "at any time")

    def _kill_later(self, happening: Happening) -> None:
        process = self._someone(happening)
        if process is not None:
            process.doom_at = process.acts + 1 + int(happening.strong)
            process.on_doom = self._strike

    def _strike(self, process: Process) -> None:
        self.world.kill(process, "at an await")
        self.world.tally["crashes at an await"] += 1

    def _freeze_someone(self, happening: Happening) -> None:
        process = self._someone(happening)
        if process is not None:
            self._freeze(process, happening.for_s)

    def _freeze_later(self, happening: Happening) -> None:
        process = self._someone(happening)
        if process is not None:
            process.doom_at = process.acts + 1 + int(happening.strong)
            process.on_doom = lambda doomed: self._freeze(doomed, happening.for_s)

    def _freeze(self, process: Process, for_s: float) -> None:
        if process.frozen:
            return
        self.world.note("storm", "freezes", process.name, f"for {for_s:.2f} s")
        self.world.tally["freezes"] += 1
        process.freeze()
        self.world.loop.after(for_s, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        if process.alive and process.frozen:
            self.world.note("storm", "thaws", process.name)
            process.thaw()

    def _jump(self, happening: Happening) -> None:
        process = self._someone(happening)
        if process is not None:
            process.jump(happening.strong)

    def _set_wall(self, happening: Happening) -> None:
        process = self._someone(happening)
        if process is not None:
            process.step_wall(happening.strong if happening.who < 0.5 else -happening.strong)

    def _join(self, happening: Happening) -> None:
        names = [name for name in self.world.names if not self.world.is_there(name)]
        if names and not self.world.rebuilding:
            self.world.start_learner(names[int(happening.who * len(names))])

    def _leave(self, happening: Happening) -> None:
        learner = self._learner(happening)
        if learner is not None:
            learner.stop.set()

    def _replace(self, happening: Happening) -> None:
        """A learner freezes, and its id is claimed anew while it is away."""
        learner = self._learner(happening)
        if learner is not None and not self.world.rebuilding:
            self._freeze(learner.process, happening.for_s)
            self.world.start_learner(learner.name)

    def _retire(self, happening: Happening) -> None:
        hosts = [host for host in self.world.hosts if host.process.alive]
        process = self._pick(happening, [host.process for host in hosts])
        for host in hosts:
            if host.process is process:
                host.leave()

    def _add_host(self, happening: Happening) -> None:
        del happening
        if sum(host.process.alive for host in self.world.hosts) < 4:
            self.world.start_host()

    def _spoil(self, happening: Happening) -> None:
        learner = self._learner(happening)
        if learner is not None and self.world.settings.adoption == "overwrite":
            learner.spoil = True
