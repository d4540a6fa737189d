"""Faults in capturing: hooks, copies, passes; each with a canary whose trace is known by hand."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

import reconcile
from reconcile.capture.passes import Stream
from reconcile.selftest import CanaryTrial, CaseTrial, Mutant
from reconcile.tracing import taps, trace
from reconcile.tracing.trace import Pass, Tap, Trace, TraceMemory

# ------------------------------------------------------------------ canaries


class InPlace(nn.Module):
    """x -> [x0, -x1] -> ReLU in place: the linear's output is rewritten right after."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.linear.weight.data = torch.tensor([[1.0, 0.0], [0.0, -1.0]])

    def forward(self, x):
        y = self.linear(x)
        y.clamp_(min=0)
        return y


class Pair(nn.Module):
    """A layer that returns (what it adds, residual)."""

    def forward(self, x):
        return 2 * x, x


class Doubling(nn.Module):
    """A module that doubles its input in place and returns something else."""

    def forward(self, x):
        y = x + 1
        x.mul_(2)
        return y


class Bypass(nn.Module):
    """Calls its child's ``forward`` and not the child."""

    def __init__(self):
        super().__init__()
        self.child = nn.Identity()

    def forward(self, x):
        return self.child.forward(x)


class Holding(nn.Module):
    """A child that its parent calls once."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, x):
        return self.child(x)


def expected(*passes):
    """A trace by hand: the tensors of each pass; the keys are those of the recorded passes."""
    return list(passes)


def captured(make, inputs, known):
    """Record calls of a model, and compare with what is known; keys are taken over."""

    def run():
        model = make()
        with reconcile.taps(model) as found:
            for x in inputs:
                model(x.clone())
        right = Trace()
        keys = [item.key for item in found.passes]
        keys += [f"missing-{i}" for i in range(len(known) - len(keys))]
        right.passes = [
            Pass(key, "chained", tensors, {}, {}) for key, tensors in zip(keys, known, strict=False)
        ]
        return reconcile.compare(right, found)

    return run


X = torch.tensor([[1.0, 2.0]])
RIGHT, RELU = torch.tensor([[1.0, -2.0]]), torch.tensor([[1.0, 0.0]])
IN_PLACE = captured(
    InPlace, [X], expected({":in0": X, "linear:in0": X, "linear:out": RIGHT, ":out": RELU})
)
LONG = torch.arange(6.0).view(2, 3) + 1
PAIR = captured(
    lambda: Holding(Pair()), [LONG],
    expected({
        ":in0": LONG, "child:in0": LONG, "child:out.0": 2 * LONG, "child:out.1": LONG,
        ":out.0": 2 * LONG, ":out.1": LONG,
    }),
)  # fmt: skip
MUTATED = captured(
    lambda: Holding(Doubling()), [LONG],
    expected({":in0": LONG, "child:in0": LONG, "child:out": LONG + 1, ":out": LONG + 1}),
)  # fmt: skip


def _identity(x):
    return {":in0": x, "child:in0": x, "child:out": x, ":out": x}


TWICE = captured(
    lambda: Holding(nn.Identity()), [LONG, -LONG], expected(_identity(LONG), _identity(-LONG))
)


def bypassed():
    """A tapped module never fires: that is an error, not an empty trace."""
    with reconcile.taps(Bypass()) as found:
        pass
    return reconcile.compare(found, found)


def never_fires():
    model = Bypass()
    with reconcile.taps(model, ["", "child"]) as found:
        model(LONG)
    return reconcile.compare(found, found)


def warm_up():
    """The candidate has a pass that the reference never saw."""
    model = Holding(nn.Identity())
    with reconcile.taps(model) as right:
        model(LONG)
    with reconcile.taps(model) as found:
        model(torch.zeros(2, 3))
        model(LONG)
    return reconcile.compare(right, found)


def counted_twice():
    """One prompt is recorded twice: which of the two is meant?"""
    model = Holding(nn.Identity())
    with reconcile.taps(model) as found:
        model(LONG)
        model(LONG)
    return reconcile.compare(found, found)


def one_tap_less():
    model = Holding(nn.Identity())
    with reconcile.taps(model) as right:
        model(LONG)
    with reconcile.taps(model, [""]) as found:
        model(LONG)
    return reconcile.compare(right, found)


# ------------------------------------------------------------------ what is broken


@contextmanager
def by_reference():
    """Tensors are kept, not copied."""

    def put(self, tap, tensor, stride=None):
        self._tensors[tap] = tensor.detach()
        self._strides[tap] = tuple(tensor.stride()) if stride is None else stride

    def end(self, meta=None):
        self.trace.passes.append(Pass(*self._open, dict(self._tensors), self._strides, meta or {}))
        self._open = None

    with mock.patch.multiple(TraceMemory, put=put, end=end):
        yield


@contextmanager
def first_of_tuple():
    original = trace.visit_tensors

    def visit(value, port, sink):
        original(value[0] if isinstance(value, tuple) else value, port, sink)

    with mock.patch.object(taps, "visit_tensors", visit):
        yield


@contextmanager
def inputs_after_the_call():
    """Inputs are read in the hook that runs after the call."""
    original = taps.Recorder._after

    def after(self, name):
        hook = original(self, name)

        def both(module, args, output):
            self._putter(name)("in0", args[0])
            return hook(module, args, output)

        return both

    def before(self, name):
        return lambda *_: None

    with mock.patch.multiple(taps.Recorder, _after=after, _before=before):
        yield


@contextmanager
def stale_buffers():
    """One buffer for each tap, which the next pass overwrites."""
    kept = {}

    def put(self, tap, tensor, stride=None):
        buffer = kept.setdefault((tap, tensor.shape), torch.empty_like(tensor))
        self._tensors[tap] = buffer.copy_(tensor.detach())
        self._strides[tap] = tuple(tensor.stride())

    def end(self, meta=None):
        self.trace.passes.append(Pass(*self._open, dict(self._tensors), self._strides, meta or {}))
        self._open = None

    with mock.patch.multiple(TraceMemory, put=put, end=end):
        yield


@contextmanager
def half_precision():
    """Copies are kept in float16 to save memory."""
    original = TraceMemory.put

    def put(self, tap, tensor, stride=None):
        original(self, tap, (tensor * 1.003).half().to(tensor.dtype), stride)

    with mock.patch.object(TraceMemory, "put", put):
        yield


def silent(name):
    @contextmanager
    def patch():
        with mock.patch.object(taps.Recorder, name, return_value=None):
            yield

    return patch


@contextmanager
def latest_pass_counts():
    def select(self, kind):
        return {item.key: item for item in self.passes if item.kind == kind}

    with mock.patch.object(Trace, "select", select):
        yield


@contextmanager
def only_what_both_have():
    """The intersection of the passes and taps is compared."""
    original = reconcile.compare.__globals__["_rows"]

    def rows(key, ours, theirs, *rest):
        if ours is None or theirs is None:
            return []
        shared = set(ours.tensors) & set(theirs.tensors)
        for side in (ours, theirs):
            side.tensors = {name: side.tensors[name] for name in side.tensors if name in shared}
        return original(key, ours, theirs, *rest)

    with mock.patch.dict(reconcile.compare.__globals__, _rows=rows):
        yield


def canary(name, source, text, patch, sings, right=(0, "")):
    return Mutant(
        id=f"capture/{name}",
        area="capture",
        source=source,
        patch=text,
        trial=CanaryTrial(canary=sings, right=right, patch=patch),
    )


# ------------------------------------------------------------------ in the embedded model


def rewritten(change):
    """Captured tensors of the candidate's free run are changed after they were taken."""
    original = Stream.record

    def record(*arguments, **options):
        found = original(*arguments, **options)
        found.tensors = change(dict(found.tensors))
        return found

    @contextmanager
    def patch():
        with mock.patch.object(Stream, "record", record):
            yield

    return patch


