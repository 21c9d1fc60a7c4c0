"""Writes the pages of `docs/results/` from `build/results/*.json`: `make results`. No figure of a table is typed by hand.

A target whose figures are computed from kept extracts (`chaos`) has its extracts copied to `docs/results/raw/` and its plots
drawn beside the page. `make results-check` computes those figures again from the copies alone and compares them with the
page, so that anybody can, from the repository alone. The page of an experiment (`experiment-…`) is made from its raw file
as a whole, by `experiment_page`; the check makes it again and compares every line. All figures of all targets are kept, with
their commits, in `docs/results/history.jsonl`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.experiments import experiment_page
from benchmarks.faults.extracts import Extract, load
from benchmarks.faults.metrics import figures
from benchmarks.faults.plots import plots
from benchmarks.lib import history
from benchmarks.lib.results import RESULTS
from benchmarks.lib.summaries import on_top
from benchmarks.loops.loops_table import loops_table
from benchmarks.network.peers_tables import peers_tables

FOLDER = Path("docs/results")
RAW = "raw"
WORDS = {
    "chaos": """\
**Runs.** `undisturbed` and `storm-R` are one `atoll up` each: three learners, two shards with a standby each, real processes,
every one of them behind a relay of its own, R faults a minute drawn from one seed (SIGKILL of owners, standbys, learners
and the broker, SIGSTOP of owners, cut connections, black holes) and one partition of one learner. `gauntlet` is one more at
a higher rate, as long as it takes to kill as many as its goal says; it has a length of its own, so it is asked for safety
only and is in no plot. `sync-…` are the
synchronous baseline under the same forecasts: workers for learners, a coordinator for owners. What the baseline models,
and what favours it, is said in [`benchmarks/faults/synchronous.py`](../../benchmarks/faults/synchronous.py).

**Participation** is stepping time over present time: the learner-seconds in which steps were taken over all
learner-seconds of the run, with every learner present from beginning to end. **Useful-step share** is the tokens that
entered the model (Atoll: merged in time or late; baseline: not rolled back) over the tokens that the same system would
have trained in the same time undisturbed. What was merged late counts whole there; the
*damped* share counts `age_damping` of it per version of age, which is what the merge makes of it. All
are defined once, for both systems, in [`benchmarks/faults/goodput.py`](../../benchmarks/faults/goodput.py).

**Raw.** [`raw/`](raw) holds one extract per run: what was done, every commit and refusal of the event log, every heartbeat, the
ledgers. `make results-check` computes every figure of the table again from these files.

![useful-step share against faults per minute](chaos-useful.svg)
![participation against faults per minute](chaos-participation.svg)
![held-out loss after the same time against faults per minute](chaos-loss.svg)
""",
    "bench-round": """\
A round as a shard does it, from eight encoded contributions (int4) in memory to the next values: norms checked, RDA,
Nesterov. What is counted, and what is not, is said in
[`benchmarks/arithmetic/merge_round.py`](../../benchmarks/arithmetic/merge_round.py). A share *on arrival* counts bytes as if every
contribution were folded in by itself; contributions that wait for each other are entered in one pass
([`atoll.merge.fold`](../../shared/atoll/merge/fold.py)), so it may be above 1. *Every byte once* counts what no order
of work could leave out.

NumPy and `jax.jit` do the same round from the same bytes, in our environment. Flower and tsugi-mend do less: a weighted
mean of float32 arrays that are decoded already, with no check, no RDA and no step; each runs in an environment of its
own, from [`benchmarks/peers`](../../benchmarks/peers).

""",
    "bench-ends": """\
A round of one fragment from the shard's call until the last learner holds the new version, checked and ready to adopt at
its next step boundary; beside it, measured in the pause after each round by the same processes through the same broker,
what no round can do without: putting and getting the contributions' bytes, storing those of frame and state, reading the
frame, and the arithmetic in memory. What is counted is said in
[`benchmarks/network/ends.py`](../../benchmarks/network/ends.py). Stages are from their first beginning to their last end,
counted from the call, and overlap. All processes and the broker share the machine's cores, so CPU time that others of
these processes spend is in every stage.

""",
    "bench-transformers": """\
Transformers stands in an environment of its own. *In*: it wrote the folder, and Atoll took dimensions and tensors from it; *out*: Atoll
trained and exported the model, and `AutoModelForCausalLM.from_pretrained` loaded the folder as it was. Every tensor is drawn or
trained, gains and biases too. What is compared is said in
[`benchmarks/text/hugging_face.py`](../../benchmarks/text/hugging_face.py).

""",
    "bench-peers": """\
Processes on one machine, which meet over the loopback. The others run in environments of their own, from
[`benchmarks/peers`](../../benchmarks/peers).

