"""Build the model of a run: the project's layers with logits at some positions only, and MAD's decoder for compression."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.backend import is_supported
from models.block import Block
from models.config import ModelConfig
from models.language_model import LanguageModel, LayerSpec
from models.layers.embedding import look_up
from models.layers.norm import Norm
from models.layers.projections import linear
from models.mixers.attention import Attention
from models.operators.cross_entropy import IGNORED_LABEL
from models.operators.dot_product import dot_product
from models.options import nearest_names

from .experiment import Run

# Initialization of matrices. model: by the keys `init_method` and `output_init_method`. mad_lab: see `_init_as_mad_lab`;
# mad_lab_gla: the mixers as in MAD-Lab's gated linear attention. pytorch: PyTorch's defaults, as in code for Long Range Arena.
FIRST_WEIGHTS = ("model", "mad_lab", "mad_lab_gla")
CLASSIFIER_FIRST_WEIGHTS = ("model", "pytorch")
# Dropout probabilities: of the elements of embeddings, the weights of softmax attention, and the outputs of mixers and MLPs.
DROPOUTS = ("embedding_dropout", "attention_dropout", "residual_dropout")
# Keys of `network` and `definitions`: those of `model` that a run does not set itself, and those of this module.
KEYS = (
    *(key.name for key in fields(ModelConfig) if key.name not in ("vocab_size", "hidden_size", "max_positions")),
    *("head_dim", "first_weights", *DROPOUTS, "tie_dropout", "head_bias", "fp32_residual_connection"),
)


def model_config(run: Run) -> ModelConfig:
    """Return the configuration of a run's model. Raises ValueError naming the invalid key of `network` or `definitions`."""
    keys = dict(run.network)

    def refusal(key: str, value: object, allowed: str) -> ValueError:
        return ValueError(f"definitions.{run.model} or network: {key} = {value!r}: allowed {allowed}")

    for key in keys:
        if key not in KEYS:
            raise ValueError(f"definitions.{run.model} or network: {key} is an unknown key; {nearest_names(key, KEYS)}")
    first, allowed = keys.pop("first_weights", "model"), CLASSIFIER_FIRST_WEIGHTS if run.classifies else FIRST_WEIGHTS
    if first not in allowed:
        raise refusal("first_weights", first, f"are {', '.join(allowed)}")
    for key in DROPOUTS:
        dropout = keys.pop(key, 0.0)
        only_zero = run.classifies and key == "attention_dropout"
        if not (isinstance(dropout, int | float) and 0 <= dropout < 1) or (dropout and only_zero):
            raise refusal(key, dropout, "is only 0 in this suite" if only_zero else "are numbers >= 0 and < 1")
    if not isinstance(tied := keys.pop("tie_dropout", False), bool) or (tied and not run.classifies):
        raise refusal("tie_dropout", tied, "are true and false, true only for a classifier")
    if (norm := keys.get("norm", "layernorm")) not in ("layernorm", "rmsnorm"):
        if norm != "batchnorm" or not run.classifies:
            # In a language model a token would see later tokens of the batch.
            raise refusal("norm", norm, "are layernorm and rmsnorm, for a classifier also batchnorm")
        if not run.drop_last:
            raise ValueError(
                "drop_last = false with norm = batchnorm: rows that fill the last batch would be in its statistics; set "
                "drop_last = true"
            )
        del keys["norm"]
    if not isinstance(bias := keys.pop("head_bias", False), bool) or (bias and run.classifies):
        raise refusal("head_bias", bias, "are true and false, for a classifier only false")
    if not isinstance(fp32_residual := keys.pop("fp32_residual_connection", False), bool):
        raise refusal("fp32_residual_connection", fp32_residual, "are true and false")
    if without_mlp(run):
        if run.classifies:
            raise refusal("mlp", "identity", "only in the suites mqar and mad")
        # `Network` replaces this smallest MLP.
        keys |= {"mlp": "gelu", "mlp_bias": False, "intermediate_size": 1}
    if "head_dim" in keys:
        head_dim = keys.pop("head_dim")
        if not isinstance(head_dim, int) or head_dim < 1:
            raise refusal("head_dim", head_dim, "are whole numbers >= 1")
        keys["num_heads"] = max(1, run.width // head_dim)
    if "num_heads" not in keys:
        raise ValueError(f"definitions.{run.model}.num_heads is missing: set it, or head_dim")
    if (positions := keys.get("positions", "none")) == "learned":
        keys["max_positions"] = run.length
    elif positions != "none":
        if positions != "sinusoidal" or not run.classifies:
            raise refusal("positions", positions, "are none and learned, for a classifier also sinusoidal")
        del keys["positions"]
    try:
        return ModelConfig(vocab_size=int(run.data["vocabulary"]), hidden_size=run.width, **keys)
    except (TypeError, ValueError) as error:
        raise ValueError(f"definitions.{run.model} or network, width {run.width}: {error}") from None


def without_mlp(run: Run) -> bool:
    """Return whether the identity replaces the MLP: each block adds its second norm's output, as in Zoology's models."""
    return run.network.get("mlp") == "identity"


class WithDropout(nn.Module):
    """Apply inverted dropout with the probabilities of DROPOUTS during training.

    Attributes:
        dropout_generator: random generator; None for PyTorch's default generator.
        tie_dropout: drop a channel at all tokens of a sequence or at none, as code for Long Range Arena (S4, S5).
        fp32_residual_connection: keep the residual stream in float32 between the blocks, whatever type the weights have.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embedding_dropout, self.attention_dropout, self.residual_dropout = (
            float(run.network.get(key, 0.0)) for key in DROPOUTS
        )
        self.tie_dropout = bool(run.network.get("tie_dropout"))
        self.fp32_residual_connection = bool(run.network.get("fp32_residual_connection"))
        self.dropout_generator: torch.Generator | None = None
        self._dropout_active = False
        self._run_block = _run_block

    def compile_blocks(self) -> None:
        """Run every block with its dropout and residual sums by torch.compile."""
        self._run_block = torch.compile(_run_block)

    def _dropout(self, x: Tensor, p: float) -> Tensor:
        kept = self._kept(x, p, x.dtype)
        return x if kept is None else x * kept / (1 - p)

    def _kept(self, x: Tensor, p: float, dtype: torch.dtype) -> Tensor | None:
        """Return 1 for each element of x that stays and 0 for the others, in a shape that broadcasts; None without dropout."""
        if not (self._dropout_active and p):
            return None
        shape = (x.shape[0], 1, x.shape[-1]) if self.tie_dropout else x.shape
        return x.new_empty(shape, dtype=dtype).bernoulli_(1 - p, generator=self.dropout_generator)

    def _through(self, blocks: Iterable[Block], x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return x after the blocks.

        With fp32_residual_connection (Megatron-LM's name) the residual stream and its norms are float32. The inputs of mixers
        and MLPs, and the returned tensor, have x's dtype.
        """
        input_dtype, p = x.dtype, self.residual_dropout
        x = x.float() if self.fp32_residual_connection else x
        for block in blocks:
            kept = self._kept(x, p, input_dtype), self._kept(x, p, input_dtype)
            x = self._run_block(block, x, mask, input_dtype, *kept, 1 / (1 - p))
        return x.to(input_dtype)


class Network(WithDropout):
    """Compute a language model's logits at some positions only."""

    def __init__(self, run: Run) -> None:
        config = model_config(run)
        super().__init__(run)
        self.model = LanguageModel(config, seed=run.seed)
        self.model.embedding.lookup = look_up_filler
        if without_mlp(run):
            for block in self.model.blocks:
                block.mlp = _WithoutMLP()
        if run.network.get("head_bias"):
            self.model.head.bias = nn.Parameter(torch.zeros(config.vocab_size))
        for module in self.model.modules() if self.attention_dropout else ():
            if isinstance(module, Attention):
                module.dot_product = self._attend
        self.decoder: nn.Module | None = None
        if run.base_task == "compression":
            spec = LayerSpec("decoder", config.num_layers + 2, partial(Decoder, config, run.length))
            self.decoder = spec.build(run.seed)
        first = run.network.get("first_weights", "model")
        if first != "model":
            _init_as_mad_lab(self, run.seed, small_mixers=first == "mad_lab_gla")

    def rows(self, tokens: Tensor, positions: Tensor | None, *, dropout: bool = False) -> Tensor:
        """Return the hidden vectors [batch, labelled, d] that the head reads.

        tokens: [batch, length]. positions: [batch, labelled], or None for all positions.
        """
        self._dropout_active = dropout
        x = self._dropout(self.model.embedding(tokens), self.embedding_dropout)
        x = self._through(self.model.blocks, x)
        if self.decoder is not None:
            x = self.decoder(x[:, -1])
        return x if positions is None else x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def loss(self, tokens: Tensor, positions: Tensor | None, labels: Tensor) -> Tensor:
        """Return the mean cross entropy over the labels [batch, labelled] that are not IGNORED_LABEL."""
        total = self.model.head(self.rows(tokens, positions, dropout=True), labels=labels)
        return total / (labels != IGNORED_LABEL).sum()

    def logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return logits [batch, labelled, vocabulary] in float32: in 16 bits the largest logits would often be equal."""
        head = self.model.head
        hidden = head.norm(self.rows(tokens, positions))
        return F.linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, is_causal: bool, window: int | None = None
    ) -> Tensor:
        """Compute `models.operators.dot_product.dot_product`, with dropout during training.

        PyTorch's attention dropout uses the default generator, which the runs of a group would share.
        """
        if not self._dropout_active:
            return dot_product(q, k, v, allowed, is_causal, window)
        scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
        if is_causal:
            allowed = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
            allowed = allowed if window is None else allowed.triu(1 - window)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        return self._dropout(scores.softmax(-1).to(v.dtype), self.attention_dropout) @ v


class _WithoutMLP(nn.Module):
    """Apply the identity with the call signature of `models/layers/mlp.py`."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else residual + x


def _run_block(
    block: Block,
    x: Tensor,
    mask: Tensor | None,
    input_dtype: torch.dtype,
    kept: Tensor | None,
    kept_of_mlp: Tensor | None,
    scale: float,
) -> Tensor:
    """Return x after a block whose mixer and MLP compute in input_dtype.

    kept, kept_of_mlp: 1 for each element of their outputs that stays, 0 for the others; None without dropout. scale: the factor
    of the elements that stay.
    """
    if kept is None and x.dtype == input_dtype:
        return block(x, mask=mask)
    normed, first = _norm_in_dtype_of(x, block.norm1), x
    x = _add(x, block.mixer(normed.to(input_dtype), mask=mask), kept, scale)
    normed = _norm_in_dtype_of(first if block.parallel_residual else x, block.norm2)
    return _add(x, block.mlp(normed.to(input_dtype)), kept_of_mlp, scale)


def _add(x: Tensor, y: Tensor, kept: Tensor | None, scale: float) -> Tensor:
    # The scale is a number, because a tensor in 16 bits would round it.
    return x + y if kept is None else torch.add(x, y * kept, alpha=scale)


def _norm_in_dtype_of(x: Tensor, norm: nn.Module) -> Tensor:
    weights = dict(norm.named_parameters())
    if all(weight.dtype == x.dtype for weight in weights.values()):
        return norm(x)
    return torch.func.functional_call(norm, {name: weight.to(x.dtype) for name, weight in weights.items()}, (x,))


@torch.no_grad()
def _init_as_mad_lab(network: Network, seed: int, *, small_mixers: bool) -> None:
    """Initialize weights as MAD-Lab does (mad/model/language_model.py, auto_encoder.py).

    Embeddings are N(0, 0.02). Projections have PyTorch's default, except Mamba's dt. With the decoder all projections are
    N(0, 0.02) and their biases 0. small_mixers: without the decoder, mixers are Xavier-uniform with gain 2^-2.5, as in the
    gated linear attention of MAD-Lab and flash-linear-attention.
    """
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(network.model.embedding.weight, std=0.02, generator=generator)
    projections = [(name, module.weight) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    # Mixers hold some projections as bare parameters, with all heads or groups in one tensor.
    bare = (
        ("select_weight", "decay_weight") if network.decoder is None else ("select_weight", "decay_weight", "dt_weight")
    )
    for name, parameter in network.named_parameters():
        if name.endswith(bare):
            projections.append((name, parameter.view(-1, parameter.shape[-1])))
        elif network.decoder is not None and name.endswith("dt_bias"):
            nn.init.zeros_(parameter)
    for name, weight in [*projections, ("model.head", network.model.head.weight)]:
        if network.decoder is not None:
            nn.init.normal_(weight, std=0.02, generator=generator)
        elif small_mixers and ".mixer." in name:
            nn.init.xavier_uniform_(weight, gain=2**-2.5, generator=generator)
        else:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)


def look_up_filler(tokens: Tensor, weight: Tensor, vectors: Tensor | None) -> Tensor:
    """Look up embeddings with a kernel for often repeated tokens: most tokens of these tasks are one filler id."""
    if is_supported(weight):
        from models.kernels.embedding_backward import look_up_repeated

        return look_up_repeated(tokens, weight, vectors)
    return look_up(tokens, weight, vectors)


def sines(length: int, size: int) -> Tensor:
    """Return the fixed sines and cosines of positions [length, size], as in MAD-Lab and fairseq."""
    frequency = torch.exp(-math.log(10_000) * torch.arange(size // 2) / (size // 2 - 1))
    angle = torch.arange(length)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)


class Decoder(nn.Module):
    """Decode all positions of a sequence from the last position's vector, as MAD-Lab's autoencoder.

    Position i is GELU(W2 norm(GELU(W1 norm(x + p_i)))) with fixed sines and cosines p.
    """

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.Sequential(
            *(layer for _ in range(2) for layer in (Norm(config), linear(config, size, size, bias=True), nn.GELU()))
        )
        self.register_buffer("positions", sines(length, size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, length, hidden_size] for x [batch, hidden_size]."""
        return self.layers(x.unsqueeze(1) + self.positions)
