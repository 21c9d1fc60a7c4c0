"""One type for each quantity that a message or a record may hold: its form and its bound.

A peer may claim anything. So every number, id and digest that comes from outside has one of these types, and decoding refuses
what does not fit (`atoll.base.parsing`). Five rules follow from how the numbers are used:

* **A sum never leaves the bound that its readers check.** A sum over peers' claims saturates (`at_most`): two absurd claims
  would otherwise make a record that no process can read.
* **An id fits into a subject**, a filter of a purge and a file name; no id begins with a `-`.
* **Text for people has no control and format characters**: nothing that a peer writes can move a cursor, or hides.
* **A number fits wherever a reader puts it.** A float is finite and so small that a sum of squares is, a moment is one that a
  calendar has.
* **A counter that its reader counts on from has room left.** Such a field is marked `COUNTED`: of a peer's record half the
  bound is taken (`exhausted_counter`), and a record beyond it is replaced like one that cannot be read.

Bounds leave room: the largest token count of one incarnation is a hundred times what the largest run of 2025 trained on.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

FRAGMENTS_MAX: Final = 4096
LEARNERS_MAX: Final = 4096
VERSION_MAX: Final = 1 << 40
EPOCH_MAX: Final = 1 << 53
INCARNATION_MAX: Final = 1 << 53
"""Both: as many as a broker has numbers for messages. Where a record was lost, the next one is counted from those."""
PUSH_MAX: Final = 1 << 40
STEPS_MAX: Final = 1 << 40
TOKENS_MAX: Final = 1 << 48
"""Of one incarnation."""
RUN_TOKENS_MAX: Final = 1 << 53
"""Of all incarnations together: exact as a double, too."""
TOKEN_FRAGMENTS_MAX: Final = 1 << 60
"""Of one incarnation: its tokens, once per fragment."""
SIZE_BYTES_MAX: Final = 1 << 46
COUNT_MAX: Final = 1 << 53
TOTAL_MAX: Final = 1 << 60
"""Of the claims of one round's contributors together: `LEARNERS_MAX` times what each may claim."""
SECONDS_MAX: Final = 1e12
MOMENT_MAX: Final = 253_402_214_400.0
"""The last day of the year 9999, in seconds since the epoch: no calendar of ours goes further."""
FIGURE_MAX: Final = 1e100
"""More than a float32 can hold, and so little that its square, or a sum over a run, is finite."""
NAME_CHARS_MAX: Final = 256
DESCRIPTION_CHARS_MAX: Final = 1024
STEM_CHARS_MAX: Final = 512

COUNTED: Final = Meta(extra={"counted": True})
"""Marks a number in a record that its reader counts on from."""
COUNTED_SHARE: Final = 2
"""Of the bound of a counted number: the part that may have been used up when it is read."""

_ONLY: Final = r"$(?!\n)"
"""The end of a text: `$` alone would also match before a last newline."""
_UNSEEN: Final = (
    r"\x00-\x1f\x7f-\x9f\u2028\u2029"  # control characters, ends of lines
    # Unicode's format characters (Cf): zero-width ones, byte order marks, turns of direction, tags.
    r"\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"
)
UNSEEN_BEYOND: Final = (
    r"\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
"""The rest of them. JavaScript, in whose dialect schemas write patterns, names these in no way that all its readers take."""
_READABLE: Final = rf"^[^{_UNSEEN}{UNSEEN_BEYOND}]*{_ONLY}"
ID: Final = "[A-Za-z0-9_][A-Za-z0-9_-]{0,63}"
"""The pattern of an id. One with a `-` first would be an option to a program that is given it."""
ID_IN_WORDS: Final = "1 to 64 letters, digits, '-' or '_', and no '-' first"

FragmentNumber = Annotated[int, Meta(ge=0, lt=FRAGMENTS_MAX)]
ShardNumber = Annotated[int, Meta(ge=0, lt=FRAGMENTS_MAX)]
Version = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
Epoch = Annotated[int, Meta(ge=0, le=EPOCH_MAX)]
Incarnation = Annotated[int, Meta(ge=0, le=INCARNATION_MAX)]
PushNumber = Annotated[int, Meta(ge=0, le=PUSH_MAX)]
Steps = Annotated[int, Meta(ge=0, le=STEPS_MAX)]
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
RunTokens = Annotated[int, Meta(ge=0, le=RUN_TOKENS_MAX)]
TokenFragments = Annotated[int, Meta(ge=0, le=TOKEN_FRAGMENTS_MAX)]
SizeBytes = Annotated[int, Meta(ge=0, le=SIZE_BYTES_MAX)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Total = Annotated[int, Meta(ge=0, le=TOTAL_MAX)]
Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]
Moment = Annotated[float, Meta(ge=0.0, le=MOMENT_MAX)]
"""When something happened, in seconds since the Unix epoch, by the clock of who says so."""
Figure = Annotated[float, Meta(ge=-FIGURE_MAX, le=FIGURE_MAX)]
"""Any measurement that has no bound of its own: a loss, a norm, a cosine, a difference of two times."""

PeerId = Annotated[str, Meta(pattern=f"^{ID}{_ONLY}")]
"""The id of a learner, a synchronizer process, a run or a founding: one level of a subject."""
AccountKey = Annotated[str, Meta(pattern=f"^{ID}/[0-9]{{1,16}}{_ONLY}")]
"""`learner/incarnation`."""
WriterNonce = Annotated[str, Meta(pattern=rf"^{ID}(\.{ID})?{_ONLY}")]
"""What keeps two writers of one version apart: one or two levels of a subject."""
Stem = Annotated[str, Meta(max_length=STEM_CHARS_MAX, pattern=rf"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*{_ONLY}")]
"""The first levels of a blob's subjects."""
Digest = Annotated[str, Meta(pattern=f"^([0-9a-f]{{32}}|[0-9a-f]{{64}}){_ONLY}")]
"""An xxh3-128 in hex, or a BLAKE3 where messages are signed."""
ObjectDigest = Annotated[str, Meta(pattern=f"^[0-9a-f]{{64}}{_ONLY}")]
"""A blake2b-256 in hex: the name of an object in an archive."""
Fingerprint = Annotated[str, Meta(pattern=f"^[0-9a-f]{{16}}{_ONLY}")]
"""The fingerprint of a layout."""
Word = Annotated[str, Meta(pattern=f"^[a-z0-9_]{{0,64}}{_ONLY}")]
"""A short stable word for counters: the reason of a refusal, the kind of an event."""
Text = Annotated[str, Meta(max_length=NAME_CHARS_MAX, pattern=_READABLE)]
"""Words for people: no control characters, and no format characters (nobody sees them, or they turn the writing)."""
Description = Annotated[str, Meta(max_length=DESCRIPTION_CHARS_MAX, pattern=_READABLE)]
"""The same, with room for what a model is."""


def at_most(bound: int, number: int) -> int:
    """Return `number`, or `bound` if that is less: sums over claims saturate."""
    return min(number, bound)
