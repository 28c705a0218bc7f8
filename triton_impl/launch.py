"""A kernel launch as data, so that one description can be run, or only compiled."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_rosetta.problem import Problem

MAX_COMPILED = 4096
_compiled: dict[tuple, tuple[Any, tuple]] = {}
_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Launch:
    """One Triton kernel, its number of programs, its arguments and its compile-time options.

    Launches of one kernel whose `key` is equal run the same compiled code: `launch_key` makes one.
    """

    kernel: Any
    grid: int
    args: tuple
    options: dict[str, Any]
    key: LaunchKey

    def run(self) -> None:
        """Enqueue on the current stream of the current device."""
        if self.key.device is not None:
            _bind_context(self.key.device)
        known = _compiled.get((self.kernel, self.key))
        if known is not None:
            # Triton's own launch path would look at every argument again to choose the code.
            compiled, constants = known
            compiled[self.grid, 1, 1](*self.args, *constants)
            return
        compiled = self.kernel[(self.grid,)](*self.args, **self.options, enable_fp_fusion=True)
        if compiled is not None:  # the interpreter compiles nothing
            if len(_compiled) >= MAX_COMPILED:
                _compiled.clear()
            names = self.kernel.arg_names[len(self.args) :]
            constants = tuple(self.options[name] for name in names)
            _compiled[self.kernel, self.key] = compiled, constants

    def compile(self) -> Any:
        """Compile for the current target, without running; returns Triton's CompiledKernel."""
        options = {**self.options, "enable_fp_fusion": True}
        return self.kernel.warmup(*self.args, grid=(self.grid,), **options)


class Layout(NamedTuple):
    """How a tensor lies in memory, as far as it matters which code moves it."""

    shape: torch.Size
    stride: tuple[int, ...]
    misalignment: int  # bytes past a multiple of 16


class LaunchKey(NamedTuple):
    """All that Triton's choice of compiled code can depend on; exact, so that equal means equal."""

    problem: Problem
    device: int | None  # the index of a CUDA device
    layouts: tuple[Layout | None, ...]


def launch_key(problem: Problem, *tensors: Tensor | None) -> LaunchKey:
    """The key of launches on behalf of `problem` that read `tensors`."""
    layouts = tuple(
        None if t is None else Layout(t.shape, t.stride(), t.data_ptr() % 16) for t in tensors
    )
    return LaunchKey(problem, tensors[0].device.index, layouts)


def _bind_context(device: int) -> None:
    """Make CUDA's context current in this thread.

    PyTorch leaves that to its first call of CUDA, which may come after ours: Triton describes
    tensors to the copy engine before it launches, and fails in a thread without a context.
    """
    if not getattr(_thread, "bound", False):
        torch.cuda.set_device(device)
        _thread.bound = True


def dot_precision(problem: Problem) -> str:
    """`input_precision` of every dot: TF32 for fp32 only where PyTorch's setting allows it.

    Without it, fp32 products are split into three TF32 products each ("tf32x3", an error near
    1e-6): "ieee" would leave the tensor cores for FMAs whose operands do not fit the registers.
    """
    if problem.dtype != torch.float32:
        return "ieee"
    return "tf32" if problem.allow_tf32 else "tf32x3"
