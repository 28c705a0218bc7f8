"""FlashAttention-2 forward in CuTe DSL (arXiv 2307.08691, algorithm 1).

Shapes
    q [batch, num_heads, seqlen_q, head_dim], k and v [batch, num_kv_heads, seqlen_k, head_dim]
    o [batch, num_heads, seqlen_q, head_dim] in q's dtype, lse [batch, num_heads, seqlen_q] fp32

Steps for one query tile of one head
    1. load the query tile
    2. for each key tile that some row sees: S = Q K^T; mask S if some row does not see all of the
       tile; online softmax, in which m and l follow the row maximum and sum; O += P V
    3. divide by the row sums, write o and lse
Key tiles that no row sees are never visited.

Two kernels take these steps. `Forward` is Hopper's: a program stays on its multiprocessor and takes
one query tile after the other. One warp of it, the producer, has the copy engine fill rings of
query, key and value tiles; each other warpgroup owns 64 query rows and multiplies asynchronously
(FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2). `PortableForward`, in a file of its own,
does without the copy engine and runs everything else.

Constraints
    head_dim 1 to 256, padded in the tile. Hopper's: fp16, bf16, and strides that the copy engine
    takes, 1 in head_dim, else multiples of 16 bytes. The other one: fp32 too, any strides.

What lives where
    registers: S and P [64, tile_k], acc [64, width], m [64], l [64, 8] of a warpgroup, in fp32
    shared memory: rings of query, key and value tiles and their barriers; O to be stored, in the
        query tile's place where there is no room for both
    HBM: q, k, v read; o, lse written; never S or P
"""

from collections.abc import Callable
from functools import lru_cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers
from torch import Tensor

from flash_rosetta.copy_engine import as_is, operand
from flash_rosetta.cute_impl.launch import Launch, Recipe
from flash_rosetta.cute_impl.portable_forward import portable_recipe
from flash_rosetta.cute_impl.softmax import (
    RowStatistics,
    finish,
    mask,
    no_key_seen,
    online_softmax,
    rescale,
)
from flash_rosetta.cute_impl.tiles import ForwardTile, o_takes_q, padded_head_dim, tiles_for
from flash_rosetta.cute_impl.tiling import (
    DTYPES,
    PRODUCER_REGISTERS,
    Fixed,
    Ring,
    as_left_operand,
    barriers,
    first_column_of,
    mover,
    multiply,
    put_tile,
    room_for,
    rounded,
    rows_of,
    strided,
    tiles_in,
    tiles_of,
    transposed,
)
from flash_rosetta.hopper import can_use_tma
from flash_rosetta.kernels import exponent_scale, last_key_offset
from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.turns import multiprocessors, num_programs


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> tuple[Launch, Tensor, Tensor]:
    """The launch that computes o and lse, and the tensors it will fill."""
    return plan_with(_recipe, q, k, v, problem)


def plan_portable_forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> tuple[Launch, Tensor, Tensor]:
    """The same, by the kernel of every card even where Hopper's could run."""
    return plan_with(portable_recipe, q, k, v, problem)


def plan_with(
    recipe_of: Callable[[LaunchKey], Recipe], q: Tensor, k: Tensor, v: Tensor, problem: Problem
) -> tuple[Launch, Tensor, Tensor]:
    """The same, by the kernel of `recipe_of`."""
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    sizes = problem.batch, problem.num_heads, problem.seqlen_q
    lse = q.new_empty(sizes, dtype=torch.float32)
    return recipe_of(launch_key(problem, q, k, v)).launch(q, k, v, o, lse), o, lse


@lru_cache(maxsize=4096)  # a small problem's time is mostly what the host does before it runs
def _recipe(key: LaunchKey) -> Recipe:
    if not can_use_tma(key.problem, *key.layouts):
        return portable_recipe(key)
    return forward_recipe(key)


