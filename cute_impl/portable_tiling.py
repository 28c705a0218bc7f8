"""Where a tile comes from and goes to, and how two tiles are multiplied, on every card from sm_80.

Tiles lie as [slots, rows, width]: a ring of `slots`, or one. Their rows past the tensor read as
zero and are not written, and so are their columns past head_dim, which is how any head_dim and
seqlen fit a tile without a copy. `Engine` says with what tiles move and multiply.

Products are done by a warp each: 16 rows of the left operand by 8 columns of the right one, 32
bytes deep (`mma.sync`), which is 16 numbers of 16 bits or 8 of fp32 rounded to TF32. Of the rows
of a product each thread has two of each 16, 8 apart, and of each 8 columns two neighbours:
`rows_of`, and `first_column_of` and `by_row` of `tiling.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float16, Float32, Int32, Int64, TFloat32, const_expr, range_constexpr
from cutlass.cute.nvgpu import CopyUniversalOp, warp
from cutlass.cute.runtime import make_fake_tensor
from cutlass.experimental import primitives
from cutlass.experimental.primitives.nvvm_wrapper import LoadCacheModifier

from flash_rosetta.cute_impl.tiling import DTYPES, Fixed
from flash_rosetta.layout import Layout
from flash_rosetta.problem import Problem

CHUNK_BYTES = 16
"""What one instruction copies, or eight of whose rows ldmatrix takes for a matrix."""

ROW_OF_CHUNKS = 8
"""Chunks in the 128 bytes that shared memory delivers at once."""


def can_use_vectors(problem: Problem, *inputs: Layout) -> bool:
    """Whether tiles of the inputs and of our outputs can be copied 16 bytes at a time.

    That takes rows of unit stride, other strides that are multiples of 16 bytes, zero included, and
    a base aligned to 16 bytes. A dimension of one element may have any stride.
    """
    itemsize = problem.dtype.itemsize
    if problem.head_dim * itemsize % CHUNK_BYTES:  # the row stride of a contiguous output
        return False
    return all(
        x.stride[-1] == 1
        and not x.misalignment
        and not any(
            size > 1 and stride * itemsize % CHUNK_BYTES
            for size, stride in zip(x.shape[:-1], x.stride[:-1], strict=True)
        )
        for x in inputs
    )


def is_exact(problem: Problem) -> bool:
    """Whether fp32 must not be rounded to TF32."""
    return problem.dtype == torch.float32 and not problem.allow_tf32


def strided(dtype: torch.dtype, rank: int, vector: bool) -> cute.Tensor:
    """The type of a parameter with any strides, in 64 bits: an index times a stride can pass 2^31.

    `vector`: its rows have unit stride. What else `can_use_vectors` asks for is not said, since
    strides of dimensions of one element need not keep to it.
    """
    strides = [cute.sym_int64() for _ in range(rank)]
    if vector:
        strides[-1] = 1
    sizes = tuple(cute.sym_int() for _ in range(rank))
    return make_fake_tensor(DTYPES[dtype], sizes, tuple(strides), assumed_align=dtype.itemsize)


@dataclass(frozen=True)
class Engine:
    """With what a kernel moves and multiplies tiles; all of it is known when compiling.

    `vector`: tiles are copied 16 bytes at a time, asynchronously, see `can_use_vectors`; else
    element by element.
    `warps` share the rows of each product, 16 rows at a time; where accumulators would not fit the
    registers of that many, `column_groups` times as many warps share the columns of the last
    product, and each group repeats the products before it.
    `exact` (fp32): a number is the sum of two that fit TF32, and three products make one: an error
    near 1e-6.
    """

    dtype: Any
    vector: bool
    warps: int
    column_groups: int = 1
    exact: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.column_groups

    @property
    def halves(self) -> bool:
        """Whether operands have 16 bits."""
        return self.dtype.width == 16

    @property
    def chunk(self) -> int:
        """Elements in 16 bytes."""
        return 8 * CHUNK_BYTES // self.dtype.width

    def mma(self) -> cute.TiledMma:
        """The products of the `warps` of a column group: 16 columns and 32 bytes deep at a time."""
        if self.halves:
            op, depth = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)), 16
        else:
            op, depth = warp.MmaTF32Op((16, 8, 8)), 8
        return self._tiled(op, depth)

    def paired_mma(self) -> cute.TiledMma:
        """How operands read by ldmatrix lie in registers, in units of 16 bits.

        ldmatrix moves pairs of 16 bits. An operand of 16-bit numbers has them where fp32 operands
        have their halves.
        """
        dtype = self.dtype if self.halves else Float16
        return self._tiled(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)), 16)

    def _tiled(self, op, depth: int) -> cute.TiledMma:
        shape = 16 * self.warps, 16, depth
        return cute.make_tiled_mma(op, (self.warps, 1, 1), permutation_mnk=shape)

    def row_thread(self):
        """This thread's number in its column group."""
        return cute.arch.thread_idx()[0] % (32 * self.warps)

    def column_group(self):
        return cute.arch.thread_idx()[0] // (32 * self.warps)


