"""NVRTC, CUDA's compiler, as PyTorch's wheels bring it.

farwire compiles its kernels with it, and finds it if it is where libraries are. Where PyTorch came
from PyPI, it is in a package beside PyTorch's instead; once loaded from there, it is found by name.
"""

import ctypes
import functools
from pathlib import Path

import torch


@functools.cache
def load_nvrtc() -> None:
    """Loads the library, if it is in such a package."""
    packages = Path(torch.__file__).parent.parent / "nvidia"
    for library in sorted(packages.glob("*/lib/libnvrtc.so.*")):
        if "builtins" in library.name or ".alt." in library.name:
            continue
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            pass  # then there may be another, and else farwire says what is missing
