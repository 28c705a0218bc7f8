"""A kernel launch: what is the same from call to call, kept, and what each call adds to it."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import tilelang
from tilelang import PassConfigKey
from tilelang.contrib import nvcc
from torch import Tensor

from flash_rosetta.layout import LaunchKey, bind_context

_compiling = threading.Lock()

logging.getLogger("tilelang").setLevel(logging.WARNING)  # else a line for each compilation

Configs = tuple[tuple[PassConfigKey, bool], ...]

PASS_CONFIGS: Configs = (
    # exp2 becomes one instruction. Division becomes approximate as well, to an error near fp32's.
    (PassConfigKey.TL_ENABLE_FAST_MATH, True),
    # The kernels say themselves who loads, who waits, where threads meet and where a tensor ends.
    # What the compiler would add frees slots that products still read, or only costs time.
    (PassConfigKey.TL_DISABLE_WARP_SPECIALIZED, True),
    (PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC, True),
    (PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS, True),
)


class Recipe:
    """What all launches of one kernel under one `LaunchKey` have in common.

    Args:
        kernel: a function of the options that returns a TileLang program.
        key: the launches' key.
        operands: for each tensor the kernel takes first, what makes its argument.
        scalars: the arguments that follow the tensors.
        options: what is known when the kernel is compiled; sizes and strides are not.
        configs: what TileLang's passes are told.
    """

    def __init__(
        self,
        kernel: Callable[..., Any],
        key: LaunchKey,
        operands: Sequence[Callable[[Tensor], Tensor]],
        scalars: tuple,
        options: dict[str, Any],
        configs: Configs = PASS_CONFIGS,
    ):
        self.kernel = kernel
        self.target = key.problem.target
        self.device = key.device
        self.operands = operands
        self.scalars = scalars
        self.options = options
        self.configs = configs
        self.enqueue: Callable[..., object] | None = None

    def launch(self, *tensors: Tensor) -> Launch:
        """The launch on these tensors."""
        arguments = [make(t) for make, t in zip(self.operands, tensors, strict=True)]
        return Launch(self, (*arguments, *self.scalars))


class Launch(NamedTuple):
    """A recipe with its arguments: data, so that one description can be run, or only compiled."""

    recipe: Recipe
    args: tuple

    def run(self) -> None:
        """Enqueue on the current stream of the current device."""
        recipe = self.recipe
        if recipe.enqueue is None:
            with _compiling:  # else threads that start together would each compile the same
                recipe.enqueue = compiled(
                    recipe.kernel, recipe.target, recipe.configs, **recipe.options
                )
        bind_context(recipe.device)
        recipe.enqueue(*self.args)


@lru_cache(maxsize=1024)
def compiled(
    kernel: Callable[..., Any], target: str, configs: Configs, **options: Any
) -> Callable[..., object]:
    """A kernel's code for a card: from TileLang's cache on disk, or compiled, which takes seconds.

    One compilation serves all sizes and strides.
    """
    program = tilelang.compile(
        kernel(**options),
        target=cuda_target(target),
        pass_configs=dict(configs),
        execution_backend="tvm_ffi",
    )
    executable = program.adapter.get_exportable_executable()
    # Called by itself: TileLang's own wrapper looks at every argument in Python first.
    return (executable.jit() if hasattr(executable, "jit") else executable).main


@lru_cache
def find_nvcc() -> str | None:
    """CUDA's compiler where TileLang looks: $CUDA_HOME, $PATH, the package nvidia-cuda-nvcc."""
    try:
        return shutil.which(nvcc.get_nvcc_compiler())
    except RuntimeError:
        return None


def cuda_target(target: str) -> dict[str, str]:
    """What TileLang calls a problem's target: "sm_90" is compiled for all of Hopper, as sm_90a."""
    return {"kind": "cuda", "arch": f"{target}a" if int(target[3:]) >= 90 else target}
