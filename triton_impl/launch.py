"""A kernel launch: what is the same from call to call, kept, and what each call adds to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_rosetta.layout import bind_context
from flash_rosetta.problem import Problem


class Recipe:
    """What all launches of one kernel under one `LaunchKey` have in common.

    Args:
        kernel: a @triton.jit function.
        device: the index of a CUDA device, None for the interpreter and for compiling alone.
        grid: the number of programs.
        operands: for each tensor the kernel takes first, what makes its argument.
        scalars: the arguments that follow the tensors.
        options: compile-time arguments, num_warps and num_stages.
    """

    def __init__(
        self,
        kernel: Any,
        device: int | None,
        grid: int,
        operands: Sequence[Callable[[Tensor], Any]],
        scalars: tuple,
        options: dict[str, Any],
    ):
        self.kernel = kernel
        self.device = device
        self.grid = grid
        self.operands = operands
        self.scalars = scalars
        self.options = {**options, "enable_fp_fusion": True}
        self.constants = tuple(
            options[name] for name in kernel.arg_names[len(operands) + len(scalars) :]
        )
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
        if recipe.device is not None:
            bind_context(recipe.device)
        if recipe.enqueue is not None:
            recipe.enqueue(*self.args, *recipe.constants)
            return
        compiled = recipe.kernel[(recipe.grid,)](*self.args, **recipe.options)
        if compiled is not None:  # the interpreter compiles nothing
            # Triton's own launch path would look at every argument again to choose the code.
            recipe.enqueue = compiled[recipe.grid, 1, 1]

    def compile(self) -> Any:
        """Compile for the current target, without running; returns Triton's CompiledKernel."""
        recipe = self.recipe
        return recipe.kernel.warmup(*self.args, grid=(recipe.grid,), **recipe.options)


def dot_precision(problem: Problem) -> str:
    """`input_precision` of every dot: TF32 for fp32 only where PyTorch's setting allows it.

    Without it, fp32 products are split into three TF32 products each ("tf32x3", an error near
    1e-6): "ieee" would leave the tensor cores for FMAs whose operands do not fit the registers.
    """
    if problem.dtype != torch.float32:
        return "ieee"
    return "tf32" if problem.allow_tf32 else "tf32x3"
