"""An interrupted validation loses no step and is repeated at the next start."""

from __future__ import annotations

import faulthandler
import signal

import pytest

import train
from megatron_lite import trainer
from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.trainer import Trainer
from tests.faults.kill_loop import outcome


def test_killed_or_signalled_validation_loses_no_step_and_is_repeated(arguments, tmp_path):
    settings = {"schedule.train_steps": 5, "evaluation.interval": 4, "evaluation.batches": 2, "checkpoint.interval": 4}
    assert train.main(arguments("uninterrupted", **settings)) == 0
    words = arguments("resumed", **settings)
    evaluate, step, stop_checks, measured = trainer.evaluate, Trainer._step, [], []

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    def signalled(*args, stop):
        def stop_before_the_second_batch():
            stop_checks.append(1)
            if len(stop_checks) == 2:
                signal.raise_signal(signal.SIGTERM)
            return stop()

        return evaluate(*args, stop=stop_before_the_second_batch)

    def killed_in_step_5(run, steps):
        assert run.state.step == 4
        raise Killed

    def counted(*args, stop):
        measured.append(args[2])
        return evaluate(*args, stop=stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "evaluate", killed)
        with pytest.raises(Killed):
            train.main(words)
        assert checkpoint.read_manifest(checkpoint.resolve(tmp_path / "resumed"))["step"] == 4
        patch.setattr(trainer, "evaluate", signalled)
        assert train.main(words) == 0
        assert len(stop_checks) == 2
        patch.setattr(trainer, "evaluate", evaluate)
        patch.setattr(Trainer, "_step", killed_in_step_5)
        with pytest.raises(Killed):
            train.main(words)
        patch.setattr(Trainer, "_step", step)
        patch.setattr(trainer, "evaluate", counted)
        assert train.main(words) == 0
    assert measured == [None]  # the validation of step 4 is not repeated
    assert outcome(tmp_path / "resumed") == outcome(tmp_path / "uninterrupted")
    assert faulthandler.unregister(signal.SIGUSR2)  # registered by the run to print its stacks
