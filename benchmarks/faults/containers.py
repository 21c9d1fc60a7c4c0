"""`docker-compose.yml` for real: `make compose-test` builds its images, runs it in podman, and breaks it as its pages say.

From nothing: a base image (`support.podman`), both images from the unmodified Dockerfile, and then the unmodified file with a
small model, because one machine bears all three islands. Scenes, in this order (`containers_scenes`):

    train      three islands, a falling loss
    faults     every container is killed and started again, then stopped and started, one at a time
    crash      a process dies inside its container, one of each kind
    cut        the leaf of an island is taken out of the WAN for a minute, and brought back
    export     the merged model comes out
    down, up   all containers go in good order, and come back
    reboot     all containers go at once, the volumes stay
    finished   a run that reaches its end stays over, also after a reboot

`--short` breaks one container of each kind, cuts for five seconds less and leaves the last scene out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from atoll.base import VERSION
from benchmarks.faults.containers_scenes import Scenes
from benchmarks.lib.arguments import natural
from benchmarks.lib.peer_environments import environment
from benchmarks.lib.results import RESULTS, Figure, write
from support.composed_containers import ROOT
from support.podman import BASE, Podman, unfit

FOLDER = Path("build/containers")
IMAGES = {"synchronizer": f"atoll-synchronizer:{VERSION}", "learner": f"atoll-learner:{VERSION}"}
SIZES_MB = {"synchronizer": 350.0, "learner": 800.0}
"""Goals. Half of the synchronizer's image is Python and its Debian; XLA is 240 MB of the learner's."""
INSTALLED = "import importlib.metadata as m; print(' '.join(sorted(d.name.lower() for d in m.distributions())))"
LISTED = (
    "import sys; sys.path.append('/tools'); from cyclonedx_py._internal.cli import run; "
    "sys.exit(run(argv=['environment', '--of', 'JSON', '/opt/atoll/bin/python']))"
)


def main() -> int:
    """Build, run, break and measure; write `build/results/compose-test.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    if reason := unfit():
        print(f"skipped: no containers can run here: {reason}")
        return 0
    engine, tools = Podman(FOLDER), Path(environment("compose"))
    engine.clear()
    figures = images(engine, tools)
    scenes = Scenes(engine, tools.with_name("podman-compose"), options.seed, short=options.short)
    failed = ""
    try:
        scenes.play(figures)
    except SystemExit as error:
        # A scene that fails takes nothing from those before it: half an hour's figures are written all the same.
        failed = str(error)
    finally:
        scenes.keep_logs(FOLDER / "logs")
        engine.clear()
    figures.append(Figure("scene that failed", float(bool(failed)), "", "0", not failed, failed or "all were played"))
    return write("compose-test", options.seed, figures)


def images(engine: Podman, tools: Path) -> list[Figure]:
    """Build both images; return their sizes, and what is in them."""
    engine.make_base()
    base_mb = engine.size(BASE)
    figures = [Figure("base image", base_mb, "MB", "", None, "a stand-in of Debian's packages")]
    for target, image in IMAGES.items():
        began_s = time.monotonic()
        engine.build(ROOT, image, target)
        print(f"{image} built in {time.monotonic() - began_s:.0f} s", flush=True)
        size_mb, goal_mb = engine.size(image), SIZES_MB[target]
        how = f"with its Python; {size_mb - base_mb:.0f} MB of it are ours and our dependencies'"
        figures.append(Figure(f"image, {target}", size_mb, "MB", f"<= {goal_mb:g}", size_mb <= goal_mb, how))
        figures.append(bill_of_materials(engine, tools, target, image))
    with_jax = "jax" in engine.in_image(IMAGES["synchronizer"], INSTALLED).split()
    figures.append(Figure("jax in the synchronizer's image", float(with_jax), "", "0", not with_jax, "distributions"))
    return figures


def bill_of_materials(engine: Podman, tools: Path, target: str, image: str) -> Figure:
    """Write what is installed in an image as CycloneDX JSON; it must name every distribution there."""
    (packages,) = tools.parents[1].glob("lib/python*/site-packages")
    listed = engine.in_image(image, LISTED, [f"{packages.absolute()}:/tools:ro"])
    path = RESULTS / f"sbom-{target}.cdx.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(listed + "\n", encoding="utf-8")
    named = {component["name"].lower() for component in json.loads(listed)["components"]}
    missing = set(engine.in_image(image, INSTALLED).split()) - named
    how = f"CycloneDX, {path}" + (f"; missing: {', '.join(sorted(missing))}" if missing else "")
    return Figure(f"bill of materials, {target}", float(len(named)), "packages", "all installed", not missing, how)


if __name__ == "__main__":
    sys.exit(main())
