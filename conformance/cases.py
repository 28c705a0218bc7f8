"""The problems that every backend must solve, each with its purpose, and how its tensors are made.

A purpose names what the case is there to find. Sizes come in lanes: what a GPU, the reference on a
CPU, and a kernel in Triton's interpreter have time for. Many purposes share the same few compiled
kernels: sizes vary more than dtypes, head_dims and flags do, because each combination of those
costs a compilation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from flash_rosetta import Inputs, Problem
from flash_rosetta.problem import target_of

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOP_LEFT: dict[str, Any] = {"is_causal": True, "causal_alignment": "top_left"}
BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right"}
MASKS: tuple[dict[str, Any], ...] = ({}, TOP_LEFT, BOTTOM_RIGHT)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, why it is in the list, and how its tensors are made.

    `values` is a name in VALUES, `layout` one in LAYOUTS. `is_smooth` is False where rounding of
    the inputs' own dtype is amplified, so that only a twin in the same precision sets a fair limit.
    """

    purpose: str
    problem: Problem
    values: str = "normal"
    layout: str = "dense"
    is_quick: bool = False
    forward_only: bool = False

    @property
    def id(self) -> str:
        kind = [name for name in (self.values, self.layout) if name not in ("normal", "dense")]
        return "-".join([self.purpose, *kind, self.problem.id])

    @property
    def is_smooth(self) -> bool:
        return self.values in SMOOTH_VALUES

    def on(self, device: torch.device, *, needs_backward: bool = False) -> Problem:
        """The problem as `attention` poses it on `device`."""
        return replace(self.problem, target=target_of(device), needs_backward=needs_backward)

    def inputs(self, device: torch.device) -> Inputs:
        """`q k v do dlse` with the case's values, in the case's layout, surrounded by NaN."""
        x = VALUES[self.values](self.problem.inputs(device), self.problem)
        return LAYOUTS[self.layout](x)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lane:
    """What one kind of machine has time for.

    `dtype` and `head_dim` are the usual ones, `seqlen` one that crosses a few tiles and ends in the
    middle of one, `largest_tile` the most rows or keys of a tile, `edges` the sizes around each
    tile boundary in use, by head_dim, `dtypes` the head_dims for each (dtype, allow_tf32).
    `examples` is how many problems a property is tried on, `repeats` how often equal calls must
    give equal bits, `lengths` what one compilation must serve.
    """

    name: str
    batch: int
    num_heads: int
    dtype: torch.dtype
    head_dim: int
    seqlen: int
    largest_tile: int
    edges: dict[int, tuple[int, ...]]
    tiny: tuple[tuple[int, int], ...]
    ragged: tuple[tuple[int, int], ...]
    head_dims: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    dtypes: dict[tuple[torch.dtype, bool], tuple[int, ...]]
    long: tuple[Problem, ...] = ()
    many: tuple[tuple[int, int], ...] = ()
    random: int = 0
    examples: int = 0
    repeats: int = 1
    lengths: tuple[int, ...] = (128, 196, 1000)
    scales: tuple[float, ...] = (0.0, -0.5, 3e-3, 4.0, -16.0)

    def problem(self, seqlen_q: int = 0, seqlen_k: int = 0, **changes: Any) -> Problem:
        """The lane's usual problem, with `changes`."""
        sizes: dict[str, Any] = {
            "batch": self.batch,
            "num_heads": self.num_heads,
            "seqlen_q": seqlen_q or self.seqlen,
            "seqlen_k": seqlen_k or seqlen_q or self.seqlen,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }
        return Problem(**sizes | changes)


def _queries(seqlen_q: int, head_dim: int, dtype: torch.dtype, **changes: Any) -> Problem:
    """Many queries, and few keys: so that it is judged soon."""
    return Problem(
        batch=1, seqlen_q=seqlen_q, seqlen_k=700, head_dim=head_dim, dtype=dtype, **changes
    )


