"""One attention problem: its sizes, dtype and flags, and what follows from them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

CausalAlignment = Literal["top_left", "bottom_right"]
Direction = Literal["forward", "backward"]

DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_ALIGNMENT_NAMES = {"top_left": "causal-tl", "bottom_right": "causal-br"}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, scores, statistics and sums: fp64 for fp64 operands, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Inputs(NamedTuple):
    """Seeded tensors for one problem: the forward's `q k v`, the backward's `do dlse`."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor


def target_of(device: torch.device) -> str:
    """What code for `device` is compiled for: "cpu", "sm_90", "gfx942", or the device's type."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes, dtype and flags of one call of `attention`; hashable, so that it can key a cache.

    q is [batch, num_heads, seqlen_q, head_dim], k is [batch, num_kv_heads, seqlen_k, head_dim],
    v is [batch, num_kv_heads, seqlen_k, head_dim_v]. Left out, `num_kv_heads`, `seqlen_k` and
    `head_dim_v` equal their query-side twins and `scale` is 1/sqrt(head_dim).

    `target` is what `target_of(device)` says. `allow_tf32`: fp32 products may be rounded to TF32.
    `deterministic`: equal inputs must give equal bits. `needs_backward`: gradients will be asked
    for. Raises ValueError or TypeError for sizes and flags that no backend could give a meaning.
    """

    batch: int
    num_heads: int
    seqlen_q: int
    head_dim: int
    num_kv_heads: int = -1
    seqlen_k: int = -1
    head_dim_v: int = -1
    dtype: torch.dtype = torch.bfloat16
    is_causal: bool = False
    causal_alignment: CausalAlignment = "top_left"
    scale: float = math.nan
    target: str = "cpu"
    allow_tf32: bool = False
    deterministic: bool = False
    needs_backward: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # one call looks several caches up by its problem
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __getstate__(
        self,
    ) -> dict[str, object]:  # the hash of a str differs from process to process
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __post_init__(self) -> None:
        default = object.__setattr__
        if self.num_kv_heads == -1:
            default(self, "num_kv_heads", self.num_heads)
        if self.seqlen_k == -1:
            default(self, "seqlen_k", self.seqlen_q)
        if self.head_dim_v == -1:
            default(self, "head_dim_v", self.head_dim)
        sizes = ("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k")
        for name in (*sizes, "head_dim", "head_dim_v"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name} must be an int, got {getattr(self, name)!r}")
        for name in sizes:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if math.isnan(self.scale):
            default(self, "scale", self.head_dim**-0.5)
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if self.num_heads and (not self.num_kv_heads or self.num_heads % self.num_kv_heads):
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={self.num_heads} "
                f"and num_kv_heads={self.num_kv_heads}"
            )
        if self.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"dtype must be one of {', '.join(map(str, DTYPE_NAMES))}, got {self.dtype}"
            )
        if self.causal_alignment not in get_args(CausalAlignment):
            raise ValueError(
                "causal_alignment must be 'top_left' or 'bottom_right', "
                f"got {self.causal_alignment!r}"
            )

    @property
    def group_size(self) -> int:
        """Query heads per key/value head: query head h reads key/value head h // group_size."""
        return self.num_heads // self.num_kv_heads

    @property
    def causal_offset(self) -> int:
        """In a causal problem query i sees key j when j <= i + causal_offset."""
        return self.seqlen_k - self.seqlen_q if self.causal_alignment == "bottom_right" else 0

    @property
    def is_empty(self) -> bool:
        """True when no query sees any key because a dimension is 0."""
        return 0 in (self.batch, self.num_heads, self.seqlen_q, self.seqlen_k)

    @property
    def pairs(self) -> int:
        """Unmasked (query, key) pairs of one head, counted exactly."""
        if not self.is_causal:
            return self.seqlen_q * self.seqlen_k
        # Query i sees clamp(i + 1 + offset, 0, seqlen_k) keys: a growing series, then a plateau.
        first = max(0, -self.causal_offset)
        plateau = min(self.seqlen_q, max(first, self.seqlen_k - self.causal_offset))
        growing = plateau - first
        least = first + 1 + self.causal_offset
        return (
            growing * least
            + growing * (growing - 1) // 2
            + (self.seqlen_q - plateau) * self.seqlen_k
        )

    def flops(self, direction: Direction) -> int:
        """Floating-point operations of the GEMMs over unmasked pairs; backward is 2.5 x forward.

        Forward: two GEMMs, 2 (head_dim + head_dim_v) per pair and head. Backward: five GEMMs, the
        recomputed scores included (FlashAttention-2, arXiv 2307.08691, section 4.1).
        """
        pairs = self.batch * self.num_heads * self.pairs
        if direction == "forward":
            return 2 * pairs * (self.head_dim + self.head_dim_v)
        return 2 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)

    def min_bytes(self, direction: Direction) -> int:
        """Bytes that must cross HBM: each input read once, each output written once."""
        q_rows = self.batch * self.num_heads * self.seqlen_q
        k_rows = self.batch * self.num_kv_heads * self.seqlen_k
        qkv = q_rows * self.head_dim + k_rows * (self.head_dim + self.head_dim_v)
        o, lse = q_rows * self.head_dim_v, 4 * q_rows
        if direction == "forward":
            return (qkv + o) * self.dtype.itemsize + lse
        return (2 * qkv + 2 * o) * self.dtype.itemsize + 2 * lse

    @property
    def id(self) -> str:
        """A short name, unique among problems of one target; `Problem.parse` reads it back."""
        parts = [f"b{self.batch}", f"h{self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"kv{self.num_kv_heads}")
        parts += [f"q{self.seqlen_q}", f"k{self.seqlen_k}", f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts.append(f"dv{self.head_dim_v}")
        parts.append(DTYPE_NAMES[self.dtype])
        if self.is_causal:
            parts.append(_ALIGNMENT_NAMES[self.causal_alignment])
        if self.scale != self.head_dim**-0.5:
            parts.append(f"scale{self.scale!r}")
        for flag, name in (
            ("allow_tf32", "tf32"),
            ("deterministic", "det"),
            ("needs_backward", "bwd"),
        ):
            if getattr(self, flag):
                parts.append(name)
        return "_".join(parts)

    @classmethod
    def parse(cls, text: str, *, target: str = "cpu") -> Problem:
        """The problem whose `id` is `text`, for `target`. Raises ValueError naming the bad part."""
        sizes = {"b": "batch", "h": "num_heads", "kv": "num_kv_heads", "q": "seqlen_q",
                 "k": "seqlen_k", "d": "head_dim", "dv": "head_dim_v"}  # fmt: skip
        flags = {"tf32": "allow_tf32", "det": "deterministic", "bwd": "needs_backward"}
        dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        alignments = {name: alignment for alignment, name in _ALIGNMENT_NAMES.items()}
        fields: dict[str, Any] = {"target": target}
        for part in text.split("_"):
            if part in dtypes:
                fields["dtype"] = dtypes[part]
            elif part in alignments:
                fields |= {"is_causal": True, "causal_alignment": alignments[part]}
            elif part in flags:
                fields[flags[part]] = True
            elif part.startswith("scale"):
                fields["scale"] = float(part.removeprefix("scale"))
            elif (match := re.fullmatch(r"([a-z]+)(\d+)", part)) and match[1] in sizes:
                fields[sizes[match[1]]] = int(match[2])
            else:
                raise ValueError(f"problem id {text!r}: cannot read the part {part!r}")
        missing = {"batch", "num_heads", "seqlen_q", "head_dim"} - fields.keys()
        if missing:
            raise ValueError(f"problem id {text!r}: missing {', '.join(sorted(missing))}")
        return cls(**fields)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal `q k v do` in the problem's dtype and fp32 `dlse`, the same for a seed.

        Drawn on `device`, so CPU and GPU draw different numbers from one seed.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return torch.randn(shape, generator=generator, device=device, dtype=wide).to(dtype)

        q_rows = (self.batch, self.num_heads, self.seqlen_q)
        k_rows = (self.batch, self.num_kv_heads, self.seqlen_k)
        return Inputs(
            q=draw(*q_rows, self.head_dim),
            k=draw(*k_rows, self.head_dim),
            v=draw(*k_rows, self.head_dim_v),
            do=draw(*q_rows, self.head_dim_v),
            dlse=draw(*q_rows, dtype=torch.float32),
        )
