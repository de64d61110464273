"""Which blocks recompute their activations."""

from __future__ import annotations

from megatron_lite.config.schema import ParallelConfig
from megatron_lite.engine.activation_checkpointing import mode_of


def test_every_nth_block_has_the_mode_and_embedding_and_head_have_none():
    def modes(**settings: object) -> list[str]:
        return [mode_of(index, 6, ParallelConfig(activation_checkpointing=settings)) for index in range(6)]

    assert modes(mode="full") == ["none", "full", "full", "full", "full", "none"]
    assert modes(mode="full", every=3) == ["none", "full", "none", "none", "full", "none"]
    others = modes(mode="full", every=2, others="elementwise")
    assert others == ["none", "full", "elementwise", "full", "elementwise", "none"]
