"""The byte ledger: what links say of themselves, added up over lives and processes, and held against a ring."""

from __future__ import annotations

import pytest

from atoll.base.errors import PeerMisbehaved
from atoll.run import history as histories
from atoll.run.history import FORMER, History
from atoll.run.links import STANDBY, as_report, byte_ledger
from atoll.wire import traffic
from atoll.wire.messages import Beat, Event, Presence, decode, encode
from support.events import event, heartbeat

FULL = traffic.LinkTraffic(*([traffic.BYTES_MAX] * len(traffic.NOTHING.counters)))


def beat(learner: str, incarnation: int, moved: traffic.LinkTraffic, *, tokens: int = 0, steps: int = 0) -> Beat:
    return heartbeat(learner, incarnation=incarnation, step=steps, step_s=0.1, tokens=tokens, moved=moved)


def committed(fragment: int, parameters: int, contributors: int = 2) -> Event:
    shares = [{"learner": f"l{i}", "incarnation": 1, "age": 0, "tokens": 1, "weight": 1.0} for i in range(contributors)]
    sizes = {"bytes_up": contributors * parameters // 2, "bytes_down": parameters, "parameters": parameters}
    return event("round", "shard-0", 1.0, fragment=fragment, version=1, contributors=shares, **sizes)


def trained() -> History:
    """Return a run of two learners, one of which died once, over two fragments of a thousand parameters."""
    view = History()
    view.on_beat(beat("a", 1, traffic.LinkTraffic(wire_up=600, wire_down=400), tokens=100, steps=10), 1.0)
    view.on_beat(beat("b", 1, traffic.LinkTraffic(wire_up=1000, wire_down=1000), tokens=200, steps=20), 1.0)
    view.on_beat(beat("b", 2, traffic.LinkTraffic(wire_up=500, wire_down=500), tokens=100, steps=10), 2.0)
    for fragment in (0, 1):
        view.on_event(committed(fragment, 1000))
    return view


def test_a_pace_is_that_of_the_last_seconds() -> None:
    """What was carried long ago does not count; one count, or one from the event log, makes no pace."""
    meter = traffic.TrafficMeter()
    meter.take(traffic.LinkTraffic(wire_up=1_000_000))
    meter.take(traffic.LinkTraffic(wire_up=1_000_000), 0.0)
    assert meter.pace() == (0.0, 0.0)
    for second in range(1, int(traffic.METER_S) + 6):
        meter.take(traffic.LinkTraffic(wire_up=1_000_000 + 100 * second, wire_down=10 * second), float(second))

    assert meter.pace() == pytest.approx((100.0, 10.0))
    meter.take(meter.moved, 1000.0)
    assert meter.pace() == (0.0, 0.0)


def test_data_parallel_bytes_by_hand() -> None:
    """Four learners, a thousand parameters in bf16: each sends 2 * 3/4 * 2000 bytes a step and reads as many."""
    assert traffic.data_parallel_bytes(4, 1000, step_tokens=10) == 2 * 3000 / 10
    assert traffic.data_parallel_bytes(1, 1000, step_tokens=10) == 0.0
    assert traffic.bits_per_parameter(500, 1000) == 4.0
    assert traffic.bits_per_parameter(500, 0) is None


def test_a_heartbeat_stays_small_and_takes_no_impossible_count() -> None:
    """With every counter at its bound it is far below a kilobyte; beyond the bound and below nothing it is refused."""
    assert len(encode(beat("a" * 64, 1, FULL))) < 700
    assert decode(Beat, encode(beat("a", 1, FULL))).moved == FULL
    for wrong in (-1, traffic.BYTES_MAX + 1):
        with pytest.raises(PeerMisbehaved):
            decode(Beat, encode(beat("a", 1, traffic.LinkTraffic(wire_up=wrong))))


def test_lives_add_up_and_the_ratio_is_against_a_ring() -> None:
    """A restarted learner begins at 0 and loses nothing of before; ten tokens a step, 2000 parameters, two learners."""
    ledger = byte_ledger(trained(), 2)
    links = {link.name: link for link in ledger.links}

    assert (links["b"].processes, links["b"].moved) == (2, traffic.LinkTraffic(wire_up=1500, wire_down=1500))
    assert ledger.tokens == 400
    assert ledger.per_token("learner") == 4000 / 400
    assert ledger.data_parallel == 2 * (2 * 0.5 * 2 * 2000) / 10
    assert ledger.times_less("learner") == 800 / 10


def test_nobody_says_a_ratio_that_is_not_known() -> None:
    """Not every fragment was committed yet, or there is one learner and no ring: None, not a wrong number."""
    alone = History()
    alone.on_beat(beat("a", 1, traffic.LinkTraffic(wire_up=600), tokens=100, steps=10), 1.0)
    alone.on_event(committed(0, 1000, contributors=1))

    assert byte_ledger(trained(), 3).times_less("learner") is None
    assert byte_ledger(alone, 1).data_parallel is None
    assert as_report(byte_ledger(History(), 1))["bytes_per_token"] is None


def test_the_event_log_and_heartbeats_are_two_counts_of_one_link() -> None:
    """An interrupted session's links are on the event log; what is heard live later is not added to it."""
    view = History()
    view.on_event(event("moved", "a", 1.0, role="learner", incarnation=1, moved=traffic.LinkTraffic(wire_up=50)))
    view.on_beat(beat("a", 1, traffic.LinkTraffic(wire_up=70), tokens=10, steps=1), 2.0)
    view.on_event(event("moved", "a", 3.0, role="learner", incarnation=1, moved=traffic.LinkTraffic(wire_up=60)))
    view.on_event(event("moved", "a", 4.0, role="learner", incarnation=1, moved={"wire_up": -1}))

    assert byte_ledger(view, 1).sum("learner").wire == 70
    assert view.unreadable == 1


def test_a_synchronizer_is_named_by_the_shards_that_it_has_owned() -> None:
    """Processes that served the same shard are one row, one that waits is a standby, one of two shards has both names."""
    view = History()
    view.on_event(event("hosted", "p1", 1.0, shards=[0], moved=traffic.LinkTraffic(wire_up=5)))
    for name, owns, wire in (("p2", (0,), 7), ("p3", (), 1), ("p4", (1,), 9), ("p4", (2,), 9)):
        presence = Presence(name=name, host="h", pid=1, wants=(0,), owns=owns, moved=traffic.LinkTraffic(wire_up=wire))
        view.on_presence(decode(Presence, encode(presence)), 2.0)
    links = {link.name: (link.processes, link.moved.wire_up) for link in byte_ledger(view, 1).links}

    assert links == {"shard-0": (2, 12), STANDBY: (1, 1), "shard-1, shard-2": (1, 9)}


def test_processes_that_are_forgotten_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "HOSTS_MAX", 3)
    view = History()
    for number in range(10):
        told = {"shards": [0], "moved": traffic.LinkTraffic(wire_up=1)}
        view.on_event(event("hosted", f"p{number}", 1.0, **told))

    assert len(view.hosts) <= 4
    assert view.hosts[FORMER].meter.moved == traffic.LinkTraffic(wire_up=7)
    assert byte_ledger(view, 1).sum().wire == 10


def test_the_home_broker_is_away_while_any_connection_to_it_is_lost() -> None:
    stats = traffic.BusStats(home="nats://hub:4222")
    stats.lose("nats://bulk:4222", 1, 5.0)
    assert not stats.is_away
    stats.lose("nats://hub:4222", 2, 10.0)
    stats.lose("nats://hub:4222", 3, 11.0)
    stats.regain(2, 14.0)
    assert (stats.is_away, stats.away_s(15.0)) == (True, 5.0)
    stats.regain(3, 16.0)
    stats.regain(3, 18.0)

    assert (stats.is_away, stats.away_s(99.0)) == (False, 6.0)


def test_a_broker_that_fell_silent_is_away_since_then() -> None:
    stats = traffic.BusStats()
    stats.lose("nats://hub:4222", 1, 10.0)
    assert stats.away_s(30.0) == 20.0
    stats.lose("nats://hub:4222", 2, 12.0)
    stats.lose("nats://hub:4222", 1, 31.0)
    assert stats.away_s(32.0) == 22.0
