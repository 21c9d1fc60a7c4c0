"""Which tests run where, and which run at all where there is no time for all.

Tests of a module run on one worker, one after the other, because what one has made serves the next.

What a worker has compiled, traced, parsed or set up it has for itself. Spread over four workers, a module makes all of that
four times. A few modules share what they set up, and are together. Two have many long tests, which share nothing: each of
those is by itself, or one worker would be busy long after the others. Pages that share the machine's ports take turns.

xdist has groups of its own, by marks. With pytest 9.2 they hold nothing together, and nothing says so: xdist 3.8 writes a
test's group to where pytest reads its name no more. So the names of files decide here.
"""

from __future__ import annotations

import argparse
import functools
import re
import zlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from xdist.scheduler import LoadScopeScheduling

PAGES: Final = "test_documents"
APART: Final = "test_examples"
TOGETHER: Final = {
    **dict.fromkeys(("test_bus_cluster", "test_broker_status", "test_locked_cluster"), "cluster"),
    **dict.fromkeys(("test_dashboard", "test_dashboard_cluster", "test_hostile_names_in_pages"), "dashboard"),
    **dict.fromkeys(("test_records", "test_monitor", "test_prometheus"), "monitor"),
    **dict.fromkeys(("test_planted_causes", "test_planted_pages"), "planted"),
}
"""The group of a module that is not alone in it."""


@dataclass(frozen=True, slots=True)
class SuitePart:
    """About one of every `of_parts` tests; which, the names say, so a test's part is the same whatever else is chosen."""

    number: int
    of_parts: int

    @classmethod
    def of(cls, text: str) -> SuitePart:
        """Return the part that `K/N` names, K from 1 to N.

        >>> SuitePart.of("2/4")
        SuitePart(number=2, of_parts=4)

        Raises `argparse.ArgumentTypeError` for what is no part.
        """
        found = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed is K/N with K from 1 to N, for example 2/4")
        return cls(int(found[1]), int(found[2]))

    def has(self, nodeid: str) -> bool:
        """Return whether the test with this name is in this part."""
        return zlib.crc32(nodeid.encode()) % self.of_parts == self.number - 1


class ModuleScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker all tests of a group at once."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Return the group of the test with this name.

    >>> group_of("tests/unit/test_formats.py::test_a_name[f32::x]")
    'tests/unit/test_formats.py'
    >>> group_of("tests/integration/test_dashboard.py::test_a_page")
    'dashboard'
    >>> group_of("tests/integration/test_examples.py::test_a_loop[cnn.py]")
    'tests/integration/test_examples.py::test_a_loop[cnn.py]'
    """
    file = nodeid.partition("::")[0]
    module = PurePosixPath(file).stem
    is_apart = module == APART or (module == PAGES and _pages_share_nothing())
    return nodeid if is_apart else TOGETHER.get(module, file)


@functools.cache
def _pages_share_nothing() -> bool:
    from support.documents import PrivateNetwork  # noqa: PLC0415  (caches are named before Atoll is loaded)

    return PrivateNetwork.possible()
