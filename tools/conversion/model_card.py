"""Write the model card (README.md) of an export from the run's own files only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.atomic_io import read_json
from megatron_lite.metrics.logger import FILE_NAME, read_metrics
from models.config import ModelConfig
from models.hf.configuration_metalion import OLDEST_TRANSFORMERS
from tools.evaluation.run_results import is_of
from tools.reporting.tables import FEW_DOCUMENTS, NO_METRICS, markdown_table

_CITATIONS = {
    "metala": """@inproceedings{chou2024metala,
  title     = {{MetaLA}: Unified Optimal Linear Approximation to Softmax Attention Map},
  author    = {Chou, Yuhong and Yao, Man and Wang, Kexin and Pan, Yuqi and Zhu, Ruijie and Zhong, Yiran and
               Qiao, Yu and Wu, Jibin and Xu, Bo and Li, Guoqi},
  booktitle = {Advances in Neural Information Processing Systems 37},
  year      = {2024}
}""",
    "lion": """@inproceedings{afzal2025lion,
  title     = {Linear Attention for Efficient Bidirectional Sequence Modeling},
  author    = {Afzal, Arshia and Abad Rocamora, Elias and Candogan, Leyla Naz and Puigdemont, Pol and
               Tonin, Francesco and Wu, Yongtao and Shoaran, Mahsa and Cevher, Volkan},
  booktitle = {Proceedings of the 42nd International Conference on Machine Learning},
  year      = {2025}
}""",
}

_CAUSAL = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))"""

_MASKED = """from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained("{name}", trust_remote_code=True)
logits = model(**tokenizer("a sentence", return_tensors="pt")).logits"""


_IMAGES = """from transformers import pipeline

classify = pipeline("image-classification", model="{name}", trust_remote_code=True)
print(classify("image.png"))"""


def model_card(
    config: Mapping[str, Any],
    model: ModelConfig,
    *,
    run: Path,
    checkpoint: Path,
    parameters: int,
    dtype: str,
    licence: str,
) -> str:
    """Return Markdown with the metadata for the Hugging Face hub.

    config: the run's configuration as plain YAML values. checkpoint: the step folder. parameters: weights, tied ones once.
    Tables of evaluations come from `results.json` in the run's folder, or for an image classifier from its metrics, as the
    numbers of tokens and images.
    """
    causal, step = not model.bidirectional_mixers(), checkpoint.name
    name = str(config.get("run", {}).get("name") or run.name)
    images = model.image_size is not None
    tag = "image-classification" if images else "text-generation" if causal else "fill-mask"
    kind = "An image classifier" if images else f"A {'causal' if causal else 'masked'} language model"
    head = [
        "---",
        f"license: {licence}",
        "library_name: transformers",
        f"pipeline_tag: {tag}",
        f"tags: [{', '.join(['metalion', *dict.fromkeys(model.mixers)])}]",
        "---",
        "",
        f"# {name}",
        "",
        f"{kind} with {parameters / 1e6:,.1f} M parameters, pretrained with "
        "metalion. The folder holds the model's own source: `trust_remote_code=True` loads it with torch and transformers "
        f"{OLDEST_TRANSFORMERS} or newer (below 6) alone, on a CPU too; on a GPU in 16 bits the recurrence runs on "
        "flash-linear-attention's kernels, which must be installed there.",
        "",
        "```python",
        (_IMAGES if images else _CAUSAL if causal else _MASKED).format(name=name),
        "```",
    ]
    parts = [
        "\n".join(head),
        "## Architecture\n\n" + markdown_table(["", ""], _architecture(model, parameters, dtype), text_columns=2),
        "## Training\n\n" + markdown_table(["", ""], _training(config, model, run, step), text_columns=2),
    ]
    evaluation = _image_evaluation(run, step) if images else _evaluation(run, checkpoint)
    parts.append("## Evaluation\n\n" + (evaluation or "Not evaluated with this project's tools."))
    cited = [text for key, text in _CITATIONS.items() if any(mixer.startswith(key) for mixer in model.mixers)]
    parts.append(f"## Licence\n\n{licence}")
    if cited:
        parts.append("## Citation\n\n```bibtex\n" + "\n\n".join(cited) + "\n```")
    return "\n\n".join(parts) + "\n"


