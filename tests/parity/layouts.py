"""The cases of the parity matrix: tiny models, layouts, and their common steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.mixers import MIXERS

VOCAB, LENGTH, STEPS, MICRO_BATCHES, LR, WARMUP = 96, 24, 4, 4, 1e-4, 2

LION = {"lion": {"variant": "s"}}
S4D = {"decay_init": "s4d_lin", "value_init": "zero_order_hold"}
MODELS: dict[str, dict[str, Any]] = {
    "metala": {"mixers": ("metala",)},
    "lion_causal": {"mixers": ("lion",), "mixer_options": LION},
    "lion_bidirectional": {"mixers": ("lion",), "mixer_options": {"lion": {"variant": "s", "causal": False}}},
    "attention": {"mixers": ("attention",)},
    "encoder": {
        "mixers": ("attention",),
        "mixer_options": {"attention": {"causal": False, "rotary_pct": 0.0}},
        "positions": "learned",
        "max_positions": LENGTH,
        "embedding_scale": 1.5,
        "mlp": "gelu",
        "mlp_bias": True,
    },
    "decay_per_channel": {
        "mixers": ("lion", "metala_bidirectional"),
        "mixer_options": {
            "lion": {"causal": False, "decay_per": "value_channel", "complex_decay": True, **S4D},
            "metala_bidirectional": {"decay_init": "s4d_lin", "complex_decay": True},
        },
    },
    "images_lion": {  # LION-natural
        "mixers": ("lion",),
        "mixer_options": {"lion": {"variant": "s", "causal": False}},
        "image_size": 16,
        "pooling": "class_token",
        "positions": "learned",
        "patch_order": "both",
    },
    "images_metala": {"mixers": ("metala",), "image_size": 16, "direction": "alternating"},
    "delta_rule": {
        "mixers": ("gated_delta_net", "kda", "gdn2", "delta_net"),
        "mixer_options": {
            "gated_delta_net": {"num_value_heads": 8, "head_dim": 8},
            "kda": {"allow_negative_eigenvalues": True},
        },
    },
    "grouped_hybrid": {
        "mixers": ("gated_delta_net", "attention", "metala", "attention"),
        "mixer_options": {
            "gated_delta_net": {"head_dim": 16},
            "attention": {"num_kv_heads": 2, "window": 7, "full_layers": (1,), "nope_layers": (3,)},
        },
    },
    "hybrid": {
        "mixers": ("metala", "lion", "attention"),
        "mixer_options": {
            **LION,
            "attention": {
                **{"window": 7, "qk_norm": True, "output_gate": True},
                **{"yarn_factor": 2.0, "yarn_original_length": LENGTH // 2},
            },
        },
        "mlp": "geglu",
        "mlp_bias": True,
    },
}


@dataclass(frozen=True)
class LayoutCase:
    """One run: a model, a layout and what differs from the plain run."""

    model: str
    layout: str
    parallel: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    masked: bool = False
    state: str = "fp32"
    packed: bool = False
    fp8: str = "none"
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        changes = "".join(f"-{key}={value}" for key, value in self.changes.items())
        changes += "-masked" if self.masked else "-packed" if self.packed else ""
        changes += "" if self.optimizer == "adamw" else f"-{self.optimizer}"
        changes += "" if self.dtype == "fp32" else f"-{self.dtype}"
        changes += "" if self.fp8 == "none" else f"-fp8_{self.fp8}"
        return f"{self.layout}-{self.model}{changes}" + ("" if self.state == "fp32" else f"-{self.state} state")

    @property
    def num_steps(self) -> int:
        """Return 3 steps where processes share the moments, which act on the third loss first; else 2.

        How ZeRO 2 and 3 cut them depends on the model. One model tests the other layouts.
        """
        one_model = self.model in ("hybrid", "metala") and any(word in self.layout for word in ("data", "context"))
        return 3 if one_model or "zero" in self.layout or self.optimizer != "adamw" else 2

    @property
    def config(self) -> ModelConfig:
        return model_config(self.model, **self.changes)


def model_config(model: str, **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        **MODELS.get(model, {"mixers": (model,)}),
    }
    if model == "mamba":  # a layer of one group cannot be cut
        values["mixer_options"] = {"mamba": {"groups": 2}}
    return ModelConfig(**{**values, **changes})


def image_steps() -> list[list[dict[str, Tensor]]]:
    """Return `STEPS` steps of `MICRO_BATCHES` micro-batches of 2 images; some images have no weight."""
    generator = torch.Generator().manual_seed(7)

    def batch(index: int) -> dict[str, Tensor]:
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        labels = torch.randint(0, VOCAB, (2,), generator=generator)
        return {"tokens": pixels, "labels": labels, "loss_weight": torch.tensor([1.0, float(index % 2)])}

    return [[batch(index) for index in range(MICRO_BATCHES)] for _ in range(STEPS)]


def steps_of(case: LayoutCase) -> list[list[dict[str, Tensor]]]:
    """Return the steps of a case."""
    return image_steps() if case.model in IMAGES else steps(case.masked, case.packed)


def steps(masked: bool = False, packed: bool = False) -> list[list[dict[str, Tensor]]]:
    """Return `STEPS` steps of `MICRO_BATCHES` micro-batches of 2 samples. Later micro-batches have fewer labels.

    masked: labelled tokens are replaced by token 1; rows of unequal length are padded.
    packed: both samples are one row of documents, one of them empty.
    """
    generator = torch.Generator().manual_seed(7)
    out = []
    for _ in range(STEPS):
        step = []
        for index in range(MICRO_BATCHES):
            tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
            weight = (torch.rand(2, LENGTH, generator=generator) < 0.9 - 0.2 * index).float()
            if masked:
                mask = torch.arange(LENGTH) < torch.randint(LENGTH // 3, LENGTH + 1, (2, 1), generator=generator)
                here = (weight > 0) & mask
                labels = tokens[:, :-1].masked_fill(~here, -100)
                hidden = tokens[:, :-1].masked_fill(here, 1)
                step.append({"tokens": hidden, "labels": labels, "loss_weight": here.float(), "mask": mask})
                continue
            batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "loss_weight": weight}
            if packed:
                bounds = torch.tensor([0, 5 + index, 5 + index, LENGTH + 9, 2 * LENGTH], dtype=torch.int32)
                batch = {key: value.reshape(1, -1) for key, value in batch.items()} | {"cu_seqlens": bounds}
            step.append(batch)
        out.append(step)
    return out


def in_pairs(step: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the same samples in half as many micro-batches."""
    return [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in zip(step[::2], step[1::2], strict=True)]


