#!/usr/bin/env bash
# Run the tests of the NATS adapter on the newest nats-py that pyproject.toml allows, whatever the lock says.
#
#   infra/newest_nats.sh [VENV]      VENV defaults to .venv: its tools and everything but nats-py
#
# The release goes to a folder of its own under build/. Without a package index there is nothing to test: it says so and
# leaves with 0.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
folder=build/newest-nats
uv=${UV:-build/bootstrap/bin/uv}
wanted=$("$venv/bin/python" - <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(next(line for line in tomllib.load(file)["project"]["dependencies"] if line.startswith("nats-py")))
PYTHON
)

rm -rf "$folder"
if ! "$uv" pip install --quiet --python "$venv/bin/python" --target "$folder" --no-deps --upgrade "$wanted" 2>"$folder.log"; then
    printf 'no %s to be had here, so the newest release was not tested: %s\n' "$wanted" "$(tail -1 "$folder.log")"
    exit 0
fi
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
"$venv/bin/python" - "$folder" <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import nats

assert Path(sys.argv[1]).resolve() in Path(nats.__file__).resolve().parents, nats.__file__
print(f"nats-py {version('nats-py')}")
PYTHON
"$venv/bin/python" -m pytest -q tests/contract/test_nats_private_parts.py tests/contract/test_bus_wire.py tests/unit/test_transport.py tests/unit/test_framing.py
