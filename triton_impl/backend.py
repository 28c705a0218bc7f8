"""The Triton backend: what it can run, and how its kernels are put together."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from flash_rosetta.backend import KernelReport
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.backward import plan_backward
from flash_rosetta.triton_impl.forward import plan_forward

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
INTERPRETED = triton.knobs.runtime.interpret
"""Whether the kernels were defined under TRITON_INTERPRET=1, which runs them on the CPU in NumPy."""


class TritonBackend:
    """FlashAttention-2 forward and two-pass backward; see `forward.py` and `backward.py`."""

    name = "triton"

    def why_not(self, problem: Problem) -> list[str]:
        reasons = [*refusals(problem)]
        return reasons

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        launches, o, lse = plan_forward(q, k, v, problem)
        for launch in launches:
            launch.run()
        return o, lse

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
        launches, dq, dk, dv = plan_backward(do, dlse, q, k, v, o, lse, problem)
        for launch in launches:
            launch.run()
        return dq, dk, dv

    def compile_only(self, problem: Problem) -> list[KernelReport]:
        from flash_rosetta.triton_impl.compile_only import compile_only

        return compile_only(problem)


def refusals(problem: Problem) -> list[str]:
    """Why Triton's kernels cannot run `problem`: target, dtype, sizes."""
    reasons = []
    if problem.target == "cpu":
        if not INTERPRETED:
            reasons.append("target cpu needs Triton's interpreter: set TRITON_INTERPRET=1 before importing triton")
    elif INTERPRETED:
        reasons.append(f"target {problem.target} cannot run while TRITON_INTERPRET=1 interprets the kernels")
    elif not problem.target.startswith("sm_") or int(problem.target[3:]) < 80:
        reasons.append(f"target {problem.target} is not an NVIDIA GPU of compute capability 8.0 or later")
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} is not among {', '.join(map(str, DTYPES))}")
    if problem.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}")
    if problem.head_dim_v != problem.head_dim:
        reasons.append(f"head_dim_v {problem.head_dim_v} differs from head_dim {problem.head_dim}")
    return reasons


backend = TritonBackend()
