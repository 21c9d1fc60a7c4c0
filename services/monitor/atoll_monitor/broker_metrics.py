"""Metrics of what carries the run: its streams, its brokers' processes, their disks, their certificates. Pure, as `metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from atoll_monitor.watched import Watched

_STREAM: Final = ("run", "stream")
_BROKER: Final = ("run", "broker")
QUEUE: Final = "UPM"
"""The stream that is the work queue of contributions: what is in it waits for a shard."""


def broker_families(watched: Watched) -> Iterator[Metric]:
    """Yield the metric families of the run's streams and brokers."""
    yield from _streams(watched)
    yield from _servers(watched)
    yield from _disks(watched)
    yield from _certificates(watched)


def _streams(watched: Watched) -> Iterator[Metric]:
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


def _servers(watched: Watched) -> Iterator[Metric]:
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


def _disks(watched: Watched) -> Iterator[Metric]:
    size = GaugeMetricFamily("atoll_disk_size_bytes", "Size of a file system.", labels=("run", "path"))
    free = GaugeMetricFamily("atoll_disk_free_bytes", "What is free of it.", labels=("run", "path"))
    for path, disk in watched.disks.items():
        size.add_metric([watched.run, path], disk.size_bytes)
        free.add_metric([watched.run, path], disk.free_bytes)
    yield from (size, free)


def _certificates(watched: Watched) -> Iterator[Metric]:
    ends = GaugeMetricFamily(
        "atoll_certificate_end_timestamp_seconds", "When a broker's certificate ends.", labels=("run", "address")
    )
    for address, ends_at_s in watched.certificates.items():
        ends.add_metric([watched.run, address], ends_at_s)
    yield ends
