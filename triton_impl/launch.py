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
        self.kernel[(self.grid,)](*self.args, **self.options, enable_fp_fusion=True)

    def compile(self) -> Any:
        """Compile for the current target, without running; returns Triton's CompiledKernel."""
        return self.kernel.warmup(
            *self.args, grid=(self.grid,), **self.options, enable_fp_fusion=True
        )


def dot_precision(problem: Problem) -> str:
    """`input_precision` of every dot: TF32 for fp32 only where PyTorch's setting allows it.

    Without it, fp32 products are split into three TF32 products each ("tf32x3", an error near
    1e-6): "ieee" would leave the tensor cores for FMAs whose operands do not fit the registers.
    """
    if problem.dtype != torch.float32:
        return "ieee"
    return "tf32" if problem.allow_tf32 else "tf32x3"
