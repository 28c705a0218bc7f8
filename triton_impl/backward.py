"""FlashAttention-2 backward in Triton (arXiv 2307.08691, algorithm 2), in two passes.

Shapes
    do, o, q, dq [batch, num_heads, seqlen_q, head_dim]
    k, v, dk, dv [batch, num_kv_heads, seqlen_k, head_dim]; lse, dlse [batch, num_heads, seqlen_q]

Steps, one kernel each
    1. preprocess: delta = rowsum(dO * O) - dlse, and lse in base 2
    2. dk/dv: a program owns a key tile of one key/value head and visits the query tiles that see it
    3. dq: a program owns a query tile of one head and visits the key tiles that it sees
Both passes recompute P = exp(S - lse). The GEMMs, numbered as in the reference:
    (1) S = Q K^T   (2) dV = P^T dO   (3) dP = dO V^T   (4) dQ = dS K   (5) dK = dS^T Q
    with dS = P * (dP - delta). Two passes repeat (1) and (3), seven GEMMs where one pass has five,
    but need no atomics: every output is written once, by one program, in a fixed order.

Constraints
    head_dim 1 to 256, padded to a power of two in the tile; fp16, bf16, fp32; any strides.

What lives where
    registers: dK and dV [tile_k, head_dim] or dQ [tile_q, head_dim] in fp32; S, P, dP, dS tiles.
        The dk/dv pass computes S and dP transposed, so that P^T and dS^T are the left operands of
        (2) and (5) as they stand in registers.
    shared memory: the tiles a program owns, and a ring of num_stages tiles it visits
    HBM: the inputs, dq, dk, dv, and 8 bytes a query row for delta and the base-2 lse, whose rows
        are padded to a whole tile: past seqlen_q, and where a row sees no key, lse is +inf, which
        makes P zero without a mask
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.forward import SIZES, key_ranges, tile_of_program, visible
from flash_rosetta.triton_impl.launch import Launch, Recipe, dot_precision
from flash_rosetta.triton_impl.tiles import Tile, padded_head_dim, tiles_for
from flash_rosetta.triton_impl.tiling import (
    can_use_tma,
    load_tile,
    operand,
    pointer,
    store_tile,
)

STATS_TILE = 128
"""Rows of delta and lse are padded to a multiple of this, which every tile_q divides."""

PREPROCESS_ROWS = 32
"""Rows of one preprocess program: few, so that a wide row's unaligned loads fit the registers."""


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
    """The three launches that compute dq, dk and dv, and the tensors they will fill."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    lse2, delta = new_stats(q, problem)
    preprocess, dkdv_pass, dq_pass = recipes(launch_key(problem, q, k, v, do, o, lse, dlse))
    launches = [
        preprocess.launch(o, do, lse, lse if dlse is None else dlse, lse2, delta),
        dkdv_pass.launch(q, k, v, do, dk, dv, lse2, delta),
        dq_pass.launch(q, k, v, do, dq, lse2, delta),
    ]
    return launches, dq, dk, dv


def new_stats(q: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Where preprocess writes lse in base 2, and delta: [batch, num_heads, padded_rows] fp32."""
    sizes = problem.batch, problem.num_heads, padded_rows_of(problem)
    return q.new_empty(sizes, dtype=torch.float32), q.new_empty(sizes, dtype=torch.float32)


def padded_rows_of(problem: Problem) -> int:
    """Query rows of a head, rounded up to whole tiles of statistics."""
    return triton.cdiv(problem.seqlen_q, STATS_TILE) * STATS_TILE


