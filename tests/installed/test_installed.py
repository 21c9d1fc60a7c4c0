"""The built wheel in bare environments: what each extra makes work, and what is said of what it does not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import atoll
from atoll.bus.server import EmbeddedBroker
from atoll.protocol.settings import ProtocolSettings
from support.installed import Installed, plain_environment
from support.links import unique_run

pytestmark = [pytest.mark.second_tier, pytest.mark.connected]

Install = Callable[..., Installed]
VERSIONS = ("3.11", "3.12", "3.13")
MONITOR = {"prometheus_client", "starlette", "uvicorn"}
HEAVY = {"jax", "flax", "optax", "orbax", "numba", "tokenizers", "pyarrow"}
MODULES = """
import importlib, json, pkgutil, sys
from atoll.base.extras import missing_extra
told = {}
for name in ("atoll", "atoll_learner", "atoll_synchronizer", "atoll_simulator", "atoll_monitor"):
    for found in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                told[found.name] = (error.name, getattr(missing_extra(error), "todo", None))
print(json.dumps(told))
"""
LOOP = """
import sys
import numpy as np
import atoll
from atoll.protocol.settings import ProtocolSettings
url, run = sys.argv[1:]
protocol = ProtocolSettings(fragments=1, interval_steps=4, shards=1, tokens_target=200)
with atoll.join(url, run=run, learner="a", params={"w": np.zeros((8, 4), np.float32)}, protocol=protocol) as island:
    params = island.params
    while not island.done:
        params = {"w": params["w"] + np.float32(0.001)}
        params = island.step(params, tokens=1)
model = island.merged()
print("merged", model.settled, model.versions_max, float(model.params["w"].mean()) > 0)
"""
TEXT = "".join(f"line {n} of some words, over and over.\n" for n in range(4000))
TABLE = """
import sys
import pyarrow as pa
from pyarrow import parquet
parquet.write_table(pa.table({"body": [f"row {n}, over and over. " * 40 for n in range(400)]}), sys.argv[1])
"""
READ = """
import sys
import atoll
print(float(atoll.read_model(sys.argv[1], run=sys.argv[2]).params["w"].sum()))
"""


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A broker with a run of somebody: its address and the run's id."""
    with EmbeddedBroker(tmp_path_factory.mktemp("nats")) as broker:
        run, params = unique_run(), {"w": np.full((1000, 200), 0.5, np.float32)}
        with atoll.join(
            broker.url, run=run, learner="a", params=params, protocol=ProtocolSettings(fragments=2, shards=1)
        ):
            pass
        yield broker.url, run


