"""How tiles lie in shared memory and get there, and how warpgroups multiply them, on Hopper.

Tiles lie as [rows, width, slots]. Their rows past the tensor read as zero and are not written, and
so are their columns past head_dim, which is how any head_dim and seqlen fit a tile without a copy.

Of a product [64, n] each thread of a warpgroup has two rows, 8 apart, and of each 8 columns two
neighbours: `rows_of`, `first_column_of`, `by_row`.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32, Uint32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_tensor

DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
}

PRODUCER_REGISTERS = 24
"""A thread of the producer's warpgroup keeps these and leaves the others to the consumers."""

CONSUMER_REGISTERS = 240
"""What a thread of two warpgroups beside a producer's gets: all start with 168."""


def strided(dtype: torch.dtype, rank: int, tma: bool) -> cute.Tensor:
    """The type of a parameter with any strides, in 64 bits: an index times a stride can pass 2^31.

    `tma`: they are those of a tensor that the copy engine can move.
    """
    steps = 16 // dtype.itemsize if tma else 1
    strides = [cute.sym_int64(divisibility=steps) for _ in range(rank)]
    if tma:
        strides[-1] = 1
    return make_fake_tensor(
        DTYPES[dtype],
        tuple(cute.sym_int() for _ in range(rank)),
        tuple(strides),
        assumed_align=16 if tma else dtype.itemsize,
    )


class Fixed:
    """A Python object whose attributes stay what they are, so that loops need not carry them."""

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


def swizzled(dtype, shape: tuple[int, int, int]) -> cute.ComposedLayout:
    """Row-major tiles as the copy engine writes them, and as products read them either way up.

    The 16-byte pieces of each 8 rows change places, so that 8 pieces of a column lie in different
    banks. The width is a multiple of 64.
    """
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, shape, order=(0, 1, 2))


def room_for(dtype, shape: tuple[int, int, int]):
    """A field of shared memory for swizzled tiles; their order repeats every 1024 bytes."""
    return cute.struct.Align[cute.struct.MemRange[dtype, math.prod(shape)], 1024]


def tiles_in(field, dtype, shape: tuple[int, int, int]) -> cute.Tensor:
    layout = swizzled(dtype, shape)
    return field.get_tensor(layout.outer, swizzle=layout.inner)


def barriers(count: int):
    """A field of shared memory for barriers."""
    return cute.struct.MemRange[cutlass.Int64, count]


def transposed(tiles: cute.Tensor) -> cute.Tensor:
    """The same tiles as [width, rows, slots]."""
    return cute.make_tensor(tiles.iterator, cute.select(tiles.layout, mode=[1, 0, 2]))


class Ring(Fixed):
    """Tiles in shared memory that one warp fills and the consumers' warps empty, `slots` of them.

    The n-th filling of a program goes to slot n % slots. A slot is full when all that was asked for
    has arrived, `num_bytes`, and empty when each consumer warp has said that it is done with it.
    """

    def __init__(self, tiles: cute.Tensor, full, empty, slots: int, num_bytes: int):
        self.tiles = tiles
        self.full = full.data_ptr()
        self.empty = empty.data_ptr()
        self.slots = slots
        self.num_bytes = num_bytes

    def init(self, consumer_warps: int) -> None:
        for slot in range(self.slots):
            cute.arch.mbarrier_init(self.full + slot, 1)
            cute.arch.mbarrier_init(self.empty + slot, consumer_warps)

    def slot(self, n):
        # Unsigned: the remainder of what may be negative takes more instructions.
        return Int32(Uint32(n) % self.slots) if self.slots > 1 else 0

    def parity(self, n):
        return Int32(Uint32(n) // self.slots % 2)

    def begin_fill(self, n):
        """The producer: wait for the n-th filling's slot. Returns the barrier its copies tell."""
        full = self.full + self.slot(n)
        await_phase(self.empty + self.slot(n), 1 - self.parity(n))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.num_bytes)
        return full

    def await_tile(self, n) -> None:
        """A consumer: wait for the n-th filling to arrive."""
        await_phase(self.full + self.slot(n), self.parity(n))

    def release(self, n) -> None:
        """A consumer warp: done with the n-th filling.

        Where lanes read it by themselves, not products, they have met since.
        """
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.slot(n))


def await_phase(barrier: cute.Pointer, parity) -> None:
    """Wait until a barrier's phase of this parity is over. The DSL's own wait sleeps in between."""
    cute.arch.inline_ptx(
        "{.reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [{$r0}], {$r1};"
        " @!over bra again;}",
        read_only_args=[barrier.toint(), Int32(parity)],
    )


def mover(op, x: cute.Tensor, shape: tuple[int, int, int]):
    """What has the copy engine move tiles of x's heads, and x as [seqlen, head_dim, heads, batch]
    in its terms.
    """
    x = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0]))
    tile = cute.select(swizzled(x.element_type, shape), mode=[0, 1])
    return cpasync.make_tiled_tma_atom(op, x, tile, shape[:2])