def _architecture(model: ModelConfig, parameters: int, dtype: str) -> list[tuple[str, str]]:
    return [
        ("parameters", f"{parameters:,}"),
        ("mixers", ", ".join(model.mixers)),
        ("mixer options", json.dumps(model.mixer_options) if model.mixer_options else "defaults"),
        ("layers", str(model.num_layers)),
        ("hidden size", str(model.hidden_size)),
        ("heads", str(model.num_heads)),
        ("MLP", f"{model.mlp}, width {model.mlp_width}"),
        ("norm", model.norm),
        ("vocabulary", f"{model.vocab_size:,}" + (", input and output tied" if model.tie_embeddings else ""))
        if model.image_size is None
        else (
            "images",
            f"{model.image_size} x {model.image_size}, patches of {model.patch_size}, {model.vocab_size:,} classes",
        ),
        ("stored as", dtype),
    ]


def _training(config: Mapping[str, Any], model: ModelConfig, run: Path, step: str) -> list[tuple[str, str]]:
    data, batch = config.get("data") or {}, config.get("batch") or {}
    optimizer, schedule = config.get("optimizer") or {}, config.get("schedule") or {}
    corpus = data.get("corpus") or data.get("train") or (data.get("images") or {}).get("train") or "unknown"
    number, per_step = _number(step), str(batch.get("global_batch_size", "unknown"))
    amounts = [
        ("tokens", _tokens(run, number)),
        ("sequence length", str(batch.get("sequence_length", "unknown"))),
        ("sequences per step", per_step),
    ]
    if model.image_size is not None:
        amounts = [("images", _tokens(run, number, model.tokens_per_image)), ("images per step", per_step)]
    return [
        ("data", ", ".join(corpus) if isinstance(corpus, list | tuple) else str(corpus)),
        ("steps", f"{number:,}"),
        *amounts,
        ("optimizer", f"{optimizer.get('name', '?')}, peak learning rate {optimizer.get('lr', '?')}"),
        ("schedule", str(schedule.get("kind", "unknown"))),
    ]


def _number(step: str) -> int:
    """Return the step of a step folder's name."""
    return int(step.rpartition("_")[2])


def _lines(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the metrics of a step; none without a metrics file."""
    return [line for line in read_metrics(run) if line.get("step") == step] if (run / FILE_NAME).is_file() else []


def _tokens(run: Path, step: int, unit: int = 1) -> str:
    """Return how many tokens, or images of `unit` tokens, training had read after a step."""
    counts = [int(line["tokens"]) // unit for line in _lines(run, step) if line["kind"] == "train"]
    return f"{counts[0]:,}" if counts else "unknown"


def _image_evaluation(run: Path, step: str) -> str:
    """Return a table of the validation and the test of an image classifier after a step, from its metrics."""
    lines = {line["kind"]: line for line in _lines(run, _number(step)) if "top5_accuracy" in line}
    rows = [
        [kind, f"{line['accuracy']:.2%}", f"{line['top5_accuracy']:.2%}", f"{line['evaluated_tokens']:,.0f}"]
        for kind, line in lines.items()
    ]
    return markdown_table(["set", "top-1 accuracy", "top-5 accuracy", "images"], rows) if rows else ""


def _evaluation(run: Path, checkpoint: Path) -> str:
    """Return a table of results.json if it is of this checkpoint."""
    file = run / "results.json"
    if not file.is_file():
        return ""
    results = read_json(file, "evaluate again, or remove it", "results")
    if not is_of(checkpoint, results):
        return ""
    rows: list[list[str]] = []
    few = False
    for suite, tasks in results["results"].items():
        for task, metrics in tasks.items():
            details = results.get("details", {}).get(suite, {}).get(task, {})
            for metric, value in metrics.items():
                if metric in NO_METRICS or not isinstance(value, int | float):
                    continue
                detail = {"documents": metrics.get("documents"), **details.get(metric, {})}
                documents, whole = detail["documents"], detail.get("whole")
                few |= suite != "perplexity" and documents is not None and documents < FEW_DOCUMENTS
                count = "-" if documents is None else f"{documents:,.0f}" + (f" of {whole:,}" if whole else "")
                optional = ["-" if detail.get(key) is None else f"{detail[key]:,.4g}" for key in ("stderr", "chance")]
                rows.append([suite, Path(task).name, metric, f"{value:,.4g}", *optional, count])
    header = ["suite", "task", "metric", "value", "standard error", "chance", "documents"]
    note = f"\n\nScores on fewer than {FEW_DOCUMENTS} documents show only that the task runs." if few else ""
    return markdown_table(header, rows, text_columns=3) + note
