"""What a report says about where it comes from."""

import hashlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

import reconcile
from reconcile import native
from reconcile.capture.provenance import (
    extensions,
    file_sha256,
    git_commit,
    kernel_hashes,
    settings,
)
from reconcile.kernel import FunctionKernel
from reconcile.native import NativeLibrary


def double(x, weight, bias=None):
    return x @ weight.T


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_a_function_is_hashed_by_its_file():
    found = kernel_hashes(FunctionKernel("double", double))
    assert found == {"kernel source test_provenance.py": sha256(__file__)}


def test_a_registered_kernel_is_hashed_with_the_native_sources_beside_it():
    kernel = reconcile.registry.kernel("ternary_cuda.naive")
    found = kernel_hashes(kernel)
    source = Path(__file__).parents[2] / "kernels/reconcile_kernels/ternary_cuda/naive.cu"
    assert found["kernel source naive.cu"] == sha256(source)


@pytest.mark.parametrize("thing", [torch.add, None, len, type("Made", (), {})()])
def test_a_kernel_without_a_file_has_no_hash(thing):
    kernel = None if thing is None else FunctionKernel("x", thing)
    assert isinstance(kernel_hashes(kernel), dict)


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    assert file_sha256(tmp_path / "none") == "unreadable"


def test_loaded_libraries_are_listed_with_compiler_and_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    library = NativeLibrary(name="provenance_one", sources=(source,))
    assert library.load().one() == 1
    (item,) = [item for item in native.loaded() if item.name == "provenance_one"]
    assert item.path.is_file()
    assert item.files == (source,)
    assert "-ffp-contract=off" in item.flags
    command = shlex.join(native.find_cxx())
    first = subprocess.run(
        f"{command} --version", shell=True, capture_output=True, text=True, check=True
    )
    assert item.compiler == first.stdout.splitlines()[0]


def test_settings_name_what_may_change_bits(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    found = settings()
    assert found["torch threads"] == str(torch.get_num_threads())
    assert found["subnormals"] == "kept"
    assert found["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    torch.set_flush_denormal(True)
    try:
        assert settings()["subnormals"] == "flushed to zero"
    finally:
        torch.set_flush_denormal(False)


def test_the_processor_and_commit_are_those_of_the_machine():
    flags = Path("/proc/cpuinfo").read_text().split()
    assert extensions()
    assert set(extensions()) <= set(flags)
    assert re.fullmatch(r"(|[0-9a-f]{40}(\+changes)?)", git_commit())


def test_check_linear_states_kernel_weight_and_seed():
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    report = reconcile.check_linear(double, weight, probes="bound", repeats=1, seed=7)
    (side,) = report.provenance
    assert side.side == "double"
    assert side.seeds == {"check_linear": 7}
    assert side.hashes["kernel source test_provenance.py"] == sha256(__file__)
    assert side.versions["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{16}", side.checkpoint_sha256)
