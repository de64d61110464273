"""Render conversations with a tokenizer's chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.atomic_io import read_json
from data.tokenizer import Tokenizer


def chat_template_of(tokenizer: Tokenizer) -> str | None:
    """Return the chat template beside the tokenizer's file: chat_template.jinja, or the key in tokenizer_config.json."""
    if tokenizer.path is None:
        return None
    folder = Path(tokenizer.path).parent
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    content = read_json(config, "copy it again") if config.is_file() else {}
    template = content.get("chat_template")
    return template if isinstance(template, str) else None


def render_chat(template: str, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    """Return the prompt of a conversation of {"role", "content"}."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [messages],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )
    return rendered[0]


def check_chat_template(lm: Any, name: str) -> None:
    """Raise ValueError for a model without a chat template. lm: this project's or the harness's model."""
    if not lm.chat_template(True):
        raise ValueError(
            f"--apply-chat-template: the tokenizer of {name} has no chat template; set chat_template in its "
            "tokenizer_config.json, or leave the option out"
        )