@lru_cache(maxsize=4096)
def recipes(key: LaunchKey) -> tuple[Recipe, Recipe, Recipe]:
    """Of preprocess, dk/dv and dq."""
    problem = key.problem
    q, k, v, do, o, lse, dlse = key.layouts
    dq, dkv = contiguous(*q.shape), contiguous(*k.shape)
    padded_rows = padded_rows_of(problem)
    width = padded_head_dim(problem.head_dim)
    tma = can_use_tma(problem, q, k, v, do)
    tiles = tiles_for(problem)

    def read_by_both_passes(tile: Tile) -> tuple:
        return (
            operand(q, tile.tile_q, width, tma),
            operand(k, tile.tile_k, width, tma),
            operand(v, tile.tile_k, width, tma),
            operand(do, tile.tile_q, width, tma),
        )

    scales = problem.scale, problem.scale * math.log2(math.e)
    sizes = (
        problem.group_size,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.head_dim,
        problem.causal_offset,
        padded_rows,
    )

    def options_of(tile: Tile, **others: bool) -> dict:
        return {
            "HEAD_DIM": width,
            "TILE_Q": tile.tile_q,
            "TILE_K": tile.tile_k,
            "IS_CAUSAL": problem.is_causal,
            "TMA": tma,
            "PRECISION": dot_precision(problem),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **others,
        }

    preprocess = Recipe(
        preprocess_kernel,
        key.device,
        grid=padded_rows // PREPROCESS_ROWS * problem.num_heads * problem.batch,
        operands=(
            operand(o, PREPROCESS_ROWS, width, False),
            operand(do, PREPROCESS_ROWS, width, False),
            pointer,
            operand(dlse or lse, PREPROCESS_ROWS, 1, False),
            pointer,
            pointer,
        ),
        scalars=(problem.num_heads, problem.seqlen_q, problem.head_dim, padded_rows),
        options={
            "HEAD_DIM": width,
            "ROWS": PREPROCESS_ROWS,
            "HAS_DLSE": dlse is not None,
            "num_warps": 4,
        },
    )
    tile = tiles.dkdv
    dkdv_pass = Recipe(
        dkdv_kernel,
        key.device,
        grid=triton.cdiv(problem.seqlen_k, tile.tile_k) * problem.num_kv_heads * problem.batch,
        operands=(
            *read_by_both_passes(tile),
            operand(dkv, tile.tile_k, width, tma),
            operand(dkv, tile.tile_k, width, tma),
            pointer,
            pointer,
        ),
        scalars=(*scales, problem.num_kv_heads, *sizes),
        options=options_of(tile, MASK_EVERY_TILE=tile.mask_every_tile),
    )
    tile = tiles.dq
    dq_pass = Recipe(
        dq_kernel,
        key.device,
        grid=triton.cdiv(problem.seqlen_q, tile.tile_q) * problem.num_heads * problem.batch,
        operands=(
            *read_by_both_passes(tile),
            operand(dq, tile.tile_q, width, tma),
            pointer,
            pointer,
        ),
        scalars=(*scales, problem.num_heads, *sizes),
        options=options_of(tile, EVEN_K=problem.seqlen_k % tile.tile_k == 0),
    )
    return preprocess, dkdv_pass, dq_pass


