"""Metrics as flat tables of numbers: with Prometheus' names for the journal, with tags for sinks. Pure.

A sink has one curve a tag: `learner_loss/a`, `round_phase_seconds_sum/merge`. A tag has the values of its labels and not their
names, without the run, which is the sink's own. Buckets of histograms are no curves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

PREFIX = "atoll_"


def named(families: Iterable[Metric]) -> dict[str, float]:
    """Return every sample by its name and labels, as in `atoll_learner_loss{learner="a"}`, without the run."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items() if key != "run" and value)
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    return found


def tagged(families: Iterable[Metric]) -> dict[str, float]:
    """Return every sample that is a curve, by its tag; what is no finite number is left out."""
    found = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_info")) and math.isfinite(sample.value):
                found[_tag(sample.name, sample.labels)] = float(sample.value)
    return found


def _tag(name: str, labels: Mapping[str, str]) -> str:
    rest = [value.replace("/", "_") for key, value in labels.items() if key != "run" and value]
    return "/".join((name.removeprefix(PREFIX), *rest))
