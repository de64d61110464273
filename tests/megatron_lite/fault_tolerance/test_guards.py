"""Guards of a run: loss spikes, skipped steps, hangs and signals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from megatron_lite.config.schema import RunConfig
from megatron_lite.fault_tolerance.guards import SkipCounter, SpikeGuard, StopSignal, TooManySkippedSteps, Watchdog
from megatron_lite.trainer import TrainState
from tests.cli.conftest import ROOT


def start(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def errors_of(code: str) -> str:
    """Run Python code in another process, which must succeed; return its standard error."""
    with start(code) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return errors


def test_spike_guard_skips_only_far_above_the_running_mean():
    guard = SpikeGuard(2.0, warmup=5)
    assert [guard.should_skip(loss) for loss in (8.0, 30.0, 6.0, 5.0, 4.0)] == [False] * 5  # the warmup
    mean = guard.mean
    assert not guard.should_skip(1.9 * mean)
    updated = guard.mean
    assert guard.should_skip(2.1 * updated)
    assert guard.mean == updated  # a spike does not move the mean
    assert updated == pytest.approx(0.98 * mean + 0.02 * 1.9 * mean)
    assert guard.should_skip(float("nan"))
    assert not guard.should_skip(3.0)


def test_the_spike_guard_is_off_at_zero_and_continues_from_a_stored_mean():
    off = SpikeGuard(0.0)
    assert not any(off.should_skip(loss) for loss in [1.0] * 60 + [1e6])
    assert SpikeGuard(2.0, 3.0, 50).should_skip(7.0)
    assert not SpikeGuard(2.0, 3.0, 49).should_skip(7.0)


def test_resumed_spike_guard_equals_the_uninterrupted_one():
    losses = [8.0, 7.0, 30.0, 6.0, 30.0, 5.0]
    whole, first = SpikeGuard(2.0, warmup=4), SpikeGuard(2.0, warmup=4)
    expected = [whole.should_skip(loss) for loss in losses]
    assert expected == [False] * 4 + [True, False]
    skips = [first.should_skip(loss) for loss in losses[:2]]
    resumed = SpikeGuard(2.0, first.mean, first.seen, warmup=4)
    assert skips + [resumed.should_skip(loss) for loss in losses[2:]] == expected
    assert (resumed.mean, resumed.seen) == (whole.mean, whole.seen)


def test_old_state_without_loss_count_has_one_loss_per_update():
    state = TrainState.from_dict({"step": 60, "skipped_steps": 3, "loss_mean": 2.0})
    assert state.losses_seen == 57
    assert TrainState.from_dict({**asdict(state), "losses_seen": 9}).losses_seen == 9
    assert TrainState.from_dict({}) == TrainState()  # of imported weights


def test_the_skip_counter_counts_in_a_row_and_names_steps_and_samples(tmp_path):
    others = tmp_path / "others"
    others.mkdir()

    def record(counter: SkipCounter, step: int, skipped: bool) -> None:
        counter.record(
            step=step, skipped=skipped, samples=(8 * step, 8 * step + 8), loss=float("nan"), gradient_norm=1.0
        )

    for counter in (SkipCounter(3, others, writes=False), SkipCounter(3, tmp_path)):
        for step, skipped in enumerate([True, True, False, True, True]):
            record(counter, step, skipped)
        with pytest.raises(
            TooManySkippedSteps, match=r"steps 3 to 5, samples 24 to 47\. .*skipped_step_00000005\.json"
        ):
            record(counter, 5, True)
    assert not list(others.iterdir())
    dump = json.loads((tmp_path / "skipped_step_00000005.json").read_text())
    assert dump[-1] == {
        "step": 5,
        "skipped": True,
        "first_sample": 40,
        "last_sample": 47,
        "loss": "nan",
        "gradient_norm": "1.0",
    }


@pytest.mark.parametrize(("limit", "dumped"), [(7, 100), (150, 150)])
def test_dump_holds_a_hundred_steps_and_all_skipped_ones(tmp_path, limit, dumped):
    counter = SkipCounter(limit, tmp_path)

    def skipped_from_200_on() -> None:
        for step in range(400):
            counter.record(step=step, skipped=step >= 200, samples=(step, step + 1), loss=math.nan, gradient_norm=1.0)

    with pytest.raises(TooManySkippedSteps, match=f"steps 200 to {199 + limit}, samples 200 to {199 + limit}"):
        skipped_from_200_on()
    (dump,) = tmp_path.iterdir()
    assert [entry["step"] for entry in json.loads(dump.read_text())] == list(range(200 + limit - dumped, 200 + limit))


def test_the_watchdog_prints_the_stack_of_a_step_that_hangs():
    code = (
        "import sys, time\n"
        "from megatron_lite.fault_tolerance.guards import Watchdog\n"
        "def a_step_that_hangs():\n"
        "    time.sleep(1.5)\n"
        "with Watchdog(0.005) as dog:\n"
        "    dog.kick()\n"
        "    a_step_that_hangs()\n"
        "print('the run is over', file=sys.stderr)\n"
        "time.sleep(0.8)\n"
    )
    errors = errors_of(code)
    assert "a_step_that_hangs" in errors
    assert "Timeout: this process" in errors
    assert errors.endswith("the run is over\n")
    assert errors.count("a_step_that_hangs") >= 2  # again and again while it hangs, and not after


def test_stacks_of_a_call_that_holds_the_interpreter_lock():
    """Print stacks before the heartbeat of other processes ends the run: no Python thread runs, not even the heartbeat."""
    code = (
        "import ctypes, time\n"
        "from megatron_lite.fault_tolerance.guards import Watchdog\n"
        "def a_call_that_holds_the_interpreter():\n"
        "    ctypes.PyDLL(None).usleep(60_000_000)\n"  # the signal interrupts it
        "for delay in (0.1, 0.2):\n"
        "    with Watchdog(10, delay=delay, stuck_seconds=0.2) as dog:\n"
        "        a_call_that_holds_the_interpreter()\n"
    )
    errors = errors_of(code)
    seconds = [line.split(" ran for ")[1] for line in errors.splitlines() if "no Python thread" in line]
    assert seconds == ["0.3 s; its threads:", "0.4 s; its threads:"]  # 0.2 s and the delay, of each watchdog
    assert errors.count("in a_call_that_holds_the_interpreter") == 2


def test_a_pause_prints_no_stacks():
    """Pause one process, then both. Reading stacks while threads run ended paused runs with a segmentation fault."""
    code = (
        "import sys\n"
        "from megatron_lite.fault_tolerance.guards import Watchdog\n"
        "with Watchdog(10, stuck_seconds=1.0) as dog:\n"
        "    print(dog._monitor.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with start(code) as process:
        assert process.stdout is not None
        monitor = int(process.stdout.readline())
        for paused in ((process.pid,), (process.pid, monitor)):
            for number, seconds in ((signal.SIGSTOP, 1.4), (signal.SIGCONT, 0.2)):
                for pid in paused:
                    os.kill(pid, number)
                time.sleep(seconds)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_the_monitor_ends_with_its_process():
    """End at the end of the watchdog and after SIGKILL, although a forked process holds the pipe."""
    code = (
        "import os, signal, time\n"
        "from megatron_lite.fault_tolerance.guards import Watchdog\n"
        "with Watchdog(10, stuck_seconds=1.0) as dog:\n"
        "    if (child := os.fork()) == 0:\n"
        "        os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
        "print(child, flush=True)\n"
        "with Watchdog(10, stuck_seconds=1.0) as dog:\n"
        "    if (other := os.fork()) == 0:\n"
        "        os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
        "    print(other, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with start(code) as process:
        output, errors = process.communicate(timeout=30)  # both monitors hold standard error
    for pid in map(int, output.split()):
        os.kill(pid, signal.SIGKILL)
    assert (process.returncode, errors) == (-signal.SIGKILL, "")


def test_default_watchdog_acts_before_the_default_timeouts():
    run = RunConfig()
    assert 2 * run.watchdog_minutes <= run.timeout_minutes < run.save_timeout_minutes


def test_the_watchdog_stays_silent_while_steps_end():
    code = (
        "import time\n"
        "from megatron_lite.fault_tolerance.guards import Watchdog\n"
        "with Watchdog(0.04) as dog:\n"  # 2.4 s
        "    for _ in range(28):\n"
        "        time.sleep(0.1); dog.kick()\n"
    )
    assert errors_of(code) == ""


def test_the_watchdog_waits_longer_for_long_work():
    dog = Watchdog(2.0, delay=5.0)
    dog.kick(3.0)
    assert dog._due - dog._kicked == pytest.approx(3 * 120 + 5)


def test_signals_set_the_flag_and_handlers_come_back():
    previous = signal.getsignal(signal.SIGUSR1)
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler sends it next; the save continues
    assert signal.getsignal(signal.SIGUSR1) is previous
    with StopSignal(early=stop) as later:
        assert later.received == stop.received == "SIGTERM"


def test_the_second_interrupt_is_immediate():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_skipped_steps_of_an_earlier_start_count(tmp_path):
    counter = SkipCounter(3, tmp_path, in_a_row=2)
    with pytest.raises(TooManySkippedSteps, match="3 consecutive steps were skipped"):
        counter.record(step=7, skipped=True, samples=(24, 28), loss=math.nan, gradient_norm=math.inf)
    with pytest.raises(TooManySkippedSteps, match=r"^1 consecutive step was skipped .* holds the last 1 step\. Lower"):
        SkipCounter(1, tmp_path).record(step=1, skipped=True, samples=(0, 4), loss=math.nan, gradient_norm=math.inf)
    state = TrainState(skipped_steps=2, skipped_in_a_row=2)
    assert TrainState.from_dict(asdict(state)).skipped_in_a_row == 2
    assert TrainState.from_dict({"skipped_steps": 2}).skipped_in_a_row == 0  # of an earlier version
