"""Metrics of a run and of its brokers, from what the monitor knows: pure, made anew for each scrape.

Names follow Prometheus' conventions: base units (seconds, bytes, ratios), `_total` for what only grows, no unit twice. Every
metric of the run has the label `run`; further labels are `learner`, `region`, `fragment`, `reason`, `phase`, `direction`,
`stream`, `broker`, `path` and `address`, and never a round or a message. Each is bounded: `LEARNERS_MAX`, `REASONS_MAX`,
`FRAGMENTS_MAX`. Beyond a bound the sums over all stay right, and `atoll_monitor_left_out` says how many have no series.

Counters follow from the event log and from heartbeats of all incarnations, so they grow on when the monitor begins anew.
A learner that said goodbye has counters and no gauges. One that fell silent has `atoll_learner_up` 0 until it is back or left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

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
from atoll_monitor.monitored_run import MonitoredRun

LEARNERS_MAX: Final = 256
FRAGMENTS_MAX: Final = 256
REASONS_MAX: Final = 32
ENDS: Final = frozenset({"all answered", "grace over", "nobody left"})
"""Ends of a round in a run whose shards are as old as the monitor; anything else is counted as `OTHER`."""
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


def live_hosts(watched: MonitoredRun) -> int:
    """Return how many synchronizer processes that own a shard are heard."""
    hearing = watched.hearing
    return sum(one.serving and hearing.hears_host(one) for one in watched.view.hosts.values())


def family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    what: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float | None]],
) -> Metric:
    """Return a family of the samples whose value is known; a counter's name has no `_total`, which the format adds."""
    made = kind(name, what, labels=labels)
    for values, value in samples:
        if value is not None:
            made.add_metric(values, float(value))
    return made


def gauge(name: str, what: str, value: float | None, run: str) -> Iterator[Metric]:
    """Yield a gauge of the run; nothing while its value is unknown."""
    if value is not None:
        yield family(GaugeMetricFamily, name, what, RUN, [([run], value)])


