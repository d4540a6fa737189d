"""The smallest call of a kernel that still fails, as a script and a file of tensors.

The script needs the kernel and this package, no model and no checkpoint: it builds the weight,
calls the kernel once, and exits with 1 while the result is outside the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from reconcile.contract import Contract
from reconcile.diagnosis.linear import Failure
from reconcile.exceptions import ConfigError, FormatError
from reconcile.grouped import PlainWeight
from reconcile.judging.judge import judge_bound
from reconcile.linears import DenseWeight, ReferenceLinear
from reconcile.replay import Prepared
from reconcile.report import Verdict
from reconcile.tracing.trace import write_atomically

SCRIPT = "reproduce.py"
TENSORS = "reproduce.safetensors"
LARGEST = 1 << 20
"""Bytes that the tensors may take."""


def still_fails(failure: Failure) -> Failure | None:
    """The failure with what the kernel gives now, or None where it is inside its bound."""
    prepared = failure.prepare(failure.weight)
    if not isinstance(prepared, Prepared):
        return None
    output = prepared.call(failure.x).output
    if output is None:
        return None
    m, k = len(failure.x), failure.x.shape[-1]
    contract = failure.contract.at(m)
    reference = ReferenceLinear(failure.weight, failure.contract, torch.float64)
    y, size = reference(failure.x), reference.magnitude(failure.x)
    found = judge_bound(output.cpu(), y, size, k, contract, "float64", dense=False)
    failing = found.reason is not None and found.reason.verdict is Verdict.FAIL
    return replace(failure, y=output.cpu()) if failing else None


def shrunk(failure: Failure) -> Failure:
    """Rows, N and K halved, from either end, for as long as the call still fails."""
    current, smaller = failure, True
    while smaller:
        smaller = False
        for candidate in _halves(current):
            found = still_fails(candidate)
            if found is not None:
                current, smaller = found, True
                break
    return current


def _halves(failure: Failure) -> Iterator[Failure]:
    (n, k), m = failure.weight.shape, len(failure.x)
    if m > 1:
        for rows in (slice(0, m // 2), slice(m // 2, m)):
            yield replace(failure, x=failure.x[rows].contiguous())
    for dim, size in ((0, n), (1, k)):
        for start, end in ((0, size // 2), (size // 2, size)):
            part = crop(failure.weight, dim, start, end) if size > 1 else None
            if part is not None:
                x = failure.x if dim == 0 else failure.x[:, start:end].contiguous()
                yield replace(failure, weight=part, x=x)


def crop(weight: PlainWeight, dim: int, start: int, end: int) -> PlainWeight | None:
    """A part of a weight along N (0) or K (1), or None where its format has no such part."""
    n, k = weight.shape
    shape = (end - start, k) if dim == 0 else (n, end - start)
    bias = weight.bias if weight.bias is None or dim else weight.bias[start:end].clone()
    if isinstance(weight, DenseWeight):
        return replace(weight, tensor=_part(weight.tensor, dim, start, end), bias=bias)
    form, scales = weight.format, weight.scales
    if form.block is not None:
        step = form.block[dim]
        if start % step:
            return None
        scales = _part(scales, dim, start // step, -(-end // step))
    elif form.granularity == "channel" and dim == 0:
        scales = _part(scales, 0, start, end)
    try:
        codes = form.pack(_part(weight.unpacked(), dim, start, end))
        return replace(weight, codes=codes, scales=scales, shape=shape, bias=bias)
    except (FormatError, RuntimeError):
        return None


def _part(tensor: Tensor, dim: int, start: int, end: int) -> Tensor:
    return tensor.narrow(dim, start, end - start).clone().contiguous()


def write_reproducer(failure: Failure, kernel: str, engine: str, directory: Path) -> Path:
    """Shrink a failure and write it; the path of the script.

    Args:
        failure: [M, K] rows on which the kernel fails.
        kernel: how the kernel is named: an entry point, or a file by its absolute path.
        engine: name of the engine.
        directory: where the two files go.

    Raises:
        ConfigError: the kernel does not fail on these rows, or the smallest call is too large.
    """
    found = still_fails(failure)
    if found is None:
        raise ConfigError(
            "one call on random rows is inside its bound: the failure depends on the values, on "
            "earlier calls or on other modules. `reconcile explain --snapshot FILE` runs the "
            "failing call that the run kept (RUN/snapshots) again"
        )
    small = shrunk(found)
    tensors = _tensors(small)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > LARGEST:
        raise ConfigError(f"the smallest call that fails takes {size} bytes, over {LARGEST}")
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / TENSORS)
    script = directory / SCRIPT
    write_atomically(script, _script(small, kernel, engine))
    return script


def _tensors(failure: Failure) -> dict[str, Tensor]:
    weight = failure.weight
    found = {"x": failure.x, "seen": failure.y}
    if isinstance(weight, DenseWeight):
        found["weight"] = weight.tensor
    else:
        found |= {"codes": weight.codes, "scales": weight.scales}
    if weight.bias is not None:
        found["bias"] = weight.bias
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def _script(failure: Failure, kernel: str, engine: str) -> str:
    weight = failure.weight
    if isinstance(weight, DenseWeight):
        built = 'DenseWeight(tensor=t["weight"], bias=t.get("bias"))'
    else:
        block = weight.format.block
        built = (
            "QuantizedWeight.from_tensors(\n"
            f'    t["codes"], t["scales"], format=registry.formats()[{weight.format.name!r}],\n'
            f'    shape={weight.shape!r}, block={block!r}, bias=t.get("bias"),\n'
            f"    name={weight.name!r},\n)"
        )
    m, (n, k) = len(failure.x), weight.shape
    return _TEMPLATE.format(
        m=m, n=n, k=k, kernel=kernel, engine=engine, weight=built, contract=_contract(failure)
    )


def _contract(failure: Failure) -> str:
    """The contract for this number of rows, as Python."""
    contract, default = failure.contract.at(len(failure.x)), Contract()
    changed: dict[str, Any] = {
        name: getattr(contract, name)
        for name in contract.__dataclass_fields__
        if name != "by_batch" and getattr(contract, name) != getattr(default, name)
    }
    return f"Contract({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


_TEMPLATE = '''"""One call of {kernel} that is outside its bound: M={m}, N={n}, K={k}."""

import sys
from pathlib import Path

from safetensors.torch import load_file

from reconcile import Contract, QuantizedWeight, registry
from reconcile.kernel import choose_engine
from reconcile.judging.judge import judge_bound
from reconcile.linears import DenseWeight, ReferenceLinear
from reconcile.replay import Prepared

import torch

t = load_file(Path(__file__).with_name("reproduce.safetensors"))
weight = {weight}
contract = {contract}
kernel = registry.kernel({kernel!r})
engine, why_not = choose_engine(kernel, {engine!r})
if engine is None:
    sys.exit(f"not run here: {{why_not}}")
prepared = Prepared.attempt(kernel, engine, weight, contract.output_dtype)
call = prepared.call(t["x"]) if isinstance(prepared, Prepared) else prepared
if call.output is None:
    sys.exit(f"the kernel gave nothing: {{call.text}}")
reference = ReferenceLinear(weight, contract, torch.float64)
y, size = reference(t["x"]), reference.magnitude(t["x"])
found = judge_bound(call.output.cpu(), y, size, {k}, contract, "float64", dense=False)
same = torch.equal(call.output.cpu().nan_to_num(), t["seen"].nan_to_num())
print(f"{{found.reason.value if found.reason else 'inside its bound'}}: {{found.text}}")
print(f"the output is {{'' if same else 'not '}}the one that was seen")
sys.exit(1 if found.reason is not None else 0)
'''
