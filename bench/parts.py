"""The parts of a measurement beside the race, each in a module of its own.

A part's module has
    measure(lab) -> list of records, plain JSON values, one dict for each thing measured
    sections(part, card) -> the report's sections about it
where `part` is what `as_part` made and `card` the whole file of results that holds it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flash_rosetta import machine
from flash_rosetta.bench import timing
from flash_rosetta.bench.page import Section

Record = dict[str, Any]
Item = TypeVar("Item")

PARTS = {
    "startup": "how long the first call takes, compiled anew and from the disk cache",
    "ladder": "which optimisation pays in which language",
    "sweep": "the forward with tiles of other sizes",
    "roofline": "what the card reaches, and how near to it each kernel comes",
    "profile": "what Nsight Compute says of the six kernels at head_dim 128",
    "training": "a small GPT trained with each backend",
    "repeat": "some heats of the race again: how far medians move by themselves",
}
"""Names of parts, and of their modules in this package, in the order in which they are measured."""


@dataclass
class Lab:
    """Where a part is measured, and how it shows its progress.

    `backends`: names to measure, empty for all that can. `is_quick`: a few small points, to see
    that it works.
    """

    device: torch.device
    console: Console = field(default_factory=Console)
    backends: tuple[str, ...] = ()
    is_quick: bool = False

    @property
    def watch(self) -> timing.Stopwatch:
        """A new stopwatch for the device; keep it for as long as things are compared."""
        return timing.stopwatch(self.device)

    def track(
        self, items: Collection[Item] | Iterator[Item], title: str, total: int | None = None
    ) -> Iterator[Item]:
        """The items one after another, with a bar; without a terminal, with a line at the end.

        `total` is how many they are, where they have no length.
        """
        count = len(items) if isinstance(items, Collection) else total
        start = time.perf_counter()
        if self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            with Progress(*columns, TimeElapsedColumn(), console=self.console) as progress:
                yield from progress.track(items, total=count, description=title)
        else:
            yield from items
            self.say(f"{title}: {count} in {time.perf_counter() - start:.1f} s")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Part(Protocol):
    """What a part's module has."""

    def measure(self, lab: Lab) -> list[Record]: ...

    def sections(self, part: dict[str, Any], card: dict[str, Any]) -> list[Section]: ...


def load(name: str) -> Part:
    """The module of a part."""
    module: Any = import_module(f"flash_rosetta.bench.{name}")
    return module


def as_part(name: str, lab: Lab) -> dict[str, Any]:
    """Measure a part: its records, with the machine, the commit and the seconds that it took."""
    start = time.perf_counter()
    records = load(name).measure(lab)
    return {
        "datetime": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - start, 1),
        "machine_info": machine.describe(),
        "records": records,
    }
