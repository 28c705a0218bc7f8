"""How a fault is planted: an edit to the text of the reference, of a kernel, or of the interface.

A mutant is a backend like any other to the suite. Its text stays the original but for its edits,
and an edit that no longer fits the text is an error, so that no mutant silently becomes harmless.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from flash_rosetta import Backend, Problem, registry
from flash_rosetta.reference import hbm, tiled

TILES = {"cpu": {"tile_q": 64, "tile_k": 32}, "cuda": {"tile_q": 512, "tile_k": 512}}
"""Small and unequal, so that small problems cross the boundaries of both; large on a GPU, for time.
"""

JUDGED = (AssertionError, pytest.fail.Exception)
"""What a check raises, unlike a mutant whose edit does not even run."""


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which must occur `times` times in the texts together, by `new`."""

    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class Test:
    """A test function of the suite; `purpose` and `only`, a part of the id, limit it to cases."""

    __test__ = False

    file: str
    function: str
    purpose: str | None = None
    only: str = ""

    def __str__(self) -> str:
        limits = [limit for limit in (self.purpose, self.only) if limit]
        return f"{self.function}[{', '.join(limits)}]" if limits else self.function


@dataclass(eq=False)
class Mutant:
    """A backend: the tiled reference with `edits`, which `caught_by` must notice.

    `stands_for` names a public defect of the kind, as repository#number. `is_refused_with`: the
    fault is one that a compiler refuses, in these words. `passes_max_abs`: a plain tolerance on the
    largest absolute error lets the fault through.
    """

    name: str
    stands_for: str
    caught_by: Test | None
    edits: Sequence[Edit] = ()
    is_refused_with: str | None = None
    passes_max_abs: bool = False

    unbroken: ClassVar[str] = "unbroken"
    """The backend that must pass what the mutant fails."""

    def why_not_hunted(self, device: str) -> str | None:
        """Why the fault cannot show on `device`, "cpu" or "cuda"; None if it can."""
        return None if device == "cpu" else "its fault shows on the CPU, where it is hunted faster"

    def planted(self) -> AbstractContextManager[None]:
        """Within it, the fault is in place."""
        return nullcontext()

    def is_caught_by(self, error: BaseException) -> bool:
        """Whether a check judged; a mutant that merely crashes has not been caught."""
        if self.is_refused_with is not None:
            return any(self.is_refused_with in str(e) for e in _with_causes(error))
        return isinstance(error, JUDGED)

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        tiles = TILES[q.device.type]
        o_and_lse: tuple[Tensor, Tensor] = self._module.forward(q, k, v, problem, **tiles)
        return o_and_lse

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = self._module.backward(
            do, dlse, q, k, v, o, lse, problem, **TILES[q.device.type]
        )
        return gradients

    @cached_property
    def _module(self) -> ModuleType:
        texts = self._edited([inspect.getsource(module) for module in (hbm, tiled)])
        mutated_hbm, mutated = ModuleType(f"{self.name}_hbm"), ModuleType(self.name)
        sys.modules[mutated_hbm.__name__] = mutated_hbm  # dataclasses look their module up
        exec(compile(texts[0], f"<{self.name}: hbm.py>", "exec"), mutated_hbm.__dict__)
        exec(compile(texts[1], f"<{self.name}: tiled.py>", "exec"), mutated.__dict__)
        mutated.Hbm = mutated_hbm.Hbm  # type: ignore[attr-defined]
        return mutated

    def _edited(self, texts: Sequence[str]) -> list[str]:
        for edit in self.edits:
            found = sum(text.count(edit.old) for text in texts)
            if found != edit.times:
                raise ValueError(
                    f"mutant {self.name}: {edit.old!r} must occur {edit.times} times in the "
                    f"original, and occurs {found} times"
                )
            texts = [text.replace(edit.old, edit.new) for text in texts]
        return list(texts)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: a compiler names the call first, then the fault."""
    while error is not None:
        yield error
        error = error.__cause__


UNBROKEN = Mutant("unbroken", "nothing: it must pass what the mutants fail", None)


@dataclass(eq=False)
class InterfaceMutant(Mutant):
    """The reference behind an interface with a fault: `function`, as module:name, edited."""

    function: str = ""

    @contextmanager
    def planted(self) -> Iterator[None]:
        module_name, _, name = self.function.partition(":")
        module = importlib.import_module(module_name)
        function: FunctionType = getattr(module, name)
        (text,) = self._edited([textwrap.dedent(inspect.getsource(function))])
        text = text[text.index("def ") :]  # without decorators: the function is registered already
        scope: dict[str, Any] = {}
        exec(compile(text, f"<{self.name}: {self.function}>", "exec"), vars(module), scope)
        original = function.__code__
        function.__code__ = scope[name].__code__  # whoever holds the function sees the fault
        try:
            yield
        finally:
            function.__code__ = original

    @cached_property
    def _module(self) -> ModuleType:
        return tiled


@dataclass(eq=False)
class KernelMutant(Mutant):
    """A copy of Triton's kernel folder with `edits`: in its interpreter, or on a GPU."""

    on_gpu_only: bool = False

    unbroken: ClassVar[str] = "triton"

    def why_not_hunted(self, device: str) -> str | None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device == "cpu" and self.on_gpu_only:
            return "its fault shows on a GPU: --kill-table --device cuda"
        if device == "cpu" and torch.cuda.is_available() and not interpreted:
            return "Triton runs on the CPU under TRITON_INTERPRET=1 alone"
        return None

    def why_not(self, problem: Problem) -> list[str]:
        return self._backend.why_not(problem)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        return self._backend.forward(q, k, v, problem)

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backend.backward(do, dlse, q, k, v, o, lse, problem)

    @cached_property
    def _backend(self) -> Backend:
        module = sys.modules[type(registry.get(self.unbroken)).__module__]
        package, folder = str(module.__package__), Path(str(module.__file__)).parent
        paths = sorted(folder.glob("*.py"))
        texts = self._edited([path.read_text(encoding="utf-8") for path in paths])
        copy = Path(self._folder.name) / self.name
        copy.mkdir()
        for path, text in zip(paths, texts, strict=True):
            text = text.replace(package, self.name)
            (copy / path.name).write_text(text, encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(self._folder.name)
            mutated = importlib.import_module(f"{self.name}.{module.__name__.rpartition('.')[2]}")
        backend: Backend = mutated.backend
        return backend

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        """Triton reads a kernel's source from its file, which must stay."""
        return tempfile.TemporaryDirectory()


@dataclass(eq=False)
class GpuMutant(Mutant):
    """The tiled reference with `edits` whose fault shows on a GPU alone."""

    def why_not_hunted(self, device: str) -> str | None:
        return None if device == "cuda" else "its fault shows on a GPU: --kill-table --device cuda"
