"""Stand-in until the kernels are here."""

from __future__ import annotations

from functools import lru_cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from torch import Tensor

from flash_rosetta.copy_engine import as_is, operand
from flash_rosetta.cute_impl.launch import Launch, Recipe
from flash_rosetta.cute_impl.tiling import can_use_tma, strided
from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> tuple[Launch, Tensor, Tensor]:
    """The launch that computes o and lse, and the tensors it will fill."""
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    sizes = problem.batch, problem.num_heads, problem.seqlen_q
    lse = q.new_empty(sizes, dtype=torch.float32)
    return _recipe(launch_key(problem, q, k, v)).launch(q, k, v, o, lse), o, lse


@lru_cache(maxsize=4096)  # a small problem's time is mostly what the host does before it runs
def _recipe(key: LaunchKey) -> Recipe:
    problem = key.problem
    q, k, v = key.layouts
    o = contiguous(*q.shape)
    tma = can_use_tma(problem, q, k, v)
    operands = *(operand(t, tma) for t in (q, k, v, o)), as_is
    options = {"dtype": problem.dtype, "tma": tma}
    return Recipe(Forward, key, operands, (1.0, problem.group_size), options)


class Forward:
    def __init__(self, *, dtype: torch.dtype, tma: bool):
        self.dtype = dtype
        self.tma = tma

    def signature(self) -> tuple:
        fakes = [strided(self.dtype, 4, self.tma) for _ in range(4)]
        return *fakes, strided(torch.float32, 3, False), cutlass.Float32(1), cutlass.Int32(1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        factor: cutlass.Float32,
        group_size: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(o, lse, factor).launch(
            grid=(o.shape[0] * o.shape[1], 1, 1),
            block=(128, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, o: cute.Tensor, lse: cute.Tensor, factor: cutlass.Float32):
        thread, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        numbers = smem.allocate_tensor(cutlass.Float32, cute.make_layout(128), 128)
        numbers[thread] = factor
        cute.arch.sync_threads()
        lse[0, program, thread] = numbers[127 - thread]
