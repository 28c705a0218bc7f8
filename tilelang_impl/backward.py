"""FlashAttention-2 backward in TileLang (arXiv 2307.08691, algorithm 2), in two passes.

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
    head_dim 1 to 256, padded to 64, 128 or 256 in the tile; fp16, bf16, fp32; any strides.

What lives where
    registers: dK and dV [tile_k, head_dim] or dQ [tile_q, head_dim] in fp32; S, P, dP, dS tiles.
        The dk/dv pass computes S and dP transposed, so that P^T and dS^T are the left operands of
        (2) and (5) as they stand in registers.
    shared memory: the tiles a program owns, and a ring of num_stages tiles it visits. On Hopper one
        thread starts the loads of a slot as soon as every thread is done with what it held, and all
        go on when the slot's barrier says that it is full.
    HBM: the inputs, dq, dk, dv, and 8 bytes a query row for lse in base 2 and delta, side by side,
        whose rows are padded to a whole tile: past seqlen_q, and where a row sees no key, lse is
        +inf, which makes P zero without a mask
"""

import math
from functools import lru_cache

import tilelang.language as T
import torch
from torch import Tensor

from flash_rosetta.copy_engine import as_is, operand
from flash_rosetta.hopper import can_use_tma
from flash_rosetta.kernels import last_key_offset
from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.tilelang_impl.launch import Launch, Recipe
from flash_rosetta.tilelang_impl.tiles import Tile, padded_head_dim, tiles_for
from flash_rosetta.tilelang_impl.tiling import (
    DTYPES,
    Engine,
    await_products,
    await_tiles,
    filling,
    load_tile,
    multiply,
    parts_of,
    put,
    store_tile,
    strided,
)

STATS_TILE = 128
"""Rows of lse and delta are padded to a multiple of this, which every tile_q divides."""

PREPROCESS_ROWS = 32
PREPROCESS_THREADS = 128

FULL_ROW = T.GemmWarpPolicy.FullRow
"""Each warp has whole rows of a product, as the next product wants its left operand."""


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
    stats = new_stats(q, problem)
    preprocess, dkdv_pass, dq_pass = recipes(launch_key(problem, q, k, v, do, o, lse, dlse))
    launches = [
        preprocess.launch(o, do, lse, lse if dlse is None else dlse, stats),
        dkdv_pass.launch(q, k, v, do, stats, dk, dv),
        dq_pass.launch(q, k, v, do, stats, dq),
    ]
    return launches, dq, dk, dv


