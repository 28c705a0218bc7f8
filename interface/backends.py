"""Pick a backend at import: `from flash_rosetta.backends import triton as fa`.

`fa.attention` and `fa.explain` are `flash_rosetta.attention` and `flash_rosetta.explain` with the
backend filled in. The import raises ImportError with the reason when the backend cannot be loaded.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

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
        attention=partial(attention, backend=name),
        explain=partial(explain, backend=name),
        why_not=backend.why_not,
    )


def __dir__() -> list[str]:
    return registry.names()
