"""Values that do not fit together are refused, and a value that a message names is allowed."""

from __future__ import annotations

import pytest

from megatron_lite.config.loader import load_config

from .stand_in import REQUIRED, StandIn, problems

EQUATION = "global_batch_size = micro_batch_size x gradient_accumulation_steps x data ranks"


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        (
            ("micro_batch_size=8", "global_batch_size=100"),
            4,
            f"= 100 is no multiple of micro_batch_size 8 x 4 data ranks = 32: {EQUATION} (4 from WORLD_SIZE); nearest: "
            "batch.global_batch_size=96 or batch.global_batch_size=128 or batch.micro_batch_size=5",
        ),
        (
            ("micro_batch_size=8", "global_batch_size=6"),
            4,
            f"= 6 is no multiple of micro_batch_size 8 x 4 data ranks = 32: {EQUATION} (4 from WORLD_SIZE); nearest: "
            "batch.global_batch_size=32",
        ),
        (
            ("micro_batch_size=7", f"global_batch_size={10**15}"),  # too large to enumerate its divisors
            1,
            f"= {10**15} is no multiple of micro_batch_size 7 x 1 data ranks = 7: {EQUATION} (1 from WORLD_SIZE); nearest: "
            "batch.global_batch_size=999999999999994 or batch.global_batch_size=1000000000000001 or batch.micro_batch_size=8",
        ),
        (
            (f"micro_batch_size={10**12}", "global_batch_size=6"),  # too large to try every number below it
            1,
            f"= 6 is no multiple of micro_batch_size {10**12} x 1 data ranks = {10**12}: {EQUATION} (1 from WORLD_SIZE); "
            f"nearest: batch.global_batch_size={10**12} or batch.micro_batch_size=6",
        ),
        (
            ("micro_batch_size=null", "gradient_accumulation_steps=3", "global_batch_size=8"),
            1,
            f"= 8 is no multiple of gradient_accumulation_steps 3 x 1 data ranks = 3: {EQUATION} (1 from WORLD_SIZE); "
            "nearest: batch.global_batch_size=6 or batch.global_batch_size=9 or batch.gradient_accumulation_steps=2",
        ),
        (
            ("micro_batch_size=2", "gradient_accumulation_steps=3", "global_batch_size=8"),
            2,
            f"= 8 is not 2 x 3 x 2 = 12: {EQUATION} (2 from WORLD_SIZE); set batch.global_batch_size=12, or set one of "
            "the three to null and it is derived",
        ),
    ],
)
def test_impossible_batch_sizes(given: tuple[str, ...], ranks: int, message: str) -> None:
    (line,) = problems(*(f"batch.{part}" for part in given), ranks=ranks)
    assert line == f"batch.global_batch_size {message} (override batch.{given[-1]})"


