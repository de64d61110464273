"""Compile C++ kernels and call them with tensors."""

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
# No -ffast-math: nan and inf must reach the check for finite gradients. The threads are those of PyTorch's OpenMP.
_FLAGS = ["-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]


def is_supported(*tensors: Tensor) -> bool:
    """Return whether kernels support these tensors: on a CPU, all float32 or all bfloat16, and torch.compile is not tracing."""
    first = tensors[0]
    if first.device.type != "cpu" or first.dtype not in _REALS or torch.compiler.is_compiling():
        return False
    return all(x.dtype == first.dtype for x in tensors)


@cache
def shared_object(name: str, dtype: torch.dtype, **constants: int) -> ctypes.CDLL | None:
    """Return `name`.cpp compiled with REAL = dtype and these constants. None without compiler or source, or if it fails."""
    source, compiler = _SOURCES / f"{name}.cpp", _compiler()
    if compiler is None or not source.is_file():
        return None
    flags = [*_FLAGS, f"-DREAL={_REALS[dtype]}", *(f"-D{key}={value}" for key, value in constants.items())]
    if platform.machine() == "x86_64":
        flags += ["-mprefer-vector-width=512", "-Wno-psabi"]
    texts = [path.read_text(encoding="utf-8") for path in (source, _SOURCES / "vectors.h")]
    key = hashlib.sha256("\n".join([compiler, _processor(), *flags, *texts]).encode()).hexdigest()[:16]
    try:
        library = _folder() / f"{name}-{key}.so"
        if not _is_own_file(library):
            # Compiled to a temporary file, then renamed: other processes never load an incomplete library.
            with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
                built = Path(temporary) / "built.so"
                subprocess.run(
                    [compiler, *flags, str(source), "-o", str(built)], check=True, capture_output=True, text=True
                )
                built.chmod(0o700)
                built.replace(library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        warnings.warn(
            f"{name}.cpp: {compiler} did not compile it, so PyTorch's slower operators run instead: {why}", stacklevel=2
        )
        return None


def run(compiled: ctypes.CDLL | None, name: str, *arguments: Tensor | int | float | None) -> None:
    """Call the function `name` of a compiled library, with PyTorch's number of threads as a last argument.

    Tensors are passed as pointers (contiguous, unless the function has arguments for strides), None as a null pointer, int as
    int64, float as float.
    """
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
    """Return the processor's model and features, part of the cache key: machines may share the user's folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    words = ("model name", "flags", "CPU part", "Features")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(words)}))


@cache
def _folder() -> Path:
    """Return the cache folder. Only this user can write it, because this process loads code from it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metalion" / "native"
        folder.mkdir(parents=True, exist_ok=True)
        if all(map(_is_own_folder, (folder.parent, folder))):
            return folder
    except (OSError, RuntimeError):  # the folder cannot be written; there is no home folder
        pass
    folder = Path(tempfile.mkdtemp(prefix="metalion-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_own_folder(folder: Path) -> bool:
    """Return whether the folder belongs to this user. If so, remove all access for others."""
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)
        return os.access(folder, os.W_OK)
    remedy = "set XDG_CACHE_HOME to a folder of your own"
    warnings.warn(f"{folder} belongs to another user: every process compiles its kernels; {remedy}", stacklevel=2)
    return False


def _is_own_file(library: Path) -> bool:
    """Return whether the file exists and only this user can have written it."""
    try:
        status = library.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    if not is_own:
        warnings.warn(f"{library} belongs to another user, or others can write it: it is compiled again", stacklevel=2)
    return is_own