def forward_recipe(
    key: LaunchKey,
    tile: ForwardTile | None = None,
    kernel: "type[Forward] | None" = None,
    is_persistent: bool = True,
) -> Recipe:
    """Hopper's kernel, or one that differs in tile and class; else a program takes one tile."""
    problem = key.problem
    q, k, v = key.layouts
    tile = tile or tiles_for(problem).forward
    num_tiles = -(-problem.seqlen_q // tile.tile_q)
    total = num_tiles * problem.num_heads * problem.batch
    programs = total
    if is_persistent:
        programs = num_programs(
            problem, tile.tile_q, tile.tile_k, tile.programs * multiprocessors(key.device)
        )
    scalars = (
        *exponent_scale(problem),
        last_key_offset(problem),
        num_tiles,
        problem.group_size,
        total,
        programs,
    )
    operands = *(operand(t, True) for t in (q, k, v, contiguous(*q.shape))), as_is
    options = {
        "dtype": problem.dtype,
        "width": padded_head_dim(problem.head_dim),
        "is_causal": problem.is_causal,
        "tile": tile,
    }
    return Recipe(kernel or Forward, key, operands, scalars, options)


class Turns(Fixed):
    """Which query tiles a program takes, one a round, and which key tiles each of them sees."""

    def __init__(
        self, tile: ForwardTile, is_causal: bool, causal_offset, num_tiles, total, programs, q, k
    ):
        self.tile = tile
        self.is_causal = is_causal
        self.causal_offset = causal_offset
        self.num_tiles = num_tiles
        self.total = total
        self.programs = programs
        self.num_heads = q.shape[2]
        self.seqlen_k = k.shape[0]

    def num_rounds(self):
        return (self.total + self.programs - 1) // self.programs

    def index(self, round):
        """Every other round goes backwards, so that no program gets the longest tile of each."""
        program = cute.arch.block_idx()[0]
        odd = round % 2
        return round * self.programs + program + odd * (self.programs - 1 - 2 * program)

    def first_row(self, index):
        """The first row of a query tile.

        Tiles of one head are neighbours, so that its keys and values stay in L2. In a causal
        problem the last tile sees the most keys: it comes first.
        """
        return (self.num_tiles - 1 - index % self.num_tiles) * self.tile.tile_q

    def head_and_batch(self, index):
        batch_head = index // self.num_tiles
        return batch_head % self.num_heads, batch_head // self.num_heads

    def num_key_tiles(self, q_start):
        end = self.seqlen_k
        if self.is_causal:
            end = cutlass.max(cutlass.min(end, q_start + self.tile.tile_q + self.causal_offset), 0)
        return (end + self.tile.tile_k - 1) // self.tile.tile_k


class Forward:
    """Hopper's kernel, for operands of 16 bits that the copy engine can move."""

    def __init__(self, *, dtype: torch.dtype, width: int, is_causal: bool, tile: ForwardTile):
        self.torch_dtype = dtype
        self.dtype = DTYPES[dtype]
        self.width = width
        self.is_causal = is_causal
        self.tile = tile
        # Tiles in shared memory. A slot of queries is one of 64 rows for each warpgroup.
        self.q_shape = 64, width, tile.query_stages * tile.warpgroups
        self.k_shape = tile.tile_k, width, tile.num_stages
        self.o_takes_q = o_takes_q(tile, width)
        self.o_shape = 64, width, tile.warpgroups

    def signature(self) -> tuple:
        q, k, v, o = (strided(self.torch_dtype, 4, True) for _ in range(4))
        lse = strided(torch.float32, 3, False)
        return q, k, v, o, lse, *[Float32(1)] * 3, *[Int32(1)] * 5

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
        num_tiles: Int32,
        group_size: Int32,
        total: Int32,
        programs: Int32,
        stream: cuda.CUstream,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_q, q = mover(load, q, self.q_shape)
        load_k, k = mover(load, k, self.k_shape)
        load_v, v = mover(load, v, self.k_shape)
        store_o, o = mover(store, o, self.o_shape)
        self.kernel(
            load_q, q, load_k, k, load_v, v, store_o, o, lse,
            factor, factor_huge, sign, causal_offset, num_tiles, group_size, total, programs,
        ).launch(
            grid=(programs, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.tile.programs,
            preferred_smem_carveout=100,  # else the driver is asked, which there need not be
        )  # fmt: skip

    @property
    def threads(self) -> int:
        """Of the consumers' warpgroups and the producer's."""
        return 128 * (self.tile.warpgroups + 1)

    def storage(self):
        tile = self.tile
        o_shape = (0, 0, 0) if self.o_takes_q else self.o_shape

        @cute.struct
        class Storage:
            q: room_for(self.dtype, self.q_shape)
            k: room_for(self.dtype, self.k_shape)
            v: room_for(self.dtype, self.k_shape)
            o: room_for(self.dtype, o_shape)
            q_full: barriers(tile.query_stages)
            q_empty: barriers(tile.query_stages)
            k_full: barriers(tile.num_stages)
            k_empty: barriers(tile.num_stages)
            v_full: barriers(tile.num_stages)
            v_empty: barriers(tile.num_stages)

        return Storage

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom,
        q: cute.Tensor,
        load_k: cute.CopyAtom,
        k: cute.Tensor,
        load_v: cute.CopyAtom,
        v: cute.Tensor,
        store_o: cute.CopyAtom,
        o: cute.Tensor,
        lse: cute.Tensor,
        factor: Float32,
        factor_huge: Float32,
        sign: Float32,
        causal_offset: Int32,
        num_tiles: Int32,
        group_size: Int32,
        total: Int32,
        programs: Int32,
    ):
        tile = self.tile
        groups = tile.warpgroups
        row_bytes = self.width * self.dtype.width // 8
        storage = SmemAllocator().allocate(self.storage())
        queries = Ring(
            tiles_in(storage.q, self.dtype, self.q_shape),
            storage.q_full, storage.q_empty, tile.query_stages, tile.tile_q * row_bytes,
        )  # fmt: skip
        keys = Ring(
            tiles_in(storage.k, self.dtype, self.k_shape),
            storage.k_full, storage.k_empty, tile.num_stages, tile.tile_k * row_bytes,
        )  # fmt: skip
        values = Ring(
            tiles_in(storage.v, self.dtype, self.k_shape),
            storage.v_full, storage.v_empty, tile.num_stages, tile.tile_k * row_bytes,
        )  # fmt: skip
        o_tiles = queries.tiles
        if const_expr(not self.o_takes_q):
            o_tiles = tiles_in(storage.o, self.dtype, self.o_shape)
        turns = Turns(tile, self.is_causal, causal_offset, num_tiles, total, programs, q, k)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for ring in (queries, keys, values):
                    ring.init(4 * groups)
            cute.arch.mbarrier_init_fence()
        if warp == self.threads // 32 - 4:
            for move in (load_q, load_k, load_v, store_o):
                cpasync.prefetch_descriptor(move)
        cute.arch.sync_threads()
        self.work(
            warp, load_q, q, load_k, k, load_v, v, queries, keys, values, o_tiles, store_o, o, lse,
            factor, factor_huge, sign, group_size, turns,
        )  # fmt: skip

    @cute.jit
    def work(
        self, warp, load_q, q, load_k, k, load_v, v, queries, keys, values, o_tiles, store_o, o,
        lse, factor, factor_huge, sign, group_size, turns,
    ):  # fmt: skip
        """What each warp does."""
        groups = self.tile.warpgroups
        if warp >= 4 * groups:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 4 * groups:
                self.produce(
                    load_q, q, load_k, k, load_v, v, queries, keys, values, group_size, turns
                )
        else:
            cute.arch.setmaxregister_increase(self.tile.registers)
            self.consume(
                warp // 4, queries, keys, values, o_tiles, store_o, o, lse,
                factor, factor_huge, sign, turns,
            )  # fmt: skip

    @cute.jit
    def produce(self, load_q, q, load_k, k, load_v, v, queries, keys, values, group_size, turns):
        """What the producer's warp does: key tiles go a tile ahead of value tiles.

        Where a query tile has to wait for O, the first value tile goes before it.
        """
        groups = self.tile.warpgroups
        early = 1 if self.o_takes_q else 0
        done = Int32(0)
        for round in cutlass.range(turns.num_rounds(), unroll=1):
            index = turns.index(round)
            if index < turns.total:
                q_start = turns.first_row(index)
                n = turns.num_key_tiles(q_start)
                head, batch = turns.head_and_batch(index)
                kv_head = head // group_size
                to_q, from_q = tiles_of(load_q, queries.tiles, q[None, None, head, batch])
                to_k, from_k = tiles_of(load_k, keys.tiles, k[None, None, kv_head, batch])
                to_v, from_v = tiles_of(load_v, values.tiles, v[None, None, kv_head, batch])
                if n > 0:
                    fill(keys, done, load_k, to_k, from_k, n - 1)
                    if const_expr(early > 0):
                        fill(values, done, load_v, to_v, from_v, n - 1)
                full_q = queries.begin_fill(round)
                for group in range_constexpr(groups):
                    cute.copy(
                        load_q,
                        from_q[None, q_start // 64 + group],
                        to_q[None, queries.slot(round) * groups + group],
                        tma_bar_ptr=full_q,
                    )
                for t in cutlass.range(1, n, unroll=1):
                    fill(keys, done + t, load_k, to_k, from_k, n - 1 - t)
                    if t > early:
                        fill(values, done + t - 1, load_v, to_v, from_v, n - t)
                if n > early:
                    fill(values, done + n - 1, load_v, to_v, from_v, 0)
                done += n

    @cute.jit
    def consume(
        self, group, queries, keys, values, o_tiles, store_o, o, lse,
        factor, factor_huge, sign, turns,
    ):  # fmt: skip
        """What one warpgroup does; `group` is uniform in a warp, so that addresses are as well."""
        tile, tile_k, width, groups = self.tile, self.tile.tile_k, self.width, self.tile.warpgroups
        causal_offset, seqlen_k = turns.causal_offset, turns.seqlen_k
        thread = cute.arch.thread_idx()[0] % 128
        qk = self.product(OperandMajorMode.K, tile_k, warpgroup.OperandSource.SMEM)
        pv = self.product(OperandMajorMode.MN, width, warpgroup.OperandSource.RMEM)
        q_left = qk.make_fragment_A(qk.get_slice(0).partition_A(queries.tiles))
        k_right = qk.make_fragment_B(qk.get_slice(0).partition_B(keys.tiles))
        v_right = pv.make_fragment_B(pv.get_slice(0).partition_B(transposed(values.tiles)))
        s = cute.make_rmem_tensor(qk.partition_shape_C((64, tile_k)), Float32)
        acc = cute.make_rmem_tensor(pv.partition_shape_C((64, width)), Float32)
        row = RowStatistics(rows_of(thread), first_column_of(thread), factor, factor_huge)
        done = Int32(0)
        turn = 1 + group
        next_turn = 1 + (group + 1) % groups
        meet = 1 + groups + group
        if const_expr(tile.take_turns):
            if group == groups - 1:
                cute.arch.barrier_arrive(barrier_id=next_turn, number_of_threads=256)
        for round in cutlass.range(turns.num_rounds(), unroll=1):
            index = turns.index(round)
            if index < turns.total:
                q_start = turns.first_row(index)
                n = turns.num_key_tiles(q_start)
                head, batch = turns.head_and_batch(index)
                q_start = q_start + 64 * group
                full = seqlen_k  # keys that every row sees
                if const_expr(self.is_causal):
                    full = cutlass.min(seqlen_k, q_start + causal_offset + 1)
                q_slot = queries.slot(round) * groups + group
                queries.await_tile(round)
                if sign != 1.0:
                    multiply_tile(queries.tiles, q_slot, sign, thread)
                    cute.arch.fence_view_async_shared()
                    cute.arch.barrier(barrier_id=meet, number_of_threads=128)
                no_key_seen(row, acc)
                if n > 0:
                    keys.await_tile(done)
                    if const_expr(tile.take_turns):
                        cute.arch.barrier(barrier_id=turn, number_of_threads=256)
                    # (1) S = Q K^T [64, tile_k], of the first tile
                    multiply(qk, s, q_left, k_right, False, q_slot, keys.slot(done))
                    if const_expr(tile.take_turns):
                        cute.arch.barrier_arrive(barrier_id=next_turn, number_of_threads=256)
                    warpgroup.wait_group(0)
                    keys.release(done)
                    if n == 1:
                        self.release_queries(queries, round)
                    if n * tile_k > full:
                        mask(s, row, q_start, (n - 1) * tile_k, seqlen_k, causal_offset)
                    online_softmax(s, row)
                    grown = Boolean(False)  # acc is zero: nothing to rescale
                    for t in cutlass.range(1, n, unroll=1):
                        # The wait for P V stands before the next product, not behind this softmax:
                        # within one block of instructions ptxas would move it ahead of the softmax,
                        # which is to run beside that product.
                        warpgroup.wait_group(0)
                        if t > 1:
                            values.release(done - 1)
                        p = as_left_operand(rounded(s, self.dtype))
                        # Behind the start of Q K^T, this would make ptxas run all products one
                        # after the other (C7512).
                        if grown:
                            rescale(acc, row.alpha)
                        keys.await_tile(done + 1)
                        if const_expr(tile.take_turns):
                            cute.arch.barrier(barrier_id=turn, number_of_threads=256)
                        # (1) S = Q K^T of the next tile, and beside it O += P V of this one
                        multiply(qk, s, q_left, k_right, False, q_slot, keys.slot(done + 1))
                        values.await_tile(done)
                        multiply(pv, acc, p, v_right, True, b_slot=values.slot(done))
                        if const_expr(tile.take_turns):
                            cute.arch.barrier_arrive(barrier_id=next_turn, number_of_threads=256)
                        warpgroup.wait_group(1)
                        keys.release(done + 1)
                        if t == n - 1:
                            self.release_queries(queries, round)
                        if const_expr(self.is_causal):
                            if (n - t) * tile_k > full:
                                k_start = (n - 1 - t) * tile_k
                                mask(s, row, q_start, k_start, seqlen_k, causal_offset)
                        grown = online_softmax(s, row)
                        done += 1
                    warpgroup.wait_group(0)
                    if n > 1:
                        values.release(done - 1)
                    p = as_left_operand(rounded(s, self.dtype))
                    if grown:
                        rescale(acc, row.alpha)
                    values.await_tile(done)
                    # O += P V of the last tile
                    multiply(pv, acc, p, v_right, True, b_slot=values.slot(done))
                    warpgroup.wait_group(0)
                    values.release(done)
                    done += 1
                else:
                    self.release_queries(queries, round)
                finish(acc, row, lse[batch, head, None], q_start, seqlen_k, causal_offset)
                o_head = o[None, None, head, batch]
                self.store(pv, acc, o_tiles, group, store_o, o_head, q_start, meet, queries, round)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(tile.take_turns):
            if group == 0:
                # a turn that nobody takes: each arrival is met
                cute.arch.barrier(barrier_id=turn, number_of_threads=256)

    def release_queries(self, queries, round):
        """After the last product with a query tile: its slot is free, unless O is to lie there."""
        if not self.o_takes_q:
            queries.release(round)

    @cute.jit
    def store(
        self, pv: cutlass.Constexpr, acc, o_tiles, group, store_o, o, q_start, meet, queries, round
    ):  # fmt: skip
        """Have the copy engine write a warpgroup's rows of one head, which meets at `meet`."""
        slot = group
        if const_expr(self.o_takes_q):
            slot = queries.slot(round) * self.tile.warpgroups + group
        o_tile = o_tiles[None, None, slot]
        thread = cute.arch.thread_idx()[0] % 128
        o_rounded = rounded(acc, self.dtype)
        is_storing = thread < 32  # the warp that speaks to the copy engine
        if is_storing:
            # until the copy engine has read the tile before
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=meet, number_of_threads=128)
        put_tile(pv, thread, o_rounded, o_tile)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=meet, number_of_threads=128)
        if is_storing:
            from_o, to_o = tiles_of(store_o, o_tile, o)
            cute.copy(store_o, from_o, to_o[None, q_start // 64])
            cute.arch.cp_async_bulk_commit_group()
        if const_expr(self.o_takes_q):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            queries.release(round)

    def product(self, b_major, columns: int, a_source) -> cute.TiledMma:
        """What multiplies the 64 rows of one warpgroup."""
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32,
            (1, 1, 1), (64, columns), a_source,
        )  # fmt: skip


@cute.jit
def fill(ring: cutlass.Constexpr, n, load, tiles, x_tiles, number):
    """Have the n-th filling of a ring start, with tile `number` of one head."""
    full = ring.begin_fill(n)
    cute.copy(load, x_tiles[None, number], tiles[None, ring.slot(n)], tma_bar_ptr=full)


@cute.jit
def multiply_tile(tiles: cute.Tensor, slot, sign, thread):
    """Multiply a tile's numbers by `sign`, in place: in whatever order they lie."""
    rows, width, slots = tiles.shape
    chunks = cute.size(rows) * cute.size(width) // 8
    pointer = cute.recast_ptr(tiles.iterator, dtype=tiles.element_type)  # without its swizzle
    flat = cute.make_tensor(pointer, cute.make_layout((8, chunks, cute.size(slots))))
    for i in cutlass.range(chunks // 128, unroll=1):
        chunk = flat[None, i * 128 + thread, slot]
        chunk.store((chunk.load().to(Float32) * sign).to(tiles.element_type))
