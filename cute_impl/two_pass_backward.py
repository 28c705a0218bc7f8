"""The backward on Hopper in two passes (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Shapes
    do, o, q, dq [batch, num_heads, seqlen_q, head_dim]
    k, v, dk, dv [batch, num_kv_heads, seqlen_k, head_dim]; lse, dlse [batch, num_heads, seqlen_q]

Steps, one kernel each
    1. dq: a program owns a query tile of one head and visits the key tiles that it sees. Before, it
       computes its rows' delta = rowsum(dO * O) - dlse and lse in base 2, for both passes
    2. dk/dv: a program owns a key tile of one key/value head and visits the query tiles that see it
Both passes recompute P = exp(S - lse). The GEMMs, numbered as in the reference:
    (1) S = Q K^T   (2) dV = P^T dO   (3) dP = dO V^T   (4) dQ = dS K   (5) dK = dS^T Q
    with dS = P * (dP - delta). Two passes repeat (1) and (3), seven GEMMs where the one pass of
    `backward.py` has five. But every output is written once, by one program, in a fixed order, so
    that equal inputs give equal bits; and no program holds dK, dV and dQ at once, for which a
    multiprocessor is too small at a width of 256.

Programs of one warpgroup load their tiles themselves: several run on a multiprocessor, and fill
each other's gaps. At a width of 256 one program fills it: there a warp of its own, the producer,
loads for two warpgroups.

Constraints
    head_dim 8 to 256, a multiple of 8, padded to 64, 128 or 256 in the tile; fp16, bf16; strides
    that the copy engine takes, 1 in head_dim, else multiples of 16 bytes

What lives where
    registers: dQ, or dK and dV, [64, width] of a warpgroup in fp32; S, P, dP, dS tiles. The dk/dv
        pass computes S and dP transposed, so that P^T and dS^T are the left operands of (2) and (5)
        as they stand in registers. At a width of 256 dK and dV are a warpgroup's each: one computes
        P and dV, and hands P on to the other, which computes dS and dK
    shared memory: the tiles a program owns, rings of the tiles it visits, P on its way
    HBM: the inputs, dq, dk, dv; and for the time of the call, in fp32,
        stats [batch, num_heads, 2, padded_rows], lse in base 2 and delta, where padded_rows is
        seqlen_q in whole tiles: past seqlen_q, and where a row sees no key, lse is +inf, which
        makes P zero without a mask
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers
from torch import Tensor

from flash_rosetta.copy_engine import as_is, operand
from flash_rosetta.cute_impl.gradients import (
    Plan,
    RowPieces,
    Visits,
    empty_dense,
    exponential_by_columns,
    exponential_by_rows,
    hide_by_columns,
    hide_by_rows,
    load_pieces,
    owned_by,
    put_stats,
    score_gradient_by_columns,
    score_gradient_by_rows,
    score_scalars,
)
from flash_rosetta.cute_impl.launch import Recipe
from flash_rosetta.cute_impl.tiles import DkDvTile, DqTile, padded_head_dim, tiles_for
from flash_rosetta.cute_impl.tiling import (
    CONSUMER_REGISTERS,
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
    stats_mover,
    stats_of,
    strided,
    tiles_in,
    tiles_of,
    transposed,
)
from flash_rosetta.layout import LaunchKey, contiguous

STAGES = 2
"""Slots of the rings of query and of dO tiles."""

P_SLOTS = 2
"""Of P on its way from one warpgroup to another."""

# Named barriers; 0 is sync_threads. Each warpgroup has its own MEET, each slot of P its own others.
STATS_READY, MEET, P_FREE, P_READY = 1, 2, 4, 4 + P_SLOTS


class TwoPassRecipes(NamedTuple):
    """Of the two launches, and the shape of what the first leaves to the second."""

    dq_pass: Recipe
    dkdv_pass: Recipe
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
            self.dq_pass.launch(q, k, v, do, o, lse, lse if dlse is None else dlse, stats, dq),
            self.dkdv_pass.launch(q, k, v, do, stats, dk, dv),
        ]
        return launches, dq, dk, dv


def two_pass_recipes(key: LaunchKey) -> TwoPassRecipes:
    problem = key.problem
    q, k, v, do, o, _, dlse = key.layouts
    tiles = tiles_for(problem)
    num_tiles = -(-problem.seqlen_q // tiles.dq.tile_q)
    dq, dkv = (operand(contiguous(*t.shape), tma=True) for t in (q, k))
    q, k, v, do, o = (operand(t, tma=True) for t in (q, k, v, do, o))
    scalars = score_scalars(problem)
    common = {"dtype": problem.dtype, "width": padded_head_dim(problem.head_dim)}
    return TwoPassRecipes(
        dq_pass=Recipe(
            Dq,
            key,
            operands=(q, k, v, do, o, as_is, as_is, as_is, dq),
            scalars=(*scalars, int(dlse is not None)),
            options={**common, "tile": tiles.dq},
        ),
        dkdv_pass=Recipe(
            DkDvByProduct if tiles.dkdv.by_product else DkDv,
            key,
            operands=(q, k, v, do, as_is, dkv, dkv),
            scalars=scalars,
            options={**common, "tile": tiles.dkdv},
        ),
        stats_shape=(problem.batch, problem.num_heads, 2, num_tiles * tiles.dq.tile_q),
    )


class Dq:
    """dq, lse in base 2 and delta of 64 rows of one head a warpgroup."""

    def __init__(self, *, dtype: torch.dtype, width: int, tile: DqTile):
        self.torch_dtype = dtype
        self.dtype = DTYPES[dtype]
        self.width = width
        self.tile = tile
        self.groups = tile.tile_q // 64
        self.has_producer = self.groups > 1
        # Tiles in shared memory. Each warpgroup has one of the queries.
        self.q_shape = 64, width, self.groups
        self.k_shape = tile.tile_k, width, tile.key_stages
        self.v_shape = tile.tile_k, width, tile.value_stages

    def signature(self) -> tuple:
        q, k, v, do, o, dq = (strided(self.torch_dtype, 4, True) for _ in range(6))
        lse, dlse = (strided(torch.float32, 3, False) for _ in range(2))
        stats = strided(torch.float32, 4, True)
        scalars = Float32(1), Float32(1), Int32(1), Int32(1)
        return q, k, v, do, o, lse, dlse, stats, dq, *scalars

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        stats: cute.Tensor,
        dq: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        causal_offset: Int32,
        has_dlse: Int32,
        stream: cuda.CUstream,
    ):
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        do_rows = do
        load_q, q = mover(load, q, self.q_shape)
        load_k, k = mover(load, k, self.k_shape)
        load_v, v = mover(load, v, self.v_shape)
        load_do, do = mover(load, do, self.q_shape)
        store_dq, dq = mover(store, dq, self.q_shape)
        seqlen_q, _, num_heads, batch_size = q.shape
        self.kernel(
            load_q, q, load_k, k, load_v, v, load_do, do, do_rows, o, lse, dlse, stats,
            store_dq, dq, scale, scale_log2, causal_offset, has_dlse,
        ).launch(
            grid=(cute.ceil_div(seqlen_q, self.tile.tile_q) * num_heads * batch_size, 1, 1),
            block=(128 * (self.groups + self.has_producer), 1, 1),
            stream=stream,
            min_blocks_per_mp=self.tile.programs,
            preferred_smem_carveout=100,  # else the driver is asked, which there need not be
        )  # fmt: skip

    def storage(self):
        @cute.struct
        class Storage:
            q: room_for(self.dtype, self.q_shape)
            do: room_for(self.dtype, self.q_shape)
            k: room_for(self.dtype, self.k_shape)
            v: room_for(self.dtype, self.v_shape)
            stats: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.tile.tile_q], 128]
            q_full: barriers(1)
            q_empty: barriers(1)
            do_full: barriers(1)
            do_empty: barriers(1)
            k_full: barriers(self.tile.key_stages)
            k_empty: barriers(self.tile.key_stages)
            v_full: barriers(self.tile.value_stages)
            v_empty: barriers(self.tile.value_stages)

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
        load_do: cute.CopyAtom,
        do: cute.Tensor,
        do_rows: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        stats: cute.Tensor,
        store_dq: cute.CopyAtom,
        dq: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        causal_offset: Int32,
        has_dlse: Int32,
    ):
        tile_q, tile_k, groups = self.tile.tile_q, self.tile.tile_k, self.groups
        at = DqShared(self, SmemAllocator().allocate(self.storage()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for move in (load_q, load_k, load_v, load_do, store_dq):
                cpasync.prefetch_descriptor(move)
            with cute.arch.elect_one():
                for ring in (at.q, at.do, at.k, at.v):
                    ring.init(4 * groups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        seqlen_q, _, num_heads, _ = q.shape
        seqlen_k, _, num_kv_heads, _ = k.shape
        num_tiles = cute.ceil_div(seqlen_q, tile_q)
        number, head, batch = owned_by(num_tiles, num_heads)
        # In a causal problem the last query tile sees the most keys: it starts first.
        number = num_tiles - 1 - number
        q_start = number * tile_q
        kv_head = head // (num_heads // num_kv_heads)
        # Each row sees all keys of tiles [0, full), none sees a key of a tile from `end` on.
        full = cutlass.max(cutlass.min(seqlen_k, q_start + causal_offset + 1), 0) // tile_k
        end = cutlass.max(cutlass.min(seqlen_k, q_start + causal_offset + tile_q), 0)
        end = cute.ceil_div(end, tile_k)

        keys = Feed(at.k, load_k, k[None, None, kv_head, batch])
        values = Feed(at.v, load_v, v[None, None, kv_head, batch])
        if warp == 0 and end > 0:
            queries = Feed(at.q, load_q, q[None, None, head, batch])
            dos = Feed(at.do, load_do, do[None, None, head, batch])
            queries.fill_all(number)
            keys.fill(0, 0)
            dos.fill_all(number)
            values.fill(0, 0)
        if const_expr(self.has_producer):
            if warp < 4:
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp == 0:
                    for n in cutlass.range(1, end, unroll=1):
                        keys.fill(n, n)
                        values.fill(n, n)
            else:
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                self.consume(
                    o, do_rows, lse, dlse, stats, store_dq, dq, at, keys, values, number, head,
                    batch, full, end, seqlen_k, scale, scale_log2, causal_offset, has_dlse,
                )  # fmt: skip
        else:
            for n in range_constexpr(1, self.tile.key_stages):
                if warp == 0 and n < end:
                    keys.fill(n, n)
                    values.fill(n, n)
            self.consume(
                o, do_rows, lse, dlse, stats, store_dq, dq, at, keys, values, number, head,
                batch, full, end, seqlen_k, scale, scale_log2, causal_offset, has_dlse,
            )  # fmt: skip

    @cute.jit
    def consume(
        self, o, do_rows, lse, dlse, stats, store_dq, dq, at, keys, values, number, head,
        batch, full, end, seqlen_k, scale, scale_log2, causal_offset, has_dlse,
    ):  # fmt: skip
        """What a warpgroup with 64 queries does."""
        tile_q, threads = self.tile.tile_q, 128 * self.groups
        thread = cute.arch.thread_idx()[0] - (128 if self.has_producer else 0)
        q_start = number * tile_q
        pieces = RowPieces(q_start, tile_q, self.width, thread, threads)
        o_pieces = load_pieces(o[batch, head, None, None], pieces)
        do_pieces = load_pieces(do_rows[batch, head, None, None], pieces)
        put_stats(
            o_pieces, do_pieces, lse[batch, head, None], dlse[batch, head, None], has_dlse, pieces,
            at.stats, 0,
        )  # fmt: skip
        cute.arch.barrier(barrier_id=STATS_READY, number_of_threads=threads)
        cute.arch.griddepcontrol_launch_dependents()

        own = DqOperands(self, at, thread, scale_log2)
        for r in range_constexpr(2):
            number_in_tile = 64 * own.group + rows_of(own.thread)[r]
            row = q_start + number_in_tile
            own.lse[r] = at.stats[0, number_in_tile]
            own.delta[r] = at.stats[1, number_in_tile]
            if own.first_column == 0:
                stats[batch, head, 0, row] = own.lse[r]
                stats[batch, head, 1, row] = own.delta[r]
            own.seen[r] = cutlass.min(seqlen_k, row + causal_offset + 1) - own.first_column
        if end > 0:
            at.q.await_tile(0)
            at.do.await_tile(0)
        for n in cutlass.range(full, unroll=1):
            self.visit(n, False, own, at, keys, values, end)
        for n in cutlass.range(full, end, unroll=1):
            self.visit(n, True, own, at, keys, values, end)
        dq_acc = own.dq_acc
        if end == 0:
            dq_acc.fill(0.0)
        scale_by(dq_acc, scale)
        # dQ takes the place of its warpgroup's queries.
        store_tile(
            own.grads, own.thread, dq_acc, at.q.tiles[None, None, own.group], MEET + own.group,
            store_dq, dq[None, None, head, batch], number * self.groups + own.group,
        )  # fmt: skip
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def visit(self, n, masked: cutlass.Constexpr[bool], own, at, keys, values, end):
        """What the n-th tile of keys adds to dQ."""
        tile_k = self.tile.tile_k
        k_right, k_t_right = (in_slot(x, at.k.slot(n)) for x in (own.k_right, own.k_t_right))
        v_right = in_slot(own.v_right, at.v.slot(n))
        s = cute.make_rmem_tensor(own.scores.partition_shape_C((64, tile_k)), Float32)
        dp = cute.make_rmem_tensor(s.layout, Float32)

        # (1) S = Q K^T and (3) dP = dO V^T
        at.k.await_tile(n)
        multiply(own.scores, s, own.q_left, k_right, False)
        at.v.await_tile(n)
        multiply(own.scores, dp, own.do_left, v_right, False)
        warpgroup.wait_group(1)
        exponential_by_rows(s, own.scale_log2, own.lse)
        if const_expr(masked):
            hide_by_rows(s, own.seen, n * tile_k)
        # It has arrived; but without a loop here, ptxas moves the wait for (3) up, and the
        # exponentials would run behind it, not beside it.
        at.k.await_tile(n)
        warpgroup.wait_group(0)
        at.v.release(n)
        score_gradient_by_rows(s, dp, own.delta)
        # (4) dQ += dS K
        ds = as_left_operand(rounded(dp, self.dtype))
        multiply(own.grads, own.dq_acc, ds, k_t_right, n > 0)
        warpgroup.wait_group(0)
        at.k.release(n)
        if const_expr(not self.has_producer):
            following = n + self.tile.key_stages
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0 and following < end:
                keys.fill(following, following)
                values.fill(following, following)


class DqShared(Fixed):
    """What a program of dq has in shared memory. Q and dO are rings of one tile, filled once."""

    def __init__(self, kernel: Dq, storage):
        tile, dtype = kernel.tile, kernel.dtype
        self.q = ring_in(storage, "q", dtype, kernel.q_shape, slots=1)
        self.do = ring_in(storage, "do", dtype, kernel.q_shape, slots=1)
        self.k = ring_in(storage, "k", dtype, kernel.k_shape)
        self.v = ring_in(storage, "v", dtype, kernel.v_shape)
        rows = cute.make_layout((2, tile.tile_q), stride=(tile.tile_q, 1))
        self.stats = storage.stats.get_tensor(rows)


class DqOperands(Fixed):
    """What a warpgroup multiplies, and what a thread of it keeps from visit to visit."""

    def __init__(self, kernel: Dq, at: DqShared, thread, scale_log2):
        self.group = cute.arch.make_warp_uniform(thread // 128) if kernel.groups > 1 else 0
        self.thread = thread % 128
        self.first_column = first_column_of(self.thread)
        self.scale_log2 = scale_log2
        self.scores, self.grads = products_of(kernel.dtype, kernel.width, kernel.tile.tile_k)
        scores, grads = self.scores.get_slice(0), self.grads.get_slice(0)
        self.q_left = in_slot(scores.make_fragment_A(scores.partition_A(at.q.tiles)), self.group)
        self.do_left = in_slot(scores.make_fragment_A(scores.partition_A(at.do.tiles)), self.group)
        self.k_right = scores.make_fragment_B(scores.partition_B(at.k.tiles))
        self.v_right = scores.make_fragment_B(scores.partition_B(at.v.tiles))
        self.k_t_right = grads.make_fragment_B(grads.partition_B(transposed(at.k.tiles)))
        self.dq_acc = cute.make_rmem_tensor(grads.partition_shape_C((64, kernel.width)), Float32)
        # Of a thread's two queries. `seen`: how many keys each sees, less the thread's first one.
        self.lse, self.delta = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        self.seen = cute.make_rmem_tensor(2, Int32)


class DkDv:
    """dk and dv of 64 keys of one head, by one warpgroup."""

    consumers = 1

    def __init__(self, *, dtype: torch.dtype, width: int, tile: DkDvTile):
        self.torch_dtype = dtype
        self.dtype = DTYPES[dtype]
        self.width = width
        self.tile = tile
        self.has_producer = self.consumers > 1
        # Tiles in shared memory.
        self.k_shape = 64, width, 1
        self.q_shape = tile.tile_q, width, STAGES

    def signature(self) -> tuple:
        q, k, v, do, dk, dv = (strided(self.torch_dtype, 4, True) for _ in range(6))
        stats = strided(torch.float32, 4, True)
        return q, k, v, do, stats, dk, dv, Float32(1), Float32(1), Int32(1)

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
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_q, q = mover(load, q, self.q_shape)
        load_k, k = mover(load, k, self.k_shape)
        load_v, v = mover(load, v, self.k_shape)
        load_do, do = mover(load, do, self.q_shape)
        load_stats, stats = stats_mover(stats, self.tile.tile_q)
        store_dk, dk = mover(store, dk, self.k_shape)
        store_dv, dv = mover(store, dv, self.k_shape)
        seqlen_k, _, num_kv_heads, batch_size = k.shape
        self.kernel(
            load_q, q, load_k, k, load_v, v, load_do, do, load_stats, stats, store_dk, dk,
            store_dv, dv, scale, scale_log2, causal_offset,
        ).launch(
            grid=(cute.ceil_div(seqlen_k, 64) * num_kv_heads * batch_size, 1, 1),
            block=(128 * (self.consumers + self.has_producer), 1, 1),
            stream=stream,
            min_blocks_per_mp=self.tile.programs,
            preferred_smem_carveout=100,  # else the driver is asked, which there need not be
            use_pdl=True,
        )  # fmt: skip

    def storage(self):
        tile_q = self.tile.tile_q

        @cute.struct
        class Storage:
            k: room_for(self.dtype, self.k_shape)
            v: room_for(self.dtype, self.k_shape)
            q: room_for(self.dtype, self.q_shape)
            do: room_for(self.dtype, self.q_shape)
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, self.p_size()], 128]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, tile_q * STAGES], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, tile_q * STAGES], 128]
            k_full: barriers(1)
            k_empty: barriers(1)
            v_full: barriers(1)
            v_empty: barriers(1)
            q_full: barriers(STAGES)
            q_empty: barriers(STAGES)
            do_full: barriers(STAGES)
            do_empty: barriers(STAGES)

        return Storage

    def p_size(self) -> int:
        """How much of P shared memory holds, on its way to another warpgroup."""
        return 0

    @cute.kernel
    def kernel(
        self,
        load_q: cute.CopyAtom,
        q: cute.Tensor,
        load_k: cute.CopyAtom,
        k: cute.Tensor,
        load_v: cute.CopyAtom,
        v: cute.Tensor,
        load_do: cute.CopyAtom,
        do: cute.Tensor,
        load_stats: cute.CopyAtom,
        stats: cute.Tensor,
        store_dk: cute.CopyAtom,
        dk: cute.Tensor,
        store_dv: cute.CopyAtom,
        dv: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        causal_offset: Int32,
    ):
        tile_q = self.tile.tile_q
        at = DkDvShared(self, SmemAllocator().allocate(self.storage()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for move in (load_q, load_k, load_v, load_do, load_stats, store_dk, store_dv):
                cpasync.prefetch_descriptor(move)
            with cute.arch.elect_one():
                for ring in (at.k, at.v, at.q, at.do):
                    ring.init(4 * self.consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # In a causal problem the first key tile is seen by the most queries: it starts first.
        seqlen_q, _, num_heads, _ = q.shape
        seqlen_k, _, num_kv_heads, _ = k.shape
        number, kv_head, batch = owned_by(cute.ceil_div(seqlen_k, 64), num_kv_heads)
        k_start = number * 64
        # What lies past seqlen_k is nonsense, which no product mixes into other rows.
        end = cute.ceil_div(seqlen_q, tile_q)
        first = cutlass.min(cutlass.max(k_start - causal_offset, 0) // tile_q, end)
        full = cutlass.max(k_start + 63 - causal_offset, 0)
        full = cutlass.max(cutlass.min(cute.ceil_div(full, tile_q), end), first)
        visits = Visits(number, kv_head, batch, num_heads // num_kv_heads, first, full, end)

        feed = DkDvFeed(load_q, q, load_do, do, load_stats, stats, at, visits)
        if warp == 0:
            if visits.total > 0:
                Feed(at.k, load_k, k[None, None, kv_head, batch]).fill(0, number)
                Feed(at.v, load_v, v[None, None, kv_head, batch]).fill(0, number)
            # From here on, what the other pass wrote. Every program comes here, so that what
            # follows this pass in the stream follows the other one too.
            cute.arch.griddepcontrol_wait()
        scalars = scale, scale_log2, causal_offset
        dk, dv = (t[None, None, kv_head, batch] for t in (dk, dv))
        if const_expr(self.has_producer):
            if warp < 4:
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp == 0:
                    n = Int32(0)
                    for member in cutlass.range(visits.group_size, unroll=1):
                        for tile in cutlass.range(first, end, unroll=1):
                            feed.fill(n, member, tile)
                            n += 1
            else:
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                self.consume(store_dk, dk, store_dv, dv, at, visits, feed, *scalars)
        else:
            self.consume(store_dk, dk, store_dv, dv, at, visits, feed, *scalars)

    @cute.jit
    def consume(
        self, store_dk, dk, store_dv, dv, at, visits, feed, scale, scale_log2, causal_offset
    ):
        """What the warpgroup does."""
        thread = cute.arch.thread_idx()[0]
        own = DkDvOperands(self, at, thread, scale_log2)
        own.see_from(visits.number * 64 - causal_offset)
        # What is loaded next: of which head of the group, and which tile.
        member, tile = Int32(0), visits.first
        for n in range_constexpr(STAGES):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0 and n < visits.total:
                feed.fill(n, member, tile)
            # If deferred, a visit has the slot filled that the visit before used.
            if const_expr(n < STAGES - 1 or not self.tile.deferred):
                member, tile = after(member, tile, visits)
        if visits.total > 0:
            at.k.await_tile(0)
            at.v.await_tile(0)
        n = Int32(0)
        for _ in cutlass.range(visits.group_size, unroll=1):
            for q_number in cutlass.range(visits.first, visits.full, unroll=1):
                self.visit(n, q_number, True, member, tile, own, at, visits, feed)
                n += 1
                member, tile = after(member, tile, visits)
            if const_expr(self.tile.deferred):
                # Else ptxas cannot tell what is under way where one loop follows the other.
                warpgroup.wait_group(0)
            for q_number in cutlass.range(visits.full, visits.end, unroll=1):
                self.visit(n, q_number, False, member, tile, own, at, visits, feed)
                n += 1
                member, tile = after(member, tile, visits)
            if const_expr(self.tile.deferred):
                warpgroup.wait_group(0)
        dk_acc, dv_acc = own.dk_acc, own.dv_acc
        if visits.total == 0:
            dk_acc.fill(0.0)
            dv_acc.fill(0.0)
        scale_by(dk_acc, scale)
        # dV takes V's place, dK takes K's.
        v_tile, k_tile = at.v.tiles[None, None, 0], at.k.tiles[None, None, 0]
        store_tile(own.grads, thread, dv_acc, v_tile, MEET, store_dv, dv, visits.number)
        store_tile(own.grads, thread, dk_acc, k_tile, MEET, store_dk, dk, visits.number)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def visit(
        self, n, q_number, masked: cutlass.Constexpr[bool], member, tile, own, at, visits, feed
    ):
        """What the n-th tile of queries adds to dK and dV; the tile to be loaded is given too."""
        slot, deferred = at.q.slot(n), self.tile.deferred
        q_right, do_right, do_t_right, q_t_right = (
            in_slot(x, slot) for x in (own.q_right, own.do_right, own.do_t_right, own.q_t_right)
        )
        s_t, dp_t = own.scores_tile(), own.scores_tile()

        # (1) S^T = K Q^T and (3) dP^T = V dO^T
        at.q.await_tile(n)
        multiply(own.scores, s_t, own.k_left, q_right, False)
        at.do.await_tile(n)
        multiply(own.scores, dp_t, own.v_left, do_right, False)
        warpgroup.wait_group(1)
        if const_expr(deferred):
            # The products of the visit before are done too.
            if n > 0:
                self.free(n - 1, member, tile, at, visits, feed)
        self.exponential(s_t, slot, q_number, masked, own, at)
        p_t = as_left_operand(rounded(s_t, self.dtype))
        # It has arrived; but without a loop here, ptxas moves the wait for (3) up, and the
        # exponentials would run behind it, not beside it.
        at.q.await_tile(n)
        warpgroup.wait_group(0)
        score_gradient_by_columns(s_t, dp_t, at.delta[None, slot], own.first_column)
        ds_t = as_left_operand(rounded(dp_t, self.dtype))
        # (2) dV += P^T dO and (5) dK += dS^T Q
        multiply(own.grads, own.dv_acc, p_t, do_t_right, n > 0)
        multiply(own.grads, own.dk_acc, ds_t, q_t_right, n > 0)
        if const_expr(not deferred):
            warpgroup.wait_group(0)
            self.free(n, member, tile, at, visits, feed)

    @cute.jit
    def free(self, n, member, tile, at, visits, feed):
        """This warp is done with the n-th tiles; the one that loads has others take their place."""
        cute.arch.sync_warp()  # each lane has read its rows' statistics
        at.q.release(n)
        at.do.release(n)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0 and n + STAGES < visits.total:
            feed.fill(n + STAGES, member, tile)

    @cute.jit
    def exponential(self, s_t, slot, q_number, masked: cutlass.Constexpr[bool], own, at):
        """S^T becomes P^T."""
        exponential_by_columns(s_t, own.scale_log2, at.lse[None, slot], own.first_column)
        if const_expr(masked):
            hide_by_columns(s_t, own.seen_from, q_number * self.tile.tile_q)


class DkDvByProduct(DkDv):
    """dk and dv of 64 keys of one head, by a warpgroup each.

    Each has its visit's next (1) or (3) started behind its (2) or (5), to run beside the other's
    numbers.
    """

    consumers = 2

    def p_size(self) -> int:
        return 64 * self.tile.tile_q * P_SLOTS

    @cute.jit
    def consume(
        self, store_dk, dk, store_dv, dv, at, visits, feed, scale, scale_log2, causal_offset
    ):
        """What each warpgroup does."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 8:
            self.consume_dv(store_dv, dv, at, visits, scale_log2, causal_offset)
        else:
            self.consume_dk(store_dk, dk, at, visits, scale)

    @cute.jit
    def consume_dv(self, store_dv, dv, at, visits, scale_log2, causal_offset):
        """What the warpgroup does that computes P and dV."""
        thread = cute.arch.thread_idx()[0] - 128
        own = DkDvOperands(self, at, thread, scale_log2)
        own.see_from(visits.number * 64 - causal_offset)
        s_t = own.scores_tile()
        if visits.total > 0:
            at.k.await_tile(0)
            at.q.await_tile(0)
            multiply(own.scores, s_t, own.k_left, in_slot(own.q_right, 0), False)
            warpgroup.wait_group(0)
        n = Int32(0)
        for member in cutlass.range(visits.group_size, unroll=1):
            # The last visit of all has no (1) to start.
            stop = visits.end - 1 if member == visits.group_size - 1 else visits.end
            full = cutlass.min(visits.full, stop)
            for q_number in cutlass.range(visits.first, full, unroll=1):
                self.visit_dv(n, q_number, True, False, s_t, own, at)
                n += 1
            for q_number in cutlass.range(visits.full, stop, unroll=1):
                self.visit_dv(n, q_number, False, False, s_t, own, at)
                n += 1
        if visits.total > 0:
            self.visit_dv(n, visits.end - 1, True, True, s_t, own, at)
        warpgroup.wait_group(0)
        dv_acc = own.dv_acc
        if visits.total == 0:
            dv_acc.fill(0.0)
        # dV takes K's place: the other warpgroup may still read V.
        tile = at.k.tiles[None, None, 0]
        store_tile(own.grads, thread, dv_acc, tile, MEET, store_dv, dv, visits.number)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def visit_dv(
        self, n, q_number, masked: cutlass.Constexpr[bool], last: cutlass.Constexpr[bool],
        s_t, own, at,
    ):  # fmt: skip
        """P of the n-th tile of queries, handed on, and what it adds to dV.

        s_t is S^T of this visit, and is left as that of the next.
        """
        slot, p_slot = at.q.slot(n), n & (P_SLOTS - 1)
        self.exponential(s_t, slot, q_number, masked, own, at)
        cute.arch.sync_warp()  # each lane has read lse
        at.q.release(n)
        p_t = rounded(s_t, self.dtype)
        if n >= P_SLOTS:
            cute.arch.barrier(barrier_id=P_FREE + p_slot, number_of_threads=256)
        cute.autovec_copy(in_eights(p_t), at.p[None, None, own.thread, p_slot])
        cute.arch.barrier_arrive(barrier_id=P_READY + p_slot, number_of_threads=256)
        # (2) dV += P^T dO, and the next (1) S^T = K Q^T
        at.do.await_tile(n)
        do_t_right = in_slot(own.do_t_right, slot)
        multiply(own.grads, own.dv_acc, as_left_operand(p_t), do_t_right, n > 0)
        if const_expr(not last):
            at.q.await_tile(n + 1)
            q_right = in_slot(own.q_right, at.q.slot(n + 1))
            multiply(own.scores, s_t, own.k_left, q_right, False)
            warpgroup.wait_group(1)
            at.do.release(n)
            warpgroup.wait_group(0)

    @cute.jit
    def consume_dk(self, store_dk, dk, at, visits, scale):
        """What the warpgroup does that computes dP, dS and dK."""
        thread = cute.arch.thread_idx()[0] - 256
        own = DkDvOperands(self, at, thread, Float32(0.0))
        dp_t = own.scores_tile()
        if visits.total > 0:
            at.v.await_tile(0)
            at.do.await_tile(0)
            multiply(own.scores, dp_t, own.v_left, in_slot(own.do_right, 0), False)
            warpgroup.wait_group(0)
        for n in cutlass.range(visits.total - 1, unroll=1):
            self.visit_dk(n, False, dp_t, own, at, visits)
        if visits.total > 0:
            self.visit_dk(visits.total - 1, True, dp_t, own, at, visits)
        warpgroup.wait_group(0)
        dk_acc = own.dk_acc
        if visits.total == 0:
            dk_acc.fill(0.0)
        scale_by(dk_acc, scale)
        # dK takes V's place: the other warpgroup may still read K.
        tile = at.v.tiles[None, None, 0]
        store_tile(own.grads, thread, dk_acc, tile, MEET + 1, store_dk, dk, visits.number)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def visit_dk(self, n, last: cutlass.Constexpr[bool], dp_t, own, at, visits):
        """What the n-th tile of queries adds to dK, with P from the other warpgroup.

        dp_t is dP^T of this visit, and is left as that of the next.
        """
        slot, p_slot = at.q.slot(n), n & (P_SLOTS - 1)
        p_t = cute.make_rmem_tensor(dp_t.layout, self.dtype)
        cute.arch.barrier(barrier_id=P_READY + p_slot, number_of_threads=256)
        cute.autovec_copy(at.p[None, None, own.thread, p_slot], in_eights(p_t))
        if n + P_SLOTS < visits.total:
            cute.arch.barrier_arrive(barrier_id=P_FREE + p_slot, number_of_threads=256)
        score_gradient_by_columns(p_t, dp_t, at.delta[None, slot], own.first_column)
        cute.arch.sync_warp()  # each lane has read delta
        at.do.release(n)
        # (5) dK += dS^T Q, and the next (3) dP^T = V dO^T
        at.q.await_tile(n)
        ds_t = as_left_operand(rounded(dp_t, self.dtype))
        multiply(own.grads, own.dk_acc, ds_t, in_slot(own.q_t_right, slot), n > 0)
        if const_expr(not last):
            at.do.await_tile(n + 1)
            do_right = in_slot(own.do_right, at.do.slot(n + 1))
            multiply(own.scores, dp_t, own.v_left, do_right, False)
            warpgroup.wait_group(1)
            at.q.release(n)
            warpgroup.wait_group(0)


