"""A loop of a person's own that is stopped by SIGTERM leaves in good order if it says so, as the page on stopping does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 60.0
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "stop-and-continue.md"
LOOP = """
import time
import numpy as np
import atoll
from atoll.bus.memory import MemoryBroker, MemoryBus
{before}
async def opener():
    return MemoryBus("r", MemoryBroker())

with atoll.join(opener, run="r", learner="a", params={{"w": np.zeros((8, 2), np.float32)}}) as island:
    params = island.params
    while True:
        params = island.step(params, tokens=4)
        print("stepped", flush=True)
        time.sleep(0.01)
"""


def told_by_the_page() -> str:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = lines.index("import signal, sys")
    return "\n".join(lines[at : at + 2])


@pytest.mark.parametrize(("handles", "code"), [(True, 128 + signal.SIGTERM), (False, -signal.SIGTERM)])
def test_a_loop_leaves_on_sigterm_if_it_says_so(handles: bool, code: int) -> None:  # noqa: FBT001
    """Without the page's lines the process is killed where it is; Atoll takes no signal of somebody else's process."""
    program = LOOP.format(before=told_by_the_page() if handles else "")
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        while "stepped" not in said:
            said += process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        said += process.communicate(timeout=DEADLINE_S)[0]

    assert process.returncode == code
    assert ("learner.left" in said) == handles
