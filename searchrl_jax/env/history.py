"""What the policy reads before a turn: prompt, actions and observations, the older ones left out or not."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool


def compress(
    prompt: Sequence[int],
    exchanges: Sequence[tuple[Sequence[int], Sequence[int]]],
    left_out: Callable[[Sequence[int]], Sequence[int]],
    *,
    keep: int,
) -> list[int]:
    """The history with all observations but the last `keep` replaced by a placeholder; every action stays.

        exchanges 3, keep 1:    prompt a1 placeholder a2 placeholder a3 o3

    The context then grows by the actions alone, and where a placeholder stands for what was read before, it is no
    extension of the last one: a row of training ends there.

    Args:
        exchanges: ids of each action and of the observation that followed it, in order.
        left_out: of the ids of an action, those of an observation that says that it is left out.
        keep: at least 0; 0 keeps all.

    Source:
        WebAgent-R1, arXiv:2505.16421, section 3.2 (dynamic context compression), with keep 1.
    """
    first_kept = len(exchanges) - keep if keep else 0
    ids = list(prompt)
    for index, (action, observation) in enumerate(exchanges):
        ids += action
        ids += observation if index >= first_kept else left_out(action)
    return ids


def rows_between(row_starts: Sequence[int], is_action: Bool[np.ndarray, " L"]) -> list[slice]:
    """The tokens of each row up to its last action: what follows that is not learnt from.

    Args:
        row_starts: index of the first token of each row, ascending from 0; each row has an action.
    """
    ends = (*row_starts[1:], len(is_action))
    return [
        slice(start, start + int(np.flatnonzero(is_action[start:end])[-1]) + 1)
        for start, end in zip(row_starts, ends, strict=True)
    ]
