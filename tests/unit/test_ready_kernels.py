"""Kernels that were compiled beforehand: used if they are of these sources and for this processor, and of the same bits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from atoll.base.errors import ProtocolMisuse
from atoll.codec import kernels as sets
from atoll.codec.encoded import Encoded
from atoll.codec.formats import FORMATS, INT4, Format
from atoll.codec.kernels import ready, ready_kernels
from atoll.codec.kernels.later import CompiledLater
from atoll.codec.kernels.ready import MANIFEST, Declared, LibraryManifest, class_of_processor, opened, sources_digest

BUILD = Path(__file__).parents[2] / "infra" / "docker" / "kernels.py"
BUILT_WITHIN_S = 900.0
"""Forty seconds of a processor, of which a busy machine has little."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that was made as the build of an image makes it, which also compares all bits."""
    folder = tmp_path_factory.mktemp("kernels")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler on this machine")
    done = subprocess.run(
        [sys.executable, BUILD, folder], capture_output=True, text=True, timeout=BUILT_WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"kernels for {class_of_processor()}" in done.stdout
    return folder


def write(folder: Path, manifest: LibraryManifest) -> None:
    """Write what is told of a library, which is not there."""
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


@pytest.mark.second_tier
@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_a_library_has_every_kernel_and_it_gives_the_bits_of_numpy(library: Path, form: Format) -> None:
    made, plain = ready_kernels(form, library), sets.plain_kernels(form)
    assert made is not None
    vector = np.random.default_rng(7).normal(size=(1 << 17) + 77).astype(np.float32)
    sent = [Encoded.blank(form, vector.size) for _ in range(2)]
    for each, encoded in zip((made, plain), sent, strict=True):
        each.quantise(vector, encoded.codes, encoded.scales)
    assert sent[0].codes.tobytes() == sent[1].codes.tobytes()
    sums = [each.squares(sent[0].codes, sent[0].scales, 3, vector.size) for each in (made, plain)]
    assert sums[0] == sums[1]


@pytest.mark.second_tier
def test_a_kernel_refuses_what_it_would_read_or_write_wrongly(library: Path) -> None:
    quantise = opened(library)["int4_quantise"]
    vector, codes, scales = np.ones(256, np.float32), np.zeros(128, np.uint8), np.zeros(2, np.float32)
    quantise(vector, codes, scales)
    for wrong in (vector.astype(np.float64), vector[::2], vector.reshape(2, -1)):
        with pytest.raises(ProtocolMisuse, match="takes no such vector"):
            quantise(wrong, codes, scales)
    codes.flags.writeable = False
    with pytest.raises(ProtocolMisuse, match="may not be written"):
        quantise(vector, codes, scales)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (LibraryManifest(class_of_processor(), "0", {}), "other sources"),
        (LibraryManifest("x86-64-v9", sources_digest(), {}), "made for x86-64-v9"),
        (LibraryManifest(class_of_processor(), sources_digest(), {"f32_over": Declared((), "none")}), "kernels.so"),
    ],
)
def test_a_library_that_is_not_for_this_program_is_not_used(
    tmp_path: Path, manifest: LibraryManifest, said: str
) -> None:
    """One that is damaged neither; the log says why, and others do the work."""
    write(tmp_path, manifest)
    with capture_logs() as logs:
        assert opened(tmp_path) == {}
        assert ready_kernels(INT4, tmp_path) is None
    assert [line["event"] for line in logs] == ["kernels.not_ready"]
    assert said in logs[0]["reason"]


def test_a_processor_that_lacks_something_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would die of an instruction that it does not know."""
    write(tmp_path, LibraryManifest(class_of_processor(), sources_digest(), {}))
    monkeypatch.setitem(ready.NEEDS, class_of_processor(), frozenset({"warp"}))
    with capture_logs() as logs:
        assert opened(tmp_path) == {}
    assert "lacks warp" in logs[0]["reason"]


def test_without_a_library_nothing_is_said(tmp_path: Path) -> None:
    """It is usual: only images have one."""
    with capture_logs() as logs:
        assert opened(tmp_path) == {}
    assert logs == []


def test_what_was_compiled_beforehand_is_there_at_once() -> None:
    """Nothing is compiled, and it is looked for once."""
    asked: list[str] = []

    def brought() -> str:
        asked.append("brought")
        return "ready"

    def make() -> str:
        raise AssertionError("compiled")

    later = CompiledLater("a", make, worth_elements=1, brought=brought)
    assert [later.found(1), later.found(1), later.now()] == ["ready"] * 3
    assert asked == ["brought"]
