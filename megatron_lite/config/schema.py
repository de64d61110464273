"""What a configuration may hold: every section and key with its type, range, default and meaning.

A key whose value follows from others (see `derived_values` in `checks.py`) is filled in before the sections are built, so
that the rest of the project reads plain values: `config.batch.gradient_accumulation_steps` is always an `int`. The `data`
section is in `data_schema.py`.

`configs/README.md` is generated from these files: the description of a field is its documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from megatron_lite.config.data_schema import DataConfig
from megatron_lite.config.section import Fraction, Section, Steps, Text

ModelT = TypeVar("ModelT")


class RunConfig(Section):
    """The run as a whole: its name and folder, seed, device, and when it gives up."""

    name: str = Field(
        default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", description="Name of the run; part of its folder."
    )
    directory: Text = Field(
        default="runs/{name}",
        description="Folder of everything that the run writes; `{name}` stands for `run.name`.",
    )
    seed: int = Field(
        default=1234, ge=0, lt=2**32, description="Seed of the initial weights and of the order of the samples."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to train; auto: cuda where there is one."
    )
    watchdog_minutes: float = Field(
        default=5.0,
        ge=0,
        description="A step, save or validation batch that takes longer (minutes) prints the stacks of all threads; the first "
        "step and suites may take three times as long. A process in which no Python thread runs prints them after half of "
        "`heartbeat_seconds`. Less than `timeout_minutes`; 0: off.",
    )
    timeout_minutes: float = Field(
        default=10.0,
        gt=0,
        description="After the first step, a process that waits longer (minutes) for the others ends the run.",
    )
    save_timeout_minutes: float = Field(
        default=30.0,
        gt=0,
        description="The same while a checkpoint is saved; a file that is not written by then ends the run.",
    )
    heartbeat_seconds: float = Field(
        default=60.0,
        ge=0,
        description="A process that is silent for so long is taken for dead, named, and the run ends; 0: off.",
    )
    max_skipped_steps: int = Field(
        default=10,
        ge=1,
        description="Updates skipped in a row, for a loss or gradient that is not finite or a spike, before the run stops.",
    )
    replica_check_interval: Steps = Field(
        default=100,
        description="Compare hashes of the weights and optimizer state that several ranks hold alike every so many steps and "
        "before each save; a difference names tensor and rank and ends the run; 0: off.",
    )
    spike_factor: float = Field(
        default=0.0,
        ge=0,
        description="Skip the update when the loss is above this many times its running mean, from the 51st step on; 0: off.",
    )

    @property
    def path(self) -> Path:
        """`directory` as a path."""
        return Path(self.directory)


class RampConfig(Section):
    """A batch that grows: from `start` samples a step to `batch.global_batch_size`, over the first `samples` samples."""

    start: int | None = Field(default=None, ge=1, description="Samples of the first steps; null: no ramp.")
    increment: int = Field(default=1, ge=1, description="Samples added at a time.")
    samples: int = Field(default=0, ge=0, description="Samples until the full size, in stretches of equal length.")


class BatchConfig(Section):
    """global_batch_size = micro_batch_size x gradient_accumulation_steps x data ranks: give two of the three."""

    sequence_length: int = Field(default=2048, ge=1, description="Tokens of one sample.")
    micro_batch_size: int = Field(
        description="Samples of one forward pass on one data rank; derived from the other two where it is not given.",
        ge=1,
    )
    global_batch_size: int = Field(
        description="Samples of one optimizer step over all data ranks; derived where it is not given.", ge=1
    )
    gradient_accumulation_steps: int = Field(
        description="Forward passes of one data rank in one optimizer step; derived where it is not given.", ge=1
    )

    ramp: RampConfig = Field(default=RampConfig(), description=RampConfig.__doc__)

    def size_at(self, consumed_samples: int) -> int:
        """Samples of the step after so many."""
        ramp = self.ramp
        if ramp.start is None or consumed_samples >= ramp.samples:
            return self.global_batch_size
        stretches = (self.global_batch_size - ramp.start) // ramp.increment
        return ramp.start + ramp.increment * (consumed_samples * stretches // ramp.samples)

    def samples_of(self, steps: int, consumed_samples: int = 0) -> int:
        """Samples consumed after so many steps more."""
        samples = consumed_samples
        while steps and self.ramp.start is not None and samples < self.ramp.samples:
            samples, steps = samples + self.size_at(samples), steps - 1
        return samples + steps * self.global_batch_size

    def tokens_of(self, steps: int) -> int:
        """Tokens of so many steps from the start on."""
        return self.samples_of(steps) * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all data ranks, at the full size."""
        return self.global_batch_size * self.sequence_length

    @property
    def data_ranks(self) -> int:
        """Number of data ranks that the batch was laid out for."""
        return self.global_batch_size // (self.micro_batch_size * self.gradient_accumulation_steps)


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019) and gradient clipping."""

    name: Literal["adamw"] = Field(default="adamw", description="The optimizer.")
    lr: float = Field(description="Peak learning rate.", gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="Decay rates of the first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled weight decay.")
    gradient_clipping: float = Field(
        default=1.0, ge=0, description="Largest global norm of the gradient; 0: no clipping."
    )
    no_weight_decay: tuple[Literal["norm", "bias", "decay", "embedding"], ...] = Field(
        default=("norm", "bias", "decay", "embedding"), description="Kinds of parameters without weight decay."
    )


class ScheduleConfig(Section):
    """Length of the run and course of the learning rate."""

    kind: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        default="cosine", description="Course after the warmup; wsd: constant, then a linear decay at the end."
    )
    train_steps: int = Field(description="Optimizer steps of the run.", ge=1)
    time_budget_minutes: float | None = Field(
        None,
        gt=0,
        description="Lower `train_steps` to what this machine does in so many minutes, measured on the first batches "
        "before a new run, also one from another's checkpoint; the number is kept for resumes.",
    )
    warmup_steps: Steps = Field(
        default=0, description="Steps of the linear warmup from 0; derived where `warmup_fraction` is given instead."
    )
    warmup_fraction: Fraction | None = Field(default=None, description="Warmup as a share of `train_steps`.")
    min_lr_ratio: Fraction = Field(
        default=0.1, description="Final learning rate over the peak; of inverse_sqrt the least, of constant not used."
    )
    decay_steps: int = Field(
        description="Step at which linear, cosine and wsd reach the final learning rate; derived: `train_steps`.", ge=1
    )
    wsd_decay_fraction: Fraction = Field(default=0.2, description="Share of `decay_steps` that the decay of wsd takes.")


class ActivationCheckpointingConfig(Section):
    """Recomputes activations in the backward pass instead of keeping them: less memory, more time."""

    mode: Literal["none", "elementwise", "selective", "full"] = Field(
        default="none",
        description="elementwise: norms, activations, gates and short convolutions are recomputed, one by one; selective: all "
        "but matrix products, a block at a time; full: whole blocks.",
    )
    every: int = Field(default=1, ge=1, description="Only every n-th block.")
    others: Literal["none", "elementwise"] = Field(default="none", description="The mode of the blocks between.")


class ParallelConfig(Section):
    """How the run is laid out over the processes: processes = data ranks x tensor x pipeline x context."""

    tensor: int = Field(
        default=1, ge=1, description="Tensor parallelism: processes that share each layer, cut by heads and columns."
    )
    pipeline: int = Field(
        default=1, ge=1, description="Pipeline stages: consecutive layers on different processes, 1F1B schedule."
    )
    context: int = Field(
        default=1,
        ge=1,
        description="Context parallelism: processes that share each sequence; they exchange the recurrent states.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="With tensor > 1: norms and residuals work on a part of the sequence each, which saves memory.",
    )
    tensor_overlap: bool | None = Field(
        default=None,
        description="With tensor > 1 and an even micro batch: its two halves take turns, so that the sums of one over the "
        "processes travel while the other computes. It doubles the launches: null is true with cuda_graph, where it can be "
        "(not with sequence_parallel, context, zero_stage: 3 or compile).",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="ZeRO: 1 shards the optimizer state, 2 gradients too, 3 weights too. 0 runs as 1."
    )
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        default=ActivationCheckpointingConfig(), description="Recompute activations to save memory."
    )
    compile: bool = Field(default=False, description="torch.compile each block.")
    cuda_graph: bool = Field(
        default=False,
        description="On cuda: record the blocks of a micro batch as two CUDA graphs, which spares the host their launches. "
        "Packed and padded micro batches, and blocks that wait for numbers from the device, run as without.",
    )

    @property
    def model_ranks(self) -> int:
        """Processes that hold one copy of the model and its sequences together: the processes of one data rank."""
        return self.tensor * self.pipeline * self.context


class Fp16Config(Section):
    """Dynamic loss scale of fp16."""

    initial_scale_power: int = Field(default=16, ge=0, le=32, description="The first scale is 2 to this power.")
    scale_window: int = Field(default=1000, ge=1, description="Steps without an overflow before the scale doubles.")
    hysteresis: int = Field(default=2, ge=1, description="Overflows before the scale halves.")
    min_scale: float = Field(default=1.0, gt=0, description="Smallest scale.")


class PrecisionConfig(Section):
    """Number format of the forward and backward pass, and of weights and optimizer state between steps."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto", description="auto: bf16 on cuda; on cpu the faster of bf16 and fp32, measured at the start."
    )
    optimizer_state: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="fp32: weights and AdamW's moments are kept in float32, with the 16-bit weights 14 bytes a parameter. "
        "bf16, with dtype: bf16: all of them in bf16 alone, 6 bytes, and so are sums of gradients over micro batches. A change "
        "of a weight by less than 1/512 of it is then rounded away: learning stalls as the learning rate falls; a second moment "
        "whose beta is above 0.998 stands still.",
    )
    fp16: Fp16Config = Field(default=Fp16Config(), description="Dynamic loss scale of fp16.")


