"""Compiled models: torch.compile, a block at a time."""

import importlib.util

import torch
from torch import nn

from paceline.errors import SettingsError, unknown_name
from paceline.parallel.fully_sharded import find_blocks
from paceline.parallel.pipeline.settings import PipelineSettings

NO_COMPILER = "none"


def compile_blocks(module: nn.Module, compiler: str = "inductor") -> None:
    """Compile the forward and backward of each block of a model, in place.

    Blocks are those of `find_blocks`; a model without blocks is compiled whole. A whole compiled model makes all
    gradients at the end of its backward, which leaves nothing to overlap their exchange with; blocks make theirs one
    after another. Names of parameters stay, and so do hooks on blocks. Compilation happens in the first steps, and
    again for inputs of other shapes.

    Args:
        module: The model, on its device, and laid out over ranks if it is.
        compiler: A backend of `torch.compile`.
    """
    for name in find_blocks(module) or [""]:
        block = module.get_submodule(name)
        block.forward = torch.compile(block.forward, backend=compiler)


def check_compiler(compiler: str, device: torch.device) -> None:
    """Refuse a compiler that is not available.

    Raises:
        SettingsError: Torch does not know the compiler, or a program that it needs is missing.
    """
    if compiler == NO_COMPILER:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if compiler not in known:
        raise unknown_name("compiler", compiler, [NO_COMPILER, *known])
    if compiler == "inductor" and device.type == "cpu" and not _has_cpp_compiler():
        raise SettingsError(
            "compiler inductor must have a C++ compiler on CPUs, but there is none; install g++, or give "
            "--compiler none"
        )
    if compiler == "inductor" and device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise SettingsError(
            "compiler inductor must have triton on GPUs, but it is missing; pip install 'paceline[triton]', or give "
            "--compiler none"
        )


def check_compiler_fits(compiler: str, pipeline: PipelineSettings | None) -> None:
    """Refuse a compiler with settings that interrupt blocks; `pipeline` is None without a pipeline."""
    if compiler == NO_COMPILER:
        return
    if pipeline is not None and pipeline.behaviour.splits_backward:
        raise SettingsError(
            "pipeline.order must not split backward with compiled blocks, but got "
            f"{pipeline.order} with compiler {compiler}; take 1f1b or interleaved, or no compiler"
        )


def _has_cpp_compiler() -> bool:
    from torch._inductor import cpp_builder, exc  # the import takes a second

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True
