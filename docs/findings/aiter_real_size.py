"""wo_a at the real size (G = 8, D = 4096, R = 1024) against the exact result rounded once.

python docs/findings/aiter_real_size.py [ENGINE [T ...]]
"""

import sys

import torch

import reconcile
from reconcile.kernel import choose_engine
from reconcile_kernels.aiter_bf16 import BATCHED_GEMM
from reconcile_kernels.aiter_bf16.batched import UPSTREAM

name, *rows = sys.argv[1:] or ["triton-on-cpu"]
engine, note = choose_engine(BATCHED_GEMM, name)
if engine is None:
    sys.exit(f"not run: {note}")
print(f"{note} ({engine.implementation}, {engine.execution})")
w = torch.randn(8, 1024, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
for t in map(int, rows or (1, 8, 37, 128)):
    o = torch.randn(t, 8, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = o.transpose(0, 1)
    exact = torch.einsum("gtd,grd->gtr", x.double(), w.double())
    einsum = torch.einsum("tgd,grd->tgr", o, w).transpose(0, 1)
    for who, y in (("kernel", BATCHED_GEMM.run(x, w, None, engine)), ("torch's einsum", einsum)):
        stats, value = reconcile.error_stats(y, exact), UPSTREAM.value(y, exact)
        print(
            f"T={t} {who}: {stats.differing} of {stats.n} differ, at most {stats.max_ulp} ulp; "
            f"max rel err {value:.2g}, {'meets' if value <= UPSTREAM.limit else 'misses'} 5e-4"
        )
