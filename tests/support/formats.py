"""What each format promises: the row that a new format adds beside its file and its line in the registry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """What may never change of a format, and how well it keeps numbers.

    Attributes:
        number: its number on the wire.
        block_bytes: the payload of a block of 128 numbers, scale and all.
        error: the largest error, as a share of the largest magnitude of a block.
        digest: xxh3 of the payload of a fixed vector: the bits on the wire.
    """

    number: int
    block_bytes: int
    error: float
    digest: str


RETIRED = {3}
"""Numbers of formats that are gone: 3 was int8 with scales of float32."""
FACTS = {
    "f32": FormatFacts(number=1, block_bytes=512, error=0.0, digest="f4ac6294d26d3f64"),
    "bf16": FormatFacts(number=2, block_bytes=256, error=2.0**-8, digest="298bb41db6bb267e"),
    "int8": FormatFacts(number=4, block_bytes=130, error=0.505 / 127, digest="e27c52d913ae6f1c"),
    "int4": FormatFacts(number=5, block_bytes=66, error=0.505 / 7, digest="4834dc46d9c91482"),
    "e3m0": FormatFacts(number=6, block_bytes=66, error=0.2525, digest="6e9be26c8ae00272"),
}
