"""Each fault of the second blind trial is one: by the bound, or by what plain torch makes of it."""

import functools
from pathlib import Path

import pytest
import torch

from reconcile.grouped import baseline_linear
from reconcile.judging.judge import judge_bound
from reconcile.linears import DenseWeight, ReferenceLinear
from reconcile.selftest import BatchedTrial, OpTrial
from reconcile.selftest.suite import load_suite
from reconcile.weight import QuantizedWeight

MUTANTS = {m.id.partition("/")[2]: m for m in load_suite(Path(__file__).parent / "blind2").mutants}
OPS = [name for name, m in MUTANTS.items() if isinstance(m.trial, OpTrial)]
BATCHED = [name for name, m in MUTANTS.items() if isinstance(m.trial, BatchedTrial)]
MODELS = [name for name in MUTANTS if name not in OPS + BATCHED]


def rows(k, dtype):
    """Random rows of growing size, one of one sign and one with NaN."""
    x = torch.randn(33, k, generator=torch.Generator().manual_seed(9))
    x *= torch.logspace(-1, 1, 33)[:, None]
    x[7] = x[7].abs() / 10 + 1
    x[20, 3] = torch.nan
    return x.to(dtype)


def called(kernel, x, weight):
    """The outputs of four calls."""
    if hasattr(kernel, "apply"):
        prepared = kernel.prepare(weight, kernel.engines[0])
        return [kernel.apply(x, prepared, weight.bias) for _ in range(4)]
    bias = () if getattr(weight, "bias", None) is None else (weight.bias,)
    return [kernel(x, weight, *bias) for _ in range(4)]


def over_bound(kernel, x, weight, contract):
    """Whether one of the calls leaves the bound, NaN on both sides being right."""
    plain = isinstance(weight, torch.Tensor)
    exact = ReferenceLinear(
        DenseWeight(tensor=weight) if plain else weight, contract, torch.float64
    )
    own = weight if plain else QuantizedWeight(**_fields(weight))
    found = [
        judge_bound(
            y, exact(x), exact.magnitude(x), x.shape[1], contract, "float64", nan_is_right=True
        )
        for y in called(kernel, x, own)
    ]
    return any(finding.reason is not None for finding in found)


def _fields(weight):
    """What a weight is made of, its scales copied."""
    made = {name: getattr(weight, name) for name in weight.__dataclass_fields__}
    return made | {"scales": weight.scales.clone()}


@pytest.mark.parametrize("name", OPS)
def test_op(name):
    trial = MUTANTS[name].trial
    weight = trial.weight()
    if (bias := trial.options.get("bias")) is not None:
        weight = QuantizedWeight(**_fields(weight) | {"bias": bias})
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else torch.bfloat16
    x = rows(weight.shape[1], dtype)
    assert not over_bound(trial.clean, x, weight, trial.contract)
    assert over_bound(trial.faulty, x, weight, trial.contract)


@pytest.mark.parametrize("name", BATCHED)
def test_batched(name):
    trial = MUTANTS[name].trial
    weight = trial.weight()
    x = torch.randn(5, 4, weight.shape[2], generator=torch.Generator().manual_seed(1)).bfloat16()
    view = x.transpose(0, 1)
    right, wrong = (kernel(view, weight).float() for kernel in (trial.clean, trial.faulty))
    assert torch.equal(right, torch.bmm(view.float(), weight.float().mT).bfloat16().float())
    assert (wrong - right).norm() > 0.1 * right.norm()


@functools.cache
def candidate(case):
    """Checkpoint of a case and its first prompt."""
    plan = models().session_of(case, 0)
    checkpoint = plan.checkpoint()
    return checkpoint, torch.tensor([[256, *b"the cat sat on the mat"]])


def models():
    """The module of the faults of models."""
    from reconcile_mutants.blind2 import models as found

    return found


def logits(case, change, decode):
    """Logarithms of the shares of each token, by plain torch in bfloat16."""
    checkpoint, ids = candidate(case)
    model = checkpoint.build(torch.bfloat16, lambda _, w: baseline_linear(w, torch.bfloat16))
    change(model)
    with torch.no_grad():
        first = model(input_ids=ids[:, : ids.shape[1] - decode], use_cache=bool(decode))
        out, cache = [first.logits], first.get("cache")
        for i in range(ids.shape[1] - decode, ids.shape[1]):
            step = model(input_ids=ids[:, i : i + 1], use_cache=True, cache=cache)
            out.append(step.logits)
    return torch.cat(out, 1).float().log_softmax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    trial = MUTANTS[name].trial
    change = trial.patch.args[0]
    right = logits(trial.case, lambda _: None, trial.decode)
    # bfloat16 itself is off by 0.2
    assert (logits(trial.case, change, trial.decode) - right).abs().max() > 1


@pytest.mark.parametrize("decode", [0, 3])
def test_own_attention_is_right_by_default(decode):
    """So what is wrong with it in a fault is the fault alone."""
    right = logits("tiny-ternary", lambda _: None, decode)
    assert torch.equal(logits("tiny-ternary", models().own_attention, decode), right)
