"""Random keys by name.

A key is never split off a running one: who draws first would then change what everybody else gets. It is derived from
the run's seed and from *what it is for*: `named_key(seed, "init", "policy")`, `named_key(seed, "dropout", step)`. A key
is used once.

Sampling has a rule of its own, so that a rollout draws the same tokens whatever slot it sits in, whoever its neighbours
are, and however often the run was killed and resumed:

    token key = fold_in(fold_in(run key, trajectory uid), position)

with the run key `named_key(seed, "rollout")`, the uid that the trajectory keeps for life, and the index of the token in
the trajectory (prompt included), not in the buffer.
"""

import hashlib
from numbers import Integral

import jax
from jaxtyping import Array, Int, Key

_LARGEST_WORD = 2**32 - 1


def named_key(seed: int, *names: str | int | Int[Array, ""]) -> Key[Array, ""]:
    """The key of the purpose that `names` spells, in the run that `seed` starts.

        key_0 = key(seed);  key_n = fold_in(key_{n-1}, word(name_n))

    with word(text) the first 32 bits of its SHA-256 (Python's own `hash` changes with every process) and word(integer)
    itself. Order matters, and ("ab",) is not ("a", "b").

    Args:
        seed: the run's seed, in [0, 2**32).
        names: words, and integers in [0, 2**32) such as a step; an integer may be traced.

    Raises:
        ValueError: a seed or a host integer outside [0, 2**32). JAX would cut the seed to 32 bits: 2**32 would repeat
        the run of 0.
    """
    key = jax.random.key(_checked("seed", seed))
    for name in names:
        if isinstance(name, str):
            key = jax.random.fold_in(key, int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))
        else:
            key = jax.random.fold_in(key, _checked("name", name))
    return key


def token_key(
    run_key: Key[Array, ""], trajectory_uid: int | Int[Array, ""], position: int | Int[Array, ""]
) -> Key[Array, ""]:
    """The key with which a trajectory's token at `position` is sampled.

        key = fold_in(fold_in(run_key, trajectory_uid), position)

    Written for one token; `jax.vmap` it over the slots of an engine.

    Args:
        run_key: the same for the whole run, `named_key(seed, "rollout")`.
        trajectory_uid: unique in the run, in [0, 2**32); given when the trajectory is planned, not when it starts.
        position: index of the token in its trajectory, prompt included.

    Raises:
        ValueError: a host integer outside [0, 2**32).
    """
    row_key = jax.random.fold_in(run_key, _checked("trajectory_uid", trajectory_uid))
    return jax.random.fold_in(row_key, _checked("position", position))


def _checked(what: str, value: int | Array) -> int | Array:
    if isinstance(value, Integral) and not 0 <= value <= _LARGEST_WORD:
        raise ValueError(f"{what} must lie in [0, 2**32), got {value}: keys take 32 bits; choose a smaller one")
    return value
