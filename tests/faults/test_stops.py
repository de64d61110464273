"""Signals, and ranks that are killed, fail, hang or are slow: the run ends or continues, and names the rank."""

from __future__ import annotations

import itertools
import os
import re
import signal

import pytest

import train
from megatron_lite.checkpoint import reader as checkpoint
from tests.cli.conftest import assert_same_run, metrics_lines, output_of, run_words, train_lines, wait_for
from tests.faults.conftest import pid_of_rank, wait_for_step
from tests.parity import launch as processes

INJECT = ("-m", "tests.faults.inject")


@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_sigterm_to_one_rank_stops_all_after_the_same_step(launch, arguments, tmp_path, layout):
    settings = {"schedule.train_steps": 40, "checkpoint.interval": 0, "optimizer.lr": 1e-4}
    parallel = {} if layout == "data" else {f"parallel.{layout}": 2}
    # Slow from step 5 on: two forward passes per step of a pipeline, else one.
    agent = launch(["pace", "-1", "5" if layout == "data" else "9", *arguments(**settings, **parallel)], *INJECT)
    wait_for_step(agent, tmp_path / "run", 5)
    os.kill(pid_of_rank(agent, 1), signal.SIGTERM)
    output = output_of(agent)
    stopped = int(re.search(r"stopped after step (\d+)", output)[1])
    manifest = checkpoint.read_manifest(checkpoint.resolve(tmp_path / "run"))
    assert manifest["step"] == stopped == train_lines(tmp_path / "run")[-1]["step"] < 40
    assert len([name for name in manifest["files"] if name.startswith("weights")]) == 2
    assert train.main(arguments(**settings)) == 0  # resumes, here in one process
    assert train.main(arguments("alone", **settings)) == 0
    assert_same_run(tmp_path / "run", tmp_path / "alone")


def test_kill_during_a_save_leaves_the_previous_checkpoint(launch, arguments, tmp_path):
    settings = {"schedule.train_steps": 30, "checkpoint.interval": 4, "run.heartbeat_seconds": 3, "optimizer.lr": 1e-4}
    words = arguments(**settings, **{"checkpoint.asynchronous": "true"})
    agent = launch(["stuck-save", "1", "8", *words], *INJECT)
    folder = tmp_path / "run" / "checkpoints"
    wait_for(lambda: len(list(folder.glob(".step_00000008.writing/weights-00000*"))) == 1, agent)
    wait_for_step(agent, tmp_path / "run", 11)  # training continues during the save
    assert train.main(words) == 1  # the folder is in use
    assert checkpoint.resolve(folder).name == "step_00000004"
    victim = pid_of_rank(agent, 1)
    os.kill(victim, signal.SIGKILL)
    output = output_of(agent, None)
    assert re.search(
        rf"error: rank 0 waited in vain: rank 1 \([^)]*process {victim}, after step \d+\) was killed", output
    ), output
    assert "Signal 9 (SIGKILL)" in output  # torchrun's own table
    assert checkpoint.resolve(folder).name == "step_00000004"
    assert train.main(words) == 0  # resumes, here in one process
    assert sorted(path.name for path in folder.glob("step_*")) == [
        f"step_{s:08d}" for s in (4, 8, 12, 16, 20, 24, 28, 30)
    ]
    assert train.main(arguments("alone", **settings)) == 0
    assert_same_run(tmp_path / "run", tmp_path / "alone")


def test_run_restarted_by_torchrun_equals_the_uninterrupted_one(launch, arguments, tmp_path):
    settings = {"schedule.train_steps": 24, "checkpoint.interval": 10, "optimizer.lr": 1e-4}
    agent = launch(["pace", "-1", "12", *arguments(**settings)], *INJECT, options=("--max-restarts=1",))
    wait_for_step(agent, tmp_path / "run", 12)
    os.kill(pid_of_rank(agent, 1), signal.SIGKILL)
    output = output_of(agent)
    assert "step_00000010 at step 10" in output  # start of the second attempt
    assert train.main(arguments("alone", **settings)) == 0
    assert_same_run(tmp_path / "run", tmp_path / "alone")


