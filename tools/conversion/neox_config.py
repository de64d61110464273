"""Translate GPT-NeoX configuration keys to this project's sections, and list ignored keys with reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.config.neox_hints import NEOX_KEYS
from tools.conversion.neox_keys import DEFAULTS, IGNORED, REFUSED, SAME


@dataclass
class Translation:
    """Hold the translated configuration, the ignored keys with reasons, and the assumptions."""

    tree: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        """Write `section.key`."""
        node = self.tree
        *path, last = key.split(".")
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value


def translate(neox: Mapping[str, Any], *, vocab_size: int) -> Translation:
    """Translate a GPT-NeoX configuration, whose keys have underscores, to one of this project.

    Raises ValueError for a setting that changes the model and does not exist here.
    """
    out = Translation()
    neox = {key: value for key, value in neox.items() if value is not None}
    given = {**DEFAULTS, **neox}
    accumulates = {"gas", "gradient_accumulation_steps"} & neox.keys()
    if not accumulates and not {"train_batch_size", "train_micro_batch_size_per_gpu"} <= neox.keys():
        given["gas"] = 1
    if {"data_path", "train_data_paths", "vocab_file"} & neox.keys():
        given.setdefault("tokenizer_type", "GPT2BPETokenizer")
    for key, (allowed, here) in REFUSED.items():
        if given.pop(key, None) not in allowed:
            raise ValueError(f"{key.replace('_', '-')} = {neox[key]!r}: no counterpart, {here}")
    out.set("model.vocab_size", vocab_size)
    out.assumed.append(f"model.vocab_size = {vocab_size}: GPT-NeoX takes it from the tokenizer (--vocab-size)")
    _mixers(given, out)
    _positions(given, out)
    for key in SAME:
        if key in given:
            out.set(NEOX_KEYS[key].keys[0], given.pop(key))
    for key, convert in _CONVERT.items():
        if key in given:
            value = given.pop(key)
            try:
                convert(value, given, out)
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"{key.replace('_', '-')} = {value!r} is not of GPT-NeoX's form ({error})") from error
    if "dtype" not in out.tree.setdefault("precision", {}):
        out.set("precision.dtype", "fp32")
    for key in given:
        if key not in _READ_BESIDE:
            out.ignored[key] = IGNORED.get(key, "no counterpart here")
    _data(neox, out)
    return out


def _mixers(given: dict[str, Any], out: Translation) -> None:
    kinds = {"global": "attention", "flash": "attention"}
    layers, config = given.get("num_layers"), given.pop("attention_config", None) or [[["global"], "all"]]
    expanded = _layers_of(config, layers)
    if isinstance(layers, int) and len(expanded) != layers:
        raise ValueError(f"attention-config = {config!r} is of {len(expanded)} layers, and num-layers = {layers}")
    for name in expanded:
        if name not in kinds:
            why = "; a block of mamba has no MLP there, every block has one here" if name == "mamba" else ""
            raise ValueError(f"attention-config names {name!r}: {', '.join(kinds)} have a counterpart here{why}")
    out.set("model.mixers", ["attention"])
    out.set("model.mixer_options.attention.bias", bool(given["use_bias_in_attn_linear"]))


def _layers_of(config: Any, layers: Any) -> list[str]:
    """The kind of every layer: of a list of kinds, or of pairs of some kinds and how often they are repeated, or "all"."""
    if isinstance(config, list) and all(isinstance(name, str) for name in config):
        return config
    try:
        kinds: list[str] = []
        for names, count in config:
            if count == "all":  # GPT-NeoX reads no further
                return list(names) * (layers // len(names) if isinstance(layers, int) else 1)
            kinds += list(names) * int(count)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f'attention-config = {config!r} is not of GPT-NeoX\'s form, such as [[["global"], 24]] or [[["flash"], "all"]]'
        ) from error
    return kinds


def _positions(given: dict[str, Any], out: Translation) -> None:
    kind = given.pop("pos_emb")
    share, longest = given.pop("rotary_pct", 1.0), given.pop("max_position_embeddings", None)
    if kind not in ("rotary", "learned", "none"):
        raise ValueError(f"pos-emb = {kind!r}: rotary, learned and none have a counterpart here")
    out.set("model.mixer_options.attention.rotary_pct", float(share) if kind == "rotary" else 0.0)
    if kind == "learned":
        out.set("model.positions", "learned")
        out.set("model.max_positions", longest or given.get("seq_length", 2048))
    elif longest is not None:
        out.ignored["max_position_embeddings"] = "positions are not learned, so nothing has a largest one"
    if kind != "rotary":
        given.pop("rotary_emb_base", None)


def _norm(value: str, given: dict[str, Any], out: Translation) -> None:
    names = {"layernorm": "layernorm", "te_layernorm": "layernorm", "rmsnorm": "rmsnorm", "te_rmsnorm": "rmsnorm"}
    if value not in names:
        raise ValueError(f"norm = {value!r}: {', '.join(names)} have a counterpart here")
    norm = names[value]
    if not given.pop("use_bias_in_norms", True) and norm == "layernorm":
        raise ValueError("use-bias-in-norms = False: no counterpart, a layernorm has an offset beside its gain")
    out.set("model.norm", norm)
    default = 1e-5 if norm == "layernorm" else 1e-8
    out.set("model.norm_eps", given.get("layernorm_epsilon" if norm == "layernorm" else "rms_norm_epsilon", default))


def _activation(value: str, given: dict[str, Any], out: Translation) -> None:
    if value not in ("gelu", "swiglu"):
        raise ValueError(f"activation = {value!r}: gelu and swiglu have a counterpart here")
    out.set("model.mlp", value)
    width, multiple = given.pop("intermediate_size", None), given.pop("mlp_multiple_of", 1)
    if value == "swiglu" or width is not None or multiple != 1:
        width = 4 * out.tree["model"].get("hidden_size", 0) if width is None else width
        if value == "swiglu":  # there the width is of a GELU with as many parameters
            width = int(width * 2 / 3) // 2
        out.set("model.intermediate_size", -(-width // multiple) * multiple)


def _init(key: str) -> Callable[[str, dict[str, Any], Translation], None]:
    def convert(value: str, given: dict[str, Any], out: Translation) -> None:
        if value in ("normal", "scaled_normal", "small_init", "wang_init"):
            out.set(key, value)
        else:
            out.ignored[key.rpartition(".")[2]] = (
                f"{value} is not here; it only matters before the first step: {key} = wang_init"
            )
            out.set(key, "wang_init")

    return convert


def _optimizer(value: Mapping[str, Any], given: dict[str, Any], out: Translation) -> None:
    name = str(value.get("type", "Adam"))
    if name.lower() not in ("adam", "adamw", "cpu_adam"):
        raise ValueError(f"optimizer.type = {name!r}: Adam and AdamW have a counterpart here")
    parameters = value.get("params") or {}
    for key in ("lr", "betas", "eps"):
        out.set(f"optimizer.{key}", parameters.get(key, {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}[key]))
    for key in parameters.keys() - {"lr", "betas", "eps", "weight_decay"}:
        out.ignored[f"optimizer.params.{key}"] = "no counterpart here"
    if "weight_decay" in parameters:
        out.set("optimizer.weight_decay", parameters["weight_decay"])
    out.set("optimizer.no_weight_decay", ["norm", "bias", "decay"])
    out.assumed.append(
        "optimizer.no_weight_decay = [norm, bias, decay]: embeddings decay in GPT-NeoX; decay is of mixers that it does not have"
    )
    out.set("schedule.min_lr_ratio", round(float(given["min_lr"]) / out.tree["optimizer"]["lr"], 12))


def _decay_style(value: str, given: dict[str, Any], out: Translation) -> None:
    if value not in ("constant", "linear", "cosine"):
        raise ValueError(f"lr-decay-style = {value!r}: constant, linear and cosine have a counterpart here")
    out.set("schedule.kind", value)
    course = {
        "linear": "GPT-NeoX's rate of step n is max(peak (end - n) / (end - w), min_lr)",
        "cosine": "so does GPT-NeoX's since August 2023; before, its rate of step n was "
        "max(peak / 2 (1 + cos(pi (n - w) / end)), min_lr)",
    }.get(value)
    if course is not None:
        out.assumed.append(
            f"schedule.kind = {value}: falls from the end of the warmup, w, to min_lr at decay_steps, end; {course}"
        )


def _warmup(value: float, given: dict[str, Any], out: Translation) -> None:
    decay = out.tree.get("schedule", {}).get("decay_steps")
    if decay is None:
        out.set("schedule.warmup_fraction", value)
    else:  # the share is of these there, and of train_steps here
        out.set("schedule.warmup_steps", round(float(value) * decay))


def _zero(value: Mapping[str, Any], given: dict[str, Any], out: Translation) -> None:
    out.set("parallel.zero_stage", value.get("stage", 0))
    for key in value.keys() - {"stage"}:
        if key in ("cpu_offload", "offload_optimizer", "offload_param") and value[key]:
            raise ValueError(
                f"zero_optimization.{key} = {value[key]!r}: weights and optimizer state stay on the GPU here"
            )
        out.ignored[f"zero_optimization.{key}"] = "DeepSpeed's buffers are set here"


def _ranks(key: str) -> Callable[[Any, dict[str, Any], Translation], None]:
    return lambda value, given, out: out.set(key, max(1, int(value)))


def _recompute(value: bool, given: dict[str, Any], out: Translation) -> None:
    out.set("parallel.activation_checkpointing.mode", "full" if value else "none")
    chunk = given.pop("checkpoint_num_layers", 1)
    if value and chunk != 1:
        out.ignored["checkpoint_num_layers"] = f"blocks are recomputed one by one here, not {chunk} at a time"


def _fp16(value: Mapping[str, Any], given: dict[str, Any], out: Translation) -> None:
    if value.get("type") == "bfloat16":  # as GPT-NeoX asked for it before there was bf16
        out.set("precision.dtype", "bf16")
        return
    if not (value.get("enabled") or value.get("fp16") or given.get("precision") == "fp16"):
        return
    out.set("precision.dtype", "fp16")
    names = {"initial_scale_power": "initial_scale_power", "loss_scale_window": "scale_window"}
    names |= {"hysteresis": "hysteresis", "min_loss_scale": "min_scale"}
    for key in value:
        if key in names:
            out.set(f"precision.fp16.{names[key]}", value[key])
        elif key not in ("enabled", "fp16", "type", "loss_scale"):
            out.ignored[f"fp16.{key}"] = "no counterpart here"
    if value.get("loss_scale"):
        out.ignored["fp16.loss_scale"] = "the loss scale is dynamic here"


def _bf16(value: Mapping[str, Any], given: dict[str, Any], out: Translation) -> None:
    if value.get("enabled"):
        out.set("precision.dtype", "bf16")


def _precision(value: str, given: dict[str, Any], out: Translation) -> None:
    names = {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"}
    if value not in names:
        raise ValueError(f"precision = {value!r}: {', '.join(names)} have a counterpart here")
    out.set("precision.dtype", names[value])


def _extra_saves(value: Sequence[int], given: dict[str, Any], out: Translation) -> None:
    steps = [step for step in value if step > 0]
    if len(steps) < len(value):
        out.ignored["extra_save_iters: 0"] = "the untrained model is not saved: the seed gives it again"
    out.set("checkpoint.extra_steps", steps)


def _scale(value: str, given: dict[str, Any], out: Translation) -> None:
    out.set("checkpoint.log_spaced", value == "log")
    factor = out.tree["checkpoint"].get("interval")
    if value == "log" and factor is not None:  # a step is saved where it is a power of it there
        out.set("checkpoint.interval", 0)
        if factor != 2:
            out.set("checkpoint.log_spaced", False)
            steps = set(out.tree["checkpoint"].get("extra_steps", ()))
            power = 1.0
            while factor > 1 and power <= out.tree.get("schedule", {}).get("train_steps", 0):
                steps.add(int(power))
                power *= factor
            out.set("checkpoint.extra_steps", sorted(steps))


def _tokenizer(value: str, given: dict[str, Any], out: Translation) -> None:
    names = {"HFTokenizer": "hf", "SPMTokenizer": "sentencepiece"}
    if value not in names:
        raise ValueError(
            f"tokenizer-type = {value!r}: {', '.join(names)} have a counterpart; others exist as tokenizer.json, which is "
            "tokenizer-type: HFTokenizer with that file as vocab-file"
        )
    out.set("data.tokenizer.type", names[value])


# In this order: the optimizer before what is relative to its learning rate.
_CONVERT: dict[str, Callable[[Any, dict[str, Any], Translation], None]] = {
    "no_weight_tying": lambda value, given, out: out.set("model.tie_embeddings", not value),
    "norm": _norm,
    "activation": _activation,
    "init_method": _init("model.init_method"),
    "output_layer_init_method": _init("model.output_init_method"),
    "optimizer": _optimizer,
    "lr_decay_style": _decay_style,
    "warmup": _warmup,
    "zero_optimization": _zero,
    "pipe_parallel_size": _ranks("parallel.pipeline"),
    "model_parallel_size": _ranks("parallel.tensor"),
    "checkpoint_activations": _recompute,
    "fp16": _fp16,
    "bf16": _bf16,
    "precision": _precision,
    "extra_save_iters": _extra_saves,
    "checkpoint_scale": _scale,
    "tokenizer_type": _tokenizer,
    "tensorboard_dir": lambda value, given, out: out.set("logging.tensorboard", True),
}
_READ_BESIDE = {
    *("min_lr", "layernorm_epsilon", "rms_norm_epsilon", "use_bias_in_attn_linear", "checkpoint_num_layers"),
    *("data_path", "train_data_paths", "valid_data_paths", "test_data_paths"),
}


def _data(neox: Mapping[str, Any], out: Translation) -> None:
    data = out.tree.setdefault("data", {})
    train = neox.get("train_data_paths") or neox.get("data_path")
    if train:
        data["train"] = train[0] if isinstance(train, list) and len(train) == 1 else train
        if isinstance(data["train"], list):  # equal shares where no weights are given
            weights = data.get("blend", {}).get("weights", [1.0] * len(train))
            data["blend"] = {"by": "weights", "weights": weights}
        else:
            data.pop("blend", None)
        if "train_data_paths" not in neox:
            out.assumed.append(
                "data.train = data-path as a whole: GPT-NeoX trains on the documents of the first part of split "
                "(969, 30, 1 unless given) and validates on the second; give the parts as data.train and data.validation"
            )
        for theirs, ours in (("valid_data_paths", "validation"), ("test_data_paths", "test")):
            paths = neox.get(theirs)
            if paths:
                first, *more = [paths] if isinstance(paths, str) else paths
                data[ours] = first
                if more:
                    out.ignored[f"{theirs}: {', '.join(map(str, more))}"] = f"data.{ours} is one pair of token files"
        return
    kind = data.get("tokenizer", {}).get("type")
    if kind == "hf" and not data["tokenizer"].get("path"):
        del data["tokenizer"]
        out.ignored["tokenizer_type"] = "no vocab-file names its file: set data.tokenizer.type and path with data.train"
    data["corpus"] = "stdlib"
    out.assumed.append("data.corpus = stdlib: the files name no data; set data.train (and data.tokenizer) for yours")


def underscored(values: Any) -> Any:
    """Return the configuration with underscores in keys, which GPT-NeoX also writes with dashes."""
    if isinstance(values, Mapping):
        return {str(key).replace("-", "_"): underscored(value) for key, value in values.items()}
    return values
