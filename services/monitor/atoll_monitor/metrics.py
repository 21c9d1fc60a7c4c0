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
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from atoll.run.links import total
from atoll.run.process_views import LearnerView
from atoll.run.standing import making_of
from atoll.run.view import OTHER
from atoll.wire.traffic import LinkTraffic
from atoll_monitor.monitored_run import MonitoredRun

LEARNERS_MAX: Final = 256
FRAGMENTS_MAX: Final = 256
REASONS_MAX: Final = 32
ENDS: Final = frozenset({"all answered", "grace over", "nobody left"})
"""Ends of a round in a run whose shards are as old as the monitor; anything else is counted as `OTHER`."""
RUN: Final = ("run",)
OF_LEARNER: Final = ("run", "learner", "region")
_STREAM: Final = ("run", "stream")
_BROKER: Final = ("run", "broker")
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


def gauge(name: str, what: str, value: float | None, run: str) -> Iterator[Metric]:
    """Yield a gauge of the run; nothing while its value is unknown."""
    if value is not None:
        family = GaugeMetricFamily(name, what, labels=RUN)
        family.add_metric([run], float(value))
        yield family


def counter(name: str, what: str, value: float, run: str) -> Iterator[Metric]:
    """Yield a counter of the run; its name has no `_total`, which the format adds."""
    family = CounterMetricFamily(name, what, labels=RUN)
    family.add_metric([run], float(value))
    yield family


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of the `REASONS_MAX` most frequent reasons, and the sum of the others."""
    most = Counter(counts).most_common(REASONS_MAX)
    rest = sum(counts.values()) - sum(count for _, count in most)
    return dict(most) | ({OTHER: rest + dict(most).get(OTHER, 0)} if rest else {})


def by_reason(name: str, what: str, counts: Mapping[str, int], run: str) -> Iterator[Metric]:
    """Yield a counter per reason."""
    family = CounterMetricFamily(name, what, labels=("run", "reason"))
    for reason, count in sorted(most_frequent(counts).items()):
        family.add_metric([run, reason], count)
    yield family


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
    measured = view.validations[-1].validation if view.validations else None
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
    yield from by_reason("atoll_round_ends", "Rounds by what ended them.", ends, run)
    yield from counter("atoll_contributions_merged", "Contributions merged.", view.sums.contributions, run)
    yield from counter("atoll_contributions_late", "Of those, made on an older version.", view.sums.late, run)
    yield from by_reason("atoll_contributions_refused", "Contributions refused, by reason.", view.refused, run)
    clipped = sum(clips.count for clips in view.sums.clipped.values())
    yield from counter("atoll_contributions_clipped", "Contributions folded at less than their length.", clipped, run)
    yield from by_reason("atoll_junk_messages", "Messages that shards dropped, by reason.", view.junk, run)
    yield from counter("atoll_quarantines", "Learners put into quarantine.", len(view.quarantined), run)
    yield from counter("atoll_contribution_bytes", "Bytes of merged contributions.", view.bytes_merged, run)
    yield from counter("atoll_version_bytes", "Bytes of published versions.", view.bytes_published, run)


def _learners(watched: MonitoredRun, shown: Iterable[LearnerView]) -> Iterator[Metric]:
    """Yield what is true of learners now: of those that left nothing, of silent ones only that they are silent."""
    hearing = watched.hearing
    live = GaugeMetricFamily("atoll_learners_live", "Learners heard lately.", labels=RUN)
    live.add_metric([watched.run], sum(hearing.hears(one) for one in watched.view.learners.values()))
    yield live
    up = GaugeMetricFamily("atoll_learner_up", "Whether a learner is heard (1) or silent (0).", labels=OF_LEARNER)
    texts = {
        "loss": ("atoll_learner_loss", "Training loss of its last steps, in nats per token."),
        "pace": ("atoll_learner_tokens_per_second", "Its speed."),
        "step": ("atoll_learner_step_seconds", "Time of a step."),
        "overhead": ("atoll_learner_overhead_ratio", "Share of a step that Atoll takes."),
        "lag": ("atoll_learner_lag_versions", "Versions that it is behind."),
    }
    gauges = {key: GaugeMetricFamily(name, what, labels=OF_LEARNER) for key, (name, what) in texts.items()}
    for one in shown:
        life = one.latest
        if not is_present(one) or life is None or life.beat is None:
            continue
        labels, beat = _labels(watched, one), life.beat
        heard = hearing.hears(one)
        up.add_metric(labels, float(heard))
        if not heard:
            continue
        values = {"pace": beat.tokens_per_s, "step": beat.step_s, "overhead": beat.overhead, "lag": beat.lag_versions}
        for key, value in values.items():
            gauges[key].add_metric(labels, value)
        if beat.loss is not None:
            gauges["loss"].add_metric(labels, beat.loss)
    yield up
    yield from gauges.values()
    isolated = GaugeMetricFamily("atoll_learner_quarantined", "Learners in quarantine (1).", labels=OF_LEARNER)
    known = {one.learner: one for one in shown}
    for name in sorted(
        {each.learner for each in watched.view.quarantined if _is_isolated(known.get(each.learner), each.incarnation)}
    ):
        isolated.add_metric(_labels(watched, known[name]), 1.0)
    yield isolated


def _is_isolated(learner: LearnerView | None, incarnation: int) -> bool:
    """Return whether a learner's present incarnation was isolated: a new one begins anew, and one that left sends no more."""
    life = None if learner is None else learner.latest
    return life is not None and life.incarnation == incarnation and not life.left


