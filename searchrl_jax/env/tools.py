"""Runs a tool under a deadline, so that one that hangs costs its own episode and no other."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.05


class ToolError(Exception):
    """A tool failed for good; the message says how, for logs, not for the policy."""


class ToolRunner:
    """Calls tools, each on a thread of its own.

    A thread cannot be killed. So a call that passes its deadline is abandoned: nobody waits for it, its result is
    dropped, and being a daemon it does not hold up the interpreter's exit. A pool would lose a worker to each such call
    and, after a few, serve nobody; starting a thread costs some 0.1 ms against the milliseconds of a search.
    """

    def __init__(self, timeout_seconds: float, retries: int, max_abandoned: int = 256) -> None:
        """Sets the limits.

        Args:
            timeout_seconds: for one call with all its retries.
            retries: further attempts after an exception, with waits of 0.05, 0.1, 0.2, ... seconds between.
            max_abandoned: threads stuck at one time past which calls are refused, since each keeps its memory.

        Raises:
            ValueError: a limit is out of range.
        """
        if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
            raise ValueError(f"expected tool_timeout_seconds > 0, got {timeout_seconds}; a tool needs a deadline")
        if retries < 0:
            raise ValueError(f"expected tool_retries >= 0, got {retries}; 0 means one attempt")
        if max_abandoned < 1:
            raise ValueError(f"expected max_abandoned >= 1, got {max_abandoned}; one stuck thread must be bearable")
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        self._max_abandoned = max_abandoned
        self._abandoned: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(self, name: str, function: Callable[[], T]) -> T:
        """The result of `function`, within the time limit.

        Raises:
            ToolError: it raised at every attempt, ran out of time, or too many earlier calls still hang.
        """
        deadline = time.monotonic() + self._timeout_seconds
        for attempt in range(self._retries + 1):
            with self._lock:
                self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
                if len(self._abandoned) >= self._max_abandoned:
                    raise ToolError(f"{name}: {len(self._abandoned)} earlier tool calls still hang; restart the tool")
            outcome: list[tuple[T | None, BaseException | None]] = []
            thread = threading.Thread(target=_attempt, args=(function, outcome), name=f"tool-{name}", daemon=True)
            thread.start()
            thread.join(max(0.0, deadline - time.monotonic()))
            if not outcome:
                with self._lock:
                    self._abandoned.append(thread)
                raise ToolError(f"{name}: no answer within {self._timeout_seconds} s (attempt {attempt + 1})")
            result, error = outcome[0]
            if error is None:
                return result  # type: ignore[return-value]
            wait = _FIRST_WAIT_SECONDS * 2**attempt
            if attempt == self._retries or time.monotonic() + wait >= deadline:
                raise ToolError(f"{name}: {type(error).__name__}: {error} (attempt {attempt + 1})") from error
            time.sleep(wait)
        raise ToolError(f"{name}: not attempted")  # unreachable: retries >= 0


def _attempt(function: Callable[[], T], outcome: list[tuple[T | None, BaseException | None]]) -> None:
    # BaseException: a SystemExit inside a client library must fail the call, not vanish with the thread.
    try:
        outcome.append((function(), None))
    except BaseException as error:
        outcome.append((None, error))
