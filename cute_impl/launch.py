"""A kernel launch: what is the same from call to call, kept, and what each call adds to it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream
from torch import Tensor

from flash_rosetta.cute_impl import disk_cache
from flash_rosetta.layout import LaunchKey, bind_context

_compiling = threading.RLock()
"""CuTe DSL builds one kernel at a time: it keeps what it is building in global variables."""


class Kernel(Protocol):
    """A kernel and its host code, as an object that holds what is known when they are compiled."""

    def __init__(self, **options: Any) -> None: ...

    def signature(self) -> tuple:
        """Stand-ins for the arguments of a launch, tensors first, without the stream."""
        ...

    def __call__(self, *arguments: Any) -> None:
        """The host code, `@cute.jit`: launches on the stream that is its last argument."""
        ...


class Recipe:
    """What all launches of one kernel under one `LaunchKey` have in common.

    Args:
        kernel: a class of kernels.
        key: the launches' key.
        operands: for each tensor the kernel takes first, what makes its argument.
        scalars: the arguments that follow the tensors.
        options: what is known when the kernel is compiled; sizes and strides are not.
    """

    def __init__(
        self,
        kernel: type[Kernel],
        key: LaunchKey,
        operands: Sequence[Callable[[Tensor], Tensor]],
        scalars: tuple,
        options: dict[str, Any],
    ):
        self.kernel = kernel
        self.target = key.problem.target
        self.device = key.device
        self.operands = operands
        self.scalars = scalars
        self.options = options
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
                recipe.enqueue = compiled(recipe.kernel, recipe.target, **recipe.options)
        bind_context(recipe.device)
        recipe.enqueue(*self.args)


@lru_cache(maxsize=1024)
def compiled(kernel: type[Kernel], target: str, **options: Any) -> Callable[..., object]:
    """A kernel's code for a card: from the cache on disk, or compiled, which takes seconds.

    One compilation serves all sizes and strides. What is returned takes PyTorch's tensors and
    numbers by position, and finds the current stream itself.
    """
    name = disk_cache.name_of(kernel, gpu_arch(target), options)
    if (code := disk_cache.load(name)) is not None:
        return code
    with tempfile.TemporaryDirectory() as folder:
        # Through a file even where nothing is kept: what is loaded from one is called directly, and
        # what `build` returns by a wrapper in Python.
        file = Path(folder) / "kernel.o"
        build(kernel, target, options).export_to_c(str(file), disk_cache.FUNCTION)
        disk_cache.save(name, file)
        return disk_cache.function_in(file)


def build(kernel: type[Kernel], target: str, options: dict[str, Any], flags: str = "") -> Any:
    """The DSL's own object for a compiled kernel; `flags` are more of its options."""
    with _compiling:
        instance = kernel(**options)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)  # the caller's current one
        flags = f"--enable-tvm-ffi --gpu-arch {gpu_arch(target)} {flags}"
        return cute.compile(instance, *instance.signature(), stream, options=flags)


@lru_cache
def has_tvm_ffi() -> bool:
    """Whether the package that launches are called through is installed beside CuTe DSL."""
    return find_spec("tvm_ffi") is not None


@lru_cache
def can_compile_for(target: str) -> bool:
    """Whether the installed CuTe DSL knows a problem's target."""
    try:
        cute.GPUArch(gpu_arch(target))
    except Exception:  # what it raises differs between releases
        return False
    return True


def gpu_arch(target: str) -> str:
    """What CuTe DSL calls a problem's target: "sm_90" is compiled for all of Hopper, as sm_90a."""
    return f"{target}a" if int(target[3:]) >= 90 else target
