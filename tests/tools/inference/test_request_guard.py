"""Requests that the server must not pass on end with a status of 4xx and one sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tools.inference.request_guard import CHAT, COMPLETIONS, Limits, RefusedRequestError, RequestGuard

MODEL = "exported"


class Backend:
    """An application that records its requests and answers with the request's body, or with a stream of two events."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.bodies.append(body)
        length = [value for name, value in scope["headers"] if name == b"content-length"]
        assert scope["method"] != "POST" or length == [b"%d" % len(body)]
        if b'"stream": true' in body:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"text/event-stream")]}
            )
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})


def count_tokens(path: str, body: Mapping[str, Any]) -> int:
    if path == CHAT:
        raise RefusedRequestError("there is no chat template")
    return len(body.get("prompt", ""))


def ask(
    body: Any,
    path: str = COMPLETIONS,
    *,
    method: str = "POST",
    host: str | None = "localhost:8000",
    kind: str = "application/json",
    chunks: int = 1,
    **settings: Any,
) -> tuple[int, str, list[bytes]]:
    """Status, text of the answer, and the bodies that were passed on."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = -(-len(text) // chunks) or 1
    parts = [text[start : start + size] for start in range(0, len(text), size)] or [b""]
    messages = [{"type": "http.request", "body": part, "more_body": n < len(parts) - 1} for n, part in enumerate(parts)]
    sent: list[dict[str, Any]] = []
    headers = [(b"content-type", kind.encode())]
    headers += [(b"host", host.encode())] if host is not None else []
    headers += [(b"content-length", b"%d" % len(text))] if chunks == 1 else [(b"transfer-encoding", b"chunked")]
    backend = Backend()
    limits = settings.pop("limits", Limits(body_bytes=2000, prompt_tokens=50, new_tokens=100))
    guard = RequestGuard(backend, model=MODEL, count_tokens=count_tokens, limits=limits, **settings)

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(guard({"type": "http", "method": method, "path": path, "headers": headers}, receive, send))
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]).decode(), backend.bodies


def refused(status: int, *arguments: Any, **settings: Any) -> str:
    """Return the message of a refused request."""
    found, text, bodies = ask(*arguments, **settings)
    assert (found, bodies) == (status, [])
    message = json.loads(text)["error"]["message"]
    assert len(message) < 400
    assert "\n" not in message
    return str(message)


ODD_VALUES = [
    *(("max_tokens", value) for value in (0, -1, 101, 1.5, "12", True, 10**30, [], [5], {})),
    *(("temperature", value) for value in (-1, -1e-9, 101, "1", True, [], {"a": 1}, 10**400)),
    *(("top_p", value) for value in (0, -0.1, 1.1, "1", False, [1])),
    *(("frequency_penalty", value) for value in (-1, 3, "0", [])),
    *(("seed", value) for value in (-1, 2**63, 1.0, "7", True, [])),
    *(("stop", value) for value in ("", [], [""], ["a"] * 5, "a" * 101, 7, [7], [["a"]], {"a": "b"})),
    *(("stream", value) for value in (1, "true", [])),
    *(("prompt", value) for value in (7, True, [], ["a", "b"], [1, 2], [[1]], {"a": 1}, "\ud800")),
    *(("suffix", value) for value in (7, ["a"])),
    *(("model", value) for value in ("../other", "exported@main", 7, [], ["exported"], {"a": {"b": {}}})),
    *(("n", value) for value in (2, 0, True, "1")),
    *(("echo", True), ("best_of", 3), ("logprobs", 1), ("presence_penalty", 1), ("logit_bias", {"5": 1})),
    *(("generation_config", '{"max_new_tokens": 10000000}'), ("tools", []), ("a" * 1000, 1)),
]


def test_odd_values_are_refused_by_name() -> None:
    for key, value in ODD_VALUES:
        assert refused(400, {"prompt": "a", key: value}).startswith((f"{key} = ", "generation", "'")), (key, value)
    assert refused(400, {"prompt": "a", "max_tokens": 0}) == "max_tokens = 0: whole numbers from 1 to 100 are allowed"
    assert refused(400, {"temperature": -1}) == "temperature = -1: numbers from 0 to 100 are allowed"
    assert "'tools' is not supported: leave it out" in refused(400, {"tools": []})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[]", "a JSON list"),
        (b"null", "a JSON NoneType"),
        (b'"a"', "a JSON str"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b'{"temperature": -Infinity}', "-Infinity is no number"),
        (b'{"temperature": 1e999}', "temperature = inf"),
        (b'{"max_tokens": ' + b"9" * 1500 + b"}", "max_tokens = a number of over 38 digits"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt = a list of 1"),
    ],
)
def test_bodies_that_are_no_request(text: bytes, says: str) -> None:
    assert says in refused(400, text)


def test_a_deeply_nested_body() -> None:
    assert refused(400, b"[" * 1900), "too deep for the parser, or no JSON, as the version of Python has it"


def test_sizes_are_bounded() -> None:
    assert "over 2,000 bytes" in refused(413, {"prompt": "a" * 3000})
    assert "over 2,000 bytes" in refused(413, {"prompt": "a" * 3000}, chunks=7)
    assert "over 2,000 bytes" in refused(413, {"prompt": "a" * 300_000}, chunks=100), "not all of it is read"
    assert "the prompt has 51 tokens: at most 50" in refused(413, {"prompt": "a" * 51})
    assert ask({"prompt": "a" * 50}, chunks=7)[0] == 200


def test_hosts() -> None:
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "box.local"):
        assert ask({}, host=host, hosts=["Box.local"])[0] == 200
    for host in ("evil.example", "localhost.evil.example", "localhost:8000@evil.example", "box.local", "", "::1", None):
        printed = refused(403, {}, host=host, hosts=["localhost"])
        assert printed.endswith("localhost, 127.0.0.1, [::1] are allowed; --allow-host NAME adds one")


def test_paths_that_load_models_or_reset_the_server_are_closed() -> None:
    for path in ("/load_model", "/reset", "/v1/responses", "/v1/systemone", "/v1/audio/transcriptions", "/docs"):
        assert f"{path} is closed" in refused(404, {"model": "/tmp/any"}, path)
        assert f"{path} is closed" in refused(404, b"", path, method="GET")
    assert "does not allow PUT: use POST" in refused(405, {}, method="PUT")
    assert "application/json is allowed" in refused(415, {}, kind="text/plain")
    assert ask(b"", "/v1/models", method="GET")[0] == 200


def test_conversations() -> None:
    for messages in (None, [], "a", [7], [{}], [{"role": "root", "content": "a"}], [{"role": "user", "content": 7}]):
        assert "messages" in refused(400, {"messages": messages}, CHAT)
    assert refused(400, {"messages": [{"role": "user", "content": "a"}]}, CHAT) == "there is no chat template"


def test_passed_requests_have_a_limit_of_new_tokens() -> None:
    body = {"model": MODEL, "prompt": "größe", "max_tokens": None, "n": 1, "stop": ["a"], "stream": False}
    _, answer, _ = ask(body)
    assert json.loads(answer) == {
        "model": MODEL,
        "prompt": "größe",
        "stop": ["a"],
        "stream": False,
        "max_tokens": 100,
    }
    assert json.loads(ask({}, limits=Limits())[1]) == {"max_tokens": 1024}


def test_streams_end_with_done() -> None:
    assert ask({"stream": True})[1] == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert "[DONE]" not in ask({})[1]
