"""Metrics of a run and of its brokers, from what the monitor knows: pure, made anew for each scrape.

Names follow Prometheus' conventions: base units, `_total` for what only grows (the format adds it to counters). Every metric
has the label `run`; no label is a round or a message, and each is bounded: `LEARNERS_MAX`, `REASONS_MAX`, `FRAGMENTS_MAX`.
Beyond a bound the sums over all stay right, and `atoll_monitor_left_out` says how many have no series.

Counters follow from the event log and from heartbeats of all incarnations, so they grow on when the monitor begins anew.
A learner that said goodbye has counters and no gauges. One that fell silent has `atoll_learner_up` 0 until it is back or left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from atoll.run.history import OTHER
from atoll.run.links import total
from atoll.run.process_views import LearnerView
from atoll.run.standing import making_of
from atoll.wire.messages import Beat
from atoll_monitor.monitored_run import MonitoredRun

LEARNERS_MAX: Final = 256
FRAGMENTS_MAX: Final = 256
REASONS_MAX: Final = 32
ENDS: Final = frozenset({"all answered", "grace over", "nobody left"})
"""Ends of a round in a run whose shards are as old as the monitor; anything else is counted as `OTHER`."""
T = TypeVar("T")
Kind = type[GaugeMetricFamily | CounterMetricFamily]
RUN: Final = ("run",)
OF_LEARNER: Final = ("run", "learner", "region")
QUEUE: Final = "UPM"
"""The stream that is the work queue of contributions: what is in it waits for a shard."""


def families(watched: MonitoredRun) -> Iterator[Metric]:
    """Yield every metric family of the run, and of its brokers."""
    shown = shown_learners(watched)
    yield from _monitor(watched, len(watched.view.learners) - len(shown))
    yield from _run(watched)
    yield from _rounds(watched)
    yield from _learners(watched, shown)
    yield from _learner_counters(watched, shown)
    yield from _fragments(watched)
    yield from broker_families(watched)


def shown_learners(watched: MonitoredRun) -> list[LearnerView]:
    """Return the learners that have series of their own: those that are present first, then by name."""
    everybody = watched.view.learners.values()
    return sorted(everybody, key=lambda one: (not is_present(one), one.learner))[:LEARNERS_MAX]


def is_present(learner: LearnerView) -> bool:
    """Return whether a learner was heard and has not left; it may be silent.

    The event log knows of a farewell whose heartbeat was lost, say while the monitor had no connection.
    """
    return learner.heard_s is not None and not learner.has_left


def family(
    kind: Kind, name: str, what: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float | None]]
) -> Metric:
    """Return a family of the samples whose value is known."""
    made = kind(name, what, labels=labels)
    for values, value in samples:
        if value is not None:
            made.add_metric(values, float(value))
    return made


def singles(kind: Kind, run: str, *rows: tuple[str, str, float | None]) -> Iterator[Metric]:
    """Yield a family of the run for each row (name, what it is, value) whose value is known."""
    for name, what, value in rows:
        if value is not None:
            yield family(kind, name, what, RUN, [([run], value)])


def columns(
    labels: Sequence[str],
    things: Sequence[tuple[Sequence[str], T]],
    *rows: tuple[Kind, str, str, Callable[[T], float | None]],
) -> Iterator[Metric]:
    """Yield a family for each row (kind, name, what it is, value of a thing), with a sample of each labelled thing."""
    for kind, name, what, value_of in rows:
        yield family(kind, name, what, labels, [(of, value_of(thing)) for of, thing in things])


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of the `REASONS_MAX` most frequent reasons, and the sum of the others."""
    most = Counter(counts).most_common(REASONS_MAX)
    rest = sum(counts.values()) - sum(count for _, count in most)
    return dict(most) | ({OTHER: rest + dict(most).get(OTHER, 0)} if rest else {})


def by_reason(run: str, *rows: tuple[str, str, Mapping[str, int]]) -> Iterator[Metric]:
    """Yield a counter per reason for each row (name, what it is, counts)."""
    for name, what, counts in rows:
        samples = (([run, reason], count) for reason, count in sorted(most_frequent(counts).items()))
        yield family(CounterMetricFamily, name, what, ("run", "reason"), samples)