OVERLAP = {"tensor_overlap": True}
SEQUENCE = {"sequence_parallel": True}
CHECKPOINTED = {"activation_checkpointing": {"mode": "full"}}
SELECTIVE = {"activation_checkpointing": {"mode": "selective"}}
RECOMPUTE = {"activation_checkpointing": {"mode": "full", "every": 2, "others": "elementwise"}}
# Layouts by number of processes: of several models, and of the hybrid model alone, which has MetaLA, causal LION and attention.
EVERY: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "data2": {},
        "tensor2": {"tensor": 2},
        "tensor2_overlap": {"tensor": 2, **OVERLAP},
        "tensor2_sequence": {"tensor": 2, **SEQUENCE},
        "pipeline2": {"pipeline": 2},
    },
    4: {
        "pipeline2_tensor2_sequence": {"pipeline": 2, "tensor": 2, **SEQUENCE},
        "data2_tensor2_zero3": {"tensor": 2, "zero_stage": 3},
    },
}
HYBRID: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "data2_zero2": {"zero_stage": 2},
        "data2_zero3": {"zero_stage": 3},
        "tensor2_zero0": {"tensor": 2, "zero_stage": 0},
        "tensor2_checkpointed": {"tensor": 2, **SEQUENCE, **CHECKPOINTED},
        "pipeline2_zero0": {"pipeline": 2, "zero_stage": 0},
        "pipeline2_checkpointed": {"pipeline": 2, **CHECKPOINTED},
        "tensor2_selective": {"tensor": 2, **SELECTIVE},
        "tensor2_sequence_selective": {"tensor": 2, **SEQUENCE, **SELECTIVE},
        "tensor2_overlap_selective": {"tensor": 2, **OVERLAP, **SELECTIVE},
        "tensor2_recompute": {"tensor": 2, **RECOMPUTE},
        "tensor2_overlap_recompute": {"tensor": 2, **OVERLAP, **RECOMPUTE},
        "tensor2_overlap_checkpointed": {"tensor": 2, **OVERLAP, **CHECKPOINTED},
        "tensor2_sequence_recompute": {"tensor": 2, **SEQUENCE, **RECOMPUTE},
        "pipeline2_recompute": {"pipeline": 2, **RECOMPUTE},
        "data2_zero3_recompute": {"zero_stage": 3, **RECOMPUTE},
    },
    4: {
        "tensor4_sequence": {"tensor": 4, **SEQUENCE},
        "pipeline4": {"pipeline": 4},
        "pipeline2_data2": {"pipeline": 2},
        "pipeline2_tensor2_overlap": {"pipeline": 2, "tensor": 2, **OVERLAP},
        "data2_tensor2_overlap": {"tensor": 2, **OVERLAP},
        "data4": {},
        "data2_tensor2": {"tensor": 2},
        "data2_tensor2_sequence_zero2": {"tensor": 2, "zero_stage": 2, **SEQUENCE},
        "data2_tensor2_zero3_checkpointed": {"tensor": 2, "zero_stage": 3, **CHECKPOINTED},
    },
}
# Layouts with context parallelism.
CONTEXT: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "context2": {"context": 2},
        "context2_checkpointed": {"context": 2, **CHECKPOINTED},
        "context2_recompute": {"context": 2, **RECOMPUTE},
    },
    4: {
        "context4": {"context": 4},
        "context2_data2_zero2": {"context": 2, "zero_stage": 2},
        "context2_tensor2_sequence": {"context": 2, "tensor": 2, **SEQUENCE},
        "context2_pipeline2": {"context": 2, "pipeline": 2},
    },
}
# Image classifiers: the patch embedding and the head are whole on every rank of a tensor group.
IMAGES = {
    "images_lion": ("data2", "tensor2", "tensor2_overlap", "data2_zero3", "data2_tensor2_zero3"),
    "images_metala": ("tensor2", "data2_zero2"),
}
# Softmax attention without the options that it has in the hybrid.
ATTENTION = ("data2", "tensor2_overlap", "tensor2_sequence", "data2_tensor2_zero3")
# Causal LION has the operator of MetaLA, so one layout tests it.
SPLIT = ("lion_causal", "metala", "lion_bidirectional")
# Masked models, with BERT's head and few labels.
MASKED = {
    "lion_bidirectional": (
        "data2",
        "tensor2",
        "tensor2_overlap",
        "tensor2_sequence",
        "pipeline2",
        "context2",
        "pipeline2_tensor2_sequence",
    ),
    "metala_bidirectional": ("tensor2", "tensor2_sequence", "pipeline2", "context2"),
    "encoder": ("data2_zero3", "tensor2_sequence", "pipeline2", "data2_tensor2_zero3"),
    "decay_per_channel": (
        "data2_zero3",
        "tensor2",
        "tensor2_sequence",
        "pipeline2",
        "context2",
        "context2_tensor2_sequence",
    ),
}
MLM = {"head": "mlm"}
# The mixers of the delta rule are the layers of one model.
DELTA_RULE = (
    *("tensor2_sequence", "pipeline2", "tensor2_zero0", "data2_zero2", "data2_zero3", "context2_recompute"),
    *("context4", "context2_tensor2_sequence", "context2_pipeline2", "data2_tensor2_zero3"),
)
DELTA_RULE_PACKED = ("tensor2", "context2", "context4")
# Softmax attention whose keys and values are gathered: without a window, with grouped queries. True: packed.
GROUPED = (
    *(("context2_recompute", True), ("context2_tensor2_sequence", False), ("context2_data2_zero2", False)),
    *(("context4", True), ("context2_pipeline2", True)),
)
FP8 = {
    2: ("tensor2_overlap", "tensor2_sequence_selective", "pipeline2_recompute", "context2"),
    4: ("context2_tensor2_sequence", "data4"),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "unclipped": {"gradient_clipping": 0.0},
    "muon": {"name": "muon"},
    "muon_per_head": {"name": "muon", "muon": {"per_head": True}},
}
# Matrices of Muon that ZeRO and tensor parallelism cut, and stages with unequal numbers of them.
MUON = (
    *("data2", "data2_zero2", "tensor2", "tensor2_sequence", "pipeline2", "context2", "context2_tensor2_sequence"),
    *("data2_tensor2", "pipeline2_data2", "pipeline2_tensor2_sequence"),
)
SHORT = {"num_layers": 2}  # without pipeline stages
UNTIED = {"tie_embeddings": False}
POSITIONS = {"positions": "learned", "max_positions": LENGTH}
# Stages whose parameters are all of one kind: blocks without norms, and a tied head without norm weights.
BARE = {"norm_affine": False, "mlp_bias": False}
WIDE = {**BARE, "vocab_size": 4096, "num_layers": 2, "hidden_size": 16}


