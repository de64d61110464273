"""The bf16 optimizer: the passes of one of several replicas, whole steps, and the optimizers whose step is replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.engine.deepspeed import import_deepspeed
from megatron_lite.optim import bf16_optimizer

# Shapes of two groups. With three replicas, the second replica has cut tensors, and the third only padding of the second group.
SHAPES = [[(5, 7), (40,), (3,), (9, 5)], [(2,), (1,)]]
OPTIONS = [
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    {"lr": 2e-2, "betas": (0.8, 0.99), "eps": 1e-2, "weight_decay": 0.0},
]


def scattered(seed: int, device: str) -> list[list[Tensor]]:
    """Return one tensor per parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in g] for g in SHAPES]


def flat(group: list[Tensor]) -> Tensor:
    return torch.cat([x.detach().float().flatten() for x in group])


def optimizer(tensor_rank: int | None, device: str) -> Any:
    """Return DeepSpeed's optimizer of the rank of `torch.distributed`. Other ranks count some of its tensors in the norm."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    groups = [[nn.Parameter(x) for x in group] for group in scattered(0, device)]
    groups[0][1].tensor_model_parallel = True  # type: ignore[attr-defined]
    groups[0][3].ds_pipe_replicated = True  # type: ignore[attr-defined]
    groups[0][2].ds_pipe_replicated = False  # type: ignore[attr-defined]
    adamw = torch.optim.AdamW([{"params": g, **o} for g, o in zip(groups, OPTIONS, strict=True)], fused=True)
    settings = SimpleNamespace(enabled=True, immediate_grad_update=False)
    unit = None if tensor_rank is None else SimpleNamespace(get_tensor_model_parallel_rank=lambda: tensor_rank)
    names = {parameter: "" for group in groups for parameter in group}
    zero = BF16_Optimizer(adamw, names, settings, mpu=unit, grad_acc_dtype=torch.float32)
    for master in zero.fp32_groups_flat_partition:
        moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
        adamw.state[master] = {"step": torch.zeros((), device=device), **moments}
    return zero


def check_parts(
    monkeypatch: pytest.MonkeyPatch, arithmetic: Callable[[Any], Any], replicas: int, tensor_rank: int, device: str
) -> None:
    """Compare two steps of two micro-batches over all replicas with AdamW on the whole tensors."""
    deepspeed = import_deepspeed()
    whole = [nn.Parameter(flat(group)) for group in scattered(0, device)]
    expected = torch.optim.AdamW([{"params": [p], **o} for p, o in zip(whole, OPTIONS, strict=True)])
    factors, squares = torch.tensor([[0.5], [1.0]], device=device), []
    for step, factor in enumerate(factors):
        a, b = scattered(2 * step + 1, device), scattered(2 * step + 2, device)
        a[0][2], b[0][1] = torch.zeros_like(a[0][2]), torch.zeros_like(b[0][1])
        sums = [[x.float() + y.float() for x, y in zip(*both, strict=True)] for both in zip(a, b, strict=True)]
        counted = sums[0][1:2] if tensor_rank else [*sums[0][:3], *sums[1]]
        squares.append(torch.cat([x.double().flatten() for x in counted]).square().sum().item())
        for parameter, group in zip(whole, sums, strict=True):
            parameter.grad = flat(group) * factor
        expected.step()
    found, masters, weights = [0.0] * len(factors), [], []
    for rank in range(replicas):
        for module in (dist, deepspeed.comm):
            monkeypatch.setattr(module, "get_rank", lambda group=None, rank=rank: rank)
            monkeypatch.setattr(module, "get_world_size", lambda group=None: replicas)
        zero = optimizer(tensor_rank, device)
        passes = arithmetic(zero)
        for step, factor in enumerate(factors):
            a, b = scattered(2 * step + 1, device), scattered(2 * step + 2, device)
            missing: list[list[Tensor | None]] = [[a[0][0], a[0][1], None, a[0][3]], [*a[1]]]
            later: list[list[Tensor | None]] = [[b[0][0], None, b[0][2], b[0][3]], [*b[1]]]
            for group, total in enumerate(zero.fp32_groups_gradients_flat):
                total[: zero.fp32_groups_actual_gradients_flat[group].numel()] = (
                    torch.nan
                )  # leftovers of the previous step
                passes.add(group, missing[group], True)
                passes.add(group, later[group], False)
                slices = total.view(replicas, -1)
                slices[torch.arange(replicas, device=device) != rank] = torch.nan  # undefined after the reduction
            with torch.no_grad():
                found[step] += passes.square(None).item()
                passes.update(None, factor)
                passes.count_update(True)
        assert [int(state["step"]) for state in zero.optimizer.state.values()] == [2, 2]
        masters.append(zero.fp32_groups_flat_partition)
        weights.append([partitions[rank] for partitions in zero.bf16_partitioned_groups])
    assert found == pytest.approx(squares, rel=1e-6)
    for parts, rounded, parameter in zip(zip(*masters, strict=True), zip(*weights, strict=True), whole, strict=True):
        joined = torch.cat([part.detach() for part in parts])
        assert torch.equal(torch.cat(rounded), joined.bfloat16())
        torch.testing.assert_close(joined[: parameter.numel()], parameter.detach(), rtol=1e-6, atol=1e-6)
        assert not joined[parameter.numel() :].any()


def check_steps(
    monkeypatch: pytest.MonkeyPatch, *, kernels: bool, accumulation: int, release: bool, device: str
) -> None:
    """Compare clipped, unclipped and skipped steps, and one without clipping, with AdamW.

    One parameter has no gradient in each micro-batch.
    """
    import_deepspeed()
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        return storage.fill_(255) if size else storage  # NaN

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    zero, engine = optimizer(None, device), SimpleNamespace(gradient_accumulation_steps=lambda: accumulation)
    bf16_optimizer.patch_bf16_optimizer(engine, zero, 1, release=release, kernels=kernels)
    parameters = [p for group in zero.bf16_groups for p in group]
    sums = [total.untyped_storage() for total in zero.fp32_groups_gradients_flat]
    whole = [nn.Parameter(flat(group)) for group in scattered(0, device)]
    expected = torch.optim.AdamW([{"params": [p], **o} for p, o in zip(whole, OPTIONS, strict=True)])
    for step, (size, clip) in enumerate([(1.0, 2.0), (0.01, 2.0), (1e30, 2.0), (1.0, 0.0)]):
        assert all((total.size() == 0) == release for total in sums)
        zero.clip_grad = clip
        gradients = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for micro in range(accumulation):
            given = [x * size for group in scattered(5 * step + micro + 1, device) for x in group]
            for index, (parameter, gradient) in enumerate(zip(parameters, given, strict=True)):
                if kernels:  # not contiguous; PyTorch's functions refuse it
                    gradient = gradient.T.contiguous().T
                parameter.grad = None if index == micro else gradient
                gradients[index] += 0.0 if index == micro else gradient
            zero.update_hp_grads()
        # The kernels read the gradients of one micro-batch in place; PyTorch's functions always read the sums.
        assert any(p.grad is not None for p in parameters) == (kernels and accumulation == 1)
        held = [weakref.ref(p.grad) for p in parameters if p.grad is not None]
        del given, gradient
        zero.step()
        assert not any(reference() is not None for reference in held)
        counted = torch.cat([g.flatten() for index, g in enumerate(gradients) if index != 3])
        norm = counted.double().square().sum().sqrt().item()
        assert zero.overflow == (size == 1e30)
        assert zero._global_grad_norm == (torch.inf if zero.overflow else pytest.approx(norm, rel=1e-6))
        assert (norm > 2.0) == (size != 0.01)
        if not zero.overflow:
            factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            for parameter, group in zip(whole, (gradients[:4], gradients[4:]), strict=True):
                parameter.grad = flat(group) * factor
            expected.step()
        for master, parameter in zip(zero.fp32_groups_flat_partition, whole, strict=True):
            found, wanted = zero.optimizer.state[master], expected.state[parameter]
            assert int(found["step"]) == int(wanted["step"])
            for a, b in ((master, parameter), *((found[key], wanted[key]) for key in ("exp_avg", "exp_avg_sq"))):
                torch.testing.assert_close(a.detach()[: len(parameter)], b.detach(), rtol=1e-5, atol=1e-6)
                assert not a[len(parameter) :].any()
        for weights, master in zip(zero.bf16_groups_flat, zero.fp32_groups_flat_partition, strict=True):
            assert torch.equal(weights, master.bfloat16())


@pytest.mark.parametrize("tensor_rank", [0, 1])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_replica_counts_and_updates_its_part(grid, monkeypatch, replicas, tensor_rank):
    check_parts(monkeypatch, bf16_optimizer._TorchPasses, replicas, tensor_rank, "cpu")


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_steps_where_some_have_no_gradient(grid, monkeypatch, release):
    check_steps(monkeypatch, kernels=False, accumulation=3, release=release, device="cpu")


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("state", ["float32", "bf16", "bf16, ZeRO 2", "ZeRO 3"])
def test_optimizers_whose_step_is_replaced(monkeypatch, state, stages, replicas, kernels):
    """Replace the step of the bf16 optimizer, and of ZeRO 1 with bf16 state on one process without a pipeline."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    monkeypatch.setattr(bf16_optimizer, "_KernelPasses", lambda zero: None)
    engine = SimpleNamespace(gradient_accumulation_steps=lambda: micro_batches, enable_backward_allreduce=True)
    if stages > 1:
        engine.pipeline_enable_backward_allreduce = True
    zero: Any = SimpleNamespace()
    if state == "float32":
        zero = BF16_Optimizer.__new__(BF16_Optimizer)
        zero.bf16_groups, zero.fp32_groups_gradients, zero.fp32_groups_gradients_flat = [], [], []
    elif state.startswith("bf16"):
        names = ("bit16_groups", "bit16_groups_flat", "parallel_partitioned_bit16_groups")
        zero.__dict__.update({name: [] for name in (*names, "single_partition_of_fp32_groups")})
        zero.bf16_master_weights_and_gradients, zero.partition_gradients = True, state == "bf16, ZeRO 2"
    else:
        zero.bf16_master_weights_and_gradients = True
    bf16_optimizer.patch_bf16_optimizer(engine, zero, replicas, release=False, kernels=kernels)
    alone = kernels and replicas == 1 and stages == 1
    replaced = state == "float32" or (state == "bf16" and alone)
    assert hasattr(zero, "skip_next") == replaced
    allreduces = [value for name, value in vars(engine).items() if name.endswith("allreduce")]
    assert allreduces == [not (replaced and replicas == 1)] * stages
    if replaced:
        for micro_batches in (1, 2):
            assert zero.step.__self__._reads_in_place() == (alone and (micro_batches == 1 or state == "bf16"))


def test_norm_is_summed_over_tensor_ranks_and_stages_last(monkeypatch):
    """Tensor ranks and stages share weights and clip them by the same bits, whatever the order of sums over their replicas."""
    groups: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda _, group: groups.append(group))
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(bf16_optimizer.PatchedStep, "_gather", lambda _: None)
    unit = SimpleNamespace(get_model_parallel_group=lambda: "tensor ranks and stages")
    names = ("bf16_groups", "fp32_groups_gradients", "fp32_groups_gradients_flat")
    empty: dict[str, Any] = {name: [] for name in names}
    zero = SimpleNamespace(**empty, clip_grad=1.0, mpu=unit, dp_process_group="replicas")
    passes: Any = SimpleNamespace(
        square=lambda _: torch.full((1,), 4.0), update=lambda *_: None, count_update=lambda _: None
    )
    bf16_optimizer.PatchedStep(zero, lambda: False, False, passes).step()
    assert groups == ["replicas", "tensor ranks and stages"]
    assert zero._global_grad_norm == 2.0