def _monitor(watched: MonitoredRun, left_out: int) -> Iterator[Metric]:
    run, view = watched.run, watched.view
    yield from singles(
        GaugeMetricFamily,
        run,
        ("atoll_monitor_connected", "Whether the run's broker answers the monitor (1) or not (0).", watched.connected),
        ("atoll_monitor_left_out", "Learners without series of their own.", left_out),
    )
    yield from singles(
        CounterMetricFamily,
        run,
        ("atoll_monitor_unreadable_messages", "Messages that no correct peer sends.", view.unreadable),
        ("atoll_monitor_passed_over_messages", "Messages of learners beyond the number it keeps.", view.passed_over),
        ("atoll_monitor_dropped_lines", "Lines missing in its journal.", watched.dropped_lines()),
    )


def _run(watched: MonitoredRun) -> Iterator[Metric]:
    run, view, record, hearing = watched.run, watched.view, watched.record, watched.hearing
    if record is not None:
        agreed = record.protocol
        info = InfoMetricFamily("atoll_run", "What the run agreed on.", labels=RUN)
        facts = {
            "founder": record.founder,
            "fragments": str(agreed.fragments),
            "shards": str(agreed.shards),
            "interval_steps": str(agreed.interval_steps),
            "codec_up": agreed.codec_up,
            "wire": str(record.schema),
        }
        info.add_metric([run], facts)
        yield info
        yield from singles(
            GaugeMetricFamily,
            run,
            ("atoll_run_founded_timestamp_seconds", "When the run was founded.", record.founded_at_s),
            ("atoll_run_target_tokens", "Tokens to train; 0: no bound.", agreed.tokens_target),
            ("atoll_shards", "Shards of the run.", agreed.shards),
        )
    training = {name for name, one in view.learners.items() if hearing.state(one) == "training"}
    still = not watched.over and making_of(view, watched.protocol, training).stands_still
    owners = sum(one.serving and hearing.hears_host(one) for one in view.hosts.values())
    measured = view.validations[-1].fields if view.validations else None
    loss, at_tokens = (None, None) if measured is None else (measured.bits_per_byte, measured.run_tokens)
    yield from singles(
        GaugeMetricFamily,
        run,
        ("atoll_run_over", "Whether the run has reached its end (1) or not (0).", watched.over),
        ("atoll_run_still", "Whether a quorum trains and no version is made (1) or not (0).", still),
        ("atoll_synchronizers_live", "Synchronizer processes that own a shard.", owners),
        ("atoll_validation_loss", "Loss of the merged model, in bits per byte.", loss),
        ("atoll_validation_at_tokens", "Run tokens at that measurement.", at_tokens),
    )
    yield from singles(
        CounterMetricFamily,
        run,
        ("atoll_run_tokens", "Tokens of the run: those merged in the furthest fragment.", view.run_tokens),
        ("atoll_merged_token_fragments", "Tokens merged, once per fragment.", view.token_fragments_merged),
        ("atoll_learners_present_seconds", "Learner-seconds present.", view.present_s),
        ("atoll_learners_stepping_seconds", "Learner-seconds spent stepping.", view.stepping_s),
    )


def _rounds(watched: MonitoredRun) -> Iterator[Metric]:
    run, view, times = watched.run, watched.view, watched.times
    clipped = sum(clips.count for clips in view.sums.clipped.values())
    yield from singles(
        CounterMetricFamily,
        run,
        ("atoll_commits", "Commits, over all fragments.", view.commits),
        ("atoll_contributions_merged", "Contributions merged.", view.sums.contributions),
        ("atoll_contributions_late", "Of those, made on an older version.", view.sums.late),
        ("atoll_contributions_clipped", "Contributions folded at less than their length.", clipped),
        ("atoll_quarantines", "Learners put into quarantine.", len(view.quarantined)),
        ("atoll_contribution_bytes", "Bytes of merged contributions.", view.bytes_merged),
        ("atoll_version_bytes", "Bytes of published versions.", view.bytes_published),
    )
    newest_s = max(times.committed_at_s.values(), default=None)
    newest = ("atoll_last_commit_timestamp_seconds", "When a commit was last made.", newest_s)
    yield from singles(GaugeMetricFamily, run, newest)
    phases = HistogramMetricFamily("atoll_round_phase_seconds", "Time in a phase of a round.", labels=("run", "phase"))
    for name, histogram in times.phases.items():
        phases.add_metric([run, name], buckets=histogram.buckets(), sum_value=histogram.sum_s)
    yield phases
    ends = Counter[str]()
    for end, count in view.sums.ends.items():
        ends[end if end in ENDS else OTHER] += count
    yield from by_reason(
        run,
        ("atoll_round_ends", "Rounds by what ended them.", ends),
        ("atoll_contributions_refused", "Contributions refused, by reason.", view.refused_by_reason),
        ("atoll_junk_messages", "Messages that shards dropped, by reason.", view.junk),
    )


