"""Save the tokenizer of a run beside its checkpoints, read it, and compare it with the tokenizer of the data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.atomic_io import atomic_write, read_json, write_json, write_text
from data.tokenizer import Tokenizer, companion_files, load_tokenizer
from megatron_lite.checkpoint.checksums import FILE_NAME, check_files, checksums_text, file_sha256, inside
from tools.loading.token_data import data_config


def save_tokenizer(tokenizer: Tokenizer, run: Path) -> None:
    """Copy the tokenizer's file to `run/tokenizer`, so that a run can be moved and read without its corpus."""
    folder = run / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer.path is not None and Path(tokenizer.path).resolve().parent == folder.resolve():
        saved_tokenizer(run)  # refuses a file that was changed after it was saved
    description = {"type": tokenizer.type, "file": None, "hash": tokenizer.hash}
    if tokenizer.path is not None:
        source = Path(tokenizer.path)
        description["file"] = source.name
        files = [source, *companion_files(tokenizer)]
        for path in files:
            if path.resolve() != (folder / path.name).resolve():
                with atomic_write(folder / path.name) as file:
                    file.write(path.read_bytes())
    write_json(folder / "description.json", description)
    names = ["description.json"]
    if tokenizer.path is not None:
        names += [path.name for path in files]
    write_text(folder / FILE_NAME, checksums_text({name: file_sha256(folder / name) for name in names}))


def read_tokenizer(run: Path, config: dict[str, Any], manifest: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the run saved, else the one that its configuration names.

    manifest: of the checkpoint. It holds the hash of its tokenizer; manifests of earlier versions do not.

    Raises:
        FileNotFoundError: neither exists, or the run was imported without a tokenizer. A tokenizer that is trained again
            would give other ids.
        ValueError: the weights were trained with another tokenizer.
    """
    folder = run / "tokenizer"
    tokenizer = saved_tokenizer(run)
    if tokenizer is None:
        data = data_config(config)
        if not has_tokenizer(run, config, manifest):
            raise FileNotFoundError(
                f"{run} was imported without a tokenizer, and text needs one: copy the model's tokenizer.json, tokenizer.model "
                "or vocab.txt into the imported folder, and import it again with --overwrite"
            )
        if data.tokenizer.type != "bytes" and data.tokenizer.path is None:
            raise FileNotFoundError(
                f"{folder} is missing: it holds the tokenizer that the run trained. Copy it from where the run was made, "
                "or from the folder training/tokenizer of an export"
            )
        tokenizer = load_tokenizer(data.tokenizer.type, data.tokenizer.path)
    expected = manifest["state"].get("tokenizer")
    if expected is not None and tokenizer.hash != expected:
        raise ValueError(
            f"{tokenizer.path or tokenizer.type} is not the tokenizer that the checkpoint was trained with: its hash is "
            f"{tokenizer.hash}, not {expected}. Copy {folder} from where the run was made"
        )
    return tokenizer


def has_tokenizer(run: Path, config: dict[str, Any], manifest: Mapping[str, Any]) -> bool:
    """Return whether a run has a tokenizer. An import without one names bytes, and neither run nor manifest records them."""
    recorded = saved_tokenizer(run) is not None or manifest["state"].get("tokenizer") is not None
    return recorded or data_config(config).tokenizer.type != "bytes"


def check_same_tokenizer(tokenizer: Tokenizer, run: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ValueError if the tokenizer of the data is not the tokenizer of the checkpoint that a run resumes from."""
    saved = saved_tokenizer(run)
    expected = manifest["state"].get("tokenizer") or (saved and saved.hash)
    if expected and tokenizer.hash != expected:
        usable = saved and saved.path and saved.hash == expected
        original = f"data.tokenizer.path={saved.path}" if saved and usable else "that tokenizer"
        raise ValueError(
            f"{run}: its checkpoint was trained with another tokenizer (hash {expected}) than the data have now "
            f"({tokenizer.path or tokenizer.type}, {tokenizer.hash}). Set {original} to resume, or start "
            "again with checkpoint.resume=never"
        )


def saved_tokenizer(run: Path) -> Tokenizer | None:
    """Return the tokenizer that `save_tokenizer` put into the run, or None. Raises as `read_tokenizer`."""
    path, remedy = run / "tokenizer" / "description.json", "copy it again, or remove its folder to use data.tokenizer"
    if not check_files(path.parent, remedy) and not path.is_file():
        return None
    description = read_json(path, remedy, "type", "file", "hash")
    file = None if description["file"] is None else inside(path.parent, description["file"], path)
    tokenizer = load_tokenizer(description["type"], file)
    if tokenizer.hash != description["hash"]:
        raise ValueError(
            f"{file} was changed after training: its hash is {tokenizer.hash}, not {description['hash']}. "
            "Copy it again from where the run was made"
        )
    return tokenizer
