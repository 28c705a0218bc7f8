"""Stand-in until the kernels are here."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_rosetta.cute_impl.forward import _recipe
from flash_rosetta.cute_impl.launch import Launch
from flash_rosetta.layout import launch_key
from flash_rosetta.problem import Problem


def plan_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    problem: Problem,
) -> tuple[list[Launch], Tensor, Tensor, Tensor]:
    """The launches that compute dq, dk and dv, and the tensors they will fill."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    return [_recipe(launch_key(problem, q, k, v)).launch(q, k, v, dq, lse)], dq, dk, dv
