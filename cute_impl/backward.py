"""FlashAttention-2 backward in CuTe DSL (arXiv 2307.08691, algorithm 2), on Hopper in one pass.

Shapes
    do, o, q, dq [batch, num_heads, seqlen_q, head_dim]
    k, v, dk, dv [batch, num_kv_heads, seqlen_k, head_dim]; lse, dlse [batch, num_heads, seqlen_q]

Steps, one kernel each
    1. preprocess: delta = rowsum(dO * O) - dlse, lse in base 2, and dq_acc = 0
    2. one pass: a program owns a key tile of one key/value head and visits the query tiles that see
       it; it writes dk and dv, and adds to dq_acc
    3. postprocess: dq = scale dq_acc, in dq's dtype and order
The GEMMs of a visit, numbered as in the reference, with P = exp(S - lse), dS = P * (dP - delta):
    (1) S = Q K^T   (2) dV = P^T dO   (3) dP = dO V^T   (4) dQ = dS K   (5) dK = dS^T Q
(1), (3) and (4) are computed transposed: P^T and dS^T then are the left operands of (2) and (5) as
they stand in registers.

One warp, the producer, has the copy engine fill rings of query and dO tiles; two warpgroups of 64
keys each multiply asynchronously; another warp has the copy engine add their dQ tiles to dq_acc.

Key tiles add to a row of dq in any order, whose sum then may differ in its last bits from run to
run. Where that must not be, where a key tile's dK and dV do not fit in registers beside dQ
(head_dim > 128), and for short problems, `two_pass_backward.py` runs; for fp32, for strides that
the copy engine does not take and on other cards `portable_backward.py`.

Constraints
    head_dim 8 to 128, a multiple of 8, padded to 64 or 128 in the tile; fp16, bf16; strides that
    the copy engine takes, 1 in head_dim, else multiples of 16 bytes

What lives where
    registers: dK and dV [64, width] of a warpgroup in fp32; S^T, dP^T [64, tile_q]; half of dQ^T
    shared memory: K and V tiles; rings of Q and dO tiles with their lse and delta; dS, of which
        (4) needs both warpgroups' keys; dQ on its way to dq_acc
    HBM: the inputs, dq, dk, dv; and for the time of the call, in fp32,
        stats [batch, num_heads, 2, padded_rows], lse in base 2 and delta, where padded_rows is
        seqlen_q in whole tiles: past seqlen_q, and where a row sees no key, lse is +inf, which
        makes P zero without a mask
        dq_acc [batch, num_heads, num_tiles, tile_q width], padded_rows width of them a head, twice
        q's bytes at least; each tile in the order in which threads hold it
"""

from functools import lru_cache
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.experimental import primitives
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
    hide_by_columns,
    load_pieces,
    owned_by,
    put_stats,
    score_gradient_by_columns,
    score_scalars,
)
from flash_rosetta.cute_impl.launch import Recipe
from flash_rosetta.cute_impl.portable_backward import PortableRecipes, portable_recipes
from flash_rosetta.cute_impl.tiles import (
    OnePassTile,
    padded_head_dim,
    takes_one_pass,
    tiles_for,
)
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
from flash_rosetta.cute_impl.two_pass_backward import TwoPassRecipes, two_pass_recipes
from flash_rosetta.hopper import can_use_tma
from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem

CONSUMERS = 2
"""Warpgroups that multiply, each with 64 keys of the tile."""

TILE_K = 64 * CONSUMERS

DS_SLOTS = 2
"""One would have the warpgroups meet twice a visit: before they write dS, and after."""

PREPROCESS_THREADS = 256

# Named barriers; 0 is sync_threads. Each warpgroup has its own of the last two.
DS_READY, EPILOGUE, DQ_FREE, DQ_READY = 1, 2, 3, 3 + CONSUMERS


def plan_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    problem: Problem,
    one_pass: bool | None = None,
) -> Plan:
    """The launches that compute dq, dk and dv, and the tensors they will fill.

    `one_pass`: where the copy engine can move the tensors, in one pass or in two; what ships if
    left out.
    """
    key = launch_key(problem, q, k, v, do, o, lse, dlse)
    return _recipes(key, one_pass).plan(do, dlse, q, k, v, o, lse)


