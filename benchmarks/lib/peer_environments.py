"""Other projects' programs, each in an environment of its own, made by pip from the pinned requirements in `peers`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parents[1] / "peers"
FOLDER: Final = Path("build/peers")
PEERS: Final = {"Flower": "flower", "tsugi-mend": "tsugi"}


def peer_seconds(peer: str, contributions: int, elements: int, seed: int) -> tuple[float, str]:
    """Return how long a peer's merge of so many float32 vectors takes, and in words what it does and by which version."""
    name = PEERS[peer]
    script = [str(HERE / f"{name}.py"), str(contributions), str(elements), str(seed)]
    done = subprocess.run([environment(name), *script], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], f"{answer['what']}; {answer['versions']}, best of {answer['repeats']}"


def environment(name: str) -> str:
    """Make the environment of a peer where there is none yet, and return its interpreter."""
    folder = FOLDER / name
    python, wanted, there = folder / "bin/python", HERE / f"{name}.txt", folder / "requirements.txt"
    if not there.exists() or there.read_bytes() != wanted.read_bytes():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(wanted)], check=True)
        there.write_bytes(wanted.read_bytes())
    return str(python)
