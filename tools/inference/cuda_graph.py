"""One decoding step as a CUDA graph: the device replays the kernels of a step and Python starts one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = list[dict[str, Tensor]]


def graphed_step(model: Any, state: State, batch: int) -> Callable[[Tensor], Tensor]:
    """A function from the next tokens [batch, 1] to logits [batch, vocab_size], which goes on from `state`.

    model: `LanguageModel` or the Hugging Face model, on CUDA, in evaluation mode. state: what a forward pass over the
    prompt gave, of constant shapes (no attention layers); the function moves it on in place. The logits stand in one
    buffer, which the next call overwrites.

    Raises ValueError for a state that grows with the text.
    """
    layers = [model.embedding, *model.blocks]
    static: State = [{name: tensor.clone() for name, tensor in own.items()} for own in state[: len(layers)]]
    tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.head.weight.device)

    def step() -> tuple[Tensor, State]:
        hidden, after = tokens, []
        for layer, before in zip(layers, static, strict=True):
            hidden, new = layer(hidden, state=before, return_state=True)
            after.append(new)
        return model.head(hidden)[:, 0], after

    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and tuned outside the graph
            _, after = step()
            _, after = step()
        torch.cuda.current_stream().wait_stream(stream)
        for layer, (before, new) in enumerate(zip(static, after, strict=True)):
            for name in before:
                if before[name].shape != new[name].shape:
                    raise ValueError(
                        f"layer {layer}: its state {name!r} grows from {list(before[name].shape)} to "
                        f"{list(new[name].shape)} with every token, so a step cannot be replayed; decode without a graph"
                    )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, after = step()
            for before, new in zip(static, after, strict=True):
                for name in before:
                    before[name].copy_(new[name])

    def replay(given: Tensor) -> Tensor:
        tokens.copy_(given)
        graph.replay()
        return logits

    replay.state = static  # type: ignore[attr-defined]  # the graph holds its addresses alone
    return replay
