"""Our kernel compiled, not run, for the GPUs that it is meant for."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from reconcile_kernels.aiter_bf16 import source

module = source.in_triton()
constants = dict(HAS_BIAS=True, SPLITS=int(sys.argv[3]), SPLIT_K=1024)
constants |= dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)
function = module.batched_gemm
pointers = dict(x="*bf16", w="*bf16", y="*bf16", partials="*fp32", bias="*bf16")
signature = {name: pointers.get(name, "i32") for name in function.arg_names}
signature |= {name: "constexpr" for name in constants}
target = GPUTarget(sys.argv[1], int(sys.argv[2]) if sys.argv[1] == "cuda" else sys.argv[2],
                   32 if sys.argv[1] == "cuda" else 64)
made = triton.compile(ASTSource(fn=function, signature=signature, constexprs=constants),
                      target=target, options=dict(num_warps=4))
print(made.asm.get("amdgcn") or made.asm["ptx"])
"""


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("backend", "arch", "instruction"),
    [("hip", "gfx942", "v_mfma_f32"), ("hip", "gfx950", "v_mfma_f32"), ("cuda", "90", "mma")],
)
def test_it_compiles_to_matrix_instructions(backend, arch, instruction, splits):
    """Sums are float32: the instruction accumulates there."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, backend, arch, str(splits)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line.strip() for line in ran.stdout.splitlines() if instruction in line]
    assert lines
    products = [line for line in lines if "bf16" in line]  # the others wait for them
    assert products
    assert all("f32" in line for line in products)
