"""Define every section and key of a configuration with its type, range, default and description.

Derived keys (see `derived_values.py`) are filled in before the sections are built, so the rest of the project
reads plain values: `config.batch.gradient_accumulation_steps` is always an `int`. The sections `data` and `optimizer` are in
`data_schema.py` and `optimizer_schema.py`. `configs/README.md` is generated from the descriptions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from megatron_lite.config.data_schema import DataConfig
from megatron_lite.config.fp8_schema import Fp8Config
from megatron_lite.config.image_schema import ClassificationConfig
from megatron_lite.config.optimizer_schema import OptimizerConfig
from megatron_lite.config.section import Fraction, Section, Steps, Text

ModelT = TypeVar("ModelT")


class RunConfig(Section):
    """Name, folder, seed and device of the run, and when it stops after faults."""

    name: str = Field(
        default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", description="Name of the run; part of its folder."
    )
    directory: Text = Field(
        default="runs/{name}",
        description="Folder for all output of the run; `{name}` is replaced by `run.name`.",
    )
    seed: int = Field(default=1234, ge=0, lt=2**32, description="Seed of the initial weights and of the sample order.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device type. auto: cuda if a GPU is present, else cpu."
    )
    watchdog_minutes: float = Field(
        default=5.0,
        ge=0,
        description="Print the stacks of all threads when a step, save or validation batch takes longer (minutes). The first "
        "step and suites may take three times as long. If no Python thread runs, stacks are printed after half of "
        "`heartbeat_seconds`. With several processes less than `timeout_minutes` and `save_timeout_minutes`, after which "
        "the run ends. 0: off.",
    )
    timeout_minutes: float = Field(
        default=10.0,
        gt=0,
        description="Timeout of collectives (minutes). A process that waits longer for the others stops the run. The first step"
        " and suites may take three times as long, the first step at least 30. One process prepares the data, and the others wait"
        " for it for up to 24 hours.",
    )
    save_timeout_minutes: float = Field(
        default=30.0,
        gt=0,
        description="Timeout while a checkpoint is saved (minutes). A file that is not written by then stops the run.",
    )
    heartbeat_seconds: float = Field(
        default=60.0,
        ge=0,
        description="Stop the run when a process sends no heartbeat for this many seconds; the message names the"
        " process. 0: off.",
    )
    max_skipped_steps: int = Field(
        default=10,
        ge=1,
        description="Stop the run after this many consecutive skipped updates. An update is skipped if loss or gradient is "
        "not finite, or on a loss spike.",
    )
    replica_check_interval: Steps = Field(
        default=100,
        description="Compare hashes of the replicated weights and optimizer state across ranks every this many steps and before "
        "each save. A difference stops the run; the message names the tensor and the rank. 0: off.",
    )
    spike_factor: float = Field(
        default=0.0,
        ge=0,
        description="Skip the update if the loss exceeds its running mean by this factor, from step 51 on. 0: off.",
    )

    @property
    def path(self) -> Path:
        """Return `directory` as a path."""
        return Path(self.directory)


class RampConfig(Section):
    """Batch size ramp from `start` to `batch.global_batch_size` samples per step, over the first `samples` samples."""

    start: int | None = Field(default=None, ge=1, description="Global batch size of the first steps; null: no ramp.")
    increment: int = Field(default=1, ge=1, description="Increase of the batch size per increment.")
    samples: int = Field(
        default=0,
        ge=0,
        description="Samples until the full batch size. Every batch size takes the same number of samples.",
    )


class BatchConfig(Section):
    """global_batch_size = micro_batch_size x gradient_accumulation_steps x data ranks. Set two of the three."""

    sequence_length: int = Field(default=2048, ge=1, description="Tokens per sample.")
    micro_batch_size: int = Field(
        description="Samples per forward pass on one data rank; derived from the other two if not set.",
        ge=1,
    )
    global_batch_size: int = Field(
        description="Samples per optimizer step over all data ranks; derived if not set.", ge=1
    )
    gradient_accumulation_steps: int = Field(
        description="Forward passes per optimizer step on one data rank; derived if not set.", ge=1
    )

    ramp: RampConfig = Field(default=RampConfig(), description=RampConfig.__doc__)

    def size_at(self, consumed_samples: int) -> int:
        """Return the samples of the step that begins after `consumed_samples`."""
        ramp = self.ramp
        if ramp.start is None or consumed_samples >= ramp.samples:
            return self.global_batch_size
        increments = (self.global_batch_size - ramp.start) // ramp.increment
        return ramp.start + ramp.increment * (consumed_samples * increments // ramp.samples)

    def samples_of(self, steps: int, consumed_samples: int = 0) -> int:
        """Return the samples consumed after `steps` further steps."""
        samples = consumed_samples
        while steps and self.ramp.start is not None and samples < self.ramp.samples:
            samples, steps = samples + self.size_at(samples), steps - 1
        return samples + steps * self.global_batch_size

    def tokens_of(self, steps: int) -> int:
        """Return the tokens of the first `steps` steps."""
        return self.samples_of(steps) * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens per optimizer step over all data ranks, at the full batch size."""
        return self.global_batch_size * self.sequence_length

    @property
    def data_ranks(self) -> int:
        """Return the number of data ranks that the batch sizes imply, 1 for sizes that contradict one another."""
        return max(1, self.global_batch_size // (self.micro_batch_size * self.gradient_accumulation_steps))


class ScheduleConfig(Section):
    """Length of the run and learning rate schedule."""

    kind: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        default="cosine",
        description="Shape of the schedule after the warmup. wsd: constant, then linear decay at the end.",
    )
    train_steps: int = Field(description="Optimizer steps of the run.", ge=1)
    time_budget_minutes: float | None = Field(
        None,
        gt=0,
        description="Lower `train_steps` to the steps that this machine completes in this many minutes. The speed is measured on "
        "the first batches before a new run. Resumes keep the number of steps. `warmup_steps` and `decay_steps` do not change "
        "if they are set.",
    )
    warmup_steps: Steps = Field(
        default=0,
        description="Steps of the linear warmup; the first has 1 / warmup_steps of the rate. `warmup_fraction` derives it.",
    )
    warmup_fraction: Fraction | None = Field(default=None, description="Warmup as a fraction of `train_steps`.")
    min_lr_ratio: Fraction = Field(
        default=0.1,
        description="Final learning rate / peak learning rate. Lower bound with inverse_sqrt; unused with constant.",
    )
    decay_steps: int = Field(
        description="Step at which linear, cosine and wsd reach the final learning rate. Default: `train_steps`.", ge=1
    )
    wsd_decay_fraction: Fraction = Field(default=0.2, description="Decay phase of wsd as a fraction of `decay_steps`.")


