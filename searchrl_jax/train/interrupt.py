"""Stopping cleanly: Ctrl-C, SIGTERM and the time limit."""

import signal
import time
from types import FrameType, TracebackType
from typing import Self


class Interrupted(Exception):
    """The run stopped early with all its work saved; the message says why."""


class StopSignal:
    """Says when to stop; the loop asks after each step, when everything can be saved.

    As a context manager it takes over SIGINT and SIGTERM. A second SIGINT ends the process at once, as usual: the run
    then goes on from its last checkpoint.
    """

    def __init__(self, limit_hours: float) -> None:
        """Args:
        limit_hours: from now on.
        """
        self._deadline = time.monotonic() + 3600 * limit_hours
        self._limit_hours = limit_hours
        self._received: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def reason(self) -> str | None:
        """Why to stop; None to go on."""
        if self._received is not None:
            return self._received
        return f"the time limit of {self._limit_hours:g} hours" if time.monotonic() > self._deadline else None

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        advice = "finishing the step under way, then saving (Ctrl-C again to stop at once)"
        print(f"\n{self._received}: {advice}", flush=True)
