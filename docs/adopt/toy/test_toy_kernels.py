import torch
from toy_kernels import fp8_block_linear

from reconcile import QuantizedWeight


def kernel(x, weight, bias=None):
    y = fp8_block_linear(x, weight.codes.view(torch.float8_e4m3fn), weight.scales)
    return y if bias is None else y + bias


def test_fp8_block_linear(reconcile_check):
    g = torch.Generator().manual_seed(0)
    codes, scales = torch.randn(448, 320, generator=g), torch.rand(4, 3, generator=g) + 0.5
    weight = QuantizedWeight.from_tensors(
        codes.to(torch.float8_e4m3fn), scales, format="fp8_e4m3_block", shape=(448, 320)
    )
    reconcile_check(kernel, weight)