def new_stats(q: Tensor, problem: Problem) -> Tensor:
    """Where preprocess writes lse in base 2 and delta: [batch, num_heads, 2, padded_rows] fp32."""
    padded_rows = -(-problem.seqlen_q // STATS_TILE) * STATS_TILE
    return q.new_empty((problem.batch, problem.num_heads, 2, padded_rows), dtype=torch.float32)


@lru_cache(maxsize=4096)
def recipes(key: LaunchKey) -> tuple[Recipe, Recipe, Recipe]:
    """Of preprocess, dk/dv and dq."""
    problem = key.problem
    q, k, v, do, o, _, dlse = key.layouts
    dq, dkv = contiguous(*q.shape), contiguous(*k.shape)
    tma = can_use_tma(problem, q, k, v, do, o)
    tiles = tiles_for(problem, tma)
    read_by_both_passes = *(operand(t, tma) for t in (q, k, v, do)), as_is
    scalars = problem.scale, problem.scale * math.log2(math.e), last_key_offset(problem)
    common = {"dtype": DTYPES[problem.dtype], "width": padded_head_dim(problem.head_dim)}

    def options_of(tile: Tile, **others: bool) -> dict:
        engine = Engine(tma, tile.threads, parts_of(problem))
        return {**common, "engine": engine, "tile": tile, **others}

    preprocess = Recipe(
        preprocess_kernel,
        key,
        operands=(operand(o, tma), operand(do, tma), as_is, as_is, as_is),
        scalars=(int(dlse is not None),),
        options={**common, "engine": Engine(tma, PREPROCESS_THREADS)},
    )
    dkdv_pass = Recipe(
        dkdv_kernel,
        key,
        operands=(*read_by_both_passes, operand(dkv, tma), operand(dkv, tma)),
        scalars=scalars,
        options=options_of(tiles.dkdv, deferred=tiles.dkdv.deferred and not problem.is_causal),
    )
    dq_pass = Recipe(
        dq_kernel,
        key,
        operands=(*read_by_both_passes, operand(dq, tma)),
        scalars=scalars,
        options=options_of(tiles.dq),
    )
    return preprocess, dkdv_pass, dq_pass


def preprocess_kernel(*, dtype: str, width: int, engine: Engine):
    batch_size, num_heads, seqlen_q, head_dim, padded_rows = (
        T.dynamic(name) for name in ("batch", "num_heads", "seqlen_q", "head_dim", "padded_rows")
    )
    shape = batch_size, num_heads, seqlen_q, head_dim
    any_rows = Engine(False, engine.threads)  # dlse's type, whatever o's is
    rows = PREPROCESS_ROWS

    @T.prim_func
    def preprocess(
        o: strided("o", shape, dtype, engine),
        do: strided("do", shape, dtype, engine),
        lse: T.Tensor(shape[:3], "float32"),
        dlse: strided("dlse", shape[:3], "float32", any_rows),
        stats: strided("stats", (batch_size, num_heads, 2, padded_rows), "float32", engine),
        has_dlse: T.int32,
    ):
        with T.Kernel(
            padded_rows // rows * num_heads * batch_size, threads=engine.threads
        ) as program:
            o_tile = T.alloc_shared((1, rows, width), dtype)
            do_tile = T.alloc_shared((1, rows, width), dtype)
            products = T.alloc_fragment((rows, width), "float32")
            delta_rows = T.alloc_fragment((rows,), "float32")
            filled = alloc_barriers(engine, 1)
            number, own_head, own_batch = owned_by(program, padded_rows // rows, num_heads)
            row = T.alloc_var("int32", init=number * rows)
            head = T.alloc_var("int32", init=own_head)
            batch = T.alloc_var("int32", init=own_batch)

            load_tile(engine, o, batch, head, row, o_tile, 0, filled)
            load_tile(engine, do, batch, head, row, do_tile, 0, filled)
            filling(engine, filled, 0)
            await_tiles(engine, filled, 0, 0)
            for i, j in T.Parallel(rows, width):
                products[i, j] = T.cast(o_tile[0, i, j], "float32") * T.cast(
                    do_tile[0, i, j], "float32"
                )
            T.reduce_sum(products, delta_rows, dim=1)
            for i in T.Parallel(rows):
                lse_row = T.if_then_else(
                    row + i < seqlen_q, lse[batch, head, row + i], -T.infinity("float32")
                )
                sees_no_key = lse_row == -T.infinity("float32")
                dlse_row = T.if_then_else(
                    (has_dlse != 0) & (row + i < seqlen_q), dlse[batch, head, row + i], 0.0
                )
                stats[batch, head, 0, row + i] = T.if_then_else(
                    sees_no_key, T.infinity("float32"), lse_row * math.log2(math.e)
                )
                stats[batch, head, 1, row + i] = T.if_then_else(
                    sees_no_key, 0.0, delta_rows[i] - dlse_row
                )

    return preprocess


def dkdv_kernel(*, dtype: str, width: int, engine: Engine, tile: Tile, deferred: bool):
    """`deferred`: nothing is masked, and see `Tile`."""
    batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, padded_rows = sizes()
    q_shape = batch_size, num_heads, seqlen_q, head_dim
    k_shape = batch_size, num_kv_heads, seqlen_k, head_dim
    tile_q, tile_k, num_stages = tile.tile_q, tile.tile_k, tile.num_stages
    policy = policy_of(tile, engine)

    @T.prim_func
    def dkdv(
        q: strided("q", q_shape, dtype, engine),
        k: strided("k", k_shape, dtype, engine),
        v: strided("v", k_shape, dtype, engine),
        do: strided("do", q_shape, dtype, engine),
        stats: strided("stats", (batch_size, num_heads, 2, padded_rows), "float32", engine),
        dk: strided("dk", k_shape, dtype, engine),
        dv: strided("dv", k_shape, dtype, engine),
        scale: T.float32,
        scale_log2: T.float32,
        causal_offset: T.int32,
    ):
        num_programs = T.ceildiv(seqlen_k, tile_k) * num_kv_heads * batch_size
        with T.Kernel(num_programs, threads=engine.threads) as program:
            T.annotate_min_blocks_per_sm(tile.programs)
            k_tile = T.alloc_shared((engine.parts, tile_k, width), dtype)
            v_tile = T.alloc_shared((engine.parts, tile_k, width), dtype)
            q_tiles = T.alloc_shared((engine.parts * num_stages, tile_q, width), dtype)
            do_tiles = T.alloc_shared((engine.parts * num_stages, tile_q, width), dtype)
            stats_tiles = T.alloc_shared((num_stages, 2, tile_q), "float32")
            s_t = T.alloc_fragment((tile_k, tile_q), "float32")
            dp_t = T.alloc_fragment((tile_k, tile_q), "float32")
            p_t = alloc_operand(engine, tile, (tile_k, tile_q), dtype)
            ds_t = alloc_operand(engine, tile, (tile_k, tile_q), dtype)
            dk_acc = T.alloc_fragment((tile_k, width), "float32")
            dv_acc = T.alloc_fragment((tile_k, width), "float32")
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
            q_start = T.alloc_var("int32", init=first)
            next_row = T.alloc_var("int32", init=first)
            next_head = T.alloc_var("int32", init=kv_head * group_size)

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
                if deferred:
                    # The products of the visit before are done too, and their slot is free.
                    if visit > 0 and visit - 1 + num_stages < num_visits:
                        T.sync_threads(1, engine.threads)
                        load_next(engine, q, do, stats, q_tiles, do_tiles, stats_tiles,
                                  (visit - 1) % num_stages, filled, batch, first,
                                  next_head, next_row)  # fmt: skip
                # Rows of the tile past seqlen_k hold nonsense, which no product mixes into others.
                for i, j in T.Parallel(tile_k, tile_q):
                    s_t[i, j] = T.exp2(s_t[i, j] * scale_log2 - stats_tiles[slot, 0, j])
                await_products(engine, 0, dp_t)
                if not deferred:
                    if q_start < full:
                        for i, j in T.Parallel(tile_k, tile_q):
                            s_t[i, j] = T.if_then_else(
                                k_start + i <= q_start + j + causal_offset, s_t[i, j], 0.0
                            )
                for i, j in T.Parallel(tile_k, tile_q):
                    set_operand(engine, tile, p_t, i, j, s_t[i, j])
                for i, j in T.Parallel(tile_k, tile_q):
                    ds = s_t[i, j] * (dp_t[i, j] - stats_tiles[slot, 1, j])
                    set_operand(engine, tile, ds_t, i, j, ds)
                publish(engine, tile)
                # (2) dV += P^T dO and (5) dK += dS^T Q
                left = None if tile.in_registers else 0
                multiply(engine, p_t, left, do_tiles, slot, dv_acc, policy)
                multiply(engine, ds_t, left, q_tiles, slot, dk_acc, policy)
                q_start = q_start + tile_q
                if q_start >= seqlen_q:
                    q_start = first
                if not deferred:
                    await_products(engine, 0, dv_acc)
                    await_products(engine, 0, dk_acc)
                    T.sync_threads(1, engine.threads)
                    if visit + num_stages < num_visits:
                        load_next(engine, q, do, stats, q_tiles, do_tiles, stats_tiles, slot,
                                  filled, batch, first, next_head, next_row)  # fmt: skip
            await_products(engine, 0, dv_acc)
            await_products(engine, 0, dk_acc)
            T.sync_threads(1, engine.threads)
            for i, j in T.Parallel(tile_k, width):
                dk_acc[i, j] = dk_acc[i, j] * scale
            store_tile(engine, dk, batch, kv_head, k_start, dk_acc, k_tile)
            store_tile(engine, dv, batch, kv_head, k_start, dv_acc, v_tile)

    return dkdv


def dq_kernel(*, dtype: str, width: int, engine: Engine, tile: Tile):
    batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, padded_rows = sizes()
    q_shape = batch_size, num_heads, seqlen_q, head_dim
    k_shape = batch_size, num_kv_heads, seqlen_k, head_dim
    tile_q, tile_k, num_stages = tile.tile_q, tile.tile_k, tile.num_stages
    policy = policy_of(tile, engine)

    @T.prim_func
    def dq(
        q: strided("q", q_shape, dtype, engine),
        k: strided("k", k_shape, dtype, engine),
        v: strided("v", k_shape, dtype, engine),
        do: strided("do", q_shape, dtype, engine),
        stats: strided("stats", (batch_size, num_heads, 2, padded_rows), "float32", engine),
        dq: strided("dq", q_shape, dtype, engine),
        scale: T.float32,
        scale_log2: T.float32,
        causal_offset: T.int32,
    ):
        num_programs = T.ceildiv(seqlen_q, tile_q) * num_heads * batch_size
        with T.Kernel(num_programs, threads=engine.threads) as program:
            T.annotate_min_blocks_per_sm(tile.programs)
            q_tile = T.alloc_shared((engine.parts, tile_q, width), dtype)
            do_tile = T.alloc_shared((engine.parts, tile_q, width), dtype)
            k_tiles = T.alloc_shared((engine.parts * num_stages, tile_k, width), dtype)
            v_tiles = T.alloc_shared((engine.parts * num_stages, tile_k, width), dtype)
            lse_rows = T.alloc_fragment((tile_q,), "float32")
            delta_rows = T.alloc_fragment((tile_q,), "float32")
            s = T.alloc_fragment((tile_q, tile_k), "float32")
            dp = T.alloc_fragment((tile_q, tile_k), "float32")
            ds = alloc_operand(engine, tile, (tile_q, tile_k), dtype)
            dq_acc = T.alloc_fragment((tile_q, width), "float32")
            filled_q = alloc_barriers(engine, 1)
            filled = alloc_barriers(engine, num_stages)

            num_tiles = T.ceildiv(seqlen_q, tile_q)
            number, own_head, own_batch = owned_by(program, num_tiles, num_heads)
            # In a causal problem the last query tile sees the most keys: it starts first.
            q_start = T.alloc_var("int32", init=(num_tiles - 1 - number) * tile_q)
            head = T.alloc_var("int32", init=own_head)
            batch = T.alloc_var("int32", init=own_batch)
            group_size = T.truncdiv(num_heads, num_kv_heads)
            kv_head = T.alloc_var("int32", init=T.truncdiv(head, group_size))

            # Each row sees keys [0, full), none sees a key past `end`.
            full = T.min(seqlen_k, q_start + causal_offset + 1)
            end = T.max(T.min(seqlen_k, q_start + causal_offset + tile_q), 0)
            num_visits = T.alloc_var("int32", init=T.ceildiv(end, tile_k))

            load_tile(engine, q, batch, head, q_start, q_tile, 0, filled_q)
            load_tile(engine, do, batch, head, q_start, do_tile, 0, filled_q)
            filling(engine, filled_q, 0)
            for early in T.unroll(num_stages):
                if early < num_visits:
                    load_tile(engine, k, batch, kv_head, early * tile_k, k_tiles, early, filled)
                    load_tile(engine, v, batch, kv_head, early * tile_k, v_tiles, early, filled)
                    filling(engine, filled, early)
            for i in T.Parallel(tile_q):
                lse_rows[i] = stats[batch, head, 0, q_start + i]
                delta_rows[i] = stats[batch, head, 1, q_start + i]
            T.clear(dq_acc)
            await_tiles(engine, filled_q, 0, 0)
            for visit in T.serial(num_visits):
                k_start = visit * tile_k
                slot = visit % num_stages
                await_tiles(engine, filled, slot, visit // num_stages)
                # (1) S = Q K^T and (3) dP = dO V^T
                multiply(engine, q_tile, 0, k_tiles, slot, s, policy, transpose_b=True, clear=True)
                multiply(
                    engine, do_tile, 0, v_tiles, slot, dp, policy, transpose_b=True, clear=True
                )
                await_products(engine, 1, s)
                for i, j in T.Parallel(tile_q, tile_k):
                    s[i, j] = T.exp2(s[i, j] * scale_log2 - lse_rows[i])
                await_products(engine, 0, dp)
                if k_start + tile_k > full:
                    for i, j in T.Parallel(tile_q, tile_k):
                        s[i, j] = T.if_then_else(
                            k_start + j < T.min(seqlen_k, q_start + i + causal_offset + 1),
                            s[i, j],
                            0.0,
                        )
                for i, j in T.Parallel(tile_q, tile_k):
                    set_operand(engine, tile, ds, i, j, s[i, j] * (dp[i, j] - delta_rows[i]))
                publish(engine, tile)
                # (4) dQ += dS K
                left = None if tile.in_registers else 0
                multiply(engine, ds, left, k_tiles, slot, dq_acc, policy)
                await_products(engine, 0, dq_acc)
                T.sync_threads(1, engine.threads)
                if visit + num_stages < num_visits:
                    k_next = (visit + num_stages) * tile_k
                    load_tile(engine, k, batch, kv_head, k_next, k_tiles, slot, filled)
                    load_tile(engine, v, batch, kv_head, k_next, v_tiles, slot, filled)
                    filling(engine, filled, slot)
            for i, j in T.Parallel(tile_q, width):
                dq_acc[i, j] = dq_acc[i, j] * scale
            store_tile(engine, dq, batch, head, q_start, dq_acc, q_tile)

    return dq


def sizes() -> list:
    """The sizes that a kernel of either pass takes at run time."""
    names = "batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "head_dim", "padded_rows"
    return [T.dynamic(name) for name in names]


def policy_of(tile: Tile, engine: Engine):
    """How warps share a product: whole rows where P or dS stays in registers."""
    if tile.in_registers:
        return FULL_ROW
    return T.GemmWarpPolicy.FullCol if engine.hopper else T.GemmWarpPolicy.Square


def alloc_barriers(engine: Engine, num_slots: int):
    """A barrier for each slot of a ring, on which one thread arrives once it has asked for data."""
    return T.alloc_barrier([1] * num_slots) if engine.hopper else None


def alloc_operand(engine: Engine, tile: Tile, shape: tuple[int, int], dtype: str):
    """Where P or dS is kept as the left operand of a product."""
    if tile.in_registers:
        return T.alloc_fragment(shape, dtype)
    return T.alloc_shared((engine.parts, *shape), dtype)


@T.macro
def set_operand(engine, tile, operand, i, j, value):
    """Round an fp32 value to an operand's dtype and place."""
    if tile.in_registers:
        operand[i, j] = value
    else:
        put(engine, operand, 0, i, j, value)


@T.macro
def publish(engine, tile):
    """Let all threads, and the tensor cores, see operands set in shared memory."""
    if not tile.in_registers:
        if engine.hopper:
            T.fence_proxy_async()
        T.sync_threads(1, engine.threads)


@T.macro
def load_stats(engine, stats, batch, head, row, tiles, slot, filled):
    """Start to fill a slot with lse and delta of rows [row, row + rows) of one head."""
    rows = tiles.shape[2]
    if engine.hopper:
        two_rows = stats[batch, head, 0:2, row : row + rows]
        T.tma_copy(two_rows, tiles[slot, :, :], barrier=filled[slot])
    else:
        for i, j in T.Parallel(2, rows):
            tiles[slot, i, j] = stats[batch, head, i, row + j]


@T.macro
def load_next(engine, q, do, stats, q_tiles, do_tiles, stats_tiles, slot, filled, batch, first,
              head: T.Ref, row: T.Ref):  # fmt: skip
    """Start to load the query tile at `head` and `row`, and move them to the one after it."""
    load_tile(engine, q, batch, head, row, q_tiles, slot, filled)
    load_tile(engine, do, batch, head, row, do_tiles, slot, filled)
    load_stats(engine, stats, batch, head, row, stats_tiles, slot, filled)
    filling(engine, filled, slot)
    row = row + q_tiles.shape[1]
    if row >= q.shape[2]:
        row = first
        head = head + 1


def owned_by(program, num_tiles, num_heads) -> tuple:
    """The tile, head and batch that a program owns; programs of one head are neighbours."""
    head = T.truncdiv(program, num_tiles)
    return T.truncmod(program, num_tiles), T.truncmod(head, num_heads), T.truncdiv(head, num_heads)
