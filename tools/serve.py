"""An export behind Transformers' own OpenAI-compatible server: `python -m tools.serve exported/ --port 8000`.

`transformers serve` looks a model's class up in the transformers module alone, also with --trust-remote-code; this command
puts the export's class there and hands over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from data.files import read_json
from tools.arguments import command, command_line


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; what follows the folder goes to `transformers serve` as it is."""
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
            "/v1/completions continues a text. /v1/chat/completions needs a chat template, which a pretrained model has not.\n"
            "Needs transformers' extra: pip install 'transformers[serving]'. docs/huggingface.md"
        ),
    )
    parser.add_argument("folder", type=Path, help="what tools.convert_hf export wrote")
    options, rest = parser.parse_known_args(arguments)
    config, mend = options.folder / "config.json", "python -m tools.convert_hf export RUN FOLDER writes one"
    if not config.is_file():
        raise ValueError(f"{options.folder} is no export: config.json is missing; {mend}")
    name = next(iter(read_json(config, mend, "architectures")["architectures"]), "model of no class")
    if name != "MetalionForCausalLM":
        raise ValueError(f"{options.folder} holds a {name}: only causal models of this project are served")
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise ValueError("the server is an extra of transformers: pip install 'transformers[serving]'")
    import transformers
    from transformers.cli.transformers import main as transformers_command
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder = str(options.folder)
    setattr(transformers, name, get_class_from_dynamic_module(f"hf.{name}", folder))
    sys.argv = ["transformers", "serve", folder, "--trust-remote-code", *rest]
    transformers_command()
    return 0


if __name__ == "__main__":
    sys.exit(main())
