"""FlashAttention-2 backward in one pass and atomic additions: the rung beside `backward.py`.

Shapes and memory as in `backward.py`, and
    dq_sums [batch, num_heads, padded_rows, padded head_dim] fp32 in HBM, zero at first

Steps
    1. preprocess: as in `backward.py`, and its kernel
    2. one pass: a program owns a key tile of one key/value head, visits the query tiles that see
       it, keeps dK and dV, and adds what the tile gives of each dQ to dq_sums
    3. dq_sums is rounded to dq, by PyTorch's copy: one kernel that only moves data
Five products where two passes take seven:
    (1) S = Q K^T   (2) dV = P^T dO   (3) dP = dO V^T   (4) dQ = dS K   (5) dK = dS^T Q
But additions to one element come in any order, so that equal inputs do not give equal bits.

Constraints
    head_dim 1 to 256, padded as in `backward.py`; fp16 and bf16; any strides.

What lives where
    registers: dK and dV [tile_k, head_dim] in fp32; S^T, P^T, dP^T, and each visit's dQ
    shared memory: the key and value tile, a ring of query and dO tiles, dS^T, of which (4) takes
        the transpose and (5) the tile as it stands; P^T where it does not stay in registers
"""

from functools import lru_cache

import tilelang.language as T
import torch
from torch import Tensor

from flash_rosetta.copy_engine import as_is
from flash_rosetta.layout import LaunchKey, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.tilelang_impl.backward import (
    FULL_ROW,
    alloc_barriers,
    alloc_operand,
    load_next,
    new_stats,
    owned_by,
    policy_of,
    recipes,
    set_operand,
    sizes,
)
from flash_rosetta.tilelang_impl.launch import Launch, Recipe
from flash_rosetta.tilelang_impl.tiles import Tile, atomic_tile_for, padded_head_dim
from flash_rosetta.tilelang_impl.tiling import (
    Engine,
    await_products,
    await_tiles,
    filling,
    load_tile,
    multiply,
    put,
    store_tile,
    strided,
)


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
    """The two launches that compute dq_sums, dk and dv, and these tensors."""
    dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (k, v))
    stats = new_stats(q, problem)
    sums_shape = (*q.shape[:2], stats.shape[3], padded_head_dim(problem.head_dim))
    dq_sums = q.new_zeros(sums_shape, dtype=torch.float32)
    preprocess, one_pass = _recipes(launch_key(problem, q, k, v, do, o, lse, dlse))
    launches = [
        preprocess.launch(o, do, lse, lse if dlse is None else dlse, stats),
        one_pass.launch(q, k, v, do, stats, dk, dv, dq_sums),
    ]
    return launches, dq_sums, dk, dv