def counter(name: str, what: str, value: float, run: str) -> Iterator[Metric]:
    """Yield a counter of the run."""
    yield family(CounterMetricFamily, name, what, RUN, [([run], value)])


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of the `REASONS_MAX` most frequent reasons, and the sum of the others."""
    most = Counter(counts).most_common(REASONS_MAX)
    rest = sum(counts.values()) - sum(count for _, count in most)
    return dict(most) | ({OTHER: rest + dict(most).get(OTHER, 0)} if rest else {})


def by_reason(name: str, what: str, counts: Mapping[str, int], run: str) -> Metric:
    """Return a counter per reason."""
    samples = (([run, reason], count) for reason, count in sorted(most_frequent(counts).items()))
    return family(CounterMetricFamily, name, what, ("run", "reason"), samples)


def _monitor(watched: MonitoredRun, left_out: int) -> Iterator[Metric]:
    run, view = watched.run, watched.view
    yield from gauge(
        "atoll_monitor_connected",
        "Whether the run's broker answers the monitor (1) or not (0).",
        watched.connected,
        run,
    )
    yield from counter(
        "atoll_monitor_unreadable_messages", "Messages that no correct peer sends.", view.unreadable, run
    )
    yield from counter(
        "atoll_monitor_passed_over_messages", "Messages of learners beyond the number it keeps.", view.passed_over, run
    )
    yield from counter("atoll_monitor_dropped_lines", "Lines missing in its journal.", watched.dropped_lines(), run)
    yield from gauge("atoll_monitor_left_out", "Learners without series of their own.", left_out, run)


def _run(watched: MonitoredRun) -> Iterator[Metric]:
    run, view, record = watched.run, watched.view, watched.record
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
        yield from gauge("atoll_run_founded_timestamp_seconds", "When the run was founded.", record.founded_at_s, run)
        yield from gauge("atoll_run_target_tokens", "Tokens to train; 0: no bound.", agreed.tokens_target, run)
        yield from gauge("atoll_shards", "Shards of the run.", agreed.shards, run)
    yield from gauge("atoll_run_over", "Whether the run has reached its end (1) or not (0).", watched.over, run)
    training = {name for name, one in view.learners.items() if watched.hearing.state(one) == "training"}
    still = not watched.over and making_of(view, watched.protocol, training).stands_still
    yield from gauge("atoll_run_still", "Whether a quorum trains and no version is made (1) or not (0).", still, run)
    yield from counter(
        "atoll_run_tokens", "Tokens of the run: those merged in the furthest fragment.", view.run_tokens, run
    )
    yield from counter(
        "atoll_merged_token_fragments", "Tokens merged, once per fragment.", view.token_fragments_merged, run
    )
    yield from counter("atoll_learners_present_seconds", "Learner-seconds present.", view.present_s, run)
    yield from counter("atoll_learners_stepping_seconds", "Learner-seconds spent stepping.", view.stepping_s, run)
    yield from gauge("atoll_synchronizers_live", "Synchronizer processes that own a shard.", live_hosts(watched), run)
    measured = view.validations[-1].fields if view.validations else None
    if measured is not None:
        yield from gauge(
            "atoll_validation_loss", "Loss of the merged model, in bits per byte.", measured.bits_per_byte, run
        )
        yield from gauge("atoll_validation_at_tokens", "Run tokens at that measurement.", measured.run_tokens, run)


def _rounds(watched: MonitoredRun) -> Iterator[Metric]:
    run, view, times = watched.run, watched.view, watched.times
    yield from counter("atoll_commits", "Commits, over all fragments.", view.commits, run)
    newest_s = max(times.committed_at_s.values(), default=None)
    yield from gauge("atoll_last_commit_timestamp_seconds", "When a commit was last made.", newest_s, run)
    phases = HistogramMetricFamily("atoll_round_phase_seconds", "Time in a phase of a round.", labels=("run", "phase"))
    for name, histogram in times.phases.items():
        phases.add_metric([run, name], buckets=histogram.buckets(), sum_value=histogram.sum_s)
    yield phases
    ends = Counter[str]()
    for end, count in view.sums.ends.items():
        ends[end if end in ENDS else OTHER] += count
    yield by_reason("atoll_round_ends", "Rounds by what ended them.", ends, run)
    yield from counter("atoll_contributions_merged", "Contributions merged.", view.sums.contributions, run)
    yield from counter("atoll_contributions_late", "Of those, made on an older version.", view.sums.late, run)
    yield by_reason("atoll_contributions_refused", "Contributions refused, by reason.", view.refused_by_reason, run)
    clipped = sum(clips.count for clips in view.sums.clipped.values())
    yield from counter("atoll_contributions_clipped", "Contributions folded at less than their length.", clipped, run)
    yield by_reason("atoll_junk_messages", "Messages that shards dropped, by reason.", view.junk, run)
    yield from counter("atoll_quarantines", "Learners put into quarantine.", len(view.quarantined), run)
    yield from counter("atoll_contribution_bytes", "Bytes of merged contributions.", view.bytes_merged, run)
    yield from counter("atoll_version_bytes", "Bytes of published versions.", view.bytes_published, run)


def _learners(watched: MonitoredRun, shown: Iterable[LearnerView]) -> Iterator[Metric]:
    """Yield what is true of learners now: of those that left nothing, of silent ones only that they are silent."""
    hearing = watched.hearing
    live = sum(hearing.hears(one) for one in watched.view.learners.values())
    yield from gauge("atoll_learners_live", "Learners heard lately.", live, watched.run)
    known = {one.learner: one for one in shown}
    beats = [
        (_labels(watched, one), one.latest.beat, hearing.hears(one))
        for one in known.values()
        if is_present(one) and one.latest is not None and one.latest.beat is not None
    ]
    up = [(labels, float(heard)) for labels, _, heard in beats]
    yield _of_learners("up", "Whether a learner is heard (1) or silent (0).", up)
    heard = [(labels, beat) for labels, beat, is_heard in beats if is_heard]
    for name, what, values in (
        ("loss", "Training loss of its last steps, in nats per token.", [beat.loss for _, beat in heard]),
        ("tokens_per_second", "Its speed.", [beat.tokens_per_s for _, beat in heard]),
        ("step_seconds", "Time of a step.", [beat.step_s for _, beat in heard]),
        ("overhead_ratio", "Share of a step that Atoll takes.", [beat.overhead for _, beat in heard]),
        ("lag_versions", "Versions that it is behind.", [beat.lag_versions for _, beat in heard]),
    ):
        yield _of_learners(name, what, zip((labels for labels, _ in heard), values, strict=True))
    isolated = {q.learner for q in watched.view.isolations if _is_isolated(known.get(q.learner), q.incarnation)}
    yield _of_learners(
        "quarantined",
        "Learners in quarantine (1).",
        ((_labels(watched, known[name]), 1.0) for name in sorted(isolated)),
    )


def _of_learners(name: str, what: str, samples: Iterable[tuple[Sequence[str], float | None]]) -> Metric:
    return family(GaugeMetricFamily, f"atoll_learner_{name}", what, OF_LEARNER, samples)


def _is_isolated(learner: LearnerView | None, incarnation: int) -> bool:
    """Return whether a learner's present incarnation was isolated: a new one begins anew, and one that left sends no more."""
    life = None if learner is None else learner.latest
    return life is not None and life.incarnation == incarnation and not life.left


