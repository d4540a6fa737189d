"""Faults in the gate, each beside a canary whose answer is known; and candidates that cheat."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from reconcile_mutants.common import OP, PLAIN, TORCH, weight, weight_of
from reconcile_mutants.kernels import (
    Racing,
    Workspace,
    bfloat16_partials,
    chopped,
    normalises_in_place,
)

import reconcile
from reconcile import Contract, check_linear, registry, replay
from reconcile import report as reporting
from reconcile.case import load_case
from reconcile.checking import linear as check
from reconcile.checking import probe_judge, probes
from reconcile.judging import judge as judging
from reconcile.linears import ReferenceLinear
from reconcile.report import Verdict
from reconcile.selftest import CanaryTrial, Mutant, OpTrial
from reconcile.tracing.trace import Pass, Trace

LOOSE = Contract(split_k=2, partials="bfloat16")
"""A bound so wide that a truncating store hides in it."""
FORM, SMALL = "fp8_e4m3_channel", (64, 128)


def replaced(place, name, new):
    """A context in which one name of the harness is something else."""
    return lambda: mock.patch.object(place, name, new)


def wrapped(place, name, change):
    """A context in which one function of the harness is wrapped."""
    return replaced(place, name, functools.partial(change, getattr(place, name)))


# ------------------------------------------------------------------ canaries


def linear(kernel, contract=PLAIN, **options):
    """`check_linear` on a small weight."""
    return lambda: check_linear(kernel, weight_of(FORM, SMALL), contract=contract, **options)


def all_nan(x, weight, bias=None):
    return torch.full((*x.shape[:-1], weight.shape[0]), math.nan, dtype=x.dtype)


def declines(x, weight, bias=None):
    raise NotImplementedError("not on this machine")


def one_column(x, weight, bias=None):
    return TORCH(x, weight)[..., :1]


def in_float32(x, weight, bias=None):
    return TORCH(x.float(), weight)


def unwritten_in_recycled_memory(x, weight, bias=None):
    """The memory that held the right output is freed and comes back as empty()."""
    shape, dtype = (*x.shape[:-1], weight.shape[0]), x.dtype
    TORCH(x, weight)
    y = torch.empty(shape, dtype=dtype)
    right = TORCH(x, weight)
    y[..., :-1] = right[..., :-1]
    return y


def zeros_behind_32(x, weight, bias=None):
    y = TORCH(x, weight)
    y[..., 32:] = 0
    return y


def without_scale(x, weight, bias=None):
    return replace(TORCH, numbers=lambda w: torch.ones_like(w.scales))(x, weight)


def traces(candidate, reference):
    """Two traces of one tap each, by hand."""

    def one(tensors):
        found = Trace()
        found.passes = [Pass("key", "chained", tensors, {}, {})] if tensors is not None else []
        return found

    return lambda: reconcile.compare(one(reference), one(candidate))


def required_but_absent():
    """The case asks for a kernel on an engine that is not here."""
    case = load_case(registry.embedded_case()).with_candidate(engine="cuda")
    return reconcile.session(case).run(levels=["op"], only="model.layers.0.mlp.*")


# ------------------------------------------------------------------ mutants


def canary(name, source, text, patch, sings, right, *, quick=True):
    """A gate with one fault, and a canary that must notice it."""
    return Mutant(
        id=f"gate/{name}",
        area="gate",
        source=source,
        patch=text,
        trial=CanaryTrial(canary=sings, right=right, patch=patch),
        op="",
        quick=quick,
    )


def without_nan(original, candidate, *rest, **options):
    return original(torch.nan_to_num(candidate), *rest, **options)


def nothing(*_, **__):
    return None


def nan_is_small(original, candidate, *rest, **options):
    """Comparisons written as ``if error > limit``."""
    found = original(candidate, *rest, **options)
    return replace(found, value=0.0) if math.isnan(found.value) else found


def where_candidate_is_not_zero(original, candidate, reference, magnitude, *rest, **options):
    kept = torch.where(candidate == 0, reference.to(candidate.dtype), candidate)
    return original(kept, reference, magnitude, *rest, **options)


def thousandfold(original, *arguments, **options):
    return 1000 * original(*arguments, **options)


def only_first(original, prepared, x, repeats, deterministic):
    return original(prepared, x, 1, deterministic)


def trusting(self, x, y):
    """The shape and dtype are taken on trust, numpy-like."""
    y = y.expand(*x.shape[:-1], self.n).to(self.output)
    return replay.Call(output=y.detach().clone())


def passing_verdict(self):
    bad = any(row.verdict is Verdict.FAIL for row in self.rows)
    return Verdict.FAIL if bad else Verdict.PASS


def all_of_rows(self):
    good = all(row.verdict is Verdict.PASS for row in self.rows)
    return Verdict.PASS if good else Verdict.FAIL


@contextmanager
def by_other_code():
    """A kernel that declines is replaced by plain torch, in silence."""
    original = replay.Prepared.call

    def call(self, x, *, poison=True):
        found = original(self, x, poison=poison)
        if found.output is not None:
            return found
        return replay.Call(output=TORCH(x, self.prepared))

    def owning(self, call, x, deterministic=True):
        return call

    with mock.patch.multiple(replay.Prepared, call=call, owning=owning):
        yield


GATES = [
    canary(
        "nan_dropped", "ROCm/MIOpen#1400: fmax drops NaN",
        "the statistics see NaN as zero", wrapped(judging, "error_stats", without_nan),
        linear(all_nan), (1, "nonfinite"),
    ),
    canary(
        "nan_is_below_every_limit", "ralna/RALFit#138: if (error > limit) fail",
        "a utilisation of NaN counts as 0, and non-finite values are not looked for",
        lambda: _both(
            replaced(judging, "_nonfinite", nothing), wrapped(judging, "utilisation", nan_is_small)
        ),
        linear(all_nan, probes=("bound",)), (1, "nonfinite"),
    ),
    canary(
        "empty_compare", "numpy/numpy#26410: all([]) is true",
        "a report passes if all of its rows do",
        lambda: mock.patch.object(reporting.Report, "verdict", property(all_of_rows)),
        traces(None, None), (2, ""),
    ),
    canary(
        "skip_is_pass", "ROCm/rocm-libraries#10897: a skip is counted as a pass",
        "a report passes unless a row fails",
        lambda: mock.patch.object(reporting.Report, "verdict", property(passing_verdict)),
        linear(declines), (2, "not_run"),
    ),
    canary(
        "required_skip_is_pass", "sgl-project/sglang#29593: a suite passes without its device",
        "a report passes unless a row fails",
        lambda: mock.patch.object(reporting.Report, "verdict", property(passing_verdict)),
        required_but_absent, (2, "not_run"),
    ),
    canary(
        "exit_code_thrown_away", "ROCm/aiter#5030: the mismatch is printed, the exit code is 0",
        "the exit code is always 0",
        lambda: mock.patch.object(reporting.Report, "exit_code", property(lambda _: 0)),
        linear(without_scale), (1, "over_limit"),
    ),
    canary(
        "silent_fallback", "openvinotoolkit/openvino#29811: another path runs in its place",
        "a kernel that declines is replaced by plain torch", by_other_code,
        linear(declines, probes=("bound",)), (2, "not_run"),
    ),
    canary(
        "limits_loosened", "Xilinx/mlir-air#1427: a threshold chosen to make the test green",
        "the error bound is a thousand times larger",
        wrapped(judging, "error_bound", thousandfold),
        linear(replace(TORCH, product=bfloat16_partials), probes=("bound",)), (1, "over_limit"),
    ),
    canary(
        "limits_too_tight", "sgl-project/sglang#35795: a tolerance that correct kernels exceed",
        "the yardstick S is half of what it is",
        lambda: mock.patch.object(
            ReferenceLinear, "magnitude", lambda self, x: self(x).abs() * 1e-6
        ),
        linear(TORCH), (0, ""),
    ),
    canary(
        "mask_from_the_candidate", "PTO-ISA/SuperNPUBench#75: diff[candidate != 0]",
        "outputs that are zero in the candidate are not compared",
        wrapped(probe_judge, "judge_bound", where_candidate_is_not_zero),
        linear(zeros_behind_32, probes=("bound",)), (1, "over_limit"),
    ),
    canary(
        "shapes_broadcast", "numpy/numpy#26410: (3, 1) against (1, 3)",
        "one column is spread over all", replaced(replay.Prepared, "check_output", trusting),
        linear(one_column), (1, "shape"),
    ),
    canary(
        "dtypes_promoted", "pytorch/pytorch#37294: values are promoted before they are compared",
        "another dtype is converted", replaced(replay.Prepared, "check_output", trusting),
        linear(in_float32), (1, "dtype"),
    ),
    canary(
        "memory_not_poisoned", "vllm-project/vllm-ascend#17009: recycled memory holds good values",
        "empty() is not filled",
        lambda: mock.patch.object(replay, "poisoned_memory", _as_it_is),
        linear(unwritten_in_recycled_memory), (1, "unwritten"),
    ),
    canary(
        "one_call_only", "deepseek-ai/DeepGEMM#343: one run in several fails",
        "a kernel is called once", wrapped(check, "repeated", only_first),
        linear(Racing()), (1, "unstable"),
    ),
    canary(
        "workspace_unseen", "IBM/vLLM-Hook#6: a buffer that the next call overwrites",
        "an output is compared before the next call",
        lambda: mock.patch.object(replay.Prepared, "owning", lambda self, call, x: call),
        linear(Workspace()), (1, "unstable"),
    ),
    canary(
        "changes_unseen", "GeeeekExplorer/nano-vllm#170: inputs are not hashed",
        "inputs are not compared after the call",
        lambda: mock.patch.object(replay, "bitwise_equal", return_value=True),
        linear(normalises_in_place), (1, "input_mutated"),
    ),
    canary(
        "leaning_unseen", "vllm-project/vllm#29810: a small drift in every layer",
        "errors that lean one way are not tested",
        replaced(judging, "is_biased", lambda *_: False),
        linear(replace(TORCH, store=chopped), LOOSE, probes=("bound",)),
        (1, "bias"),
    ),
    canary(
        "zeros_would_pass", "Xilinx/mlir-air#1427: atol 0.5 on outputs of 0.5",
        "limits that a candidate of zeros meets are kept",
        lambda: mock.patch.dict(reconcile.compare.__globals__, judge_fixed=_without_vacuous),
        traces({"x:out": torch.full((8, 8), 1e-6)}, {"x:out": torch.full((8, 8), 1.001e-6)}),
        (2, "vacuous"),
    ),
    canary(
        "probes_of_ones", "PTO-ISA/SuperNPUBench#161: a test on all-ones",
        "every random activation is 1",
        lambda: mock.patch.object(check, "random_rows", _ones),
        linear(replace(TORCH, product=lambda x, w: x.flip(1) @ w.T), probes=("bound",)),
        (1, "over_limit"),
    ),
]  # fmt: skip


@contextmanager
def _both(one, other):
    with one(), other():
        yield


@contextmanager
def _as_it_is():
    yield


def _without_vacuous(*arguments):
    finding = judging.judge_fixed(*arguments)
    vacuous = finding.reason is reporting.Reason.VACUOUS
    return replace(finding, reason=None, text="") if vacuous else finding


def _ones(weight, sizes, dtype, generator):
    for m in sizes:
        x = torch.ones(m, weight.shape[1], dtype=dtype)
        yield probes.Probe(name="bound", sees="ones", weight=weight, x=x)


# ------------------------------------------------------------------ candidates that cheat


def calls_the_reference(x, weight, bias=None):
    y = ReferenceLinear(weight, PLAIN, torch.float64)(x)
    return y.to(torch.float32).to(x.dtype)


def says_so(x, weight, bias=None):
    reconcile.fallback.fell_back("no instruction of this kind here")
    return TORCH(x, weight)


class NoLaunches:
    """It counts its launches, and none is made."""

    name = "counts.its.launches"
    contract = PLAIN
    engines = (reconcile.Engine("python"),)
    formats = None
    launches = 0

    def is_supported(self, engine):
        return reconcile.Support(True, "anywhere")

    def can_implement(self, spec):
        return reconcile.Support(True, "anything")

    def prepare(self, weight, engine):
        return weight

    def apply(self, x, prepared, bias=None):
        return TORCH(x, prepared, bias)


class Shared:
    """Looks at the tensors that it is judged by: the weight's scales become what it used."""

    def __call__(self, x, weight, bias=None):
        weight.scales.fill_(1.0)
        return TORCH(x, weight)


