"""What crosses HBM in standard attention, FlashAttention-1 and FlashAttention-2, in elements.

Counted is what the kernels ask memory for, tensor by tensor, with the tiles given. A program keeps
its tiles on chip and asks for nothing twice, but programs share nothing: FlashAttention-2 asks for
K and V once per query tile. They come from HBM if L2 does not hold them; K and V of one head often
fit there, S and P of standard attention seldom do. So each flash algorithm gets two totals: as
asked, and with every repetition caught by L2, which is what it asks with tiles as large as the
problem. Standard attention repeats nothing within a kernel, and what one kernel leaves in L2 for
the next is not credited to it. The formulas are checked against loads and stores counted while
`standard.py`, `fa1.py` and `tiled.py` run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from flash_rosetta.problem import DTYPE_NAMES, Direction, Problem
from flash_rosetta.reference.hbm import Traffic

ACCUMULATED = frozenset({"lse", "delta", "m", "l", "o_acc", "dq_acc"})
"""Tensors kept in fp32 (fp64 for fp64), whatever the dtype of q."""


def standard_forward(problem: Problem) -> Traffic:
    """S written and read, P written and read: 4 seqlen_q seqlen_k elements per head."""
    n = _Sizes.of(problem)
    s = n.q_rows * problem.seqlen_k
    return Traffic(
        reads=Counter(q=n.q, k=n.k_per_head, s=s, p=s, v=n.v_per_head),
        writes=Counter(s=s, p=s, lse=n.q_rows, o=n.o),
    )


def standard_backward(problem: Problem) -> Traffic:
    """P read twice, dP once, dS twice, dP and dS written: 7 seqlen_q seqlen_k per head."""
    n = _Sizes.of(problem)
    s = n.q_rows * problem.seqlen_k
    return Traffic(
        reads=Counter(p=2 * s, do=2 * n.o, v=n.v_per_head, dp=s, ds=2 * s, k=n.k_per_head, q=n.q),
        writes=Counter(dp=s, ds=s, dq=n.q, dk=n.k, dv=n.v),
    )


def fa1_forward(problem: Problem, tile_q: int, tile_k: int) -> Traffic:
    """K and V read once per query head; q read and o, m, l read and written once per key tile."""
    n = _Sizes.of(problem)
    rows = problem.batch * problem.num_heads * sum(_queries_per_key_tile(problem, tile_q, tile_k))
    state = Counter(o_acc=rows * problem.head_dim_v, m=rows, l=rows)
    start = Counter(o_acc=n.o, m=n.q_rows, l=n.q_rows)
    return Traffic(
        reads=Counter(q=rows * problem.head_dim, k=n.k_per_head, v=n.v_per_head) + state,
        writes=start + state,
    )


def fa2_forward(problem: Problem, tile_q: int, tile_k: int) -> Traffic:
    """q read and o, lse written once; K and V read once per query tile."""
    n = _Sizes.of(problem)
    rows = problem.batch * problem.num_heads * sum(_keys_per_query_tile(problem, tile_q, tile_k))
    return Traffic(
        reads=Counter(q=n.q, k=rows * problem.head_dim, v=rows * problem.head_dim_v),
        writes=Counter(o=n.o, lse=n.q_rows),
    )


def fa2_backward(problem: Problem, tile_q: int, tile_k: int) -> Traffic:
    """K, V read and dK, dV written once; q, do, lse, delta read and dq summed once per key tile.

    Also counted: delta is made from o and do, dq_acc starts as zeros and becomes dq.
    """
    n = _Sizes.of(problem)
    rows = problem.batch * problem.num_heads * sum(_queries_per_key_tile(problem, tile_q, tile_k))
    return Traffic(
        reads=Counter(
            o=n.o,
            do=n.o + rows * problem.head_dim_v,
            k=n.k,
            v=n.v,
            q=rows * problem.head_dim,
            lse=rows,
            delta=rows,
            dq_acc=rows * problem.head_dim + n.q,
        ),
        writes=Counter(
            delta=n.q_rows, dq_acc=n.q + rows * problem.head_dim, dk=n.k, dv=n.v, dq=n.q
        ),
    )


def total_bytes(traffic: Traffic, problem: Problem) -> int:
    """Bytes read and written: ACCUMULATED tensors in fp32 (fp64 for fp64), others in q's dtype."""
    wide = max(4, problem.dtype.itemsize)
    return sum(
        count * (wide if name in ACCUMULATED else problem.dtype.itemsize)
        for counts in (traffic.reads, traffic.writes)
        for name, count in counts.items()
    )


def on_chip_bytes(problem: Problem, tile_q: int, tile_k: int, direction: Direction) -> int:
    """Bytes of the operand tiles that a program holds: q k v; in the backward also do, p and ds.

    Sums in fp32 (acc, dk, dv) are not in it: they live in registers.
    """
    elements = tile_q * problem.head_dim + tile_k * (problem.head_dim + problem.head_dim_v)
    if direction == "backward":
        elements += tile_q * problem.head_dim_v + 2 * tile_q * tile_k
    return elements * problem.dtype.itemsize


