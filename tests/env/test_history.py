"""Histories with older observations left out."""

import numpy as np
import pytest

from searchrl_jax.env.history import compress, rows_between

PROMPT = [1, 2]
EXCHANGES = [([10, 11], [20, 21, 22]), ([12], [23]), ([13], [24, 25])]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (0, [1, 2, 10, 11, 20, 21, 22, 12, 23, 13, 24, 25]),
        (1, [1, 2, 10, 11, -10, 12, -12, 13, 24, 25]),
        (2, [1, 2, 10, 11, -10, 12, 23, 13, 24, 25]),
        (3, [1, 2, 10, 11, 20, 21, 22, 12, 23, 13, 24, 25]),
        (4, [1, 2, 10, 11, 20, 21, 22, 12, 23, 13, 24, 25]),
    ],
)
def test_all_but_the_last_observations_give_way_and_every_action_stays(keep, expected):
    def left_out(action):
        return [-action[0]]  # a dialect may name in it the tool that the action called

    assert compress(PROMPT, EXCHANGES, left_out, keep=keep) == expected
    assert compress(PROMPT, [], left_out, keep=keep) == PROMPT
    assert (PROMPT, EXCHANGES[0]) == ([1, 2], ([10, 11], [20, 21, 22]))


def test_rows_end_with_their_last_action():
    is_action = np.array([False, True, False, False, True, True, False, True, False])
    assert rows_between((0,), is_action) == [slice(0, 8)]
    assert rows_between((0, 3), is_action) == [slice(0, 2), slice(3, 8)]
    assert rows_between((0, 6), is_action) == [slice(0, 6), slice(6, 8)]
