"""An engine of our own for containers: what two of them on one machine must not share."""

from __future__ import annotations

import tomllib
from pathlib import Path

from support.podman import Podman


def storage(folder: Path) -> dict[str, str]:
    """Return where the engine of a folder keeps its images and its mounts."""
    path = Podman(folder).environment["CONTAINERS_STORAGE_CONF"]
    return dict(tomllib.loads(Path(path).read_text(encoding="utf-8"))["storage"])


def test_engines_of_two_folders_share_neither_images_nor_mounts(tmp_path: Path) -> None:
    """Podman writes its mounts down in its runroot: a second engine there would replace the list by its own."""
    one, other = storage(tmp_path / "one"), storage(tmp_path / "other")

    assert one["graphroot"] != other["graphroot"]
    assert one["runroot"] != other["runroot"]


def test_the_engine_of_a_folder_is_found_again(tmp_path: Path) -> None:
    """Podman refuses images that were kept under another runroot, and one of more than 50 characters."""
    first = storage(tmp_path)

    assert storage(tmp_path) == first
    assert len(first["runroot"]) <= 50
