"""Tests that need Triton: ``make test-triton``, in an environment of its own.

They are outside of pytest's ``testpaths``: where Triton is not, nothing is skipped and nothing is
said to have run.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from reconcile.selftest.suite import open_package

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.exit("set TRITON_INTERPRET=1 before the program starts: make test-triton does", 2)
open_package(Path(__file__).resolve().parents[1] / "mutants")
sys.path.append(str(Path(__file__).resolve().parents[1] / "model"))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
