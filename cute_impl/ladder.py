"""The ladder: a FlashAttention-2 forward that starts slow, and gets one optimisation a rung.

The rungs are those of `flash_rosetta.variants`; what `forward.py` ships stands above the last one
here. Up to cast they are `RungForward`, by flags known when it is compiled; `TmaForward` and
`SpecializedForward` are the two above it, Hopper's alone.

Shapes, steps and constraints are those of `portable_forward.py` and `forward.py`, from which the
kernels here differ in what they do not do. P is rounded to the operands' 16 bits only from cast on.
Before, the tensor core gets it in two halves, a rounded P and what rounding took away.

What lives where
    registers, shared memory, HBM: as there; two key and two value tiles in flight
"""

from functools import lru_cache

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flash_rosetta.copy_engine import as_is
from flash_rosetta.cute_impl.forward import Forward, fill, forward_recipe, multiply_tile
from flash_rosetta.cute_impl.launch import Recipe
from flash_rosetta.cute_impl.portable_forward import PortableForward
from flash_rosetta.cute_impl.portable_tiling import (
    as_operand,
    can_use_vectors,
    is_exact,
    multiply_by_columns,
)
from flash_rosetta.cute_impl.softmax import (
    RowStatistics,
    finish,
    mask,
    no_key_seen,
    online_softmax,
    rescale,
)
from flash_rosetta.cute_impl.tiles import (
    BASELINE_FORWARD,
    LADDER_FORWARD,
    PortableTile,
    padded_head_dim,
    portable_tiles_for,
)
from flash_rosetta.cute_impl.tiling import (
    Fixed,
    as_left_operand,
    first_column_of,
    multiply,
    rounded,
    rows_of,
    tiles_of,
    transposed,
)
from flash_rosetta.hopper import can_use_tma
from flash_rosetta.kernels import exponent_scale, last_key_offset
from flash_rosetta.layout import LaunchKey
from flash_rosetta.problem import Problem

RUNGS = ("baseline", "tiles", "skip", "mask", "exp2", "cast", "tma", "specialize")
"""From the bottom."""

HOPPER_RUNGS = RUNGS[RUNGS.index("tma") :]


@lru_cache(maxsize=4096)
def rung_recipe(key: LaunchKey, rung: str) -> Recipe:
    """The kernel of a rung. What the copy engine cannot move, the last rung without it runs."""
    problem = key.problem
    if rung in HOPPER_RUNGS and can_use_tma(problem, *key.layouts):
        if rung == "specialize":
            return forward_recipe(key, kernel=SpecializedForward)
        return forward_recipe(key, kernel=TmaForward, is_persistent=False)
    rung = min(rung, "cast", key=RUNGS.index)
    scales = exponent_scale(problem) if _has(rung, "exp2") else (1.0, 1.0, problem.scale)
    vector = can_use_vectors(problem, *key.layouts)
    options = {
        "dtype": problem.dtype,
        "width": padded_head_dim(problem.head_dim),
        "vector": vector,
        "exact": is_exact(problem),
        "tile": _tile_of(problem, rung, vector),
        "rung": rung,
    }
    return Recipe(RungForward, key, (as_is,) * 5, (*scales, last_key_offset(problem)), options)


def _has(rung: str, other: str) -> bool:
    return RUNGS.index(rung) >= RUNGS.index(other)


def _tile_of(problem: Problem, rung: str, vector: bool) -> PortableTile:
    if rung == "baseline":
        return BASELINE_FORWARD
    if problem.dtype == torch.float32 or not vector:
        return portable_tiles_for(problem, vector).forward
    return LADDER_FORWARD[padded_head_dim(problem.head_dim)]


class RungForward(PortableForward):
    """A rung up to cast: one query tile a program."""

    def __init__(self, *, rung: str, **options):
        super().__init__(**options)
        self.skip, self.mask_ends, self.exp2, self.cast = (
            _has(rung, other) for other in ("skip", "mask", "exp2", "cast")
        )

    def statistics(self, *arguments) -> RowStatistics:
        return RowStatistics(*arguments, exact_steps=True, natural=not self.exp2)

    def end_of_visits(self, seqlen_k, q_start, causal_offset):
        if not self.skip:
            return seqlen_k
        return super().end_of_visits(seqlen_k, q_start, causal_offset)

    @cute.jit
    def attend(
        self, s, row, acc, v_tiles, slot, sign, full, q_start, k_start, seqlen_k, causal_offset
    ):
        """What a visit makes of its scores. `sign` is the scale itself on rungs below exp2."""
        engine = self.engine
        if sign != 1.0:
            for i in range_constexpr(cute.size(s)):
                s[i] = s[i] * sign
        if const_expr(self.mask_ends):
            if k_start + self.tile.tile_k > full:
                mask(s, row, q_start, k_start, seqlen_k, causal_offset)
        else:
            mask(s, row, q_start, k_start, seqlen_k, causal_offset)
        grown = online_softmax(s, row)
        if grown:
            rescale(acc, row.alpha)
        # O += P V
        multiply_by_columns(engine, acc, as_operand(engine, s), v_tiles.columns(slot))
        if const_expr(engine.halves and not self.cast):
            s.store(s.load() - rounded(s, engine.dtype).load().to(Float32))
            multiply_by_columns(engine, acc, as_operand(engine, s), v_tiles.columns(slot))


class Loads(Fixed):
    """What moves tiles of q, k and v, and the tensors in its terms."""

    def __init__(self, load_q, q, load_k, k, load_v, v, group_size):
        self.load_q, self.q = load_q, q
        self.load_k, self.k = load_k, k
        self.load_v, self.v = load_v, v
        self.group_size = group_size