GPU = Lane(
    name="gpu",
    batch=2,
    num_heads=3,
    dtype=BF16,
    head_dim=64,
    seqlen=333,
    largest_tile=256,
    # Tiles are 32, 64 or 128 rows or keys, by head_dim and direction.
    edges={
        64: (63, 64, 65, 127, 128, 129, 255, 256, 257),
        128: (63, 64, 65, 127, 128, 129, 255, 256, 257),
        256: (63, 64, 65, 129, 257),
    },
    tiny=((1, 1), (2, 2), (5, 5), (17, 17), (1, 128), (128, 1), (1, 300), (300, 1), (3, 799)),
    ragged=(
        (113, 203),
        (203, 113),
        (108, 256),
        (256, 108),
        (250, 250),
        (192, 192),
        (320, 320),
        (333, 100),
        (100, 333),
        (572, 572),
        (64, 1000),
        (1021, 253),
    ),
    head_dims=(1, 8, 16, 32, 33, 40, 72, 80, 96, 104, 128, 129, 160, 192, 200, 250, 256),
    groups=((2, 1), (6, 3), (6, 2), (8, 2), (16, 2), (5, 1)),
    dtypes={
        (FP16, False): (64, 128),
        (FP32, False): (64, 128, 40),
        (FP32, True): (64, 128, 40),
        (FP64, False): (64,),
        (BF16, False): (),
    },
    long=(
        Problem(batch=1, num_heads=2, seqlen_q=4096, head_dim=128, dtype=BF16, **TOP_LEFT),
        Problem(batch=1, num_heads=2, seqlen_q=2048, head_dim=64, dtype=FP16),
        Problem(batch=1, num_heads=2, seqlen_q=100, seqlen_k=16384, head_dim=64, dtype=BF16),
        # Many queries may have tiles of their own, here more of them than an H200 runs at once.
        _queries(8200, 64, FP16, num_heads=4),
        _queries(8200, 64, BF16, num_heads=4, **TOP_LEFT),
        _queries(8200, 128, BF16, num_heads=4),
        _queries(1100, 256, FP16, num_heads=16, scale=-0.5),
        _queries(2100, 256, BF16, num_heads=9, **TOP_LEFT),
    ),
    many=((70000, 1), (1, 70000)),
    random=24,
    examples=25,
    repeats=100,
)

CPU = Lane(
    name="cpu",
    batch=2,
    num_heads=2,
    dtype=BF16,
    head_dim=16,
    seqlen=150,
    largest_tile=128,
    edges={16: (63, 64, 65, 127, 128, 129)},
    tiny=((1, 1), (2, 2), (5, 5), (1, 64), (64, 1), (1, 130), (130, 1), (3, 70)),
    ragged=((33, 70), (70, 33), (130, 50), (50, 130), (192, 192), (250, 130)),
    head_dims=(1, 8, 33, 40, 72, 80, 96, 104, 160, 256),
    groups=((2, 1), (6, 3), (6, 2), (8, 2), (8, 1), (5, 1)),
    dtypes={
        (FP16, False): (16,),
        (FP32, False): (16, 64),
        (FP32, True): (16,),
        (FP64, False): (16, 64),
        (BF16, False): (64,),
    },
    long=(
        Problem(batch=1, num_heads=1, seqlen_q=1024, head_dim=32, dtype=BF16, **TOP_LEFT),
        Problem(batch=1, num_heads=1, seqlen_q=40, seqlen_k=6000, head_dim=32, dtype=BF16),
    ),
    many=((400, 1), (1, 400)),
    random=40,
    examples=25,
    repeats=100,
)

INTERPRETER = Lane(
    name="interpreter",
    batch=1,
    num_heads=1,
    dtype=FP16,
    head_dim=16,
    seqlen=37,
    largest_tile=32,
    # Tiles are 16 or 32 rows or keys.
    edges={16: (15, 16, 17, 31, 32, 33)},
    tiny=((1, 1), (2, 2), (1, 33), (33, 1)),
    ragged=((20, 37), (37, 20), (50, 50), (70, 33)),
    head_dims=(1, 8, 33, 40, 72, 80, 96, 104, 160, 256),
    groups=((2, 1), (3, 1), (4, 2)),
    dtypes={
        (FP16, False): (),
        (FP32, False): (16, 40),
        (FP32, True): (),
        (FP64, False): (16,),
        (BF16, False): (16,),
    },
    random=12,
    examples=5,
    repeats=4,
    lengths=(32, 49, 100),
    scales=(0.0, -0.5, -16.0),
)


@lru_cache
def case_list(lane: Lane) -> tuple[Case, ...]:
    """Every case of a lane, without repetition."""
    listed = {case.id: case for family in FAMILIES for case in family(lane)}
    return tuple(listed.values())


