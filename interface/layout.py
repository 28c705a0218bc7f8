"""How tensors lie in memory, and what else a kernel launch depends on beside their addresses."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from flash_rosetta.problem import Problem

_thread = threading.local()


class Layout(NamedTuple):
    """How a tensor lies in memory, as far as it matters which code moves it."""

    shape: torch.Size
    stride: tuple[int, ...]
    misalignment: int  # bytes past a multiple of 16


def contiguous(*shape: int) -> Layout:
    """The layout of an output."""
    return Layout(torch.Size(shape), torch.empty(shape, device="meta").stride(), 0)


class LaunchKey(NamedTuple):
    """All that a launch depends on but the tensors' addresses; exact, so that equal means equal."""

    problem: Problem
    device: int | None  # the index of a CUDA device
    facts: tuple[tuple[torch.Size, tuple[int, ...], int] | None, ...]

    @property
    def layouts(self) -> list[Layout | None]:
        return [None if facts is None else Layout(*facts) for facts in self.facts]


def launch_key(problem: Problem, *tensors: Tensor | None) -> LaunchKey:
    """The key of launches on behalf of `problem` that read `tensors`, of which the first is one."""
    facts = [None if t is None else (t.shape, t.stride(), t.data_ptr() % 16) for t in tensors]
    first = tensors[0]
    return LaunchKey(problem, None if first is None else first.device.index, tuple(facts))


def bind_context(device: int) -> None:
    """Make CUDA's context current in this thread.

    PyTorch leaves that to its first call of CUDA, which may come after ours: tensors are described
    to the copy engine before a launch, which fails in a thread without a context.
    """
    if not getattr(_thread, "bound", False):
        torch.cuda.set_device(device)
        _thread.bound = True
