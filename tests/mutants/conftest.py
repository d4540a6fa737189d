"""The files of the suite import each other as ``reconcile_mutants``; pytest collects only tests."""

from pathlib import Path

import pytest
import torch

from reconcile.selftest.suite import open_package

open_package(Path(__file__).parent)
collect_ignore_glob = ["[!t]*.py", "blind*/*"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
