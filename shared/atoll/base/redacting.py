"""Strikes out what may be a secret in a text for people: the user part of a URL, where a password may stand."""

from __future__ import annotations

import re
from typing import Any, Final

# A password may hold a slash, or an @ itself: so all goes to the last @ before white space or a comma and the next address.
# Rather a name too many than a password.
_ADDRESSES: Final = re.compile(r"//\S*")
_WITHOUT_SCHEME: Final = re.compile(r"""(?<![^\s'",(\[=])[^\s/:@'"]+:(?!//)[^\s'"]*@""")
"""What somebody typed who forgot the scheme."""
_ADDRESSES_IN_JSON: Final = re.compile(rb'//(?:\\.|[^\s"\\])*')
_NEXT_ADDRESS: Final = re.compile(r"""(?<=,)(?=['"]?\w[\w+.-]*://)""")


def redacted(value: Any) -> Any:  # noqa: ANN401  (whatever a setting holds)
    """Return `value` with the user part of any URL struck out, in each text of a list; what is neither as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(redacted(each) for each in value)
    if not isinstance(value, str):
        return value
    return _WITHOUT_SCHEME.sub("***@", _ADDRESSES.sub(lambda found: _struck(found[0]), value))


def redacted_json(encoded: bytes) -> bytes:
    """Return JSON with the user part of any URL in its texts struck out; no text ends elsewhere for it."""
    return _ADDRESSES_IN_JSON.sub(lambda found: _struck(found[0].decode("latin-1")).encode("latin-1"), encoded)


def _struck(addresses: str) -> str:
    return "".join(_one_struck(each) for each in _NEXT_ADDRESS.split(addresses))


def _one_struck(address: str) -> str:
    scheme, slashes, rest = address.partition("//")
    _, at, host = rest.rpartition("@")
    return f"{scheme}{slashes}***@{host}" if at else address
