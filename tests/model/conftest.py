import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Small matrices: a barrier costs more than it saves, and CI's cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
