"""The table of measured crossovers, what follows from it, and the compiler's report."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch

import reconcile
from reconcile.bench import timing as bench
from reconcile.bench.compiler_report import ARCHITECTURES, parse, usage
from reconcile.bench.crossover import (
    DENSE,
    Crossovers,
    Measurement,
    Point,
    Setting,
    load_crossovers,
    table_text,
)
from reconcile.checking.probes import random_weight, synthetic
from reconcile.cli import main
from reconcile.exceptions import ConfigError, KernelError
from reconcile.kernel import FunctionKernel
from reconcile.native import find_nvcc
from reconcile_kernels.routed import route
from reconcile_kernels.ternary_cpu import BF16
from reconcile_kernels.ternary_cuda import NAIVE, variants
from reconcile_references.ternary import TERNARY_K_INTERLEAVED

SETTING = Setting(n=96, k=64, dtype="bfloat16", device="cpu", threads=1)
RUNS = BF16.is_supported(BF16.engines[0])
NEEDS_AVX512 = pytest.mark.skipif(not RUNS, reason="no AVX-512 with BF16, or no compiler")


def measured(ratios, kernel="fast", at=SETTING):
    points = tuple(Point(m=m, kernel_ms=1.0, dense_ms=r, ratio=r) for m, r in ratios.items())
    return Measurement(
        kernel=kernel,
        engine=BF16.engines[0].name,
        setting=at,
        points=points,
        packed_bytes=10,
        dense_bytes=80,
    )


CASES = [
    ({1: 3.0, 8: 2.0, 64: 0.5}, ((1, "fast"), (64, DENSE)), {1: "fast", 63: "fast", 64: DENSE}),
    ({1: 0.5, 8: 2.0}, ((1, DENSE), (8, "fast")), {1: DENSE, 7: DENSE, 8: "fast", 999: "fast"}),
    ({1: 0.5, 8: 2.0, 64: 0.9}, ((1, DENSE), (8, "fast"), (64, DENSE)), {9: "fast", 64: DENSE}),
    ({4: 2.0}, ((1, "fast"),), {1: "fast", 4: "fast", 5: "fast"}),
    ({1: 1.0}, ((1, DENSE),), {1: DENSE}),
    ({1: 2.0, 8: 0.98, 64: 0.96, 128: 1.02}, ((1, "fast"), (64, DENSE)), {8: "fast", 200: DENSE}),
    ({1: float("nan")}, ((1, DENSE),), {1: DENSE}),
]


@pytest.mark.parametrize(("ratios", "spans", "paths"), CASES)
def test_the_faster_path_in_either_direction(ratios, spans, paths):
    table = measured(ratios)
    assert table.spans() == spans
    assert {m: table.path(m) for m in paths} == paths


def test_a_table_survives_its_file(tmp_path):
    path = tmp_path / "table.json"
    first, other = measured({1: 2.0}), measured({1: 2.0}, at=replace(SETTING, n=5))
    Crossovers(measurements=(first, other)).save(path)
    table = load_crossovers(path)
    assert table.measurements == (first, other)
    newer = measured({1: 0.1})
    assert Crossovers(measurements=table.merged([newer])).find("fast", SETTING) == newer
    assert table.find("fast", replace(SETTING, threads=2)) is None
    assert "8.0x" in table_text(first)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"schema": 2, "measurements": []}', '{"schema": 1, "measurements": [{}]}'],
)
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"table\.json: "):
        load_crossovers(path)


def test_points_out_of_order_are_refused(tmp_path):
    path = tmp_path / "table.json"
    Crossovers(measurements=(measured({8: 1.0, 1: 1.0}),)).save(path)
    with pytest.raises(ConfigError, match="in order of M"):
        load_crossovers(path)


# The route ------------------------------------------------------------------------------------


def routed(ratios):
    at = bench.setting(96, 64, torch.bfloat16, "cpu")
    table = Crossovers(measurements=(measured(ratios, BF16.name, at),))
    return route(BF16, table, 96, 64, torch.bfloat16)


@NEEDS_AVX512
@pytest.mark.parametrize("ratios", [{1: 2.0, 5: 0.5}, {1: 0.5, 5: 2.0}, {1: 2.0}, {1: 0.5}])
def test_every_route_passes_by_the_arithmetic_of_its_path(ratios):
    like = synthetic(TERNARY_K_INTERLEAVED, torch.ones(96, 64), torch.ones(96))
    weight = random_weight(like, (96, 64), torch.Generator().manual_seed(0))
    kernel = routed(ratios)
    prepared = kernel.prepare(weight, kernel.engines[0])
    winners = {ratio > 1 for ratio in ratios.values()}
    assert (prepared.packed is not None, prepared.dense is not None) == (
        True in winners,
        False in winners,
    )
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense = torch.nn.functional.linear(x, weight.dequantize(torch.bfloat16))
    ours = BF16.apply(x, BF16.prepare(weight, BF16.engines[0]))
    for m in (1, 6):
        expected = ours if kernel.measurement.path(m) != DENSE else dense
        assert torch.allclose(kernel.apply(x[:m], prepared), expected[:m], rtol=2**-7)
    probes = ("impulse", "layout", "special", "bound", "batch", "edge")
    reconcile.check_linear(kernel, weight, probes=probes).raise_for_verdict()


def test_nothing_is_guessed_for_what_was_not_measured():
    with pytest.raises(
        KernelError, match=r"reconcile bench --kernel ternary_cpu\.bf16 --shape 8x4"
    ):
        route(BF16, Crossovers(measurements=()), 8, 4, torch.bfloat16)


# Measuring ------------------------------------------------------------------------------------


def plain(x, weight, bias=None):
    return x @ weight.dequantize(x.dtype).T


def test_an_emulated_engine_is_not_timed(monkeypatch):
    with pytest.raises(KernelError, match="is emulated: its time says nothing"):
        bench.measure(NAIVE, NAIVE.engines[1], (8, 8), torch.bfloat16, TERNARY_K_INTERLEAVED)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench, "ROTATED", 1 << 12)
    for wrong in (
        lambda x, w: plain(x, w) * 1.2,
        lambda x, w: x,
        lambda x, w: plain(x, w) * torch.nan,
    ):
        kernel = FunctionKernel("wrong", wrong)
        with pytest.raises(KernelError, match="wrong: "):
            bench.measure(
                kernel, kernel.engines[0], (32, 16), torch.float32, TERNARY_K_INTERLEAVED, (2,), 1
            )


def test_a_measurement_of_a_plain_function(monkeypatch):
    monkeypatch.setattr(bench, "ROTATED", 1 << 12)
    kernel = FunctionKernel("plain", plain)
    found = bench.measure(
        kernel, kernel.engines[0], (32, 16), torch.float32, TERNARY_K_INTERLEAVED, (1, 3), 2
    )
    assert [point.m for point in found.points] == [1, 3]
    assert all(point.kernel_ms > 0 and point.dense_ms > 0 for point in found.points)
    assert found.dense_bytes == 32 * 16 * 4
    assert found.packed_bytes == 32 * 16 / 4 + 32 * 4
    assert found.setting == bench.setting(32, 16, torch.float32, "cpu")


def test_a_tensor_is_counted_once(monkeypatch):
    """A kernel's prepared weight may be found in two ways, and may hold views."""

    @dataclasses.dataclass
    class Prepared:
        whole: torch.Tensor
        view: torch.Tensor

    whole = torch.zeros(100)
    assert bench.stored_bytes(Prepared(whole, whole[10:20])) == 400
    assert bench.stored_bytes((whole[:10], torch.zeros(5))) == 60