def _learners(watched: MonitoredRun, shown: Iterable[LearnerView]) -> Iterator[Metric]:
    """Yield what is true of learners now: of those that left nothing, of silent ones only that they are silent."""
    hearing, gauge = watched.hearing, GaugeMetricFamily
    live = sum(hearing.hears(one) for one in watched.view.learners.values())
    yield from singles(gauge, watched.run, ("atoll_learners_live", "Learners heard lately.", live))
    known = {one.learner: one for one in shown}
    labels = {name: _labels(watched, one) for name, one in known.items()}
    present = [(labels[name], one) for name, one in known.items() if is_present(one)]
    up = [(of, (beat, hearing.hears(one))) for of, one in present if (beat := _beat(one)) is not None]
    what = "Whether a learner is heard (1) or silent (0)."
    yield from columns(OF_LEARNER, up, (gauge, "atoll_learner_up", what, lambda one: one[1]))
    yield from columns(
        OF_LEARNER,
        [(of, beat) for of, (beat, is_heard) in up if is_heard],
        (gauge, "atoll_learner_loss", "Training loss of its last steps, in nats per token.", lambda beat: beat.loss),
        (gauge, "atoll_learner_tokens_per_second", "Its speed.", lambda beat: beat.tokens_per_s),
        (gauge, "atoll_learner_step_seconds", "Time of a step.", lambda beat: beat.step_s),
        (gauge, "atoll_learner_overhead_ratio", "Share of a step that Atoll takes.", lambda beat: beat.overhead),
        (gauge, "atoll_learner_lag_versions", "Versions that it is behind.", lambda beat: beat.lag_versions),
    )
    isolated = {q.learner for q in watched.view.isolations if _is_isolated(known.get(q.learner), q.incarnation)}
    rows = [(labels[name], 1.0) for name in sorted(isolated)]
    yield family(gauge, "atoll_learner_quarantined", "Learners in quarantine (1).", OF_LEARNER, rows)


def _beat(learner: LearnerView) -> Beat | None:
    return None if learner.latest is None else learner.latest.beat


def _is_isolated(learner: LearnerView | None, incarnation: int) -> bool:
    """Return whether a learner's present incarnation was isolated: a new one begins anew, and one that left sends no more."""
    life = None if learner is None else learner.latest
    return life is not None and life.incarnation == incarnation and not life.left


def _learner_counters(watched: MonitoredRun, shown: Sequence[LearnerView]) -> Iterator[Metric]:
    counter, directions = CounterMetricFamily, (*OF_LEARNER, "direction")
    every = [(_labels(watched, one), one) for one in shown]
    yield from columns(
        OF_LEARNER,
        every,
        (counter, "atoll_learner_steps", "Steps trained.", lambda one: sum(life.steps for life in one.lives.values())),
        (counter, "atoll_learner_tokens", "Tokens trained.", lambda one: one.tokens),
        (counter, "atoll_learner_incarnations", "Times that it joined.", lambda one: len(one.lives)),
        (counter, "atoll_learner_present_seconds", "Seconds present.", lambda one: one.present_s),
        (counter, "atoll_learner_stepping_seconds", "Seconds spent stepping.", lambda one: one.stepping_s),
    )
    moved = [(labels, total(life.meter.moved for life in one.lives.values())) for labels, one in every]
    payload = [ways for labels, sums in moved for ways in _both_ways(labels, sums.payload_up, sums.payload_down)]
    wire = [ways for labels, sums in moved for ways in _both_ways(labels, sums.wire_up, sums.wire_down)]
    yield family(counter, "atoll_learner_payload_bytes", "Bytes given to its link.", directions, payload)
    yield family(counter, "atoll_learner_wire_bytes", "Bytes that its sockets carried.", directions, wire)
    hosts = total(host.meter.moved for host in watched.view.hosts.values())
    name, what = "atoll_synchronizer_wire_bytes", "Bytes that the sockets of synchronizers carried."
    both = _both_ways([watched.run], hosts.wire_up, hosts.wire_down)
    yield family(counter, name, what, ("run", "direction"), both)


