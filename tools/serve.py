"""An export behind Transformers' own OpenAI-compatible server: `python -m tools.serve exported/ --port 8000`.

`transformers serve` looks a model's class up in the transformers module alone, also with --trust-remote-code; this command
puts the export's class there and hands over. Its list of models is that of the hub's cache, and an error where there is no
cache; here it is the export, the only model that it answers for. It passes a request's temperature and top_p on and leaves
it to the model's settings whether they are used; here they are. An empty prompt begins a document, as in tools.generate.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.atomic_io import read_json
from tools.cli.arguments import command, command_line


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
            "/v1/completions continues a text, drawn with the request's temperature (default 1; 0 is greedy) and top_p.\n"
            "/v1/chat/completions needs a chat template, which a pretrained model has not.\n"
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
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.transformers import main as transformers_command

    folder = str(options.folder)
    setattr(transformers, name, served_class(folder, name))
    created = int((options.folder / "config.json").stat().st_mtime)
    listed = [{"id": folder, "object": "model", "created": created, "owned_by": "metalion"}]
    ModelManager.get_gen_models = staticmethod(lambda cache_dir=None: listed)
    sys.argv = ["transformers", "serve", folder, "--trust-remote-code", *rest]
    transformers_command()
    return 0


def served_class(folder: str, name: str) -> type:
    """The export's class; what it loads draws from the model's own distribution where a request says nothing else."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    from tools.inference.sampling import LEAST_TEMPERATURE

    module = "modeling_metalion" if (Path(folder) / "modeling_metalion.py").exists() else "hf"  # older exports

    class Served(get_class_from_dynamic_module(f"{module}.{name}", folder)):
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


if __name__ == "__main__":
    sys.exit(main())
