import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.core.random import named_key, token_key


def bits(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_equal_names_give_equal_keys_and_others_don_t():
    spelled = [(), ("ab",), ("a", "b"), ("b", "a"), ("a",), ("a", 0), ("a", 1), ("init", "policy"), ("init", "value")]
    assert len({bits(named_key(7, *names)) for names in spelled}) == len(spelled)
    assert bits(named_key(7, "init", "policy")) == bits(named_key(7, "init", "policy"))
    assert bits(named_key(7, "init")) != bits(named_key(8, "init"))


def test_names_hash_the_same_in_every_process():
    # 0xa4fa034c starts sha256("rollout"): `printf rollout | sha256sum`.
    assert bits(named_key(0, "rollout")) == bits(jax.random.fold_in(jax.random.key(0), 0xA4FA034C))


def test_an_integer_may_be_traced_or_numpy():
    plain = bits(named_key(3, "dropout", 12))
    assert bits(named_key(3, "dropout", np.int64(12))) == plain
    assert bits(jax.jit(lambda step: named_key(3, "dropout", step))(12)) == plain


def test_token_key_follows_the_rule():
    run_key = named_key(0, "rollout")
    expected = jax.random.fold_in(jax.random.fold_in(run_key, 41), 7)
    assert bits(token_key(run_key, 41, 7)) == bits(expected)
    assert bits(token_key(run_key, 7, 41)) != bits(expected)


def test_token_keys_don_t_depend_on_the_slot_or_the_company():
    run_key = named_key(0, "rollout")
    over_slots = jax.vmap(token_key, in_axes=(None, 0, 0))
    alone = over_slots(run_key, jnp.array([41]), jnp.array([7]))
    crowd = over_slots(run_key, jnp.array([3, 9, 41]), jnp.array([0, 2, 7]))
    assert bits(alone[0]) == bits(crowd[2])
    assert len({bits(key) for key in crowd}) == 3


@pytest.mark.parametrize("seed, names", [(2**32, ()), (-1, ()), (0, (2**32,)), (0, (-1,)), (0, (np.int64(2**32),))])
def test_integers_beyond_32_bits_are_refused(seed, names):
    with pytest.raises(ValueError, match=r"must lie in \[0, 2\*\*32\)"):
        named_key(seed, *names)


@pytest.mark.parametrize("uid, position", [(-1, 0), (0, -1), (2**32, 0)])
def test_token_keys_refuse_them_too(uid, position):
    with pytest.raises(ValueError, match=r"2\*\*32"):
        token_key(named_key(0), uid, position)
