"""`reconcile explain --reproducer`: a script that needs the kernel alone and still fails."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reconcile
from reconcile import registry
from reconcile.cli import main
from reconcile.diagnosis.linear import Failure
from reconcile.diagnosis.reproducer import still_fails, write_reproducer
from reconcile.exceptions import ConfigError
from reconcile.replay import Prepared

KERNELS = Path(__file__).with_name("kernels.py").resolve()
TAP = "model.layers.0.mlp.down_proj:out"


def run_script(script):
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )


def test_explain_shows_the_cause_and_writes_a_reproducer(tmp_path, capsys):
    kernel = f"{KERNELS}:drops_last_k"
    where = ["--out", str(tmp_path / "run"), "--format", "json"]
    code = main(["run", "--kernel", kernel, "--only", TAP[:-4], "--level", "op", *where])
    assert code == 1
    capsys.readouterr()

    where = tmp_path / "small"
    assert main(["explain", str(tmp_path / "run"), TAP, "--reproducer", str(where)]) == 0

    said = capsys.readouterr().out
    assert "cause: k_tail_dropped explains 100.0% of the error" in said
    files = sorted(path.name for path in where.iterdir())
    assert files == ["reproduce.py", "reproduce.safetensors"]
    assert sum(path.stat().st_size for path in where.iterdir()) < 1 << 20
    done = run_script(where / "reproduce.py")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("over_limit: ")
    assert "the output is the one that was seen" in done.stdout


def failure_of(name, shape=(64, 192)):
    kernel = registry.kernel(f"{KERNELS}:{name}")
    checkpoint = reconcile.session()
    (plan,) = checkpoint.plans(checkpoint.case)
    weight = plan.checkpoint.weights["model.layers.0.self_attn.k_proj"]
    engine = kernel.engines[0]
    x = torch.randn(33, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    return Failure(
        weight=weight,
        contract=kernel.contract,
        x=x,
        y=x,
        prepare=lambda given: Prepared.attempt(kernel, engine, given, torch.bfloat16),
    )


def test_the_smallest_call_is_small_and_still_fails(tmp_path):
    script = write_reproducer(
        failure_of("high_bits_first"), f"{KERNELS}:high_bits_first", "python", tmp_path
    )
    assert "M=1, N=1, K=" in script.read_text().splitlines()[0]
    assert run_script(script).returncode == 1


def test_a_kernel_that_is_right_has_no_reproducer(tmp_path):
    assert still_fails(failure_of("clean")) is None
    with pytest.raises(ConfigError, match=r"inside its bound.*--snapshot FILE"):
        write_reproducer(failure_of("clean"), f"{KERNELS}:clean", "python", tmp_path)
