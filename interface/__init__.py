"""FlashAttention, one operator, several backends: `attention(q, k, v, backend="triton")`.

`attention` runs it, `explain` says which backend would and why the others cannot, `names` lists
them, `register` adds one. A backend is two functions, described by `Backend`.
"""

from flash_rosetta.attention import Explanation, attention, explain
from flash_rosetta.backend import Backend, Compilable, KernelReport, Unsupported
from flash_rosetta.problem import Inputs, Problem
from flash_rosetta.registry import get, names, register

__all__ = [
    "Backend",
    "Compilable",
    "Explanation",
    "Inputs",
    "KernelReport",
    "Problem",
    "Unsupported",
    "attention",
    "explain",
    "get",
    "names",
    "register",
]
