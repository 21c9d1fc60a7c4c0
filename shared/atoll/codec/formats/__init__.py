"""The formats of vectors on the wire, one file each: from exact to an eighth of the size.

To add one, touch three places:

1. a file beside these with the arithmetic of a number (its three forms) and its facts (`interface.Format`); at its top it
   imports NumPy alone, for formats are loaded where nothing else is installed;
2. its row in `FORMATS` below;
3. its row of promises in `tests/support/formats.py`: `tests/unit/test_formats.py` then holds all forms against it.

Everything else (frames, folds, deltas,
devices, settings, the planner, benchmarks) reads the formats from here.
"""

from __future__ import annotations

from typing import Final

from atoll.base.errors import SettingsError
from atoll.codec.formats.bf16 import BF16
from atoll.codec.formats.e3m0 import E3M0
from atoll.codec.formats.f32 import F32
from atoll.codec.formats.int4 import INT4
from atoll.codec.formats.int8 import INT8
from atoll.codec.formats.interface import Format
from atoll.protocol.settings import ProtocolSettings

__all__ = ["BF16", "E3M0", "F32", "FORMATS", "INT4", "INT8", "KEYFRAME", "Format", "check_codecs", "format_of"]

FORMATS: Final = {each.name: each for each in (F32, BF16, INT8, INT4, E3M0)}
KEYFRAME: Final = F32.name
"""What key frames are encoded in: exactly."""


def format_of(codec: str, setting: str = "protocol.codec_up") -> Format:
    """Return the format of that name; raise `SettingsError` if there is none."""
    if codec not in FORMATS:
        raise SettingsError("unknown codec", got=codec, allowed=", ".join(FORMATS), todo=f"set {setting}")
    return FORMATS[codec]


def check_codecs(settings: ProtocolSettings) -> ProtocolSettings:
    """Return the settings of a run; raise `SettingsError` if they name a format that does not exist."""
    format_of(settings.codec_up, "protocol.codec_up")
    format_of(settings.codec_down, "protocol.codec_down")
    return settings
