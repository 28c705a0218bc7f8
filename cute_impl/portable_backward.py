"""FlashAttention-2 backward in CuTe DSL (arXiv 2307.08691, algorithm 2), in two passes, for every
card from sm_80 on, and on Hopper where `backward.py`'s kernels cannot run.

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
    head_dim 1 to 256, padded to 64, 128 or 256 in the tile; fp16, bf16, fp32; any strides. Where
    they allow it, 16 bytes are copied at a time, asynchronously (`cp.async`).

What lives where
    registers: dK and dV [tile_k, head_dim] or dQ [tile_q, head_dim] in fp32; S, P, dP, dS tiles.
        The dk/dv pass computes S and dP transposed, so that P^T and dS^T are the left operands of
        (2) and (5) as they stand in registers.
    shared memory: the tiles a program owns, and a ring of num_stages tiles it visits
    HBM: the inputs, dq, dk, dv, and 8 bytes a query row for lse in base 2 and delta, side by side,
        whose rows are padded to a whole tile: past seqlen_q, and where a row sees no key, lse is
        +inf, which makes P zero without a mask
"""

from functools import lru_cache
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.experimental import primitives
from cutlass.experimental.primitives.nvvm_wrapper import LoadCacheModifier
from cutlass.memory import SmemAllocator
from torch import Tensor

from flash_rosetta.copy_engine import as_is
from flash_rosetta.cute_impl.gradients import (
    Plan,
    RowPieces,
    empty_dense,
    exponential_by_columns,
    exponential_by_rows,
    hide_by_columns,
    hide_by_rows,
    owned_by,
    put_stats,
    score_gradient_by_columns,
    score_gradient_by_rows,
    score_scalars,
)
from flash_rosetta.cute_impl.launch import Recipe
from flash_rosetta.cute_impl.portable_tiling import (
    CHUNK_BYTES,
    Engine,
    SharedTiles,
    accumulator,
    aligned,
    as_operand,
    can_use_vectors,
    head_of,
    is_exact,
    load_tile,
    multiply,
    multiply_by_columns,
    rows_of,
    store_tile,
    strided,
)
from flash_rosetta.cute_impl.tiles import PortableTile, padded_head_dim, portable_tiles_for
from flash_rosetta.cute_impl.tiling import DTYPES, first_column_of
from flash_rosetta.layout import LaunchKey, launch_key
from flash_rosetta.problem import Problem

STATS_TILE = 128
"""Rows of lse and delta are padded to a multiple of this, which every tile_q divides."""

PREPROCESS_ROWS = 32
PREPROCESS_WARPS = 4


def plan_portable_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    problem: Problem,
) -> Plan:
    """`plan_backward` by the kernels of every card, even where Hopper's could run."""
    key = launch_key(problem, q, k, v, do, o, lse, dlse)
    return portable_recipes(key).plan(do, dlse, q, k, v, o, lse)


class PortableRecipes(NamedTuple):
    """Of the three launches, and the shape of what the first leaves to the others."""

    preprocess: Recipe
    dkdv_pass: Recipe
    dq_pass: Recipe
    stats_shape: tuple[int, ...]

    def plan(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
    ) -> Plan:
        """The launches on these tensors, and dq, dk and dv, which they will fill."""
        dq, dk, dv = map(empty_dense, (q, k, v))
        stats = q.new_empty(self.stats_shape, dtype=torch.float32)
        launches = [
            self.preprocess.launch(o, do, lse, lse if dlse is None else dlse, stats),
            self.dkdv_pass.launch(q, k, v, do, stats, dk, dv),
            self.dq_pass.launch(q, k, v, do, stats, dq),
        ]
        return launches, dq, dk, dv


