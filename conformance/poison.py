"""Makes memory that a backend allocates start as NaN, so that what it forgets to write shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)
"""PyTorch's ways to ask for memory without asking what is in it."""

NAN_BYTE = 0xFF
"""A number made of these bytes is NaN in every floating dtype, and -1 in every signed integer."""

SMALL_BLOCKS = 32
"""CUDA's caching allocator serves up to 1 MiB from one pool, more from another: fill both."""


@contextmanager
def poisoned_memory(device: torch.device) -> Iterator[None]:
    """Within it, fresh memory holds NaN.

    Patches PyTorch's Python functions for all threads, since CUDA's backward runs on another, and
    leaves NaN in the blocks that CUDA's caching allocator hands out next.
    """
    if device.type == "cuda":
        _fill_cache(device)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ALLOCATORS:
            patch.setattr(owner, name, _poisoning(getattr(owner, name)))
        yield


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **options: Any) -> Tensor:
        fresh = allocate(*args, **options)
        if type(fresh) is Tensor and fresh.device.type in ("cpu", "cuda"):  # no fake, no meta
            fresh.untyped_storage().fill_(NAN_BYTE)  # type: ignore[attr-defined]
        return fresh

    return poisoned


def _fill_cache(device: torch.device) -> None:
    blocks = [torch.empty(2**19, dtype=torch.uint8, device=device) for _ in range(SMALL_BLOCKS)]
    blocks.append(torch.empty(2**28, dtype=torch.uint8, device=device))
    for block in blocks:
        block.fill_(NAN_BYTE)
