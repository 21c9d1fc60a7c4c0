"""Everything Atoll raises on purpose: the tree below `AtollError`, each class with its meaning.

├── UserError          exit code 2, something the person can change: SettingsError, DataError, LayoutMismatch, IdentityTaken,
│                      AccessDenied, CheckpointError, RunWentBack
├── EnvironmentFault   exit code 3, the machine or the network: BrokerUnavailable, InUse, StorageFull, Quarantined,
│                      ArchiveUnavailable, RunReplaced, RunLost
├── BusError           an answer of one bus call besides its result: RecordConflict, BlobGone, BlobCorrupt, QueueFull
├── PeerMisbehaved     a message that no correct peer sends: FrameRejected
└── ProtocolMisuse     our own bug: an event the machine cannot accept
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

INTERRUPTED: Final = 130
_ALIKE: Final = 0.7
"""From which likeness on a name that there is may be the one that was meant."""

# A password may hold a slash, or an @ itself: so all goes to the last @ before white space or a comma and the next address.
# Rather a name too many than a password.
_ADDRESSES: Final = re.compile(r"//\S*")
_WITHOUT_SCHEME: Final = re.compile(r"""(?<![^\s'",(\[=])[^\s/:@'"]+:(?!//)[^\s'"]*@""")
"""What somebody typed who forgot the scheme."""
_ADDRESSES_IN_JSON: Final = re.compile(rb'//(?:\\.|[^\s"\\])*')
_NEXT_ADDRESS: Final = re.compile(r"""(?<=,)(?=['"]?\w[\w+.-]*://)""")


class AtollError(Exception):
    """Root of the tree: `what` happened, what was `got`, what is `allowed`, what `todo`.

    `text_of` tells the parts to a terminal, a JSON log holds them as they are, `on_one_line` makes a reason inside another log
    line. A command line prints no traceback and leaves with `exit_code`.
    """

    exit_code = 1

    def __init__(self, what: str, *, got: object = None, allowed: object = None, todo: str | None = None) -> None:
        self.what = what
        self.got = got
        self.allowed = allowed
        self.todo = todo
        super().__init__(self.explain())

    def parts(self) -> dict[str, str]:
        """Return the parts that are known, in order; no URL in them shows a password."""
        parts = {"what": self.what, "got": self.got, "allowed": self.allowed, "todo": self.todo}
        return {name: redact(str(part)) for name, part in parts.items() if part is not None}

    def explain(self) -> str:
        """Return the message for a terminal, one line per part that is known."""
        return text_of(self.parts())


def is_full(error: Exception) -> bool:
    """Return whether the operating system says that there is no room left, on the disk or within somebody's share of it."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


_LABELS: Final = {"got": "  got:     ", "allowed": "  allowed: ", "todo": "  to do:   "}


def text_of(parts: Mapping[str, str]) -> str:
    """Return the parts of an error as a terminal shows them."""
    return "\n".join(
        [parts.get("what", ""), *(label + parts[name] for name, label in _LABELS.items() if name in parts)]
    )


def parts_of(text: str) -> dict[str, str]:
    """Return the parts of an error that a terminal showed; of any other text the whole as `what`."""
    parts, last = {"what": ""}, "what"
    for number, line in enumerate(text.removeprefix("atoll: ").splitlines()):
        label = next((name for name, label in _LABELS.items() if line.startswith(label)), None)
        if label is not None:
            last, parts[label] = label, line.removeprefix(_LABELS[label])
        else:
            parts[last] += f"\n{line}" if number else line
    return parts


def on_one_line(text: str) -> str:
    """Return a message of several lines as one, for a log."""
    return "; ".join(line.strip() for line in text.splitlines()) if "\n" in text else text


def for_a_terminal(text: str) -> str:
    """Return a text whose control characters are written out: a name from a file or a peer must not move the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def exit_code_of(error: BaseException) -> int:
    """Return what a program leaves with: the code of our own errors, 130 after Ctrl-C, 1 for anything else."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_code if isinstance(error, AtollError) else AtollError.exit_code


def redact(value: Any) -> Any:  # noqa: ANN401  (whatever a setting holds)
    """Return `value` with the user part of any URL struck out, in each text of a list; what is neither as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(redact(each) for each in value)
    if not isinstance(value, str):
        return value
    return _WITHOUT_SCHEME.sub("***@", _ADDRESSES.sub(lambda found: _strike(found[0]), value))


def redact_json(encoded: bytes) -> bytes:
    """Return JSON with the user part of any URL in its texts struck out; no text ends elsewhere for it."""
    return _ADDRESSES_IN_JSON.sub(lambda found: _strike(found[0].decode("latin-1")).encode("latin-1"), encoded)


def _strike(addresses: str) -> str:
    return "".join(_strike_one(each) for each in _NEXT_ADDRESS.split(addresses))


def _strike_one(address: str) -> str:
    scheme, slashes, rest = address.partition("//")
    _, at, host = rest.rpartition("@")
    return f"{scheme}{slashes}***@{host}" if at else address


class UserError(AtollError):
    """Something the person can change."""

    exit_code = 2


class SettingsError(UserError):
    """A setting is unknown, out of range or contradicts another. `setting` is its dotted name, if the error is of one alone."""

    def __init__(
        self, what: str, *, got: object = None, allowed: object = None, todo: str | None = None, setting: str = ""
    ) -> None:
        self.setting = setting
        super().__init__(what, got=got, allowed=allowed, todo=todo)

    @classmethod
    def unknown(cls, name: str, names: Sequence[str], *, todo: str = "") -> SettingsError:
        """Return that a section has `names` and not this dotted one. Its value stays unsaid: it may be a secret."""
        section, dot, leaf = name.rpartition(".")
        near = get_close_matches(leaf, names, 1, _ALIKE)
        meant = f"did you mean {section}{dot}{near[0]}?" if near else ""
        said = " ".join(filter(None, (meant, todo)))
        return cls(f"unknown setting {name}", allowed=", ".join(names), todo=said or None, setting=name)


class DataError(UserError):
    """A text, token shard or corpus cannot be used."""


class LayoutMismatch(UserError):
    """This model is not the run's model."""


class IdentityTaken(UserError):
    """A live learner already answers to this id."""


class AccessDenied(UserError):
    """The broker does not let this identity in, or does not let it do that."""


class CheckpointError(UserError):
    """A checkpoint is truncated, foreign or damaged."""


class EnvironmentFault(AtollError):
    """The machine or the network, not the person."""

    exit_code = 3


class BrokerUnavailable(EnvironmentFault):
    """No broker answers, it is too old, or JetStream is off."""


class InUse(EnvironmentFault):
    """Another process has the port, the store or the folder."""


class StorageFull(EnvironmentFault):
    """A disk or a stream has no room left."""


class Quarantined(EnvironmentFault):
    """Shards refuse what this learner sends: its results cannot be used."""


class ArchiveUnavailable(EnvironmentFault):
    """The archive cannot be reached, read or written."""


class RunReplaced(EnvironmentFault):
    """The broker holds no such run, or another founding of it than this process joined."""


class RunWentBack(UserError):
    """The broker's store is older than what this process has had from it: going on would mix two models."""


class RunLost(EnvironmentFault):
    """The broker answers, and its store has lost a part of the run."""


class BusError(AtollError):
    """An answer of one bus call besides its result."""


class RecordConflict(BusError):
    """Compare-and-set lost: someone else wrote first."""


class BlobGone(BusError):
    """The chunks were purged or never completed."""


class BlobCorrupt(BusError):
    """The bytes do not match their digest."""


class QueueFull(BusError):
    """The work queue refuses more for this subject."""


class PeerMisbehaved(AtollError):
    """A message that no correct peer sends."""


class FrameRejected(PeerMisbehaved):
    """A tensor frame is malformed, oversized or not finite. `reason` is a short stable word for counters."""

    def __init__(self, reason: str, what: str, *, got: object = None, allowed: object = None) -> None:
        self.reason = reason
        super().__init__(what, got=got, allowed=allowed)


class ProtocolMisuse(AtollError):
    """Our own bug: an event the machine cannot accept."""


EXPECTED: Final = (UserError, EnvironmentFault, BusError, PeerMisbehaved)
"""The doing of a person, a machine or a peer, and no bug of ours."""


def errors_in(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, and those in the groups inside; of any other error itself."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for each in error.exceptions:
        yield from errors_in(each)
