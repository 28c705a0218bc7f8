"""Runs the suite inside this process, which is how the suite is tested itself."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flash_rosetta import Backend, registry

HERE = Path(__file__).parent

ALONE = ["-p", "no:cacheprovider", "-p", "no:timeout", "-c", os.devnull, "--rootdir", str(HERE)]
"""Nothing of the outer run's settings; its time limit guards the inner run as a whole."""


@contextlib.contextmanager
def registered(backends: Collection[Backend]) -> Iterator[None]:
    """Backends that exist for the length of a block."""
    for backend in backends:
        registry.register(backend)
    try:
        yield
    finally:
        for backend in backends:
            registry.unregister(backend.name)


def run_suite(
    backends: Collection[Backend],
    files: Collection[str],
    *options: str,
    device: str = "cpu",
    named: Sequence[str] = (),
    plugins: Sequence[Any] = (),
) -> tuple[int, str]:
    """Run files of the suite on `backends`; returns pytest's status and what it printed.

    On the CPU unless told otherwise, so that it takes seconds and no card. `named` are backends
    that are registered already.
    """
    names = [*named, *(backend.name for backend in backends)]
    chosen = [argument for name in names for argument in ("--backend", name)]
    paths = [str(HERE / file) for file in files]
    plugin = ["-p", "flash_rosetta.conformance.plugin", "--device", device]
    printed = io.StringIO()
    with registered(backends), contextlib.redirect_stdout(printed):
        status = pytest.main([*ALONE, *plugin, *chosen, *options, *paths], plugins=list(plugins))
    return int(status), printed.getvalue()
