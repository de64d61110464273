"""Speed of the links between the GPUs of a run: all-reduce, all-gather, reduce-scatter and point to point, over sizes.

  torchrun --nproc-per-node 4 -m tools.measure_links -o links.json
  python -m tools.plan configs/metala_1.4b.yml --gpus 64 --links links.json

"Bus" speed, as nccl-tests counts: bytes that each process sends by a ring, over the time; of links in one direction.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.atomic_io import write_whole
from tools.cli.arguments import check_writable, command, command_line, positive

if TYPE_CHECKING:
    from megatron_lite.parallel.grid import Grid
    from megatron_lite.planning.communication_cost import Links

SIZES = [1 << power for power in range(16, 31, 2)]  # 64 KiB to 1 GiB


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = command_line("python -m tools.measure_links", __doc__)
    parser.add_argument("-o", "--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--largest", type=positive, default=SIZES[-1], metavar="BYTES", help="(default 1 GiB)")
    options = parser.parse_args(arguments)
    if options.largest < SIZES[0]:
        raise ValueError(f"--largest {options.largest}: {SIZES[0]} bytes, the first size, or more are allowed")
    if options.output is not None:
        check_writable(options.output, "--output")
    import warnings

    from megatron_lite.parallel.grid import init_grid

    warnings.filterwarnings("ignore", message=r".*torch\.distributed.* is deprecated", category=FutureWarning)
    grid = init_grid(options.device)
    if grid.world_size < 2:
        raise ValueError("a process alone has no links: torchrun --nproc-per-node 2 -m tools.measure_links")
    rows = measure([size for size in SIZES if size <= options.largest], grid)
    if grid.is_main:
        print(f"{grid.world_size} processes on {rows['device']}; GB/s of each process, one direction (bus)")
        print(f"{'bytes':>14}" + "".join(f"{name:>16}" for name in rows["speed"]))
        for index, size in enumerate(rows["bytes"]):
            print(f"{size:>14,}" + "".join(f"{values[index] / 1e9:>16.2f}" for values in rows["speed"].values()))
        print("latency of 8 bytes: " + ", ".join(f"{k} {v * 1e6:.1f} us" for k, v in rows["latency"].items()))
        if options.output is not None:
            write_whole(options.output, json.dumps(rows, indent=1) + "\n")
            print(f"wrote {options.output}")
    return 0


def measure(sizes: Sequence[int], grid: Grid) -> dict[str, Any]:
    """Bus speeds in bytes a second and latencies in seconds, by collective."""
    import os

    import torch
    import torch.distributed as dist

    device, n, rank = grid.device, grid.world_size, grid.rank
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    item = torch.empty((), dtype=kind).element_size()

    def work(size: int) -> dict[str, tuple[Callable[[], object], float]]:
        whole = torch.ones(max(n, size // item // n * n), dtype=kind, device=device)
        part = torch.ones(len(whole) // n, dtype=kind, device=device)
        received = torch.empty_like(whole)
        peer = rank ^ 1

        def exchange() -> None:
            if peer < n:  # both at once: with NCCL two processes that send first wait for each other
                both = [dist.P2POp(dist.isend, whole, peer), dist.P2POp(dist.irecv, received, peer)]
                for request in dist.batch_isend_irecv(both):
                    request.wait()

        size = len(whole) * item
        return {
            "all-reduce": (lambda: dist.all_reduce(whole), 2 * (n - 1) / n * size),
            "all-gather": (lambda: dist.all_gather_into_tensor(whole, part), (n - 1) / n * size),
            "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole), (n - 1) / n * size),
            "point to point": (exchange, size),
        }

    def seconds(call: Callable[[], object]) -> float:
        times = []
        for attempt in range(8):
            dist.barrier()
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if attempt > 2:
                times.append(time.perf_counter() - begin)
        slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    speed: dict[str, list[float]] = {}
    for size in sizes:
        for name, (call, sent) in work(size).items():
            speed.setdefault(name, []).append(sent / seconds(call))
    latency = {name: seconds(call) for name, (call, _) in work(8).items()}
    machines = n // int(os.environ.get("LOCAL_WORLD_SIZE", n))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "processes": n,
        "machines": machines,
        "bytes": list(sizes),
        "speed": speed,
        "latency": latency,
    }


def read_links(path: Path | None, machine: int) -> Links:
    """Assumed links, with the measured ones in their place: inside a machine, or between machines, as they were run.

    Raises OSError, or ValueError for a file that this tool did not write.
    """
    from megatron_lite.planning.communication_cost import Links

    links = replace(Links(), machine=machine)
    if path is None:
        return links
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        best = max(rows["speed"]["all-reduce"])
        hop = rows["latency"]["all-reduce"] / (2 * (rows["processes"] - 1))
        machines, processes, device = (rows[key] for key in ("machines", "processes", "device"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--links {path}: not what tools.measure_links -o writes ({type(error).__name__}: {error})"
        ) from error
    if machines > 1:
        source = f"{best / 1e9:.0f} GB/s between {machines} machines measured ({device}), inside assumed"
        return replace(links, outside=best, latency_outside=hop, source=source)
    source = f"{best / 1e9:.0f} GB/s inside measured ({processes} {device}), between machines assumed 45 GB/s"
    return replace(links, inside=best, latency_inside=hop, source=source)


if __name__ == "__main__":
    sys.exit(main())