def tiles_of(move: cute.CopyAtom, tiles: cute.Tensor, x: cute.Tensor):
    """Tiles in shared memory, and those of one head x, as `move` copies them: by their number."""
    shape = cute.size(tiles, mode=[0]), cute.size(tiles, mode=[1])
    return cpasync.tma_partition(
        move,
        0,
        cute.make_layout(1),
        cute.group_modes(tiles, 0, 2),
        cute.group_modes(cute.local_tile(x, shape, (None, 0)), 0, 2),
    )


def stats_mover(stats: cute.Tensor, rows: int):
    """What has the copy engine load one statistic of `rows` rows of a head, and stats [batch,
    num_heads, 2, padded_rows] as [padded_rows, 2, num_heads, batch] in its terms.

    Bulk copies, which need no description of the tensor, would do too; but `compute-sanitizer`
    reports them as racing with the reads that wait for their barrier.
    """
    stats = cute.make_tensor(stats.iterator, cute.select(stats.layout, mode=[3, 2, 1, 0]))
    load, tile = cpasync.CopyBulkTensorTileG2SOp(), cute.make_layout((rows,))
    return cpasync.make_tiled_tma_atom(load, stats, tile, (rows,))


def stats_of(move: cute.CopyAtom, slots: cute.Tensor, x: cute.Tensor):
    """Slots [rows, slots] in shared memory, and pieces of one statistic x [padded_rows] of a head,
    as `move` copies them: by their number.
    """
    pieces = cute.local_tile(x, (cute.size(slots, mode=[0]),), (None,))
    return cpasync.tma_partition(move, 0, cute.make_layout(1), slots, pieces)


def multiply(
    product: cute.TiledMma, acc, a, b, add: bool | Boolean, a_slot=None, b_slot=None
) -> None:
    """Start acc = a b, or acc += a b to `add`, as one group to wait for.

    a and b are operands, or rings of them, of which to take a slot.
    """
    atom = cute.make_mma_atom(product.op)  # a new one: what is set of it holds in this block alone
    warpgroup.fence()
    for step in range(cute.size(b, mode=[2])):  # 16 columns of a, 16 rows of b each
        atom.set(warpgroup.Field.ACCUMULATE, add if step == 0 else True)
        # Slot and step in one: apart, each step's address is a sum of 64 bits, in two instructions.
        a_step = a[None, None, step] if a_slot is None else a[None, None, step, a_slot]
        b_step = b[None, None, step] if b_slot is None else b[None, None, step, b_slot]
        cute.gemm(atom, acc, a_step, b_step, acc)
    warpgroup.commit_group()


def rounded(acc: cute.Tensor, dtype) -> cute.Tensor:
    """An accumulator's values in `dtype`."""
    result = cute.make_rmem_tensor(acc.layout, dtype)
    result.store(acc.load().to(dtype))
    return result


def as_left_operand(x: cute.Tensor) -> cute.Tensor:
    """A rounded accumulator [64, n] as a product's left operand: the same registers, in order.

    LLVM would round fp16 between the steps of the product, each of which ptxas then starts alone:
    so something has to read all of it before. It rounds bf16 where the program says, and there the
    same would have ptxas run products one after the other (C7519).
    """
    if x.element_type is cutlass.Float16:
        pairs = cute.recast_tensor(x, Int32)
        registers = [pairs[i] for i in range(cute.size(pairs))]
        cute.arch.inline_ptx("// rounded", read_only_args=registers)
    return cute.make_tensor(x.iterator, cute.make_layout(((2, 2, 2), 1, cute.size(x) // 8)))


def put_tile(
    product: cute.TiledMma, thread, acc: cute.Tensor, tile: cute.Tensor, transpose: bool = False
) -> None:
    """Write `thread`'s part of a rounded accumulator of `product` to a tile in shared memory.

    `transpose`: the tile's columns, not its rows, are those that lie in one piece.
    """
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose, 4), acc.element_type)
    copy = cute.make_tiled_copy_C(stmatrix, product).get_slice(thread)
    cute.copy(stmatrix, copy.retile(acc), copy.partition_D(tile))


def rows_of(thread) -> list:
    """The rows of a product [64, n] that a thread of the warpgroup has."""
    first = thread // 32 * 16 + thread % 32 // 4
    return [first, first + 8]


def first_column_of(thread):
    return thread % 4 * 2


def by_row(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as [rows, columns] of its thread: column j is `column_of(j)` of the tile."""
    (pair, rows, *columns), m, n = acc.layout.shape
    (pair_step, rows_step, *columns_step), m_step, n_step = acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((rows, m), (pair, *columns, n)),
            stride=((rows_step, m_step), (pair_step, *columns_step, n_step)),
        ),
    )


def column_of(j: int) -> int:
    """A thread's j-th column, less its `first_column_of`: a number known when compiling."""
    return j // 2 * 8 + j % 2


def in_order(x: cute.Tensor) -> list[tuple[int, int]]:
    """The indices of what `by_row` returns, in the order of an accumulator's registers."""
    rows, columns = cute.size(x, mode=[0]), cute.size(x, mode=[1])
    return [(r, j + c) for j in range(0, columns, 2) for r in range(rows) for c in range(2)]