class SpecializedForward(Forward):
    """The rung specialize: a producer's warp, and consumers that wait for each product."""

    @cute.jit
    def consume(
        self, group, queries, keys, values, o_tiles, store_o, o, lse,
        factor, factor_huge, sign, turns,
    ):  # fmt: skip
        self.visit(
            None, group, queries, keys, values, o_tiles, store_o, o, lse,
            factor, factor_huge, sign, turns,
        )  # fmt: skip

    @cute.jit
    def visit(
        self, loads: cutlass.Constexpr, group, queries, keys, values, o_tiles, store_o, o, lse,
        factor, factor_huge, sign, turns,
    ):  # fmt: skip
        """What one warpgroup does; with `loads`, the first warp of all also has tiles moved."""
        tile_k, width, groups = self.tile.tile_k, self.width, self.tile.warpgroups
        causal_offset, seqlen_k = turns.causal_offset, turns.seqlen_k
        thread = cute.arch.thread_idx()[0] % 128
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        qk = self.product(OperandMajorMode.K, tile_k, warpgroup.OperandSource.SMEM)
        pv = self.product(OperandMajorMode.MN, width, warpgroup.OperandSource.RMEM)
        q_left = qk.make_fragment_A(qk.get_slice(0).partition_A(queries.tiles))
        k_right = qk.make_fragment_B(qk.get_slice(0).partition_B(keys.tiles))
        v_right = pv.make_fragment_B(pv.get_slice(0).partition_B(transposed(values.tiles)))
        s = cute.make_rmem_tensor(qk.partition_shape_C((64, tile_k)), Float32)
        acc = cute.make_rmem_tensor(pv.partition_shape_C((64, width)), Float32)
        row = RowStatistics(
            rows_of(thread), first_column_of(thread), factor, factor_huge, exact_steps=True
        )
        done = Int32(0)
        meet = 1 + groups + group
        for round in cutlass.range(turns.num_rounds(), unroll=1):
            index = turns.index(round)
            if index < turns.total:
                q_start = turns.first_row(index)
                n = turns.num_key_tiles(q_start)
                head, batch = turns.head_and_batch(index)
                if const_expr(loads is not None):
                    kv_head = head // loads.group_size
                    to_q, from_q = tiles_of(
                        loads.load_q, queries.tiles, loads.q[None, None, head, batch]
                    )
                    to_k, from_k = tiles_of(
                        loads.load_k, keys.tiles, loads.k[None, None, kv_head, batch]
                    )
                    to_v, from_v = tiles_of(
                        loads.load_v, values.tiles, loads.v[None, None, kv_head, batch]
                    )
                    if warp == 0:
                        full_q = queries.begin_fill(round)
                        for g in range_constexpr(groups):
                            cute.copy(
                                loads.load_q,
                                from_q[None, q_start // 64 + g],
                                to_q[None, queries.slot(round) * groups + g],
                                tma_bar_ptr=full_q,
                            )
                        if n > 0:
                            fill(keys, done, loads.load_k, to_k, from_k, n - 1)
                            fill(values, done, loads.load_v, to_v, from_v, n - 1)
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
                for t in cutlass.range(n, unroll=1):
                    if const_expr(loads is not None):
                        # The tile after this one, into the slot of one before, which this warp has
                        # given back and the others will: they wait for nothing that comes later.
                        if warp == 0 and t + 1 < n:
                            fill(keys, done + 1, loads.load_k, to_k, from_k, n - 2 - t)
                            fill(values, done + 1, loads.load_v, to_v, from_v, n - 2 - t)
                    keys.await_tile(done)
                    # (1) S = Q K^T [64, tile_k]
                    multiply(qk, s, q_left, k_right, False, q_slot, keys.slot(done))
                    warpgroup.wait_group(0)
                    keys.release(done)
                    if t == n - 1:
                        self.release_queries(queries, round)
                    if (n - t) * tile_k > full:
                        mask(s, row, q_start, (n - 1 - t) * tile_k, seqlen_k, causal_offset)
                    grown = online_softmax(s, row)
                    p = as_left_operand(rounded(s, self.dtype))
                    if grown:
                        rescale(acc, row.alpha)
                    values.await_tile(done)
                    # O += P V
                    multiply(pv, acc, p, v_right, True, b_slot=values.slot(done))
                    warpgroup.wait_group(0)
                    values.release(done)
                    done += 1
                if n == 0:
                    self.release_queries(queries, round)
                finish(acc, row, lse[batch, head, None], q_start, seqlen_k, causal_offset)
                o_head = o[None, None, head, batch]
                self.store(pv, acc, o_tiles, group, store_o, o_head, q_start, meet, queries, round)
        cute.arch.cp_async_bulk_wait_group(0, read=True)


class TmaForward(SpecializedForward):
    """The rung tma: a consumer has the copy engine load the next tiles before it works on these."""

    @property
    def threads(self) -> int:
        return 128 * self.tile.warpgroups

    @cute.jit
    def work(
        self, warp, load_q, q, load_k, k, load_v, v, queries, keys, values, o_tiles, store_o, o,
        lse, factor, factor_huge, sign, group_size, turns,
    ):  # fmt: skip
        self.visit(
            Loads(load_q, q, load_k, k, load_v, v, group_size), warp // 4,
            queries, keys, values, o_tiles, store_o, o, lse, factor, factor_huge, sign, turns,
        )  # fmt: skip
