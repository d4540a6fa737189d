"""From saving a kernel's source to the verdict on level op, as ``reconcile watch`` prints it.

    python tests/bench/watch_latency.py [EDITS]

Edits a Python kernel, then the CUDA C++ source of ``ternary_cuda.naive`` (compiled for the CPU) in
a copy of the package, and waits for the next verdict on the embedded case. The edit is a comment
with a new number, so that every save compiles anew.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import reconcile_kernels
from reconcile import registry

CASE = registry.embedded_case()
FIXTURES = CASE.parent.parent
PYTHON_KERNEL = """
import torch

def kernel(x, weight, bias=None):
    codes = torch.stack([(weight.codes >> s) & 3 for s in (0, 2, 4, 6)], -1).flatten(1)
    w = torch.tensor([0.0, 1.0, -1.0, 0.0])[codes.long()]
    return ((x.float() @ w.T) * weight.scales.float()).to(x.dtype)
"""


def case_text(kernel: str, extra: str = "") -> str:
    text = CASE.read_text()
    for name in ("tiny-lm-ternary", "tiny-lm-master", "prompts.json"):
        text = text.replace(f'"../{name}"', f'"{FIXTURES / name}"')
    return text.replace('"ternary_cuda.naive"', f'"{kernel}"') + extra


def measure(folder: Path, source: Path, edits: int, path: str) -> list[tuple[float, str]]:
    """Seconds from each save to the next line about level op, and that line."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RECONCILE_CACHE": str(folder / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "reconcile", "watch", "case.toml"],
        cwd=folder,
        env=environment | ({"PYTHONPATH": path} if path else {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None

    def line(words: str) -> str:
        for text in process.stdout:
            if words in text:
                return text.strip()
        raise SystemExit("the watch ended")

    try:
        print("  start:", line("(op;"))
        line("(model, module, op;")
        found = []
        original = source.read_text()
        comment = "#" if source.suffix == ".py" else "//"
        for number in range(edits):
            time.sleep(0.5)
            source.write_text(f"{original}\n{comment} edit {number}\n")
            saved = time.perf_counter()
            text = line("(op;")
            found.append((time.perf_counter() - saved, text))
            line("(model, module, op;")
        return found
    finally:
        process.kill()


def main() -> None:
    edits = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "k.py").write_text(PYTHON_KERNEL)
        contract = 'contract = { scale_applied = "after_sum" }\n'
        text = case_text("k.py:kernel").replace('engine = "auto"\n', f'engine = "auto"\n{contract}')
        (folder / "case.toml").write_text(text)
        show("a Python kernel", measure(folder, folder / "k.py", edits, ""))
        package = Path(reconcile_kernels.__file__).parent
        shutil.copytree(package, folder / "path" / "reconcile_kernels")
        (folder / "case.toml").write_text(case_text("ternary_cuda.naive"))
        source = folder / "path" / "reconcile_kernels" / "ternary_cuda" / "naive.cu"
        show("ternary_cuda/naive.cu", measure(folder, source, edits, str(folder / "path")))


def show(what: str, found: list[tuple[float, str]]) -> None:
    seconds = sorted(item for item, _ in found)
    print(
        f"{what}: median {statistics.median(seconds):.2f} s over {len(seconds)} edits, "
        f"{seconds[0]:.2f} to {seconds[-1]:.2f}; last: {found[-1][1]}"
    )


if __name__ == "__main__":
    main()