def ends_the_program(x, weight, bias=None):
    raise SystemExit(0)


def empty_answer(x, weight, bias=None):
    return torch.empty(0, weight.shape[0], dtype=x.dtype)


def other_dtype(x, weight, bias=None):
    return TORCH(x, weight).half()


def cheat(name, source, text, kernel, exit_code, reasons):
    return Mutant(
        id=f"gate/{name}",
        area="gate",
        source=source,
        patch=text,
        trial=OpTrial(faulty=kernel, clean=TORCH, weight=weight(FORM, SMALL), contract=PLAIN),
        op=OP,
        exit_code=exit_code,
        reasons=reasons,
        causes=(),
    )


CHEATS = [
    cheat("calls_the_reference", "openvinotoolkit/openvino#29811: the reference runs twice",
          "the kernel calls the reference", calls_the_reference, 1, ("raised",)),
    cheat("says_it_fell_back", "sgl-project/sglang#6404: a CPU without AMX",
          "the kernel says that it fell back", says_so, 2, ("fell_back",)),
    cheat("launches_nothing", "ROCm/rocm-libraries#10897: a test that runs nothing",
          "the kernel counts its launches, and there are none", NoLaunches(), 2, ("fell_back",)),
    cheat("declines_everything", "SauersML/gam#2422: early return with no assertion",
          "the kernel declines every call", declines, 2, ("not_run",)),
    cheat("shares_storage", "vllm-project/vllm#44630: a tensor that others read later",
          "the kernel writes into the scales that it was given", Shared(), 1,
          ("input_mutated",)),
    cheat("ends_the_program", "rigplane/rigplane-core#1774: a process that ends with 0",
          "the kernel ends the process", ends_the_program, 1, ("raised",)),
    cheat("empty_answer", "commandprompt/pgcolumnar#418: empty against something",
          "the kernel returns no rows", empty_answer, 1, ("shape",)),
    cheat("another_dtype", "meta-pytorch/tritonbench#1204: values agree, dtypes do not",
          "the kernel returns float16", other_dtype, 1, ("dtype",)),
    cheat("all_nan", "ROCm/aorta#390: a NaN in every place", "the kernel returns NaN", all_nan, 1,
          ("nonfinite",)),
]  # fmt: skip

MUTANTS = (*GATES, *CHEATS)
