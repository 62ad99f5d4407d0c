"""Tools under a deadline: fault 29."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from searchrl_jax.env.tools import ToolError, ToolRunner


def test_a_result_is_returned_and_passing_trouble_is_retried():
    attempts = []

    def flaky():
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("try again")
        return "found"

    assert ToolRunner(5.0, retries=2).run("search", flaky) == "found"
    assert len(attempts) == 3


def test_lasting_trouble_is_an_error_that_says_what_and_how_often():
    def broken():
        raise ConnectionError("no route")

    with pytest.raises(ToolError, match=r"search: ConnectionError: no route \(attempt 2\)"):
        ToolRunner(5.0, retries=1).run("search", broken)


def test_a_tool_that_exits_its_thread_fails_its_call_only():
    def leaving():
        raise SystemExit(1)

    with pytest.raises(ToolError, match="SystemExit"):
        ToolRunner(5.0, retries=0).run("search", leaving)


def test_a_hanging_tool_is_an_error_at_its_limit_and_the_others_are_served():
    release = threading.Event()
    runner = ToolRunner(0.3, retries=5)

    def call(index):
        began = time.monotonic()
        try:
            return runner.run("search", (lambda: release.wait(60)) if index < 16 else (lambda: index)), 0.0
        except ToolError:
            return None, time.monotonic() - began

    with ThreadPoolExecutor(64) as pool:
        outcomes = list(pool.map(call, range(64)))
    assert [result for result, _ in outcomes] == [None] * 16 + list(range(16, 64))
    assert all(0.29 < seconds < 1.5 for _, seconds in outcomes[:16])  # once, not once for each retry
    assert runner.run("search", lambda: "alive") == "alive"
    release.set()


def test_stuck_threads_are_bounded_and_forgotten_when_they_end():
    release = threading.Event()
    runner = ToolRunner(0.05, retries=0, max_abandoned=2)
    for _ in range(2):
        with pytest.raises(ToolError, match="no answer"):
            runner.run("search", lambda: release.wait(60))
    with pytest.raises(ToolError, match="2 earlier tool calls still hang"):
        runner.run("search", lambda: "not run")
    release.set()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(thread.name == "tool-search" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert runner.run("search", lambda: "run") == "run"


def test_a_stuck_thread_does_not_hold_up_the_exit_of_the_interpreter():
    program = (
        "import time; from searchrl_jax.env.tools import ToolRunner, ToolError\n"
        "try: ToolRunner(0.1, 0).run('search', lambda: time.sleep(60))\n"
        "except ToolError: print('error')"
    )
    finished = subprocess.run([sys.executable, "-c", program], timeout=20, capture_output=True, text=True, check=True)
    assert finished.stdout == "error\n"


@pytest.mark.parametrize("bad", [(0.0, 1), (float("nan"), 1), (1.0, -1), (1.0, 1, 0)])
def test_bad_limits_are_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        ToolRunner(*bad)