def _edges(lane: Lane) -> Iterator[Case]:
    """One row or key before, at and after the boundary of every tile in use."""
    for head_dim, seqlens in lane.edges.items():
        for n, mask in itertools.product(seqlens, ({}, TOP_LEFT)):
            problem = lane.problem(n, head_dim=head_dim, **mask)
            yield Case(purpose="edge", problem=problem, is_quick=n % 2 == 1 and head_dim < 256)


def _tiny(lane: Lane) -> Iterator[Case]:
    """One query, one key, one tile."""
    for (m, n), mask in zip(lane.tiny, itertools.cycle(({}, TOP_LEFT, BOTTOM_RIGHT))):
        yield Case(purpose="tiny", problem=lane.problem(m, n, **mask), is_quick=m + n < 5)


def _ragged(lane: Lane) -> Iterator[Case]:
    """Fewer and more queries than keys, both alignments; lse rows not a multiple of 16 bytes."""
    for (m, n), mask in itertools.product(lane.ragged, MASKS):
        if m == n and mask == BOTTOM_RIGHT:
            continue
        problem = lane.problem(m, n, **mask)
        yield Case(purpose="ragged", problem=problem, is_quick=max(m, n) in (203, 70, 37))


def _head_dims(lane: Lane) -> Iterator[Case]:
    """Widths that fill no tile: padded columns must not count, nor change the scale."""
    for head_dim, mask in zip(lane.head_dims, itertools.cycle(MASKS)):
        problem = lane.problem(head_dim=head_dim, **mask)
        yield Case(purpose="head_dim", problem=problem, is_quick=head_dim == 72)


def _groups(lane: Lane) -> Iterator[Case]:
    """Grouped-query attention: query head h reads key/value head h // group_size."""
    for (num_heads, num_kv_heads), mask in zip(lane.groups, itertools.cycle(({}, TOP_LEFT))):
        problem = lane.problem(num_heads=num_heads, num_kv_heads=num_kv_heads, **mask)
        yield Case(purpose="group", problem=problem, is_quick=num_heads == 6)


def _dtypes(lane: Lane) -> Iterator[Case]:
    """Each dtype, and fp32 with and without TF32, at common widths."""
    for (dtype, allow_tf32), head_dims in lane.dtypes.items():
        for head_dim, mask in itertools.product(head_dims, ({}, TOP_LEFT)):
            problem = lane.problem(head_dim=head_dim, dtype=dtype, allow_tf32=allow_tf32, **mask)
            is_quick = head_dim == lane.head_dim and problem.is_causal and not allow_tf32
            yield Case(purpose="dtype", problem=problem, is_quick=is_quick)


