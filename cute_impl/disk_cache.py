"""Compiled kernels on disk, so that a process need not compile what another one did.

A file is the object code of one kernel and its launch, followed by the SHA-256 of that. Its name
has another, of all that went into it: the kernel, its options, the card, this folder's source, the
versions of what compiled it, the processor that the launch was compiled for. So a file that is
there and whole is right, and nothing ever needs to be invalidated. Files appear by renaming:
processes that write the same one at once do no harm. A folder that cannot be read or written is no
error. One that others can write to is not used, with a warning: what lies in it would be executed.

The folder is $FLASH_ROSETTA_CACHE_DIR/cute, or ~/.cache/flash-rosetta/cute.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cutlass
from cutlass.cute.runtime import load_module

FOLDER_VARIABLE = "FLASH_ROSETTA_CACHE_DIR"
FUNCTION = "launch"
"""What the launch is called in the object code."""

DIGEST_BYTES = 32


def folder() -> Path:
    """Where the files lie. Raises RuntimeError where there is no home."""
    root = os.environ.get(FOLDER_VARIABLE) or "~/.cache/flash-rosetta"
    return Path(root).expanduser() / "cute"


def name_of(kernel: type, arch: str, options: dict[str, Any]) -> str:
    """The name of a kernel's file. Raises TypeError for an option whose text does not tell it."""
    described = repr(sorted(options.items()))
    if " at 0x" in described or " object>" in described:
        raise TypeError(f"options must print what they are, got {described}")
    what = "\n".join([kernel.__module__, kernel.__qualname__, described, arch, _compiler()])
    return f"{kernel.__name__}-{arch}-{hashlib.sha256(what.encode()).hexdigest()[:40]}.o"


def load(name: str) -> Callable[..., object] | None:
    """The launch in a file; None if there is no such file, or not a whole one of this user's."""
    if not _is_safe():
        return None
    try:
        file = folder() / name
        if not _is_ours(file):  # it may be from when others could write to the folder
            return None
        content = file.read_bytes()
        code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        return function_in(file) if hashlib.sha256(code).digest() == digest else None
    except Exception:  # whatever is wrong with the file or the folder, the kernel can be compiled
        return None


def save(name: str, object_file: Path) -> None:
    """Keep object code under a name, if the folder allows it."""
    code = object_file.read_bytes()
    with suppress(OSError, RuntimeError):
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(folder()):
            return
        with tempfile.TemporaryDirectory(dir=folder(), prefix=".") as beside:
            whole = Path(beside) / name
            whole.write_bytes(code + hashlib.sha256(code).digest())
            whole.chmod(0o600)
            whole.replace(folder() / name)


def function_in(object_file: Path) -> Callable[..., object]:
    """The launch in object code. Linkers ignore what follows that in the file."""
    return load_module(str(object_file), enable_tvm_ffi=True)[FUNCTION]


def _is_safe() -> bool:
    """Whether nobody else can write to the folder, or it is not there; warns where they can."""
    try:
        if _is_ours(folder()):
            return True
    except (OSError, RuntimeError):
        return True
    warnings.warn(
        f"{folder()} is another user's or others can write to it, and what lies in it would be "
        "executed: kernels are compiled anew, and not kept. Make it yours alone (chown, chmod go-w)"
        f" or have {FOLDER_VARIABLE} name another folder",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def _is_ours(path: Path) -> bool:
    """Whether only this user, and root, can write to a file or folder. Raises OSError for none."""
    found = path.stat()
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@lru_cache
def _compiler() -> str:
    """All that compiled code depends on beside a kernel and its options."""
    here = Path(__file__).parent
    sources = [(file.name, file.read_bytes()) for file in sorted(here.glob("*.py"))]
    try:
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        described = ("flags", "Features")
        features = [line for line in processor.splitlines() if line.startswith(described)]
    except OSError:
        features = [platform.processor()]
    settings = sorted(item for item in os.environ.items() if item[0].startswith("CUTE_DSL_"))
    versions = [version(name) for name in ("nvidia-cutlass-dsl-libs-core", "apache-tvm-ffi")]
    facts = sources, versions, str(cutlass.CUDA_VERSION), platform.machine(), features, settings
    return hashlib.sha256(repr(facts).encode()).hexdigest()
