"""Translate GPT-NeoX configuration keys to this project's sections. Refuse what changes the result, list what is ignored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.tokenizer import load_tokenizer, merges_of, padded_vocab_size
from megatron_lite.config.neox_hints import NEOX_KEYS
from tools.conversion.neox_keys import DEFAULTS, HARMLESS, IMPORTANT, OFFLOAD, REFUSED, SAME, SMALLEST
from tools.conversion.neox_translation import Translation, check_complete, merge_files

TOKENIZERS = {"GPT2BPETokenizer": "gpt2", "HFTokenizer": "hf", "SPMTokenizer": "sentencepiece"}
# Entries of the tokenizers whose files need not be at hand: GPT-2's and GPT-NeoX-20B's.
ENTRIES = {"GPT2BPETokenizer": 50257, "HFTokenizer": 50277}


def translate(files: Mapping[str, Mapping[str, Any]], *, vocab_size: int | None = None) -> Translation:
    """Translate GPT-NeoX configurations, file name -> keys, to one configuration of this project.

    vocab_size: rows of the embedding; None to follow the tokenizer. Raises ValueError for unknown keys and for settings that
    change the result and do not exist here.
    """
    out, neox = merge_files(files)
    given = {**DEFAULTS, **neox}
    accumulates = {"gas", "gradient_accumulation_steps"} & neox.keys()
    if not accumulates and not {"train_batch_size", "train_micro_batch_size_per_gpu"} <= neox.keys():
        given["gas"] = 1
    for key, (allowed, reason) in REFUSED.items():
        if given.pop(key, None) not in allowed:
            raise out.error(key, neox[key], f"no counterpart, {reason}")
    check_complete(neox, list(files))
    for key, smallest in SMALLEST.items():
        if key in neox and not (type(neox[key]) in (int, float) and smallest <= neox[key] < math.inf):
            raise out.error(key, neox[key], f"a number of {smallest} or more is allowed")
    if neox.get("finetune") and neox.get("load", neox.get("save")) != neox.get("save"):
        raise out.error(
            "load",
            neox["load"],
            f"checkpoints of GPT-NeoX are not read, and {out.name('finetune')} starts from this one; import its Hugging Face "
            f"form (python -m tools.convert_hf import FOLDER RUN), remove {out.name('finetune')} and {out.name('load')}, and "
            "start train.py with checkpoint.resume=RUN",
        )
    _vocabulary(neox, out, vocab_size)
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
                raise out.error(key, value, f"is not of GPT-NeoX's form ({error})") from error
    if "dtype" not in out.tree.setdefault("precision", {}):
        out.set("precision.dtype", "fp32")
    for key in neox:
        if key in IMPORTANT and neox[key] not in (False, 0):
            if key != "load" or neox[key] != neox.get("save"):
                out.important[out.name(key)] = IMPORTANT[key]
        elif key in HARMLESS and key in given and key not in _DATA:
            out.harmless.append(out.name(key))
    order = [out.name(key) for key in IMPORTANT]
    out.important = dict(
        sorted(out.important.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1)
    )
    _data(neox, out)
    return out


def _vocabulary(neox: Mapping[str, Any], out: Translation, vocab_size: int | None) -> None:
    """Set the rows of the embedding: the entries of the tokenizer, padded as in GPT-NeoX."""
    kind, file = str(neox.get("tokenizer_type", "GPT2BPETokenizer")), neox.get("vocab_file")
    if kind not in TOKENIZERS:
        raise out.error(
            "tokenizer_type",
            kind,
            f"{', '.join(TOKENIZERS)} have a counterpart; others exist as tokenizer.json, which is HFTokenizer with that file "
            f"as {out.name('vocab_file')}",
        )
    if vocab_size is not None:
        out.set("model.vocab_size", vocab_size)
        return
    if file is not None and Path(file).is_file():
        entries, origin = load_tokenizer(TOKENIZERS[kind], file).vocab_size, str(file)
    elif kind == "GPT2BPETokenizer" or (kind == "HFTokenizer" and (file is None or "20B" in str(file))):
        entries, origin = (
            ENTRIES[kind],
            "GPT-2's tokenizer" if kind == "GPT2BPETokenizer" else "GPT-NeoX-20B's tokenizer",
        )
    else:
        where = f"{out.name('vocab_file')} = {file} is not on this machine" if file else f"{kind} has no vocab_file"
        raise ValueError(
            f"{where}, and its number of entries is needed: give the rows of the embedding as --vocab-size N"
        )
    multiple = int(neox.get("make_vocab_size_divisible_by", 128)) * max(1, int(neox.get("model_parallel_size", 1)))
    rows = padded_vocab_size(entries, multiple)
    out.set("model.vocab_size", rows)
    out.assumed.append(f"model.vocab_size = {rows}: {origin} has {entries} entries, padded to a multiple of {multiple}")


def _mixers(given: dict[str, Any], out: Translation) -> None:
    kinds = {"global": "attention", "flash": "attention"}
    layers, config = given.get("num_layers"), given.pop("attention_config", None) or [[["global"], "all"]]
    expanded = _layers_of(config, layers, out)
    if isinstance(layers, int) and len(expanded) != layers:
        reason = f"is of {len(expanded)} layers, and {out.name('num_layers')} = {layers}"
        raise ValueError(f"{out.name('attention_config')} = {config!r} {reason}")
    for name in expanded:
        if name not in kinds:
            why = "; a block of mamba has no MLP there, every block has one here" if name == "mamba" else ""
            text = f"names {name!r}: {', '.join(kinds)} have a counterpart here{why}"
            raise ValueError(f"{out.name('attention_config')} {text}")
    out.set("model.mixers", ["attention"])
    out.set("model.mixer_options.attention.bias", bool(given["use_bias_in_attn_linear"]))
    if (width := given.pop("sliding_window_width", None)) is not None:
        if not isinstance(width, int) or width < 0:
            raise out.error(
                "sliding_window_width", width, "must be 0 or a larger whole number; remove it for no window"
            )
        out.set("model.mixer_options.attention.window", width + 1)
        out.assumed.append(
            f"model.mixer_options.attention.window = {width + 1}: GPT-NeoX does not count the token itself"
        )


def _layers_of(config: Any, layers: Any, out: Translation) -> list[str]:
    """Return the kind of each layer from a list of kinds, or of pairs of kinds and their number of repetitions or "all"."""
    if isinstance(config, list) and all(isinstance(name, str) for name in config):
        return config
    try:
        kinds: list[str] = []
        for names, count in config:
            if count == "all":  # GPT-NeoX reads no further
                return list(names) * (layers // len(names) if isinstance(layers, int) else 1)
            kinds += list(names) * int(count)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        form = 'is not of GPT-NeoX\'s form, such as [[["global"], 24]] or [[["flash"], "all"]]'
        raise ValueError(f"{out.name('attention_config')} = {config!r} {form}") from error
    return kinds


def _positions(given: dict[str, Any], out: Translation) -> None:
    kind = given.pop("pos_emb")
    share, longest = given.pop("rotary_pct", 1.0), given.pop("max_position_embeddings", None)
    if kind not in ("rotary", "learned", "none"):
        raise out.error("pos_emb", kind, "rotary, learned and none have a counterpart here")
    out.set("model.mixer_options.attention.rotary_pct", share if kind == "rotary" else 0.0)
    if kind == "learned":
        out.set("model.positions", "learned")
        out.set("model.max_positions", longest or given.get("seq_length", 2048))
    if kind != "rotary":
        given.pop("rotary_emb_base", None)


def _norm(value: str, given: dict[str, Any], out: Translation) -> None:
    names = {"layernorm": "layernorm", "te_layernorm": "layernorm", "rmsnorm": "rmsnorm", "te_rmsnorm": "rmsnorm"}
    if value not in names:
        raise out.error("norm", value, f"{', '.join(names)} have a counterpart here")
    norm = names[value]
    if not given.pop("use_bias_in_norms", True) and norm == "layernorm":
        raise out.error("use_bias_in_norms", False, "no counterpart, a layernorm has an offset and a gain")
    out.set("model.norm", norm)
    default = 1e-5 if norm == "layernorm" else 1e-8
    out.set("model.norm_eps", given.get("layernorm_epsilon" if norm == "layernorm" else "rms_norm_epsilon", default))


def _activation(value: str, given: dict[str, Any], out: Translation) -> None:
    if value not in ("gelu", "swiglu"):
        raise out.error("activation", value, "gelu and swiglu have a counterpart here")
    out.set("model.mlp", value)
    width, multiple = given.pop("intermediate_size", None), given.pop("mlp_multiple_of", 1)
    if value == "swiglu" or width is not None or multiple != 1:
        width = 4 * out.tree["model"].get("hidden_size", 0) if width is None else width
        if value == "swiglu":  # GPT-NeoX gives the width of a GELU with as many parameters
            width = int(width * 2 / 3) // 2
        out.set("model.intermediate_size", -(-width // multiple) * multiple)


def _init(neox_key: str, key: str) -> Callable[[str, dict[str, Any], Translation], None]:
    def convert(value: str, given: dict[str, Any], out: Translation) -> None:
        if value in ("normal", "scaled_normal", "small_init", "wang_init"):
            out.set(key, value)
        else:
            out.important[out.name(neox_key)] = f"{value} does not exist here; the first weights are those of wang_init"
            out.set(key, "wang_init")

    return convert


def _optimizer(value: Mapping[str, Any], given: dict[str, Any], out: Translation) -> None:
    name = str(value.get("type", "Adam"))
    if name.lower() not in ("adam", "adamw", "cpu_adam"):
        muon = name.lower() == "muon"
        hint = ". For Muon, convert with Adam and its learning rate, then set optimizer.name=muon" if muon else ""
        raise out.error("optimizer.type", name, f"Adam and AdamW have a counterpart here{hint}")
    parameters = value.get("params") or {}
    for key in ("lr", "betas", "eps"):
        out.set(f"optimizer.{key}", parameters.get(key, {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}[key]))
    if out.tree["optimizer"]["lr"] == 0:  # min_lr is divided by it
        raise out.error("optimizer.params.lr", 0, "a rate above 0 is needed")
    for key in parameters:
        if key not in ("lr", "betas", "eps", "weight_decay"):
            out.important[f"optimizer.params.{key}"] = "no counterpart here"
    if "weight_decay" in parameters:
        out.set("optimizer.weight_decay", parameters["weight_decay"])
    out.set("optimizer.no_weight_decay", ["norm", "bias", "decay"])
    out.assumed.append("optimizer.no_weight_decay = [norm, bias, decay]: embeddings have weight decay in GPT-NeoX")
    ratio = given["min_lr"] / out.tree["optimizer"]["lr"]
    if "decay_lr_to" in given and "min_lr" not in out.spelling:
        ratio = given["decay_lr_to"]
    out.set("schedule.min_lr_ratio", round(ratio, 12))


def _decay_style(value: str, given: dict[str, Any], out: Translation) -> None:
    if value not in ("constant", "linear", "cosine"):
        raise out.error("lr_decay_style", value, "constant, linear and cosine have a counterpart here")
    out.set("schedule.kind", value)
    rates = {
        "linear": "GPT-NeoX's rate of step n is max(peak (end - n) / (end - w), min_lr)",
        "cosine": "as in GPT-NeoX since August 2023; before, its rate of step n was "
        "max(peak / 2 (1 + cos(pi (n - w) / end)), min_lr)",
    }
    if value in rates:
        out.assumed.append(
            f"schedule.kind = {value}: falls from the end of the warmup, w, to min_lr at decay_steps, end; {rates[value]}"
        )


def _warmup(value: float, given: dict[str, Any], out: Translation) -> None:
    decay = out.tree.get("schedule", {}).get("decay_steps")
    if decay is None:
        out.set("schedule.warmup_fraction", value)
    else:  # a share of lr_decay_iters in GPT-NeoX, of train_steps here
        out.set("schedule.warmup_steps", round(value * decay))


def _warmup_steps(value: int, given: dict[str, Any], out: Translation) -> None:
    out.tree["schedule"].pop("warmup_fraction", None)
    out.set("schedule.warmup_steps", int(value))


def _zero(value: Mapping[str, Any], given: dict[str, Any], out: Translation) -> None:
    out.set("parallel.zero_stage", value.get("stage", 0))
    for key in value:
        if key == "stage":
            continue
        device = value[key].get("device", "cpu") if isinstance(value[key], Mapping) else value[key]
        if key in OFFLOAD and device not in (None, False, "none"):
            reason = "weights and optimizer state stay on the GPU here; remove it"
            raise out.error(f"zero_optimization.{key}", value[key], reason)
        out.harmless.append(f"{out.name('zero_optimization')}.{key}")


def _ranks(key: str) -> Callable[[Any, dict[str, Any], Translation], None]:
    return lambda value, given, out: out.set(key, max(1, int(value)))


def _recompute(value: bool, given: dict[str, Any], out: Translation) -> None:
    out.set("parallel.activation_checkpointing.mode", "full" if value else "none")
    chunk = given.pop("checkpoint_num_layers", 1)
    if chunk != 1:
        out.harmless.append(out.name("checkpoint_num_layers"))


def _fp16(value: Mapping[str, Any], given: dict[str, Any], out: Translation) -> None:
    if value.get("type") == "bfloat16":  # earlier versions of GPT-NeoX had no key bf16
        out.set("precision.dtype", "bf16")
        return
    enabled = bool(value.get("enabled") or value.get("fp16"))
    if given.get("precision", "fp16" if enabled else "fp32") != "fp16":
        return
    out.set("precision.dtype", "fp16")
    names = {"initial_scale_power": "initial_scale_power", "loss_scale_window": "scale_window"}
    names |= {"hysteresis": "hysteresis", "min_loss_scale": "min_scale"}
    for key in value:
        if key in names:
            out.set(f"precision.fp16.{names[key]}", value[key])
        elif key not in ("enabled", "fp16", "type", "loss_scale"):
            out.important[f"fp16.{key}"] = "no counterpart here"
    if value.get("loss_scale"):
        out.important["fp16.loss_scale"] = "the loss scale is dynamic here"


def _bf16(value: Mapping[str, Any], given: dict[str, Any], out: Translation) -> None:
    if value.get("enabled"):
        out.set("precision.dtype", "bf16")


def _precision(value: str, given: dict[str, Any], out: Translation) -> None:
    names = {"fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16"}
    if value not in names:
        raise out.error("precision", value, f"{', '.join(names)} have a counterpart here")
    out.set("precision.dtype", names[value])


def _extra_saves(value: Sequence[int], given: dict[str, Any], out: Translation) -> None:
    # The untrained model (step 0) is not saved, because the seed reproduces it.
    out.set("checkpoint.extra_steps", [step for step in value if step > 0])


def _scale(value: str, given: dict[str, Any], out: Translation) -> None:
    out.set("checkpoint.log_spaced", value == "log")
    factor = out.tree["checkpoint"].get("interval")
    if value == "log" and factor is not None:  # GPT-NeoX saves at the powers of the factor
        out.set("checkpoint.interval", 0)
        if factor != 2:
            out.set("checkpoint.log_spaced", False)
            steps = set(out.tree["checkpoint"].get("extra_steps", ()))
            power = 1.0
            while factor > 1 and power <= out.tree.get("schedule", {}).get("train_steps", 0):
                steps.add(int(power))
                power *= factor
            out.set("checkpoint.extra_steps", sorted(steps))


# In this order, because a conversion may read keys that earlier ones set.
_CONVERT: dict[str, Callable[[Any, dict[str, Any], Translation], None]] = {
    "no_weight_tying": lambda value, given, out: out.set("model.tie_embeddings", not value),
    "norm": _norm,
    "activation": _activation,
    "init_method": _init("init_method", "model.init_method"),
    "output_layer_init_method": _init("output_layer_init_method", "model.output_init_method"),
    "optimizer": _optimizer,
    "lr_decay_style": _decay_style,
    "warmup": _warmup,
    "warmup_iters": _warmup_steps,
    "zero_optimization": _zero,
    "pipe_parallel_size": _ranks("parallel.pipeline"),
    "model_parallel_size": _ranks("parallel.tensor"),
    "checkpoint_activations": _recompute,
    "fp16": _fp16,
    "bf16": _bf16,
    "precision": _precision,
    "extra_save_iters": _extra_saves,
    "checkpoint_scale": _scale,
    "tensorboard_dir": lambda value, given, out: out.set("logging.tensorboard", True),
}
# Read by `_data` and `_vocabulary`.
_DATA = {
    *("data_path", "train_data_paths", "valid_data_paths", "test_data_paths", "merge_file"),
    *("make_vocab_size_divisible_by", "model_parallel_size", "max_position_embeddings"),
}


def _data(neox: Mapping[str, Any], out: Translation) -> None:
    data = out.tree.setdefault("data", {})
    train = neox.get("train_data_paths") or neox.get("data_path")
    if not train:
        if not data.get("tokenizer", {}).get("path"):
            data.pop("tokenizer", None)
        data["corpus"] = "stdlib"
        out.assumed.insert(
            0, "data.corpus = stdlib: the files name no data; set data.train and data.tokenizer for yours"
        )
        return
    kind = neox.get("tokenizer_type", "GPT2BPETokenizer")
    data.setdefault("tokenizer", {})["type"] = TOKENIZERS[kind]
    if kind == "GPT2BPETokenizer" and {"vocab_file", "merge_file"} <= neox.keys():
        expected = merges_of(neox["vocab_file"])
        if Path(neox["merge_file"]) != expected:
            vocabulary = f"{out.name('vocab_file')} = {neox['vocab_file']}"
            raise out.error(
                "merge_file", neox["merge_file"], f"{expected} is allowed, beside {vocabulary}: rename or move it"
            )
    data["train"] = train[0] if isinstance(train, list) and len(train) == 1 else train
    if isinstance(data["train"], list):  # equal shares if no weights are given
        weights = data.get("blend", {}).get("weights", [1.0] * len(train))
        data["blend"] = {"by": "weights", "weights": weights}
    else:
        data.pop("blend", None)
    if "train_data_paths" not in neox:
        out.assumed.insert(
            0,
            f"data.train = {out.name('data_path')} as a whole: GPT-NeoX trains on the documents of the first part of split "
            "(969, 30, 1 by default) and validates on the second; give the parts as data.train and data.validation",
        )
    for theirs, ours in (("valid_data_paths", "validation"), ("test_data_paths", "test")):
        if paths := neox.get(theirs):
            first, *more = [paths] if isinstance(paths, str) else paths
            data[ours] = first
            if more:
                out.important[f"{out.name(theirs)}: {', '.join(map(str, more))}"] = (
                    f"data.{ours} is one pair of token files"
                )
