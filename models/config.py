"""The shape of a model as one frozen dataclass. Importing this file needs the standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .options import describe_type, fits_type, nearest_multiples, nearest_names, option, require_divisor, type_hints


@dataclass(frozen=True)
class ModelConfig:
    """Hold shape, mixers and initialisation of a language model.

    Raises ValueError that names `model.<key>`, the value and the allowed values.
    """

    vocab_size: int = field(
        metadata={
            "doc": "Rows of the embedding and of the output projection. train.py: if left out, the tokenizer's size, rounded up "
            "to a multiple of 128. With image_size: the number of classes; if left out, that of the data set."
        }
    )
    num_layers: int = field(metadata={"doc": "Number of residual blocks."})
    hidden_size: int = field(metadata={"doc": "Width of the residual stream, d."})
    num_heads: int = field(metadata={"doc": "Number of heads in every mixer."})
    mixers: tuple[str, ...] = option(
        ("metala",), "Token mixers, a pattern that repeats over the layers. One name: the same mixer in every layer."
    )
    mixer_options: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata={"doc": "Mixer name -> options of that mixer."}
    )
    mlp: Literal["swiglu", "gelu", "geglu", "reglu", "glu", "bilinear", "rwkv7"] = option(
        "swiglu",
        "MLP of every block. gelu has no gate. rwkv7: squared ReLU behind a token shift, RWKV-7's channel mixing. The others "
        "have a gate with the activation SiLU (swiglu), GELU (geglu), ReLU (reglu), sigmoid (glu) or none (bilinear).",
    )
    intermediate_size: int | None = option(
        None, "Width of the MLP. null: 256 * ceil(8 d / 3 / 256) with a gate, 4 d for gelu and rwkv7."
    )
    mlp_bias: bool = option(False, "Biases in the projections of the MLP.")
    norm: Literal["layernorm", "rmsnorm"] = option(
        "layernorm", "Norm before every mixer and MLP and before the output projection."
    )
    norm_eps: float = option(1e-5, "Epsilon, added to the variance (or mean square) in the norms.")
    norm_affine: bool = option(True, "Learned gain (and offset, for layernorm) in the norms.")
    tie_embeddings: bool = option(True, "true: embedding and output projection share one matrix.")
    head: Literal["linear", "mlm"] = option(
        "linear",
        "Layers between the blocks and the output projection. linear: one norm. mlm: a norm, then BERT's dense "
        "layer, GELU and norm, and one output bias per token of the vocabulary.",
    )
    embedding_scale: float = option(
        1.0, "Factor on the token embedding, not on the output projection. The released MetaLA models have sqrt(d)."
    )
    positions: Literal["none", "learned"] = option(
        "none",
        "learned: add one learned vector per position to the embedding, as BERT and LION-lit. none: only the "
        "mixers depend on positions.",
    )
    max_positions: int | None = option(
        None, "Longest sequence, in tokens, for positions: learned; null for positions: none."
    )
    parallel_residual: bool = option(
        False, "true: y = x + mixer(norm1(x)) + mlp(norm2(x)), as in GPT-NeoX. false: MLP after mixer."
    )
    init_method: Literal["normal", "scaled_normal", "small_init", "wang_init"] = option(
        "small_init", "Initialisation of all matrices except those of output_init_method."
    )
    output_init_method: Literal["normal", "scaled_normal", "small_init", "wang_init"] = option(
        "wang_init", "Initialisation of the matrices that write into the residual stream."
    )
    init_std: float = option(0.02, "Standard deviation of `normal`; `scaled_normal` divides it by sqrt(2 layers).")
    image_size: int | None = option(
        None, "Height and width of the images of an image classifier, in pixels. null: a language model."
    )
    patch_size: int = option(4, "Height and width of a patch, which is one token, in pixels.")
    pooling: Literal["mean", "class_token"] = option(
        "mean", "Input of the classifier: the mean over all patches, or a learned class token behind the last patch."
    )
    patch_order: Literal["rows", "columns", "both"] = option(
        "rows", "Order in which mixers read the patches. both: the mean of both orders, LION-natural."
    )
    direction: Literal["forward", "backward", "alternating", "both"] = option(
        "both",
        "Direction in which causal mixers read the patches. alternating: every second block backward. both: the mean of "
        "both directions. Bidirectional mixers (option causal = false) need both.",
    )

    def __post_init__(self) -> None:
        for key, kind in type_hints(ModelConfig).items():
            if not fits_type(getattr(self, key), kind):
                raise ValueError(f"model.{key} = {getattr(self, key)!r}: allowed are {describe_type(kind)}")
        object.__setattr__(self, "mixers", tuple(self.mixers))
        if self.image_size is not None:
            self._derive_for_images()
        else:
            self._refuse_keys_of_images()
        for key in ("vocab_size", "num_layers", "hidden_size", "num_heads", "intermediate_size", "max_positions"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"model.{key} = {value}: must be at least 1")
        for key, value in (
            ("norm_eps", self.norm_eps),
            ("init_std", self.init_std),
            ("embedding_scale", self.embedding_scale),
        ):
            if not 0 < value < float("inf"):
                raise ValueError(f"model.{key} = {value}: must be greater than 0 and finite")
        if (self.positions == "learned") != (self.max_positions is not None):
            advice = (
                "set it to the longest sequence, in tokens"
                if self.max_positions is None
                else "leave it out, or set model.positions = learned"
            )
            raise ValueError(f"model.max_positions = {self.max_positions} with positions = {self.positions}: {advice}")
        require_divisor("model.num_heads", self.num_heads, "model.hidden_size", self.hidden_size)
        self._check_mixers()
        if self.image_size is not None:
            self._check_images()

    def _refuse_keys_of_images(self) -> None:
        for key in ("patch_size", "pooling", "patch_order", "direction"):
            if (value := getattr(self, key)) != getattr(ModelConfig, key):
                raise ValueError(
                    f"model.{key} = {value} is for image classifiers: leave it out, or set model.image_size"
                )

    def _derive_for_images(self) -> None:
        """Check the sizes of an image classifier, and set the keys that follow from them."""
        assert self.image_size is not None
        for key in ("image_size", "patch_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key} = {getattr(self, key)}: must be at least 1")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"model.image_size = {self.image_size} is no multiple of model.patch_size = {self.patch_size}; nearest "
                f"multiples: {nearest_multiples(self.image_size, self.patch_size)}"
            )
        object.__setattr__(self, "tie_embeddings", False)
        if self.positions == "learned" and self.max_positions is None:
            object.__setattr__(self, "max_positions", self.tokens_per_image)

    def _check_images(self) -> None:
        from .mixers import MIXERS

        bidirectional = self.bidirectional_mixers()
        if bidirectional and self.direction != "both":
            raise ValueError(
                f"model.direction = {self.direction}: {', '.join(bidirectional)} reads both directions; set model.direction = "
                "both, or choose a causal mixer (option causal = true)"
            )
        if bidirectional and len(bidirectional) < len(set(self.mixers)):
            raise ValueError(
                f"model.mixers = {list(self.mixers)} of an image classifier: {', '.join(bidirectional)} is bidirectional and the "
                "others are causal; choose mixers of one kind"
            )
        if values := [name for name in self.mixers if getattr(MIXERS[name], "value_residual", False)]:
            raise ValueError(
                f"model.mixers: {values[0]!r} has a value residual, which image classifiers do not support"
            )
        if self.positions == "learned" and self.max_positions != self.tokens_per_image:
            raise ValueError(
                f"model.max_positions = {self.max_positions}: an image has {self.tokens_per_image} tokens; leave the key out"
            )
        for key, default in (("head", "linear"), ("embedding_scale", 1.0)):
            if getattr(self, key) != default:
                raise ValueError(
                    f"model.{key} = {getattr(self, key)} is for language models: leave it out with image_size"
                )

    @property
    def tokens_per_image(self) -> int:
        """Return the patches of an image, and the class token if there is one; 0 for a language model."""
        return (self.image_size // self.patch_size) ** 2 + (self.pooling == "class_token") if self.image_size else 0

    def _check_mixers(self) -> None:
        # Imported here because mixers need torch and this file, which the configuration tools read, must not.
        from .mixers import MIXERS

        if not self.mixers:
            raise ValueError("model.mixers is empty: name at least one mixer, for example [metala]")
        for name in self.mixers:
            if name not in MIXERS:
                raise ValueError(f"model.mixers: unknown mixer {name!r}; {nearest_names(name, MIXERS)}")
        for name in self.mixer_options:
            if name not in MIXERS:
                raise ValueError(f"model.mixer_options: unknown mixer {name!r}; {nearest_names(name, MIXERS)}")
            if name not in self.mixers:
                raise ValueError(
                    f"model.mixer_options.{name} is set, but model.mixers = {list(self.mixers)} does not use {name!r}; "
                    f"add the mixer, or remove its options: model.mixer_options.{name}=null"
                )
        for name in dict.fromkeys(self.mixers):
            options, check = self.options_of(name), getattr(MIXERS[name], "check", None)
            if check is not None:
                check(self, options)

    def options_of(self, mixer: str) -> Any:
        """Return the `Options` of `mixer`, filled from `mixer_options`. Raises ValueError for an unknown key or wrong value."""
        from .mixers import MIXERS

        options = MIXERS[mixer].Options
        known = [f.name for f in dataclasses.fields(options)]
        given: Mapping[str, Any] = self.mixer_options.get(mixer) or {}
        for key in given:
            if key not in known:
                raise ValueError(f"model.mixer_options.{mixer}.{key}: unknown option; {nearest_names(key, known)}")
        allowed = type_hints(options)
        for key, value in given.items():
            if not fits_type(value, allowed[key]):
                raise ValueError(
                    f"model.mixer_options.{mixer}.{key} = {value!r}: allowed are {describe_type(allowed[key])}"
                )
        return options(**given)

    def bidirectional_mixers(self) -> list[str]:
        """Return the names of the mixers in use whose output at a token depends on later tokens."""
        from .mixers import MIXERS

        names = dict.fromkeys(self.mixers)
        return [
            name
            for name in names
            if not getattr(self.options_of(name), "causal", getattr(MIXERS[name], "causal", True))
        ]

    def mixer_of(self, layer_index: int) -> str:
        """Return the mixer's name in block `layer_index`: the pattern `mixers`, repeated."""
        return self.mixers[layer_index % len(self.mixers)]

    def value_residual_layers(self) -> tuple[int, ...]:
        """Return the blocks whose mixers read the values of the first of them; (-1,) for none."""
        from .mixers import MIXERS

        reads = [getattr(MIXERS[self.mixer_of(index)], "value_residual", False) for index in range(self.num_layers)]
        return tuple(index for index, read in enumerate(reads) if read) or (-1,)

    def reads_values(self, layer_index: int) -> bool:
        """Return whether the input of block `layer_index` holds the values of a value residual (`models.block.Block`)."""
        layers = self.value_residual_layers()
        return layers[0] < layer_index <= layers[-1]

    def sharded_sizes(self) -> dict[str, int]:
        """Return the sizes that tensor parallelism splits, by config key. Its degree must divide each of them."""
        from .mixers import MIXERS

        sizes = {
            "model.num_heads": self.num_heads,
            "model.intermediate_size": self.mlp_width,
        }
        if self.image_size is None:
            sizes["model.vocab_size"] = self.vocab_size
        for name in dict.fromkeys(self.mixers):
            mixer_sizes = getattr(MIXERS[name], "sharded_sizes", None)
            if mixer_sizes is not None:
                sizes |= mixer_sizes(self, self.options_of(name))
        return sizes

    def context_parallel_error(self) -> str:
        """Return why this model does not support context parallelism, or an empty string if it does."""
        if self.image_size is not None:
            return "an image classifier averages over all patches"
        from .mixers import MIXERS

        supported = [name for name, mixer in MIXERS.items() if getattr(mixer, "supports_context_parallel", False)]
        for name in self.mixers:
            if name not in supported:
                return (
                    f"model.mixers: {name!r} does not support context parallelism; supported are {', '.join(supported)}"
                )
        return ""

    def conv_kernels(self) -> dict[str, int]:
        """Return the kernel sizes of the mixers' causal convolutions, by config key, in tokens."""
        options = {name: self.options_of(name) for name in self.mixers}
        options = {name: given for name, given in options.items() if getattr(given, "convolution", True)}
        sizes = {name: getattr(given, "conv_kernel", 0) for name, given in options.items()}
        return {f"model.mixer_options.{name}.conv_kernel": size for name, size in sizes.items() if size}

    @property
    def mlp_width(self) -> int:
        """Return the width of the MLP, `intermediate_size` or its default."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.mlp not in ("gelu", "rwkv7"):
            return 256 * -(-8 * self.hidden_size // (3 * 256))
        return 4 * self.hidden_size
