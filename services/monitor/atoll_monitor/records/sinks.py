"""Where curves go beside the journal: W&B (offline), TensorBoard, trackio. Each is an extra, loaded when it is asked for.

All of them write files on this machine and speak to nobody: who wants W&B's pages sends them with `wandb sync` afterwards. The
step is the number of tokens that the run has trained, so that curves of different runs lie over each other. A sink holds one
founding of a run, under a name of its own (`RUN-1a2b3c4d`), and goes on under it when the monitor begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol


class MetricSink(Protocol):
    """Takes samples of all curves, in the order of their steps; may block and may raise anything."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a sample: a number for each tag."""

    def close(self) -> None:
        """Write what is not written yet."""


class WandbSink:
    """A run of W&B below `folder/wandb`, offline; `config` is what it shows as the run's settings."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """Begin it."""
        import wandb  # noqa: PLC0415  (an extra)

        # Without its own view of this process: console and system are the monitor's, which nobody asked for.
        settings = wandb.Settings(console="off", x_disable_stats=True, silent=True)
        self._run = wandb.init(
            project="atoll", name=name, dir=str(folder), config=dict(config), mode="offline", settings=settings
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a sample."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is not written yet."""
        self._run.finish()


class TensorBoardSink:
    """Event files for TensorBoard in `folder/tensorboard/NAME`."""

    def __init__(self, folder: Path, name: str, _config: Mapping[str, Any]) -> None:
        """Begin a file."""
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  (an extra)
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder / "tensorboard" / name))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a sample."""
        told = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=told)))

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()


class TrackioSink:
    """A run of trackio, where trackio keeps its own: `TRACKIO_DIR`, or the cache of Hugging Face."""

    def __init__(self, _folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """Begin it."""
        import trackio  # noqa: PLC0415  (an extra)

        # Curves of the run, and none of this machine.
        self._run = trackio.init(
            project="atoll",
            name=name,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a sample."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is not written yet."""
        self._run.finish()  # type: ignore[no-untyped-call]


SINKS: Final[Mapping[str, Callable[[Path, str, Mapping[str, Any]], MetricSink]]] = {
    "wandb": WandbSink,
    "tensorboard": TensorBoardSink,
    "trackio": TrackioSink,
}