**A sync** is 64 MiB of float32 between two participants that do nothing else. *Training waits* is what a participant's loop could
not do meanwhile. Unfair to Atoll: the others have nothing when a participant dies in a sync, and Atoll has stored everything on
disk; they keep the loop waiting, and Atoll does not. Unfair to the others: they send float32, and Atoll four bits, each by its
default. gloo's all-reduce, without protection from anything, is the floor ([more](../../benchmarks/network/sync_race.py)).

**A first model** has a million parameters and two learners or four, and every system trains it for so many tokens of the same
text, with the same schedule. The clock is that of the whole command. Unfair to Atoll: its command also writes a report, an archive
and an export, and measures the loss on the way. A user of the others gets AdamW; with *Muon* they have the optimizer that is
Atoll's default, and its rate. Atoll's interval is 8 steps with two learners and 4 with four, its default. *Adjusted* is Atoll's time
divided by JAX's time over torch's, with the same optimizer and nobody speaking: *apart* in a process of one thread for each learner,
as Atoll and data-parallel training have; *alone* in one process with a thread for each core, so what a framework gains by its
second thread is in it, too
([more](../../benchmarks/text/first_try.py)). A loss differs by about 1 % from seed to seed.

""",
    "bench-scale": """\
All processes share one machine, and learners are dummies: they train nothing, push, adopt, and many of them share a process. So clock
times are those of a busy machine, and processor time is what is compared. A role is *full* where its busiest process would use a whole
core. What is measured is said in [`benchmarks/network/scale.py`](../../benchmarks/network/scale.py), and how it is computed in
[`benchmarks/network/scale_figures.py`](../../benchmarks/network/scale_figures.py).

""",
    "race": """\
Each region is a host of its own in a network namespace, behind a wire of that rate, 25 ms from every other, with the kernel's own TCP
([`tests/support/wan.py`](../../tests/support/wan.py)). What is scaled, and what each system does, is said in
[`benchmarks/network/race.py`](../../benchmarks/network/race.py). A system that waits for its links gains with every bit of them; one that
does not is as fast as its steps.

![tokens a second against the rate of the links](race-speed.svg)

""",
    "bench-link": """\
100 Mbit/s, 50 ms there and back, 1 % of packets lost each way, a queue of 50 ms: the kernel's own TCP between two network
namespaces, through the shaper of [`tests/support/wan.py`](../../tests/support/wan.py). Utilisation is payload over what
the link can carry. One piece in flight more or less at the end of a measurement is 1 to 2 % of it. What is measured is said
in [`benchmarks/network/link.py`](../../benchmarks/network/link.py).

