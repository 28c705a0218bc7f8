"""A kernel launch as data, so that one description can be run, or only compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flash_rosetta.problem import Problem


@dataclass(frozen=True, slots=True)
class Launch:
    """One Triton kernel, its number of programs, its arguments and its compile-time options."""

    kernel: Any
    grid: int
    args: tuple
    options: dict[str, Any]

    def run(self) -> None:
        """Enqueue on the current stream of the current device."""
        self.kernel[(self.grid,)](*self.args, **self.options)

    def compile(self) -> Any:
        """Compile for the current target, without running; returns Triton's CompiledKernel."""
        return self.kernel.warmup(*self.args, grid=(self.grid,), **self.options)


def dot_precision(problem: Problem) -> str:
    """`input_precision` of every dot: TF32 only where PyTorch's setting allows it."""
    return "tf32" if problem.dtype == torch.float32 and problem.allow_tf32 else "ieee"
