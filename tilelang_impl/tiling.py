"""Where a tile comes from and goes to, and how two tiles are multiplied, shared by all kernels.

A tile lies in shared memory as [slots, rows, width]: a ring of `slots`, or one. Its rows past the
tensor read as zero and are not written, and so are its columns past head_dim, which is how any
head_dim and seqlen fit a tile without a copy. `Engine` says with what tiles move and multiply; the
macros below look at it while TileLang builds the kernel, not when the kernel runs.
"""

from dataclasses import dataclass

import tilelang.language as T
import torch

from flash_rosetta.problem import Problem

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Engine:
    """With what a kernel of `threads` threads moves and multiplies tiles.

    `hopper`: the copy engine (TMA) fills tiles and says so by a barrier in shared memory, and
    warpgroups multiply asynchronously (wgmma). Otherwise threads copy, meet, and multiply with
    `T.gemm`, which waits: by mma, or by wgmma on Hopper, where TileLang itself puts the fence that
    orders what threads wrote before what the tensor core reads.
    `parts`: 2 in exact fp32, where every number is held as the sum of two that fit TF32.
    """

    hopper: bool
    threads: int
    parts: int = 1


def parts_of(problem: Problem) -> int:
    """2 where fp32 must be exact: three TF32 products for each then, an error near 1e-6."""
    return 2 if problem.dtype == torch.float32 and not problem.allow_tf32 else 1


def strided(name: str, shape: tuple, dtype: str, engine: Engine):
    """The type of a parameter with any strides, in 64 bits: an index times a stride can pass 2^31.

    TileLang takes parameters of one and the same type object for one buffer: make one for each.
    """
    strides = [T.dynamic(f"{name}_stride_{i}", "int64") for i in range(len(shape))]
    if engine.hopper:
        strides[-1] = 1
    return T.StridedTensor(shape, strides, dtype)


@T.macro
def load_tile(engine, x, batch, head, row, tile, slot, filled):
    """Start to fill a slot with rows [row, row + rows) of one head of x."""
    num_rows, num_columns = x.shape[2:]
    rows, width = tile.shape[1:]
    if engine.hopper:
        box = x[batch, head, row : row + rows, 0:width]
        T.tma_copy(box, tile[slot, :, :], barrier=filled[slot])
    else:
        # Neighbouring threads take neighbouring columns, eight elements each on their way at once.
        for chunk in T.serial(rows * width // (8 * engine.threads)):
            for n in T.unroll(8):
                element = (8 * chunk + n) * engine.threads + T.get_thread_binding()
                i = element // width
                j = element % width
                value = T.if_then_else(
                    (row + i < num_rows) & (j < num_columns),
                    x[batch, head, row + i, j],
                    T.cast(0, x.dtype),
                )
                put(engine, tile, slot, i, j, value)


@T.macro
def put(engine, tile, slot, i, j, value):
    """Write one element of a slot: in exact fp32, its leading bits and what they leave."""
    if engine.parts == 1:
        tile[slot, i, j] = value
    else:
        leading = T.reinterpret(T.reinterpret(value, "uint32") & T.uint32(0xFFFFE000), "float32")
        tile[2 * slot, i, j] = leading
        tile[2 * slot + 1, i, j] = value - leading


@T.macro
def filling(engine, filled, slot):
    """All loads into a slot have been started."""
    if engine.hopper:
        if T.shuffle_elect(engine.threads):
            T.barrier_arrive(filled[slot])


@T.macro
def await_tiles(engine, filled, slot, round):
    """Wait until a slot is full, for the `round`-th time."""
    if engine.hopper:
        T.barrier_wait(filled[slot], round % 2)
    else:
        T.sync_threads(1, engine.threads)


def _slot_of(a, slot):
    return a if slot is None else a[slot, :, :]


def _product_of(engine: Engine):
    return T.wgmma_gemm if engine.hopper else T.gemm


@T.macro
def multiply(
    engine, a, a_slot, b, b_slot, c, policy, transpose_a=False, transpose_b=False, clear=False
):
    """c += a b, or c = a b to `clear`; on Hopper it only starts, see `await_products`.

    a is a tile, or registers where `a_slot` is None.
    """
    if engine.parts == 2:
        for x, y in ((1, 0), (0, 1), (0, 0)):  # the small terms first
            T.gemm(
                a[2 * a_slot + x, :, :],
                b[2 * b_slot + y, :, :],
                c,
                transpose_A=transpose_a,
                transpose_B=transpose_b,
                policy=policy,
                clear_accum=clear and (x, y) == (1, 0),
            )
    else:
        _product_of(engine)(
            _slot_of(a, a_slot),
            b[b_slot, :, :],
            c,
            transpose_A=transpose_a,
            transpose_B=transpose_b,
            policy=policy,
            clear_accum=clear,
        )


@T.macro
def await_products(engine, pending, c):
    """Wait for c's products: for all that were started but the last `pending`."""
    if engine.hopper:
        T.wait_wgmma(pending)
        T.warpgroup_fence_operand(c, num_regs=c.shape[0] * c.shape[1] // engine.threads)


@T.macro
def store_tile(engine, x, batch, head, row, acc, staging):
    """Write registers to rows [row, row + rows) of one head of x, through slot 0 of `staging`.

    Every thread must be done with what the slot held.
    """
    num_rows, num_columns = x.shape[2:]
    rows, width = acc.shape
    if engine.hopper:
        flat = T.reshape(staging, (rows, width))
        T.copy(acc, flat)
        T.fence_proxy_async()
        T.sync_threads(1, engine.threads)
        T.copy(flat, x[batch, head, row : row + rows, 0:width])
    else:
        for i, j in T.Parallel(rows, width):
            if (row + i < num_rows) & (j < num_columns):
                x[batch, head, row + i, j] = acc[i, j]
