"""Estimate the bytes that each kind of parallelism sends per step, and the step time over given links.

The table gives the bytes that one process sends per step. T is micro-batch size x sequence length, P the number of parameters
and L the number of layers, all of this process. d is the hidden size, m the number of micro-batches, w the bytes per element.
Ring algorithms (Patarasuk and Yuan 2009): an all-reduce of S bytes over n processes sends 2 S (n - 1) / n, an all-gather or
reduce-scatter S (n - 1) / n.

| kind                   | per step                                                                                 |
|------------------------|------------------------------------------------------------------------------------------|
| data, ZeRO 1           | (n-1)/n w P for the gradients, (n-1)/n w P for the weights                                 |
| data, ZeRO 1, all-reduce | 2 (n-1)/n w P for the gradients in fp16, in float32 and with bf16 optimizer state           |
| data, ZeRO 2           | m x 2 (n-1)/n w P for the gradients, (n-1)/n w P for the weights                           |
| data, ZeRO 3           | m x 2 (n-1)/n w P to gather the weights twice, m x (n-1)/n w P for the gradients            |
| tensor                 | m L x 4 all-reduces of w T d (2 forward, 2 backward; 6 with full activation checkpointing)    |
| tensor + sequence      | the same bytes as all-gathers and reduce-scatters                                          |
| pipeline               | m x w T d to the next stage and back                                                       |
| context                | m L x 2 (n-1) states of heads x d_k x d_v float32, and the gradients with the data ranks        |
| Muon                   | (n-1)/n 2 w M / n for the matrices of M elements and their orthogonal factors                 |
| context, attention     | m L x 2 (n-1) times queries, keys, values and outputs of the T / n tokens of a shard             |
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.parallel.layout import Layout

# Time of FP8 matmuls with quantisation, divided by that of bf16 matmuls. The step of MetaLA 1.4B on an H200
# takes 180.5 ms with 88 % of its FLOPs in FP8, and about 245 ms in bf16 (docs/results/training.md).
FP8_TIME = 0.7


@dataclass(frozen=True)
class Links:
    """Bandwidth per process in bytes/s and one direction, with all processes sending.

    Attributes:
        inside: between GPUs of a machine (NVLink). outside: between machines (network cards shared by its GPUs).
        latency_inside, latency_outside: seconds per hop.
        machine: GPUs per machine.

    The default of `inside` was measured with all-reduce over 4 H200. The default of `outside` is an assumption.
    """

    inside: float = 353e9
    outside: float = 45e9
    latency_inside: float = 6e-6
    latency_outside: float = 25e-6
    machine: int = 8


@dataclass(frozen=True)
class Workload:
    """One training step of a model.

    Attributes:
        parameters: number of parameters of the whole model.
        layers: number of blocks. hidden: hidden size.
        state_elements: elements of the recurrent state (heads x d_k x d_v) and decays per sample and block, averaged over the
            blocks; 0 for attention.
        token_elements: elements that a block gathers per token of a shard, averaged over the blocks; 0 but for attention.
        sequence_length, micro_batch_size, global_batch_size: batch of the step, in tokens and samples.
        flops_per_token: training FLOPs per token, forward and backward.
        dtype: "bf16", "fp16" or "fp32", of the elements sent. optimizer_state: "fp32" or "bf16".
        zero_stage: 1 to 3. recompute: full activation checkpointing.
        matrices: elements of the matrices that Muon updates; 0 with AdamW. muon_flops: of its Newton-Schulz steps.
        fp8_flops_per_token: those of `flops_per_token` whose matmuls run in FP8.
    """

    parameters: int
    layers: int
    hidden: int
    state_elements: float
    sequence_length: int
    micro_batch_size: int
    global_batch_size: int
    flops_per_token: float
    token_elements: float = 0.0
    dtype: str = "bf16"
    optimizer_state: str = "fp32"
    zero_stage: int = 1
    recompute: bool = False
    matrices: int = 0
    muon_flops: float = 0.0
    fp8_flops_per_token: float = 0.0

    @property
    def width(self) -> int:
        """Return the bytes per element sent."""
        return 4 if self.dtype == "fp32" else 2


def volumes(work: Workload, layout: Layout, gpus: int) -> dict[str, float]:
    """Return the bytes that one process of a middle pipeline stage sends per step, by kind of parallelism."""
    n = gpus // (layout.tensor * layout.pipeline)  # data and context ranks share the gradients
    data = gpus // layout.model_ranks
    micro_batches = work.global_batch_size / (data * work.micro_batch_size)
    layers = work.layers / layout.pipeline
    local = work.width * work.parameters / (layout.tensor * layout.pipeline)
    activation = work.width * work.micro_batch_size * work.sequence_length / layout.context * work.hidden
    ring = (n - 1) / n
    if work.zero_stage == 3:
        data_parallel = 3 * micro_batches * ring * local
    elif work.zero_stage == 2:
        data_parallel = (2 * micro_batches + 1) * ring * local
    else:
        reduce_scatter = work.dtype == "bf16" and work.optimizer_state == "fp32"
        data_parallel = (2 if reduce_scatter else 3) * ring * local
    passes = 6 if work.recompute else 4
    t, c = layout.tensor, layout.context
    stage = gpus // layout.pipeline  # they share the matrices of Muon
    gathered = 4 * work.state_elements + work.width * work.token_elements * work.sequence_length / c
    return {
        "data": data_parallel,
        "tensor": micro_batches * layers * passes * 2 * (t - 1) / t * activation,
        "pipeline": 2 * micro_batches * activation * (layout.pipeline > 1) / (t if layout.sequence_parallel else 1),
        "context": micro_batches * layers * 2 * (c - 1) * gathered * work.micro_batch_size / t,
        "muon": (stage - 1) / stage * 2 * work.width * work.matrices / layout.pipeline / stage,
    }


def step_seconds(work: Workload, layout: Layout, gpus: int, flops: float, links: Links) -> dict[str, float]:
    """Return the seconds per step by part; their sum is the estimate.

    Assumptions: computation runs at `flops` FLOP/s per GPU in every layout, matmuls in FP8 in `FP8_TIME` of that time.
    Communication of tensor, context and pipeline parallelism, ZeRO 1 and Muon does not overlap with it; communication of ZeRO 2
    and 3 does. Newton-Schulz steps, which are large matmuls, run at 1.75 times `flops`. Ranks are ordered tensor, context,
    data, pipeline (grid.py). A group that spans machines runs at the bandwidth between machines.
    """
    sent = volumes(work, layout, gpus)
    data = gpus // layout.model_ranks
    micro_batches = work.global_batch_size / (data * work.micro_batch_size)
    flops_per_token = work.flops_per_token - (1 - FP8_TIME) * work.fp8_flops_per_token
    compute = flops_per_token * work.global_batch_size * work.sequence_length / gpus / flops
    layers = work.layers / layout.pipeline

    def speed(reach: int) -> tuple[float, float]:
        inside = reach <= links.machine
        return (links.inside, links.latency_inside) if inside else (links.outside, links.latency_outside)

    parts = {"compute": compute}
    bandwidth, latency = speed(layout.tensor)
    hops = micro_batches * layers * (6 if work.recompute else 4) * 2 * (layout.tensor - 1)
    parts["tensor"] = sent["tensor"] / bandwidth + hops * latency
    bandwidth, latency = speed(layout.tensor * layout.context)
    hops = micro_batches * layers * 2 * (layout.context - 1)
    parts["context"] = sent["context"] / bandwidth + hops * latency
    bandwidth, latency = speed(gpus // layout.pipeline + 1 if layout.pipeline > 1 else 1)
    parts["pipeline"] = sent["pipeline"] / bandwidth + 2 * micro_batches * latency * (layout.pipeline > 1)
    busy = compute + parts["tensor"] + parts["context"]
    parts["bubble"] = busy * (layout.pipeline - 1) / micro_batches
    bandwidth, latency = speed(gpus // layout.pipeline)
    replicas = gpus // (layout.tensor * layout.pipeline)
    data_parallel = sent["data"] / bandwidth + 3 * latency * (replicas - 1)
    if work.zero_stage > 1:
        data_parallel = max(data_parallel - compute, data_parallel / micro_batches / 3)
    parts["data"] = data_parallel if replicas > 1 else 0.0
    parts["muon"] = work.muon_flops / gpus / (1.75 * flops) + sent["muon"] / bandwidth
    return parts
