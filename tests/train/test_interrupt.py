"""Stopping cleanly: the first signal asks, the second insists, and time runs out."""

import os
import signal
import time

import pytest

from searchrl_jax.train.interrupt import StopSignal


def test_nothing_to_stop_for() -> None:
    with StopSignal(24) as stop:
        assert stop.reason is None


def test_first_ctrl_c_sets_the_reason_and_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    with StopSignal(24) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "Ctrl-C"
    assert "finishing the step under way" in capsys.readouterr().out


def test_second_ctrl_c_ends_the_process_as_usual() -> None:
    with StopSignal(24), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_is_a_request_however_often_it_comes() -> None:
    with StopSignal(24) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"


def test_handlers_are_given_back_whatever_happens() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), StopSignal(24):
        raise RuntimeError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_time_limit_counts_from_when_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop = StopSignal(1.5)
    now += 1.5 * 3600 - 1
    assert stop.reason is None
    now += 2
    assert stop.reason == "the time limit of 1.5 hours"
