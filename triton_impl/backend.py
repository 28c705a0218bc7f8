"""The Triton backend: what it can run, and in which order its kernels are launched."""

from __future__ import annotations

from torch import Tensor

from flash_rosetta.backend import Backend, KernelReport
from flash_rosetta.kernels import DTYPES, refused_sizes, refused_target
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl import variants
from flash_rosetta.triton_impl.backward import plan_backward
from flash_rosetta.triton_impl.compile_only import compile_only
from flash_rosetta.triton_impl.forward import plan_forward
from flash_rosetta.triton_impl.interpreter import INTERPRETED, faults
from flash_rosetta.variants import ForwardTileSize

MAX_SEQLEN = 2**31 - 1024  # rows are counted in 32 bits, a tile past the last one included


class TritonBackend:
    """FlashAttention-2 with a two-pass backward; see `forward.py` and `backward.py`.

    Deterministic. fp32 is multiplied in TF32 where PyTorch's matmul precision allows it, else in
    three TF32 products for each, which keeps about fp32's accuracy.
    """

    name = "triton"

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
        return variants.tile_sizes()

    def with_tile(self, size: ForwardTileSize) -> Backend:
        return variants.with_tile(self, size)

    def shared_bytes(self, size: ForwardTileSize, problem: Problem) -> int:
        return variants.shared_bytes(size, problem)


def refusals(problem: Problem) -> list[str]:
    """Why the kernels of this folder cannot run `problem`: its target, dtype or sizes."""
    reasons = refused_sizes(problem, MAX_SEQLEN)
    target = problem.target
    if target == "cpu" and INTERPRETED:
        return reasons + (list(faults(problem.dtype)) if problem.dtype in DTYPES else [])
    if target == "cpu":
        cause = "needs Triton's interpreter: set TRITON_INTERPRET=1 before importing triton"
    elif INTERPRETED:
        cause = "cannot run while TRITON_INTERPRET=1 interprets the kernels"
    else:
        return [*refused_target(target), *reasons]
    return [f"target {target} {cause}", *reasons]


backend = TritonBackend()
baseline = variants.rung(backend, "baseline", "triton_baseline")
