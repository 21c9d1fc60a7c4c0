"""How a simulation uses the machine's cores: one thread per inner step, several steps side by side, nothing else.

Both functions write environment variables that libraries read when they are loaded, so this module loads none of them.
"""

from __future__ import annotations

import os


def one_thread_for_algebra() -> None:
    """Give NumPy's linear algebra one thread, unless the environment sets a number; only before NumPy is first loaded.

    Its threads wait for each other by spinning. On two busy cores the norm of a fragment took 20 ms with two threads
    and 0.1 ms with one.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def use_cores(learners: int) -> None:
    """Make JAX create as many one-thread CPU devices as can work side by side; only before JAX is first used."""
    devices = max(1, min(os.cpu_count() or 1, learners))
    # The count comes first: XLA stops reading at the first word that is not its own flag, and the last one is not.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    told = os.environ.get("XLA_FLAGS", "")
    if flags not in told:
        os.environ["XLA_FLAGS"] = f"{told} {flags} intra_op_parallelism_threads=1".strip()
