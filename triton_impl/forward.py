"""FlashAttention-2 forward in Triton (arXiv 2307.08691, algorithm 1).

Shapes
    q [batch, num_heads, seqlen_q, head_dim], k and v [batch, num_kv_heads, seqlen_k, head_dim]
    o [batch, num_heads, seqlen_q, head_dim] in q's dtype, lse [batch, num_heads, seqlen_q] fp32

Steps of one program, which owns one query tile of one head
    1. load the query tile
    2. for each key tile that some row sees: S = Q K^T; mask S if some row does not see all of the
       tile; online softmax, in which m and l follow the row maximum and sum; O += P V
    3. divide by the row sums, write o and lse
Key tiles that no row sees are never visited.

Constraints
    head_dim 1 to 256, padded to a power of two in the tile; fp16, bf16, fp32; any strides.

What lives where
    registers: S and P [tile_q, tile_k], acc [tile_q, head_dim], m [tile_q], l [tile_q, 8], in fp32
    shared memory: the query tile, and a ring of num_stages key and value tiles filled ahead
    HBM: q, k, v read; o, lse written; never S or P
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_rosetta.kernels import exponent_scale
from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.launch import Launch, Recipe, dot_precision
from flash_rosetta.triton_impl.tiles import Tile, padded_head_dim, tiles_for
from flash_rosetta.triton_impl.tiling import (
    can_use_tma,
    load_tile,
    operand,
    pointer,
    store_tile,
)


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, tile: Tile | None = None
) -> tuple[Launch, Tensor, Tensor]:
    """The launch that computes o and lse, and the tensors it will fill.

    `tile` replaces the one that `tiles_for` would choose.
    """
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    sizes = problem.batch, problem.num_heads, problem.seqlen_q
    lse = q.new_empty(sizes, dtype=torch.float32)
    return _recipe(launch_key(problem, q, k, v), tile).launch(q, k, v, o, lse), o, lse


@lru_cache(maxsize=4096)  # a small problem's time is mostly what the host does before it runs
def _recipe(key: LaunchKey, tile: Tile | None) -> Recipe:
    problem = key.problem
    tile = tile or tiles_for(problem).forward
    factor, _, sign = exponent_scale(problem)
    return recipe_with(
        forward_kernel,
        key,
        tile,
        factor,
        can_use_tma(problem, *key.layouts),
        SIGN=int(sign),
        EVEN_K=problem.seqlen_k % tile.tile_k == 0,
        Q_IN_REGISTERS=tile.q_in_registers,
    )


def recipe_with(
    kernel: Any, key: LaunchKey, tile: Tile, factor: float, tma: bool, **options: Any
) -> Recipe:
    """What launches of a forward kernel have in common; `options`: what it alone is compiled with.

    `factor`: what it multiplies scores by; `tma`: the copy engine moves its tiles.
    """
    problem = key.problem
    q, k, v = key.layouts
    width = padded_head_dim(problem.head_dim)
    return Recipe(
        kernel,
        key.device,
        grid=triton.cdiv(problem.seqlen_q, tile.tile_q) * problem.num_heads * problem.batch,
        operands=(
            operand(q, tile.tile_q, width, tma),
            operand(k, tile.tile_k, width, tma),
            operand(v, tile.tile_k, width, tma),
            operand(contiguous(*q.shape), tile.tile_q, width, tma),
            pointer,
        ),
        scalars=(
            factor,
            problem.num_heads,
            problem.group_size,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.head_dim,
            problem.causal_offset,
        ),
        options={
            "HEAD_DIM": width,
            "TILE_Q": tile.tile_q,
            "TILE_K": tile.tile_k,
            "IS_CAUSAL": problem.is_causal,
            "TMA": tma,
            "PRECISION": dot_precision(problem),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **options,
        },
    )


HUGE = tl.constexpr(2.0**28)
"""Base-2 scores beyond this are recomputed exactly: see `online_softmax`."""


# One compilation serves all sizes; only head_dim is looked at, on which the width of loads depends.
SIZES = ("num_heads", "group_size", "seqlen_q", "seqlen_k", "causal_offset")


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
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
    EVEN_K: tl.constexpr,
    SIGN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    Q_IN_REGISTERS: tl.constexpr,
):
    batch, head, q_start = tile_of_program(num_heads, seqlen_q, TILE_Q, IS_CAUSAL)
    kv_head = head // group_size
    q_tile = load_tile(q, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
    if Q_IN_REGISTERS:
        # Loaded tiles feed the tensor core from shared memory, computed ones from registers. The
        # rows past seqlen_q are zero before this already.
        q_tile = tl.where((q_start + tl.arange(0, TILE_Q) < seqlen_q)[:, None], q_tile, 0.0)
    acc, m, l = online_softmax(
        q_tile, k, v, batch, kv_head, q_start, factor, seqlen_k, head_dim, causal_offset,
        HEAD_DIM, TILE_Q, TILE_K, IS_CAUSAL, EVEN_K, SIGN, TMA, PRECISION, False,
    )  # fmt: skip
    magnitude = tl.where(tl.abs(m) < float("inf"), tl.abs(m), 0.0)
    if tl.max(magnitude, 0) > HUGE:
        acc, m, l = online_softmax(
            q_tile, k, v, batch, kv_head, q_start, factor, seqlen_k, head_dim, causal_offset,
            HEAD_DIM, TILE_Q, TILE_K, IS_CAUSAL, EVEN_K, SIGN, TMA, PRECISION, True,
        )  # fmt: skip

    rows = q_start + tl.arange(0, TILE_Q)
    lse_rows = (m + tl.log2(l)) * 0.6931471805599453  # ln 2
    lse_head = lse + (tl.cast(batch, tl.int64) * num_heads + head) * seqlen_q
    tl.store(lse_head + rows, lse_rows, mask=rows < seqlen_q)
    if IS_CAUSAL:
        # A row that sees no key has l = 0 and gets o = 0. A row whose seen scores are all -inf has
        # l = 0 as well, but must get NaN, as softmax gives.
        l = tl.where(rows + causal_offset < 0, 1.0, l)
    o_tile = (acc / l[:, None]).to(q_tile.dtype)
    store_tile(o, o_tile, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)


@triton.jit
def online_softmax(
    q_tile, k, v, batch, kv_head, q_start, factor, seqlen_k, head_dim, causal_offset,
    HEAD_DIM: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, IS_CAUSAL: tl.constexpr,
    EVEN_K: tl.constexpr, SIGN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """acc = sum of P V, and P's row maximum m (of base-2 scores) and row sum l, over all keys.

    The scale is folded into the exponent, one multiply-add a score, and exp2 replaces exp. `factor`
    is |scale| log2(e): a negative scale flips the scores instead, so that a maximum stays one.

    The multiply-add rounds once where m = factor * max(s) was rounded before. Exponents are off by
    up to half a unit in the last place of m for that, but all of a row by the same amount, which
    cancels in P / l. Beyond 2^28 it overflows instead: EXACT subtracts first, at one more
    instruction a score.
    """
    full, end = key_ranges(q_start, seqlen_k, causal_offset, TILE_Q, IS_CAUSAL)
    m = tl.full([TILE_Q], float("-inf"), tl.float32)
    l = tl.zeros([TILE_Q, 8], tl.float32)
    acc = tl.zeros([TILE_Q, HEAD_DIM], tl.float32)
    for k_start in tl.range(0, end, TILE_K):
        k_tile = load_tile(k, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # (1) S = Q K^T [tile_q, tile_k]
        v_tile = load_tile(v, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
        if SIGN < 0:
            s = -s
        elif SIGN == 0:
            s *= 0.0
        if IS_CAUSAL or not EVEN_K:
            if k_start + TILE_K > full:
                seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, TILE_K, IS_CAUSAL)
                s = tl.where(seen, s, float("-inf"))
        s_max = tl.max(s, 1)
        m_new = tl.maximum(m, s_max if EXACT else s_max * factor)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # (-inf) - (-inf) would be NaN
        if EXACT:
            alpha = tl.exp2((m - m_safe) * factor)
            p = tl.exp2((s - m_safe[:, None]) * factor)
        else:
            alpha = tl.exp2(m - m_safe)
            p = tl.exp2(s * factor - m_safe[:, None])
        # A tensor core leaves columns j, j + 8, j + 16, ... of a row to one thread, so that these
        # partial sums need no exchange between threads; they are added once, after the loop.
        l = l * alpha[:, None] + tl.sum(p.reshape([TILE_Q, TILE_K // 8, 8]), 1)
        p = p.to(v_tile.dtype)
        acc = tl.dot(p, v_tile, acc * alpha[:, None], input_precision=PRECISION)  # O += P V
        m = m_new
    return acc, m * factor if EXACT else m, tl.sum(l, 1)


@triton.jit
def tile_of_program(num_heads, seqlen, TILE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """The batch, head and first row of the tile that this program owns.

    Programs of one head are neighbours, so that its keys and values stay in L2. In a causal problem
    the last query tile sees the most keys: it starts first, and the short ones fill the gaps.
    """
    num_tiles = tl.cdiv(seqlen, TILE)
    tile = tl.program_id(0) % num_tiles
    if LAST_FIRST:
        tile = num_tiles - 1 - tile
    batch_head = tl.program_id(0) // num_tiles
    return batch_head // num_heads, batch_head % num_heads, tile * TILE


@triton.jit
def key_ranges(q_start, seqlen_k, causal_offset, TILE_Q: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """`full`, `end`: each row of the query tile sees keys [0, full), none sees a key past end."""
    full = seqlen_k
    end = seqlen_k
    if IS_CAUSAL:
        full = tl.maximum(tl.minimum(full, q_start + causal_offset + 1), 0)
        end = tl.maximum(tl.minimum(end, q_start + causal_offset + TILE_Q), 0)
    return full, end


@triton.jit
def visible(
    q_start,
    k_start,
    seqlen_k,
    causal_offset,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """[tile_q, tile_k], true where the row sees the key."""
    keys = k_start + tl.arange(0, TILE_K)
    seen = (keys < seqlen_k)[None, :]
    if IS_CAUSAL:
        rows = q_start + tl.arange(0, TILE_Q)
        seen = seen & (keys[None, :] <= rows[:, None] + causal_offset)
    return seen