@pytest.mark.parametrize("version", VERSIONS)
def test_the_base_install_watches_exports_and_removes(
    version: str, installed: Install, founded: tuple[str, str], tmp_path: Path
) -> None:
    """Every verb that trains nothing answers where neither JAX nor numba is; a model is read and written, too."""
    bare, (url, run) = installed(version), founded
    packages = {path.name for path in next((bare.folder / "lib").iterdir()).joinpath("site-packages").iterdir()}
    assert not HEAVY & packages
    at = ("--run", run, "--broker", url)
    alone = [("version",), ("config",), ("doctor",), ("--help",), ("runs", "--broker", url)]
    for words in (*alone, ("top", "--once", *at), ("fates", *at), ("why", *at)):
        done = bare.atoll(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    done = bare.atoll("export", *at, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert float(load_file(tmp_path / "out" / "model.safetensors")["w"].sum()) == 100_000.0
    assert bare.program(READ, url, run).splitlines()[-1] == "100000.0"
    spare = unique_run()
    command = [str(bare.folder / "bin" / "atoll"), "tap", "--count", "1", "--run", spare, "--broker", url]
    with subprocess.Popen(
        command, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tap:
        assert tap.stderr is not None
        assert "waiting" in tap.stderr.readline()
        with atoll.join(url, run=spare, learner="a", params={"w": np.ones((4, 4), np.float32)}):
            pass
        assert "subject" in json.loads(tap.communicate(timeout=60)[0])
    assert f"removed {spare}" in bare.atoll("runs", "remove", spare, "--broker", url, "--yes").stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("learner",), "learner"),
        (("evaluate",), "learner"),
        (("up", "--out", "up"), "learner"),
        (("sim", "train", "--out", "sim"), "simulator"),
        (("data", "prepare", "a.parquet", "--out", "out"), "parquet"),
        (("data", "prepare", "a.txt", "--bpe", "300", "--out", "out"), "bpe"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else words,
)
def test_a_verb_that_needs_an_extra_names_the_smallest(
    words: tuple[str, ...], extra: str, installed: Install, tmp_path: Path
) -> None:
    """It says so at once, without a traceback, and leaves nothing behind."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    done = installed().atoll(*words, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    assert f"pip install 'atoll[{extra}]'" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "up").exists()
    assert not (tmp_path / "sim").exists()


@pytest.mark.parametrize(
    ("extra", "brings"),
    [
        ("", set()),
        ("island", {"jax"}),
        ("synchronizer", {"numba"}),
        ("learner", {"jax", "flax", "optax", "orbax", "numba"}),
        ("simulator", {"jax", "flax", "optax", "orbax", "numba"}),
        ("monitor", MONITOR),
    ],
)
def test_modules_that_cannot_be_imported_name_an_extra_that_is_not_there(
    extra: str, brings: set[str], installed: Install
) -> None:
    told = json.loads(installed(extra=extra).program(MODULES).splitlines()[-1])
    missed = {name.partition(".")[0] for name, _ in told.values()}

    assert not missed & brings
    assert all(hint for _, hint in told.values()), told
    assert (missed <= {"keras", "opentelemetry", *MONITOR}) == ({"jax", "flax", "optax", "orbax", "numba"} <= brings), (
        told
    )


@pytest.mark.parametrize(("version", "extra"), [("3.11", ""), ("3.11", "island"), ("3.13", "island")])
def test_a_loop_of_ones_own_is_merged_by_a_base_install(
    version: str, extra: str, installed: Install, tmp_path: Path
) -> None:
    """The installed broker and synchronizer, without an extra, and a loop of NumPy arrays, beside JAX or without it."""
    run, hub = unique_run(), installed()
    with EmbeddedBroker(tmp_path / "free") as free:
        port = free.port
    url = f"nats://127.0.0.1:{port}"
    program = str(hub.folder / "bin" / "atoll")
    commands = [(program, "broker", "--port", str(port)), (program, "synchronizer", "--run", run, "--broker", url)]
    services = [
        subprocess.Popen(
            command, cwd=tmp_path, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for command in commands
    ]
    try:
        told = installed(version, extra).program(LOOP, url, run)
        services[1].communicate(timeout=60)
        assert services[1].returncode == 0
    finally:
        for service in reversed(services):
            service.terminate()
            service.communicate(timeout=60)
    last = told.splitlines()[-1].split()
    assert last[:2] == ["merged", "True"]
    assert int(last[2]) >= 1
    assert last[3] == "True"


def test_numba_is_found_where_the_extra_brings_it(installed: Install) -> None:
    text = "from atoll.codec.formats import BF16\nfrom atoll.codec.kernels import fast_kernels\nprint(fast_kernels(BF16).name)"

    assert installed(extra="synchronizer").program(text).strip() == "fast"
    assert installed().program(text).strip() == "plain"


@pytest.mark.parametrize(
    ("extra", "words"), [("bpe", ("a.txt", "--bpe", "300")), ("parquet", ("a.parquet", "--field", "body"))]
)
def test_text_is_prepared_with_the_extra_that_it_needs(
    extra: str, words: tuple[str, ...], installed: Install, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    if extra == "parquet":
        installed(extra=extra).program(TABLE, str(tmp_path / "a.parquet"))
    done = installed(extra=extra).atoll(
        "data", "prepare", *words, "--block-tokens", "256", "--out", "out", cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "meta.json").is_file()


def test_a_simulated_run_trains_with_the_simulators_extra(installed: Install, tmp_path: Path) -> None:
    """The reference learner is in it: flax, optax and what else it needs."""
    words = (
        "sim",
        "train",
        "--learners",
        "1",
        "--shards",
        "1",
        "--tokens",
        "4000",
        "--set",
        "model.size=xs",
        "--out",
        "out",
    )
    done = installed(extra="simulator").atoll(*words, cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_metadata_say_what_it_is(installed: Install) -> None:
    """Name, licence, Pythons, extras, links and types, as an index and a type checker read them."""
    (folder,) = installed().folder.glob("lib/*/site-packages/atoll-*.dist-info")
    found: Distribution = PathDistribution(folder)
    said = found.metadata

    assert (said["Name"], said["Version"], said["Requires-Python"]) == ("atoll", atoll.__version__, ">=3.11")
    assert said["License-Expression"] == "Apache-2.0"
    assert {f"Programming Language :: Python :: {version}" for version in VERSIONS} <= set(
        said.get_all("Classifier") or ()
    )
    assert {"island", "learner", "synchronizer", "simulator", "bpe", "parquet"} <= set(
        said.get_all("Provides-Extra") or ()
    )
    assert all(link.partition(", ")[2].startswith("https://") for link in said.get_all("Project-URL") or ())
    assert said["Summary"]
    assert (folder.parent / "atoll" / "bus" / "hub.conf").is_file()
