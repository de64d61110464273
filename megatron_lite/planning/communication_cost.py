"""What every kind of parallelism sends in a step, and how long a step takes over given links: a model, not a measurement.

Bytes that one process sends, for tokens T = micro batch x sequence length of this process, hidden size d, L layers on it, P
parameters on it, m micro batches, w bytes a number, ring algorithms (Patarasuk and Yuan 2009: an all-reduce of S bytes over
n sends 2 S (n - 1) / n, an all-gather or reduce-scatter S (n - 1) / n):

| kind                   | a step                                                                                   |
|------------------------|------------------------------------------------------------------------------------------|
| data, ZeRO 1           | (n-1)/n w P for the gradients (in bf16, else 2), (n-1)/n w P for the weights                |
| data, ZeRO 2           | m x 2 (n-1)/n w P for the gradients, (n-1)/n w P for the weights                           |
| data, ZeRO 3           | m x 2 (n-1)/n w P to gather the weights twice, m x (n-1)/n w P for the gradients            |
| tensor                 | m L x 4 all-reduces of w T d (2 forward, 2 backward; 6 with full activation checkpointing)    |
| tensor with sequence   | the same bytes as all-gathers and reduce-scatters                                          |
| pipeline               | m x w T d to the next stage and back                                                       |
| context                | m L x 2 (n-1) states of heads x d_k x d_v float32, and the gradients with the data ranks        |
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.parallel.layout import Layout


@dataclass(frozen=True)
class Links:
    """Speeds that a process reaches, bytes a second in one direction, with all its neighbours sending too.

    Attributes:
        inside: between GPUs of a machine (NVLink), outside: between machines (a share of the network cards).
        latency_inside, latency_outside: seconds of one hop.
        machine: GPUs per machine.

    The default inside a machine was measured with all-reduce over 4 H200; the one between machines is an assumption.
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
        parameters: of the whole model.
        layers: blocks; hidden: width.
        state_elements: numbers that a block hands on for a sample, its recurrent state (heads x d_k x d_v) and its decays; a
            mean over the blocks, 0 for attention.
        sequence_length, micro_batch_size, global_batch_size: of the step.
        flops_per_token: training FLOPs, forward and backward.
        width: bytes of a number that is sent.
        zero_stage: 1 to 3; recompute: full activation checkpointing.
    """

    parameters: int
    layers: int
    hidden: int
    state_elements: float
    sequence_length: int
    micro_batch_size: int
    global_batch_size: int
    flops_per_token: float
    width: int = 2
    zero_stage: int = 1
    recompute: bool = False


def volumes(work: Workload, layout: Layout, gpus: int) -> dict[str, float]:
    """Bytes that one process (of a middle stage) sends in a step, by kind of parallelism."""
    n = gpus // (layout.tensor * layout.pipeline)  # data and context ranks share the gradients
    data = gpus // layout.model_ranks
    micro_batches = work.global_batch_size / (data * work.micro_batch_size)
    layers = work.layers / layout.pipeline
    own = work.width * work.parameters / (layout.tensor * layout.pipeline)
    activation = work.width * work.micro_batch_size * work.sequence_length / layout.context * work.hidden
    ring = (n - 1) / n
    if work.zero_stage == 3:
        of_data = 3 * micro_batches * ring * own
    elif work.zero_stage == 2:
        of_data = (2 * micro_batches + 1) * ring * own
    else:
        of_data = 2 * ring * own
    passes = 6 if work.recompute else 4
    t, c = layout.tensor, layout.context
    return {
        "data": of_data,
        "tensor": micro_batches * layers * passes * 2 * (t - 1) / t * activation,
        "pipeline": 2 * micro_batches * activation * (layout.pipeline > 1) / (t if layout.sequence_parallel else 1),
        "context": micro_batches * layers * 2 * (c - 1) * 4 * work.state_elements * work.micro_batch_size / t,
    }


def step_seconds(work: Workload, layout: Layout, gpus: int, flops: float, links: Links) -> dict[str, float]:
    """Seconds of a step by part; their sum is the estimate.

    Computing runs at `flops` FLOP/s a GPU, as measured on one GPU, whatever the layout; what tensor, context and pipeline
    parallelism and ZeRO 1 send is not hidden behind it; of ZeRO 2 and 3 what is longer than the computing is not. The
    processes of a tensor group are neighbours, then those of a context group, then data ranks, then stages (grid.py), and a
    group that reaches over machines runs at the speed between machines.
    """
    sent = volumes(work, layout, gpus)
    data = gpus // layout.model_ranks
    micro_batches = work.global_batch_size / (data * work.micro_batch_size)
    compute = work.flops_per_token * work.global_batch_size * work.sequence_length / gpus / flops
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
    of_data = sent["data"] / bandwidth + 3 * latency * (replicas - 1)
    if work.zero_stage > 1:
        of_data = max(of_data - compute, of_data / micro_batches / 3)
    parts["data"] = of_data if replicas > 1 else 0.0
    return parts