class _Sizes(NamedTuple):
    """Elements of whole tensors, and of k and v read anew for each query head of a group."""

    q_rows: int
    q: int
    k: int
    v: int
    o: int
    k_per_head: int
    v_per_head: int

    @classmethod
    def of(cls, problem: Problem) -> _Sizes:
        q_rows = problem.batch * problem.num_heads * problem.seqlen_q
        k_rows = problem.batch * problem.num_kv_heads * problem.seqlen_k
        k, v = k_rows * problem.head_dim, k_rows * problem.head_dim_v
        return cls(
            q_rows=q_rows,
            q=q_rows * problem.head_dim,
            k=k,
            v=v,
            o=q_rows * problem.head_dim_v,
            k_per_head=k * problem.group_size,
            v_per_head=v * problem.group_size,
        )


def _keys_per_query_tile(problem: Problem, tile_q: int, tile_k: int) -> Iterator[int]:
    """Rows of k that one head reads for each query tile: whole key tiles, up to the last needed."""
    for q_start in range(0, problem.seqlen_q, tile_q):
        keys = problem.seqlen_k
        if problem.is_causal:
            last = min(q_start + tile_q, problem.seqlen_q) - 1
            keys = min(keys, _round_up(max(0, last + 1 + problem.causal_offset), tile_k))
        yield keys


def _queries_per_key_tile(problem: Problem, tile_q: int, tile_k: int) -> Iterator[int]:
    """Rows of q that one head reads for each key tile: whole query tiles, from the first needed."""
    for k_start in range(0, problem.seqlen_k, tile_k):
        blind = 0
        if problem.is_causal:  # queries 0 .. k_start - offset - 1 see no key of this tile
            blind = max(0, k_start - problem.causal_offset) // tile_q * tile_q
        yield max(0, problem.seqlen_q - blind)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class _Algorithm(NamedTuple):
    """An algorithm's traffic: with its tiles, and with the repetitions caught by L2."""

    asked: Traffic
    cached: Traffic