Loss-based congestion control (reno here; cubic, most systems' own, is bound alike) moves a fortieth of such a link per
connection, whatever the window. Connections for chunks ask for bbr, where the kernel has it; **what the broker sends is its
host's affair**: `sysctl net.ipv4.tcp_congestion_control=bbr` there.

""",
    "bench-start": """\
Each use is a process of its own, with an empty folder for numba's machine code and none for JAX's programs; bytecode of Python is
there, as after `pip install`. Joining counts from the call of `atoll.join`, by a loop that has imported JAX and has its
parameters, to its return; exporting counts the whole process. What is counted is said in
[`benchmarks/network/cold_start.py`](../../benchmarks/network/cold_start.py). Before kernels were compiled later
([`atoll.codec.kernels.background`](../../shared/atoll/codec/kernels/background.py)), joining with a million parameters took 11.6 s on this machine
and exporting them 17.3 s.

""",
    "bench-arithmetic": """\
One thread. Every figure is the best of its rounds over the best of its limit in the same rounds; what is measured is
said in [`benchmarks/arithmetic/arithmetic.py`](../../benchmarks/arithmetic/arithmetic.py). *Check and fold* checks chunk by chunk,
when a chunk has just been put in its place, and folds from memory later, as a shard does; the check is what arriving
takes longer for it.
*Settle* makes a delta of four bits: it quantises a difference, adds what readers will add and keeps what is left.

""",
    "bench-broker": """\
One blob of 256 MB of random bytes through a nats-server of its own that stores on disk: by the lanes of a bus of ours, by stock
nats-py, and over a bare TCP connection of the loopback. What is measured is said in
[`benchmarks/network/broker.py`](../../benchmarks/network/broker.py); why there is a transport of our own is said in
[ADR 28](../adr/0028-a-transport-of-our-own.md). CPU is that of the process that sends or receives. The broker's files are
written and read in the same time, on the same cores.

""",
    "bench-bytes": """\
One run of `atoll up`, real processes, four bits up and down, every process behind a relay that counts the bytes it copies. The
*ledger* is what the processes say of themselves, in the run's report ([`moved`](../reference/report.md)); the *count at the sockets* is
the relays'. What a step of data-parallel training moves is computed, by the planner's formula. Founding the run, joining,
leaving, heartbeats and the event log are in our bytes. What is measured, and why so small a batch will do, is said in
[`benchmarks/network/bytes_moved.py`](../../benchmarks/network/bytes_moved.py).

Learners' links are the wide area: a shard stands beside the broker, and its link also carries the outer state that it
stores with every version. *Fetched* counts all that learners read over the parameters of the versions that it gave them,
the first keyframe included; *published* counts every keyframe once, though followers read none.

""",
    "bench-bandwidth": """\
Nothing here is measured: the figures follow from a graph of compute and communication
([`atoll_simulator.planner.timeline`](../../services/simulator/atoll_simulator/planner/timeline.py)) and from assumptions, which
[`benchmarks/network/literature.py`](../../benchmarks/network/literature.py) holds beside the published figures and their sources. The
published ones lie on a grid of 50 points between 0.1 and 1000 Gbit/s; ours are points of the same grid, and errors are
counted in its steps (a factor of 1.21).

**One leg** is bf16, each site sends the model once per reduction. Nothing is fitted on Table 6, where it is one or two steps
too high on every cell. For the 5B model at 1 s two choices are fitted on 1.7: that 90 % was meant, and that fragments in flight
do not share the link. With them 1.7 follows, and what is left of a test is that 104.8 follows at the same 90 %.

**Two thirds** sends two thirds of that and has 36 layers. Two cells alone lead there (H=100 at 50 % allows 58 to 69 % of bf16,
data-parallel at 99 % then 34 to 40 layers), and of the other eight it gives five exactly and three one step too low; but we had
seen them all when we chose. We know no reason for two thirds (one way of a ring of three sites would be one), and it does not
give the figures of the 5B model. No set we tried gives all rows.

198 and 0.84 Gbit/s come without model, step time and utilisation, and several sets give 198. The one that is shown also gives
0.84 within 3 % and the largest published ratio, 242, within 1 %; the smallest, 60, it misses by a fifth. Its step time,
utilisation and layers were chosen with these figures in view: it shows that one set gives them, not that it is theirs. Like
1.7, 0.84 then counts one direction, and two fragments in flight that do not share the link. Over a real
link, both ways, through a broker, more is needed, and `atoll plan` says how much.

The rows of 12B give the step at which the link is just full. There the speed-up is an identity and confirms nothing: a full
link carries the model once in P steps of compute, and a ring of M sites 2 (M-1)/M times as much in every step. So it is
2 (M-1)/M P, 36 for any model and any link with the ring's codec both ways (other codecs scale it, and Atoll's window of chunks
takes from it), times the share that is merged. What says something is the step up to which it is 20 times as fast: the
published run's step is not known. What a learner trains while a round is under way is not counted.

For rows marked as predictions nothing published was looked up, and no cell of a published table is among them.
""",
    "bench-loops": """\
Every loop is a program of [`examples`](../../examples), played by the lines at its head: two islands, a shard and a broker on one
machine. *Own lines* are those that exist for Atoll, imports and settings included. A step is one turn of the loop beside the
other island; the time in the island is by its own clock, of the slower one. An island is killed (SIGKILL) at a fifth of the
run's tokens and started again by the same command. Tokens are lost with the process that had not pushed them; every other has
exactly one fate. *Merged model* is what the example measures of it: accuracy on held-out digits, or for the Llama the loss on
held-out pages; bold where a goal is missed. What is measured is said in
[`benchmarks/loops/loops.py`](../../benchmarks/loops/loops.py); the lines themselves are in
[Join with the framework you have](../how-to/loops.md).

""",
    "bench-goodput": """\
Goodput is the share of the fleet's time in useful compute, uptime the share of time in which some learner steps. The
goodput of a cell depends on the chips of *one* learner only, and cells are told apart by that. *fitted* are the four of one
learner that the stalls are fitted on, so they have no goal; *validated* are published cells of sizes that nothing was
fitted on; *predicted* are sizes for which we know no published figure. Every other cell says one of these *again*: its row
names that cell, has no goal and counts in no error. The null model has one stall less (returned slices are taken in for
nothing) and is fitted on the same cells: what it gives too is no merit of the mechanism. The goal of two points was set
when the errors of both were known.

The admission interval was set before the fit but not blind: a hand calculation had all twelve published figures in view.
What other intervals give when the stalls are fitted again is listed (*admission every*).

What is simulated, and where every number comes from, is said in
[docs/explanation/goodput.md](../explanation/goodput.md); the fit is [`benchmarks/fleet/goodput_fit.py`](../../benchmarks/fleet/goodput_fit.py). Rings in the
plot are the paper's figures.

