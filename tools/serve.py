"""Serve an export with the OpenAI-compatible server of Transformers: `python -m tools.serve exported/ --port 8000`.

`transformers serve` looks up model classes only in the transformers module, so this command registers the project's class
there, after it has compared the export's source with the project's. `RequestGuard` closes all paths that load another model
and refuses invalid requests. The list of models is the export only. Sampling with a request's temperature and top_p is
enabled. An empty prompt starts a document, as in tools.generate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.atomic_io import read_json
from tools.cli.arguments import command, command_line, positive
from tools.inference.request_guard import CHAT, Limits, RefusedRequestError, RequestGuard


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Unknown options are passed to `transformers serve`."""
    options, rest = _parser().parse_known_args(arguments)
    config, remedy = options.folder / "config.json", "python -m tools.convert_hf export RUN FOLDER writes one"
    if not config.is_file():
        raise ValueError(f"{options.folder} is no export: config.json is missing; {remedy}")
    described = read_json(config, remedy, "architectures")
    from tools.conversion.hf_folder import check_folder  # imports torch, which --help does not need

    check_folder(options.folder)
    name = next(iter(described["architectures"] or []), "model of no class")
    if name != "MetalionForCausalLM":
        raise ValueError(
            f"{options.folder} holds a {name}: only causal models of this project are served; name the export of such a run"
        )
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise ValueError("fastapi and uvicorn are not installed: pip install 'transformers[serving]'")
    import transformers
    from transformers.cli.serving import server
    from transformers.cli.serving.model_manager import ModelManager

    from tools.conversion.export_source import limit_progress_bars

    limit_progress_bars()
    folder, trust = str(options.folder), bool(options.trust_remote_code)
    setattr(transformers, name, served_class(_class(options.folder, described, trust)))
    listed = [{"id": folder, "object": "model", "created": int(config.stat().st_mtime), "owned_by": "metalion"}]
    ModelManager.get_gen_models = staticmethod(lambda cache_dir=None: listed)
    build_server = server.build_server
    count = token_counter(transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust), described)
    hosts = [*options.allow_host, *_bound_names(options.host)]
    limits = Limits(options.max_request_bytes, options.max_prompt_tokens, options.max_tokens)

    def guarded(*parts: Any, **settings: Any) -> RequestGuard:
        app = build_server(*parts, **settings)
        return RequestGuard(app, model=folder, count_tokens=count, hosts=hosts, limits=limits)

    server.build_server = guarded
    flags = ["--trust-remote-code"] if trust else []
    transformers_serve([folder, "--host", options.host, *flags, *rest])
    return 0


def transformers_serve(words: Sequence[str]) -> None:
    """Run `transformers serve` with the given arguments until the server ends. Ends by SystemExit."""
    from transformers.cli.transformers import app

    # Without a name the messages would show this module's package, as in `python -m tools.transformers`.
    app(args=["serve", *words], prog_name="transformers")


def served_class(base: Any) -> type:
    """Return a subclass of the export's class that samples from the model's distribution unless a request changes it."""
    from tools.inference.sampling import LEAST_TEMPERATURE

    class Served(base):
        @classmethod
        def from_pretrained(cls, *arguments: Any, **settings: Any) -> Any:
            model = super().from_pretrained(*arguments, **settings)
            model.generation_config.update(do_sample=True, top_k=0)  # top_k: transformers' own default is 50
            return model

        def generate(self, *arguments: Any, **settings: Any) -> Any:
            requested = settings.get("generation_config")
            if requested is not None and 0 < (requested.temperature or 0) < LEAST_TEMPERATURE:
                requested.temperature = LEAST_TEMPERATURE
            ids = settings.get("input_ids")
            if ids is None or ids.shape[1]:
                return super().generate(*arguments, **settings)
            begin = ids.new_full((len(ids), 1), self.generation_config.bos_token_id).long()
            settings |= {"input_ids": begin, "attention_mask": begin.new_ones(begin.shape)}
            return super().generate(*arguments, **settings)[:, 1:]

    return Served


def token_counter(tokenizer: Any, config: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], int]:
    """Return a function of a path and a checked body that counts the prompt's tokens.

    It raises RefusedRequestError for a conversation that no chat template renders, and for more tokens than the model has
    positions.
    """

    def count(path: str, body: Mapping[str, Any]) -> int:
        if path == CHAT:
            tokens = _rendered(tokenizer, body["messages"])
        else:
            tokens = len(tokenizer(body.get("prompt", ""), verbose=False)["input_ids"])
        new = body.get("max_completion_tokens", body.get("max_tokens", 0))
        positions = config.get("max_positions")
        if positions is not None and tokens + new > positions:
            raise RefusedRequestError(
                f"{tokens:,} tokens of the prompt and max_tokens = {new:,} are over the model's {positions:,} positions: "
                "send a shorter prompt or a smaller max_tokens"
            )
        return tokens

    return count


def _rendered(tokenizer: Any, messages: Any) -> int:
    """Return the number of tokens of a conversation."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise RefusedRequestError(
            "the model has no chat template: use /v1/completions, or set tokenizer.chat_template of a model that was tuned "
            "to chat, and save it"
        )
    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except (TemplateError, ValueError, TypeError) as error:
        raise RefusedRequestError(
            f"the chat template refuses the messages: {' '.join(str(error).split())[:200]}"
        ) from error
    return len(rendered["input_ids"])


def _class(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> Any:
    """Return the project's class, registered with transformers, or with `trust_remote_code` the class in the folder."""
    if trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(config["auto_map"]["AutoModelForCausalLM"], str(folder))
    from transformers import AutoConfig

    from models.hf.configuration_metalion import MetalionConfig
    from tools.conversion.export_source import model_class

    AutoConfig.register(MetalionConfig.model_type, MetalionConfig)
    return model_class(folder, "CausalLM", trust_remote_code=False)


def _bound_names(host: str) -> list[str]:
    """Return the host name of the address that the server listens on, or an empty list for all addresses."""
    if host in ("0.0.0.0", "::"):
        return []
    return [f"[{host}]" if ":" in host else host]


def _parser() -> argparse.ArgumentParser:
    limits = Limits()
    parser = command_line(
        "python -m tools.serve",
        "Serve an exported model with transformers' own server. Runs until Ctrl-C.\n"
        "Other options are those of `transformers serve`, such as --port (8000) and --device.",
        (
            "examples:\n"
            "  python -m tools.serve exported/ --port 8000\n"
            "  python -m tools.serve exported/ --device cuda --dtype bfloat16     options of `transformers serve`\n"
            "  curl localhost:8000/v1/completions -H 'content-type: application/json' \\\n"
            '       -d \'{"model": "exported", "prompt": "def ", "max_tokens": 64}\'\n'
            "\n"
            "/v1/completions continues a text with the request's temperature (default 1; 0: greedy) and top_p.\n"
            "/v1/chat/completions needs a chat template, which a pretrained model does not have.\n"
            "See docs/guide/huggingface.md"
        ),
    )
    parser.add_argument("folder", type=Path, help="folder written by `tools.convert_hf export`")
    parser.add_argument("--host", default="localhost", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="allowed Host header besides localhost, 127.0.0.1, [::1] and --host; may be repeated",
    )
    for option, default, text in (
        ("--max-request-bytes", limits.body_bytes, "largest request body"),
        ("--max-prompt-tokens", limits.prompt_tokens, "longest prompt"),
        ("--max-tokens", limits.new_tokens, "largest max_tokens of a request"),
    ):
        parser.add_argument(option, type=positive, default=default, help=f"{text} (default {default:,})")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the source in the folder instead of the project's"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