def _algorithms(
    problem: Problem, direction: Direction, tile_q: int, tile_k: int
) -> dict[str, _Algorithm]:
    whole = problem.seqlen_q, problem.seqlen_k
    if direction == "forward":
        standard = standard_forward(problem)
        flash = {"FA1": fa1_forward, "FA2": fa2_forward}
    else:
        standard = standard_backward(problem)
        flash = {"FA2": fa2_backward}
    return {"standard": _Algorithm(standard, standard)} | {
        name: _Algorithm(count(problem, tile_q, tile_k), count(problem, *whole))
        for name, count in flash.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """`flash-rosetta explain-io`: print the traffic of the three algorithms, and what follows."""
    problem, tile_q, tile_k, sram_kb = _parse(argv)
    kilobytes = [
        f"{on_chip_bytes(problem, tile_q, tile_k, direction) / 1024:.0f} KB {direction}"
        for direction in ("forward", "backward")
    ]
    console = Console(highlight=False)
    console.print(
        f"HBM traffic of {problem.id}\n"
        f"tiles of {tile_q} queries x {tile_k} keys\n"
        f"on chip: {', '.join(kilobytes)}, of {sram_kb} KB\n"
        "Counted in elements, as the kernels ask for them. What is asked for again comes from HBM "
        "only where L2 does not hold it.\n"
    )
    for direction in ("forward", "backward"):
        algorithms = _algorithms(problem, direction, tile_q, tile_k)
        console.print(_table(direction, algorithms, problem))
        console.print(_explanation(direction, algorithms, problem) + "\n")
    return 0


def _table(direction: Direction, algorithms: dict[str, _Algorithm], problem: Problem) -> Table:
    table = Table(title=direction, title_justify="left")
    table.add_column("elements")
    for name in algorithms:
        table.add_column(name, justify="right")
    for verb, side in (("read", "reads"), ("write", "writes")):
        counts = [getattr(algorithm.asked, side) for algorithm in algorithms.values()]
        for tensor in dict.fromkeys(name for count in counts for name in count):
            cells = (f"{count[tensor]:,}" if tensor in count else "" for count in counts)
            table.add_row(f"{verb} {tensor}", *cells)
    table.add_section()
    elements = [a.asked.reads.total() + a.asked.writes.total() for a in algorithms.values()]
    table.add_row("total", *(f"{n:,}" for n in elements))
    for label, asked in (("MB as asked", True), ("MB, repetitions in L2", False)):
        sizes = [total_bytes(a.asked if asked else a.cached, problem) for a in algorithms.values()]
        table.add_section()
        table.add_row(label, *(f"{n / 1e6:,.3f}" for n in sizes))
        table.add_row("  times FA2's", *(f"{n / sizes[-1]:.2f}" for n in sizes))
        table.add_row("  FLOP per byte", *(f"{problem.flops(direction) / n:.0f}" for n in sizes))
    return table


def _explanation(direction: Direction, algorithms: dict[str, _Algorithm], problem: Problem) -> str:
    """One sentence, made from the numbers of the table."""
    asked = {name: total_bytes(a.asked, problem) for name, a in algorithms.items()}
    cached = {name: total_bytes(a.cached, problem) for name, a in algorithms.items()}
    matrices = ("s", "p") if direction == "forward" else ("p", "dp", "ds")
    repeated = "k, v" if direction == "forward" else "q, do, lse, delta, dq_acc"
    share = _share(algorithms["standard"].asked, matrices, problem)
    text = (
        f"FA2 asks for {asked['FA2'] / 1e6:,.2f} MB, {_comparison(asked, 'standard')} standard "
        f"attention, of whose traffic {share:.0%} is {', '.join(matrices)}, written by one kernel "
        "and read by the next"
    )
    if "FA1" in algorithms:
        share = _share(algorithms["FA1"].asked, ("o_acc", "m", "l"), problem)
        text += (
            f", and {_comparison(asked, 'FA1')} FA1, of whose traffic {share:.0%} is o, m, l, read "
            "and written once per key tile"
        )
    return text + (
        f"; what FA2 asks for again is {repeated} of a head, "
        f"{_repeated_bytes(problem, direction) / 1e6:,.2f} MB, and where L2 holds them "
        f"{cached['FA2'] / 1e6:,.2f} MB come from HBM, {_comparison(cached, 'standard')} "
        "standard attention."
    )


def _comparison(sizes: dict[str, int], other: str) -> str:
    ratio = sizes[other] / sizes["FA2"]
    return f"{ratio:.1f} times less than" if ratio >= 1 else f"{1 / ratio:.1f} times more than"


def _share(traffic: Traffic, names: Sequence[str], problem: Problem) -> float:
    """The part of a traffic's bytes that is reads and writes of `names`."""
    part = Traffic(
        Counter({name: traffic.reads[name] for name in names}),
        Counter({name: traffic.writes[name] for name in names}),
    )
    return total_bytes(part, problem) / total_bytes(traffic, problem)


def _repeated_bytes(problem: Problem, direction: Direction) -> int:
    """Bytes of what FA2 asks for again, of one head: k v; in the backward q do lse delta dq_acc."""
    wide, both = max(4, problem.dtype.itemsize), problem.head_dim + problem.head_dim_v
    if direction == "forward":
        return problem.seqlen_k * both * problem.dtype.itemsize
    return problem.seqlen_q * (both * problem.dtype.itemsize + (2 + problem.head_dim) * wide)


def _parse(argv: Sequence[str] | None) -> tuple[Problem, int, int, int]:
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    parser = argparse.ArgumentParser(
        prog="flash-rosetta explain-io",
        description="HBM reads and writes of standard attention, FlashAttention-1 and "
        "FlashAttention-2, tensor by tensor: why FlashAttention-2 wins.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch", type=int, default=1)
    add("--num-heads", type=int, default=1)
    add("--num-kv-heads", type=int, help="as --num-heads when left out")
    add("--seqlen-q", type=int, default=4096)
    add("--seqlen-k", type=int, help="as --seqlen-q when left out")
    add("--head-dim", type=int, default=128)
    add("--dtype", choices=dtypes, default="bf16")
    add("--causal", action="store_true", help="top-left causal mask; flash skips masked tiles")
    add("--tile-q", type=int, help="queries per tile; left out, the most that fit, up to 128")
    add("--tile-k", type=int, help="keys per tile; likewise")
    add("--sram-kb", type=int, default=227, help="on-chip memory of a program, KB (H100: 227)")
    options = parser.parse_args(argv)
    try:
        problem = Problem(
            batch=options.batch,
            num_heads=options.num_heads,
            num_kv_heads=-1 if options.num_kv_heads is None else options.num_kv_heads,
            seqlen_q=options.seqlen_q,
            seqlen_k=-1 if options.seqlen_k is None else options.seqlen_k,
            head_dim=options.head_dim,
            dtype=dtypes[options.dtype],
            is_causal=options.causal,
        )
    except ValueError as error:
        parser.error(str(error))
    if problem.is_empty:
        parser.error(f"sizes must be at least 1, got {problem.id}")
    tile_q, tile_k = _tiles(problem, options.tile_q, options.tile_k, options.sram_kb)
    if min(tile_q, tile_k) < 1:
        parser.error(f"--tile-q and --tile-k must be at least 1, got {tile_q} and {tile_k}")
    if (needed := _kilobytes(problem, tile_q, tile_k)) > options.sram_kb:
        parser.error(
            f"tiles of {tile_q} queries x {tile_k} keys at head_dim {problem.head_dim} need "
            f"{needed:.0f} KB on chip, --sram-kb is {options.sram_kb}"
        )
    return problem, tile_q, tile_k, options.sram_kb


def _tiles(
    problem: Problem, tile_q: int | None, tile_k: int | None, sram_kb: int
) -> tuple[int, int]:
    """The tiles asked for; what is left out is the largest of 128, 64, 32, 16 that fits."""
    for size in (128, 64, 32, 16):
        tiles = (size if tile_q is None else tile_q, size if tile_k is None else tile_k)
        if _kilobytes(problem, *tiles) <= sram_kb:
            break
    return tiles


def _kilobytes(problem: Problem, tile_q: int, tile_k: int) -> float:
    return on_chip_bytes(problem, tile_q, tile_k, "backward") / 1024