![goodput against the number of chips](bench-goodput-goodput.svg)
![uptime against the number of chips](bench-goodput-uptime.svg)
""",
}

TABLES: dict[str, Callable[[Sequence[dict[str, Any]]], list[str]]] = {
    "bench-loops": loops_table,
    "bench-peers": peers_tables,
}
"""What stands above the list of all figures of a page."""


def main() -> int:
    """Write one page per target that was measured, or compare the pages that can be computed again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compute again from docs/results/raw and compare")
    if parser.parse_args().check:
        return check()
    measured = sorted(RESULTS.glob("*.json"))
    if not measured:
        print(f"nothing was measured yet: {RESULTS} is empty; run make bench, bench-parity, bench-faults or chaos")
        return 1
    for path in measured:
        publish(path.stem, json.loads(path.read_text(encoding="utf-8")), FOLDER)
    return 0


def publish(target: str, document: dict[str, Any], folder: Path) -> None:
    """Write the page of one target, its raw files and its plots to `folder`."""
    raw = folder / RAW
    raw.mkdir(parents=True, exist_ok=True)
    if target.startswith(experiment_page.PREFIX):
        publish_experiment(target, Path(document["raw"][0]), folder)
        return
    if document.get("raw"):
        for stale in raw.glob(f"{target}-*.json.zst"):
            stale.unlink()
        for path in map(Path, document["raw"]):
            shutil.copyfile(path, raw / f"{target}-{path.name}")
        for name, text in plots(extracts(target, folder)).items():
            (folder / name).write_text(text, encoding="utf-8")
    for path in sorted(RESULTS.glob(f"{target}-*.svg")):
        shutil.copyfile(path, folder / path.name)
    page_path = folder / f"{target}.md"
    page_path.write_text(on_top(page(target, document), target, document["figures"]), encoding="utf-8")
    history.add(target, document, folder / history.HISTORY.name)
    print(f"written {page_path}")


def publish_experiment(target: str, raw: Path, folder: Path) -> None:
    """Write raw file, page and plots of one experiment."""
    shutil.copyfile(raw, folder / RAW / raw.name)
    kept = experiment_page.load(raw)
    page_text = on_top(experiment_page.page(kept), target, [])
    for name, text in {f"{target}.md": page_text, **experiment_page.svgs(kept)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"written {folder / target}.md")


def extracts(target: str, folder: Path) -> list[Extract]:
    """Return the raw files of a target in the order of their runs."""
    found = [load(path) for path in sorted((folder / RAW).glob(f"{target}-*.json.zst"))]
    return sorted(found, key=lambda extract: (extract.course.seed, extract.course.system, extract.course.per_minute))


def check() -> int:
    """Return 0 when the pages say what their raw files say."""
    wrong = differences("chaos", FOLDER)
    for raw in sorted((FOLDER / RAW).glob(f"{experiment_page.PREFIX}*.json.zst")):
        wrong += page_differences(raw, FOLDER)
    for line in wrong:
        print(line)
    print("a page differs from its raw files" if wrong else "the pages say what their raw files say")
    return int(bool(wrong))


def page_differences(raw: Path, folder: Path) -> list[str]:
    """Return the lines in which an experiment's page differs from what its raw file gives."""
    path = folder / f"{raw.name.removesuffix('.json.zst')}.md"
    told = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    target = raw.name.removesuffix(".json.zst")
    again = on_top(experiment_page.page(experiment_page.load(raw)), target, []).splitlines()
    changed = difflib.ndiff(told, again)
    return [f"{path.name}: {line}" for line in changed if line[:2] in {"- ", "+ "}]


def differences(target: str, folder: Path) -> list[str]:
    """Return the lines of a target's table that its raw files do not give, and those that it lacks."""
    again = {row(asdict(figure)) for figure in figures(extracts(target, folder))}
    path = folder / f"{target}.md"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    told = {line for line in lines if line.startswith("| ") and not line.startswith("| figure |")}
    return [f"not by the raw files: {line}" for line in sorted(told - again)] + [
        f"not on the page: {line}" for line in sorted(again - told)
    ]


def page(target: str, document: dict[str, Any]) -> str:
    """Return the page of one target."""
    rows = [row(figure) for figure in document["figures"]]
    origin = f"{document['machine']}; commit `{document['commit'][:12]}`; seed {document['seed']}"
    return "\n".join(
        [
            f"# make {target}",
            "",
            f"Generated by `make results`. {origin}.",
            "",
            *([WORDS[target]] if target in WORDS else []),
            *(TABLES[target](document["figures"]) if target in TABLES else []),
            "| figure | value | goal | holds | how |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def row(figure: dict[str, Any]) -> str:
    """Return a figure as a line of the table."""
    holds = {True: "yes", False: "**no**", None: ""}[figure["holds"]]
    cells = [figure["name"], f"{figure['value']:.4g} {figure['unit']}", figure["goal"], holds, figure["how"]]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