class OnePassRecipes(NamedTuple):
    """Of the three launches, and the shapes of what they leave to each other."""

    preprocess: Recipe
    one_pass: Recipe
    postprocess: Recipe
    stats_shape: tuple[int, ...]
    dq_acc_shape: tuple[int, ...]

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
        dq_acc = q.new_empty(self.dq_acc_shape, dtype=torch.float32)
        launches = [
            self.preprocess.launch(o, do, lse, lse if dlse is None else dlse, stats, dq_acc),
            self.one_pass.launch(q, k, v, do, stats, dq_acc, dk, dv),
            self.postprocess.launch(dq_acc, dq),
        ]
        return launches, dq, dk, dv


@lru_cache(maxsize=4096)
def _recipes(
    key: LaunchKey, one_pass: bool | None
) -> OnePassRecipes | TwoPassRecipes | PortableRecipes:
    """Of the kernels that the problem is for."""
    problem = key.problem
    q, k, v, do, o, _, dlse = key.layouts
    if not can_use_tma(problem, q, k, v, do, o):
        return portable_recipes(key)
    tile = tiles_for(problem).one_pass
    if tile is None or not (takes_one_pass(problem) if one_pass is None else one_pass):
        return two_pass_recipes(key)
    width = padded_head_dim(problem.head_dim)
    num_tiles = -(-problem.seqlen_q // tile.tile_q)
    heads = problem.batch, problem.num_heads
    dq, dkv = (operand(contiguous(*t.shape), tma=True) for t in (q, k))
    q, k, v, do, o = (operand(t, tma=True) for t in (q, k, v, do, o))
    common = {"dtype": problem.dtype, "width": width, "tile": tile}
    return OnePassRecipes(
        preprocess=Recipe(
            Preprocess,
            key,
            operands=(o, do, as_is, as_is, as_is, as_is),
            scalars=(int(dlse is not None),),
            options=common,
        ),
        one_pass=Recipe(
            OnePass,
            key,
            operands=(q, k, v, do, as_is, as_is, dkv, dkv),
            scalars=score_scalars(problem),
            options=common,
        ),
        postprocess=Recipe(
            Postprocess, key, operands=(as_is, dq), scalars=(problem.scale,), options=common
        ),
        stats_shape=(*heads, 2, num_tiles * tile.tile_q),
        dq_acc_shape=(*heads, num_tiles, tile.tile_q * width),
    )


class Preprocess:
    """lse in base 2 and delta of `tile_q` rows of one head, and zeros in their dq_acc."""

    def __init__(self, *, dtype: torch.dtype, width: int, tile: OnePassTile):
        self.torch_dtype = dtype
        self.dtype = DTYPES[dtype]
        self.width = width
        self.tile_q = tile.tile_q

    def signature(self) -> tuple:
        o, do = (strided(self.torch_dtype, 4, True) for _ in range(2))
        lse, dlse = (strided(torch.float32, 3, False) for _ in range(2))
        stats, dq_acc = (strided(torch.float32, 4, True) for _ in range(2))
        return o, do, lse, dlse, stats, dq_acc, Int32(1)

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        stats: cute.Tensor,
        dq_acc: cute.Tensor,
        has_dlse: Int32,
        stream: cuda.CUstream,
    ):
        batch_size, num_heads, num_tiles, _ = dq_acc.shape
        self.kernel(o, do, lse, dlse, stats, dq_acc, has_dlse).launch(
            grid=(num_tiles * num_heads * batch_size, 1, 1),
            block=(PREPROCESS_THREADS, 1, 1),
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
        dq_acc: cute.Tensor,
        has_dlse: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        _, num_heads, num_tiles, _ = dq_acc.shape
        number, head, batch = owned_by(num_tiles, num_heads)
        start = number * self.tile_q
        pieces = RowPieces(start, self.tile_q, self.width, thread, PREPROCESS_THREADS)
        o_pieces = load_pieces(o[batch, head, None, None], pieces)
        do_pieces = load_pieces(do[batch, head, None, None], pieces)
        cute.arch.griddepcontrol_launch_dependents()

        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        acc = cute.logical_divide(dq_acc[batch, head, number, None], 4)
        for i in range_constexpr(self.tile_q * self.width // 4 // PREPROCESS_THREADS):
            cute.autovec_copy(zeros, acc[None, thread + i * PREPROCESS_THREADS])
        put_stats(
            o_pieces, do_pieces, lse[batch, head, None], dlse[batch, head, None], has_dlse, pieces,
            stats[batch, head, None, None], start,
        )  # fmt: skip


class OnePass:
    """dk and dv of 128 keys of one head, and what they add to dq."""

    def __init__(self, *, dtype: torch.dtype, width: int, tile: OnePassTile):
        self.torch_dtype = dtype
        self.dtype = DTYPES[dtype]
        self.width = width
        self.tile_q = tile.tile_q
        self.num_stages = tile.num_stages
        # Tiles in shared memory.
        self.k_shape = TILE_K, width, 1
        self.q_shape = tile.tile_q, width, tile.num_stages
        self.ds_shape = tile.tile_q, TILE_K, DS_SLOTS

    def signature(self) -> tuple:
        q, k, v, do, dk, dv = (strided(self.torch_dtype, 4, True) for _ in range(6))
        stats, dq_acc = (strided(torch.float32, 4, True) for _ in range(2))
        return q, k, v, do, stats, dq_acc, dk, dv, Float32(1), Float32(1), Int32(1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        stats: cute.Tensor,
        dq_acc: cute.Tensor,
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
        load_stats, stats = stats_mover(stats, self.tile_q)
        store_dk, dk = mover(store, dk, self.k_shape)
        store_dv, dv = mover(store, dv, self.k_shape)
        seqlen_k, _, num_kv_heads, batch_size = k.shape
        self.kernel(
            load_q, q, load_k, k, load_v, v, load_do, do, load_stats, stats, dq_acc,
            store_dk, dk, store_dv, dv, scale, scale_log2, causal_offset,
        ).launch(
            grid=(cute.ceil_div(seqlen_k, TILE_K) * num_kv_heads * batch_size, 1, 1),
            block=(128 * (1 + CONSUMERS), 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas drops setmaxregister
            preferred_smem_carveout=100,  # else the driver is asked, which there need not be
            use_pdl=True,
        )  # fmt: skip

    def storage(self):
        num_stages = self.num_stages

        def numbers(count: int):
            return cute.struct.Align[cute.struct.MemRange[Float32, count], 128]

        @cute.struct
        class Storage:
            k: room_for(self.dtype, self.k_shape)
            v: room_for(self.dtype, self.k_shape)
            q: room_for(self.dtype, self.q_shape)
            do: room_for(self.dtype, self.q_shape)
            ds: room_for(self.dtype, self.ds_shape)
            dq: numbers(self.tile_q * self.width)
            lse: numbers(self.tile_q * num_stages)
            delta: numbers(self.tile_q * num_stages)
            k_full: barriers(1)
            k_empty: barriers(1)
            v_full: barriers(1)
            v_empty: barriers(1)
            q_full: barriers(num_stages)
            q_empty: barriers(num_stages)
            do_full: barriers(num_stages)
            do_empty: barriers(num_stages)

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
        load_stats: cute.CopyAtom,
        stats: cute.Tensor,
        dq_acc: cute.Tensor,
        store_dk: cute.CopyAtom,
        dk: cute.Tensor,
        store_dv: cute.CopyAtom,
        dv: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        causal_offset: Int32,
    ):
        tile_q = self.tile_q
        at = Shared(self, SmemAllocator().allocate(self.storage()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for move in (load_q, load_k, load_v, load_do, load_stats, store_dk, store_dv):
                cpasync.prefetch_descriptor(move)
            with cute.arch.elect_one():
                for ring in (at.k, at.v, at.q, at.do):
                    ring.init(4 * CONSUMERS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # In a causal problem the first key tile is seen by the most queries: it starts first.
        seqlen_q, _, num_heads, _ = q.shape
        seqlen_k, _, num_kv_heads, _ = k.shape
        number, kv_head, batch = owned_by(cute.ceil_div(seqlen_k, TILE_K), num_kv_heads)
        k_start = number * TILE_K
        end = cute.ceil_div(seqlen_q, tile_q)
        first = cutlass.min(cutlass.max(k_start - causal_offset, 0) // tile_q, end)
        full = cutlass.max(k_start + TILE_K - 1 - causal_offset, 0)
        full = cutlass.max(cutlass.min(cute.ceil_div(full, tile_q), end), first)
        if k_start + TILE_K > seqlen_k:
            full = end  # dS of what is not a key must not reach dQ
        visits = Visits(number, kv_head, batch, num_heads // num_kv_heads, first, full, end)

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0 and first < end:
                self.produce(
                    load_q, q, load_k, k, load_v, v, load_do, do, load_stats, stats, at, visits
                )
            if warp == 1:
                self.add_dq(dq_acc, at, visits)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                store_dk, dk, store_dv, dv, at, visits, seqlen_k, scale, scale_log2, causal_offset
            )

    @cute.jit
    def produce(self, load_q, q, load_k, k, load_v, v, load_do, do, load_stats, stats, at, visits):
        """What the producer's warp does: load what the consumers multiply, in their order."""
        to_k, from_k = tiles_of(load_k, at.k.tiles, k[None, None, visits.kv_head, visits.batch])
        to_v, from_v = tiles_of(load_v, at.v.tiles, v[None, None, visits.kv_head, visits.batch])
        full_k = at.k.begin_fill(0)
        cute.copy(load_k, from_k[None, visits.number], to_k[None, 0], tma_bar_ptr=full_k)
        n = Int32(0)
        for member in range(visits.group_size):
            head = visits.kv_head * visits.group_size + member
            to_q, from_q = tiles_of(load_q, at.q.tiles, q[None, None, head, visits.batch])
            to_do, from_do = tiles_of(load_do, at.do.tiles, do[None, None, head, visits.batch])
            to_lse, lse = stats_of(load_stats, at.lse, stats[None, 0, head, visits.batch])
            to_delta, delta = stats_of(load_stats, at.delta, stats[None, 1, head, visits.batch])
            for tile in range(visits.first, visits.end):
                slot = at.q.slot(n)
                full_q = at.q.begin_fill(n)
                cute.copy(load_q, from_q[None, tile], to_q[None, slot], tma_bar_ptr=full_q)
                if n == 0:
                    full_v = at.v.begin_fill(0)
                    cute.copy(
                        load_v, from_v[None, visits.number], to_v[None, 0], tma_bar_ptr=full_v
                    )
                full_do = at.do.begin_fill(n)
                cute.copy(load_do, from_do[None, tile], to_do[None, slot], tma_bar_ptr=full_do)
                if n == 0:
                    # From here on, what the preprocess wrote, dq_acc included: nothing is added to
                    # it before lse has arrived. Each head has a program that comes here, that of
                    # its first keys, so that the postprocess, which waits for this kernel alone,
                    # finds the preprocess done as well.
                    cute.arch.griddepcontrol_wait()
                cute.copy(load_stats, lse[None, tile], to_lse[None, slot], tma_bar_ptr=full_q)
                cute.copy(load_stats, delta[None, tile], to_delta[None, slot], tma_bar_ptr=full_do)
                n += 1

    @cute.jit
    def add_dq(self, dq_acc, at, visits):
        """What the adding warp does: add each half of a dQ tile to dq_acc when it is there."""
        half = self.tile_q * self.width // CONSUMERS
        handed_over = 128 + 32  # threads: a warpgroup and this warp
        for member in range(visits.group_size):
            head = visits.kv_head * visits.group_size + member
            for tile in range(visits.first, visits.end):
                for group in range_constexpr(CONSUMERS):
                    # This half's last tile has been read: only later groups may be under way.
                    cute.arch.cp_async_bulk_wait_group(CONSUMERS - 1 - group, read=True)
                    cute.arch.sync_warp()
                    cute.arch.barrier_arrive(
                        barrier_id=DQ_FREE + group, number_of_threads=handed_over
                    )
                for group in range_constexpr(CONSUMERS):
                    cute.arch.barrier(barrier_id=DQ_READY + group, number_of_threads=handed_over)
                    if cute.arch.lane_idx() == 0:
                        row = dq_acc[visits.batch, head, tile, None]
                        primitives.cp_reduce_async_bulk_global_shared_cta(
                            (row.iterator + group * half).to_llvm_ptr(),
                            at.dq[None, None, None, group].iterator.to_llvm_ptr(),
                            half * 4,
                            type=primitives.CpReduceType.F32,
                        )
                    cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def consume(
        self, store_dk, dk, store_dv, dv, at, visits, seqlen_k, scale, scale_log2, causal_offset
    ):
        """What a warpgroup with 64 keys does."""
        thread = cute.arch.thread_idx()[0] - 128
        own = Operands(self, at, thread, scale_log2)
        for r in range_constexpr(2):
            key = visits.number * TILE_K + rows_of(thread)[r]
            own.seen_from[r] = key - causal_offset - own.first_column
            if key >= seqlen_k:
                own.seen_from[r] = Int32(2**31 - 1)

        if visits.first < visits.end:
            at.k.await_tile(0)
            at.v.await_tile(0)
            at.q.await_tile(0)
        n = Int32(0)
        for _ in range(visits.group_size):
            for tile in range(visits.first, visits.full):
                self.visit(n, tile, True, own, at, visits)
                n += 1
            for tile in range(visits.full, visits.end):
                self.visit(n, tile, False, own, at, visits)
                n += 1
        dk_acc, dv_acc = own.dk_acc, own.dv_acc
        if visits.first >= visits.end:
            dk_acc.fill(0.0)
            dv_acc.fill(0.0)
        cute.arch.griddepcontrol_launch_dependents()

        # dV takes V's place, and dK takes K's, once both warpgroups are done with them.
        for i in range_constexpr(cute.size(dk_acc)):
            dk_acc[i] = dk_acc[i] * scale
        k_tile, v_tile = at.k.tiles[None, None, 0], at.v.tiles[None, None, 0]
        cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=128 * CONSUMERS)
        put_tile(own.dkdv, thread, rounded(dv_acc, self.dtype), v_tile)
        put_tile(own.dkdv, thread, rounded(dk_acc, self.dtype), k_tile)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=128 * CONSUMERS)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            from_v, to_v = tiles_of(store_dv, v_tile, dv[None, None, visits.kv_head, visits.batch])
            from_k, to_k = tiles_of(store_dk, k_tile, dk[None, None, visits.kv_head, visits.batch])
            cute.copy(store_dv, from_v, to_v[None, visits.number])
            cute.copy(store_dk, from_k, to_k[None, visits.number])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def visit(self, n, tile, masked: cutlass.Constexpr[bool], own, at, visits):
        """What the n-th tile of queries, which has arrived, adds to dK, dV and dQ.

        ptxas lets products run beside other work only if their registers fit along with those of
        all others since the last wait for everything: hence three such waits, each where little is
        left to wait for.
        """
        tile_q, slot, ds_slot = self.tile_q, at.q.slot(n), n & (DS_SLOTS - 1)
        # Sliced by slot here: by `multiply`, with the steps, it would take 35 instructions more.
        q_right, do_right, do_t_right, q_t_right = (
            ring[None, None, None, slot]
            for ring in (own.q_right, own.do_right, own.do_t_right, own.q_t_right)
        )
        ds_right = own.ds_right[None, None, None, ds_slot]
        s_t = cute.make_rmem_tensor(own.scores.partition_shape_C((TILE_K, tile_q)), Float32)
        dp_t = cute.make_rmem_tensor(s_t.layout, Float32)
        dq_t = cute.make_rmem_tensor(own.dq.partition_shape_C((self.width, tile_q)), Float32)

        # (1) S^T = K Q^T and (3) dP^T = V dO^T
        multiply(own.scores, s_t, own.k_left, q_right, False)
        at.do.await_tile(n)
        multiply(own.scores, dp_t, own.v_left, do_right, False)
        warpgroup.wait_group(1)
        exponential_by_columns(s_t, own.scale_log2, at.lse[None, slot], own.first_column)
        if const_expr(masked):
            hide_by_columns(s_t, own.seen_from, tile * tile_q)
        p_left = rounded(s_t, self.dtype)
        warpgroup.wait_group(0)
        score_gradient_by_columns(s_t, dp_t, at.delta[None, slot], own.first_column)
        ds_left = rounded(dp_t, self.dtype)
        ds_tile = transposed(at.ds)[None, None, ds_slot]
        put_tile(own.scores, own.thread, ds_left, ds_tile, transpose=True)

        # (2) dV += P^T dO, started no earlier: it would have to share registers with (3)
        multiply(own.dkdv, own.dv_acc, as_left_operand(p_left), do_t_right, n > 0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_READY, number_of_threads=128 * CONSUMERS)
        if n + 1 < visits.total:
            at.q.await_tile(n + 1)
        warpgroup.wait_group(0)
        at.do.release(n)

        # (4) dQ^T = K^T dS^T and (5) dK += dS^T Q
        multiply(own.dq, dq_t, own.k_t_left, ds_right, False)
        multiply(own.dkdv, own.dk_acc, as_left_operand(ds_left), q_t_right, n > 0)
        warpgroup.wait_group(1)
        cute.arch.barrier(barrier_id=DQ_FREE + own.group, number_of_threads=128 + 32)
        registers = cute.make_tensor(dq_t.iterator, cute.make_layout(own.dq_place.shape))
        cute.autovec_copy(registers, own.dq_place)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=DQ_READY + own.group, number_of_threads=128 + 32)
        warpgroup.wait_group(0)
        at.q.release(n)


class Shared(Fixed):
    """What a program has in shared memory. Key and value tiles are rings of one, filled once."""

    def __init__(self, kernel: OnePass, storage):
        dtype, tile_q, num_stages = kernel.dtype, kernel.tile_q, kernel.num_stages

        def ring(name: str, shape: tuple[int, int, int], row_bytes: int) -> Ring:
            full, empty = getattr(storage, f"{name}_full"), getattr(storage, f"{name}_empty")
            tiles = tiles_in(getattr(storage, name), dtype, shape)
            return Ring(tiles, full, empty, shape[2], shape[0] * row_bytes)

        row_bytes = kernel.width * dtype.width // 8
        self.k = ring("k", kernel.k_shape, row_bytes)
        self.v = ring("v", kernel.k_shape, row_bytes)
        # With each row of Q comes its lse, with each of dO its delta.
        self.q = ring("q", kernel.q_shape, row_bytes + 4)
        self.do = ring("do", kernel.q_shape, row_bytes + 4)
        self.lse = storage.lse.get_tensor(cute.make_layout((tile_q, num_stages)))
        self.delta = storage.delta.get_tensor(cute.make_layout((tile_q, num_stages)))
        self.ds = tiles_in(storage.ds, dtype, kernel.ds_shape)
        self.dq = storage.dq.get_tensor(dq_acc_layout(tile_q * kernel.width))


class Operands(Fixed):
    """What a warpgroup multiplies, and what a thread of it keeps from visit to visit."""

    def __init__(self, kernel: OnePass, at: Shared, thread, scale_log2):
        tile_q, width = kernel.tile_q, kernel.width
        self.thread = thread
        self.group = cute.arch.make_warp_uniform(thread // 128)
        self.first_column = first_column_of(thread)
        self.scale_log2 = scale_log2
        self.scores, self.dkdv, self.dq = tiled_products(kernel.dtype, width, tile_q)
        # By warpgroup, not by thread, so that addresses are uniform in a warp.
        scores, dkdv, dq = (
            product.get_slice(self.group * 128) for product in (self.scores, self.dkdv, self.dq)
        )
        self.k_left = scores.make_fragment_A(scores.partition_A(at.k.tiles[None, None, 0]))
        self.v_left = scores.make_fragment_A(scores.partition_A(at.v.tiles[None, None, 0]))
        self.q_right = scores.make_fragment_B(scores.partition_B(at.q.tiles))
        self.do_right = scores.make_fragment_B(scores.partition_B(at.do.tiles))
        self.do_t_right = dkdv.make_fragment_B(dkdv.partition_B(transposed(at.do.tiles)))
        self.q_t_right = dkdv.make_fragment_B(dkdv.partition_B(transposed(at.q.tiles)))
        k_t = transposed(at.k.tiles)[None, None, 0]
        self.k_t_left = dq.make_fragment_A(dq.partition_A(k_t))
        self.ds_right = dq.make_fragment_B(dq.partition_B(at.ds))
        self.dk_acc = cute.make_rmem_tensor(self.dkdv.partition_shape_C((TILE_K, width)), Float32)
        self.dv_acc = cute.make_rmem_tensor(self.dk_acc.layout, Float32)
        self.dq_place = at.dq[None, thread % 128, None, self.group]
        # Of a thread's two keys, the first query that sees each, less the thread's first query: to
        # be compared with numbers known when compiling.
        self.seen_from = cute.make_rmem_tensor(2, Int32)


class Postprocess:
    """dq of `tile_q` rows of one head, from the sums of the main kernel's tiles."""

    threads = 128 * CONSUMERS

    def __init__(self, *, dtype: torch.dtype, width: int, tile: OnePassTile):
        self.torch_dtype = dtype
        self.dtype = DTYPES[dtype]
        self.width = width
        self.tile_q = tile.tile_q

    def signature(self) -> tuple:
        dq_acc, dq = strided(torch.float32, 4, True), strided(self.torch_dtype, 4, True)
        return dq_acc, dq, Float32(1)

    @cute.jit
    def __call__(self, dq_acc: cute.Tensor, dq: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        batch_size, num_heads, num_tiles, _ = dq_acc.shape
        self.kernel(dq_acc, dq, scale).launch(
            grid=(num_tiles * num_heads * batch_size, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, dq_acc: cute.Tensor, dq: cute.Tensor, scale: Float32):
        tile_q, width = self.tile_q, self.width
        thread, _, _ = cute.arch.thread_idx()
        _, num_heads, num_tiles, _ = dq_acc.shape
        seqlen_q, head_dim = dq.shape[2:]
        number, head, batch = owned_by(num_tiles, num_heads)
        # Rows of 16 bytes more, so that neither writing nor reading meets in a bank.
        tile = SmemAllocator().allocate_tensor(
            self.dtype, cute.make_layout((tile_q, width), stride=(width + 8, 1)), 16
        )
        cute.arch.griddepcontrol_wait()

        sums = cute.make_tensor(
            dq_acc[batch, head, number, None].iterator, dq_acc_layout(tile_q * width)
        )
        sums = sums[None, thread % 128, None, thread // 128]
        acc = cute.make_rmem_tensor(sums.shape, Float32)
        cute.autovec_copy(sums, acc)
        # A thread's values are those of the accumulator of (4), dQ^T.
        _, _, product = tiled_products(self.dtype, width, tile_q)
        places = product.get_slice(thread).partition_C(cute.make_identity_tensor((width, tile_q)))
        for i in range_constexpr(cute.size(acc)):
            column, row = places[i]
            tile[row, column] = (acc[i] * scale).to(self.dtype)
        cute.arch.sync_threads()

        threads_per_row = width // 8  # 16 bytes each
        rows_at_once = self.threads // threads_per_row
        piece = thread % threads_per_row
        out = cute.logical_divide(dq[batch, head, None, None], (None, 8))
        rows = cute.logical_divide(tile, (None, 8))
        for i in range_constexpr(tile_q // rows_at_once):
            row = thread // threads_per_row + i * rows_at_once
            if number * tile_q + row < seqlen_q and piece * 8 < head_dim:
                cute.autovec_copy(
                    rows[row, (None, piece)], out[number * tile_q + row, (None, piece)]
                )


def tiled_products(dtype, width: int, tile_q: int) -> tuple:
    """How warpgroups share (1) and (3); (2) and (5); (4). M of all of them is in steps of 64.

    (4) is dQ^T [width, tile_q] = K^T dS^T, split by columns of dQ, at width 64 by its rows.
    """
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    by_keys = (CONSUMERS, 1, 1)
    by_columns = min(CONSUMERS, width // 64)
    by_rows = CONSUMERS // by_columns
    make = hopper_helpers.make_trivial_tiled_mma
    scores = make(dtype, dtype, k_major, k_major, Float32, by_keys, (64, tile_q))
    dkdv = make(
        dtype, dtype, k_major, mn_major, Float32, by_keys, (64, width),
        a_source=warpgroup.OperandSource.RMEM,
    )  # fmt: skip
    dq = make(
        dtype, dtype, mn_major, k_major, Float32, (by_columns, by_rows, 1), (64, tile_q // by_rows)
    )
    return scores, dkdv, dq


def dq_acc_layout(size: int) -> cute.Layout:
    """Where values of a dQ tile lie: [4 values, threads, parts, warpgroups].

    A warpgroup's half is in one piece, of which thread t has the t-th 16 bytes of each 2 KB.
    """
    return cute.make_layout((4, 128, size // (512 * CONSUMERS), CONSUMERS))
