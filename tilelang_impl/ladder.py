"""The forward rungs of the ladder below the kernel that ships: what each optimisation gives.

Shapes, constraints and memory are those of `forward.py`, whose pieces these kernels are made of. A
rung has all that the rungs below it have:

    baseline    16 x 16 tiles, one warp; all key tiles visited and masked; the scores are multiplied
                by the scale and exponentiated with exp; P V with P in two halves, P rounded and
                what the rounding left, since a tensor core takes P only as narrow as V
    tiles       128 query rows and 4 or 8 warps, with the next key and value tile on its way
    skip        key tiles that no row sees are not visited
    mask        only tiles that some row does not see whole are masked
    exp2        the scale folded into exp2, a multiply-add a score
    cast        P rounded once
    tma         Hopper: the copy engine fills tiles, one ahead, asked by a warp that also computes;
                warpgroups multiply (wgmma), and wait for each product
    specialize  Hopper: a warp of its own asks, and programs stay on their multiprocessor, so that
                it loads the next query tile while the others still work on this one

`rung_kernel` is all of them up to cast, which multiply by mma on every card; `hopper_rung_kernel`
the last two. All follow the row maximum exactly: that m may lag behind it, and so sums are rarely
rescaled, is the shipped kernel's, as is that softmax and products run side by side.
"""

import math
from functools import lru_cache
from typing import Any

import tilelang.language as T
import torch
from tilelang import PassConfigKey

from flash_rosetta.copy_engine import can_move
from flash_rosetta.hopper import can_use_tma
from flash_rosetta.kernels import exponent_scale
from flash_rosetta.layout import LaunchKey
from flash_rosetta.problem import Problem
from flash_rosetta.tilelang_impl.forward import (
    FP32,
    ROWS,
    SIZES,
    Ring,
    await_tile,
    batch_and_head,
    fill,
    fill_queries,
    finish,
    first_row,
    forward_operands,
    forward_options,
    index_of,
    mask,
    mask_and_grid,
    no_key_seen,
    num_key_tiles,
    online_softmax,
    persistent_programs,
    place_of_o,
    produce,
    register,
    release,
    rescale,
    ring,
    row_statistics,
    store,
)
from flash_rosetta.tilelang_impl.launch import PASS_CONFIGS, Recipe
from flash_rosetta.tilelang_impl.tiles import (
    BASELINE_FORWARD,
    LADDER_FORWARD,
    PRODUCER_REGISTERS,
    ForwardTile,
    o_takes_q,
    padded_head_dim,
    tiles_for,
)
from flash_rosetta.tilelang_impl.tiling import (
    Engine,
    load_tile,
    multiply,
    parts_of,
    put,
    strided,
)

RUNGS = ("baseline", "tiles", "skip", "mask", "exp2", "cast", "tma", "specialize")
"""From the bottom."""

HOPPER_RUNGS = RUNGS[RUNGS.index("tma") :]

NO_WARPGROUPS = (*PASS_CONFIGS, (PassConfigKey.TL_DISABLE_WGMMA, True))
"""Below the rung tma, T.gemm multiplies by mma on Hopper too, where wgmma would be its choice."""

LOG2_E = math.log2(math.e)


VECTOR = 8
"""Operands of 16 bits that a thread copies at once."""


@lru_cache(maxsize=4096)
def rung_recipe(key: LaunchKey, rung: str) -> Recipe:
    """The kernel of a rung. What the copy engine cannot move, the last rung without it runs."""
    problem = key.problem
    if rung in HOPPER_RUNGS and not can_use_tma(problem, *key.layouts):
        rung = "cast"
    has = frozenset(RUNGS[: RUNGS.index(rung) + 1])
    if rung in HOPPER_RUNGS:
        tile = tiles_for(problem, hopper=True).forward
        grid = mask_and_grid(problem, tile)
        specialize = "specialize" in has
        programs = persistent_programs(key, tile) if specialize else grid[-1]
        return Recipe(
            hopper_rung_kernel,
            key,
            forward_operands(key, tma=True),
            (*exponent_scale(problem), *grid, programs),
            {
                **forward_options(problem, tile),
                "is_causal": problem.is_causal,
                "specialize": specialize,
            },
        )
    tile = tile_of(problem, rung)
    scales = exponent_scale(problem) if "exp2" in has else (1.0, 1.0, problem.scale)
    return Recipe(
        rung_kernel,
        key,
        forward_operands(key, tma=False),
        (*scales, *mask_and_grid(problem, tile)),
        {
            **forward_options(problem, tile),
            "parts": parts_of(problem),
            "has": has,
            "vectors": problem.dtype.itemsize == 2 and can_move(problem, *key.layouts),
        },
        NO_WARPGROUPS,
    )