def _learner_counters(watched: MonitoredRun, shown: Iterable[LearnerView]) -> Iterator[Metric]:
    """Yield what learners have done in all their incarnations."""
    steps = CounterMetricFamily("atoll_learner_steps", "Steps trained.", labels=OF_LEARNER)
    tokens = CounterMetricFamily("atoll_learner_tokens", "Tokens trained.", labels=OF_LEARNER)
    lives = CounterMetricFamily("atoll_learner_incarnations", "Times that it joined.", labels=OF_LEARNER)
    present = CounterMetricFamily("atoll_learner_present_seconds", "Seconds present.", labels=OF_LEARNER)
    stepping = CounterMetricFamily("atoll_learner_stepping_seconds", "Seconds spent stepping.", labels=OF_LEARNER)
    direction = (*OF_LEARNER, "direction")
    payload = CounterMetricFamily("atoll_learner_payload_bytes", "Bytes given to its link.", labels=direction)
    wire = CounterMetricFamily("atoll_learner_wire_bytes", "Bytes that its sockets carried.", labels=direction)
    for one in shown:
        labels = _labels(watched, one)
        moved: LinkTraffic = total(life.meter.moved for life in one.lives.values())
        steps.add_metric(labels, sum(life.steps for life in one.lives.values()))
        tokens.add_metric(labels, one.tokens)
        lives.add_metric(labels, len(one.lives))
        present.add_metric(labels, one.present_s)
        stepping.add_metric(labels, one.stepping_s)
        for family, up, down in (
            (payload, moved.payload_up, moved.payload_down),
            (wire, moved.wire_up, moved.wire_down),
        ):
            family.add_metric([*labels, "up"], up)
            family.add_metric([*labels, "down"], down)
    yield from (steps, tokens, lives, present, stepping, payload, wire)
    hosts = CounterMetricFamily(
        "atoll_synchronizer_wire_bytes", "Bytes that the sockets of synchronizers carried.", labels=("run", "direction")
    )
    moved = total(host.meter.moved for host in watched.view.hosts.values())
    hosts.add_metric([watched.run, "up"], moved.wire_up)
    hosts.add_metric([watched.run, "down"], moved.wire_down)
    yield hosts


def _fragments(watched: MonitoredRun) -> Iterator[Metric]:
    labels = ("run", "fragment")
    versions = CounterMetricFamily("atoll_fragment_commits", "Commits of a fragment.", labels=labels)
    merged = GaugeMetricFamily("atoll_fragment_contributors", "Contributors to its newest version.", labels=labels)
    at_s = GaugeMetricFamily("atoll_fragment_commit_timestamp_seconds", "When that was committed.", labels=labels)
    for number, known in sorted(watched.view.fragments.items())[:FRAGMENTS_MAX]:
        of = [watched.run, str(number)]
        versions.add_metric(of, known.version)
        merged.add_metric(of, known.contributors)
        at_s.add_metric(of, watched.times.committed_at_s.get(number, 0.0))
    yield from (versions, merged, at_s)


