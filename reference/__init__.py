"""Attention in plain PyTorch: the oracle, and FlashAttention tile by tile.

`backend` runs `tiled`, so that the text which the kernels translate is itself under test. It takes
every problem of the contract, fp64 and any head_dim_v included, on any device, but for a scale that
its scores cannot hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_rosetta.problem import Problem, accumulate_dtype
from flash_rosetta.reference import tiled


class ReferenceBackend:
    """FlashAttention-2 in PyTorch loops; deterministic, linear in memory, and slow."""

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        wide = accumulate_dtype(problem.dtype)
        if abs(problem.scale) > torch.finfo(wide).max:
            return [f"scale {problem.scale} does not fit {wide}"]
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        return tiled.forward(q, k, v, problem)

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return tiled.backward(do, dlse, q, k, v, o, lse, problem)


backend = ReferenceBackend()
