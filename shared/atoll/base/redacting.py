"""Strikes out what may be a secret in a text for people: the user part of a URL, where a password may stand."""

from __future__ import annotations

import re
from typing import Any, Final

# A password may hold a slash, or an @ itself: so all goes to the last @ before white space or a comma and the next address.
# Rather a name too many than a password.
_USER_PART: Final = re.compile(r"//(?:(?!,\w[\w+.-]*://)\S)*@")
_USER_PART_IN_JSON: Final = re.compile(rb'//(?:(?!,\w[\w+.-]*://)(?:\\.|[^\s"\\]))*@')


def redacted(text: Any) -> Any:  # noqa: ANN401  (whatever a setting holds)
    """Return `text` with the user part of any URL struck out; what is no text as it is."""
    return _USER_PART.sub("//***@", text) if isinstance(text, str) else text


def redacted_json(encoded: bytes) -> bytes:
    """Return JSON with the user part of any URL in its texts struck out; no text ends elsewhere for it."""
    return _USER_PART_IN_JSON.sub(b"//***@", encoded)
