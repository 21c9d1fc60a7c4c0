"""Takes out of an environment what no service runs: `python slim.py ENVIRONMENT`, while an image is built.

Three things go. Test suites of other packages are read by nobody here. The second backend of zstandard is for interpreters
other than CPython. Symbols and debugging information of compiled libraries are for a debugger; `strip` takes them out.

Not every library survives `strip`: one that was patched after it was linked may not load any more. So each is stripped as a
copy in the same folder, a process of its own loads the copy, and only a copy that loads takes the place of the library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

WORTH_BYTES: Final = 500_000
"""Smaller libraries are left as they are."""
LOADS: Final = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_LAZY)"


def main(environment: Path) -> None:
    """Slim the environment and say what it saved."""
    before = size(environment)
    for packages in environment.glob("lib/python*/site-packages"):
        for suite in [path for path in packages.rglob("tests") if path.is_dir()]:
            shutil.rmtree(suite, ignore_errors=True)
        for backend in packages.glob("zstandard/_cffi*.so"):
            backend.unlink()
        for library in [path for path in packages.rglob("*.so*") if path.stat().st_size >= WORTH_BYTES]:
            strip(library)
    print(f"{environment}: {before / 1e6:.0f} MB before, {size(environment) / 1e6:.0f} MB now")


def strip(library: Path) -> None:
    """Put a stripped copy in the place of a library, if the copy loads."""
    copy = library.with_name(f"stripped-{library.name}")
    subprocess.run(["strip", "--strip-unneeded", "-o", copy, library], check=True)  # noqa: S607  (the image's own)
    if subprocess.run([sys.executable, "-c", LOADS, copy], capture_output=True, check=False).returncode == 0:
        copy.chmod(library.stat().st_mode)
        copy.replace(library)
    else:
        copy.unlink()


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
