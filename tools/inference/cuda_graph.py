"""Record one decoding step as a CUDA graph, so that each step needs one launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = list[dict[str, Tensor]]


def graphed_step(model: Any, state: State, batch: int, max_tokens: int) -> Callable[[Tensor], Tensor]:
    """Return a function from the next tokens [batch, 1] to logits [batch, vocab_size] that continues from `state`.

    Each call updates the state in place and overwrites the logits of the previous call.

    Args:
        model: `LanguageModel` or the Hugging Face model, on CUDA, in evaluation mode.
        state: the state after a forward pass over the prompt.
        max_tokens: number of calls at most. Caches of keys and values are enlarged for so many tokens.

    Raises:
        ValueError: the state of another layer grows with the text; in a call, more than max_tokens calls.
    """
    layers = [model.embedding, *model.blocks]
    static: State = []
    for layer, previous in zip(layers, state[: len(layers)], strict=True):
        mixer = getattr(layer, "mixer", None)
        enlarged = mixer.preallocate(previous, max_tokens) if hasattr(mixer, "preallocate") else previous
        static.append(
            {name: tensor.clone() if tensor is previous.get(name) else tensor for name, tensor in enlarged.items()}
        )
    tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.head.weight.device)

    def step() -> tuple[Tensor, State]:
        hidden, after = tokens, []
        for layer, previous in zip(layers, static, strict=True):
            hidden, new = layer(hidden, state=previous, return_state=True)
            after.append(new)
        return model.head(hidden)[:, 0], after

    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile and autotune kernels outside the graph
            _, after = step()
            _, after = step()
        torch.cuda.current_stream().wait_stream(stream)
        for number, (previous, new) in enumerate(zip(static, after, strict=True)):
            for name in previous:
                if previous[name].shape != new[name].shape:
                    raise ValueError(
                        f"layer {number}: its state {name!r} grows from {list(previous[name].shape)} to "
                        f"{list(new[name].shape)} with every token, so a step cannot be replayed; decode without a graph"
                    )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, after = step()
            for previous, new in zip(static, after, strict=True):
                for name in previous:
                    previous[name].copy_(new[name])

    calls = itertools.count(1)

    def replay(next_tokens: Tensor) -> Tensor:
        if next(calls) > max_tokens:
            raise ValueError(
                f"max_tokens {max_tokens}: the state has no room for more tokens; record a graph with more"
            )
        tokens.copy_(next_tokens)
        graph.replay()
        return logits

    replay.state = static  # type: ignore[attr-defined]  # the graph uses these addresses
    return replay
