"""The TileLang backend: what it can run, and in which order its kernels are launched."""

from __future__ import annotations

import torch
from tilelang.contrib.cc import get_cplus_compiler
from torch import Tensor

from flash_rosetta import hopper
from flash_rosetta.backend import Backend, KernelReport
from flash_rosetta.kernels import MAX_HEAD_DIM, refused_sizes, refused_target
from flash_rosetta.problem import Problem
from flash_rosetta.tilelang_impl import variants
from flash_rosetta.tilelang_impl.backward import plan_backward
from flash_rosetta.tilelang_impl.compile_only import compile_only
from flash_rosetta.tilelang_impl.forward import plan_forward
from flash_rosetta.tilelang_impl.launch import find_nvcc
from flash_rosetta.variants import ForwardTileSize

MAX_SEQLEN = 2**30 - 256  # sums of two row numbers are counted in 32 bits
SMALL_SHARED_MEMORY = ("sm_86", "sm_89", "sm_120", "sm_121")  # 99 KB a block


class TileLangBackend:
    """FlashAttention-2 with a two-pass backward; see `forward.py` and `backward.py`.

    Deterministic. fp32 is multiplied in TF32 where PyTorch's matmul precision allows it, else in
    three TF32 products for each, which keeps about fp32's accuracy.
    """

    name = "tilelang"

    def why_not(self, problem: Problem) -> list[str]:
        return refusals(problem)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        launch, o, lse = plan_forward(q, k, v, problem)
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
        return compile_only(problem)

    def rung(self, name: str) -> Backend:
        return variants.rung(self, name)

    def tile_sizes(self, problem: Problem) -> list[ForwardTileSize]:
        return hopper.tile_sizes()

    def with_tile(self, size: ForwardTileSize) -> Backend:
        return variants.with_tile(self, size)

    def shared_bytes(self, size: ForwardTileSize, problem: Problem) -> int:
        return variants.shared_bytes(size, problem)


def refusals(problem: Problem) -> list[str]:
    """Why the kernels of this folder cannot run `problem`: its target, dtype or sizes."""
    target = problem.target
    reasons = refused_target(target) or _missing_compilers()
    reasons += refused_sizes(problem, MAX_SEQLEN)
    if (
        target in SMALL_SHARED_MEMORY
        and problem.dtype == torch.float32
        and not problem.allow_tf32
        and 128 < problem.head_dim <= MAX_HEAD_DIM
    ):
        reasons.append(
            f"exact fp32 at head_dim {problem.head_dim} needs more shared memory than {target} "
            "has: torch.set_float32_matmul_precision('high') allows TF32, or keep head_dim to 128"
        )
    return reasons


def _missing_compilers() -> list[str]:
    if not torch.cuda.is_available():
        return []  # to lower alone takes neither
    if find_nvcc() is None:
        return [
            "nvcc, with which TileLang compiles, is not found: install CUDA's toolkit, or set "
            "CUDA_HOME to where it is"
        ]
    if get_cplus_compiler() is None:
        return ["a C++ compiler, which nvcc needs, is not found: install g++"]
    return []


backend = TileLangBackend()