def _both_ways(labels: Sequence[str], up: int, down: int) -> list[tuple[Sequence[str], float]]:
    return [((*labels, "up"), up), ((*labels, "down"), down)]


def _fragments(watched: MonitoredRun) -> Iterator[Metric]:
    labels, gauge, times = ("run", "fragment"), GaugeMetricFamily, watched.times.committed_at_s
    numbers = sorted(watched.view.fragments)[:FRAGMENTS_MAX]
    shown = [([watched.run, str(number)], watched.view.fragments[number]) for number in numbers]
    yield from columns(
        labels,
        shown,
        (CounterMetricFamily, "atoll_fragment_commits", "Commits of a fragment.", lambda one: one.version),
        (gauge, "atoll_fragment_contributors", "Contributors to its newest version.", lambda one: one.contributors),
    )
    name, what = "atoll_fragment_commit_timestamp_seconds", "When that was committed."
    yield family(
        gauge, name, what, labels, [([watched.run, str(number)], times.get(number, 0.0)) for number in numbers]
    )


def _labels(watched: MonitoredRun, learner: LearnerView) -> list[str]:
    return [watched.run, learner.learner, watched.region_of(learner.learner)]


def broker_families(watched: MonitoredRun) -> Iterator[Metric]:
    """Yield the metric families of the run's streams, brokers, disks and certificates."""
    run, gauge, counter = watched.run, GaugeMetricFamily, CounterMetricFamily
    waiting = (([run], one.messages) for one in watched.streams if one.kind == QUEUE)
    yield family(gauge, "atoll_queue_depth", "Contributions that wait for a shard.", RUN, waiting)
    yield from columns(
        ("run", "stream"),
        [([run, one.kind], one) for one in watched.streams],
        (gauge, "atoll_stream_messages", "Messages in a stream.", lambda one: one.messages),
        (gauge, "atoll_stream_bytes", "Bytes in one copy of a stream.", lambda one: one.size_bytes),
        (gauge, "atoll_stream_limit_bytes", "Bytes that one copy may have.", lambda one: one.bytes_max),
        (gauge, "atoll_stream_copies", "Copies that a stream is to have.", lambda one: one.copies),
        (gauge, "atoll_stream_copies_current", "Copies that have everything.", lambda one: one.copies_current),
    )
    labels, what = ("run", "broker"), "Whether a broker's endpoint answers."
    up = [([run, name], float(figures is not None)) for name, figures in watched.brokers.items()]
    yield family(gauge, "atoll_broker_up", what, labels, up)
    yield from columns(
        labels,
        [([run, name], figures) for name, figures in watched.brokers.items() if figures is not None],
        (gauge, "atoll_broker_memory_bytes", "Resident memory of a broker.", lambda one: one.memory_bytes),
        (gauge, "atoll_broker_cpu_ratio", "Processors that it uses: 1 is one core.", lambda one: one.cpu_ratio),
        (gauge, "atoll_broker_connections", "Its client connections.", lambda one: one.connections),
        (gauge, "atoll_broker_store_bytes", "Bytes that its streams take on disk.", lambda one: one.store_bytes),
        (gauge, "atoll_broker_store_limit_bytes", "Bytes that they may take.", lambda one: one.store_bytes_max),
        (
            counter,
            "atoll_broker_slow_consumers",
            "Connections that it cut for being slow.",
            lambda one: one.slow_consumers,
        ),
        (counter, "atoll_broker_received_bytes", "Payload that it received.", lambda one: one.bytes_in),
        (counter, "atoll_broker_sent_bytes", "Payload that it sent.", lambda one: one.bytes_out),
    )
    yield from columns(
        ("run", "path"),
        [([run, path], disk) for path, disk in watched.disks.items()],
        (gauge, "atoll_disk_size_bytes", "Size of a file system.", lambda one: one.size_bytes),
        (gauge, "atoll_disk_free_bytes", "What is free of it.", lambda one: one.free_bytes),
    )
    name, what = "atoll_certificate_end_timestamp_seconds", "When a broker's certificate ends."
    ends = [([run, address], ends_at_s) for address, ends_at_s in watched.certificates.items()]
    yield family(gauge, name, what, ("run", "address"), ends)