def tile_of(problem: Problem, rung: str) -> ForwardTile:
    """The tile of a rung below tma."""
    if rung == "baseline":
        return BASELINE_FORWARD
    if problem.dtype == torch.float32:
        return tiles_for(problem, hopper=False).forward
    return LADDER_FORWARD[padded_head_dim(problem.head_dim)]


def rung_kernel(
    *, dtype: str, width: int, tile: ForwardTile, parts: int, has: frozenset, vectors: bool
) -> Any:
    """A rung up to cast, which `has` its own name and those of the rungs below it.

    `vectors`: rows can be copied 16 bytes at a time, while the threads go on (cp.async).
    """
    skip, mask_ends, exp2, cast = (name in has for name in ("skip", "mask", "exp2", "cast"))
    tile_q, tile_k, slots = tile.tile_q, tile.tile_k, tile.num_stages
    engine = Engine(hopper=False, threads=32 * tile_q // tile.warp_rows, parts=parts)
    in_registers = dtype != FP32  # in fp32, P is not left where the next product takes it
    batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim = map(T.dynamic, SIZES)
    q_shape = (batch_size, num_heads, seqlen_q, head_dim)
    k_shape = (batch_size, num_kv_heads, seqlen_k, head_dim)

    @T.macro
    def start_load(x, batch, head, row, tile, slot):
        """Start to fill a slot with rows [row, row + rows) of one head of x."""
        rows = tile.shape[1]
        if vectors:
            for n in T.unroll(rows * width // (VECTOR * engine.threads)):
                element = (n * engine.threads + T.get_thread_binding()) * VECTOR
                i = element // width
                j = element % width
                T.ptx_cp_async(
                    T.access_ptr(tile[slot, i, j], "w", VECTOR),
                    T.access_ptr(x[batch, head, row + i, j], "r", VECTOR),
                    VECTOR,
                    (row + i < x.shape[2]) & (j < x.shape[3]),  # else zeros
                )
        else:
            load_tile(engine, x, batch, head, row, tile, slot, None)

    @T.macro
    def add_products(s, p, v_tiles, slot, acc):
        """O += P V."""
        if in_registers:
            T.copy(s, p)
            multiply(engine, p, None, v_tiles, slot, acc, ROWS)
            if not cast:
                for i, j in T.Parallel(tile_q, tile_k):
                    s[i, j] = s[i, j] - T.cast(p[i, j], FP32)
                T.copy(s, p)
                multiply(engine, p, None, v_tiles, slot, acc, ROWS)
        else:
            for i, j in T.Parallel(tile_q, tile_k):
                put(engine, p, 0, i, j, s[i, j])
            T.sync_threads(1, engine.threads)
            multiply(engine, p, 0, v_tiles, slot, acc, ROWS)

    @T.prim_func
    def rung_forward(
        q: strided("q", q_shape, dtype, engine),
        k: strided("k", k_shape, dtype, engine),
        v: strided("v", k_shape, dtype, engine),
        o: strided("o", q_shape, dtype, engine),
        lse: strided("lse", q_shape[:3], FP32, engine),
        factor: T.float32,
        factor_huge: T.float32,
        multiplier: T.float32,
        causal_offset: T.int32,
        num_tiles: T.int32,
        group_size: T.int32,
        total: T.int32,
    ):
        with T.Kernel(total, threads=engine.threads) as program:
            q_tile = T.alloc_shared([parts, tile_q, width], dtype)
            k_tiles = T.alloc_shared([parts * slots, tile_k, width], dtype)
            v_tiles = T.alloc_shared([parts * slots, tile_k, width], dtype)
            s = T.alloc_fragment([tile_q, tile_k], FP32)
            if in_registers:
                p = T.alloc_fragment([tile_q, tile_k], dtype)
            else:
                p = T.alloc_shared([parts, tile_q, tile_k], dtype)
            acc = T.alloc_fragment([tile_q, width], FP32)
            row = row_statistics(tile_q)
            grown = register()
            q_start = register(first_row(program, num_tiles, tile_q))
            own_batch, own_head = batch_and_head(program, num_tiles, num_heads)
            batch = register(own_batch)
            head = register(own_head)
            kv_head = register(T.truncdiv(head, group_size))
            full = register(T.min(seqlen_k, q_start + causal_offset + 1))
            end = register(seqlen_k)
            if skip:
                end = T.max(T.min(seqlen_k, q_start + causal_offset + tile_q), 0)
            no_key_seen(row, acc, factor)
            start_load(q, batch, head, q_start, q_tile, 0)
            for early in T.unroll(slots - 1):
                start_load(k, batch, kv_head, early * tile_k, k_tiles, early)
                start_load(v, batch, kv_head, early * tile_k, v_tiles, early)
                T.ptx_commit_group()
            for t in T.serial(T.truncdiv(end + tile_k - 1, tile_k)):
                k_start = t * tile_k
                slot = t % slots
                ahead = t + slots - 1
                if ahead * tile_k < end:
                    start_load(k, batch, kv_head, ahead * tile_k, k_tiles, ahead % slots)
                    start_load(v, batch, kv_head, ahead * tile_k, v_tiles, ahead % slots)
                T.ptx_commit_group()
                T.ptx_wait_group(slots - 1)
                T.sync_threads(1, engine.threads)
                # (1) S = Q K^T, times the scale, or with exp2 times its sign
                multiply(engine, q_tile, 0, k_tiles, slot, s, ROWS, transpose_b=True, clear=True)
                if multiplier != 1.0:
                    for i, j in T.Parallel(tile_q, tile_k):
                        s[i, j] = s[i, j] * multiplier
                if mask_ends:
                    if k_start + tile_k > full:
                        mask(s, q_start, k_start, seqlen_k, causal_offset)
                else:
                    mask(s, q_start, k_start, seqlen_k, causal_offset)
                if exp2:
                    online_softmax(s, row, grown, factor, factor_huge, slack=0.0)
                else:
                    online_softmax(s, row, grown, factor, factor_huge, slack=0.0, exp=T.exp)
                if grown != 0:
                    rescale(acc, row.alpha)
                add_products(s, p, v_tiles, slot, acc)
                T.sync_threads(1, engine.threads)
            T.ptx_wait_group(0)  # what was loaded early where no key is seen
            if exp2:
                finish(acc, row, lse, batch, head, q_start, factor, causal_offset)
            else:
                finish(acc, row, lse, batch, head, q_start, LOG2_E, causal_offset)
            for i, j in T.Parallel(tile_q, width):
                if (q_start + i < seqlen_q) & (j < head_dim):
                    o[batch, head, q_start + i, j] = acc[i, j]

    return rung_forward


def hopper_rung_kernel(
    *, dtype: str, width: int, is_causal: bool, tile: ForwardTile, specialize: bool
) -> Any:
    """The rung tma, or to `specialize`, the one above it."""
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
        group, q, k, v, queries, keys, values, o_tiles, o, lse, factor, factor_huge, sign,
        causal_offset, num_tiles, group_size, total, program, programs,
    ):  # fmt: skip
        """What one warpgroup does; `group` is a number, so that addresses are uniform in a warp."""
        loads = group == 0 and not specialize
        s = T.alloc_fragment([64, tile_k], FP32)
        p = T.alloc_fragment([64, tile_k], dtype)
        acc = T.alloc_fragment([64, width], FP32)
        row = row_statistics(64)
        grown = register()
        done = register()
        meet = 1 + group
        thread = T.get_thread_binding()
        for round in T.serial(T.truncdiv(total + programs - 1, programs)):
            index = register(index_of(round, program, programs))
            if index < total:
                q_start = register(first_row(index, num_tiles, tile_q))
                n = register(
                    num_key_tiles(tile_q, tile_k, is_causal, q_start, seqlen_k, causal_offset)
                )
                own_batch, own_head = batch_and_head(index, num_tiles, num_heads)
                batch = register(own_batch)
                head = register(own_head)
                kv_head = register(T.truncdiv(head, group_size))
                if loads:
                    if thread < 32:
                        fill_queries(queries, round, q, batch, head, q_start)
                        if n > 0:
                            fill(keys, done, k, batch, kv_head, (n - 1) * tile_k)
                            fill(values, done, v, batch, kv_head, (n - 1) * tile_k)
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
                for t in T.serial(n):
                    if loads:
                        # The tile after this one, into the slot of the one before, which this warp
                        # has released itself and the others will: they wait for nothing later.
                        if thread < 32 and t + 1 < n:
                            fill(keys, done + 1, k, batch, kv_head, (n - 2 - t) * tile_k)
                            fill(values, done + 1, v, batch, kv_head, (n - 2 - t) * tile_k)
                    await_tile(keys, done)
                    # (1) S = Q K^T [64, tile_k]
                    T.wgmma_gemm(
                        queries.tiles[group, :, :],
                        keys.tiles[done % keys.slots, :, :],
                        s,
                        transpose_B=True,
                        policy=ROWS,
                        clear_accum=True,
                    )
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(s, num_regs=tile_k // 2)
                    release(keys, done)
                    if t == n - 1 and not takes_q:
                        T.barrier_arrive(queries.empty[0])
                    if (n - t) * tile_k > full:
                        mask(s, q_start, (n - 1 - t) * tile_k, seqlen_k, causal_offset)
                    online_softmax(s, row, grown, factor, factor_huge, slack=0.0)
                    T.copy(s, p)
                    if grown != 0:
                        rescale(acc, row.alpha)
                    await_tile(values, done)
                    # O += P V
                    T.wgmma_gemm(p, values.tiles[done % values.slots, :, :], acc, policy=ROWS)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(acc, num_regs=width // 2)
                    release(values, done)
                    done = done + 1
                if n == 0 and not takes_q:
                    T.barrier_arrive(queries.empty[0])
                finish(acc, row, lse, batch, head, q_start, factor, causal_offset)
                store(takes_q, acc, o_tiles, group, group, o, batch, head, q_start, meet, queries)
        T.tma_store_wait(0)

    @T.prim_func
    def hopper_rung_forward(
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
        with T.Kernel(programs, threads=consumers + (128 if specialize else 0)) as program:
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
                if specialize:
                    T.inc_max_nreg(tile.registers)
                consume(
                    0, q, k, v, queries, keys, values, o_tiles, o, lse, factor, factor_huge, sign,
                    causal_offset, num_tiles, group_size, total, program, programs,
                )  # fmt: skip
            elif groups > 1 and thread < 256:
                if specialize:
                    T.inc_max_nreg(tile.registers)
                consume(
                    1, q, k, v, queries, keys, values, o_tiles, o, lse, factor, factor_huge, sign,
                    causal_offset, num_tiles, group_size, total, program, programs,
                )  # fmt: skip
            elif groups > 2 and thread < 384:
                if specialize:
                    T.inc_max_nreg(tile.registers)
                consume(
                    2, q, k, v, queries, keys, values, o_tiles, o, lse, factor, factor_huge, sign,
                    causal_offset, num_tiles, group_size, total, program, programs,
                )  # fmt: skip
            elif specialize:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                if thread < consumers + 32:
                    produce(
                        is_causal, takes_q, q, k, v, queries, keys, values,
                        causal_offset, num_tiles, group_size, total, program, programs,
                    )  # fmt: skip

    return hopper_rung_forward