def cases(processes: int) -> list[LayoutCase]:
    """Return all cases of a number of processes."""
    plain = EVERY[processes] | HYBRID[processes]
    layouts = plain | CONTEXT[processes]
    selected = [LayoutCase("hybrid", name, layout) for name, layout in plain.items()]
    selected += [LayoutCase("attention", name, layouts[name], SHORT) for name in ATTENTION if name in layouts]
    selected += [
        LayoutCase(model, name, layouts[name], MLM if "pipeline" in name else {**MLM, **SHORT}, masked=True)
        for model, names in MASKED.items()
        for name in names
        if name in layouts
    ]
    selected += [
        LayoutCase(model, name, layouts[name], SHORT)
        for model, names in IMAGES.items()
        for name in names
        if name in layouts
    ]
    selected += [
        LayoutCase(model, name, layout, {} if "pipeline" in layout else SHORT)
        for name, layout in CONTEXT[processes].items()
        for model in (SPLIT if name == "context2" else SPLIT[1:])
    ]
    selected += [
        LayoutCase("delta_rule", name, layouts[name], packed=packed)
        for packed, names in ((False, DELTA_RULE), (True, DELTA_RULE_PACKED))
        for name in names
        if name in layouts
    ]
    selected += [
        LayoutCase("hybrid", name, layouts[name], optimizer="muon", packed="context" in name)
        for name in MUON
        if name in layouts
    ]
    selected += [
        LayoutCase("hybrid", name, layouts[name], optimizer="muon_per_head")
        for name in ("tensor2", "data2_tensor2")
        if name in layouts
    ]
    if processes == 2:
        selected += [LayoutCase("hybrid", "context2", layouts["context2"], packed=packed) for packed in (False, True)]
    selected += [
        LayoutCase("grouped_hybrid", name, layouts[name], packed=packed) for name, packed in GROUPED if name in layouts
    ]
    selected += [LayoutCase("hybrid", name, layouts[name], fp8="rowwise") for name in FP8[processes]]
    if processes == 2:
        selected += [
            LayoutCase("rwkv7", name, layouts[name], {"mlp": "rwkv7"})
            for name in ("pipeline2", "tensor2_overlap", "tensor2_sequence", "context2")
        ]
        selected += [
            LayoutCase("rwkv7", "context2", layouts["context2"], {"mlp": "rwkv7"}, packed=True),
            LayoutCase("rwkv7", "data2_zero3", layouts["data2_zero3"], {"mlp": "rwkv7", **SHORT}),
        ]
        rest = [mixer for mixer in MIXERS if mixer not in (*MODELS, *MODELS["delta_rule"]["mixers"], "lion", "rwkv7")]
        selected += [LayoutCase(mixer, "tensor2_sequence", EVERY[2]["tensor2_sequence"], SHORT) for mixer in rest]
        # Sequence parallelism sums the gradients of all replicated parameters. Without it, the sharding spec decides.
        whole = [m for m in rest if any("replicated" in spec for spec in MIXERS[m].tensor_parallel_plan.values())]
        selected += [LayoutCase(mixer, "tensor2", EVERY[2]["tensor2"], SHORT) for mixer in whole]
        split = [mixer for mixer in rest if getattr(MIXERS[mixer], "supports_context_parallel", False)]
        selected += [LayoutCase(mixer, "context2", CONTEXT[2]["context2"], SHORT) for mixer in split]
        selected += [LayoutCase("hybrid", name, EVERY[2][name], UNTIED) for name in ("tensor2_sequence", "pipeline2")]
        selected += [
            LayoutCase("attention", name, EVERY[2][name], POSITIONS) for name in ("tensor2", "tensor2_sequence")
        ]
        selected += [
            LayoutCase("metala", name, layout, dtype="bf16")
            for name, layout in (EVERY[2] | CONTEXT[2]).items()
            if name in ("data2", "tensor2_sequence", "pipeline2", "context2")
        ]
        selected += [
            LayoutCase("hybrid", name, layout, dtype="bf16", state="bf16")
            for name, layout in (EVERY[2] | HYBRID[2]).items()
            if name in ("data2", "tensor2_sequence", "pipeline2", "data2_zero2", "data2_zero3")
        ]
        selected += [
            LayoutCase("hybrid", name, layout, dtype="fp16")
            for name, layout in (EVERY[2] | HYBRID[2]).items()
            if name in ("data2", "tensor2_sequence", "pipeline2", "data2_zero3")
        ]
        recorded = {**EVERY[2]["tensor2_overlap"], "cuda_graph": True}  # on CUDA
        selected += [
            LayoutCase("metala", "tensor2_overlap_recorded", recorded, dtype=dtype) for dtype in ("bf16", "fp32")
        ]
        selected += [LayoutCase("attention", "pipeline2", {"pipeline": 2}, changes) for changes in (BARE, WIDE)]
    else:
        selected += [LayoutCase("metala", "pipeline2_tensor2_sequence", EVERY[4]["pipeline2_tensor2_sequence"], UNTIED)]
    return selected


def guarded(processes: int) -> list[tuple[str, dict[str, Any], str]]:
    """Return (name, layout, dtype) of the runs with a skipped step and with a gradient that is not finite."""
    if processes == 4:
        return []
    plain = [(f"guards-{name}", EVERY[2][name], "fp32") for name in ("data2", "tensor2", "pipeline2")]
    zero3, bf16 = (
        ("guards-data2_zero3", {"zero_stage": 3}, "fp32"),
        ("guards-pipeline2-bf16", EVERY[2]["pipeline2"], "bf16"),
    )
    return [*plain, zero3, bf16]


def compared(processes: int) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, layout) of the bf16 runs by this project's step and by DeepSpeed's."""
    every = EVERY[processes] | HYBRID[processes]
    names = {2: ("data2", "tensor2_sequence", "pipeline2"), 4: ("pipeline2_data2",)}
    return [(f"bf16_steps-{name}", every[name]) for name in names[processes]]
