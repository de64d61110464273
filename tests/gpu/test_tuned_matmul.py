"""cuBLASLt's algorithms against PyTorch's products, in a training step too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from megatron_lite.config.loader import load_config
from megatron_lite.engine.cublaslt import CLUSTER, CUSTOM, TILE, Product, library
from tools.benchmark import matmul

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", ["", "bias", "sum"])
@pytest.mark.parametrize("of_transposed", [(False, True), (False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("m", "k", "n"), [(512, 256, 384), (4096, 2048, 1024)])
def test_every_algorithm_computes_the_product(
    m: int, k: int, n: int, of_transposed: tuple[bool, bool], more: str, dtype: torch.dtype
) -> None:
    product = Product(m, k, n, of_transposed, dtype, more == "bias", more == "sum")
    a, b, *rest = operands = matmul._operands(product)
    assert Product.of(*operands) == product
    wanted = a.double() @ b.double() + sum(x.double() for x in rest if x is not None)
    named = library().algorithms(product, 8)
    others = library().varied(product, named[0], TILE, CLUSTER, CUSTOM)
    assert len(set(others)) == len(others) > 100
    for algorithm in [*named, *random.Random(0).sample(others, 12)]:
        found = library()(product, algorithm, *operands)
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert ((found.double() - wanted).norm() / wanted.norm()).item() < (4e-3 if dtype == torch.bfloat16 else 5e-4)


def test_a_step_by_the_written_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses and gradient norms to rounding, and twice the same to the bit; of every product some other algorithm."""
    from models.config import ModelConfig
    from tools.benchmark.training_models import own_batch, own_engine

    monkeypatch.setattr(matmul, "SMALLEST", 1e6)
    monkeypatch.setattr(matmul, "ROUNDS", 1)
    monkeypatch.setattr(matmul, "SLICE", 1e-3)
    monkeypatch.setattr(matmul, "GAIN", -1e9)  # whatever was measured
    small = ["model.hidden_size=256", "model.num_layers=2", "model.intermediate_size=768", "model.vocab_size=512"]
    chosen = tmp_path / "chosen.yml"
    rows = matmul.run(tmp_path, Path("configs/metala_1.4b.yml"), small, 256, 4, chosen=chosen)
    # Two blocks; forward q, a, v, gate, the output map and the MLP's three; backward the gradients of the input and the weight
    # of the mixer's four maps, of the output map, of the MLP's two, of its last. And the loss's two.
    assert sum(row["a step"] for row in rows) == 2 * (8 + 4 + 4) + 2
    words = [*small, "batch.sequence_length=256", "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=1"]
    tokens = torch.randint(0, 512, (4, 257), generator=torch.Generator().manual_seed(0))
    results = []
    for files in ([], [str(chosen)], [str(chosen)]):
        overrides = [*words, "batch.global_batch_size=null"]
        config = load_config(["configs/metala_1.4b.yml", *files], overrides, model_type=ModelConfig, world_size=1)
        assert bool(config.parallel.cublaslt.algorithms) == bool(files)
        engine = own_engine(config, torch.device("cuda"), "bf16")
        steps = [engine.train_step([own_batch(tokens)], lr=1e-3) for _ in range(4)]
        results.append([(step.loss, step.gradient_norm) for step in steps])
        engine.close()
    assert results[1] == results[2]
    for plain, by_choice in zip(results[0], results[1], strict=True):
        assert by_choice[0] == pytest.approx(plain[0], rel=2e-3)
        # Of four steps; the sum with the residual stream is rounded once instead of twice.
        assert by_choice[1] == pytest.approx(plain[1], rel=1e-2)
