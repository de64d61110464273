"""Read the configuration and the tensors of a Hugging Face folder on demand. Pickles are never read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from data.atomic_io import read_json
from megatron_lite.checkpoint.checksums import FILE_NAME, check_files, inside
from megatron_lite.fault_tolerance.finite_check import names_not_finite

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises FileNotFoundError if it is missing, ValueError if it is not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        near = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(
            f"{folder} is no Hugging Face folder: config.json is missing ({near}). "
            "Name a folder with config.json and safetensors files"
        )
    return read_json(path, "it must name the model_type that its weights are of", "model_type")


def check_folder(folder: Path) -> int:
    """Compare the files of an export with their hashes and read the weights. Returns the number of compared files.

    Raises:
        ValueError: a missing or changed file, a damaged safetensors file, or weights that are not finite.
    """
    again = f"copy it again, or write it again (python -m tools.convert_hf export RUN {folder} --overwrite)"
    count = check_files(folder, f"{again}; where the change was meant, remove {FILE_NAME}")
    for file in sorted(folder.glob("*.safetensors")):
        tensors = _open(file)
        if names := names_not_finite((name, tensors.get_tensor(name)) for name in tensors.keys()):  # noqa: SIM118
            raise ValueError(f"{file} is not finite: {', '.join(names[:8])}; {again}")
    return count


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file, or is cut short ({error}): copy it again") from error


class Tensors(Mapping[str, Tensor]):
    """Map names to tensors of model.safetensors, or of the files in its index, in their stored type.

    Raises:
        FileNotFoundError: no safetensors there, or a file of the index is missing.
        ValueError: weights only as pickles, or a file that is not safetensors.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            named = read_json(index, "copy it again", "weight_map")["weight_map"]
            if not isinstance(named, dict):
                raise ValueError(f"{index} is damaged (weight_map holds no names): copy it again")
            names = sorted({str(inside(Path(), name, index)) for name in named.values()})
        else:
            names = ["model.safetensors"]
        if not index.is_file() and not (folder / "model.safetensors").is_file():
            pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
            if pickles:
                raise ValueError(
                    f"{folder}: its weights are pickles ({', '.join(pickles[:3])}), which execute code when they are read; "
                    "they are not opened. Save the model as safetensors where you trust it: save_pretrained writes them"
                )
            raise FileNotFoundError(f"{folder}: model.safetensors is missing: copy the weights into the folder")
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._of: dict[str, str] = {}
        for name in names:
            try:
                self._files[name] = _open(folder / name)
            except FileNotFoundError:
                raise FileNotFoundError(f"{folder / name} is missing; {index.name} names it: copy it again") from None
            self._of |= dict.fromkeys(self._files[name].keys(), name)
        self.shapes = {key: tuple(self._files[file].get_slice(key).get_shape()) for key, file in self._of.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._of[name]].get_tensor(name)

    def largest(self) -> str:
        """Return the largest absolute weight with its name and file, "3.1e+38 of head.weight in out/model.safetensors"."""
        sizes = {name: tensor.abs().max().item() for name, tensor in self.items() if tensor.is_floating_point()}
        name = max(sizes, key=sizes.__getitem__)
        return f"{sizes[name]:.1e} of {name} in {self._folder / self._of[name]}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)
