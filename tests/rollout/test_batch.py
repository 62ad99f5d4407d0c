"""Packing samples into rows."""

from dataclasses import replace

import numpy as np
import pytest

from searchrl_jax.rollout.batch import RowShape, Sample, arrange, fill, pack, unpack


def sample(ids, is_action):
    ids, is_action = np.array(ids), np.array(is_action, bool)
    return Sample(ids, is_action, np.where(is_action, -ids / 10, 99).astype(np.float32), ids / 2)


def test_two_samples_in_a_row_are_laid_out_literally():
    one, two = sample([5, 6, 7, 8], [0, 1, 0, 1]), sample([9, 4, 3], [0, 1, 1])
    (rows,) = pack([two, one], [RowShape(1, 9, 5)])
    assert rows.token_ids.tolist() == [[5, 6, 7, 8, 9, 4, 3, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0, 0]]
    assert rows.target.tolist() == [[1, 3, 5, 6, 1]]
    assert rows.is_action.tolist() == [[True, True, True, True, False]]
    np.testing.assert_allclose(rows.behavior_logprob, [[-0.6, -0.8, -0.4, -0.3, 0]], rtol=1e-6)
    np.testing.assert_allclose(rows.advantage, [[3, 4, 2, 1.5, 0]])


def test_what_a_sample_lacks_is_filled_in():
    whole = sample([5, 6, 7, 8], [0, 1, 0, 1])
    part = replace(
        whole,
        trajectory_tokens=9,
        proximal_logprob=-whole.token_ids / 2,
        reference_logprob=-whole.token_ids / 4,
        value=whole.token_ids * 2.0,
        value_target=whole.token_ids * 3.0,
    )
    (rows,) = pack([whole, part], [RowShape(1, 9, 5)])
    assert rows.trajectory_tokens.tolist() == [[2, 2, 9, 9, 0]]
    np.testing.assert_allclose(rows.proximal_logprob, [[-0.6, -0.8, -3, -4, 0]], rtol=1e-6)
    np.testing.assert_allclose(rows.reference_logprob, [[0, 0, -1.5, -2, 0]])
    np.testing.assert_allclose(rows.value, [[0, 0, 12, 16, 0]])
    np.testing.assert_allclose(rows.value_target, [[0, 0, 18, 24, 0]])


def test_unpack_gives_each_sample_its_own_again():
    rng = np.random.default_rng(1)
    samples = []
    for number in range(12):
        is_action = rng.random(int(rng.integers(2, 11))) < 0.5
        is_action[0], is_action[-1] = False, True
        samples.append(sample(100 * number + np.arange(len(is_action)), is_action))
    layouts = arrange(samples, [RowShape(2, 6, 4), RowShape(3, 25, 12)])
    batches = [fill([[samples[i] for i in row] for row in layout.rows], layout.shape) for layout in layouts]
    found = unpack(samples, layouts, [np.take_along_axis(rows.token_ids, rows.target, axis=1) for rows in batches])
    assert [values.tolist() for values in found] == [each.token_ids[each.is_action].tolist() for each in samples]


def test_masks_follow_length_not_ids():  # fault 9
    # Padding is written as 0; a sample may hold 0, at its end too, and as an action.
    (rows,) = pack([sample([5, 6, 0, 0, 0], [0, 1, 1, 0, 1])], [RowShape(2, 7, 4)])
    assert rows.segment_ids.tolist() == [[1, 1, 1, 1, 1, 0, 0], [0] * 7]
    assert rows.is_action.tolist() == [[True, True, True, False], [False] * 4]
    assert rows.target[0, :3].tolist() == [1, 2, 4]


def test_what_ends_a_turn_is_learnt_also_where_padding_has_its_id():  # fault 9
    """ids [5, 6, 2] with 2 both as end and as padding: [5, 6, 2, 2, 2] in a row, of which three tokens count."""
    (rows,) = pack([sample([5, 6, 2], [0, 1, 1])], [RowShape(1, 5, 4)])
    rows = rows.replace(token_ids=np.array([[5, 6, 2, 2, 2]]))
    assert rows.segment_ids.tolist() == [[1, 1, 1, 0, 0]]
    assert rows.target[rows.is_action].tolist() == [1, 2]


@pytest.mark.parametrize("shapes", [[RowShape(3, 40, 25)], [RowShape(4, 12, 6), RowShape(2, 40, 25)]])
def test_every_sample_is_there_once(shapes):
    rng = np.random.default_rng(0)
    samples = []
    for number in range(30):
        length = int(rng.integers(2, 25))
        is_action = rng.random(length) < 0.5
        is_action[0], is_action[-1] = False, True
        samples.append(sample(1000 * (number + 1) + np.arange(length), is_action))
    found = {}
    for rows in pack(samples, shapes):
        assert (len(rows.token_ids), rows.token_ids.shape[1], rows.target.shape[1]) in [
            (shape.rows, shape.length, shape.actions) for shape in shapes
        ]
        for b in range(len(rows.token_ids)):
            for segment in range(1, rows.segment_ids[b].max() + 1):
                where = rows.segment_ids[b] == segment
                ids = rows.token_ids[b][where]
                taken = rows.is_action[b] & where[rows.target[b]]
                assert rows.positions[b][where].tolist() == list(range(len(ids)))
                assert ids[0] not in found
                found[ids[0]] = ids.tolist(), rows.token_ids[b][rows.target[b][taken]].tolist()
            assert not rows.is_action[b].sum() > rows.target.shape[1]
    want = {each.token_ids[0]: (each.token_ids.tolist(), each.token_ids[each.is_action].tolist()) for each in samples}
    assert found == want


def test_packing_does_not_depend_on_chance_and_fills_rows():
    samples = [sample(np.arange(6) + 10 * i, [0, 1, 1, 0, 0, 1]) for i in range(6)]
    (rows,) = pack(samples, [RowShape(2, 18, 9)])
    assert rows.segment_ids.min() == 1 and rows.segment_ids.max() == 3
    (again,) = pack(samples, [RowShape(2, 18, 9)])
    np.testing.assert_array_equal(rows.token_ids, again.token_ids)
    # Room for tokens alone is not enough: there are 5 action places for 3 actions each.
    assert len(pack(samples, [RowShape(2, 18, 5)])) == 3


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (sample([1, 2, 3], [0, 0, 0]), "at least one action token, got 0"),
        (sample([1, 2, 3], [1, 0, 1]), "expected a prompt"),
        (sample(range(11), [0] * 10 + [1]), "11 tokens and 1 actions, more than the largest row"),
        (sample(range(9), [0] + [1] * 8), "9 tokens and 8 actions, more than the largest row"),
    ],
)
def test_samples_that_teach_nothing_or_do_not_fit_are_refused(bad, says):
    with pytest.raises(ValueError, match=says):
        pack([sample([1, 2], [0, 1]), bad], [RowShape(2, 10, 5)])
