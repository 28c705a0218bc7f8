"""The forward on every card from sm_80 on, and on Hopper where `forward.py`'s kernel cannot run.

Shapes and steps are those of `forward.py`. A program takes one query tile, copies tiles with its
own threads, and multiplies with `mma.sync` (FlashAttention-2), which waits for each product.

Constraints
    head_dim 1 to 256, padded in the tile; fp16, bf16, fp32; any strides. Where they allow it, 16
    bytes are copied at a time, asynchronously (`cp.async`).

What lives where
    registers: S and P [tile_q, tile_k], acc [tile_q, width], m [tile_q], l [tile_q, 8], in fp32;
        each warp has whole rows
    shared memory: the query tile, which O leaves through, and rings of key and value tiles
    HBM: q, k, v read; o, lse written; never S or P
"""

from functools import lru_cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, range_constexpr
from cutlass.memory import SmemAllocator

from flash_rosetta.copy_engine import as_is
from flash_rosetta.cute_impl.launch import Recipe
from flash_rosetta.cute_impl.portable_tiling import (
    Engine,
    SharedTiles,
    accumulator,
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
from flash_rosetta.cute_impl.softmax import (
    RowStatistics,
    finish,
    mask,
    no_key_seen,
    online_softmax,
    rescale,
)
from flash_rosetta.cute_impl.tiles import PortableTile, padded_head_dim, portable_tiles_for
from flash_rosetta.cute_impl.tiling import DTYPES, first_column_of
from flash_rosetta.kernels import exponent_scale, last_key_offset
from flash_rosetta.layout import LaunchKey


@lru_cache(maxsize=4096)
def portable_recipe(key: LaunchKey) -> Recipe:
    """`plan_forward`'s recipe for this kernel."""
    problem = key.problem
    scalars = *exponent_scale(problem), last_key_offset(problem)
    vector = can_use_vectors(problem, *key.layouts)
    options = {
        "dtype": problem.dtype,
        "width": padded_head_dim(problem.head_dim),
        "vector": vector,
        "exact": is_exact(problem),
        "tile": portable_tiles_for(problem, vector).forward,
    }
    return Recipe(PortableForward, key, (as_is,) * 5, scalars, options)


class PortableForward:
    """One query tile a program."""

    def __init__(
        self, *, dtype: torch.dtype, width: int, vector: bool, exact: bool, tile: PortableTile
    ):
        self.dtype = dtype
        self.width = width
        self.tile = tile
        self.engine = Engine(DTYPES[dtype], vector, tile.warps, tile.column_groups, exact)

    def signature(self) -> tuple:
        q, k, v, o = (strided(self.dtype, 4, self.engine.vector) for _ in range(4))
        lse = strided(torch.float32, 3, False)
        return q, k, v, o, lse, *[Float32(1)] * 3, Int32(1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        factor: Float32,
        factor_huge: Float32,
        sign: Float32,
        causal_offset: Int32,
        stream: cuda.CUstream,
    ):
        num_tiles = cute.ceil_div(q.shape[2], self.tile.tile_q)
        self.kernel(q, k, v, o, lse, factor, factor_huge, sign, causal_offset).launch(
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
        o: cute.Tensor,
        lse: cute.Tensor,
        factor: Float32,
        factor_huge: Float32,
        sign: Float32,
        causal_offset: Int32,
    ):
        engine, width = self.engine, self.width
        tile_q, tile_k, num_stages = self.tile.tile_q, self.tile.tile_k, self.tile.num_stages
        num_heads, seqlen_q = q.shape[1], q.shape[2]
        num_kv_heads, seqlen_k = k.shape[1], k.shape[2]

        # Tiles of one head are neighbours, so that its keys and values stay in L2. In a causal
        # problem the last tile sees the most keys: it comes first.
        program = cute.arch.block_idx()[0]
        num_tiles = cute.ceil_div(seqlen_q, tile_q)
        batch_head = program // num_tiles
        q_start = (num_tiles - 1 - program % num_tiles) * tile_q
        batch, head = batch_head // num_heads, batch_head % num_heads
        kv_head = head // (num_heads // num_kv_heads)
        q, o, lse = (head_of(x, batch, head) for x in (q, o, lse))
        k, v = (head_of(x, batch, kv_head) for x in (k, v))

        # Each row sees keys [0, full), none sees a key past `end`.
        full = cutlass.min(seqlen_k, q_start + causal_offset + 1)
        end = self.end_of_visits(seqlen_k, q_start, causal_offset)
        num_visits = cute.ceil_div(end, tile_k)

        memory = SmemAllocator()
        q_tile = SharedTiles(engine, memory, tile_q, width)
        k_tiles = SharedTiles(engine, memory, tile_k, width, num_stages)
        v_tiles = SharedTiles(engine, memory, tile_k, width, num_stages)
        s = accumulator(engine, tile_q, tile_k)
        acc = accumulator(engine, tile_q, width)
        first_column = first_column_of(engine.row_thread())
        row = self.statistics(rows_of(engine, tile_q), first_column, factor, factor_huge)
        no_key_seen(row, acc)

        # Loads are committed in the order K, V, K, V, ...: `num_stages` tiles of each are on their
        # way or in use, and each but the last of V before the first visit.
        load_tile(engine, q, q_start, q_tile, 0)
        for n in range_constexpr(num_stages):
            if n < num_visits:
                load_tile(engine, k, n * tile_k, k_tiles, n)
            cute.arch.cp_async_commit_group()
            if cutlass.const_expr(n < num_stages - 1):
                if n < num_visits:
                    load_tile(engine, v, n * tile_k, v_tiles, n)
                cute.arch.cp_async_commit_group()

        for visit in cutlass.range(num_visits, unroll=1):
            k_start = visit * tile_k
            slot = visit % num_stages

            # K is here, and every warp is done with V of the visit before: its slot is filled.
            cute.arch.cp_async_wait_group(2 * num_stages - 2)
            cute.arch.sync_threads()
            ahead = visit + num_stages - 1
            if ahead < num_visits:
                load_tile(engine, v, ahead * tile_k, v_tiles, ahead % num_stages)
            cute.arch.cp_async_commit_group()
            # (1) S = Q K^T
            s.fill(0.0)
            multiply(engine, s, q_tile.pairs(), k_tiles.pairs(slot))

            # V is here, and every warp is done with K: its slot is filled.
            cute.arch.cp_async_wait_group(2 * num_stages - 2)
            cute.arch.sync_threads()
            ahead = visit + num_stages
            if ahead < num_visits:
                load_tile(engine, k, ahead * tile_k, k_tiles, slot)
            cute.arch.cp_async_commit_group()

            self.attend(
                s, row, acc, v_tiles, slot, sign, full, q_start, k_start, seqlen_k, causal_offset
            )

        finish(acc, row, lse, q_start, seqlen_k, causal_offset)
        cute.arch.cp_async_wait_group(0)  # of a query tile that sees no key
        cute.arch.sync_threads()
        store_tile(engine, o, q_start, acc, q_tile)

    def statistics(self, *arguments) -> RowStatistics:
        return RowStatistics(*arguments)

    def end_of_visits(self, seqlen_k, q_start, causal_offset):
        """No row of the query tile sees a key past this one."""
        end = cutlass.min(seqlen_k, q_start + causal_offset + self.tile.tile_q)
        return cutlass.max(end, 0)

    @cute.jit
    def attend(
        self, s, row, acc, v_tiles, slot, sign, full, q_start, k_start, seqlen_k, causal_offset
    ):
        """What a visit makes of its scores: P, the row statistics, and acc."""
        if sign != 1.0:
            for i in range_constexpr(cute.size(s)):
                s[i] = s[i] * sign
        if k_start + self.tile.tile_k > full:
            mask(s, row, q_start, k_start, seqlen_k, causal_offset)
        grown = online_softmax(s, row)
        if grown:
            rescale(acc, row.alpha)
        # O += P V
        multiply_by_columns(self.engine, acc, as_operand(self.engine, s), v_tiles.columns(slot))
