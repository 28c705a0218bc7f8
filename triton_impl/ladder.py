"""The ladder: a FlashAttention-2 forward that starts slow, and gets one optimisation a rung.

The rungs are those of `flash_rosetta.variants`. They are one kernel, whose flags, known when it is
compiled, each stand for a rung: the first has 16 x 16 tiles and nothing done for speed, the last
one here lacks only what `forward.py` does beyond.

Shapes
    q, o [batch, num_heads, seqlen_q, head_dim], k and v [batch, num_kv_heads, seqlen_k, head_dim]
    lse [batch, num_heads, seqlen_q] fp32

Steps of one program, which owns one query tile of one head
    1. load the query tile
    2. for each key tile: S = Q K^T, mask, online softmax, O += P V
    3. divide by the row sums, write o and lse

Constraints
    forward only; otherwise those of `forward.py`
    specialize: Triton's pass for Hopper splits kernels of 4 warps in which no `if` has an else, and
        Triton makes one for each `if` that changes a variable. So this rung masks every tile and
        always subtracts before it scales, as the rungs below do only where they must.

What lives where
    registers: what a program works on, S and P [tile_q, tile_k], acc [tile_q, head_dim] in fp32
    shared memory: from the rung tiles on a ring of num_stages key and value tiles filled ahead,
        which is how Triton pipelines a loop when it is told a number of stages
    HBM: q, k, v read; o, lse written
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_rosetta.kernels import exponent_scale
from flash_rosetta.layout import LaunchKey, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.compile_only import compile_only
from flash_rosetta.triton_impl.forward import (
    HUGE,
    SIZES,
    key_ranges,
    recipe_with,
    tile_of_program,
    visible,
)
from flash_rosetta.triton_impl.launch import Launch, Recipe
from flash_rosetta.triton_impl.tiles import BASELINE, padded_head_dim, tiles_for
from flash_rosetta.triton_impl.tiling import can_use_tma, load_tile, store_tile

RUNGS = ("baseline", "tiles", "skip", "mask", "exp2", "cast", "tma", "specialize")
"""From the bottom."""


def plan_rung(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, rung: str
) -> tuple[Launch, Tensor, Tensor]:
    """The launch that computes o and lse by the kernel of a rung, and the tensors it will fill."""
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return _recipe(launch_key(problem, q, k, v), rung).launch(q, k, v, o, lse), o, lse


DISTRUSTED = {
    "3.6.0": "o is NaN in 19 to 58 % of the rows of long problems on an H200",
    "3.7.1": "not run, but it splits kernels as 3.6.0 does, whose o is NaN",
}
"""Releases whose warps of their own, on sm_90, are not used, and why. Where 3.6.0 was seen to fail,
full and causal at 4096 tokens, the kernel of tma is right. The TTGIR that 3.7.1 makes is 3.6.0's,
but for where constants stand."""


def cannot_specialize(problem: Problem) -> tuple[str, ...]:
    """Why Triton gives this problem no warps that only load, or none to trust; empty if it does.

    Found out by compiling, a second or so for each kernel: what Triton's pass cannot split it
    leaves as it is or fails on, and releases differ. The interpreter has no warps to look at.
    """
    if problem.target == "cpu":
        return ()
    alike = Problem(
        batch=1,
        num_heads=1,
        seqlen_q=128,
        head_dim=padded_head_dim(problem.head_dim),
        dtype=problem.dtype,
        is_causal=problem.is_causal,
        target=problem.target,
    )
    return _not_specialized(alike)


@lru_cache
def _not_specialized(problem: Problem) -> tuple[str, ...]:
    compiler = f"Triton {triton.__version__} for {problem.target}"
    kernel = f"{problem.dtype} and tiles of {problem.head_dim} columns"
    try:
        (report,) = compile_only(problem, forward=partial(plan_rung, rung="specialize"))
    except Exception as error:  # MLIR's passes raise what they like
        cause = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return (f"{compiler} fails to give loads warps of their own for {kernel}: {cause}",)
    if "setmaxnreg" not in report.assembly:
        return (f"{compiler} gives loads no warps of their own for {kernel}",)
    if problem.target == "sm_90" and triton.__version__ in DISTRUSTED:
        cause = DISTRUSTED[triton.__version__]
        return (
            f"{compiler} gives loads warps of their own, not to be trusted: {cause}; "
            "the rung below, tma, does without",
        )
    return ()


@lru_cache(maxsize=4096)
def _recipe(key: LaunchKey, rung: str) -> Recipe:
    problem = key.problem
    has = RUNGS[: RUNGS.index(rung) + 1]
    # What the copy engine cannot move goes by pointers, as in `forward.py`, and by no warp apart.
    tma = "tma" in has and can_use_tma(problem, *key.layouts)
    specialize = tma and "specialize" in has
    factor, _, sign = exponent_scale(problem)
    return recipe_with(
        rung_kernel,
        key,
        tiles_for(problem).forward if "tiles" in has else BASELINE,
        factor if "exp2" in has else problem.scale,
        tma,
        SKIP="skip" in has,
        MASK_ENDS="mask" in has and not specialize,
        EXP2="exp2" in has,
        SIGN=int(sign),
        CAST="cast" in has or problem.dtype == torch.float32,
        SPECIALIZE=specialize,
    )


@triton.jit(do_not_specialize=SIZES)
def rung_kernel(
    q,
    k,
    v,
    o,
    lse,
    factor,
    num_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    head_dim,
    causal_offset,
    HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SKIP: tl.constexpr,
    MASK_ENDS: tl.constexpr,
    EXP2: tl.constexpr,
    SIGN: tl.constexpr,
    CAST: tl.constexpr,
    TMA: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    batch, head, q_start = tile_of_program(num_heads, seqlen_q, TILE_Q, IS_CAUSAL and SKIP)
    kv_head = head // group_size
    q_tile = load_tile(q, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
    acc, m, l = rung_softmax(
        q_tile, k, v, batch, kv_head, q_start, factor, seqlen_k, head_dim, causal_offset,
        HEAD_DIM, TILE_Q, TILE_K, IS_CAUSAL, SKIP, MASK_ENDS, EXP2, SIGN, CAST, TMA, SPECIALIZE,
        PRECISION, SPECIALIZE,
    )  # fmt: skip
    if EXP2 and not SPECIALIZE:
        magnitude = tl.where(tl.abs(m) < float("inf"), tl.abs(m), 0.0)
        if tl.max(magnitude, 0) > HUGE:
            acc, m, l = rung_softmax(
                q_tile, k, v, batch, kv_head, q_start, factor, seqlen_k, head_dim, causal_offset,
                HEAD_DIM, TILE_Q, TILE_K, IS_CAUSAL, SKIP, MASK_ENDS, EXP2, SIGN, CAST, TMA,
                SPECIALIZE, PRECISION, True,
            )  # fmt: skip

    rows = q_start + tl.arange(0, TILE_Q)
    lse_rows = (m + tl.log2(l)) * 0.6931471805599453 if EXP2 else m + tl.log(l)  # ln 2
    lse_head = lse + (tl.cast(batch, tl.int64) * num_heads + head) * seqlen_q
    tl.store(lse_head + rows, lse_rows, mask=rows < seqlen_q)
    if IS_CAUSAL:
        l = tl.where(rows + causal_offset < 0, 1.0, l)  # a row that sees no key gets o = 0
    o_tile = (acc / l[:, None]).to(q_tile.dtype)
    store_tile(o, o_tile, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)


@triton.jit
def rung_softmax(
    q_tile, k, v, batch, kv_head, q_start, factor, seqlen_k, head_dim, causal_offset,
    HEAD_DIM: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, IS_CAUSAL: tl.constexpr,
    SKIP: tl.constexpr, MASK_ENDS: tl.constexpr, EXP2: tl.constexpr, SIGN: tl.constexpr,
    CAST: tl.constexpr, TMA: tl.constexpr, SPECIALIZE: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """acc = sum of P V, and P's row maximum m and row sum l, over all keys.

    `factor` is the scale, and m a maximum of scaled scores; with EXP2 it is |scale| log2(e), m is
    in base 2, and EXACT means what it means in `forward.online_softmax`.
    """
    full, end = key_ranges(q_start, seqlen_k, causal_offset, TILE_Q, IS_CAUSAL)
    if not SKIP:
        end = seqlen_k
    m = tl.full([TILE_Q], float("-inf"), tl.float32)
    l = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, HEAD_DIM], tl.float32)
    for k_start in tl.range(0, end, TILE_K, warp_specialize=SPECIALIZE):
        k_tile = load_tile(k, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # (1) S = Q K^T [tile_q, tile_k]
        v_tile = load_tile(v, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
        if not EXP2:
            s *= factor
        elif SIGN < 0:
            s = -s
        elif SIGN == 0:
            s *= 0.0
        if not MASK_ENDS:
            seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, TILE_K, IS_CAUSAL)
            s = tl.where(seen, s, float("-inf"))
        elif k_start + TILE_K > full:
            seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, TILE_K, IS_CAUSAL)
            s = tl.where(seen, s, float("-inf"))
        s_max = tl.max(s, 1)
        m_new = tl.maximum(m, s_max * factor if EXP2 and not EXACT else s_max)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # (-inf) - (-inf) would be NaN
        if not EXP2:
            alpha = tl.exp(m - m_safe)
            p = tl.exp(s - m_safe[:, None])
        elif EXACT:
            alpha = tl.exp2((m - m_safe) * factor)
            p = tl.exp2((s - m_safe[:, None]) * factor)
        else:
            alpha = tl.exp2(m - m_safe)
            p = tl.exp2(s * factor - m_safe[:, None])
        l = l * alpha + tl.sum(p, 1)
        p_high = p.to(v_tile.dtype)
        acc = tl.dot(p_high, v_tile, acc * alpha[:, None], input_precision=PRECISION)  # O += P V
        if not CAST:
            p_low = (p - p_high.to(tl.float32)).to(v_tile.dtype)  # what rounding P took away
            acc = tl.dot(p_low, v_tile, acc, input_precision=PRECISION)
        m = m_new
    return acc, m * factor if EXACT else m, l
