"""The plain kernel reads every registered format, and is judged by its own contract."""

import pytest
import torch

import reconcile
from reconcile.registry import formats, kernel
from reconcile.weight import QuantizedWeight

N, K = 48, 160


def random_weight(form):
    generator = torch.Generator().manual_seed(5)
    legal = torch.tensor(
        [c for c, v in enumerate(form.table) if c not in form.invalid and abs(v) < 1e3]
    )
    codes = legal[torch.randint(len(legal), (N, K), generator=generator)].to(torch.uint8)
    shape = form.scale_shape((N, K))
    if form.scale_encoding == "e8m0":
        scales = torch.randint(115, 122, shape, generator=generator).to(torch.uint8)
    else:
        scales = torch.rand(shape, generator=generator) / 100 + 0.001
    return QuantizedWeight.from_tensors(form.pack(codes), scales, format=form, shape=(N, K))


@pytest.mark.parametrize("name", formats())
def test_it_passes_every_probe_in_every_format(name):
    report = reconcile.check_linear(kernel("torch_dequant"), random_weight(formats()[name]))
    report.raise_for_verdict()


def test_a_forgotten_scale_is_found():
    def unscaled(x, weight):
        return torch.nn.functional.linear(
            x.float(), weight.format.decode(weight.unpacked(), torch.float32)
        ).to(x.dtype)

    unscaled.contract = kernel("torch_dequant").contract
    weight = random_weight(formats()["fp8_e4m3_block"])
    assert reconcile.check_linear(unscaled, weight).verdict == "FAIL"
