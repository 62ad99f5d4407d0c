"""The share of rollouts that may fail for good before the run stops."""

from collections import deque

WINDOW = 256
LEAST = 32


class TooManyFailures(RuntimeError):
    """Tools fail so often that training on what is left would mislead; the message says how often, and how."""


class FailureLimit:
    """Counts rollouts that were given up because their tools failed, over the latest `WINDOW` rollouts.

    The share is taken of at least `LEAST` rollouts, so that one bad rollout among the first few stops nothing:

        stops where    failed > max_share * max(rollouts in the window, LEAST)
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._has_failed: deque[bool] = deque(maxlen=WINDOW)

    def count(self, has_failed: bool, detail: str | None) -> None:
        """Takes note of one more finished rollout.

        Args:
            detail: how it failed, for the message.

        Raises:
            TooManyFailures: the limit is passed.
        """
        self._has_failed.append(has_failed)
        failed, seen = sum(self._has_failed), len(self._has_failed)
        if has_failed and failed > self._max_share * max(seen, LEAST):
            raise TooManyFailures(
                f"rollout.max_failed_share: expected at most {self._max_share:.1%} of the latest rollouts to be given "
                f"up because their tools failed, got {failed} of {seen}; the last one: {detail}; mend the tool and "
                "start the same command again, or raise the limit"
            )
