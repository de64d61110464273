"""Simulated scaling of a run to many GPUs from the speeds of its links: a table and a plot.

  python -m tools.simulate_scaling configs/metala_1.4b.yml -o docs/figures/scaling.png
  torchrun --nproc-per-node 4 -m tools.measure_links -o links.json
  python -m tools.simulate_scaling configs/metala_1.4b.yml --links links.json -o docs/figures/scaling.png

The model is megatron_lite/planning/communication_cost.py; docs/scaling.md says what it assumes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tools.cli.arguments import above_zero, check_picture, command, command_line, positive

COUNTS = [1 << power for power in range(11)]  # 1 to 1024


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = command_line("python -m tools.simulate_scaling", __doc__)
    parser.add_argument("config", nargs="+", metavar="FILE.yml | key.sub=value", help="as for train.py")
    parser.add_argument(
        "--flops",
        type=above_zero,
        default=540e12,
        help="FLOP/s that one GPU reaches alone (default 5.4e14, MetaLA 1.4B on an H200)",
    )
    parser.add_argument("--gpus-per-machine", type=positive, default=8, help="(default 8)")
    parser.add_argument("--links", type=Path, help="JSON from tools.measure_links; default: assumed speeds")
    parser.add_argument("-o", "--output", type=Path, help="write the plot here")
    options = parser.parse_intermixed_args(arguments)
    if options.output is not None:
        check_picture(options.output, "--output")
    from megatron_lite.parallel.layout import Layout, layout_problems, limits_of
    from megatron_lite.planning.communication_cost import scaling
    from tools.measure_links import read_links
    from tools.planning.estimate import any_layout, layer_flops, workload

    config, _, _ = any_layout(options.config, 1)
    limits = limits_of(config.model, config.batch.sequence_length)
    links = read_links(options.links, options.gpus_per_machine)
    stage = max(1, config.parallel.zero_stage)
    work = replace(workload(config, layer_flops(config), "bf16"), zero_stage=stage)
    layouts = {"data": Layout()}
    layouts |= {f"tensor {size} x data": Layout(tensor=size) for size in sorted({2, links.machine} - {1})}
    if stage == 1:  # the stages of a pipeline keep their gradients
        layouts |= {"pipeline 4 x data": Layout(pipeline=4)}
        layouts |= {"tensor 2 x pipeline 4 x data": Layout(tensor=2, pipeline=4)}
    curves = {
        name: scaling(work, layout, COUNTS, options.flops, links, grow_batch=False)
        for name, layout in layouts.items()
        if not any(layout_problems(layout, limits))
    }
    size = f"{work.global_batch_size} samples of {work.sequence_length} a step, ZeRO {stage}"
    title = f"{Path(options.config[0]).stem}: {size}"
    print(f"{title}; {options.flops / 1e12:g} TFLOP/s a GPU\nlinks: {links.source}\n")
    print(table(curves))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        draw(curves, title, f"simulated; {links.source}", options.output)
        print(f"\nwrote {options.output}")
    return 0


def table(curves: Mapping[str, Mapping[int, float]]) -> str:
    """Efficiency in percent, a layout a line."""
    lines = [f"{'GPUs':<32}" + "".join(f"{count:>7}" for count in COUNTS)]
    for name, curve in curves.items():
        cells = "".join(f"{curve[count]:>7.0%}" if count in curve else f"{'-':>7}" for count in COUNTS)
        lines.append(f"{name:<32}{cells}")
    return "\n".join(lines)


def draw(curves: Mapping[str, Mapping[int, float]], title: str, note: str, path: Path) -> None:
    """Speed over that of one GPU, and efficiency, against GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    left.plot(COUNTS, COUNTS, color="0.7", linestyle="--", label="ideal")
    for name, curve in curves.items():
        counts = list(curve)
        left.plot(counts, [count * curve[count] for count in counts], marker="o", markersize=3.5, label=name)
        right.plot(counts, [100 * curve[count] for count in counts], marker="o", markersize=3.5)
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="speed, times one GPU")
    right.set(xscale="log", ylim=(0, 103), xlabel="GPUs", ylabel="efficiency, %")
    for axes in (left, right):
        axes.set_xticks(COUNTS, [str(count) for count in COUNTS], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.set_yticks(COUNTS[::2], [str(count) for count in COUNTS[::2]], fontsize=8)
    left.legend(fontsize=8)
    figure.suptitle(f"{title}\n{note}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
