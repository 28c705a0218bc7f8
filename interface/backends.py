"""Pick a backend at import: `from flash_rosetta.backends import triton as fa`.

`fa.attention` and `fa.explain` are `flash_rosetta.attention` and `flash_rosetta.explain` with the
backend filled in. The import raises ImportError with the reason when the backend cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

from flash_rosetta import registry
from flash_rosetta.attention import attention, explain
from flash_rosetta.backend import Unsupported


def __getattr__(name: str) -> SimpleNamespace:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        backend = registry.get(name)
    except (Unsupported, ValueError) as error:
        raise ImportError(str(error), name=f"{__name__}.{name}") from error
    return SimpleNamespace(
        backend=backend,
        attention=_with_backend(attention, name),
        explain=_with_backend(explain, name),
        why_not=backend.why_not,
    )


def _with_backend(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "backend" in options:
            raise TypeError(f"backend was chosen at import: {name!r}; got {options['backend']!r}")
        return function(*args, **options, backend=name)

    return call


def __dir__() -> list[str]:
    return registry.names()
