"""Writes what the output folder of a run says as event files (events.py), into `tensorboard/` of it.

1. A line of metrics.jsonl is one record there, under the run's step. The number of the last one is kept
   beside the files (WRITTEN), after they are on the disk: gone on with, nothing is missing, and nothing is
   there twice but what was written last before a kill, with the same values.
2. Nothing of it ends or delays the run: a look takes MAX_POINTS at most, and what cannot be written is said
   once, and is written when the folder is reported again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from quartet.cli.elsewhere.reporter import again
from quartet.cli.outputs import write_json
from quartet.cli.points import Lines, Point, points
from quartet.cli.tensorboard.events import EventFile
from quartet.run.tensorboard import TensorboardConfig

FOLDER = "tensorboard"
#: Which event of the run was written last.
WRITTEN = f"{FOLDER}/quartet.json"
#: Of one look: some 50 ms. A run that is reported late is caught up with over several.
MAX_POINTS = 100


class TensorBoard:
    """Writes those of one folder. Does nothing where the configuration asks for nothing."""

    def __init__(
        self, config: TensorboardConfig, folder: Path, say: Callable[[str], None], *, here: bool = True
    ) -> None:
        """`here`: whether the run's processes are on this machine."""
        self._here = here
        self._on = config.enabled
        self._folder = folder
        self._say = say
        self._lines = Lines(folder / "metrics.jsonl")
        self._written = 0
        self._file: EventFile | None = None
        self._fault = ""

    def begin(self) -> None:
        """The run is there, and the folder has what came of it before."""
        if self._on and self._file is None:
            with self._told():
                self._written = _written(self._folder)
                self._file = EventFile(self._folder / FOLDER)

    def tick(self) -> None:
        """Write some of what is new. Whether there was more than that is for the next look."""
        self._write(MAX_POINTS)

    def finish(self) -> str:
        """The run ended: write all that there is. What a person should know of it."""
        if self._file is None and not self._fault:
            return ""
        self._write(None)
        if self._file is not None:
            _close(self._file)
            self._file = None
        fault, self._fault = self._fault, ""
        if fault:
            return (
                f"TensorBoard's files have not everything: {fault}; metrics.jsonl has, and what is missing "
                f"comes when the run is reported again, by {again(here=self._here)}"
            )
        return f"TensorBoard: tensorboard --logdir {self._folder / FOLDER}"

    def catch_up(self) -> str:
        """Write those of a folder whose run is over. What a person should know of it."""
        self.begin()
        return self.finish()

    def _write(self, limit: int | None) -> None:
        if self._file is None:
            return
        with self._told():
            new = [one for one in islice(points(self._lines), limit) if one.number > self._written]
            if not new:
                return
            for point in new:
                self._file.add(point.at_seconds, point.step, _charts(point))
            self._file.flush()
            self._written = new[-1].number
            write_json(self._folder / WRITTEN, {"event": self._written})

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A disk's fault is said, once; nothing more is written then."""
        try:
            yield
        except OSError as error:
            self._fault = f"they cannot be written ({error.strerror})"
            self._say(f"TensorBoard's files: {self._fault}; the run goes on without")
            file, self._file = self._file, None
            if file is not None:
                _close(file)


def _charts(point: Point) -> dict[str, float]:
    """Its numbers; the step is where they stand."""
    return {name: value for name, value in point.values.items() if name != "step" and value is not None}


def _written(folder: Path) -> int:
    """The last event that is in the files; 0: none is."""
    try:
        return int(json.loads((folder / WRITTEN).read_text())["event"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def _close(file: EventFile) -> None:
    """What it could not write, it cannot write at its end either."""
    with contextlib.suppress(OSError):
        file.close()
