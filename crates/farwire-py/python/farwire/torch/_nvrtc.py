"""NVRTC, CUDA's compiler, from the packages that come with PyTorch's wheels.

farwire compiles its kernels with NVRTC, and finds it in the library path. If PyTorch came from
PyPI, NVRTC is instead in a package next to PyTorch's; once loaded from there, it is found by name.
"""

import ctypes
import functools
from pathlib import Path

import torch


@functools.cache
def load_nvrtc() -> None:
    """Loads the library if it is in such a package."""
    packages = Path(torch.__file__).parent.parent / "nvidia"
    for library in sorted(packages.glob("*/lib/libnvrtc.so.*")):
        if "builtins" in library.name or ".alt." in library.name:
            continue
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            pass  # there may be another; if not, farwire says what is missing
