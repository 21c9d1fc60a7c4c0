"""numba's cache in an image: filled when the image is built, and read where nobody may write.

    NUMBA_CACHE_DIR=FOLDER NUMBA_CACHE_LOCATOR_CLASSES=atoll.merge.kernel_cache.FilledCache python -m atoll.merge.kernel_cache

numba finds kept code by the processor that it was made for, so with such a locator build and processes compile for one class of
processors (`atoll.codec.kernels.compiled`). By itself numba passes over a folder that it cannot write to, as a container's file
system is read-only: hence a locator of our own.
"""

from __future__ import annotations

import contextlib

from numba.core.caching import UserProvidedCacheLocator

from atoll.codec.formats import FORMATS
from atoll.codec.kernels import compiled
from atoll.merge import outer


class FilledCache(UserProvidedCacheLocator):
    """The folder that `NUMBA_CACHE_DIR` names, also where it cannot be written to."""

    def ensure_cache_path(self) -> None:
        """Make the folder if that is possible."""
        with contextlib.suppress(OSError):
            super().ensure_cache_path()  # type: ignore[no-untyped-call]


def main() -> None:
    """Compile every kernel, or load it."""
    for form in FORMATS.values():
        compiled.kernels(form)
    outer.compile_steps()


if __name__ == "__main__":
    main()
