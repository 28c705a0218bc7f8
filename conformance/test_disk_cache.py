"""Compiled CuTe kernels on disk: found again, never a wrong one, and never in anybody's way.

The other two languages keep kernels on disk themselves. Nothing here runs a kernel; the last test
is of what launches them.
"""

import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from flash_rosetta import Problem, registry
from flash_rosetta.layout import launch_key

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")
driver = pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("tvm_ffi")


class Fill:
    """The smallest kernel that has an option, a tensor and a scalar."""

    def __init__(self, *, columns: int):
        self.columns = columns

    def signature(self) -> tuple:
        shape = (cute.sym_int(), self.columns)
        x = cute.runtime.make_fake_tensor(cutlass.Float32, shape, (self.columns, 1))
        return x, cutlass.Float32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, value: cutlass.Float32, stream: driver.CUstream):
        self.kernel(x, value).launch(
            grid=(x.shape[0], 1, 1), block=(self.columns, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, value: cutlass.Float32):
        row, _, _ = cute.arch.block_idx()
        column, _, _ = cute.arch.thread_idx()
        x[row, column] = value


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty cache."""
    monkeypatch.setenv("FLASH_ROSETTA_CACHE_DIR", str(tmp_path))
    return tmp_path / "cute"


@pytest.fixture
def built(folder, monkeypatch):
    """The `cute_impl.launch` of a process that has compiled nothing, and what it then compiles."""
    backend = registry.get("cute")
    package = type(backend).__module__.rpartition(".")[0]
    launch = sys.modules[f"{package}.launch"]
    compilations = []

    def build(kernel, target, options, *flags):
        compilations.append((kernel.__name__, target, options))
        return original(kernel, target, options, *flags)

    original = launch.build
    monkeypatch.setattr(launch, "build", build)
    launch.compiled.cache_clear()
    yield SimpleNamespace(launch=launch, compilations=compilations)
    launch.compiled.cache_clear()


def assert_launches(code):
    """It is code that takes a tensor and a number; with one on the CPU it gets no further."""
    with pytest.raises(ValueError, match="device_type=cuda"):
        code(torch.empty(2, 32), 1.0)
    with pytest.raises(TypeError):
        code(torch.empty(2, 32))


def test_a_kernel_is_compiled_once_for_all_processes(built, folder):
    assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))
    assert len(built.compilations) == 1
    built.launch.compiled.cache_clear()  # as in the next process
    assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))
    assert len(built.compilations) == 1
    (file,) = folder.iterdir()
    assert file.name.startswith("Fill-sm_80-")


def test_kernels_that_differ_do_not_meet(built, folder, monkeypatch):
    for target, columns in (("sm_80", 32), ("sm_80", 64), ("sm_90", 32)):
        built.launch.compiled(Fill, target, columns=columns)
    assert len(list(folder.iterdir())) == len(built.compilations) == 3
    cache = built.launch.disk_cache
    name = cache.name_of(Fill, "sm_80", {"columns": 32})
    cache._compiler.cache_clear()
    assert cache.name_of(Fill, "sm_80", {"columns": 32}) == name
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    cache._compiler.cache_clear()
    assert cache.name_of(Fill, "sm_80", {"columns": 32}) != name
    cache._compiler.cache_clear()
    with pytest.raises(TypeError, match="options must print what they are"):
        cache.name_of(Fill, "sm_80", {"columns": object()})


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text"])
def test_a_damaged_file_is_compiled_anew(built, folder, damage):
    built.launch.compiled(Fill, "sm_80", columns=32)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(
        {
            "empty": b"",
            "cut": whole[:middle],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "text": b"no object code at all, and no digest either",
        }[damage]
    )
    built.launch.compiled.cache_clear()
    assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))
    assert len(built.compilations) == 2
    built.launch.compiled.cache_clear()
    built.launch.compiled(Fill, "sm_80", columns=32)
    assert len(built.compilations) == 2


def test_whole_files_that_no_linker_takes_are_compiled_anew(built, folder):
    cache = built.launch.disk_cache
    name = cache.name_of(Fill, "sm_80", {"columns": 32})
    nonsense = folder.parent / "nonsense"
    nonsense.write_bytes(b"nonsense")
    cache.save(name, nonsense)
    assert (folder / name).exists()
    assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))
    assert len(built.compilations) == 1


def test_no_folder_is_no_error(built, folder):
    folder.write_text("a file in the place of the folder")
    assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))
    assert folder.is_file()


@pytest.mark.parametrize("theirs", ["a group's", "anybody's", "another user's"])
def test_a_folder_that_others_can_write_to_is_not_used(built, folder, monkeypatch, theirs):
    built.launch.compiled(Fill, "sm_80", columns=32)
    built.launch.compiled.cache_clear()
    if theirs == "another user's":
        monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
        if not folder.stat().st_uid:
            os.chown(folder, 1, -1)
    else:
        folder.chmod({"a group's": 0o770, "anybody's": 0o707}[theirs])
    warning = rf"{re.escape(str(folder))} .*FLASH_ROSETTA_CACHE_DIR"
    with pytest.warns(RuntimeWarning, match=warning):
        assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))
    assert len(built.compilations) == 2, "what lies there is executed"
    with pytest.warns(RuntimeWarning, match=warning):
        built.launch.compiled(Fill, "sm_80", columns=64)
    assert len(list(folder.iterdir())) == 1, "something is added to it"


def test_a_file_that_others_can_write_to_is_compiled_anew(built, folder):
    built.launch.compiled(Fill, "sm_80", columns=32)
    (file,) = folder.iterdir()
    file.chmod(0o666)
    built.launch.compiled.cache_clear()
    assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))
    assert len(built.compilations) == 2
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_what_a_user_shares_by_default_does_not_matter(built, folder, umask):
    before = os.umask(umask)
    try:
        for _ in range(2):
            built.launch.compiled(Fill, "sm_80", columns=32)
            built.launch.compiled.cache_clear()
    finally:
        os.umask(before)
    assert len(built.compilations) == 1


def test_folders_may_have_spaces_in_their_names(built, monkeypatch, tmp_path):
    spaced = tmp_path / "a folder"
    spaced.mkdir()
    monkeypatch.setenv("FLASH_ROSETTA_CACHE_DIR", str(spaced / "a cache"))
    monkeypatch.setattr("tempfile.tempdir", str(spaced))
    for _ in range(2):
        assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))
        built.launch.compiled.cache_clear()
    assert len(built.compilations) == 1
    problem = Problem(batch=1, num_heads=1, seqlen_q=64, head_dim=64, target="sm_80")
    (report,) = registry.get("cute:baseline").compile_only(problem)
    assert report.registers > 0


def test_no_home_is_no_error(built, monkeypatch):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", homeless)
    assert_launches(built.launch.compiled(Fill, "sm_80", columns=32))


def test_threads_that_start_together_compile_once(built, monkeypatch):
    monkeypatch.setattr(built.launch, "bind_context", lambda device: None)
    x = torch.empty(2, 32)
    problem = Problem(batch=1, num_heads=1, seqlen_q=2, head_dim=32, target="sm_80")
    recipe = built.launch.Recipe(
        Fill, launch_key(problem, x), [lambda t: t], (1.0,), {"columns": 32}
    )
    errors = []

    def run():
        try:
            recipe.launch(x).run()
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built.compilations) == 1
    assert ["device_type=cuda" in error for error in errors] == [True] * 3


@pytest.mark.thorough
def test_processes_that_start_together_do_no_harm(folder):
    code = (
        "from flash_rosetta.conformance.test_disk_cache import Fill, assert_launches\n"
        "from flash_rosetta import registry\n"
        "import sys\n"
        "package = type(registry.get('cute')).__module__.rpartition('.')[0]\n"
        "compiled = sys.modules[package + '.launch'].compiled\n"
        "assert_launches(compiled(Fill, 'sm_80', columns=32))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(list(folder.iterdir())) == 1


def test_without_what_launches_kernels_nothing_is_accepted(monkeypatch):
    backend = registry.get("cute")
    problem = Problem(batch=1, num_heads=1, seqlen_q=8, head_dim=64, target="sm_90")
    assert backend.why_not(problem) == []
    monkeypatch.setattr(sys.modules[type(backend).__module__], "has_tvm_ffi", lambda: False)
    (reason,) = backend.why_not(problem)
    assert reason.startswith("apache-tvm-ffi")
    assert "flash-rosetta[cute]" in reason
