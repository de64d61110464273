"""An export answers through transformers' own server, like OpenAI's."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.utils import logging

from models.hf.modeling_metalion import MetalionForCausalLM
from tests.parity.launch import free_port
from tests.tools.conversion.environments import SERVING, environment, python_of
from tools.conversion.export_source import model_class
from tools.inference.generation import complete
from tools.inference.request_guard import CHAT, COMPLETIONS, RefusedRequestError
from tools.loading.model import load_model
from tools.serve import main, served_class, token_counter, transformers_serve

ROOT = Path(__file__).parents[3]


def test_server_answers_as_the_trainer_generates(exported: Path, trained_run: Path, tmp_path: Path) -> None:
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
                answer = json.load(urllib.request.urlopen(request, timeout=240))
                break
            except URLError:
                assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.5)
        assert answer is not None, "the server did not come up"
        request.data = json.dumps({**body, "temperature": 1e-40}).encode()
        cold = json.load(urllib.request.urlopen(request, timeout=240))
        request.data = json.dumps({**body, "stream": True}).encode()
        streamed = urllib.request.urlopen(request, timeout=240).read().decode()
        request.data = json.dumps({"messages": [{"role": "user", "content": "def "}]}).encode()
        printed = []
        for path in ("/v1/chat/completions", "/load_model"):
            request.full_url = f"http://127.0.0.1:{port}{path}"
            with pytest.raises(HTTPError) as refused:
                urllib.request.urlopen(request, timeout=240)
            printed.append((refused.value.code, json.load(refused.value)["error"]["message"]))
        models = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=240))
    finally:
        server.terminate()
        server.wait(timeout=240)
    loaded = load_model(trained_run)
    expected = complete(loaded.model, loaded.tokenizer, "def ", max_tokens=12, temperature=0.0)
    assert answer["choices"][0]["text"] == cold["choices"][0]["text"] == expected
    events = streamed.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == expected
    assert [code for code, _ in printed] == [400, 404]
    assert "Loading weights" not in (tmp_path / "log").read_text(), "a progress bar in a file"
    assert printed[0][1].startswith("the model has no chat template: use /v1/completions")
    assert answer["usage"]["prompt_tokens"] == len(loaded.tokenizer.encode("def "))
    assert [model["id"] for model in models["data"]] == [str(exported)]


def test_message_of_misspelt_option_names_the_command_that_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "tools")  # as under python -m tools.serve
    with pytest.raises(SystemExit) as end:
        transformers_serve(["exported", "--prot", "8000"])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "Usage: transformers serve" in message
    assert "tools.transformers" not in message


def test_loading_writes_no_progress_bar_to_a_file(exported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()
    served_class(model_class(exported, "CausalLM", trust_remote_code=False)).from_pretrained(exported)
    assert "Loading weights" not in capfd.readouterr().err


def test_temperature_of_a_request_enables_sampling(exported: Path) -> None:
    """Sample at a request's temperature, which `generate` ignores if the model's settings are greedy."""
    model = served_class(MetalionForCausalLM).from_pretrained(exported)
    settings = copy.deepcopy(model.generation_config)
    settings.temperature = 5.0  # as the server does
    ids = torch.ones(8, 2, dtype=torch.long)
    drawn = model.generate(ids, generation_config=settings, max_new_tokens=8)
    assert len({tuple(row) for row in drawn.tolist()}) > 1
    settings.temperature = 100.0
    first = model.generate(ids[:1].expand(400, -1), generation_config=settings, max_new_tokens=1)[:, -1]
    assert len(set(first.tolist())) > 50, "the top_k of transformers is not applied"
    settings.temperature = 1e-40  # float32 logits divided by it are infinite
    cold = model.generate(ids, generation_config=settings, max_new_tokens=8)
    settings.temperature, settings.do_sample = 0.0, False
    greedy = model.generate(ids, generation_config=settings, max_new_tokens=8)
    assert len({tuple(row) for row in greedy.tolist()}) == 1
    assert torch.equal(cold, greedy)


def test_empty_prompt_starts_a_document(exported: Path, trained_run: Path) -> None:
    model = served_class(MetalionForCausalLM).from_pretrained(exported)
    inputs = AutoTokenizer.from_pretrained(exported, trust_remote_code=False)("", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist()
    loaded = load_model(trained_run)
    assert loaded.tokenizer.decode(ids) == complete(loaded.model, loaded.tokenizer, "", max_tokens=12, temperature=0.0)
    assert len(ids) <= 12, "what begins the document is not among the answer"


def test_tokens_of_a_request_are_counted(exported: Path, trained_run: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    count = token_counter(tokenizer, {"max_positions": 20})
    assert count(COMPLETIONS, {"prompt": "def "}) == len(load_model(trained_run).tokenizer.encode("def "))
    assert count(COMPLETIONS, {}) == 0
    with pytest.raises(
        RefusedRequestError, match=r"max_tokens = 20 are over the model's 20 positions: send a shorter prompt"
    ):
        count(COMPLETIONS, {"prompt": "def ", "max_tokens": 20})
    conversation = {"messages": [{"role": "user", "content": "def "}]}
    with pytest.raises(RefusedRequestError, match="no chat template"):
        count(CHAT, conversation)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert count(CHAT, conversation) == count(COMPLETIONS, {"prompt": "def "})
    tokenizer.chat_template = "{{ raise_exception('roles\nalternate') }}"
    with pytest.raises(RefusedRequestError, match="the chat template refuses the messages: roles alternate"):
        count(CHAT, conversation)


def test_models_that_cannot_be_served_are_refused(
    masked_export: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([str(masked_export)]) == 2
    broken = shutil.copytree(exported, tmp_path / "broken")
    (broken / "SHA256SUMS").unlink()
    weights = load_file(broken / "model.safetensors")
    weights["head.norm.weight"][0] = torch.nan
    save_file(weights, broken / "model.safetensors")
    assert main([str(broken)]) == 2
    monkeypatch.setattr("tools.serve.find_spec", lambda name: None)
    assert main([str(exported)]) == 2
    printed = capsys.readouterr().err
    assert "config.json is missing" in printed
    assert "model.safetensors is not finite: head.norm.weight; copy it again" in printed
    assert "holds a MetalionForMaskedLM" in printed
    assert "pip install 'transformers[serving]'" in printed