class CheckpointConfig(Section):
    """When checkpoints are written, which are kept, and what a run starts from."""

    directory: Text = Field(default="{run.directory}/checkpoints", description="Folder of the checkpoints.")
    interval: Steps = Field(default=1000, description="Save every this many steps; 0: only at the end.")
    asynchronous: bool = Field(
        default=False,
        description="Write while training goes on, from a copy of weights and optimizer state in host memory. The next save "
        "waits for the former; a write that fails ends the run at a later step.",
    )
    keep_last: int = Field(
        default=0,
        ge=0,
        description="Keep this many of the newest saves; 0: all. Extra and log-spaced saves stay and do not count.",
    )
    log_spaced: bool = Field(default=False, description="Save at steps 1, 2, 4, 8, ... too.")
    extra_steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), description="Save at these steps too.")
    resume: Text = Field(
        default="auto",
        description="auto: from the latest checkpoint of this run; newest_readable: from the newest one of this run of which "
        "every byte verifies, with damaged newer ones moved aside; never; or a run or checkpoint folder: a run that has no "
        "checkpoint yet from its weights and optimizer state, or, where it is one of this run, this run back at that step.",
    )

    def is_permanent(self, step: int) -> bool:
        """Return whether the checkpoint of a step (from 1) is written and stays, whatever `interval` and `keep_last`."""
        return step in self.extra_steps or (self.log_spaced and step > 0 and step & (step - 1) == 0)


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = Field(default=False, description="Log to Weights & Biases.")
    project: Text = Field(default="metalion", description="Project.")
    entity: Text | None = Field(default=None, description="User or team; empty: the account's own.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: kept in the run's folder, no account."
    )


