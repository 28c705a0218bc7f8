"""FlashAttention-2 forward in TileLang (arXiv 2307.08691, algorithm 1).

Shapes
    q [batch, num_heads, seqlen_q, head_dim], k and v [batch, num_kv_heads, seqlen_k, head_dim]
    o [batch, num_heads, seqlen_q, head_dim] in q's dtype, lse [batch, num_heads, seqlen_q] fp32

Steps for one query tile of one head
    1. load the query tile
    2. for each key tile that some row sees: S = Q K^T; mask S if some row does not see all of the
       tile; online softmax, in which m and l follow the row maximum and sum; O += P V
    3. divide by the row sums, write o and lse
Key tiles that no row sees are never visited.

Two kernels take these steps. `forward_kernel` is Hopper's: a program stays on its multiprocessor
and takes one query tile after the other. One warp of it, the producer, has the copy engine fill
rings of key and value tiles; each other warpgroup owns 64 query rows and multiplies
asynchronously (FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2). `portable_kernel` does
without the copy engine, one query tile a program, waits for each product, and runs everything else.

Constraints
    head_dim 1 to 256, padded in the tile; fp16, bf16, fp32; any strides.

What lives where
    registers: S and P [rows, tile_k], acc [rows, head_dim], m [rows], l [rows, 8], in fp32
    shared memory: the query tile, key and value tiles; on Hopper rings of them, and O to be stored,
        in the query tile's place where there is no room for both
    HBM: q, k, v read; o, lse written; never S or P
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout
from torch import Tensor

from flash_rosetta.copy_engine import as_is, operand
from flash_rosetta.hopper import can_use_tma
from flash_rosetta.kernels import exponent_scale, last_key_offset
from flash_rosetta.layout import LaunchKey, contiguous, launch_key
from flash_rosetta.problem import Problem
from flash_rosetta.tilelang_impl.launch import Launch, Recipe
from flash_rosetta.tilelang_impl.tiles import (
    PRODUCER_REGISTERS,
    ForwardTile,
    o_takes_q,
    padded_head_dim,
    tiles_for,
)
from flash_rosetta.tilelang_impl.tiling import (
    DTYPES,
    Engine,
    load_tile,
    multiply,
    parts_of,
    put,
    strided,
)
from flash_rosetta.turns import multiprocessors, num_programs

FP32 = "float32"
INF = T.infinity(FP32)
LN_2 = math.log(2)
ROWS = T.GemmWarpPolicy.FullRow

SIZES = ("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "head_dim")

HUGE = 2.0**28
"""Base-2 scores beyond this need another factor: see `online_softmax`."""

SLACK = 8.0
"""How far base-2 scores may pass m before m follows: P is 2^8 then, which fp16 holds as well."""


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    recipe_of: Callable[[LaunchKey], Recipe] | None = None,
) -> tuple[Launch, Tensor, Tensor]:
    """The launch that computes o and lse, and the tensors it will fill.

    `recipe_of`: what gives the kernel, where it is not the one that ships.
    """
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    sizes = problem.batch, problem.num_heads, problem.seqlen_q
    lse = q.new_empty(sizes, dtype=torch.float32)
    recipe = (recipe_of or forward_recipe)(launch_key(problem, q, k, v))
    return recipe.launch(q, k, v, o, lse), o, lse


@lru_cache(maxsize=4096)  # a small problem's time is mostly what the host does before it runs
def forward_recipe(key: LaunchKey, tile: ForwardTile | None = None) -> Recipe:
    """The kernel that ships; `tile`: another than the one that ships with it."""
    problem = key.problem
    tma = can_use_tma(problem, *key.layouts)
    tile = tile or tiles_for(problem, tma).forward
    options = forward_options(problem, tile)
    operands = forward_operands(key, tma)
    scalars = *exponent_scale(problem), *mask_and_grid(problem, tile)
    if not tma:
        options["parts"] = parts_of(problem)
        return Recipe(portable_kernel, key, operands, scalars, options)
    options["is_causal"] = problem.is_causal
    programs = persistent_programs(key, tile)
    return Recipe(forward_kernel, key, operands, (*scalars, programs), options)


def forward_options(problem: Problem, tile: ForwardTile) -> dict[str, Any]:
    """What every forward kernel knows when it is compiled."""
    return {
        "dtype": DTYPES[problem.dtype],
        "width": padded_head_dim(problem.head_dim),
        "tile": tile,
    }


def forward_operands(key: LaunchKey, tma: bool) -> tuple[Callable[[Tensor], Tensor], ...]:
    """What makes the arguments of q, k, v, o and lse."""
    q, *_ = layouts = key.layouts
    return *(operand(t, tma) for t in (*layouts, contiguous(*q.shape))), as_is


def mask_and_grid(problem: Problem, tile: ForwardTile) -> tuple[int, int, int, int]:
    """The arguments causal_offset, num_tiles, group_size and total, of which the last counts the
    query tiles of all heads."""
    num_tiles = -(-problem.seqlen_q // tile.tile_q)
    total = num_tiles * problem.num_heads * problem.batch
    return last_key_offset(problem), num_tiles, problem.group_size, total


def persistent_programs(key: LaunchKey, tile: ForwardTile) -> int:
    """How many programs share the query tiles."""
    most = tile.programs * multiprocessors(key.device)
    return num_programs(key.problem, tile.tile_q, tile.tile_k, most)


@dataclass(frozen=True)
class Ring:
    """Shared-memory tiles [slots, rows, width] that one warp fills and the warpgroups empty.

    The n-th tile of a program lies in slot n % slots. A slot is full when its tile has arrived, and
    empty when each warpgroup has said that it is done with it.
    """

    tiles: Any
    full: Any
    empty: Any
    slots: int


def ring(slots: int, rows: int, width: int, dtype: str, consumers: int) -> Ring:
    """A ring of empty slots, filled by one warp and emptied by `consumers` threads."""
    return Ring(
        T.alloc_shared([slots, rows, width], dtype),
        T.alloc_barrier([32] * slots),
        T.alloc_barrier([consumers] * slots),
        slots,
    )


def place_of_o(takes_q: bool, queries: Ring, dtype: str) -> Any:
    """Where O is stored from: tiles of its own, or those of the queries."""
    if takes_q:
        return queries.tiles
    tiles = T.alloc_shared(queries.tiles.shape, dtype)
    T.annotate_layout({tiles: make_swizzled_layout(tiles)})
    return tiles


@T.macro
def fill(ring, n, x, batch, head, row):
    """Wait for the n-th tile's slot to be empty, and have it filled with rows [row, ...) of x."""
    rows, width = ring.tiles.shape[1:]
    slot = n % ring.slots
    T.barrier_wait(ring.empty[slot], (n // ring.slots + 1) % 2)
    T.tma_copy(
        x[batch, head, row : row + rows, 0:width],
        ring.tiles[slot, :, :],
        barrier=ring.full[slot],
        leader_scope_threads=32,
    )
    T.barrier_arrive(ring.full[slot])


@T.macro
def await_tile(ring, n):
    """Wait for the n-th tile to arrive."""
    T.barrier_wait(ring.full[n % ring.slots], (n // ring.slots) % 2)


@T.macro
def release(ring, n):
    """This thread is done with the n-th tile."""
    T.barrier_arrive(ring.empty[n % ring.slots])


@dataclass(frozen=True)
class RowStatistics:
    """What a program keeps of each query row, in registers, while it visits key tiles.

    m is the maximum of the scores so far, or a little less; P = exp2(factor s + shift), and l is
    its sum, one number for each 8th column; alpha rescales the sums of the tiles before.
    """

    m: Any
    l: Any
    factor: Any
    shift: Any
    alpha: Any


def row_statistics(rows: int) -> RowStatistics:
    return RowStatistics(
        m=T.alloc_fragment([rows], FP32),
        l=T.alloc_fragment([rows, 8], FP32),
        factor=T.alloc_fragment([rows], FP32),
        shift=T.alloc_fragment([rows], FP32),
        alpha=T.alloc_fragment([rows], FP32),
    )


@T.macro
def no_key_seen(row, acc, factor):
    """Where the sums over keys start from."""
    T.clear(acc)
    T.clear(row.l)
    T.fill(row.m, -INF)
    T.fill(row.factor, factor)
    T.fill(row.shift, 0.0)


def register(value: Any = 0) -> Any:
    """An integer variable. TileLang repeats an expression wherever its name is used."""
    return T.alloc_var("int32", init=value)


@T.macro
def first_row(index, num_tiles, tile_q):
    """The first row of a query tile.

    Tiles of one head are neighbours, so that its keys and values stay in L2. In a causal problem
    the last tile sees the most keys: it comes first.
    """
    return (num_tiles - 1 - T.truncmod(index, num_tiles)) * tile_q


@T.macro
def batch_and_head(index, num_tiles, num_heads):
    batch_head = register(T.truncdiv(index, num_tiles))
    return T.truncdiv(batch_head, num_heads), T.truncmod(batch_head, num_heads)


@T.macro
def index_of(round, program, programs):
    """Every other round goes backwards, so that no program gets the longest tile of each."""
    return round * programs + T.if_then_else(round % 2 == 0, program, programs - 1 - program)


@T.macro
def num_key_tiles(tile_q, tile_k, is_causal, q_start, seqlen_k, causal_offset):
    end = seqlen_k
    if is_causal:
        end = T.max(T.min(seqlen_k, q_start + tile_q + causal_offset), 0)
    return T.truncdiv(end + tile_k - 1, tile_k)


@T.macro
def fill_queries(queries, n, q, batch, head, q_start):
    """Wait for the n-th query tile's place to be empty, and have it filled from a row on."""
    groups, rows, width = queries.tiles.shape
    T.barrier_wait(queries.empty[0], (n + 1) % 2)
    for group in T.unroll(groups):
        T.tma_copy(
            q[batch, head, q_start + rows * group : q_start + rows * group + rows, 0:width],
            queries.tiles[group, :, :],
            barrier=queries.full[0],
            leader_scope_threads=32,
        )
    T.barrier_arrive(queries.full[0])


@T.macro
def store(takes_q, acc, o_tiles, slot, group, o, batch, head, q_start, meet, queries):
    """Have the copy engine write a warpgroup's rows of one head, which meets at `meet`.

    `slot` is `group`, the number of its tile, or says so later. The next queries may come to lie
    there when it is read, where `takes_q`.
    """
    rows, width = o_tiles.shape[1:]
    T.tma_store_wait(0)  # until the copy engine has read the tile before
    T.sync_threads(meet, 128)
    T.copy(acc, o_tiles[slot, :, :])
    T.fence_proxy_async()
    T.sync_threads(meet, 128)
    T.tma_copy(o_tiles[group, :, :], o[batch, head, q_start : q_start + rows, 0:width])
    if takes_q:
        T.tma_store_wait(0)
        T.barrier_arrive(queries.empty[0])


@T.macro
def produce(
    is_causal, queries_wait, q, k, v, queries, keys, values,
    causal_offset, num_tiles, group_size, total, program, programs,
):  # fmt: skip
    """What the producer's warp does: it has all tiles loaded that a program works on, in order.

    Where `queries_wait`, for O to leave their place, the first key and value tile go before them.
    """
    tile_q = queries.tiles.shape[0] * queries.tiles.shape[1]
    tile_k = keys.tiles.shape[1]
    done = register()
    for round in T.serial(T.truncdiv(total + programs - 1, programs)):
        index = register(index_of(round, program, programs))
        if index < total:
            q_start = register(first_row(index, num_tiles, tile_q))
            batch, head = batch_and_head(index, num_tiles, q.shape[1])
            kv_head = register(T.truncdiv(head, group_size))
            n = num_key_tiles(tile_q, tile_k, is_causal, q_start, k.shape[2], causal_offset)
            k_start = register((n - 1) * tile_k)
            if queries_wait and k_start >= 0:
                fill(keys, done, k, batch, kv_head, k_start)
                fill(values, done, v, batch, kv_head, k_start)
                done = done + 1
                k_start = k_start - tile_k
            fill_queries(queries, round, q, batch, head, q_start)
            while k_start >= 0:
                fill(keys, done, k, batch, kv_head, k_start)
                fill(values, done, v, batch, kv_head, k_start)
                done = done + 1
                k_start = k_start - tile_k


def forward_kernel(*, dtype: str, width: int, is_causal: bool, tile: ForwardTile) -> Any:
    """Hopper's kernel, for operands of 16 bits that the copy engine can move."""
    groups, tile_k = tile.warpgroups, tile.tile_k
    takes_q = o_takes_q(tile, width)
    tile_q = 64 * groups
    consumers = 128 * groups
    engine = Engine(hopper=True, threads=32)
    batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim = map(T.dynamic, SIZES)
    q_shape = (batch_size, num_heads, seqlen_q, head_dim)
    k_shape = (batch_size, num_kv_heads, seqlen_k, head_dim)

    @T.macro
    def consume(
        group, queries, keys, values, o_tiles, o, lse, factor, factor_huge, sign,
        causal_offset, num_tiles, total, program, programs,
    ):  # fmt: skip
        """What one warpgroup does; `group` is a number, so that addresses are uniform in a warp."""
        s = T.alloc_fragment([64, tile_k], FP32)
        p = T.alloc_fragment([64, tile_k], dtype)
        acc = T.alloc_fragment([64, width], FP32)
        row = row_statistics(64)
        grown = register()
        done = register()
        turn = 1 + group
        next_turn = 1 + (group + 1) % groups
        meet = 1 + groups + group
        if tile.take_turns and group == groups - 1:
            T.named_barrier_arrive(next_turn, 256)
        for round in T.serial(T.truncdiv(total + programs - 1, programs)):
            index = register(index_of(round, program, programs))
            if index < total:
                q_start = register(first_row(index, num_tiles, tile_q))
                n = register(
                    num_key_tiles(tile_q, tile_k, is_causal, q_start, seqlen_k, causal_offset)
                )
                q_start = q_start + 64 * group
                full = register(seqlen_k)
                if is_causal:
                    full = T.min(seqlen_k, q_start + causal_offset + 1)
                T.barrier_wait(queries.full[0], round % 2)
                if sign != 1.0:
                    for i, j in T.Parallel(64, width):
                        queries.tiles[group, i, j] *= T.cast(sign, dtype)
                    T.fence_proxy_async()
                    T.sync_threads(meet, 128)
                no_key_seen(row, acc, factor)
                if n > 0:
                    await_tile(keys, done)
                    if tile.take_turns:
                        T.sync_threads(turn, 256)
                    # (1) S = Q K^T [64, tile_k], of the first tile
                    T.wgmma_gemm(
                        queries.tiles[group, :, :],
                        keys.tiles[done % keys.slots, :, :],
                        s,
                        transpose_B=True,
                        policy=ROWS,
                        clear_accum=True,
                    )
                    if tile.take_turns:
                        T.named_barrier_arrive(next_turn, 256)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(s, num_regs=tile_k // 2)
                    release(keys, done)
                    if n == 1 and not takes_q:
                        T.barrier_arrive(queries.empty[0])
                    if n * tile_k > full:
                        if is_causal:
                            mask(s, q_start, (n - 1) * tile_k, seqlen_k, causal_offset)
                        else:
                            mask_past_end(s, (n - 1) * tile_k, seqlen_k)
                    online_softmax(s, row, grown, factor, factor_huge)
                    for t in T.serial(1, n):
                        # The wait for P V stands before the next product, not behind this softmax:
                        # within one block of instructions ptxas would move it ahead of the softmax,
                        # which is to run beside that product.
                        T.wait_wgmma(0)
                        T.warpgroup_fence_operand(acc, num_regs=width // 2)
                        if t > 1:
                            release(values, done - 1)
                        T.copy(s, p)
                        await_tile(keys, done + 1)
                        if tile.take_turns:
                            T.sync_threads(turn, 256)
                        # (1) S = Q K^T of the next tile, and beside it O += P V of this one
                        T.wgmma_gemm(
                            queries.tiles[group, :, :],
                            keys.tiles[(done + 1) % keys.slots, :, :],
                            s,
                            transpose_B=True,
                            policy=ROWS,
                            clear_accum=True,
                        )
                        if grown != 0:
                            rescale(acc, row.alpha)
                        await_tile(values, done)
                        T.wgmma_gemm(p, values.tiles[done % values.slots, :, :], acc, policy=ROWS)
                        if tile.take_turns:
                            T.named_barrier_arrive(next_turn, 256)
                        T.wait_wgmma(1)
                        T.warpgroup_fence_operand(s, num_regs=tile_k // 2)
                        release(keys, done + 1)
                        if t == n - 1 and not takes_q:
                            T.barrier_arrive(queries.empty[0])
                        if is_causal:
                            if (n - t) * tile_k > full:
                                mask(s, q_start, (n - 1 - t) * tile_k, seqlen_k, causal_offset)
                        online_softmax(s, row, grown, factor, factor_huge)
                        done = done + 1
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc, num_regs=width // 2)
                    if n > 1:
                        release(values, done - 1)
                    T.copy(s, p)
                    if grown != 0:
                        rescale(acc, row.alpha)
                    await_tile(values, done)
                    # O += P V of the last tile
                    T.wgmma_gemm(p, values.tiles[done % values.slots, :, :], acc, policy=ROWS)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc, num_regs=width // 2)
                    release(values, done)
                    done = done + 1
                elif not takes_q:
                    T.barrier_arrive(queries.empty[0])
                batch, head = batch_and_head(index, num_tiles, num_heads)
                finish(acc, row, lse, batch, head, q_start, factor, causal_offset)
                # Not known before the loop, where ptxas would else compute the places of a thread's
                # part of O, and spill them.
                slot = group + T.min(q_start, 0)
                store(takes_q, acc, o_tiles, slot, group, o, batch, head, q_start, meet, queries)
        T.tma_store_wait(0)
        if tile.take_turns and group == 0:
            T.sync_threads(turn, 256)  # a turn that nobody takes: each arrival is met

    @T.prim_func
    def forward(
        q: strided("q", q_shape, dtype, engine),
        k: strided("k", k_shape, dtype, engine),
        v: strided("v", k_shape, dtype, engine),
        o: strided("o", q_shape, dtype, engine),
        lse: strided("lse", q_shape[:3], FP32, engine),
        factor: T.float32,
        factor_huge: T.float32,
        sign: T.float32,
        causal_offset: T.int32,
        num_tiles: T.int32,
        group_size: T.int32,
        total: T.int32,
        programs: T.int32,
    ):
        with T.Kernel(programs, threads=consumers + 128) as program:
            if tile.shares > 1:
                T.annotate_min_blocks_per_sm(tile.shares)
            queries = Ring(
                T.alloc_shared([groups, 64, width], dtype),
                T.alloc_barrier([32]),
                T.alloc_barrier([consumers]),
                1,
            )
            keys = ring(tile.num_stages, tile_k, width, dtype, consumers)
            values = ring(tile.num_stages, tile_k, width, dtype, consumers)
            o_tiles = place_of_o(takes_q, queries, dtype)
            thread = T.get_thread_binding()
            if thread < 128:
                T.inc_max_nreg(tile.registers)
                consume(
                    0, queries, keys, values, o_tiles, o, lse, factor, factor_huge, sign,
                    causal_offset, num_tiles, total, program, programs,
                )  # fmt: skip
            elif groups > 1 and thread < 256:
                T.inc_max_nreg(tile.registers)
                consume(
                    1, queries, keys, values, o_tiles, o, lse, factor, factor_huge, sign,
                    causal_offset, num_tiles, total, program, programs,
                )  # fmt: skip
            elif groups > 2 and thread < 384:
                T.inc_max_nreg(tile.registers)
                consume(
                    2, queries, keys, values, o_tiles, o, lse, factor, factor_huge, sign,
                    causal_offset, num_tiles, total, program, programs,
                )  # fmt: skip
            else:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                if thread < consumers + 32:
                    produce(
                        is_causal, takes_q, q, k, v, queries, keys, values,
                        causal_offset, num_tiles, group_size, total, program, programs,
                    )  # fmt: skip

    return forward


@T.macro
def online_softmax(s, row, grown: T.Ref, factor, factor_huge, slack=SLACK, exp=T.exp2):
    """s = P, and the row statistics follow; `grown` says whether the sums so far must be rescaled.

    The scale is folded into the exponent, one multiply-add a score, and exp2 replaces exp. `factor`
    is |scale| log2(e): for a negative scale Q was negated, so that a maximum stays one.

    m follows the row maximum only in steps of `slack` or more, so that after the first tile the
    sums are rarely rescaled: P stays below 2^slack, and any m gives the same P / l.

    The multiply-add rounds once where factor * m was rounded before. Exponents are off by up to
    half a unit in the last place of that for it, but all of a row by the same amount, which cancels
    in P / l. Beyond 2^28 it would overflow instead. There neighbouring scores are so far apart that
    P is one or next to nothing, and a smaller factor will do: a power of two, with which no product
    is rounded, and small enough for none to overflow.
    """
    rows, tile_k = s.shape
    m_tile = T.alloc_fragment([rows], FP32)
    T.reduce_max(s, m_tile, dim=1)
    grown = 0
    for i in T.Parallel(rows):
        if (m_tile[i] - row.m[i]) * factor > slack:
            grown = 1
    grown = T.any_sync(grown)
    if grown != 0:
        for i in T.Parallel(rows):
            row.alpha[i] = row.m[i]
            # Each row by itself, though all of a warp come here: what other rows see must not show.
            row.m[i] = T.if_then_else((m_tile[i] - row.m[i]) * factor > slack, m_tile[i], row.m[i])
            row.factor[i] = T.if_then_else(
                T.abs(row.m[i]) * factor > HUGE, T.min(power_near(row.m[i]), factor_huge), factor
            )
            # Nothing seen so far: (-inf) - (-inf) would be NaN.
            row.shift[i] = T.if_then_else(row.m[i] == -INF, 0.0, -row.m[i] * row.factor[i])
            # The same m again gives one, which the exponential of its rounded product may not be.
            row.alpha[i] = T.if_then_else(
                row.alpha[i] == row.m[i],
                1.0,
                exp(T.fma(row.alpha[i], row.factor[i], row.shift[i])),
            )
        for i, j in T.Parallel(rows, 8):
            row.l[i, j] = row.l[i, j] * row.alpha[i]
    for i, j in T.Parallel(rows, tile_k):
        s[i, j] = exp(T.fma(s[i, j], row.factor[i], row.shift[i]))
    # A tensor core leaves columns j, j + 8, j + 16, ... of a row to one thread, so that these
    # partial sums need no exchange between threads; they are added once, after the loop.
    for start in T.unroll(tile_k // 8):
        for i, j in T.Parallel(rows, 8):
            row.l[i, j] += s[i, start * 8 + j]


@T.macro
def power_near(x):
    """A power of two whose product with x is near 2^30, where there is one."""
    exponent = T.reinterpret(x, "int32") & 0x7F800000
    return T.reinterpret((254 << 23) - T.max(exponent - (30 << 23), 0), FP32)


@T.macro
def mask(s, q_start, k_start, seqlen_k, causal_offset):
    """Let no row see a key past seqlen_k or past the causal diagonal."""
    rows, tile_k = s.shape
    # How many keys of the tile the row of an element sees, less the element's column modulo 8: to
    # be compared with a number known when compiling.
    seen = T.alloc_fragment([rows, 8], "int32")
    for i, j in T.Parallel(rows, 8):
        seen[i, j] = T.min(seqlen_k, q_start + i + causal_offset + 1) - k_start - j
    for start in T.unroll(tile_k // 8):
        for i, j in T.Parallel(rows, 8):
            s[i, start * 8 + j] = T.if_then_else(start * 8 < seen[i, j], s[i, start * 8 + j], -INF)


@T.macro
def mask_past_end(s, k_start, seqlen_k):
    """Let no row see a key past seqlen_k."""
    rows, tile_k = s.shape
    for i, j in T.Parallel(rows, tile_k):
        s[i, j] = T.if_then_else(k_start + j < seqlen_k, s[i, j], -INF)


@T.macro
def rescale(acc, alpha):
    rows, width = acc.shape
    for i, j in T.Parallel(rows, width):
        acc[i, j] = acc[i, j] * alpha[i]


@T.macro
def finish(acc, row, lse, batch, head, q_start, factor, causal_offset):
    """Write lse, and divide acc by the row sums."""
    rows = acc.shape[0]
    l = T.alloc_fragment([rows], FP32)
    T.reduce_sum(row.l, l, dim=1)
    for i in T.Parallel(rows):
        if q_start + i < lse.shape[2]:
            lse[batch, head, q_start + i] = (row.m[i] * factor + T.log2(l[i])) * LN_2
        # A row that sees no key has l = 0 and gets o = 0. A row whose seen scores are all -inf has
        # l = 0 as well, but must get NaN, as softmax gives.
        row.alpha[i] = 1.0 / T.if_then_else(q_start + i + causal_offset < 0, 1.0, l[i])
    rescale(acc, row.alpha)


def portable_kernel(*, dtype: str, width: int, tile: ForwardTile, parts: int) -> Any:
    """Every other card, fp32, and strides that the copy engine cannot take."""
    tile_q, tile_k = tile.tile_q, tile.tile_k
    engine = Engine(hopper=False, threads=2 * tile_q, parts=parts)  # a warp for each 16 rows
    in_registers = dtype != FP32  # in fp32, P is not left where the next product takes it
    batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim = map(T.dynamic, SIZES)
    q_shape = (batch_size, num_heads, seqlen_q, head_dim)
    k_shape = (batch_size, num_kv_heads, seqlen_k, head_dim)

    @T.prim_func
    def portable_forward(
        q: strided("q", q_shape, dtype, engine),
        k: strided("k", k_shape, dtype, engine),
        v: strided("v", k_shape, dtype, engine),
        o: strided("o", q_shape, dtype, engine),
        lse: strided("lse", q_shape[:3], FP32, engine),
        factor: T.float32,
        factor_huge: T.float32,
        sign: T.float32,
        causal_offset: T.int32,
        num_tiles: T.int32,
        group_size: T.int32,
        total: T.int32,
    ):
        with T.Kernel(total, threads=engine.threads) as program:
            q_tile = T.alloc_shared([parts, tile_q, width], dtype)
            k_tile = T.alloc_shared([parts, tile_k, width], dtype)
            v_tile = T.alloc_shared([parts, tile_k, width], dtype)
            s = T.alloc_fragment([tile_q, tile_k], FP32)
            if in_registers:
                p = T.alloc_fragment([tile_q, tile_k], dtype)
            else:
                p = T.alloc_shared([parts, tile_q, tile_k], dtype)
            acc = T.alloc_fragment([tile_q, width], FP32)
            row = row_statistics(tile_q)
            grown = register()
            batch_head = register(T.truncdiv(program, num_tiles))
            q_start = register((num_tiles - 1 - T.truncmod(program, num_tiles)) * tile_q)
            batch = register(T.truncdiv(batch_head, num_heads))
            head = register(T.truncmod(batch_head, num_heads))
            kv_head = register(T.truncdiv(head, group_size))
            full = register(T.min(seqlen_k, q_start + causal_offset + 1))
            end = register(T.min(seqlen_k, q_start + causal_offset + tile_q))
            k_start = register()
            no_key_seen(row, acc, factor)
            load_tile(engine, q, batch, head, q_start, q_tile, 0, None)
            while k_start < end:
                load_tile(engine, k, batch, kv_head, k_start, k_tile, 0, None)
                load_tile(engine, v, batch, kv_head, k_start, v_tile, 0, None)
                T.sync_threads(1, engine.threads)
                multiply(engine, q_tile, 0, k_tile, 0, s, ROWS, transpose_b=True, clear=True)
                if sign != 1.0:
                    for i, j in T.Parallel(tile_q, tile_k):
                        s[i, j] = s[i, j] * sign
                if k_start + tile_k > full:
                    mask(s, q_start, k_start, seqlen_k, causal_offset)
                online_softmax(s, row, grown, factor, factor_huge)
                if grown != 0:
                    rescale(acc, row.alpha)
                if in_registers:
                    T.copy(s, p)
                    multiply(engine, p, None, v_tile, 0, acc, ROWS)
                else:
                    for i, j in T.Parallel(tile_q, tile_k):
                        put(engine, p, 0, i, j, s[i, j])
                    T.sync_threads(1, engine.threads)
                    multiply(engine, p, 0, v_tile, 0, acc, ROWS)
                T.sync_threads(1, engine.threads)
                k_start = k_start + tile_k
            finish(acc, row, lse, batch, head, q_start, factor, causal_offset)
            for i, j in T.Parallel(tile_q, width):
                if (q_start + i < seqlen_q) & (j < head_dim):
                    o[batch, head, q_start + i, j] = acc[i, j]

    return portable_forward