def _labels(watched: MonitoredRun, learner: LearnerView) -> list[str]:
    return [watched.run, learner.learner, watched.region_of(learner.learner)]


def broker_families(watched: MonitoredRun) -> Iterator[Metric]:
    """Yield the metric families of the run's streams and brokers."""
    yield from _streams(watched)
    yield from _servers(watched)
    yield from _disks(watched)
    yield from _certificates(watched)


def _streams(watched: MonitoredRun) -> Iterator[Metric]:
    depth = GaugeMetricFamily("atoll_queue_depth", "Contributions that wait for a shard.", labels=("run",))
    texts = (
        ("messages", "atoll_stream_messages", "Messages in a stream."),
        ("size_bytes", "atoll_stream_bytes", "Bytes in one copy of a stream."),
        ("bytes_max", "atoll_stream_limit_bytes", "Bytes that one copy may have."),
        ("copies", "atoll_stream_copies", "Copies that a stream is to have."),
        ("copies_current", "atoll_stream_copies_current", "Copies that have everything."),
    )
    made = {key: GaugeMetricFamily(name, what, labels=_STREAM) for key, name, what in texts}
    for one in watched.streams:
        for key, family in made.items():
            family.add_metric([watched.run, one.kind], getattr(one, key))
        if one.kind == QUEUE:
            depth.add_metric([watched.run], one.messages)
    yield from (depth, *made.values())


def _servers(watched: MonitoredRun) -> Iterator[Metric]:
    up = GaugeMetricFamily("atoll_broker_up", "Whether a broker's endpoint answers.", labels=_BROKER)
    gauges = (
        ("memory_bytes", "atoll_broker_memory_bytes", "Resident memory of a broker."),
        ("cpu_ratio", "atoll_broker_cpu_ratio", "Processors that it uses: 1 is one core."),
        ("connections", "atoll_broker_connections", "Its client connections."),
        ("store_bytes", "atoll_broker_store_bytes", "Bytes that its streams take on disk."),
        ("store_bytes_max", "atoll_broker_store_limit_bytes", "Bytes that they may take."),
    )
    made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        key: GaugeMetricFamily(name, what, labels=_BROKER) for key, name, what in gauges
    }
    counters = (
        ("slow_consumers", "atoll_broker_slow_consumers", "Connections that it cut for being slow."),
        ("bytes_in", "atoll_broker_received_bytes", "Payload that it received."),
        ("bytes_out", "atoll_broker_sent_bytes", "Payload that it sent."),
    )
    made |= {key: CounterMetricFamily(name, what, labels=_BROKER) for key, name, what in counters}
    for name, figures in watched.brokers.items():
        up.add_metric([watched.run, name], float(figures is not None))
        for key, family in made.items() if figures is not None else ():
            family.add_metric([watched.run, name], float(getattr(figures, key)))
    yield from (up, *made.values())


def _disks(watched: MonitoredRun) -> Iterator[Metric]:
    size = GaugeMetricFamily("atoll_disk_size_bytes", "Size of a file system.", labels=("run", "path"))
    free = GaugeMetricFamily("atoll_disk_free_bytes", "What is free of it.", labels=("run", "path"))
    for path, disk in watched.disks.items():
        size.add_metric([watched.run, path], disk.size_bytes)
        free.add_metric([watched.run, path], disk.free_bytes)
    yield from (size, free)


def _certificates(watched: MonitoredRun) -> Iterator[Metric]:
    ends = GaugeMetricFamily(
        "atoll_certificate_end_timestamp_seconds", "When a broker's certificate ends.", labels=("run", "address")
    )
    for address, ends_at_s in watched.certificates.items():
        ends.add_metric([watched.run, address], ends_at_s)
    yield ends