class LoggingConfig(Section):
    """`metrics.jsonl` in the run's folder is always written; the rest is a choice."""

    interval: int = Field(default=1, ge=1, description="Log every this many steps.")
    loss_by_source: bool = Field(
        default=False,
        description="Also log the loss of every source of the text, such as `loss/Github`: the Pile's sets, or the files of "
        "a blend.",
    )
    spread_interval: Steps = Field(
        default=50,
        description="Compare the speed of all processes every this many steps and name the slow ones; 0: never.",
    )
    progress_bar: bool = Field(default=True, description="One progress bar on the terminal.")
    tensorboard: bool = Field(default=False, description="Write TensorBoard files too.")
    wandb: WandbConfig = Field(default=WandbConfig(), description="Weights & Biases.")


class EvaluationConfig(Section):
    """Validation and zero-shot suites, on the way and at the end."""

    interval: Steps = Field(default=0, description="Validate every this many steps; 0: only at the end.")
    batches: int = Field(
        default=20,
        ge=1,
        description="Batches of a validation on the way, each of `batch.global_batch_size` samples: the same samples in every "
        "layout. The final one reads the whole set.",
    )
    suites: tuple[Text, ...] = Field(
        default=(),
        description="Zero-shot suites (`superglue`, `commonsense`, a YAML file) or tasks of the lm-evaluation-harness that "
        "are evaluated while the run trains; their scores are lines of `metrics.jsonl`.",
    )
    suite_interval: Steps = Field(
        default=0, description="Evaluate the suites every this many steps and at the end; 0: only at the end."
    )
    data_directory: Text | None = Field(
        default=None, description="Folder of the suites' data; empty: the Hugging Face hub."
    )
    prompt: str = Field(default="def ", description="Start of the text that the model completes at each validation.")
    sample_tokens: int = Field(default=128, ge=0, description="Length of that completion; 0: none.")


class Config(Section, Generic[ModelT]):
    """A whole run. `model` is the project's model dataclass, which this package does not know."""

    run: RunConfig = Field(default=RunConfig(), description=RunConfig.__doc__)
    model: ModelT = Field(description="The architecture.")
    data: DataConfig = Field(description=DataConfig.__doc__)
    batch: BatchConfig = Field(description=BatchConfig.__doc__)
    optimizer: OptimizerConfig = Field(description=OptimizerConfig.__doc__)
    schedule: ScheduleConfig = Field(description=ScheduleConfig.__doc__)
    parallel: ParallelConfig = Field(default=ParallelConfig(), description=ParallelConfig.__doc__)
    precision: PrecisionConfig = Field(default=PrecisionConfig(), description=PrecisionConfig.__doc__)
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description=CheckpointConfig.__doc__)
    logging: LoggingConfig = Field(default=LoggingConfig(), description=LoggingConfig.__doc__)
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description=EvaluationConfig.__doc__)