def test_error_of_one_rank_is_named_by_the_other_rank(launch, arguments):
    agent = launch(["error", "1", "3", *arguments(**{"run.heartbeat_seconds": 30})], *INJECT)
    output = output_of(agent, None)
    assert re.search(r"error: .*rank 1 \(.* after step 2\) ended with an error \(KeyError: 'injected'\)", output), (
        output
    )
    assert re.search(r"\[rank0\].*Connection closed by peer", output), output  # not only rank 1 itself


def test_hanging_rank_is_named_and_every_rank_prints_its_stacks(launch, arguments):
    settings = {"run.watchdog_minutes": 0.03, "run.timeout_minutes": 0.1, "run.heartbeat_seconds": 6}
    # torchrun kills the hanging rank soon, which would otherwise end itself after the heartbeat timeout.
    options = ("--shutdown-timeout=1",)
    agent = launch(["hang", "1", "3", *arguments(**settings)], *INJECT, options=options)
    output = output_of(agent, None)
    for rank in (0, 1):
        assert re.search(rf"Timeout: rank {rank} of 2 \(.*\): no step ended for \d+\.\d s; its threads:", output), (
            output
        )
    stacks = output.split("Timeout: rank 1 of 2", 1)[1]
    assert re.search(r'inject\.py", line \d+ in forward', stacks)
    assert re.search(
        r"rank 0 waited in vain: rank 1 .* is alive and did not join: \S*inject\.py:\d+ forward", output
    ), output


NOT_FINITE = {
    "data": {"batch.micro_batch_size": 2},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2},
    "context": {"parallel.context": 2},
}


@pytest.fixture(scope="module")
def not_finite_runs(corpus, tmp_path_factory):
    """Return the folder of runs with a NaN in step 3 of rank 1: one of two processes per layout, and `alone` of one process.

    All runs read the same samples per step.
    """
    from models.block import Block
    from tests.faults import inject

    folder = tmp_path_factory.mktemp("not_finite")
    settings = {"batch.micro_batch_size": 4, "schedule.train_steps": 5}
    runs = [[*run_words(corpus, folder, name, **{**settings, **more}), "--then"] for name, more in NOT_FINITE.items()]
    processes.launch_forked("tests.faults.inject", 2, "nan", "1", "3", *itertools.chain(*runs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", Block.forward)
        inject.install("nan", 3)
        assert train.main(run_words(corpus, folder, "alone", **settings)) == 0
    return folder


@pytest.mark.parametrize("layout", NOT_FINITE)
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all_ranks(not_finite_runs, layout):
    lines = metrics_lines(not_finite_runs / layout)
    assert [line["skipped_steps"] for line in lines if line["kind"] == "train"] == [0, 0, 1, 1, 1]
    (fault,) = (line for line in lines if line["kind"] in ("transient_fault", "persistent_fault"))
    assert (fault["kind"], fault["step"]) == ("transient_fault", 3)
    owners = "ranks 0-1" if layout == "tensor" else "rank 1"  # tensor ranks share every layer
    assert re.match(
        rf"the loss of {owners} \(\S+\) was not finite; computed once more .* transient fault", fault["text"]
    )
    for line, other in zip(train_lines(not_finite_runs / layout), train_lines(not_finite_runs / "alone"), strict=True):
        if line["step"] == 3:
            assert line["loss"] is None is other["loss"]
        else:
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)


def test_slow_rank_is_named(launch, arguments, tmp_path):
    agent = launch(["slow", "1", "1", *arguments(**{"logging.spread_interval": 2})], *INJECT)
    output = output_of(agent)
    assert re.search(r"step 4: rank 1 \(\S+\) takes for its forward pass \d{3,} ms, the median is", output), output
    lines = metrics_lines(tmp_path / "run")
    measured = [line for line in lines if "step_seconds_spread" in line]
    assert [line["step"] for line in measured] == [2, 4, 6, 8]
    assert all(line["step_seconds_max_rank"] == 1 and line["step_seconds_spread"] > 1.3 for line in measured)
    # On a loaded machine another process, or the probe, may be slow as well.
    forward = re.compile(r"rank 1 \(\S+\) takes for its forward pass")
    named = [line["step"] for line in lines if line["kind"] == "slow_rank" and forward.match(line["text"])]
    assert named == [4, 6, 8]
