"""The CuTe DSL backend: what it can run, and in which order its kernels are launched."""

from __future__ import annotations

from torch import Tensor

from flash_rosetta import hopper
from flash_rosetta.backend import Backend, KernelReport
from flash_rosetta.cute_impl import variants
from flash_rosetta.cute_impl.backward import plan_backward
from flash_rosetta.cute_impl.compile_only import compile_only
from flash_rosetta.cute_impl.forward import plan_forward, plan_portable_forward
from flash_rosetta.cute_impl.launch import can_compile_for, has_tvm_ffi
from flash_rosetta.cute_impl.portable_backward import plan_portable_backward
from flash_rosetta.kernels import refused_sizes, refused_target
from flash_rosetta.problem import Problem
from flash_rosetta.variants import ForwardTileSize

MAX_SEQLEN = 2**30 - 256  # sums of two row numbers are counted in 32 bits


class CuteBackend:
    """FlashAttention-3 on Hopper, FlashAttention-2 elsewhere; see `forward.py` and `backward.py`.

    fp32 is multiplied in TF32 where PyTorch's matmul precision allows it, else in three TF32
    products for each, which keeps about fp32's accuracy.
    """

    name = "cute"
    plan_forward = staticmethod(plan_forward)
    plan_backward = staticmethod(plan_backward)

    def why_not(self, problem: Problem) -> list[str]:
        return refusals(problem)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        launch, o, lse = self.plan_forward(q, k, v, problem)
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
        launches, dq, dk, dv = self.plan_backward(do, dlse, q, k, v, o, lse, problem)
        for launch in launches:
            launch.run()
        return dq, dk, dv

    def compile_only(self, problem: Problem) -> list[KernelReport]:
        return compile_only(problem, self.plan_forward, self.plan_backward)


class VariedCuteBackend(CuteBackend):
    """The same, with the variants of its kernels."""

    def rung(self, name: str) -> Backend:
        return variants.rung(self, name)

    def tile_sizes(self, problem: Problem) -> list[ForwardTileSize]:
        return hopper.tile_sizes()

    def with_tile(self, size: ForwardTileSize) -> Backend:
        return variants.with_tile(self, size)

    def shared_bytes(self, size: ForwardTileSize, problem: Problem) -> int:
        return variants.shared_bytes(size, problem)


class CutePortableBackend(CuteBackend):
    """The kernels of every card, on Hopper as well: to be tested and raced there."""

    name = "cute_portable"
    plan_forward = staticmethod(plan_portable_forward)
    plan_backward = staticmethod(plan_portable_backward)


def refusals(problem: Problem) -> list[str]:
    """Why the kernels of this folder cannot run `problem`: its target, dtype or sizes."""
    target = problem.target
    reasons = refused_target(target)
    if not reasons and not can_compile_for(target):
        reasons.append(f"target {target} is unknown to the installed CuTe DSL")
    if not has_tvm_ffi():
        reasons.append(
            "apache-tvm-ffi, through which kernels are launched, is not installed: "
            "pip install 'flash-rosetta[cute]'"
        )
    return reasons + refused_sizes(problem, MAX_SEQLEN)


backend = VariedCuteBackend()
portable_backend = CutePortableBackend()
