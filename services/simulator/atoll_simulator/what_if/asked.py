"""What a person asks for, as text: `protocol.quorum=2`, `learner-2=10Mbit/s,80ms`. Refuses what a recording cannot answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, get_type_hints

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.units import rate
from atoll.codec import format_of
from atoll.protocol.settings import ProtocolSettings
from atoll_simulator.scenario import LATENCY_S_MAX
from atoll_simulator.what_if.recording import RecordedLink, Recording
from atoll_simulator.what_if.replayed import Change

SETTINGS: Final = (
    "quorum",
    "grace_gamma",
    "grace_cap_steps",
    "overlap_steps",
    "interval_steps",
    "average_decay",
    "age_max",
    "silence_s",
    "shards",
    "ending",
    "codec_up",
    "codec_down",
)
"""Settings of rounds and bytes. What changes the learning itself (merging, outer rate) needs gradients: `atoll sim train`."""
_TRY_LEARNING: Final = "what changes the learning itself is tried in `atoll sim train`"
_DELAY: Final = re.compile(r"([0-9]*\.?[0-9]+)\s*(ms|s)")


def asked(recording: Recording, assignments: Iterable[str], links: Iterable[str]) -> Change:
    """Return the change that the texts ask for.

    Raises:
        SettingsError: a text is no setting or link, no what-if, or nobody's; or the agreement would not hold together.
    """
    settings = dict(_setting(text) for text in assignments)
    learners = len(recording.learners)
    msgspec.structs.replace(recording.settings, **settings).check(learners)
    return Change(settings, dict(_link(text, recording) for text in links))


def _setting(text: str) -> tuple[str, Any]:
    name, equals, told = text.partition("=")
    field = name.strip().removeprefix("protocol.")
    known = field in ProtocolSettings.__struct_fields__
    if equals and not known and "." not in field:
        raise SettingsError.unknown(f"protocol.{field}", SETTINGS, todo=_TRY_LEARNING)
    if not equals or field not in SETTINGS:
        raise SettingsError(
            "this is no what-if that a recording can answer",
            got=f"--set {text}",
            allowed=", ".join(f"protocol.{each}=..." for each in SETTINGS),
            todo=_TRY_LEARNING,
        )
    try:
        value = msgspec.convert(told.strip(), get_type_hints(ProtocolSettings)[field], strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"protocol.{field} cannot have such a value", got=told, allowed=str(error)) from error
    if field.startswith("codec_"):
        format_of(value)
    return field, value


def _link(text: str, recording: Recording) -> tuple[str, RecordedLink]:
    name, _, told = text.partition("=")
    words = [word.strip() for word in told.split(",")]
    names = [learner.name for learner in recording.learners]
    if name not in names:
        raise SettingsError("--link names no learner of the recording", got=text, allowed=", ".join(names))
    delay = _DELAY.fullmatch(words[1]) if len(words) == 2 else None
    latency_s = float(delay[1]) * (0.001 if delay[2] == "ms" else 1.0) if delay else -1.0
    if not 0.0 <= latency_s <= LATENCY_S_MAX:
        raise SettingsError(
            "--link is not understood",
            got=text,
            allowed=f"a rate and a delay each way of at most {LATENCY_S_MAX:g} s, as {names[0]}=10Mbit/s,80ms",
        )
    bits_s = rate(re.sub(r"(?<=bit)/s$", "", words[0]), "--link")
    return name, RecordedLink(latency_s, bits_s / 8.0)
