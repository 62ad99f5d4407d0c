"""A lock that is passed on in the order in which it was asked for."""

import threading
from collections import deque


class FairLock:
    """`with lock:` waits behind all that asked before.

    The learner and the rollouts' worker hold one around each of their programs, so that a device runs them in turns: a
    `threading.Lock` would go back to the thread that has just released it, time and again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # the first holds the lock

    def __enter__(self) -> None:
        me = object()
        with self._changed:
            self._line.append(me)
            try:
                self._changed.wait_for(lambda: self._line[0] is me)
            except BaseException:
                self._leave(me)
                raise

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._leave(self._line[0])

    def _leave(self, who: object) -> None:
        self._line.remove(who)
        self._changed.notify_all()