@triton.jit(do_not_specialize=SIZES)
def preprocess_kernel(
    o,
    do,
    lse,
    dlse,
    lse2,
    delta,
    num_heads,
    seqlen_q,
    head_dim,
    padded_rows,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    tile = tl.program_id(0) % (padded_rows // ROWS)
    batch_head = tl.program_id(0) // (padded_rows // ROWS)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = rows < seqlen_q

    o_tile = load_tile(o, batch, head, tile * ROWS, seqlen_q, head_dim, ROWS, HEAD_DIM, False)
    do_tile = load_tile(do, batch, head, tile * ROWS, seqlen_q, head_dim, ROWS, HEAD_DIM, False)
    delta_rows = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if HAS_DLSE:
        base = dlse[0] + batch.to(tl.int64) * dlse[1] + head.to(tl.int64) * dlse[2]
        delta_rows -= tl.load(base + rows.to(tl.int64) * dlse[3], mask=inside, other=0.0)
    lse_rows = tl.load(
        lse + batch_head.to(tl.int64) * seqlen_q + rows, mask=inside, other=float("-inf")
    )
    sees_no_key = lse_rows == float("-inf")
    stats_offset = batch_head.to(tl.int64) * padded_rows + rows
    log2_e: tl.constexpr = 1.4426950408889634
    tl.store(lse2 + stats_offset, tl.where(sees_no_key, float("inf"), lse_rows * log2_e))
    tl.store(delta + stats_offset, tl.where(sees_no_key, 0.0, delta_rows))


# Compiled anew for a group of one head: the loop over it goes, and with it some registers.
@triton.jit(do_not_specialize=("num_kv_heads", "seqlen_q", "seqlen_k", "causal_offset"))
def dkdv_kernel(
    q,
    k,
    v,
    do,
    dk,
    dv,
    lse2,
    delta,
    scale,
    scale_log2,
    num_kv_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    head_dim,
    causal_offset,
    padded_rows,
    HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    MASK_EVERY_TILE: tl.constexpr,
):
    # In a causal problem the first key tile is seen by the most queries, and starts first.
    num_tiles = tl.cdiv(seqlen_k, TILE_K)
    k_start = tl.program_id(0) % num_tiles * TILE_K
    batch_head = tl.program_id(0) // num_tiles
    batch = batch_head // num_kv_heads
    kv_head = batch_head % num_kv_heads

    # No query before `first` sees a key of the tile; from `full` on, each query sees all of them.
    first = 0
    full = 0
    if IS_CAUSAL:
        first = tl.maximum(k_start - causal_offset, 0) // TILE_Q * TILE_Q
        full = k_start + TILE_K - 1 - causal_offset

    k_tile = load_tile(k, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
    v_tile = load_tile(v, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
    dk_acc = tl.zeros([TILE_K, HEAD_DIM], tl.float32)
    dv_acc = tl.zeros([TILE_K, HEAD_DIM], tl.float32)
    for head in range(kv_head * group_size, (kv_head + 1) * group_size):
        stats_head = tl.cast(batch * num_kv_heads * group_size + head, tl.int64) * padded_rows
        for q_start in tl.range(first, seqlen_q, TILE_Q):
            q_tile = load_tile(q, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
            do_tile = load_tile(do, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
            stats = stats_head + q_start + tl.arange(0, TILE_Q)
            lse2_rows = tl.load(lse2 + stats)
            s_t = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)  # (1) S^T = K Q^T
            dp_t = tl.dot(v_tile, do_tile.T, input_precision=PRECISION)  # (3) dP^T = V dO^T
            # Rows of the tile past seqlen_k hold nonsense, which no product mixes into other rows.
            p_t = tl.exp2(s_t * scale_log2 - lse2_rows[None, :])  # [tile_k, tile_q]
            if IS_CAUSAL:
                if MASK_EVERY_TILE or q_start < full:
                    seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, TILE_K, True)
                    p_t = tl.where(seen.T, p_t, 0.0)
            delta_rows = tl.load(delta + stats)
            ds_t = p_t * (dp_t - delta_rows[None, :])
            p_t = p_t.to(do_tile.dtype)
            dv_acc = tl.dot(p_t, do_tile, dv_acc, input_precision=PRECISION)  # (2) dV += P^T dO
            ds_t = ds_t.to(q_tile.dtype)
            dk_acc = tl.dot(ds_t, q_tile, dk_acc, input_precision=PRECISION)  # (5) dK += dS^T Q
    dk_tile = (dk_acc * scale).to(k_tile.dtype)
    dv_tile = dv_acc.to(v_tile.dtype)
    store_tile(dk, dk_tile, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
    store_tile(dv, dv_tile, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q,
    k,
    v,
    do,
    dq,
    lse2,
    delta,
    scale,
    scale_log2,
    num_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    head_dim,
    causal_offset,
    padded_rows,
    HEAD_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    batch, head, q_start = tile_of_program(num_heads, seqlen_q, TILE_Q, IS_CAUSAL)
    kv_head = head // group_size
    full, end = key_ranges(q_start, seqlen_k, causal_offset, TILE_Q, IS_CAUSAL)

    q_tile = load_tile(q, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
    do_tile = load_tile(do, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
    stats = (
        tl.cast(batch * num_heads + head, tl.int64) * padded_rows + q_start + tl.arange(0, TILE_Q)
    )
    lse2_rows = tl.load(lse2 + stats)
    delta_rows = tl.load(delta + stats)
    dq_acc = tl.zeros([TILE_Q, HEAD_DIM], tl.float32)
    for k_start in tl.range(0, end, TILE_K):
        k_tile = load_tile(k, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
        v_tile = load_tile(v, batch, kv_head, k_start, seqlen_k, head_dim, TILE_K, HEAD_DIM, TMA)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # (1) S = Q K^T [tile_q, tile_k]
        dp = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)  # (3) dP = dO V^T
        p = tl.exp2(s * scale_log2 - lse2_rows[:, None])
        if IS_CAUSAL or not EVEN_K:
            if k_start + TILE_K > full:
                seen = visible(q_start, k_start, seqlen_k, causal_offset, TILE_Q, TILE_K, IS_CAUSAL)
                p = tl.where(seen, p, 0.0)
        ds = (p * (dp - delta_rows[:, None])).to(k_tile.dtype)
        dq_acc = tl.dot(ds, k_tile, dq_acc, input_precision=PRECISION)  # (4) dQ += dS K
    dq_tile = (dq_acc * scale).to(q_tile.dtype)
    store_tile(dq, dq_tile, batch, head, q_start, seqlen_q, head_dim, TILE_Q, HEAD_DIM, TMA)
