"""What the kernel folders have in common: what none of them takes, and what they compile for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flash_rosetta.problem import Problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
SMALLEST_TILE = 16
MAX_TILES = 2**31 - 1  # programs are counted in 32 bits
MAX_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)


def refused_target(target: str) -> list[str]:
    """Why kernels that need an NVIDIA card with tensor cores for bf16 cannot run on a target."""
    if target.startswith("sm_") and int(target[3:]) >= 80:
        return []
    return [f"target {target} is not an NVIDIA GPU of compute capability 8.0 or later"]


def refused_sizes(problem: Problem, max_seqlen: int) -> list[str]:
    """Why kernels cannot run a problem on any card: its dtype, sizes or scale."""
    reasons = []
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype} is not among {', '.join(map(str, DTYPES))}")
    if problem.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim {problem.head_dim} is above {MAX_HEAD_DIM}")
    if problem.head_dim_v != problem.head_dim:
        reasons.append(f"head_dim_v {problem.head_dim_v} differs from head_dim {problem.head_dim}")
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > max_seqlen:
        reasons.append(f"a seqlen of {longest} is above {max_seqlen}")
    most_tiles = -(-longest // SMALLEST_TILE) * problem.num_heads * problem.batch
    if most_tiles > MAX_TILES:
        reasons.append(
            f"batch {problem.batch} x num_heads {problem.num_heads} x seqlen {longest} makes "
            f"{most_tiles} tiles of {SMALLEST_TILE} rows, above {MAX_TILES}"
        )
    if abs(problem.scale) > MAX_SCALE:
        reasons.append(f"scale {problem.scale} times log2(e) does not fit fp32")
    return reasons


def exponent_scale(problem: Problem) -> tuple[float, float, float]:
    """A problem's scale as forward kernels fold it into exp2: |scale| log2(e), the next power of
    two, and the scale's sign.

    A factor that fp32 cannot hold is none: then it is one, and the sign, by which the scores are
    multiplied, zero.
    """
    factor = abs(problem.scale) * math.log2(math.e)
    if factor < torch.finfo(torch.float32).tiny:
        return 1.0, 1.0, 0.0
    return factor, 2.0 ** math.ceil(math.log2(factor)), math.copysign(1.0, problem.scale)


def last_key_offset(problem: Problem) -> int:
    """What added to a query's number gives the last key that it may see.

    Where nothing is masked, that is any offset which lets the first query see the last key.
    """
    return problem.causal_offset if problem.is_causal else problem.seqlen_k


def plan_without_memory(
    problem: Problem, plan_forward: Callable[..., Any], plan_backward: Callable[..., Any]
) -> list[Any]:
    """The launches that a folder's two plans make for a problem, to compile them alone.

    They are planned on contiguous tensors that have no memory: only their sizes, strides and
    alignment matter to a compiler. The backward's come where `problem.needs_backward`.
    """
    with torch.device("meta"):
        q = torch.empty(
            (problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim),
            dtype=problem.dtype,
        )
        k = torch.empty(
            (problem.batch, problem.num_kv_heads, problem.seqlen_k, problem.head_dim),
            dtype=problem.dtype,
        )
        launch, o, lse = plan_forward(q, k, k, problem)
        if not problem.needs_backward:
            return [launch]
        launches, *_ = plan_backward(q, lse, q, k, k, o, lse, problem)
    return [launch, *launches]
