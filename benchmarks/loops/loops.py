"""What being an island asks of the loops people have, and what they survive: `make bench-loops`.

Every loop of `examples/` is played as it is written, by two islands, in three scenes (`benchmarks.loops.scenes`): undisturbed;
one island killed and started again; both killed and started again. `own lines` are those that the example marks. A step is one
turn of the loop, as long as it took beside the other island on the same machine. The cost of an island is the time inside
`island.step` over all time, by its own clock; a bound is set where a step takes 100 ms or longer.

What copies of NumPy arrays cost, and what the callback of Keras costs in all, is measured apart (`benchmarks.loops.copies`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lib.arguments import natural
from benchmarks.lib.results import Figure, write
from benchmarks.loops.copies import copies
from benchmarks.loops.scenes import Loop, SceneOutcome, loop_of, played, prepare

LOOPS = ("digits", "keras_digits", "nnx_batchnorm", "equinox_digits", "cnn", "llama_finetune", "numpy_loop")
SCENES = {"undisturbed": 0, "one killed": 1, "all killed": 2}
LONG_STEP_MS = 100.0
OVERHEAD_MAX = 0.01
FALLS_TO = 0.9


def main() -> int:
    """Play every scene of every loop and write `build/results/bench-loops.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LOOPS, help="this loop alone, without the copies")
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    found: list[Figure] = []
    for name in [options.only] if options.only else LOOPS:
        loop = loop_of(name)
        found += figures(loop, scenes_of(loop))
    if not options.only:
        print("copies …", flush=True)
        found += copies(options.seed)
    return write("bench-loops", options.seed, found)


def scenes_of(loop: Loop) -> dict[str, SceneOutcome]:
    """Play the scenes of one loop."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(loop, folder)
        for scene, killed in SCENES.items():
            print(f"{loop.name}: {scene} …", end=" ", flush=True)
            found[scene] = played(loop, folder, scene.replace(" ", "-"), killed)
            print(f"{found[scene].took_s:.0f} s", flush=True)
    return found


def figures(loop: Loop, scenes: dict[str, SceneOutcome]) -> Iterator[Figure]:
    """Yield the figures of one loop."""
    calm = scenes["undisturbed"]
    first = sum(word.first for word in calm.words) / len(calm.words)
    last = sum(word.last for word in calm.words) / len(calm.words)
    steps = sum(word.steps for word in calm.words)
    step_ms = sum(word.step_ms for word in calm.words) / len(calm.words)
    overhead = max(word.overhead for word in calm.words)
    long = step_ms >= LONG_STEP_MS

    def named(what: str) -> str:
        return f"{loop.name}: {what}"

    yield Figure(named("own lines"), loop.own_lines, "lines", "", None, f"marked in examples/{loop.name}.py")
    yield Figure(named("first loss"), first, "", "", None, "mean of both islands' first five")
    yield Figure(
        named("last loss"), last, "", f"<= {FALLS_TO} of the first", last <= FALLS_TO * first, f"after {steps} steps"
    )
    how = " and ".join(word.measure for word in calm.words)
    yield Figure(named("merged measure"), float(calm.words[0].measure), "", "islands agree", calm.agree, how)
    yield Figure(named("step"), step_ms, "ms", "", None, "one turn of the loop; two islands share the machine")
    inside_ms = max(word.inside_ms for word in calm.words)
    yield Figure(named("in the island"), inside_ms, "ms", "", None, "of each step; the slower island")
    yield Figure(
        named("overhead"),
        overhead,
        "ratio",
        f"<= {OVERHEAD_MAX}" if long else "",
        overhead <= OVERHEAD_MAX if long else None,
        "the larger of both islands'",
    )
    for scene in ("one killed", "all killed"):
        yield from survived(loop, scene, scenes[scene])


def survived(loop: Loop, scene: str, outcome: SceneOutcome) -> Iterator[Figure]:
    """Yield what became of the tokens and of the model in a scene with kills."""
    back = "; ".join(f"{word.steps} steps" for word in outcome.words[: SCENES[scene]])
    how = f"of {outcome.trained} trained; back for {back}"
    lost, exact = outcome.lost, outcome.exact
    yield Figure(f"{loop.name}: {scene}, tokens lost", lost, "tokens", "one fate for each token", exact, how)
    measure, what = float(outcome.words[0].measure), f"in a run of {outcome.took_s:.0f} s"
    yield Figure(f"{loop.name}: {scene}, merged measure", measure, "", "islands agree", outcome.agree, what)


if __name__ == "__main__":
    sys.exit(main())
