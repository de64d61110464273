"""Rewrite a checkpoint for another layout.

Training does not need this command: a run resumes in any layout. It only makes reading faster, because each process of the
new layout then reads mostly one file instead of many. Tensors, optimizer state and trainer state stay bitwise equal.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.cli.arguments import command, command_line, positive

EXAMPLES = """examples:
  python -m tools.reshard runs/x out/ --data 8 --tensor 4 --pipeline 2
  python -m tools.reshard runs/x/checkpoints/step_00001000 out/     one file, for one process
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, or 2 with a message."""
    parser = command_line("python -m tools.reshard", __doc__, EXAMPLES)
    parser.add_argument("checkpoint", type=Path, help="run folder, checkpoints folder or step folder")
    parser.add_argument("output", type=Path, help="new folder; the checkpoint becomes OUTPUT/step_XXXXXXXX")
    for key in ("data", "tensor", "pipeline"):
        parser.add_argument(
            f"--{key}", type=positive, default=1, metavar="N", help=f"{key} size of the layout to write for (1)"
        )
    options = parser.parse_args(arguments)
    if re.fullmatch(r"[\w.]+=[^/]*", str(options.output)):  # a setting in place of OUTPUT
        parser.error(f"unrecognized arguments: {options.output}")
    print(reshard(options.checkpoint, options.output, options.data, options.tensor, options.pipeline))
    return 0


def reshard(source: Path, output: Path, data: int, tensor: int, pipeline: int) -> str:
    """Rewrite `source` into the folder `output` for data x tensor x pipeline processes. Return a sentence for the user.

    Raises:
        CheckpointError: the source cannot be read, or the output exists or cannot be written.
        ValueError: the model does not divide into that layout, or as `model_config`.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches for a GPU and prints a warning
    from data.progress import ProgressBar
    from megatron_lite.checkpoint import reader as checkpoint
    from megatron_lite.checkpoint.storage import rewrite
    from megatron_lite.parallel.layout import Layout, layout_problems, limits_of, nearest_layouts, stage_bounds
    from megatron_lite.parallel.sharding_plan import ShardingSpec, shard_of
    from megatron_lite.planning.flops import forward_flops
    from models.language_model import layer_specs
    from tools.loading.model import model_config
    from tools.loading.token_data import data_config

    source = checkpoint.resolve(source)
    settings = checkpoint.read_config_yaml(source)
    model = model_config(settings)
    length = settings["batch"]["sequence_length"]
    target, limits = Layout(tensor, pipeline), replace(limits_of(model, length), context_parallel_error="not stored")
    for key, problem in layout_problems(target, limits):
        near = " or ".join(
            f"--tensor {layout.tensor} --pipeline {layout.pipeline}"
            for layout in nearest_layouts(target, target.model_ranks, limits)
        )
        raise ValueError(f"--{key} {problem}; nearest allowed: {near}")
    import torch

    specs = layer_specs(model)
    with torch.device("meta"):
        layers: list[Any] = [spec.build() for spec in specs]
    bounds = stage_bounds(forward_flops(layers, length, data_config(settings).predicted_fraction), pipeline)
    stage_of = {
        spec.name: next(stage for stage in range(pipeline) if index < bounds[stage + 1])
        for index, spec in enumerate(specs)
    }
    manifest = checkpoint.read_manifest(source)
    ranks: list[list[checkpoint.TensorSlice]] = [[] for _ in range(data * tensor * pipeline)]
    for name, entry in manifest["tensors"].items():
        layer = max((spec.name for spec in specs if name.startswith(spec.name + ".")), key=len)
        for index in range(tensor):
            shard = shard_of(ShardingSpec(entry["partition"]), tuple(entry["shape"]), index, tensor)
            if shard.count == 1 and index:
                break
            for rank, start, stop in _shares(math.prod(shard.shape(tuple(entry["shape"]))), data):
                owner = (stage_of[layer] * data + rank) * tensor + index
                ranks[owner].append(checkpoint.TensorSlice(name, shard, start, stop - start))
    layout = {"world_size": len(ranks), "data": data, "tensor": tensor, "pipeline": pipeline, "context": 1}
    layout |= {key: manifest["layout"][key] for key in ("zero_stage", "dtype") if key in manifest["layout"]}
    with ProgressBar(total=len(ranks), unit="rank", file=sys.stderr) as bar:
        final = rewrite(source, output, ranks, layout, progress=bar.update)
    return (
        f"{final}: for {checkpoint.describe_layout(layout)}; was for {checkpoint.describe_layout(manifest['layout'])}"
    )


def _shares(numel: int, parts: int) -> list[tuple[int, int, int]]:
    """Return (part, start, stop) of the non-empty shares of a flattened tensor."""
    cuts = [numel * part // parts for part in range(parts + 1)]
    return [(part, cuts[part], cuts[part + 1]) for part in range(parts) if cuts[part] < cuts[part + 1]]


if __name__ == "__main__":
    sys.exit(main())