class DkDvShared(Fixed):
    """What a program of dk/dv has in shared memory. K and V are rings of one tile, filled once."""

    def __init__(self, kernel: DkDv, storage):
        tile_q, dtype = kernel.tile.tile_q, kernel.dtype
        self.k = ring_in(storage, "k", dtype, kernel.k_shape)
        self.v = ring_in(storage, "v", dtype, kernel.k_shape)
        # With each row of Q comes its lse, with each of dO its delta.
        self.q = ring_in(storage, "q", dtype, kernel.q_shape, more_bytes=4 * tile_q)
        self.do = ring_in(storage, "do", dtype, kernel.q_shape, more_bytes=4 * tile_q)
        self.lse = storage.lse.get_tensor(cute.make_layout((tile_q, STAGES)))
        self.delta = storage.delta.get_tensor(cute.make_layout((tile_q, STAGES)))
        if kernel.p_size():
            # 16 bytes a thread side by side, so that no two of a quarter warp meet in a bank.
            layout = cute.make_layout(
                (8, tile_q // 16, 128, P_SLOTS), stride=(1, 8 * 128, 8, 64 * tile_q)
            )
            self.p = storage.p.get_tensor(layout)


class DkDvFeed(Fixed):
    """How rings of query and dO tiles, with their lse and delta, are filled."""

    def __init__(self, load_q, q, load_do, do, load_stats, stats, at: DkDvShared, visits: Visits):
        self.load_q = load_q
        self.q = q
        self.load_do = load_do
        self.do = do
        self.load_stats = load_stats
        self.stats = stats
        self.at = at
        self.visits = visits

    def fill(self, n, member, tile) -> None:
        """Have the n-th filling start, of a head of the group."""
        at, batch = self.at, self.visits.batch
        head = self.visits.kv_head * self.visits.group_size + member
        slot, load = at.q.slot(n), self.load_stats
        to_lse, lse = stats_of(load, at.lse, self.stats[None, 0, head, batch])
        to_delta, delta = stats_of(load, at.delta, self.stats[None, 1, head, batch])
        full = Feed(at.q, self.load_q, self.q[None, None, head, batch]).fill(n, tile)
        cute.copy(load, lse[None, tile], to_lse[None, slot], tma_bar_ptr=full)
        full = Feed(at.do, self.load_do, self.do[None, None, head, batch]).fill(n, tile)
        cute.copy(load, delta[None, tile], to_delta[None, slot], tma_bar_ptr=full)


class DkDvOperands(Fixed):
    """What a warpgroup multiplies, and what a thread of it keeps from visit to visit."""

    def __init__(self, kernel: DkDv, at: DkDvShared, thread, scale_log2):
        self.thread = thread
        self.first_column = first_column_of(thread)
        self.scale_log2 = scale_log2
        self.scores, self.grads = products_of(kernel.dtype, kernel.width, kernel.tile.tile_q)
        scores, grads = self.scores.get_slice(0), self.grads.get_slice(0)
        self.k_left = in_slot(scores.make_fragment_A(scores.partition_A(at.k.tiles)), 0)
        self.v_left = in_slot(scores.make_fragment_A(scores.partition_A(at.v.tiles)), 0)
        self.q_right = scores.make_fragment_B(scores.partition_B(at.q.tiles))
        self.do_right = scores.make_fragment_B(scores.partition_B(at.do.tiles))
        self.do_t_right = grads.make_fragment_B(grads.partition_B(transposed(at.do.tiles)))
        self.q_t_right = grads.make_fragment_B(grads.partition_B(transposed(at.q.tiles)))
        self.dk_acc, self.dv_acc = (
            cute.make_rmem_tensor(grads.partition_shape_C((64, kernel.width)), Float32)
            for _ in range(2)
        )
        self.scores_shape = scores.partition_shape_C((64, kernel.tile.tile_q))

    def see_from(self, first_query) -> None:
        """Keep, of a thread's two keys, the first query that sees each, less the thread's first
        one; the tile's first key is seen from `first_query` on.
        """
        self.seen_from = [first_query + row - self.first_column for row in rows_of(self.thread)]

    def scores_tile(self) -> cute.Tensor:
        """Registers for (1) or (3)."""
        return cute.make_rmem_tensor(self.scores_shape, Float32)


class Feed(Fixed):
    """A ring, and the tiles of one head that it is filled with."""

    def __init__(self, ring: Ring, load: cute.CopyAtom, x: cute.Tensor):
        self.ring = ring
        self.load = load
        self.to_ring, self.from_x = tiles_of(load, ring.tiles, x)

    def fill(self, n, number):
        """Have the n-th filling start, with tile `number`. Returns the barrier that it tells."""
        full = self.ring.begin_fill(n)
        to_slot = self.to_ring[None, self.ring.slot(n)]
        cute.copy(self.load, self.from_x[None, number], to_slot, tma_bar_ptr=full)
        return full

    def fill_all(self, number) -> None:
        """Have the only filling start, with all the tiles there is room for, the `number`-th."""
        full = self.ring.begin_fill(0)
        count = cute.size(self.ring.tiles, mode=[2])
        for i in range(count):
            from_x = self.from_x[None, number * count + i]
            cute.copy(self.load, from_x, self.to_ring[None, i], tma_bar_ptr=full)


def ring_in(
    storage, name: str, dtype, shape: tuple[int, int, int], slots: int = 0, more_bytes: int = 0
) -> Ring:
    """The ring of tiles in a field of shared memory, of as many slots unless given.

    `more_bytes`: what comes with each filling beside its tile.
    """
    tiles = tiles_in(getattr(storage, name), dtype, shape)
    full, empty = getattr(storage, f"{name}_full"), getattr(storage, f"{name}_empty")
    rows, width, count = shape
    slots = slots or count
    num_bytes = rows * width * count // slots * dtype.width // 8 + more_bytes
    return Ring(tiles, full, empty, slots, num_bytes)


def products_of(dtype, width: int, columns: int) -> tuple[cute.TiledMma, cute.TiledMma]:
    """What multiplies 64 rows: (1) and (3), [64, columns]; (2), (4) and (5), [64, width]."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    make, one = hopper_helpers.make_trivial_tiled_mma, (1, 1, 1)
    scores = make(dtype, dtype, k_major, k_major, Float32, one, (64, columns))
    registers = warpgroup.OperandSource.RMEM
    grads = make(dtype, dtype, k_major, mn_major, Float32, one, (64, width), registers)
    return scores, grads


def in_slot(operands: cute.Tensor, slot) -> cute.Tensor:
    """Of a ring of operands, that of one slot."""
    return operands[None, None, None, slot]


def in_eights(x: cute.Tensor) -> cute.Tensor:
    """A thread's 16-bit numbers, 16 bytes at a time."""
    return cute.make_tensor(x.iterator, cute.make_layout((8, cute.size(x) // 8)))


def scale_by(acc: cute.Tensor, scale: Float32) -> None:
    for i in range(cute.size(acc)):
        acc[i] = acc[i] * scale


@cute.jit
def store_tile(product, thread, acc, tile: cute.Tensor, meet, store, x: cute.Tensor, number):
    """Write a warpgroup's product to the number-th 64 rows of one head x, through a tile in shared
    memory that its products have read, and no other's.
    """
    cute.arch.barrier(barrier_id=meet, number_of_threads=128)
    put_tile(product, thread, rounded(acc, tile.element_type), tile)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=meet, number_of_threads=128)
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        from_tile, to_x = tiles_of(store, tile, x)
        cute.copy(store, from_tile, to_x[None, number])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def after(member, tile, visits):
    """The query tile that follows: of the same head of the group, or the next one's first."""
    tile += 1
    if tile >= visits.end:
        tile = visits.first
        member += 1
    return member, tile