@lru_cache(maxsize=4096)
def portable_recipes(key: LaunchKey) -> PortableRecipes:
    problem = key.problem
    q, k, v, do, o, _, dlse = key.layouts
    vector = can_use_vectors(problem, q, k, v, do, o)
    tiles = portable_tiles_for(problem, vector)
    scalars = score_scalars(problem)
    common = {
        "dtype": problem.dtype,
        "width": padded_head_dim(problem.head_dim),
        "vector": vector,
    }
    has_dlse = (int(dlse is not None),)
    both_passes = common | {"exact": is_exact(problem)}
    padded_rows = -(-problem.seqlen_q // STATS_TILE) * STATS_TILE
    return PortableRecipes(
        preprocess=Recipe(PortablePreprocess, key, (as_is,) * 5, has_dlse, common),
        dkdv_pass=Recipe(
            PortableDkdv, key, (as_is,) * 7, scalars, both_passes | {"tile": tiles.dkdv}
        ),
        dq_pass=Recipe(PortableDq, key, (as_is,) * 6, scalars, both_passes | {"tile": tiles.dq}),
        stats_shape=(problem.batch, problem.num_heads, 2, padded_rows),
    )


class PortablePreprocess:
    """stats[..., 0, :] = lse in base 2, stats[..., 1, :] = delta, of some rows a program."""

    def __init__(self, *, dtype: torch.dtype, width: int, vector: bool):
        self.dtype = dtype
        self.width = width
        self.engine = Engine(DTYPES[dtype], vector, PREPROCESS_WARPS)

    def signature(self) -> tuple:
        o, do = (strided(self.dtype, 4, self.engine.vector) for _ in range(2))
        lse, dlse = (strided(torch.float32, 3, False) for _ in range(2))
        return o, do, lse, dlse, strided(torch.float32, 4, True), Int32(1)

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        stats: cute.Tensor,
        has_dlse: Int32,
        stream: cuda.CUstream,
    ):
        programs_a_head = stats.shape[3] // PREPROCESS_ROWS
        self.kernel(o, do, lse, dlse, stats, has_dlse).launch(
            grid=(programs_a_head * stats.shape[1] * stats.shape[0], 1, 1),
            block=(self.engine.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        stats: cute.Tensor,
        has_dlse: Int32,
    ):
        engine = self.engine
        number, head, batch = owned_by(stats.shape[3] // PREPROCESS_ROWS, stats.shape[1])
        o, do, lse, dlse, stats = (head_of(x, batch, head) for x in (o, do, lse, dlse, stats))
        start = number * PREPROCESS_ROWS
        thread = cute.arch.thread_idx()[0]
        at = RowPieces(start, PREPROCESS_ROWS, self.width, thread, engine.threads)
        o_pieces, do_pieces = load_pieces(engine, o, at), load_pieces(engine, do, at)
        put_stats(o_pieces, do_pieces, lse, dlse, has_dlse, at, stats, start)


class PortableDkdv:
    """One key tile of one key/value head a program."""

    def __init__(
        self, *, dtype: torch.dtype, width: int, vector: bool, exact: bool, tile: PortableTile
    ):
        self.dtype = dtype
        self.width = width
        self.tile = tile
        self.engine = Engine(DTYPES[dtype], vector, tile.warps, tile.column_groups, exact)

    def signature(self) -> tuple:
        q, k, v, do, dk, dv = (strided(self.dtype, 4, self.engine.vector) for _ in range(6))
        stats = strided(torch.float32, 4, True)
        return q, k, v, do, stats, dk, dv, *[Float32(1)] * 2, Int32(1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        stats: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        causal_offset: Int32,
        stream: cuda.CUstream,
    ):
        num_tiles = cute.ceil_div(k.shape[2], self.tile.tile_k)
        self.kernel(q, k, v, do, stats, dk, dv, scale, scale_log2, causal_offset).launch(
            grid=(num_tiles * k.shape[1] * k.shape[0], 1, 1),
            block=(self.engine.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.tile.programs,
            preferred_smem_carveout=100,  # else the driver is asked, which there need not be
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        stats: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        causal_offset: Int32,
    ):
        engine, width = self.engine, self.width
        tile_q, tile_k, num_stages = self.tile.tile_q, self.tile.tile_k, self.tile.num_stages
        num_heads, seqlen_q = q.shape[1], q.shape[2]
        num_kv_heads, seqlen_k = k.shape[1], k.shape[2]

        # In a causal problem the first key tile is seen by the most queries: it starts first.
        number, kv_head, batch = owned_by(cute.ceil_div(seqlen_k, tile_k), num_kv_heads)
        k_start = number * tile_k
        k, v, dk, dv = (head_of(x, batch, kv_head) for x in (k, v, dk, dv))

        # No query before `first` sees a key of the tile; from `full` on, each sees all of them.
        first = cutlass.max(k_start - causal_offset, 0) // tile_q * tile_q
        full = k_start + tile_k - 1 - causal_offset
        # The query heads of the group follow each other in one loop, and the ring runs through.
        group_size = num_heads // num_kv_heads
        visits_of_one_head = cute.ceil_div(cutlass.max(seqlen_q - first, 0), tile_q)
        num_visits = visits_of_one_head * group_size
        q_start = first
        next_row = first
        next_head = kv_head * group_size

        memory = SmemAllocator()
        k_tile = SharedTiles(engine, memory, tile_k, width)
        v_tile = SharedTiles(engine, memory, tile_k, width)
        q_tiles = SharedTiles(engine, memory, tile_q, width, num_stages)
        do_tiles = SharedTiles(engine, memory, tile_q, width, num_stages)
        stats_tiles = cute.make_tensor(
            memory.allocate_array(Float32, num_stages * 2 * tile_q, byte_alignment=128),
            cute.make_layout((num_stages, 2, tile_q), stride=(2 * tile_q, tile_q, 1)),
        )
        first_column = first_column_of(engine.row_thread())
        rows = rows_of(engine, tile_k)
        s_t = accumulator(engine, tile_k, tile_q)
        dp_t = accumulator(engine, tile_k, tile_q)
        dk_acc = accumulator(engine, tile_k, width // engine.column_groups)
        dv_acc = accumulator(engine, tile_k, width // engine.column_groups)
        dk_acc.fill(0.0)
        dv_acc.fill(0.0)

        load_tile(engine, k, k_start, k_tile, 0)
        load_tile(engine, v, k_start, v_tile, 0)
        # One group of loads a visit, `ahead` of them on their way during a visit.
        ahead = max(num_stages - 1, 1)
        for early in range_constexpr(ahead):
            if early < num_visits:
                load_queries(engine, q, do, stats, batch, next_head, next_row,
                             q_tiles, do_tiles, stats_tiles, early)  # fmt: skip
                next_row, next_head = after(next_row + tile_q, next_head, first, seqlen_q)
            cute.arch.cp_async_commit_group()

        for visit in cutlass.range(num_visits, unroll=1):
            slot = visit % num_stages
            cute.arch.cp_async_wait_group(ahead - 1)
            cute.arch.sync_threads()
            if const_expr(num_stages > 1):
                # Every warp is done with the slot of the visit before.
                if visit + ahead < num_visits:
                    load_queries(engine, q, do, stats, batch, next_head, next_row,
                                 q_tiles, do_tiles, stats_tiles,
                                 (visit + ahead) % num_stages)  # fmt: skip
                    next_row, next_head = after(next_row + tile_q, next_head, first, seqlen_q)
                cute.arch.cp_async_commit_group()

            # (1) S^T = K Q^T and (3) dP^T = V dO^T
            s_t.fill(0.0)
            multiply(engine, s_t, k_tile.pairs(), q_tiles.pairs(slot))
            dp_t.fill(0.0)
            multiply(engine, dp_t, v_tile.pairs(), do_tiles.pairs(slot))
            # Rows of the tile past seqlen_k hold nonsense, which no product mixes into others.
            exponential_by_columns(s_t, scale_log2, stats_tiles[slot, 0, None], first_column)
            if q_start < full:
                seen_from = [k_start + i - causal_offset - first_column for i in rows]
                hide_by_columns(s_t, seen_from, q_start)
            # (2) dV += P^T dO
            multiply_by_columns(engine, dv_acc, as_operand(engine, s_t), do_tiles.columns(slot))
            score_gradient_by_columns(s_t, dp_t, stats_tiles[slot, 1, None], first_column)
            # (5) dK += dS^T Q
            multiply_by_columns(engine, dk_acc, as_operand(engine, dp_t), q_tiles.columns(slot))

            q_start += tile_q
            if q_start >= seqlen_q:
                q_start = first
            if const_expr(num_stages == 1):
                cute.arch.sync_threads()
                if visit + 1 < num_visits:
                    load_queries(engine, q, do, stats, batch, next_head, next_row,
                                 q_tiles, do_tiles, stats_tiles, 0)  # fmt: skip
                    next_row, next_head = after(next_row + tile_q, next_head, first, seqlen_q)
                cute.arch.cp_async_commit_group()

        for i in range_constexpr(cute.size(dk_acc)):
            dk_acc[i] = dk_acc[i] * scale
        cute.arch.cp_async_wait_group(0)  # of a key tile that no query sees
        cute.arch.sync_threads()
        store_tile(engine, dk, k_start, dk_acc, k_tile)
        store_tile(engine, dv, k_start, dv_acc, v_tile)


class PortableDq:
    """One query tile of one head a program."""

    def __init__(
        self, *, dtype: torch.dtype, width: int, vector: bool, exact: bool, tile: PortableTile
    ):
        self.dtype = dtype
        self.width = width
        self.tile = tile
        self.engine = Engine(DTYPES[dtype], vector, tile.warps, tile.column_groups, exact)

    def signature(self) -> tuple:
        q, k, v, do, dq = (strided(self.dtype, 4, self.engine.vector) for _ in range(5))
        stats = strided(torch.float32, 4, True)
        return q, k, v, do, stats, dq, *[Float32(1)] * 2, Int32(1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        stats: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        causal_offset: Int32,
        stream: cuda.CUstream,
    ):
        num_tiles = cute.ceil_div(q.shape[2], self.tile.tile_q)
        self.kernel(q, k, v, do, stats, dq, scale, scale_log2, causal_offset).launch(
            grid=(num_tiles * q.shape[1] * q.shape[0], 1, 1),
            block=(self.engine.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.tile.programs,
            preferred_smem_carveout=100,  # else the driver is asked, which there need not be
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        stats: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        causal_offset: Int32,
    ):
        engine, width = self.engine, self.width
        tile_q, tile_k, num_stages = self.tile.tile_q, self.tile.tile_k, self.tile.num_stages
        num_heads, seqlen_q = q.shape[1], q.shape[2]
        num_kv_heads, seqlen_k = k.shape[1], k.shape[2]

        # In a causal problem the last query tile sees the most keys: it starts first.
        num_tiles = cute.ceil_div(seqlen_q, tile_q)
        number, head, batch = owned_by(num_tiles, num_heads)
        q_start = (num_tiles - 1 - number) * tile_q
        kv_head = head // (num_heads // num_kv_heads)
        q, do, stats, dq = (head_of(x, batch, head) for x in (q, do, stats, dq))
        k, v = (head_of(x, batch, kv_head) for x in (k, v))

        # Each row sees keys [0, full), none sees a key past `end`.
        full = cutlass.min(seqlen_k, q_start + causal_offset + 1)
        end = cutlass.max(cutlass.min(seqlen_k, q_start + causal_offset + tile_q), 0)
        num_visits = cute.ceil_div(end, tile_k)

        memory = SmemAllocator()
        q_tile = SharedTiles(engine, memory, tile_q, width)
        do_tile = SharedTiles(engine, memory, tile_q, width)
        k_tiles = SharedTiles(engine, memory, tile_k, width, num_stages)
        v_tiles = SharedTiles(engine, memory, tile_k, width, num_stages)
        rows = [q_start + i for i in rows_of(engine, tile_q)]
        first_column = first_column_of(engine.row_thread())
        s = accumulator(engine, tile_q, tile_k)
        dp = accumulator(engine, tile_q, tile_k)
        dq_acc = accumulator(engine, tile_q, width // engine.column_groups)
        dq_acc.fill(0.0)

        load_tile(engine, q, q_start, q_tile, 0)
        load_tile(engine, do, q_start, do_tile, 0)
        # One group of loads a visit, `ahead` of them on their way during a visit.
        ahead = max(num_stages - 1, 1)
        for early in range_constexpr(ahead):
            if early < num_visits:
                load_tile(engine, k, early * tile_k, k_tiles, early)
                load_tile(engine, v, early * tile_k, v_tiles, early)
            cute.arch.cp_async_commit_group()

        lse_rows = [stats[0, i] for i in rows]
        delta_rows = [stats[1, i] for i in rows]

        for visit in cutlass.range(num_visits, unroll=1):
            k_start = visit * tile_k
            slot = visit % num_stages
            cute.arch.cp_async_wait_group(ahead - 1)
            cute.arch.sync_threads()
            if const_expr(num_stages > 1):
                # Every warp is done with the slot of the visit before.
                if visit + ahead < num_visits:
                    free = (visit + ahead) % num_stages
                    load_tile(engine, k, (visit + ahead) * tile_k, k_tiles, free)
                    load_tile(engine, v, (visit + ahead) * tile_k, v_tiles, free)
                cute.arch.cp_async_commit_group()

            # (1) S = Q K^T and (3) dP = dO V^T
            s.fill(0.0)
            multiply(engine, s, q_tile.pairs(), k_tiles.pairs(slot))
            dp.fill(0.0)
            multiply(engine, dp, do_tile.pairs(), v_tiles.pairs(slot))
            exponential_by_rows(s, scale_log2, lse_rows)
            if k_start + tile_k > full:
                seen = [cutlass.min(seqlen_k, i + causal_offset + 1) - first_column for i in rows]
                hide_by_rows(s, seen, k_start)
            score_gradient_by_rows(s, dp, delta_rows)
            # (4) dQ += dS K
            multiply_by_columns(engine, dq_acc, as_operand(engine, dp), k_tiles.columns(slot))

            if const_expr(num_stages == 1):
                cute.arch.sync_threads()
                if visit + 1 < num_visits:
                    load_tile(engine, k, (visit + 1) * tile_k, k_tiles, 0)
                    load_tile(engine, v, (visit + 1) * tile_k, v_tiles, 0)
                cute.arch.cp_async_commit_group()

        for i in range_constexpr(cute.size(dq_acc)):
            dq_acc[i] = dq_acc[i] * scale
        cute.arch.cp_async_wait_group(0)  # of a query tile that sees no key
        cute.arch.sync_threads()
        store_tile(engine, dq, q_start, dq_acc, q_tile)


@cute.jit
def load_pieces(engine: cutlass.Constexpr, x: cute.Tensor, at: RowPieces) -> cute.Tensor:
    """A thread's pieces of one head x [seqlen_q, head_dim], zero past its end."""
    num_rows, num_columns = x.shape
    step = engine.chunk if engine.vector else 1
    pieces = cute.make_rmem_tensor(((step, 8 // step), len(at.numbers)), engine.dtype)
    pieces.fill(0.0)
    for i in range_constexpr(len(at.numbers)):
        row = at.start + at.numbers[i]
        for j in range_constexpr(8 // step):
            column = at.piece * 8 + j * step
            if row < num_rows and column < num_columns:
                source = x.iterator + (Int64(row) * x.stride[0] + Int64(column) * x.stride[1])
                if const_expr(engine.vector):
                    source = aligned(source)
                part = cute.make_tensor(source, cute.make_layout(step))
                pieces[(None, j), i].store(part.load())
    return pieces


@cute.jit
def load_queries(
    engine: cutlass.Constexpr, q, do, stats, batch, head, row, q_tiles, do_tiles, stats_tiles, slot
):
    """Start to fill a slot with all that the dk/dv pass reads of a query tile."""
    load_tile(engine, head_of(q, batch, head), row, q_tiles, slot)
    load_tile(engine, head_of(do, batch, head), row, do_tiles, slot)
    load_stats(head_of(stats, batch, head), row, stats_tiles, slot)


@cute.jit
def after(row: Int32, head: Int32, first: Int32, seqlen_q: Int32):
    """Where the next query tile is: at `row`, or where the next head's first one is."""
    if row >= seqlen_q:
        row = first
        head += 1
    return row, head


@cute.jit
def load_stats(stats: cute.Tensor, row: Int32, tiles: cute.Tensor, slot):
    """Start to fill a slot with lse and delta [2, rows] of rows [row, row + rows) of one head."""
    thread = cute.arch.thread_idx()[0]
    rows = tiles.shape[2]
    # Row by row, four numbers a thread: rows of stats are padded and aligned.
    if thread < 2 * rows // 4:
        i, j = thread // (rows // 4), thread % (rows // 4) * 4
        primitives.cp_async_shared_global(
            tiles.iterator + tiles.layout((slot, i, j)),
            stats.iterator + (Int64(i) * stats.stride[0] + row + j),
            CHUNK_BYTES,
            LoadCacheModifier.CG,
        )
