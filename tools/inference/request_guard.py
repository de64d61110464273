"""Check requests before the server of `tools.serve` receives them: host, path, sizes and every value.

`RequestGuard` is an ASGI application that wraps another one. A refused request gets a 4xx status and one message in the
format of OpenAI's errors.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Rule = tuple[Callable[[Any], bool], str]

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_READABLE = ("/health", "/v1/models")
_DEFAULT_MAX_TOKENS = 1024
_STOP_TEXTS, _STOP_CHARACTERS = 4, 100
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:\[\]/@]+)(?::\d+)?")
_DONE = b"data: [DONE]\n\n"


class RefusedRequestError(ValueError):
    """Report a refused request: its message and HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Limit the size of requests.

    Attributes:
        body_bytes: bytes of a request's body.
        prompt_tokens: tokens of a prompt, or of a whole conversation.
        new_tokens: largest `max_tokens`.
    """

    body_bytes: int = 1_000_000
    prompt_tokens: int = 16_384
    new_tokens: int = 4_096


class RequestGuard:
    """Pass allowed requests to an application, and end streams with `data: [DONE]`.

    Args:
        app: the wrapped ASGI application.
        model: the only allowed model name.
        hosts: allowed Host headers besides `LOCAL_HOSTS`, without a port.
        count_tokens: returns the tokens of a checked body, values the path; may raise RefusedRequestError.
    """

    def __init__(
        self,
        app: App,
        *,
        model: str,
        count_tokens: Callable[[str, Mapping[str, Any]], int],
        hosts: Iterable[str] = (),
        limits: Limits | None = None,
    ) -> None:
        self._app, self._count_tokens = app, count_tokens
        self._limits = limits or Limits()
        self._hosts = list(dict.fromkeys([*LOCAL_HOSTS, *(host.lower() for host in hosts)]))
        self._rules = {path: _rules(path, model, self._limits.new_tokens) for path in (COMPLETIONS, CHAT)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection. Close connections that are neither HTTP nor the server's lifespan."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                scope, receive = await self._checked(scope, receive)
            except RefusedRequestError as error:
                await _refuse(send, error)
                return
            await self._app(scope, receive, _with_stream_end(send))
        else:
            await send({"type": f"{scope['type']}.close", "code": 1008})

    async def _checked(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        self._check_host([value.decode("latin-1") for name, value in headers if name == b"host"])
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD", "OPTIONS") and path in (*_READABLE, *self._rules):
            return scope, receive
        if path not in self._rules:
            raise RefusedRequestError(f"{path} is closed: allowed are {', '.join((*self._rules, *_READABLE))}", 404)
        if method != "POST":
            raise RefusedRequestError(f"{path} does not allow {method}: use POST", 405)
        values = dict(headers)
        kind = values.get(b"content-type", b"").decode("latin-1")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise RefusedRequestError(f"content-type = {kind!r}: application/json is allowed", 415)
        body = self._checked_body(path, await self._read(receive))
        count = await asyncio.to_thread(self._count_tokens, path, body)
        if count > self._limits.prompt_tokens:
            raise RefusedRequestError(
                f"the prompt has {count:,} tokens: at most {self._limits.prompt_tokens:,} are allowed "
                "(--max-prompt-tokens)",
                413,
            )
        text = json.dumps(body).encode()
        others = [(name, value) for name, value in headers if name not in (b"content-length", b"transfer-encoding")]
        return {**scope, "headers": [*others, (b"content-length", b"%d" % len(text))]}, _once(text, receive)

    def _check_host(self, values: list[str]) -> None:
        match = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
        if match is None or match[1] not in self._hosts:
            raise RefusedRequestError(
                f"Host = {', '.join(values)!r}: {', '.join(self._hosts)} are allowed; --allow-host NAME adds one", 403
            )

    async def _read(self, receive: Receive) -> bytes:
        """Return the body. Read up to 100 times the limit before refusing, so that the sender reads the response."""
        limit, body, size = self._limits.body_bytes, bytearray(), 0
        more = True
        while more and size <= 100 * limit:
            message = await receive()
            if message["type"] != "http.request":
                raise RefusedRequestError("the request ended before its body did")
            part = message.get("body", b"")
            size += len(part)
            if size <= limit:
                body += part
            more = bool(message.get("more_body"))
        if size > limit:
            raise RefusedRequestError(f"the request is over {limit:,} bytes: send less (--max-request-bytes)", 413)
        return bytes(body)

    def _checked_body(self, path: str, text: bytes) -> dict[str, Any]:
        """Return the fields that have a value, after checking each of them."""
        body = _json_object(text)
        rules = self._rules[path]
        for key, value in body.items():
            if key not in rules:
                raise RefusedRequestError(
                    f"{_short(key)} is not supported: leave it out; allowed are {', '.join(rules)}"
                )
            allowed, words = rules[key]
            if value is not None and not allowed(value):
                raise RefusedRequestError(f"{key} = {_short(value)}: {words} allowed")
        body = {key: value for key, value in body.items() if value is not None and key not in _WITHOUT_EFFECT}
        if path == CHAT and "messages" not in body:
            raise RefusedRequestError(f"messages is missing: {rules['messages'][1]} allowed")
        if not body.keys() & {"max_tokens", "max_completion_tokens"}:
            body["max_tokens"] = min(_DEFAULT_MAX_TOKENS, self._limits.new_tokens)
        return body


def _json_object(text: bytes) -> dict[str, Any]:
    def no_number(word: str) -> Any:
        raise ValueError(f"{word} is no number of JSON")

    try:
        body = json.loads(text.decode("utf-8"), parse_constant=no_number)
    except RecursionError:
        raise RefusedRequestError("the request is nested too deeply: send one flat JSON object") from None
    except ValueError as error:
        raise RefusedRequestError(f"the request is no JSON: {_short(str(error))}; send one JSON object") from None
    if not isinstance(body, dict):
        raise RefusedRequestError(f"the request is a JSON {type(body).__name__}: send one JSON object")
    return body


# Fields of OpenAI's schema that the server does not use: only values without effect are allowed.
_WITHOUT_EFFECT: dict[str, Rule] = {
    "n": (lambda x: x == 1 and _is_whole(x), "1 alone is"),
    "best_of": (lambda x: x == 1 and _is_whole(x), "1 alone is"),
    "echo": (lambda x: x is False, "false alone is"),
    "logprobs": (lambda x: x is False, "null alone is"),
    "logit_bias": (lambda x: x == {}, "null alone is"),
    "presence_penalty": (lambda x: _is_number(x) and x == 0, "0 alone is"),
    "user": (lambda x: _is_text(x, 1000), "a text of up to 1,000 characters is"),
}


def _rules(path: str, model: str, new_tokens: int) -> dict[str, Rule]:
    """Return for each field of a request a check of its value and a description of allowed values."""
    count: Rule = (lambda x: _is_whole(x) and 1 <= x <= new_tokens, f"whole numbers from 1 to {new_tokens:,} are")
    rules: dict[str, Rule] = {
        "model": (lambda x: x == model, f"{model!r} alone is"),
        "max_tokens": count,
        "temperature": (lambda x: _is_number(x) and 0 <= x <= 100, "numbers from 0 to 100 are"),
        "top_p": (lambda x: _is_number(x) and 0 < x <= 1, "numbers above 0 and up to 1 are"),
        "frequency_penalty": (lambda x: _is_number(x) and -1 < x <= 2, "numbers above -1 and up to 2 are"),
        "seed": (lambda x: _is_whole(x) and 0 <= x < 2**63, "whole numbers from 0 to 2^63 - 1 are"),
        "stop": (
            _is_stop,
            f"a text of 1 to {_STOP_CHARACTERS} characters, or a list of 1 to {_STOP_TEXTS} such texts is",
        ),
        "stream": (lambda x: isinstance(x, bool), "true and false are"),
    }
    if path == CHAT:
        rules["messages"] = (
            lambda x: isinstance(x, list) and bool(x) and all(map(_is_message, x)),
            'a list of {"role": "system", "user" or "assistant", "content": a text} is',
        )
        rules["max_completion_tokens"] = count
    else:
        rules["prompt"] = (_is_text, "one text is")
        rules["suffix"] = (lambda x: _is_text(x, 10_000), "a text of up to 10,000 characters is")
    return rules | _WITHOUT_EFFECT


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return _is_whole(x) or (isinstance(x, float) and math.isfinite(x))


def _is_text(x: Any, longest: int | None = None) -> bool:
    """Return whether x is a text that UTF-8 can encode (no single surrogates), at most `longest` characters."""
    if not isinstance(x, str) or (longest is not None and len(x) > longest):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in x) if not x.isascii() else True


def _is_stop(x: Any) -> bool:
    texts = x if isinstance(x, list) else [x]
    return 1 <= len(texts) <= _STOP_TEXTS and all(text and _is_text(text, _STOP_CHARACTERS) for text in texts)


def _is_message(x: Any) -> bool:
    if not isinstance(x, dict) or x.keys() != {"role", "content"}:
        return False
    return x["role"] in ("system", "user", "assistant") and _is_text(x["content"])


def _short(value: Any) -> str:
    """Return the value on one line, at most 60 characters."""
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 128 else "a number of over 38 digits"
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def _once(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that gives the body as one message, then the connection's messages."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _with_stream_end(send: Send) -> Send:
    """Return a send function that appends the last line of OpenAI's event streams, which the server does not send."""
    streams = False

    async def forward(message: Message) -> None:
        nonlocal streams
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif message["type"] == "http.response.body" and streams and not message.get("more_body"):
            message = {**message, "body": message.get("body", b"") + _DONE}
        await send(message)

    return forward


async def _refuse(send: Send, error: RefusedRequestError) -> None:
    kind = "invalid_request_error"
    text = json.dumps({"error": {"message": str(error), "type": kind, "param": None, "code": error.status}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(text)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
