"""aiter's published kernel on SGLang's four shapes: elements that differ from one rounding."""

import torch

import reconcile
from reconcile_kernels.aiter_bf16 import BATCHED_GEMM
from reconcile_kernels.aiter_bf16.batched import AITER_INTERPRETER

for t, g, d, r in ((1, 4, 128, 32), (8, 8, 128, 64), (37, 4, 192, 32), (128, 2, 128, 16)):
    torch.manual_seed(0)
    x, w = torch.randn(t, g, d).bfloat16().transpose(0, 1), torch.randn(g, r, d).bfloat16()
    for bias in (None, torch.randn(g, r).bfloat16()):
        exact = torch.einsum("gtd,grd->gtr", x.double(), w.double())
        exact = exact if bias is None else exact + bias.double()[:, None]
        stats = reconcile.error_stats(BATCHED_GEMM.run(x, w, bias, AITER_INTERPRETER), exact)
        size = f"T={t} G={g} D={d} R={r} {'no bias' if bias is None else 'bias':7}"
        print(
            f"{size}: {stats.differing} of {stats.n} differ, at most {stats.max_ulp} ulp, "
            f"max |c - r| {stats.max_abs:.3g}"
        )
