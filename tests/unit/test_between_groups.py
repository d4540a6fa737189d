"""One group of a batched linear that has an operand of another group."""

import pytest
import torch

from reconcile.diagnosis.between_groups import explain_one

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(5, 4, 32, generator=GENERATOR)
WEIGHT = torch.randn(4, 24, 32, generator=GENERATOR)
BIAS = torch.randn(4, 24, generator=GENERATOR)


def right():
    return torch.einsum("mgk,gnk->gmn", X, WEIGHT) + BIAS[:, None]


@pytest.mark.parametrize(
    ("operand", "result"),
    [
        ("weight", X[:, 3] @ WEIGHT[1].T + BIAS[3]),
        ("weight and bias", X[:, 3] @ WEIGHT[1].T + BIAS[1]),
        ("activations", X[:, 1] @ WEIGHT[3].T + BIAS[3]),
        ("result", X[:, 1] @ WEIGHT[1].T + BIAS[1]),
    ],
)
def test_the_operand_and_its_group(operand, result):
    y = right()
    y[3] = result
    (found,) = explain_one(y, X, WEIGHT, BIAS, 3)
    assert found.name == "group_shifted"
    assert found.parameters == {"group": 3, "source": 1, "operand": operand}
    assert found.explains > 0.9999


def test_another_fault_is_not_explained():
    y = right()
    y[3] *= 2
    assert explain_one(y, X, WEIGHT, BIAS, 3) == ()
    assert explain_one(right(), X, WEIGHT, None, 0) == ()
