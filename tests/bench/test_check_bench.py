"""How long `check_linear` takes with all probes; one plain float32 kernel, FP8 blocks."""

import pytest
import torch

import reconcile
from reconcile import registry
from reconcile.checking.probes import random_weight, synthetic
from reconcile.weight import QuantizedWeight


def plain(x, weight, bias=None, _decoded={}):  # noqa: B006
    """The weight is decoded once: what is timed is the harness."""
    key = id(weight.codes)
    if key not in _decoded:
        _decoded.clear()
        _decoded[key] = weight.dequantize(torch.float32), weight
    return (x.float() @ _decoded[key][0].T).to(x.dtype)


@pytest.mark.parametrize("size", [1024, 5120])
def test_check_linear_all_probes(benchmark, size):
    form = registry.formats()["fp8_e4m3_block"]
    shape = (size, size)
    like = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    made = random_weight(like, shape, torch.Generator().manual_seed(0))
    weight = QuantizedWeight.from_tensors(made.codes, made.scales, format=form, shape=shape)
    contract = reconcile.Contract()

    report = benchmark.pedantic(
        reconcile.check_linear, (plain, weight), {"contract": contract}, rounds=1
    )

    assert report.exit_code == 0, report.explain()
    benchmark.extra_info["notices"] = list(report.notices)
    print(f"\nN=K={size}: {report.seconds:.1f} s, {len(report.rows)} rows; {report.notices[:1]}")
