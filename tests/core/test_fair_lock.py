"""The lock that goes round."""

import threading
import time

import pytest

from searchrl_jax.core.fair_lock import FairLock


def test_a_thread_that_asks_again_stands_behind_those_that_wait():
    lock, holders = FairLock(), []

    def hold(name):
        for _ in range(20):
            with lock:
                holders.append(name)
                time.sleep(0.002)

    threads = [threading.Thread(target=hold, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while_all_ask = holders[3:51]
    assert len(holders) == 60
    assert all(one != two for one, two in zip(while_all_ask, while_all_ask[1:], strict=False)), holders


def test_only_one_holds_it_and_an_exception_passes_it_on():
    lock, inside, most = FairLock(), 0, 0

    def hold():
        nonlocal inside, most
        for _ in range(50):
            with pytest.raises(KeyError), lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0.0001)
                inside -= 1
                raise KeyError

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_one_that_is_interrupted_while_it_waits_leaves_the_line(monkeypatch):
    lock = FairLock()
    lock.__enter__()

    def interrupted(ready):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lock._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), lock:
            pass
    lock.__exit__()
    with lock:
        pass