def _value_widths(lane: Lane) -> Iterator[Case]:
    """Values of another width than the keys, narrower and wider."""
    for head_dim_v in (lane.head_dim // 2, lane.head_dim * 2):
        yield Case(purpose="value_width", problem=lane.problem(head_dim_v=head_dim_v, **TOP_LEFT))


def _layouts(lane: Lane) -> Iterator[Case]:
    """Strides that are not those of a fresh tensor."""
    for layout, mask in zip(LAYOUTS, itertools.cycle((TOP_LEFT, {}))):
        if layout not in ("dense", "lone_strides"):
            problem = lane.problem(num_heads=2, **mask)
            is_quick = layout in ("bshd", "wide_rows", "misaligned_do", "expanded_gradients")
            yield Case(purpose="layout", problem=problem, layout=layout, is_quick=is_quick)
    grouped = lane.problem(num_heads=4, num_kv_heads=2, **TOP_LEFT)
    for layout in ("bshd", "expanded", "wide_rows"):
        yield Case(purpose="layout", problem=grouped, layout=layout)
    lone = lane.problem(batch=1, num_heads=1, **TOP_LEFT)
    yield Case(purpose="layout", problem=lone, layout="lone_strides", is_quick=True)
    for dtype, head_dim in itertools.product((FP16, FP32), (lane.head_dim, 2 * lane.head_dim)):
        problem = lane.problem(num_heads=1, dtype=dtype, head_dim=head_dim, **TOP_LEFT)
        yield Case(purpose="layout", problem=problem, layout="wide_rows")


def _masked(lane: Lane) -> Iterator[Case]:
    """Rows that see no key, with scores beyond what exp takes: nothing may overflow, or be NaN."""
    n = lane.seqlen
    for m, values in ((n + n // 3, "normal"), (n + n // 3, "loud"), (2 * n, "loud")):
        problem = lane.problem(m, n, **BOTTOM_RIGHT)
        yield Case(purpose="masked", problem=problem, values=values, is_quick=m < 2 * n)
    yield Case(purpose="masked", problem=lane.problem(n + n // 3, n, **TOP_LEFT), values="loud")


def _tail(lane: Lane) -> Iterator[Case]:
    """Strongly negative scores: a key past seqlen_k, of score zero, would outweigh all others."""
    for n, mask in itertools.product((lane.seqlen, 5), ({}, BOTTOM_RIGHT)):
        problem = lane.problem(lane.seqlen, n, **mask)
        yield Case(purpose="tail", problem=problem, values="repelled", is_quick=n > 5)


def _scales(lane: Lane) -> Iterator[Case]:
    """Zero makes a plain mean of v; a negative one turns the row maximum into the minimum."""
    for scale, mask in zip(lane.scales, itertools.cycle(({}, TOP_LEFT))):
        values = "normal" if abs(scale) < 0.1 else "damped" if scale > -1 else "undamped"
        problem = lane.problem(scale=scale, **mask)
        yield Case(purpose="scale", problem=problem, values=values, is_quick=scale <= 0)


def _values(lane: Lane) -> Iterator[Case]:
    """Inputs unlike standard normal ones."""
    for values, mask in itertools.product(("mean", "equal_rows", "zeros"), ({}, TOP_LEFT)):
        yield Case(purpose="values", problem=lane.problem(**mask), values=values)
    for values, mask in itertools.product(("peaked8", "peaked64"), ({}, TOP_LEFT)):
        problem = lane.problem(**mask)
        yield Case(purpose="peaked", problem=problem, values=values, is_quick=values == "peaked8")
    for values, mask in itertools.product(("rising", "falling"), ({}, TOP_LEFT)):
        yield Case(purpose="ramp", problem=lane.problem(**mask), values=values, is_quick=not mask)
    for mask in ({}, TOP_LEFT):
        yield Case(purpose="huge", problem=lane.problem(**mask), values="matched", is_quick=True)
        bf16 = lane.problem(dtype=BF16, **mask)
        yield Case(purpose="huge", problem=bf16, values="constant", forward_only=True)
        sunk = lane.problem(**mask)
        yield Case(purpose="huge", problem=sunk, values="sunk", forward_only=True)


def _long(lane: Lane) -> Iterator[Case]:
    """Long sequences: few wrong rows hide in a tensor error, and many small errors add up."""
    for problem in lane.long:
        yield Case(purpose="long", problem=problem)


def _many(lane: Lane) -> Iterator[Case]:
    """More batches or heads than a grid's second axis takes, 65,535."""
    for batch, num_heads in lane.many:
        problem = lane.problem(6, 5, batch=batch, num_heads=num_heads, **BOTTOM_RIGHT)
        yield Case(purpose="many", problem=problem)


def _random(lane: Lane) -> Iterator[Case]:
    """Combinations that nobody thought of; the same ones every time."""
    draw = Random(0)
    for _ in range(lane.random):
        num_kv_heads, group_size = draw.choice((2, 3)), draw.choice((1, 1, 2, 4))
        problem = lane.problem(
            draw.randint(1, 2 * lane.seqlen),
            draw.randint(1, 2 * lane.seqlen),
            batch=draw.choice((1, 2)),
            num_heads=num_kv_heads * group_size,
            num_kv_heads=num_kv_heads,
            scale=draw.choice((lane.head_dim**-0.5, 0.05)),
            **draw.choice(MASKS),
        )
        layout = draw.choice(("dense", "bshd", "wide_rows"))
        yield Case(purpose="random", problem=problem, layout=layout)


FAMILIES: tuple[Callable[[Lane], Iterator[Case]], ...] = (
    _edges,
    _tiny,
    _ragged,
    _head_dims,
    _groups,
    _dtypes,
    _value_widths,
    _layouts,
    _masked,
    _tail,
    _scales,
    _values,
    _long,
    _many,
    _random,
)


def _peaked(factor: float) -> Callable[[Inputs, Problem], Inputs]:
    def values(x: Inputs, problem: Problem) -> Inputs:
        return x._replace(q=x.q * factor)

    return values


def _ramp(first: float, last: float) -> Callable[[Inputs, Problem], Inputs]:
    """Scores near `first` at the first key to `last` at the last: each tile has a new maximum."""

    def values(x: Inputs, problem: Problem) -> Inputs:
        level = torch.linspace(first, last, problem.seqlen_k, device=x.k.device)[:, None]
        k = 0.5 * x.k + level / (problem.scale * problem.head_dim)
        return x._replace(q=0.5 * x.q + 1, k=k.to(x.k.dtype))

    return values


def _mean(x: Inputs, problem: Problem) -> Inputs:
    """Means away from zero, which keep errors from cancelling."""
    return x._replace(q=x.q + 0.5, k=x.k - 1, v=x.v + 2, do=x.do + 1)


def _equal_rows(x: Inputs, problem: Problem) -> Inputs:
    """All keys alike: every score of a row ties."""
    return x._replace(k=x.k[:, :, :1].expand_as(x.k).contiguous())


def _zeros(x: Inputs, problem: Problem) -> Inputs:
    return x._replace(q=torch.zeros_like(x.q), k=torch.zeros_like(x.k))


def _shifted_scores(x: Inputs, problem: Problem, shift: float) -> Inputs:
    """Scores near `shift`, with the spread of standard normal inputs' scores."""
    step = (abs(shift) / (problem.scale * problem.head_dim)) ** 0.5
    noise = 1 / (1 + 2**0.5 * step)
    return x._replace(q=x.q * noise + step, k=x.k * noise + (step if shift > 0 else -step))


def _loud(x: Inputs, problem: Problem) -> Inputs:
    """Scores near 120: their exponential overflows fp32."""
    return _shifted_scores(x, problem, 120.0)


def _repelled(x: Inputs, problem: Problem) -> Inputs:
    """Scores near -30: beside them a score of zero is everything."""
    return _shifted_scores(x, problem, -30.0)


def _sunk(x: Inputs, problem: Problem) -> Inputs:
    """Scores near -1e5, below any finite number that might stand for minus infinity."""
    return _shifted_scores(x, problem, -1e5)


def _damped(x: Inputs, problem: Problem) -> Inputs:
    """Inputs small enough to leave the scores of a large scale in the usual range."""
    return x._replace(q=x.q * (problem.head_dim**-0.5 / abs(problem.scale)))


def _matched(x: Inputs, problem: Problem) -> Inputs:
    """Query i and key i alike and of score 1e5, all other scores far below: row i of o is v[i].

    In a causal problem with as many queries as keys, row i sees key i.
    """
    size = (1e5 / (problem.scale * problem.head_dim)) ** 0.5
    k = torch.where(x.k < 0, -size, size).to(x.k.dtype)
    rows = torch.arange(problem.seqlen_q, device=k.device) % problem.seqlen_k
    q = k.repeat_interleave(problem.group_size, dim=1)[:, :, rows]
    return x._replace(q=q.contiguous(), k=k)


def _constant(x: Inputs, problem: Problem) -> Inputs:
    """Equal scores near 1e11, whose product with the maximum rounds: exp(s - m) must still be 1."""
    return x._replace(**{name: torch.full_like(getattr(x, name), 133120) for name in "qkv"})


VALUES: dict[str, Callable[[Inputs, Problem], Inputs]] = {
    "normal": lambda x, problem: x,
    "mean": _mean,
    "equal_rows": _equal_rows,
    "zeros": _zeros,
    "loud": _loud,
    "repelled": _repelled,
    "sunk": _sunk,
    "damped": _damped,
    "undamped": lambda x, problem: x,
    "peaked8": _peaked(8),
    "peaked64": _peaked(64),
    "rising": _ramp(-60.0, 60.0),
    "falling": _ramp(60.0, -60.0),
    "matched": _matched,
    "constant": _constant,
}

SMOOTH_VALUES = ("normal", "damped", "matched", "constant")

GUARD = 1024
"""NaN elements before and after each tensor; a multiple of every alignment that kernels want."""


def surrounded(shape: tuple[int, ...], like: Tensor, offset: int = 0) -> Tensor:
    """A contiguous tensor to fill, amid NaN, `offset` elements off the usual alignment."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 2 * GUARD,), torch.nan, dtype=like.dtype, device=like.device)
    return memory[GUARD + offset : GUARD + offset + size].view(shape)


def _dense(t: Tensor) -> Tensor:
    return surrounded(tuple(t.shape), t).copy_(t)


def _misaligned(t: Tensor) -> Tensor:
    return surrounded(tuple(t.shape), t, offset=1).copy_(t)


def _wide_rows(t: Tensor) -> Tensor:
    """Rows one element further apart than they are long: a stride of 65 for a head_dim of 64."""
    return surrounded((*t.shape[:-1], t.shape[-1] + 1), t)[..., :-1].copy_(t)


def _head_after_row(t: Tensor) -> Tensor:
    """[batch, heads, seqlen, ...] as a view of [batch, seqlen, heads, ...]."""
    return _dense(t.transpose(1, 2)).transpose(1, 2)


def _columns_first(t: Tensor) -> Tensor:
    """[..., seqlen, head_dim] as a view of [..., head_dim, seqlen]: no stride of 1 along a row."""
    return _dense(t.transpose(-1, -2)).transpose(-1, -2)


def _lone_strides(t: Tensor) -> Tensor:
    """Odd strides in dimensions of one element, where any stride is right."""
    t = _dense(t)
    strides = [stride if n > 1 else 3 for n, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, strides)


def _every_other_head(t: Tensor) -> Tensor:
    shape = (t.shape[0], 2 * t.shape[1], *t.shape[2:])
    return surrounded(shape, t)[:, ::2].copy_(t)


def _every_other_row(t: Tensor) -> Tensor:
    shape = (*t.shape[:2], 2 * t.shape[2], *t.shape[3:])
    return surrounded(shape, t)[:, :, ::2].copy_(t)


def _expanded_heads(t: Tensor) -> Tensor:
    return _dense(t[:1, :1]).expand_as(t)


def _expanded_batch(t: Tensor) -> Tensor:
    return _dense(t[:1]).expand_as(t)


def _expanded(t: Tensor) -> Tensor:
    """One number for all elements, as the gradient that `o.sum().backward()` passes on."""
    return _dense(t.flatten()[:1]).view((1,) * t.dim()).expand_as(t)


def _each(arrange: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    return lambda x: Inputs(*map(arrange, x))


def _qkv(arrange: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    return lambda x: Inputs(*map(arrange, x[:3]), *map(_dense, x[3:]))


def _gradients(arrange: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    return lambda x: Inputs(*map(_dense, x[:3]), *map(arrange, x[3:]))


def _packed(x: Inputs) -> Inputs:
    """q, k and v as views of one [batch, seqlen, 3, num_heads, head_dim], as a projection gives."""
    together = _dense(torch.stack([t.transpose(1, 2) for t in x[:3]], dim=2))
    q, k, v = (t.transpose(1, 2) for t in together.unbind(2))
    return Inputs(q, k, v, _head_after_row(x.do), _dense(x.dlse))


def _rows_of(name: str) -> Callable[[Inputs], Inputs]:
    """Only one of q, k, v, do misaligned, so that no kernel decides by looking at another."""
    return lambda x: Inputs(
        *(_misaligned(t) if n == name else _dense(t) for n, t in x._asdict().items())
    )


def _mixed(x: Inputs) -> Inputs:
    """Each tensor in a layout of its own, so that the strides of one do not serve another."""
    return Inputs(
        q=_dense(x.q),
        k=_head_after_row(x.k),
        v=_dense(x.v),
        do=_head_after_row(x.do),
        dlse=_dense(x.dlse),
    )


LAYOUTS: dict[str, Callable[[Inputs], Inputs]] = {
    "dense": _each(_dense),
    "bshd": _each(_head_after_row),
    "packed": _packed,
    "wide_rows": _each(_wide_rows),
    "misaligned": _each(_misaligned),
    "misaligned_v": _rows_of("v"),
    "misaligned_do": _rows_of("do"),
    "columns_first": _each(_columns_first),
    "every_other_head": _each(_every_other_head),
    "lone_strides": _each(_lone_strides),
    "sliced_gradients": _gradients(_every_other_row),
    "mixed": _mixed,
    "expanded": _qkv(_expanded_heads),
    "expanded_batch": _qkv(_expanded_batch),
    "expanded_gradients": _gradients(_expanded),
}
