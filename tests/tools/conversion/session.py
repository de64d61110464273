"""Use an export as a user does, in one program that imports only torch and transformers.

    python session.py CAUSAL_EXPORT MASKED_EXPORT REFERENCE [--clean] [--compile]

REFERENCE is a safetensors file of the trainer's values: `ids`, `logits` and greedy `continuation` of the text in its
metadata, and `masked_ids`, `masked_logits`. `--clean` checks that no other package is installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.dynamic_module_utils import check_imports


def main() -> None:
    causal, masked, reference = sys.argv[1:4]
    if "--clean" in sys.argv:
        for name in ("models", "megatron_lite", "sentencepiece", "fla", "triton", "datasets", "deepspeed", "google"):
            assert importlib.util.find_spec(name) is None, f"{name} is installed: this environment is not clean"
    with safe_open(reference, framework="pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = file.metadata()["text"]
    for folder in (causal, masked):
        for source in Path(folder).glob("*.py"):
            check_imports(source)  # as for a download from the hub, file by file
    load_and_generate(causal, text, expected)
    save_again(causal, expected)
    spread_over_devices(causal, expected)
    fine_tune(causal)
    masked_model(masked, expected)
    classify(causal)
    classify(masked)
    if "--compile" in sys.argv:
        compiled(causal, expected)
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, "passed": True}))


def load(folder: str, auto: type = AutoModelForCausalLM, **options: object) -> torch.nn.Module:
    return auto.from_pretrained(folder, trust_remote_code=True, **options).eval()


def near(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-4) -> None:
    difference = (actual.float() - expected).abs().max().item()
    print(f"{what}: largest difference {difference:.1e}")
    assert difference <= tolerance, what


@torch.no_grad()
def load_and_generate(folder: str, text: str, expected: dict[str, torch.Tensor]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = load(folder)
    ids = tokenizer(text, return_tensors="pt")
    assert torch.equal(ids["input_ids"], expected["ids"]), "the tokenizer's ids"
    assert tokenizer.decode(ids["input_ids"][0]) == text
    near(model(**ids).logits, expected["logits"], "logits")
    new = expected["continuation"].shape[1]
    generated = model.generate(**ids, max_new_tokens=new, do_sample=False, eos_token_id=None)
    assert torch.equal(generated[:, ids["input_ids"].shape[1] :], expected["continuation"]), "greedy generation"

    batch = tokenizer([text, text[:7], "def "], return_tensors="pt", padding=True)
    together = model.generate(**batch, max_new_tokens=8, do_sample=False, eos_token_id=None)
    alone = model.generate(
        **tokenizer("def ", return_tensors="pt"), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert torch.equal(together[2, -8:], alone[0, -8:]), "a batch of unequal prompts"
    for settings in ({"do_sample": True, "top_k": 20}, {"num_beams": 3}):
        results = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            results.append(
                model.generate(**batch, max_new_tokens=8, use_cache=use_cache, eos_token_id=None, **settings)
            )
        assert torch.equal(*results), f"{settings} with and without the state"
    first = model.generate(**ids, max_new_tokens=5, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    more = model.generate(
        first.sequences,
        attention_mask=torch.ones_like(first.sequences),
        past_key_values=first.past_key_values,
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
    )
    whole = model.generate(**ids, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert torch.equal(more, whole), "generation that continues from a cache"
    texts = pipeline("text-generation", model=model, tokenizer=tokenizer)(
        ["def ", text], max_new_tokens=8, do_sample=False, batch_size=2
    )
    assert texts[0][0]["generated_text"].startswith("def "), "pipeline"
    print("pipeline:", repr(texts[0][0]["generated_text"]))


def save_again(folder: str, expected: dict[str, torch.Tensor]) -> None:
    model = load(folder)
    with tempfile.TemporaryDirectory() as again:
        model.save_pretrained(again, max_shard_size="200KB")
        back = load(again)
        saved, loaded = model.state_dict(), back.state_dict()
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved), "save_pretrained and load again"
        ignored = {"_name_or_path", "transformers_version"}
        was, is_now = ({k: v for k, v in m.config.to_dict().items() if k not in ignored} for m in (model, back))
        was["auto_map"], is_now["auto_map"] = (
            {auto: name.rpartition("--")[2] for auto, name in c["auto_map"].items()} for c in (was, is_now)
        )
        assert was == is_now, (was, is_now)
        near(back(expected["ids"]).logits, expected["logits"], "after save and load")


@torch.no_grad()
def spread_over_devices(folder: str, expected: dict[str, torch.Tensor]) -> None:
    near(load(folder, device_map="auto")(expected["ids"]).logits, expected["logits"], "device_map=auto")
    with tempfile.TemporaryDirectory() as offload:
        devices = {"embedding": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "head": "cpu"}
        model = load(folder, device_map=devices, offload_folder=offload)
        near(model(expected["ids"]).logits, expected["logits"], "one block on the disk")


def fine_tune(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    line = "def total(count):\n    return count + 1\n"
    row = tokenizer(line)["input_ids"]
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row}] * 32
    model = load(folder)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            max_steps=12,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            gradient_checkpointing=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("fine-tuning:", losses[0], "->", losses[-1])
        assert losses[-1] < 0.5 * losses[0], losses
        trainer.save_model(out)
        back = load(out)
        ids = torch.tensor([row])
        model.eval()
        near(back(ids).logits, model(ids).logits, "a fine-tuned model, loaded")


@torch.no_grad()
def masked_model(folder: str, expected: dict[str, torch.Tensor]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = load(folder, AutoModelForMaskedLM)
    near(model(expected["masked_ids"]).logits, expected["masked_logits"], "masked model")
    assert load(folder, AutoModel)(expected["masked_ids"]).last_hidden_state.shape[-1] == model.config.hidden_size
    assert tokenizer.convert_ids_to_tokens(tokenizer("the cat")["input_ids"]) == ["[CLS]", "the", "cat", "[SEP]"]
    guesses = pipeline("fill-mask", model=model, tokenizer=tokenizer)("the [MASK] sat on the mat.", top_k=3)
    assert len(guesses) == 3, "fill-mask pipeline"


def classify(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = load(folder, AutoModelForSequenceClassification, num_labels=3).train()
    assert 0.01 < model.score.weight.std() < 0.04, "a new classifier is initialized"
    batch = tokenizer(["the cat sat", "the dog"], return_tensors="pt", padding=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = model(**batch, labels=torch.tensor([2, 0])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


@torch.no_grad()
def compiled(folder: str, expected: dict[str, torch.Tensor]) -> None:
    near(torch.compile(load(folder))(expected["ids"]).logits, expected["logits"], "torch.compile")


if __name__ == "__main__":
    main()
