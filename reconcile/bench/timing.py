"""Times of a kernel beside torch's dense linear, measured so that the ratio can be trusted.

In every round each path takes its turn, on weights that rotate through more memory than a cache
holds; a ratio is the median over the rounds of the ratio within a round. One CPU thread is timed
by the processor's time of this process, several by the clock, a GPU by its own events. Before it
is timed, the kernel's answer is compared with the dense one: a fast wrong kernel has no speed.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from reconcile.bench.crossover import EndToEnd, Measurement, Point, Setting
from reconcile.checking.probes import random_weight, synthetic
from reconcile.exceptions import ConfigError, KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec
from reconcile.model import Checkpoint
from reconcile.registry import formats
from reconcile.replay import tensors_of
from reconcile.rounding import round_to
from reconcile.weight import Format, QuantizedWeight

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of rows that are measured."""
ROTATED = 256 << 20
"""Bytes of weights that a path goes through before it meets one again."""
ROUNDS = 9
LARGEST_ERROR = 0.05
"""Norm of the difference to the dense result, relative to that; int8 activations are at 0.01."""

Call = Callable[[Tensor], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The two paths over rotating weights, and what a weight takes in each."""

    kernel: Call
    dense: Call
    packed_bytes: int
    dense_bytes: int


def measure(
    kernel: Kernel,
    engine: Engine,
    shape: tuple[int, int],
    dtype: torch.dtype,
    form: Format,
    rows: Iterable[int] = ROWS,
    rounds: int = ROUNDS,
) -> Measurement:
    """Times of ``kernel`` and of the dense path for each number of rows.

    Raises:
        KernelError: the engine is emulated (its time says nothing), the kernel does not implement
            the layer, or its answer is not that of the decoded weight.
    """
    n, k = shape
    if engine.execution == "emulated":
        raise KernelError(
            f"{kernel.name} on {engine.name} is emulated: its time says nothing about the hardware"
        )
    spec = LinearSpec(n=n, k=k, format=form.name, bias=False, activation_dtype=dtype)
    if not (support := kernel.can_implement(spec)):
        raise KernelError(support.reason)
    device = "cuda" if engine.name == "cuda" else "cpu"
    weight = _random(form, shape)
    paths = _paths(kernel, engine, weight, dtype, device)
    points = []
    with torch.no_grad():
        for m in rows:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(device)
            _compare(kernel, paths, x)
            points.append(_point(paths, x, rounds, device))
    return Measurement(
        kernel=kernel.name,
        engine=engine.name,
        setting=setting(n, k, dtype, device),
        points=tuple(points),
        packed_bytes=paths.packed_bytes,
        dense_bytes=paths.dense_bytes,
        format=form.name,
    )


def setting(n: int, k: int, dtype: torch.dtype, device: str) -> Setting:
    """The setting of this machine, with torch's present number of threads."""
    on_gpu = device == "cuda"
    return Setting(
        n=n,
        k=k,
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if on_gpu else processor(),
        threads=0 if on_gpu else torch.get_num_threads(),
    )


def processor() -> str:
    """The processor as it names itself, with torch's instruction set."""
    name = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        name = next(line.partition(":")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name.strip()} ({torch.backends.cpu.get_cpu_capability()})"


def weight_format(kernel: Kernel, name: str | None) -> Format:
    """The format by name, or the first that the kernel reads."""
    known = formats()
    wanted = name or next(iter(kernel.formats or known))
    if wanted not in known:
        raise ConfigError(f"unknown format {wanted!r}; known: {', '.join(known)}")
    return known[wanted]


def _random(form: Format, shape: tuple[int, int]) -> QuantizedWeight:
    scales = torch.ones(form.scale_shape(shape)).to(form.scale_dtypes[0])
    code = next(c for c in range(len(form.table)) if c not in form.invalid)
    like = synthetic(form, torch.full(shape, code, dtype=torch.uint8), scales)
    made = random_weight(like, shape, torch.Generator().manual_seed(0))
    if not isinstance(made, QuantizedWeight):
        raise KernelError(f"format {form.name} has no weight of shape {list(shape)}")
    return made


def _paths(
    kernel: Kernel, engine: Engine, weight: QuantizedWeight, dtype: torch.dtype, device: str
) -> Paths:
    dense = round_to(weight.dequantize(torch.float64), dtype).to(device)
    copies = [dense, *(dense.clone() for _ in range(-(-ROTATED // dense.nbytes) - 1))]
    first = kernel.prepare(weight, engine)
    packed_bytes = stored_bytes(first)
    count = -(-ROTATED // max(1, packed_bytes))
    prepared = [first, *(kernel.prepare(weight, engine) for _ in range(min(count, 64) - 1))]
    return Paths(
        kernel=_rotating(kernel.apply, prepared),
        dense=_rotating(linear, copies),
        packed_bytes=packed_bytes,
        dense_bytes=dense.nbytes,
    )


def stored_bytes(prepared: object) -> int:
    """Bytes of the tensors in a prepared weight; what lies within another one counts once."""
    places = sorted({(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors_of(prepared)})
    total, end = 0, 0
    for start, stop in places:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _rotating(call: Callable[[Tensor, Any], object], weights: list[Any]) -> Call:
    turn = 0

    def step(x: Tensor) -> object:
        nonlocal turn
        turn = (turn + 1) % len(weights)
        return call(x, weights[turn])

    return step


def _compare(kernel: Kernel, paths: Paths, x: Tensor) -> None:
    got, expected = paths.kernel(x), paths.dense(x)
    assert isinstance(expected, Tensor)
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        raise KernelError(f"{kernel.name}: no result of shape {list(expected.shape)}")
    exact = expected.double()
    error = float((got.double() - exact).norm() / exact.norm())
    if not error <= LARGEST_ERROR:
        raise KernelError(
            f"{kernel.name}: its result is {error:.2g} away from that of the decoded weight for "
            f"x {list(x.shape)}; it is not timed"
        )


def _point(paths: Paths, x: Tensor, rounds: int, device: str) -> Point:
    repeats = max(1, 16 // x.shape[0])
    found = [
        (_timed(paths.kernel, x, repeats, device), _timed(paths.dense, x, repeats, device))
        for _ in range(rounds + 1)
    ][1:]
    return Point(
        m=x.shape[0],
        kernel_ms=1e3 * statistics.median(kernel for kernel, _ in found),
        dense_ms=1e3 * statistics.median(dense for _, dense in found),
        ratio=statistics.median(dense / kernel for kernel, dense in found),
    )


def _timed(call: Call, x: Tensor, repeats: int, device: str) -> float:
    """Seconds of one call."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            call(x)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(repeats):
        call(x)
    return max(clock() - started, 1e-9) / repeats


# --------------------------------------------------------------------------- end to end


class _Linear(nn.Module):
    """A call in a linear's place."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def forward(self, x: Tensor) -> object:
        return self._call(x)


def end_to_end(
    kernel: Kernel, engine: Engine, checkpoint: Checkpoint, dtype: torch.dtype, ids: Sequence[int]
) -> tuple[EndToEnd, ...]:
    """Forward passes of a model over a prompt and over one token, both kinds in turn.

    A layer that the kernel does not implement is dense on both sides.
    """

    def with_kernel(_: str, weight: Any) -> nn.Module:  # noqa: ANN401
        spec = LinearSpec(
            n=weight.shape[0],
            k=weight.shape[1],
            format=weight.format.name,
            bias=weight.bias is not None,
            activation_dtype=dtype,
        )
        if not kernel.can_implement(spec):
            return with_torch(_, weight)
        prepared = kernel.prepare(weight, engine)
        return _Linear(lambda x: kernel.apply(x, prepared, weight.bias))

    def with_torch(_: str, weight: Any) -> nn.Module:  # noqa: ANN401
        dense = round_to(weight.dequantize(torch.float64), dtype)
        bias = None if weight.bias is None else weight.bias.to(dtype)
        return _Linear(lambda x: linear(x, dense, bias))

    models = [checkpoint.build(dtype, make) for make in (with_kernel, with_torch)]
    found = []
    with torch.no_grad():
        for count in (len(ids), 1):
            tokens = torch.tensor([list(ids)[:count]])
            times = [
                tuple(_timed(model, tokens, 1, "cpu") for model in models)
                for _ in range(ROUNDS + 1)
            ][1:]
            found.append(
                EndToEnd(
                    model=checkpoint.path.name,
                    tokens=count,
                    kernel_ms=1e3 * statistics.median(ours for ours, _ in times),
                    dense_ms=1e3 * statistics.median(theirs for _, theirs in times),
                    ratio=statistics.median(theirs / ours for ours, theirs in times),
                )
            )
    return tuple(found)
