"""A part of the terminal that is drawn again and again, below which nothing stands; news scroll above it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live

from quartet.kit.standard_streams import only_shown, shown

REFRESH_PER_SECOND: Final = 4


class LiveArea:
    """Gone once it is closed."""

    def __init__(self, drawn: Callable[[], RenderableType], console: Console | None = None) -> None:
        """`drawn` is asked for what is to be seen, each time."""
        self._live = Live(
            console=console,
            refresh_per_second=REFRESH_PER_SECOND,
            get_renderable=drawn,
            transient=True,
            redirect_stderr=True,
        )
        self._live.start()

    def say(self, line: str) -> None:
        """Above it."""
        with only_shown(sys.stdout):
            self._live.console.print(shown(line), highlight=False, markup=False)

    def close(self) -> None:
        """Take it off the terminal."""
        with only_shown(sys.stdout):
            self._live.stop()
