"""Backends by name. Listing the names imports no backend; asking for one imports its DSL."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points

from flash_rosetta.backend import Backend, Unsupported
from flash_rosetta.problem import Problem
from flash_rosetta.variants import SEPARATOR, variant_of

ENTRY_POINT_GROUP = "flash_rosetta.backends"

AUTO_ORDER = ("triton", "cute", "tilelang", "reference")
"""What `backend="auto"` tries, in this order."""

AUTO_ORDER_ON = {"sm_90": ("cute", "tilelang", "triton", "reference")}
"""The order where the race (`bench/results/`) says another."""

EXTRAS = ("triton", "tilelang", "cute")
"""Backends whose DSL comes with `pip install 'flash-rosetta[NAME]'`."""

ONLY_BY_NAME = ("triton_baseline", "cute_portable")
"""Backends that suite and race leave out unless named: kernels there to be compared with."""

_registered: dict[str, Backend] = {}


def register(backend: Backend) -> Backend:
    """Add a backend under `backend.name` for this process; usable on an instance.

    For work in progress: an installed package declares an entry point in the group
    "flash_rosetta.backends" instead. Raises ValueError if the name is taken or no name, TypeError
    if a method of `Backend` is missing.
    """
    if isinstance(backend, type):
        raise TypeError(f"backend must be an instance, got the class {backend.__name__}")
    if not isinstance(backend, Backend):
        missing = [m for m in ("name", "why_not", "forward", "backward") if not hasattr(backend, m)]
        raise TypeError(
            f"backend must have name, why_not, forward and backward; {backend!r} lacks {missing}"
        )
    if not isinstance(backend.name, str) or backend.name in ("", "auto"):
        raise ValueError(f"name must be a non-empty str other than 'auto', got {backend.name!r}")
    if backend.name in names():
        raise ValueError(f"a backend named {backend.name!r} is already registered")
    _registered[backend.name] = backend
    _clear_caches()
    return backend


def unregister(name: str) -> None:
    """Take back a backend added by `register`. Raises ValueError for any other name."""
    if name not in _registered:
        raise ValueError(
            f"no backend named {name!r} was added by register(); got {list(_registered)}"
        )
    del _registered[name]
    _clear_caches()


def names() -> list[str]:
    """The backends' names, in alphabetical order, their variants left out; imports no backend."""
    return sorted(_registered.keys() | _entry_points().keys())


def is_known(name: str) -> bool:
    """Whether `get` takes a name: a backend's, or its variant's, which imports the backend."""
    if base_name(name) == name:
        return name in names()
    try:
        get(name)
    except ValueError:
        return False
    except Unsupported:
        pass  # it is there, and says itself why it cannot be loaded
    return True


def base_name(name: str) -> str:
    """The backend that a name belongs to: "triton" for "triton" and for its "triton:skip"."""
    return name if name in names() else name.partition(SEPARATOR)[0]


@cache
def get(name: str) -> Backend:
    """The backend called `name`, imported now if it has not been, or its variant "NAME:VARIANT".

    Raises ValueError for a name that nobody registered or a variant that there is not, and
    Unsupported when the backend's package cannot be loaded.
    """
    if name in _registered:
        return _registered[name]
    if (base := base_name(name)) != name:
        return variant_of(get(base), name.removeprefix(base + SEPARATOR))
    entry_point = _entry_points().get(name)
    if entry_point is None:
        accepted = names() if name == "auto" else ["auto", *names()]
        raise ValueError(f"backend must be one of {', '.join(accepted)}; got {name!r}")
    try:
        backend = entry_point.load()
        if not isinstance(backend, Backend):
            raise TypeError(f"{backend!r} is no Backend")
    except Exception as error:  # a third party's broken import must not break the others
        reason = f"loading {entry_point.value} failed: {type(error).__name__}: {error}"
        if name in EXTRAS and isinstance(error, ImportError):
            reason += f" (pip install 'flash-rosetta[{name}]')"
        raise Unsupported(name, [reason]) from error
    return backend


def why_not(name: str, problem: Problem) -> list[str]:
    """Every reason why `name` cannot run `problem`, a failed import included; empty if it can."""
    try:
        return get(name).why_not(problem)
    except Unsupported as error:
        return error.reasons


@lru_cache(maxsize=4096)
def resolve(name: str, problem: Problem) -> Backend:
    """The backend that runs `problem`: `name`, or for "auto" the first of AUTO_ORDER that can.

    Raises Unsupported with every reason when there is none; never falls back from a name.
    """
    if name != "auto":
        backend = get(name)
        if reasons := backend.why_not(problem):
            raise Unsupported(name, reasons, problem)
        return backend
    reasons = []
    for candidate in auto_candidates(problem.target):
        if not (why := why_not(candidate, problem)):
            return get(candidate)
        reasons.append(f"{candidate}: {', '.join(why)}")
    raise Unsupported("auto", reasons, problem)


def auto_candidates(target: str) -> list[str]:
    """What "auto" tries on a target, of what is registered. Others run only when they are named."""
    return [name for name in AUTO_ORDER_ON.get(target, AUTO_ORDER) if name in names()]


@lru_cache
def _entry_points() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        other = found.setdefault(entry_point.name, entry_point)
        if other.value != entry_point.value:
            raise ValueError(
                f"two packages register a backend named {entry_point.name!r}: "
                f"{other.value} and {entry_point.value}; uninstall one"
            )
    return found


def _clear_caches() -> None:
    get.cache_clear()
    resolve.cache_clear()
