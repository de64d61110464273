"""An export behind Transformers' own OpenAI-compatible server: `python -m tools.serve exported/ --port 8000`.

`transformers serve` finds a model's class in the transformers module alone, so this command puts the project's class there,
after comparing the source beside the weights with the project's. `RequestGuard` stands in front of the server: it closes
every path that loads another model, and answers requests that are too large or odd. The server's list of models is that of
the hub's cache; here it is the export. It passes a request's temperature and top_p on and leaves it to the model's settings
whether they are used; here they are. An empty prompt begins a document, as in tools.generate.
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
    """Run the command line; options that are not its own go to `transformers serve` as they are."""
    options, rest = _parser().parse_known_args(arguments)
    config, mend = options.folder / "config.json", "python -m tools.convert_hf export RUN FOLDER writes one"
    if not config.is_file():
        raise ValueError(f"{options.folder} is no export: config.json is missing; {mend}")
    described = read_json(config, mend, "architectures")
    from tools.conversion.hf_folder import check_folder  # imports torch, which --help does not need

    check_folder(options.folder)
    name = next(iter(described["architectures"] or []), "model of no class")
    if name != "MetalionForCausalLM":
        raise ValueError(f"{options.folder} holds a {name}: only causal models of this project are served")
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise ValueError("the server is an extra of transformers: pip install 'transformers[serving]'")
    import transformers
    from transformers.cli.serving import server
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.transformers import main as transformers_command

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
    sys.argv = ["transformers", "serve", folder, "--host", options.host, *flags, *rest]
    transformers_command()
    return 0


def served_class(base: Any) -> type:
    """The export's class; what it loads draws from the model's own distribution where a request says nothing else."""
    from tools.inference.sampling import LEAST_TEMPERATURE

    class Served(base):
        @classmethod
        def from_pretrained(cls, *arguments: Any, **settings: Any) -> Any:
            model = super().from_pretrained(*arguments, **settings)
            model.generation_config.update(do_sample=True, top_k=0)  # top_k: transformers' own default is 50
            return model

        def generate(self, *arguments: Any, **settings: Any) -> Any:
            asked = settings.get("generation_config")
            if asked is not None and 0 < (asked.temperature or 0) < LEAST_TEMPERATURE:
                asked.temperature = LEAST_TEMPERATURE
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
                "ask for less"
            )
        return tokens

    return count


def _rendered(tokenizer: Any, messages: Any) -> int:
    """Number of tokens of a conversation."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise RefusedRequestError(
            "the model has no chat template: ask /v1/completions, or set tokenizer.chat_template of a model that was tuned "
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
    """The project's class, known to transformers under the model's type; or the folder's own where it is trusted."""
    if trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(config["auto_map"]["AutoModelForCausalLM"], str(folder))
    from transformers import AutoConfig

    from models.hf.configuration_metalion import MetalionConfig
    from tools.conversion.export_source import model_class

    AutoConfig.register(MetalionConfig.model_type, MetalionConfig)
    return model_class(folder, "CausalLM", trust_remote_code=False)


def _bound_names(host: str) -> list[str]:
    """The name by which requests reach the address that the server listens at; none for every address."""
    if host in ("0.0.0.0", "::"):
        return []
    return [f"[{host}]" if ":" in host else host]


def _parser() -> argparse.ArgumentParser:
    limits = Limits()
    parser = command_line(
        "python -m tools.serve",
        "Serve an exported model with transformers' own server. Runs until Ctrl-C.",
        (
            "examples:\n"
            "  python -m tools.serve exported/ --port 8000\n"
            "  python -m tools.serve exported/ --device cuda --dtype bfloat16     options of `transformers serve`\n"
            "  curl localhost:8000/v1/completions -H 'content-type: application/json' \\\n"
            '       -d \'{"model": "exported", "prompt": "def ", "max_tokens": 64}\'\n'
            "\n"
            "/v1/completions continues a text, drawn with the request's temperature (default 1; 0 is greedy) and top_p.\n"
            "/v1/chat/completions needs a chat template, which a pretrained model has not.\n"
            "Needs transformers' extra: pip install 'transformers[serving]'. docs/guide/huggingface.md"
        ),
    )
    parser.add_argument("folder", type=Path, help="what tools.convert_hf export wrote")
    parser.add_argument("--host", default="localhost", help="address to listen at (default %(default)s)")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="Host header to answer besides localhost, 127.0.0.1, [::1] and --host; may be given again",
    )
    for option, default, words in (
        ("--max-request-bytes", limits.body_bytes, "largest body of a request"),
        ("--max-prompt-tokens", limits.prompt_tokens, "longest prompt"),
        ("--max-tokens", limits.new_tokens, "largest max_tokens of a request"),
    ):
        parser.add_argument(option, type=positive, default=default, help=f"{words} (default {default:,})")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the folder's own source instead of the project's"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
