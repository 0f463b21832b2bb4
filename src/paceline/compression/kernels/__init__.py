"""Layer 4: the loops of codecs, each written up to three times: in plain torch, in numba for CPUs, in Triton for GPUs.

A codec's kernels are the functions of the module ``torch_<codec>``, which is the reference and runs everywhere;
``numba_<codec>`` and ``triton_<codec>`` have the same functions. (``torch_rows`` and ``triton_rows`` hold the common
parts of int8 and one_bit.) Neither numba nor Triton is imported before a codec needs it for a tensor.
"""

import functools
import importlib
import importlib.util
import warnings
from types import ModuleType

import torch

__all__ = ["find_kernels"]

_COMPILERS = {"cpu": ("numba", "numba"), "cuda": ("triton", "'paceline[triton]'")}
"""Compiler of the fast kernels, and the pip requirement that installs it, by device type."""


def find_kernels(codec: str, device: torch.device) -> ModuleType:
    """Return the module of the fastest kernels of `codec` that run on `device`."""
    return _find(codec, device.type)


@functools.cache
def _find(codec: str, device_type: str) -> ModuleType:
    compiler, requirement = _COMPILERS.get(device_type, ("", ""))
    if compiler and importlib.util.find_spec(f"{__name__}.{compiler}_{codec}"):
        if importlib.util.find_spec(compiler):
            return importlib.import_module(f"{__name__}.{compiler}_{codec}")
        warnings.warn(
            f"codec {codec!r} runs on slow kernels of plain torch, since {compiler} is missing; "
            f"pip install {requirement}, or filter this warning to accept it",
            stacklevel=4,
        )
    return importlib.import_module(f"{__name__}.torch_{codec}")
