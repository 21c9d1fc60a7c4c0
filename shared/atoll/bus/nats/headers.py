"""The header block of a message that comes in, read by our own rules: anybody who may write may write headers, too.

    NATS/1.0[ <status>[ <description>]]
    <name>: <value>
    ...

Only the broker speaks by a *status* (the end of a batch, no more messages, nobody there). nats-py takes a field of that name,
or a status in a message that somebody has stored, for the broker's word; and bytes that are no text end its read loop. So here
a status counts on the first line only, and never in a message that a stream has stored: the broker marks those with the
stream's name. Its own fields stand behind the writer's, and the last of a name counts.
"""

from __future__ import annotations

from typing import Final

STATUS: Final = "Status"
DESCRIPTION: Final = "Description"
STORED: Final = "Nats-Stream"
NOBODY: Final = "503"
"""With this status, and no body, the broker itself says on the answer's subject that nobody listens."""
_OF_THE_BROKER: Final = frozenset({STATUS.lower(), DESCRIPTION.lower()})
_STATUS_DIGITS: Final = 3


def read_headers(block: bytes) -> dict[str, str] | None:
    """Return the fields of a header block, with `STATUS` and `DESCRIPTION` where the broker speaks; None without a block.

    It raises nothing, whatever the bytes are.
    """
    if not block:
        return None
    first, *lines = block.split(b"\r\n")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        key = text_of(name).strip()
        if colon and key and key.lower() not in _OF_THE_BROKER:
            fields[key] = text_of(value).strip()
    status, _, description = text_of(first.partition(b" ")[2]).strip().partition(" ")
    if len(status) == _STATUS_DIGITS and status.isascii() and status.isdigit() and STORED not in fields:
        fields |= {STATUS: status} | ({DESCRIPTION: description.strip()} if description else {})
    return fields


def text_of(data: bytes) -> str:
    """Return bytes as text; what is no text becomes a mark."""
    return data.decode("utf-8", "replace")