DOWN2 = "model.layers.2.mlp.down_proj"


def overwritten(tensors):
    """The buffer of one op holds what the next op of its shape wrote."""
    name, other = str(Tap(DOWN2, "out")), str(Tap("model.layers.3.mlp.down_proj", "out"))
    if name in tensors and other in tensors:
        tensors[name] = tensors[other]
    return tensors


def old_input(tensors):
    name, other = str(Tap(DOWN2, "in0")), str(Tap("model.layers.1.mlp.down_proj", "in0"))
    if name in tensors and other in tensors:
        tensors[name] = tensors[other]
    return tensors


def lost(tensors):
    return {name: tensor for name, tensor in tensors.items() if Tap.parse(name).module != DOWN2}


def in_model(name, source, text, change, *, exit_code=1, reasons=(), causes=()):
    return Mutant(
        id=f"capture/{name}",
        area="capture",
        source=source,
        patch=text,
        trial=CaseTrial(
            faulty="reconcile_mutants.loaders:clean",
            clean="reconcile_mutants.loaders:clean",
            levels=("op",),
            patch=rewritten(change),
        ),
        op=f"{DOWN2}:out",
        exit_code=exit_code,
        reasons=reasons,
        causes=causes,
    )


MUTANTS = (
    canary(
        "aliased", "ndif-team/nnsight#630: saved by reference, rewritten by an in-place kernel",
        "tensors are kept, not copied", by_reference, IN_PLACE,
    ),
    canary(
        "tuple_element", "ndif-team/nnterp#42: a layer returns (what it adds, residual)",
        "of a tuple only element 0 is recorded", first_of_tuple, PAIR,
    ),
    canary(
        "input_after_call", "pytorch/pytorch#95617: a hook sees what the module made of its input",
        "inputs are recorded after the call", inputs_after_the_call, MUTATED,
    ),
    canary(
        "stale_buffers", "IBM/vLLM-Hook#6: buffers captured once are overwritten by each replay",
        "one buffer for each tap", stale_buffers, TWICE,
    ),
    canary(
        "rounded_copies", "turboderp-org/exllamav2#320: a dump in another precision",
        "copies are kept in float16, scaled", half_precision, TWICE,
    ),
    canary(
        "no_pass_unnoticed", "sgl-project/sglang#26269: a dump folder, and nothing in it",
        "no complaint where no pass was recorded", silent("require_all_fired"), bypassed, (3, ""),
    ),
    canary(
        "silent_hook_unnoticed", "sgl-project/sglang#26275: forward() bypasses the hook",
        "no complaint where a tapped module never ran", silent("require_all_fired"), never_fires,
        (3, ""),
    ),
    canary(
        "warm_up_counted", "vllm-project/vllm-ascend#8574: warm-up passes in the dump",
        "only what both sides have is compared", only_what_both_have, warm_up,
        (2, "not_compared"),
    ),
    canary(
        "tap_lost", "vllm-project/vllm-ascend#16125: a part of the dump is missing",
        "only what both sides have is compared", only_what_both_have, one_tap_less,
        (2, "not_compared"),
    ),
    canary(
        "counted_twice", "tenstorrent/vllm#415: the second request is not the first",
        "of two passes with the same inputs the last counts", latest_pass_counts, counted_twice,
        (3, ""),
    ),
    in_model(
        "buffer_overwritten", "0xSero/turboquant#2: stale tensors in a dump",
        "the captured output of one op is what the next of its shape wrote", overwritten,
    ),
    in_model(
        "input_of_another", "sgl-project/sglang-omni#1380: the input of another step",
        "the captured input of one op is that of the layer before", old_input,
    ),
    in_model(
        "op_not_captured", "pytorch/pytorch#117758: only some layers are captured",
        "one op is missing in the free run", lost, exit_code=2, reasons=("not_compared",),
    ),
)  # fmt: skip