@NEEDS_AVX512
def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "ROTATED", 1 << 16)
    table = tmp_path / "t.json"
    options = ["--rows", "1,4", "--shape", "64x64", "--rounds", "1", "--out", str(table)]
    code = main(["bench", "--kernel", "ternary_cpu.bf16", *options])
    assert code == 0
    body = json.loads(table.read_text())
    (entry,) = body["measurements"]
    assert [point["m"] for point in entry["points"]] == [1, 4]
    assert entry["provenance"]["versions"]["torch"] == torch.__version__
    assert "route: " in capsys.readouterr().out
    assert main(["bench", "--kernel", "ternary_cuda.masks", *options, "--engine", "emulated"]) == 2
    assert main(["bench", "--kernel", "ternary_cpu.bf16", *options, "--rows", "0"]) == 3


# The compiler's report ------------------------------------------------------------------------

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_80'
ptxas info    : Function properties for _Z1fPf
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 9600 bytes smem, 432 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1gPf' for 'sm_80'
ptxas info    : Function properties for _Z1gPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 432 bytes cmem[0]
"""


def test_the_report_is_read():
    f, g = parse(REPORT)
    assert (f.kernel, f.architecture, f.registers, f.shared) == ("_Z1fPf", "sm_80", 40, 9600)
    assert (f.stack, f.spill_stores, f.spill_loads) == (16, 8, 4)
    assert (g.registers, g.spill_stores, g.shared) == (255, 0, 0)
    assert f.occupancy(128) == 48 / 64  # 65536 / (40 * 32 = 1280 a warp, 4 warps) = 12 blocks
    assert g.occupancy(128) == 8 / 64


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "kernel",
    [NAIVE, *(pytest.param(k, marks=pytest.mark.slow) for k in variants.ALL[:4])],
    ids=lambda kernel: kernel.name,
)
def test_every_kernel_compiles_without_spills(kernel, architecture, record_property):
    if find_nvcc() is None:
        pytest.skip("no nvcc: not compiled for any GPU")
    found = usage(kernel.cuda_library, architecture)
    assert len(found) == len(getattr(kernel, "dtypes", "123"))
    for item in found:
        record_property(item.kernel, f"{item.registers} registers, {item.spill_stores} spilled")
        assert (item.spill_stores, item.spill_loads) == (0, 0), item
        assert item.registers <= 168
