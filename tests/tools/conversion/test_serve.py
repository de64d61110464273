"""An export answers through transformers' own server, like OpenAI's."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from transformers import AutoTokenizer

from tests.parity.launch import free_port
from tests.tools.conversion.environments import SERVING, environment, python_of
from tools.inference.generation import complete
from tools.loading.model import load_model
from tools.serve import main, served_class

ROOT = Path(__file__).parents[3]


def test_an_answer(exported: Path, trained_run: Path, tmp_path: Path) -> None:
    python = python_of(SERVING)
    if python is None:
        pytest.skip(f"{environment(SERVING)} is not there: make test-huggingface builds it")
    port = free_port()
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        [str(python), "-m", "tools.serve", str(exported), "--device", "cpu", "--port", str(port)],
        cwd=ROOT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(tmp_path / "none"),
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
        },
        stdout=log,
        stderr=log,
    )
    try:
        body = {"model": str(exported), "prompt": "def ", "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        answer = None
        for _ in range(240):
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=60))
                break
            except URLError:
                assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.5)
        assert answer is not None, "the server did not come up"
        request.data = json.dumps({**body, "temperature": 1e-40}).encode()
        cold = json.load(urllib.request.urlopen(request, timeout=60))
        models = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60))
    finally:
        server.terminate()
        server.wait(timeout=30)
    loaded = load_model(trained_run)
    expected = complete(loaded.model, loaded.tokenizer, "def ", max_tokens=12, temperature=0.0)
    assert answer["choices"][0]["text"] == cold["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens"] == len(loaded.tokenizer.encode("def "))
    assert [model["id"] for model in models["data"]] == [str(exported)]


def test_a_request_for_sampling_is_sampled(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hands a request's temperature to `generate`, which leaves it aside where the model's settings say greedy."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model = served_class(str(exported), "MetalionForCausalLM").from_pretrained(str(exported))
    settings = copy.deepcopy(model.generation_config)
    settings.temperature = 5.0  # what the server does with a request's
    ids = torch.ones(8, 2, dtype=torch.long)
    drawn = model.generate(ids, generation_config=settings, max_new_tokens=8)
    assert len({tuple(row) for row in drawn.tolist()}) > 1
    settings.temperature = 100.0
    first = model.generate(ids[:1].expand(400, -1), generation_config=settings, max_new_tokens=1)[:, -1]
    assert len(set(first.tolist())) > 50, "transformers' own top_k does not hold"
    settings.temperature = 1e-40  # divided by it, float32 logits are infinite
    cold = model.generate(ids, generation_config=settings, max_new_tokens=8)
    settings.temperature, settings.do_sample = 0.0, False
    greedy = model.generate(ids, generation_config=settings, max_new_tokens=8)
    assert len({tuple(row) for row in greedy.tolist()}) == 1
    assert torch.equal(cold, greedy)


def test_an_empty_prompt_begins_a_document(
    exported: Path, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model = served_class(str(exported), "MetalionForCausalLM").from_pretrained(str(exported))
    inputs = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)("", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()
    loaded = load_model(trained_run)
    assert loaded.tokenizer.decode(ids) == complete(loaded.model, loaded.tokenizer, "", max_tokens=12, temperature=0.0)
    assert len(ids) <= 12, "what begins the document is not among the answer"


def test_what_cannot_be_served(
    masked_export: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([str(masked_export)]) == 2
    monkeypatch.setattr("tools.serve.find_spec", lambda name: None)
    assert main([str(exported)]) == 2
    said = capsys.readouterr().err
    assert "config.json is missing" in said
    assert "holds a MetalionForMaskedLM" in said
    assert "pip install 'transformers[serving]'" in said