def rounded(dq_sums: Tensor, q: Tensor) -> Tensor:
    """dq, of q's shape and dtype."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    return dq.copy_(dq_sums[:, :, : q.shape[2], : q.shape[3]])


@lru_cache(maxsize=4096)
def _recipes(key: LaunchKey) -> tuple[Recipe, Recipe]:
    """Of preprocess and the one pass, which takes what the dk/dv pass takes, and dq_sums."""
    preprocess, dkdv_pass, _ = recipes(key)
    shipped = dkdv_pass.options
    tile = atomic_tile_for(key.problem, shipped["engine"].hopper)
    one_pass = Recipe(
        one_pass_kernel,
        key,
        operands=(*dkdv_pass.operands, as_is),
        scalars=dkdv_pass.scalars,
        options={
            "dtype": shipped["dtype"],
            "width": shipped["width"],
            "engine": Engine(shipped["engine"].hopper, tile.threads),
            "tile": tile,
        },
    )
    return preprocess, one_pass


def one_pass_kernel(*, dtype: str, width: int, engine: Engine, tile: Tile):
    batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, padded_rows = sizes()
    q_shape = batch_size, num_heads, seqlen_q, head_dim
    k_shape = batch_size, num_kv_heads, seqlen_k, head_dim
    tile_q, tile_k, num_stages = tile.tile_q, tile.tile_k, tile.num_stages
    policy = policy_of(tile, engine)
    dq_policy = T.GemmWarpPolicy.Square
    if engine.hopper:  # a warpgroup takes no fewer than 64 rows
        dq_policy = FULL_ROW if 2 * tile_q >= engine.threads else T.GemmWarpPolicy.FullCol

    @T.prim_func
    def one_pass(
        q: strided("q", q_shape, dtype, engine),
        k: strided("k", k_shape, dtype, engine),
        v: strided("v", k_shape, dtype, engine),
        do: strided("do", q_shape, dtype, engine),
        stats: strided("stats", (batch_size, num_heads, 2, padded_rows), "float32", engine),
        dk: strided("dk", k_shape, dtype, engine),
        dv: strided("dv", k_shape, dtype, engine),
        dq_sums: T.Tensor((batch_size, num_heads, padded_rows, width), "float32"),
        scale: T.float32,
        scale_log2: T.float32,
        causal_offset: T.int32,
    ):
        num_programs = T.ceildiv(seqlen_k, tile_k) * num_kv_heads * batch_size
        with T.Kernel(num_programs, threads=engine.threads) as program:
            T.annotate_min_blocks_per_sm(tile.programs)
            k_tile = T.alloc_shared((1, tile_k, width), dtype)
            v_tile = T.alloc_shared((1, tile_k, width), dtype)
            q_tiles = T.alloc_shared((num_stages, tile_q, width), dtype)
            do_tiles = T.alloc_shared((num_stages, tile_q, width), dtype)
            stats_tiles = T.alloc_shared((num_stages, 2, tile_q), "float32")
            s_t = T.alloc_fragment((tile_k, tile_q), "float32")
            dp_t = T.alloc_fragment((tile_k, tile_q), "float32")
            p_t = alloc_operand(engine, tile, (tile_k, tile_q), dtype)
            ds_t = T.alloc_shared((1, tile_k, tile_q), dtype)
            dk_acc = T.alloc_fragment((tile_k, width), "float32")
            dv_acc = T.alloc_fragment((tile_k, width), "float32")
            dq_tile = T.alloc_fragment((tile_q, width), "float32")
            filled_kv = alloc_barriers(engine, 1)
            filled = alloc_barriers(engine, num_stages)

            # In a causal problem the first key tile is seen by the most queries: it starts first.
            num_tiles = T.ceildiv(seqlen_k, tile_k)
            number, own_head, own_batch = owned_by(program, num_tiles, num_kv_heads)
            k_start = T.alloc_var("int32", init=number * tile_k)
            kv_head = T.alloc_var("int32", init=own_head)
            batch = T.alloc_var("int32", init=own_batch)

            # No query before `first` sees a key of the tile; from `full` on, each sees all of them.
            first = T.alloc_var("int32")
            first = T.max(k_start - causal_offset, 0) // tile_q * tile_q
            full = k_start + tile_k - 1 - causal_offset
            # The query heads of the group follow each other in one loop, and the ring runs through.
            group_size = T.truncdiv(num_heads, num_kv_heads)
            visits_of_one_head = T.max(T.ceildiv(seqlen_q - first, tile_q), 0)
            num_visits = T.alloc_var("int32", init=visits_of_one_head * group_size)
            head = T.alloc_var("int32", init=kv_head * group_size)
            q_start = T.alloc_var("int32", init=first)
            next_head = T.alloc_var("int32", init=kv_head * group_size)
            next_row = T.alloc_var("int32", init=first)

            load_tile(engine, k, batch, kv_head, k_start, k_tile, 0, filled_kv)
            load_tile(engine, v, batch, kv_head, k_start, v_tile, 0, filled_kv)
            filling(engine, filled_kv, 0)
            for early in T.unroll(num_stages):
                if early < num_visits:
                    load_next(engine, q, do, stats, q_tiles, do_tiles, stats_tiles, early, filled,
                              batch, first, next_head, next_row)  # fmt: skip
            T.clear(dk_acc)
            T.clear(dv_acc)
            await_tiles(engine, filled_kv, 0, 0)
            for visit in T.serial(num_visits):
                slot = visit % num_stages
                await_tiles(engine, filled, slot, visit // num_stages)
                # (1) S^T = K Q^T and (3) dP^T = V dO^T
                multiply(
                    engine, k_tile, 0, q_tiles, slot, s_t, policy, transpose_b=True, clear=True
                )
                multiply(
                    engine, v_tile, 0, do_tiles, slot, dp_t, policy, transpose_b=True, clear=True
                )
                await_products(engine, 1, s_t)
                for i, j in T.Parallel(tile_k, tile_q):
                    s_t[i, j] = T.exp2(s_t[i, j] * scale_log2 - stats_tiles[slot, 0, j])
                await_products(engine, 0, dp_t)
                # Keys past seqlen_k are zeros, which in (4) would meet what may be infinite.
                if (q_start < full) | (k_start + tile_k > seqlen_k):
                    for i, j in T.Parallel(tile_k, tile_q):
                        s_t[i, j] = T.if_then_else(
                            k_start + i < T.min(seqlen_k, q_start + j + causal_offset + 1),
                            s_t[i, j],
                            0.0,
                        )
                for i, j in T.Parallel(tile_k, tile_q):
                    set_operand(engine, tile, p_t, i, j, s_t[i, j])
                for i, j in T.Parallel(tile_k, tile_q):
                    ds = s_t[i, j] * (dp_t[i, j] - stats_tiles[slot, 1, j])
                    put(engine, ds_t, 0, i, j, ds)
                if engine.hopper:
                    T.fence_proxy_async()
                T.sync_threads(1, engine.threads)
                # (2) dV += P^T dO, (5) dK += dS^T Q and (4) dQ = dS K of these keys
                left = None if tile.in_registers else 0
                multiply(engine, p_t, left, do_tiles, slot, dv_acc, policy)
                multiply(engine, ds_t, 0, q_tiles, slot, dk_acc, policy)
                multiply(
                    engine, ds_t, 0, k_tile, 0, dq_tile, dq_policy, transpose_a=True, clear=True
                )
                await_products(engine, 0, dv_acc)
                await_products(engine, 0, dk_acc)
                await_products(engine, 0, dq_tile)
                T.sync_threads(1, engine.threads)
                if visit + num_stages < num_visits:
                    load_next(engine, q, do, stats, q_tiles, do_tiles, stats_tiles, slot, filled,
                              batch, first, next_head, next_row)  # fmt: skip
                for i, j in T.Parallel(tile_q, width):
                    dq_tile[i, j] = dq_tile[i, j] * scale
                T.atomic_add(dq_sums[batch, head, q_start : q_start + tile_q, 0:width], dq_tile)
                q_start = q_start + tile_q
                if q_start >= seqlen_q:
                    q_start = first
                    head = head + 1
            for i, j in T.Parallel(tile_k, width):
                dk_acc[i, j] = dk_acc[i, j] * scale
            store_tile(engine, dk, batch, kv_head, k_start, dk_acc, k_tile)
            store_tile(engine, dv, batch, kv_head, k_start, dv_acc, v_tile)

    return one_pass
