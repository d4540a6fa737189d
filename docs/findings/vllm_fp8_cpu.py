"""What vLLM's `fp8_scaled_mm_cpu` computes, code by code and M by M; prints Markdown.

    make vllm
    .venvs/vllm/bin/python docs/findings/vllm_fp8_cpu.py

Calls the op alone; of this project it uses the code table and the plain VDPBF16PS. Calls that may
end the process run in a child.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import numpy as np
import torch

from reconcile.exceptions import ReconcileError
from reconcile_kernels.amx_fp8.instructions import fused, vdpbf16ps
from reconcile_kernels.vllm_fp8 import W8A16
from reconcile_kernels.vllm_fp8.kernel import VLLM, _ops
from reconcile_references.fp8 import E4M3FN

FLOAT8 = torch.float8_e4m3fn
ROWS = (1, 2, 3, 4, 5, 6, 8, 16, 64)


def call(x, codes, scale=1.0, bias=None, block=None):
    """The op on codes [N, K] under one scale, through the steps of vLLM's per-tensor class."""
    n, k = codes.shape
    packed = _ops().convert_weight_packed(codes.view(FLOAT8))
    scales = torch.full((1, -(-k // 128)), scale)
    wide = [-(-n // 32) * 32, 128] if block is None else block
    return _ops().fp8_scaled_mm_cpu(x, packed, scales, wide, bias, x.dtype, True)


def in_child(body: Callable[[], object]) -> str:
    """What ``body`` returns, raises, or dies of."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            text = f"returns {body()}"
        except BaseException as error:  # noqa: BLE001 - it is what is reported
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"the process ends: {signal.Signals(os.WTERMSIG(status)).name}"
    return text


def table(head, rows):
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


# ------------------------------------------------------------------ codes


def decoded(m: int) -> list[float]:
    """The value of each code as a call with ``m`` rows uses it: x is 1 at one k and 0 elsewhere.

    The other codes of the row are 0x38 (1.0), so that 0 * w stays 0 whatever they decode to.
    """
    values = []
    for start in range(0, 256, 32):
        codes = torch.full((32, 32), 0x38, dtype=torch.uint8)
        codes[:, 0] = torch.arange(start, start + 32)
        x = torch.zeros(m, 32, dtype=torch.bfloat16)
        x[:, 0] = 1
        values += call(x, codes)[m // 2].tolist()
    return values


def same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def print_codes() -> list[float]:
    tables = {m: decoded(m) for m in ROWS}
    first = tables[1]
    alike = all(all(map(same, first, other)) for other in tables.values())
    print(f"The same 256 values for M in {ROWS}: {'yes' if alike else 'NO'}.")
    wrong = [c for c in range(256) if not same(first[c], E4M3FN[c])]
    print(f"{256 - len(wrong)} of 256 codes are exact, {len(wrong)} are not:")
    table(
        ("code", "E4M3FN", "the op", "ratio"),
        [
            (
                f"0x{c:02X}",
                f"{E4M3FN[c]:.6g}",
                f"{first[c]:.6g}",
                f"{first[c] / E4M3FN[c]:.4g}" if E4M3FN[c] else "–",
            )
            for c in wrong
        ],
    )
    return first


# ------------------------------------------------------------------ arithmetic

NORMAL = torch.tensor([c for c in range(256) if 8 <= c & 0x7F < 0x7F])


def operands(m, n, k, seed=0):
    """Activations and codes that decode right: no subnormals, no zero, no NaN."""
    g = torch.Generator().manual_seed(seed)
    codes = NORMAL[torch.randint(len(NORMAL), (n, k), generator=g)].to(torch.uint8)
    return torch.randn(m, k, generator=g).bfloat16(), codes


def after_block(x, codes, scale):
    """VDPBF16PS over each 128 k from zero, then C = fma(sum, scale, C); bits of bfloat16."""
    w, wide = codes.view(FLOAT8).float().numpy(), x.float().numpy()
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, w.shape[1], 128):
        inner = np.zeros_like(total)
        for k in range(start, min(start + 128, w.shape[1]), 2):
            pair = (*total.shape, 2)
            a = np.broadcast_to(wide[:, None, k : k + 2], pair)
            inner = vdpbf16ps(inner, a, np.broadcast_to(w[None, :, k : k + 2], pair))
        total = fused(inner, np.broadcast_to(np.float32(scale), total.shape), total)
    return torch.from_numpy(total).bfloat16()


def share(a, b) -> str:
    return f"{float((a != b).double().mean()):.1%}"


def print_arithmetic() -> None:
    n, k, scale = 64, 512, 0.003
    rows = []
    for m in ROWS:
        x, codes = operands(m, n, k)
        y = call(x, codes, scale)
        w = codes.view(FLOAT8).double()
        single = torch.tensor(scale).double()
        exact = (x.double() @ (w * single).T).bfloat16()
        rounded = (w.float() * torch.tensor(scale)).bfloat16().double()
        of_rounded = (x.double() @ rounded.T).bfloat16()
        largest = (y.double() - x.double() @ (w * single).T).abs() / (
            x.double().abs() @ (w.abs() * single).T
        )
        rows.append(
            (
                m,
                share(y, exact),
                share(y, after_block(x, codes, scale)),
                share(y, of_rounded),
                f"{float(largest.max()):.1e}",
            )
        )
    print(
        f"N={n}, K={k}, scale {scale}, codes that decode right. Share of outputs that differ from"
    )
    table(
        (
            "M",
            "the exact result, rounded once",
            "VDPBF16PS per 128 k, then fma by the scale",
            "the exact result on weights rounded to bfloat16",
            "largest error / Σ\\|x\\|\\|w\\|",
        ),
        rows,
    )


def print_worked_example() -> None:
    codes = torch.full((32, 32), 0x38, dtype=torch.uint8)
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    x[:, 0] = 3
    rows = []
    for scale in (0.003, 0.0030517578125):
        few, many = (float(call(x[:m], codes, scale)[0, 0]) for m in (4, 5))
        rows.append((scale, f"{few:.9f}", f"{many:.9f}", f"{3 * scale:.9f}"))
    print("K=32, w = 1.0, x = (3, 0, ...):")
    table(("scale", "M=4", "M=5", "exact"), rows)


# ------------------------------------------------------------------ what it takes and refuses


def print_limits() -> None:
    x, codes = operands(8, 64, 64)

    def shaped(m, n, k):
        return lambda: list(call(*operands(m, n, k)).shape)

    def right(m, n, k):
        def body():
            a, b = operands(m, n, k)
            y, w = call(a, b), b.view(FLOAT8).double()
            bound = 2.0**-8 * (a.double().abs() @ w.abs().T)
            return f"{list(y.shape)}, right: {bool(((y - a.double() @ w.T).abs() <= bound).all())}"

        return body

    def strided():
        return f"right: {torch.equal(call(torch.cat([x, x], 1)[:, :64], codes), call(x, codes))}"

    bias = torch.ones(64)
    cases = [
        ("N=64, K=64, M=8", right(8, 64, 64)),
        ("K=48 (not a multiple of 32)", shaped(1, 64, 48)),
        ("K=160 (last block of 32), M=1", right(1, 64, 160)),
        ("K=160 (last block of 32), M=5", right(5, 64, 160)),
        ("N=16, M=1", shaped(1, 16, 64)),
        ("N=16, M=5", right(5, 16, 64)),
        ("N=48, M=1", shaped(1, 48, 64)),
        ("N=48, M=4", shaped(4, 48, 64)),
        ("N=48, M=5", right(5, 48, 64)),
        ("N=8 (fewer than 16 rows)", shaped(1, 8, 64)),
        ("N=40", shaped(1, 40, 64)),
        ("float32 activations", lambda: call(x.float(), codes).dtype),
        ("float16 activations, M=1", lambda: call(x[:1].half(), codes).dtype),
        ("float16 activations, M=8", lambda: call(x.half(), codes).dtype),
        ("bias in float32", lambda: call(x, codes, bias=bias).dtype),
        ("bias in bfloat16", lambda: call(x, codes, bias=bias.bfloat16()).dtype),
        ("x of another last stride", lambda: call(x.T.contiguous().T, codes).dtype),
        ("x with a row stride of 2K", strided),
        ("no rows", lambda: list(call(x[:0], codes).shape)),
        ("x without a row dimension", lambda: list(call(x[0], codes).shape)),
        ("block of 64 rows", lambda: list(call(x, codes, block=[64, 128]).shape)),
        ("block of 48 rows", lambda: list(call(x, codes, block=[48, 128]).shape)),
        ("block of 64 columns", lambda: list(call(x, codes, block=[64, 64]).shape)),
    ]  # fmt: skip
    table(("call", "outcome"), [(name, in_child(body)) for name, body in cases])


def print_special() -> None:
    _, codes = operands(1, 32, 64)
    rows = []
    for m in (4, 5):
        x = torch.zeros(m, 64, dtype=torch.bfloat16)
        zero = call(x, codes)
        tiny = call(torch.full_like(x, 1e-39), codes)
        x[0, 3], x[1, 3] = torch.inf, torch.nan
        spread = call(x, codes)
        rows.append(
            (
                m,
                bool((zero == 0).all()),
                bool((tiny == 0).all()),
                bool(spread[0].isinf().all()),
                bool(spread[1].isnan().all()),
                bool((spread[2:] == 0).all()),
            )
        )
    head = ("M", "rows of zeros give 0", "subnormal x counts as 0")
    table((*head, "inf arrives", "NaN arrives", "and in no other row"), rows)
    x, codes = operands(64, 64, 512)
    whole = call(x, codes, 0.003)
    rows = []
    for m in (1, 4, 5, 33):
        part = call(x[:m], codes, 0.003)
        rows.append((m, share(part, whole[:m])))
    table(("rows alone", "outputs that differ from the same rows among 64"), rows)


def main() -> None:
    torch.set_num_threads(1)
    support = W8A16.is_supported(VLLM)
    if not support:
        sys.exit(support.reason)
    print(f"{support.reason}; torch {torch.__version__}\n\n## Codes\n")
    print_codes()
    print("## Arithmetic\n")
    print_arithmetic()
    print_worked_example()
    print("## What it takes and refuses\n")
    print_limits()
    print("## Special values and batches\n")
    print_special()


if __name__ == "__main__":
    try:
        main()
    except ReconcileError as error:
        sys.exit(str(error))
