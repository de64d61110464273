"""From a file of C++ to functions that take tensors."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCES = Path(__file__).parent
_REALS = {torch.float32: "float", torch.bfloat16: "bf16"}
# nan and inf stay what they are: a step with such a gradient must be told. Own threads are those of PyTorch, whose OpenMP
# is in the process already.
_FLAGS = ["-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]


def is_supported(*tensors: Tensor) -> bool:
    """Whether kernels compute with these: of one dtype, float32 or bfloat16, in a CPU's memory, and not while torch.compile
    reads the code."""
    first = tensors[0]
    if first.device.type != "cpu" or first.dtype not in _REALS or torch.compiler.is_compiling():
        return False
    return all(x.dtype == first.dtype for x in tensors)


@cache
def shared_object(name: str, dtype: torch.dtype, **constants: int) -> ctypes.CDLL | None:
    """`name`.cpp compiled for numbers of this type, REAL there, and these constants; None where it cannot be."""
    source, compiler = _SOURCES / f"{name}.cpp", _compiler()
    if compiler is None or not source.is_file():
        return None
    flags = [*_FLAGS, f"-DREAL={_REALS[dtype]}", *(f"-D{key}={value}" for key, value in constants.items())]
    if platform.machine() == "x86_64":
        flags += ["-mprefer-vector-width=512", "-Wno-psabi"]
    texts = [path.read_text(encoding="utf-8") for path in (source, _SOURCES / "vectors.h")]
    key = hashlib.sha256("\n".join([compiler, _processor(), *flags, *texts]).encode()).hexdigest()[:16]
    try:
        kept = _folder() / f"{name}-{key}.so"
        if not _is_own_file(kept):
            # Beside its place, then renamed: other processes see all of it or nothing.
            with tempfile.TemporaryDirectory(dir=kept.parent) as aside:
                built = Path(aside) / "built.so"
                subprocess.run(
                    [compiler, *flags, str(source), "-o", str(built)], check=True, capture_output=True, text=True
                )
                built.chmod(0o700)
                built.replace(kept)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        warnings.warn(f"{name}: {compiler} does not make a kernel of it, so PyTorch's are used: {why}", stacklevel=2)
        return None


def run(compiled: ctypes.CDLL | None, name: str, *arguments: Tensor | int | float | None) -> None:
    """Call the function `name` of a library that is there. Tensors, contiguous or with strides that it is told, go as
    pointers, None as a null pointer, integers as int64, other numbers as float, and PyTorch's number of threads comes last."""
    getattr(compiled, name)(*map(_converted, arguments), ctypes.c_int64(torch.get_num_threads()))


def _converted(x: Tensor | int | float | None) -> Any:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if x is None:
        return None
    return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int64(x)


@cache
def _compiler() -> str | None:
    if os.environ.get("METALION_NATIVE") == "0":
        return None
    return shutil.which(os.environ.get("CXX") or "c++")


@cache
def _processor() -> str:
    """What code for this machine may use: a folder of the user's may be shared by several."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    words = ("model name", "flags", "CPU part", "Features")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(words)}))


@cache
def _folder() -> Path:
    """Return the folder of compiled kernels. Nobody else can write it: code in it is loaded into this process."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metalion" / "native"
        folder.mkdir(parents=True, exist_ok=True)
        if all(map(_is_own_folder, (folder.parent, folder))):
            return folder
    except (OSError, RuntimeError):  # nothing can be written there; there is no home
        pass
    folder = Path(tempfile.mkdtemp(prefix="metalion-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_own_folder(folder: Path) -> bool:
    """Whether the folder belongs to this user, to whom alone it is open afterwards."""
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)
        return os.access(folder, os.W_OK)
    remedy = "set XDG_CACHE_HOME to a folder of your own"
    warnings.warn(f"{folder} belongs to another user: kernels are compiled anew per process; {remedy}", stacklevel=2)
    return False


def _is_own_file(kept: Path) -> bool:
    """Whether a compiled kernel is there that nobody but this user can have written."""
    try:
        found = kept.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    if not is_own:
        warnings.warn(f"{kept} belongs to another user, or others can write it: it is compiled again", stacklevel=2)
    return is_own