class ActivationCheckpointingConfig(Section):
    """Recompute activations in the backward pass instead of storing them: less memory, more time."""

    mode: Literal["none", "elementwise", "selective", "full"] = Field(
        default="none",
        description="elementwise: recompute norms, activations, gates and short convolutions (with `compile`, which decides "
        "about these itself, only the chunk states of the GLA kernels); selective: recompute everything except matmuls, per "
        "block; full: recompute whole blocks.",
    )
    every: int = Field(default=1, ge=1, description="Apply `mode` to every n-th block only.")
    others: Literal["none", "elementwise"] = Field(default="none", description="Mode of the other blocks.")


class ParallelConfig(Section):
    """Parallel layout: processes = data ranks x tensor x pipeline x context."""

    tensor: int = Field(
        default=1,
        ge=1,
        description="Tensor parallel size: processes that share each layer, split by heads and columns.",
    )
    pipeline: int = Field(
        default=1, ge=1, description="Pipeline parallel size: stages of consecutive layers, 1F1B schedule."
    )
    context: int = Field(
        default=1,
        ge=1,
        description="Context parallel size: processes that share each sequence and all-gather the recurrent states.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="With tensor > 1: split norms and residuals along the sequence, which saves memory (Megatron's"
        " sequence parallelism).",
    )
    tensor_overlap: bool | None = Field(
        default=None,
        description="With tensor > 1 and an even micro-batch size: overlap the all-reduces of one half of the micro-batch "
        "with the computation of the other half. Doubles the kernel launches. null: true with cuda_graph where supported "
        "(not with sequence_parallel, context, zero_stage: 3 or compile).",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1,
        description="ZeRO stage. 1 shards the optimizer state, 2 also gradients, 3 also weights. 0 runs as 1.",
    )
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        default=ActivationCheckpointingConfig(), description="Recompute activations to save memory."
    )
    compile: bool = Field(default=False, description="Compile each block with torch.compile.")
    cuda_graph: bool = Field(
        default=False,
        description="On cuda: run the blocks of a micro-batch as two CUDA graphs, which removes their launch overhead. "
        "Packed and padded micro-batches, and blocks that synchronise with the host, run without graphs.",
    )

    @property
    def effective_zero_stage(self) -> int:
        """Return the ZeRO stage that runs: stage 0 runs as 1.

        DeepSpeed's stage 0 clips wrongly in pipelines and starts bf16 with a dummy step. Stage 1 costs no more.
        """
        return max(1, self.zero_stage)

    @property
    def model_ranks(self) -> int:
        """Return the processes per data rank, which together hold one copy of the model and its sequences."""
        return self.tensor * self.pipeline * self.context