def _learner_counters(watched: MonitoredRun, shown: Sequence[LearnerView]) -> Iterator[Metric]:
    every = [(_labels(watched, one), one) for one in shown]
    for name, what, values in (
        ("steps", "Steps trained.", [sum(life.steps for life in one.lives.values()) for one in shown]),
        ("tokens", "Tokens trained.", [one.tokens for one in shown]),
        ("incarnations", "Times that it joined.", [len(one.lives) for one in shown]),
        ("present_seconds", "Seconds present.", [one.present_s for one in shown]),
        ("stepping_seconds", "Seconds spent stepping.", [one.stepping_s for one in shown]),
    ):
        samples = zip((labels for labels, _ in every), values, strict=True)
        yield family(CounterMetricFamily, f"atoll_learner_{name}", what, OF_LEARNER, samples)
    moved = [(labels, total(life.meter.moved for life in one.lives.values())) for labels, one in every]
    directions = (*OF_LEARNER, "direction")
    for name, what, both in (
        ("payload", "Bytes given to its link.", [(sums.payload_up, sums.payload_down) for _, sums in moved]),
        ("wire", "Bytes that its sockets carried.", [(sums.wire_up, sums.wire_down) for _, sums in moved]),
    ):
        ways = (
            ([*labels, way], value)
            for (labels, _), pair in zip(moved, both, strict=True)
            for way, value in zip(("up", "down"), pair, strict=True)
        )
        yield family(CounterMetricFamily, f"atoll_learner_{name}_bytes", what, directions, ways)
    hosts = total(host.meter.moved for host in watched.view.hosts.values())
    yield family(
        CounterMetricFamily,
        "atoll_synchronizer_wire_bytes",
        "Bytes that the sockets of synchronizers carried.",
        ("run", "direction"),
        [([watched.run, "up"], hosts.wire_up), ([watched.run, "down"], hosts.wire_down)],
    )


def _fragments(watched: MonitoredRun) -> Iterator[Metric]:
    labels = ("run", "fragment")
    shown = [
        ([watched.run, str(number)], known, watched.times.committed_at_s.get(number, 0.0))
        for number, known in sorted(watched.view.fragments.items())[:FRAGMENTS_MAX]
    ]
    versions = ((of, known.version) for of, known, _ in shown)
    yield family(CounterMetricFamily, "atoll_fragment_commits", "Commits of a fragment.", labels, versions)
    merged = ((of, known.contributors) for of, known, _ in shown)
    yield family(
        GaugeMetricFamily, "atoll_fragment_contributors", "Contributors to its newest version.", labels, merged
    )
    times = ((of, at_s) for of, _, at_s in shown)
    what = "When that was committed."
    yield family(GaugeMetricFamily, "atoll_fragment_commit_timestamp_seconds", what, labels, times)


