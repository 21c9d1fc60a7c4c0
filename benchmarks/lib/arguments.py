"""The kinds of numbers that command lines of benchmarks take; argparse refuses every other with what was got."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    """Return a finite number above 0."""
    if not 0.0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return number


def count(text: str) -> int:
    """Return a whole number from 1 on."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def natural(text: str) -> int:
    """Return a whole number from 0 on: a seed, an index."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number
