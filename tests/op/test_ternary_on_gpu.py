"""The prepared GPU script where there is no GPU: it says so, and is not green."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "bench" / "ternary_on_gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run the script itself")
def test_without_a_gpu_it_is_not_run():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("not run: ternary_cuda.vectorised: no CUDA ")