def _labels(watched: MonitoredRun, learner: LearnerView) -> list[str]:
    return [watched.run, learner.learner, watched.region_of(learner.learner)]


def broker_families(watched: MonitoredRun) -> Iterator[Metric]:
    """Yield the metric families of the run's streams, brokers, disks and certificates."""
    run = watched.run
    waiting = (([run], one.messages) for one in watched.streams if one.kind == QUEUE)
    yield family(GaugeMetricFamily, "atoll_queue_depth", "Contributions that wait for a shard.", RUN, waiting)
    streams = [([run, one.kind], one) for one in watched.streams]
    brokers = [([run, name], figures) for name, figures in watched.brokers.items()]
    up = ((labels, float(figures is not None)) for labels, figures in brokers)
    answering = [(labels, figures) for labels, figures in brokers if figures is not None]
    disks = [([run, path], disk) for path, disk in watched.disks.items()]
    ends = (([run, address], ends_at_s) for address, ends_at_s in watched.certificates.items())
    for name, what, field in (
        ("atoll_stream_messages", "Messages in a stream.", "messages"),
        ("atoll_stream_bytes", "Bytes in one copy of a stream.", "size_bytes"),
        ("atoll_stream_limit_bytes", "Bytes that one copy may have.", "bytes_max"),
        ("atoll_stream_copies", "Copies that a stream is to have.", "copies"),
        ("atoll_stream_copies_current", "Copies that have everything.", "copies_current"),
    ):
        yield family(GaugeMetricFamily, name, what, ("run", "stream"), _fields(streams, field))
    yield family(GaugeMetricFamily, "atoll_broker_up", "Whether a broker's endpoint answers.", ("run", "broker"), up)
    for kind, name, what, field in (
        (GaugeMetricFamily, "atoll_broker_memory_bytes", "Resident memory of a broker.", "memory_bytes"),
        (GaugeMetricFamily, "atoll_broker_cpu_ratio", "Processors that it uses: 1 is one core.", "cpu_ratio"),
        (GaugeMetricFamily, "atoll_broker_connections", "Its client connections.", "connections"),
        (GaugeMetricFamily, "atoll_broker_store_bytes", "Bytes that its streams take on disk.", "store_bytes"),
        (GaugeMetricFamily, "atoll_broker_store_limit_bytes", "Bytes that they may take.", "store_bytes_max"),
        (
            CounterMetricFamily,
            "atoll_broker_slow_consumers",
            "Connections that it cut for being slow.",
            "slow_consumers",
        ),
        (CounterMetricFamily, "atoll_broker_received_bytes", "Payload that it received.", "bytes_in"),
        (CounterMetricFamily, "atoll_broker_sent_bytes", "Payload that it sent.", "bytes_out"),
    ):
        yield family(kind, name, what, ("run", "broker"), _fields(answering, field))
    for name, what, field in (
        ("atoll_disk_size_bytes", "Size of a file system.", "size_bytes"),
        ("atoll_disk_free_bytes", "What is free of it.", "free_bytes"),
    ):
        yield family(GaugeMetricFamily, name, what, ("run", "path"), _fields(disks, field))
    name, what = "atoll_certificate_end_timestamp_seconds", "When a broker's certificate ends."
    yield family(GaugeMetricFamily, name, what, ("run", "address"), ends)


def _fields(rows: Iterable[tuple[Sequence[str], object]], field: str) -> Iterator[tuple[Sequence[str], float]]:
    return ((labels, getattr(figures, field)) for labels, figures in rows)
