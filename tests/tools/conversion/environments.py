"""Build environments with torch and transformers and without this project, and keep them outside the repository.

    python tests/tools/conversion/environments.py          builds what is missing (2 x 1.5 GB, a few minutes)

One for the oldest and one for the newest transformers that the project allows; `transformers[torch]` adds accelerate, which
its Trainer needs. A third adds the packages of transformers' server to the newest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
VERSIONS = {"oldest": "5.6.2", "newest": "5.23.0"}
# The newest with the packages of its server; it takes the others from the environment of that name.
SERVING = "serving"


def environment(name: str) -> Path:
    """Return the folder of an environment, which may not exist."""
    home = Path(os.environ.get("METALION_ENVIRONMENTS", Path.home() / ".cache" / "metalion"))
    return home / (SERVING if name == SERVING else f"transformers-{VERSIONS[name]}")


def python_of(name: str) -> Path | None:
    """Return the interpreter of a finished environment, or None."""
    folder = environment(name)
    return folder / "bin" / "python" if (folder / "complete").is_file() else None


def build(name: str) -> None:
    """Build an environment. After a failure of pip it counts as absent."""
    folder = environment(name)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if name == SERVING:
        packages = next((folder / "lib").glob("python*/site-packages"))
        shared = environment("newest") / packages.relative_to(folder)
        (packages / "shared.pth").write_text(f"{shared}\n")
        subprocess.run([*pip, f"transformers[serving]=={VERSIONS['newest']}"], check=True)
        (folder / "complete").touch()
        return
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, TORCH, f"transformers[torch]=={VERSIONS[name]}"], check=True)
    (folder / "complete").touch()


if __name__ == "__main__":
    for name in (*VERSIONS, SERVING):
        if python_of(name) is None:
            print(f"building {environment(name)}", flush=True)
            build(name)
