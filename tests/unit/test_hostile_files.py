"""Files that a person names may be anything: each reader refuses what it cannot use at once, in words, and holds nothing of it.

The table is kinds of files by readers. A reader that waits (for the other end of a pipe) or that reads on (a device, a sparse
file) would never end, so an alarm ends it; how fast a refusal is, is measured nowhere here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import pytest

from atoll.base.errors import AtollError
from atoll.bus.regions import REGION_FILE, domain_of
from atoll.bus.server import CLUSTER_FILE, planned_nodes
from atoll.cli.main import build
from atoll.cli.replay import replay_dump
from atoll.deploy.description import read_description
from atoll.deploy.rendering import MANIFEST, edited_files
from atoll.keys.identity import read_identity
from atoll.keys.roll import KeyFolder
from atoll.local.run_settings import read_earlier
from atoll.model.model_files import INDEX, WHOLE, check_model_files
from atoll.report.comparison import read_report
from atoll.run.folder import read_run_file, saved_events
from atoll.settings import load
from atoll_learner.data.shards import TokenShards
from atoll_learner.data.sources import documents, files_of
from atoll_learner.data.tokenizer import BpeTokenizer
from atoll_learner.export import load_safetensors
from atoll_learner.model_config import read_config

HANGS_S = 60
"""After so long a reader does not answer; the fastest way to fail, and nothing that a slow machine comes near to."""
SPARSE_BYTES = 8 << 30
LEVELS = 50_000
DEEP_TOML = f"a{'.a' * LEVELS} = 1\n"
DEEP_JSON = f'{{"settings": {"[" * LEVELS}{"]" * LEVELS}}}'


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    """Make a file of 8 GB that takes no room."""
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def missing(path: Path) -> None:
    """Make nothing."""


def binary(path: Path) -> None:
    """Make a file of bytes that are no text, and no header of anything."""
    path.write_bytes(bytes(range(255, 127, -1)) * 64)


def deep(path: Path) -> None:
    path.write_text(DEEP_TOML if path.suffix == ".toml" else DEEP_JSON, encoding="utf-8")


def closed(path: Path) -> None:
    """Make a file that we may not read."""
    path.write_text("{}", encoding="utf-8")
    path.chmod(0)


def shut(path: Path) -> None:
    """Make a file in a folder that we may not enter."""
    path.write_text("{}", encoding="utf-8")
    path.parent.chmod(0)


KINDS = (pipe, device, folder, sparse, missing, binary, deep, closed, shut)
NOBODY = 65534


@dataclass(frozen=True)
class FileReader:
    """A reader of a file of this name, and the kinds of files that are no fault to it."""

    name: str
    call: Callable[[Path], object]
    takes: tuple[Callable[[Path], None], ...] = ()
    held_bytes_max: int = 32 << 20


def _consumed(path: Path) -> None:
    for file in files_of([path]):
        for _ in documents(file):
            pass


READERS = {
    "--config": FileReader("run.toml", lambda path: load(path, environment={})),
    "description": FileReader("deployment.toml", read_description),
    "identity": FileReader("identity.toml", read_identity),
    "roll": FileReader("roll.json", lambda path: KeyFolder(path.parent).read()),
    "rendered": FileReader(MANIFEST, lambda path: edited_files(path.parent), (missing,)),
    "--out": FileReader("run.json", lambda path: read_run_file(path.parent), (missing,)),
    "--like": FileReader("report.json", read_earlier),
    "compare": FileReader("report.json", read_report),
    "events": FileReader("events.jsonl", lambda path: list(saved_events(path)), (binary, deep)),
    "replay": FileReader("facts.jsonl", lambda path: replay_dump(path, None)),
    "region": FileReader(REGION_FILE, lambda path: domain_of(path.parent, None), (missing,)),
    "cluster": FileReader(CLUSTER_FILE, lambda path: planned_nodes(path.parent, 3), (missing,)),
    "initial_model": FileReader(WHOLE, check_model_files),
    "its folder": FileReader(WHOLE, lambda path: check_model_files(path.parent)),
    "its index": FileReader(INDEX, lambda path: check_model_files(path.parent)),
    "its values": FileReader(WHOLE, lambda path: load_safetensors([path], {"w": jnp.zeros(4)})),
    "model.config": FileReader("config.json", read_config, (missing,)),
    "data.dir": FileReader("meta.json", lambda path: TokenShards(path.parent)),
    "text": FileReader("a.txt", _consumed, (deep,)),
    "jsonl": FileReader("a.jsonl", _consumed, held_bytes_max=192 << 20),  # a line is read whole, up to its bound
    "parquet": FileReader("a.parquet", _consumed),
    "--tokenizer": FileReader("tokenizer.json", BpeTokenizer),
}
LIBRARIES = {"parquet": "pyarrow", "--tokenizer": "tokenizers"}


class Hangs(BaseException):
    """The reader waits, or reads without end; no reader takes this for a fault of the file."""


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """End a reader that does not answer: without this the tests would hang as it does."""

    def _stop(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, _stop)
    signal.alarm(HANGS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_cannot_be_used_is_refused_in_words(
    reader: str, kind: Callable[[Path], None], tmp_path: Path
) -> None:
    """The error is ours, names the file or its folder, and next to nothing of the file was ever in memory."""
    if reader in LIBRARIES:
        pytest.importorskip(LIBRARIES[reader])
    row = READERS[reader]
    path = tmp_path / row.name
    kind(path)
    user = os.geteuid()
    if kind in {closed, shut} and not user:  # who may read everything becomes somebody who may not
        with contextlib.suppress(AtollError):
            row.call(path)  # loads what it needs, which may lie where the other may not look
        os.seteuid(NOBODY)
    if reader == "identity" and kind in {sparse, binary, deep}:
        path.chmod(0o600)
    tracemalloc.start()
    try:
        if kind in row.takes:
            row.call(path)
        else:
            with pytest.raises(AtollError) as refused:
                row.call(path)
            assert refused.value.exit_code in {2, 3}
            assert str(tmp_path) in str(refused.value)
        assert tracemalloc.get_traced_memory()[1] < row.held_bytes_max
    finally:
        tracemalloc.stop()
        os.seteuid(user)
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("kind", [pipe, device, sparse, folder], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "verb", ["config", "up", "sim train", "learner", "synchronizer", "doctor", "status", "why goodput"]
)
def test_every_verb_refuses_such_settings(verb: str, kind: Callable[[Path], None], tmp_path: Path) -> None:
    """With the file, what is wrong with it, and what is allowed; before anything else is done."""
    path = tmp_path / "run.toml"
    kind(path)
    with pytest.raises(AtollError, match="cannot read the configuration") as refused:
        build()([*verb.split(), "--config", str(path)], standalone_mode=False)

    assert refused.value.exit_code == 2
    assert re.search("not a regular file but a|larger than", str(refused.value.got))
    assert str(path) in str(refused.value.got)
    assert refused.value.allowed
    assert refused.value.todo


def test_a_number_that_python_cannot_write_is_no_setting(tmp_path: Path) -> None:
    """A whole number in hexadecimal digits is read whatever its length, and an error that shows it would fail."""
    (tmp_path / "run.toml").write_text(f"[protocol]\nquorum = 0x{'f' * 10_000}\n", encoding="utf-8")
    with pytest.raises(AtollError, match="64 bits"):
        load(tmp_path / "run.toml", environment={})


def test_a_model_of_other_shapes_is_refused_before_its_values_are_read(tmp_path: Path) -> None:
    """Eight sparse gigabytes under a header that is right: all of them would be allocated to be compared."""
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [SPARSE_BYTES // 4], "data_offsets": [0, SPARSE_BYTES]}}
    ).encode()
    with (tmp_path / WHOLE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + SPARSE_BYTES)
    with pytest.raises(AtollError, match="holds another model"):
        load_safetensors([tmp_path / WHOLE], {"w": jnp.zeros(4)})


def test_a_header_that_is_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / WHOLE).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(AtollError, match="at most 2 can be"):
        check_model_files(tmp_path)


def test_a_line_of_text_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll_learner.data.sources.LINE_BYTES_MAX", 40)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "%s"}\n' % (b"a" * 27))
    assert list(documents(tmp_path / "a.jsonl")) == [b"a" * 27]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "short"}\n{"text": "%s"}\n' % (b"a" * 28))
    with pytest.raises(AtollError, match=r"too long(.|\n)*a\.jsonl:2"):
        list(documents(tmp_path / "a.jsonl"))