def test_nearest_batch_sizes_are_legal() -> None:
    (line,) = problems("batch.micro_batch_size=7", "batch.global_batch_size=60", ranks=3)
    choices = line.partition("nearest: ")[2].partition(" (")[0].split(" or ")
    assert len(choices) == 3
    for choice in choices:
        load_config(
            [],
            [*REQUIRED, "batch.micro_batch_size=7", "batch.global_batch_size=60", choice],
            model_type=StandIn,
            world_size=3,
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("schedule.warmup_steps=5", "schedule.warmup_fraction=0.1"),
            "schedule.warmup_steps and schedule.warmup_fraction both given: "
            "one of them is allowed; set the other to null",
        ),
        (("schedule.warmup_steps=101",), "schedule.warmup_steps = 101: at most schedule.train_steps = 100 is allowed"),
        (
            ("schedule.time_budget_minutes=2", "schedule.warmup_steps=101"),
            "schedule.warmup_steps = 101: at most schedule.train_steps = 100 is allowed, which schedule.time_budget_minutes = 2 "
            "lowers to the speed of the machine; schedule.warmup_fraction adapts to it",
        ),
        (
            ("schedule.time_budget_minutes=2", "checkpoint.extra_steps=[101]"),
            "checkpoint.extra_steps holds 101: at most schedule.train_steps = 100 is allowed, which "
            "schedule.time_budget_minutes = 2 lowers to the speed of the machine",
        ),
        (
            ("schedule.warmup_steps=50", "schedule.decay_steps=40"),
            "schedule.decay_steps = 40: at least schedule.warmup_steps = 50 is allowed",
        ),
        (
            ("schedule.kind=wsd", "schedule.warmup_steps=50", "schedule.wsd_decay_fraction=0.6"),
            "schedule.wsd_decay_fraction = 0.6 of 100 steps begins before the warmup of 50 ends: "
            "at most 0.5 is allowed",
        ),
        (
            ("checkpoint.extra_steps=[5, 101, 200]",),
            "checkpoint.extra_steps holds 101, 200: at most schedule.train_steps = 100 is allowed",
        ),
        (
            ("precision.dtype=fp32", "precision.optimizer_state=bf16"),
            "precision.optimizer_state = bf16 with precision.dtype = fp32: fp32 is allowed, or set precision.dtype=bf16",
        ),
        (
            ("precision.fp8.recipe=rowwise", "precision.dtype=fp16"),
            "precision.fp8.recipe = rowwise with precision.dtype = fp16: bf16 is allowed; set precision.dtype=bf16, or "
            "recipe=none",
        ),
        (
            ("precision.fp8.recipe=rowwise", "parallel.zero_stage=3"),
            "precision.fp8.recipe = rowwise is not supported with parallel.zero_stage = 3: set parallel.zero_stage to 0, 1 or 2, "
            "or recipe=none",
        ),
        (
            ("precision.fp8.recipe=rowwise", "parallel.compile=true"),
            "precision.fp8.recipe = rowwise is not supported with parallel.compile = true: set parallel.compile=false, or "
            "recipe=none",
        ),
        (
            ("optimizer.name=muon", "precision.dtype=fp16"),
            "optimizer.name = muon is not supported with precision.dtype = fp16, in which it was not shown to be stable: "
            "bf16 and fp32 are allowed, or optimizer.name = adamw",
        ),
        (
            ("optimizer.name=muon", "parallel.zero_stage=3"),
            "optimizer.name = muon is not supported with parallel.zero_stage = 3, which cuts every matrix: 0, 1 and 2 are "
            "allowed, or optimizer.name = adamw",
        ),
        (
            ("schedule.kind=linear", "schedule.wsd_decay_fraction=0.5"),
            "schedule.wsd_decay_fraction = 0.5 requires schedule.kind = wsd; set it, or remove this key",
        ),
        (
            ("optimizer.muon.momentum=0.9",),
            "optimizer.muon.momentum = 0.9 requires optimizer.name = muon; set it, or remove this key",
        ),
        (
            ("precision.dtype=bf16", "precision.fp16.hysteresis=3"),
            "precision.fp16.hysteresis = 3 requires precision.dtype = fp16; set it, or remove this key",
        ),
        (
            ("run.device=cpu", "precision.dtype=fp16"),
            "precision.dtype = fp16 does not train on the cpu (run.device = cpu): auto, bf16 and fp32 are allowed",
        ),
        (
            ("parallel.activation_checkpointing={mode: full, others: elementwise}",),
            "parallel.activation_checkpointing.others = elementwise with every = 1, so there are no other blocks: set every, or "
            "mode=elementwise for all",
        ),
        (
            ("model.max_positions=128", "batch.sequence_length=129"),
            "batch.sequence_length = 129: at most model.max_positions = 128 is allowed",
        ),
        (
            ("run.spike_factor=0.5",),
            "run.spike_factor = 0.5 would skip ordinary steps: 0 (off) or a number above 1 is allowed",
        ),
        (("data.corpus=null",), "data has no text: set data.corpus (stdlib, or files) or data.train (a token file)"),
        (
            ("data.tokenizer.type=bytes", "data.train=x"),
            "data.corpus and data.train both given: one of them is allowed; set the other to null",
        ),
        (("data.corpus=[]",), "data has no text: set data.corpus (stdlib, or files) or data.train (a token file)"),
        (("data.validation=x",), "data.validation is a token file, which requires data.train instead of data.corpus"),
        (
            ("data.tokenizer.type=bytes", "data.tokenizer.path=x"),
            "data.tokenizer.path = x: the tokenizer bytes has no file; remove this key",
        ),
        (("data.tokenizer.type=hf",), "data.tokenizer.path is missing: name the file of data.tokenizer.type = hf"),
        (
            ("data.corpus=null", "data.train=x"),
            "data.tokenizer.path is missing: name the tokenizer that made data.train "
            "(it is trained here for data.corpus only)",
        ),
        (
            ("data.tokenizer.vocab_size=6000",),
            "data.tokenizer.vocab_size = 6000: at most model.vocab_size = 5000 is allowed; set 5000, or raise it",
        ),
    ],
)
def test_conflicting_values(overrides: tuple[str, ...], message: str) -> None:
    (line,) = problems(*overrides)
    assert line.partition(" (override")[0].partition(" (data")[0] == message


@pytest.mark.parametrize("minutes", [10, 12.5])
def test_stacks_are_printed_before_the_timeout_of_several_processes(minutes: float) -> None:
    (line,) = problems(f"run.watchdog_minutes={minutes}", ranks=4)
    assert line.startswith(
        f"run.watchdog_minutes = {minutes:g} of 4 processes: run.timeout_minutes = 10 ends the run before any stack is printed: "
        "less than 10, or 0 (off), is allowed, or raise run.timeout_minutes"
    )
    (line,) = problems("run.watchdog_minutes=5", "run.save_timeout_minutes=4", ranks=4)
    assert "run.save_timeout_minutes = 4 ends the run before any stack is printed: less than 4, or 0 (off)" in line
    for allowed, ranks in ((9.5, 4), (0, 4), (minutes, 1)):  # one process has no collective that waits
        load_config([], [*REQUIRED, f"run.watchdog_minutes={allowed}"], model_type=StandIn, world_size=ranks)


@pytest.mark.parametrize(("warmup", "decay"), [(1, 3), (10, 100), (50, 100), (100, 100)])
def test_the_decay_of_wsd_that_is_named_is_allowed(warmup: int, decay: int) -> None:
    steps = ("schedule.kind=wsd", f"schedule.warmup_steps={warmup}", f"schedule.decay_steps={decay}")
    (problem,) = problems(*steps, "schedule.wsd_decay_fraction=1")
    maximum = problem.partition("at most ")[2].split()[0]
    load_config([], [*REQUIRED, *steps, f"schedule.wsd_decay_fraction={maximum}"], model_type=StandIn)