class SharedTiles(Fixed):
    """Tiles [slots, rows, width] in shared memory.

    The 16-byte chunks of a row are permuted by the row's number modulo 8 (a swizzle), so that the
    eight rows that ldmatrix reads at once, or the rows that the threads of a warp read one number
    of each, lie in different banks.
    """

    def __init__(self, engine: Engine, memory, rows: int, width: int, slots: int = 1):
        self.engine = engine
        self.rows = rows
        self.width = width
        self.start = memory.allocate_array(engine.dtype, slots * rows * width, byte_alignment=128)

    def _slot(self, dtype, slot) -> cute.Tensor:
        """A slot's elements as `dtype`, fp32 or 16 bits wide."""
        chunk = 8 * CHUNK_BYTES // dtype.width
        in_row = ROW_OF_CHUNKS * chunk
        atom = cute.make_composed_layout(
            cute.make_swizzle(3, chunk.bit_length() - 1, 3),
            0,
            cute.make_layout((8, in_row), stride=(in_row, 1)),
        )
        width = self.width * self.engine.dtype.width // dtype.width
        layout = cute.tile_to_shape(atom, (self.rows, width), (0, 1))
        # 8 rows of at least 128 bytes: said, because ldmatrix needs to know the alignment.
        start = self.start + cute.assume(Int32(slot) * (self.rows * self.width), divby=256)
        return cute.make_tensor(cute.recast_ptr(start, dtype=dtype), layout)

    def elements(self, slot=0) -> cute.Tensor:
        """[rows, width]"""
        return self._slot(self.engine.dtype, slot)

    def pairs(self, slot=0) -> cute.Tensor:
        """[rows, width] in units of 16 bits, as ldmatrix moves it."""
        return self._slot(self.engine.dtype if self.engine.halves else Float16, slot)

    def columns(self, slot=0) -> cute.Tensor:
        """The transpose of a slot [width of a column group, rows], as the right operand of a
        product whose left one is an accumulator.

        Of 8 neighbouring columns of an accumulator, thread t of four has columns 2t and 2t + 1. As
        an operand of fp32 they should be columns t and t + 4: so the rows are put in that order.
        """
        rows, width, groups = self.rows, self.width, self.engine.column_groups
        if self.engine.halves:
            order = cute.make_layout((width, rows), stride=(rows, 1))
        else:
            order = cute.make_layout((width, (4, 2, rows // 8)), stride=(rows, (2, 1, 8)))
        transposed = cute.composition(self.elements(slot), order)
        if groups == 1:
            return transposed
        return cute.local_tile(transposed, (width // groups, rows), (self.engine.column_group(), 0))


def head_of(x: cute.Tensor, batch, head) -> cute.Tensor:
    """One head of x [batch, heads, ...], found in 64 bits."""
    start = x.iterator + (Int64(batch) * x.stride[0] + Int64(head) * x.stride[1])
    return cute.make_tensor(start, cute.make_layout(x.shape[2:], stride=x.stride[2:]))


def aligned(pointer) -> cute.Pointer:
    """The pointer to 16 bytes that need not be copied one by one."""
    return cute.make_ptr(
        pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=CHUNK_BYTES
    )


@cute.jit
def load_tile(engine: cutlass.Constexpr, x: cute.Tensor, row, tiles: SharedTiles, slot):
    """Start to fill a slot with rows [row, row + rows) of one head x [seqlen, head_dim]."""
    thread = cute.arch.thread_idx()[0]
    num_rows, num_columns = x.shape
    rows, width = tiles.rows, tiles.width
    to = tiles.elements(slot)
    if const_expr(engine.vector):
        # Eight neighbouring threads take 128 bytes of a row. From 64 threads on, the rows of each
        # are a multiple of 8 apart, so that its places in the tile differ by numbers known when
        # compiling.
        step = engine.threads // ROW_OF_CHUNKS
        first, j = thread // ROW_OF_CHUNKS, thread % ROW_OF_CHUNKS * engine.chunk
        place = to.iterator + to.layout((first, j))
        source = x.iterator + (Int64(row + first) * x.stride[0] + j)
        itemsize = engine.dtype.width // 8
        bytes_left = (num_columns - j) * itemsize
        for n in range_constexpr(0, rows, step):
            in_row = bytes_left if row + n + first < num_rows else Int32(0)
            for block in range_constexpr(0, width, ROW_OF_CHUNKS * engine.chunk):
                size = cutlass.min(cutlass.max(in_row - block * itemsize, 0), CHUNK_BYTES)
                if const_expr(step % 8 == 0):
                    target = place + to.layout((n, block))
                else:
                    target = to.iterator + to.layout((n + first, j + block))
                primitives.cp_async_shared_global(
                    target,
                    source + block,
                    CHUNK_BYTES,
                    LoadCacheModifier.CG,
                    cp_size=size,  # the rest of the chunk becomes zero
                )
            source = source + step * x.stride[0]
    else:
        # Neighbouring threads take neighbouring columns, eight elements each on their way at once.
        for several in cutlass.range(rows * width // (8 * engine.threads), unroll=1):
            values = cute.make_rmem_tensor((8,), engine.dtype)
            for n in range_constexpr(8):
                element = (8 * several + n) * engine.threads + thread
                i, j = row + element // width, element % width
                inside = (i < num_rows) & (j < num_columns)
                # An element past the end is not read: the last one is in its place.
                i, j = cutlass.min(i, num_rows - 1), cutlass.min(j, num_columns - 1)
                value = x[Int64(i), Int64(j)]
                values[n] = value if inside else engine.dtype(0)
            for n in range_constexpr(8):
                element = (8 * several + n) * engine.threads + thread
                to[element // width, element % width] = values[n]


@cute.jit
def store_tile(engine: cutlass.Constexpr, x: cute.Tensor, row, acc: cute.Tensor, staging):
    """Write an accumulator to rows [row, row + rows) of one head x, through slot 0 of `staging`.

    Every thread must be done with what the slot held.
    """
    thread = cute.arch.thread_idx()[0]
    num_rows, num_columns = x.shape
    rows, width = staging.rows, staging.width
    tile = staging.elements()
    own_columns = rows, width // engine.column_groups
    own = cute.local_tile(tile, own_columns, (0, engine.column_group()))
    rounded = cute.make_fragment_like(acc, engine.dtype)
    rounded.store(acc.load().to(engine.dtype))
    cute.autovec_copy(rounded, engine.mma().get_slice(engine.row_thread()).partition_C(own))
    cute.arch.sync_threads()
    if const_expr(engine.vector):
        step = engine.threads // ROW_OF_CHUNKS
        first, j = thread // ROW_OF_CHUNKS, thread % ROW_OF_CHUNKS * engine.chunk
        place = tile.iterator + tile.layout((first, j))
        target = x.iterator + (Int64(row + first) * x.stride[0] + j)
        chunk = cute.make_layout(engine.chunk)
        for n in range_constexpr(0, rows, step):
            for block in range_constexpr(0, width, ROW_OF_CHUNKS * engine.chunk):
                if row + n + first < num_rows and j + block < num_columns:
                    if const_expr(step % 8 == 0):
                        source = place + tile.layout((n, block))
                    else:
                        source = tile.iterator + tile.layout((n + first, j + block))
                    values = cute.make_tensor(aligned(source), chunk)
                    cute.make_tensor(aligned(target + block), chunk).store(values.load())
            target = target + step * x.stride[0]
    else:
        for several in cutlass.range(rows * width // engine.threads, unroll=1):
            element = several * engine.threads + thread
            i, j = element // width, element % width
            if row + i < num_rows and j < num_columns:
                x[Int64(row + i), Int64(j)] = tile[i, j]


def accumulator(engine: Engine, rows: int, width: int) -> cute.Tensor:
    """Where a product [rows, width] is summed: fp32, in registers."""
    shape = engine.mma().get_slice(0).partition_shape_C((rows, width))
    return cute.make_rmem_tensor(shape, Float32)


def rows_of(engine: Engine, rows: int) -> list:
    """The rows of a product [rows, n] that this thread has."""
    thread = engine.row_thread()
    first = thread // 32 * 16 + thread % 32 // 4
    return [first + i + j for i in range(0, rows, 16 * engine.warps) for j in (0, 8)]


@cute.jit
def as_operand(engine: cutlass.Constexpr, acc: cute.Tensor):
    """An accumulator [rows, columns] as the next product's left operand, rounded to 16 bits."""
    (pair, two), m, n = acc.layout.shape
    (pair_step, two_step), m_step, n_step = acc.layout.stride
    if const_expr(engine.halves):
        rounded = cute.make_rmem_tensor(acc.layout, engine.dtype)
        rounded.store(acc.load().to(engine.dtype))
        layout = cute.make_layout(
            ((pair, two, 2), m, n // 2),
            stride=((pair_step, two_step, n_step), m_step, 2 * n_step),
        )
        return cute.make_tensor(rounded.iterator, layout)
    else:
        # Columns t and t + 4 of an operand are an accumulator's 2t and 2t + 1: see `columns`.
        layout = cute.make_layout(
            ((two, pair), m, n), stride=((two_step, pair_step), m_step, n_step)
        )
        return cute.make_tensor(acc.iterator, layout)


@cute.jit
def multiply(engine: cutlass.Constexpr, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """acc += A B^T of two slots, A [rows, width] and B [columns, width], given as `pairs`."""
    mma = engine.paired_mma()
    own = mma.get_slice(engine.row_thread())
    ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), a.element_type)
    copy_a = cute.make_tiled_copy_A(ldmatrix, mma).get_slice(engine.row_thread())
    copy_b = cute.make_tiled_copy_B(ldmatrix, mma).get_slice(engine.row_thread())
    a_operand = own.make_fragment_A(own.partition_A(a))
    b_operand = own.make_fragment_B(own.partition_B(b))
    a_from, a_to = copy_a.partition_S(a), copy_a.retile(a_operand)
    b_from, b_to = copy_b.partition_S(b), copy_b.retile(b_operand)
    if const_expr(not engine.halves):
        a_operand = cute.recast_tensor(a_operand, Float32)
        b_operand = cute.recast_tensor(b_operand, Float32)
    for k in range_constexpr(cute.size(a_operand, mode=[2])):
        cute.copy(copy_a, a_from[None, None, k], a_to[None, None, k])
        cute.copy(copy_b, b_from[None, None, k], b_to[None, None, k])
        multiply_step(engine, acc, a_operand[None, None, k], b_operand[None, None, k])


@cute.jit
def multiply_by_columns(
    engine: cutlass.Constexpr, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor
):
    """acc += A B, A [rows, depth] from `as_operand`, B [depth, width] a slot's `columns`."""
    own = engine.mma().get_slice(engine.row_thread())
    b_from = own.partition_B(b)
    b_operand = own.make_fragment_B(b_from)
    if const_expr(engine.halves):
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), engine.dtype)
        copy = cute.make_tiled_copy_B(ldmatrix, engine.mma()).get_slice(engine.row_thread())
        b_from, b_to = copy.partition_S(b), copy.retile(b_operand)
    else:
        b_operand = same_shape(b_operand, Float32)
        b_to = b_operand
        copy = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=32)
    for k in range_constexpr(cute.size(a, mode=[2])):
        for n in range_constexpr(cute.size(b_from, mode=[1])):
            cute.copy(copy, b_from[None, n, k], b_to[None, n, k])
        multiply_step(engine, acc, a[None, None, k], b_operand[None, None, k])


@cute.jit
def multiply_step(engine: cutlass.Constexpr, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """acc += a b, operands in registers, 32 bytes deep."""
    mma = engine.mma()
    if const_expr(engine.halves):
        cute.gemm(mma, acc, a, b, acc)
    else:
        # Eight columns at a time, so that few converted numbers are held at once.
        a_leading, a_finite, a_rest = converted(engine, a)
        for n in range_constexpr(cute.size(b, mode=[1])):
            b_n = cute.append_ones(b[None, n], up_to_rank=2)
            b_leading, b_finite, b_rest = converted(engine, b_n)
            c = cute.append_ones(acc[None, None, n], up_to_rank=3)
            if const_expr(engine.exact):  # the small terms first
                cute.gemm(mma, c, a_rest, b_finite, c)
                cute.gemm(mma, c, a_finite, b_rest, c)
            cute.gemm(mma, c, a_leading, b_leading, c)


def converted(engine: Engine, x: cute.Tensor):
    """An fp32 operand in parts that fit TF32, see `split`; all of them the same if not `exact`."""
    return split(x) if engine.exact else (nearest_tf32(x),) * 3


def same_shape(x: cute.Tensor, dtype) -> cute.Tensor:
    return cute.make_rmem_tensor(x.layout.shape, dtype)


@cute.jit
def nearest_tf32(x: cute.Tensor):
    """An operand rounded to TF32. The tensor core itself would cut the last bits off."""
    rounded = same_shape(x, Int32)
    for i in range_constexpr(cute.size(x)):
        rounded[i] = Int32(cute.arch.cvt_f32_tf32(x[i]))
    return cute.recast_tensor(rounded, TFloat32)


@cute.jit
def split(x: cute.Tensor):
    """The leading bits of an operand, the same with zero for what is infinite, and what they leave.

    An infinite number is all in its leading bits. It is left out of the products with small terms,
    which may be zero: the product of the leading terms alone says what it gives.
    """
    leading, finite = same_shape(x, Int32), same_shape(x, Int32)
    rest = same_shape(x, Float32)
    for i in range_constexpr(cute.size(x)):
        bits = x[i].bitcast(Int32)
        infinite = (bits & 0x7FFFFFFF) == 0x7F800000
        leading[i] = bits & ~0x1FFF
        finite[i] = Int32(0) if infinite else leading[i]
        rest[i] = Float32(0.0) if infinite else x[i] - leading[i].bitcast(Float32)
    return tuple(cute.recast_tensor(part, TFloat32) for part in (leading, finite, rest))