class Fp16Config(Section):
    """Dynamic loss scaling of fp16."""

    initial_scale_power: int = Field(default=16, ge=0, le=32, description="Initial loss scale, as a power of 2.")
    scale_window: int = Field(default=1000, ge=1, description="Steps without overflow after which the scale doubles.")
    hysteresis: int = Field(default=2, ge=1, description="Overflows after which the scale is divided by 2.")
    min_scale: float = Field(default=1.0, gt=0, description="Minimum loss scale.")


class PrecisionConfig(Section):
    """Number format of the forward and backward pass, and of weights and optimizer state."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto", description="auto: bf16 on cuda; on cpu the faster of bf16 and fp32, measured at the start."
    )
    optimizer_state: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="fp32: float32 master weights and AdamW moments, 14 bytes per parameter with the 16-bit weights. bf16 "
        "(requires dtype: bf16): weights, moments and accumulated gradients in bf16 only, 6 bytes per parameter. Weight "
        "updates below 1/512 of the weight are then rounded away, so training stalls at low learning rates. A second moment "
        "with beta above 0.998 does not change.",
    )
    fp16: Fp16Config = Field(default=Fp16Config(), description=Fp16Config.__doc__)
    fp8: Fp8Config = Field(default=Fp8Config(), description=Fp8Config.__doc__)


class CheckpointConfig(Section):
    """When checkpoints are written, which are kept, and which one a run starts from."""

    directory: Text = Field(default="{run.directory}/checkpoints", description="Folder of the checkpoints.")
    interval: Steps = Field(default=1000, description="Save every this many steps. 0: only at the end.")
    asynchronous: bool = Field(
        default=False,
        description="Write in the background from a copy of weights and optimizer state in host memory. The next save waits "
        "for the previous one. A failed write stops the run at a later step.",
    )
    keep_last: int = Field(
        default=0,
        ge=0,
        description="Number of newest saves to keep; 0: all. Extra and log-spaced saves are kept and do not count.",
    )
    log_spaced: bool = Field(default=False, description="Also save at steps 1, 2, 4, 8, ...")
    extra_steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), description="Also save at these steps.")
    resume: Text = Field(
        default="auto",
        description="auto: the latest checkpoint of this run. newest_readable: the newest checkpoint of this run whose checksums "
        "all match; damaged newer ones are archived. never: start without a checkpoint. A folder of another run or checkpoint: "
        "start a new run from its weights and optimizer state. A checkpoint of this run: roll back to that step.",
    )

    def is_permanent(self, step: int) -> bool:
        """Return whether the checkpoint of a step (from 1) is written and kept, whatever `interval` and `keep_last` are."""
        return step in self.extra_steps or (self.log_spaced and step > 0 and step & (step - 1) == 0)


class WandbConfig(Section):
    """Logging to Weights & Biases."""

    enabled: bool = Field(default=False, description="Log to Weights & Biases.")
    project: Text = Field(default="metalion", description="Name of the project.")
    entity: Text | None = Field(default=None, description="User or team; null: the default of the account.")
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="offline: write to the folder of the run; needs no account. WANDB_MODE overrides it.",
    )


class LoggingConfig(Section):
    """Metrics and their destinations. `metrics.jsonl` in the folder of the run is always written."""

    interval: int = Field(default=1, ge=1, description="Log every this many steps.")
    loss_by_source: bool = Field(
        default=False,
        description="Also log the loss per source of the text, such as `loss/Github`. Sources are the sets of the Pile or "
        "the files of a blend.",
    )
    spread_interval: Steps = Field(
        default=50,
        description="Straggler detection: compare the speed of all processes every this many steps and log the slow"
        " ones. 0: never. With parallel.compile, cuda_graph or tensor_overlap it does not time the forward pass.",
    )
    progress_bar: bool = Field(default=True, description="Show a progress bar on the terminal.")
    tensorboard: bool = Field(default=False, description="Also write TensorBoard files.")
    wandb: WandbConfig = Field(default=WandbConfig(), description=WandbConfig.__doc__)


class EvaluationConfig(Section):
    """Validation and zero-shot suites, during training and at the end."""

    interval: Steps = Field(default=0, description="Validate every this many steps. 0: only at the end.")
    batches: int = Field(
        default=20,
        ge=1,
        description="Batches per validation during training, each of `batch.global_batch_size` samples; every layout uses "
        "the same samples. The final validation reads the whole set.",
    )
    suites: tuple[Text, ...] = Field(
        default=(),
        description="Zero-shot suites (`superglue`, `commonsense`, a YAML file) or tasks of the lm-evaluation-harness to "
        "evaluate during training. Scores are written to `metrics.jsonl`.",
    )
    suite_interval: Steps = Field(
        default=0, description="Evaluate the suites every this many steps and at the end. 0: only at the end."
    )
    data_directory: Text | None = Field(
        default=None, description="Folder with the data of the suites; null: the Hugging Face hub."
    )
    prompt: str = Field(default="def ", description="Prompt for the text that the model generates at each validation.")
    sample_tokens: int = Field(default=128, ge=0, description="Tokens generated after `prompt`; 0: none.")


class Config(Section, Generic[ModelT]):
    """Configuration of a run. `model` is a dataclass that the caller supplies."""

    run: RunConfig = Field(default=RunConfig(), description=RunConfig.__doc__)
    model: ModelT = Field(description="The architecture.")
    data: DataConfig = Field(description=DataConfig.__doc__)
    classification: ClassificationConfig = Field(
        default=ClassificationConfig(), description=ClassificationConfig.__doc__
    )
    batch: BatchConfig = Field(description=BatchConfig.__doc__)
    optimizer: OptimizerConfig = Field(description=OptimizerConfig.__doc__)
    schedule: ScheduleConfig = Field(description=ScheduleConfig.__doc__)
    parallel: ParallelConfig = Field(default=ParallelConfig(), description=ParallelConfig.__doc__)
    precision: PrecisionConfig = Field(default=PrecisionConfig(), description=PrecisionConfig.__doc__)
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description=CheckpointConfig.__doc__)
    logging: LoggingConfig = Field(default=LoggingConfig(), description=LoggingConfig.__doc__)
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description=EvaluationConfig.__doc__)
