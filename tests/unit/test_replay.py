"""A guarded kernel call: every way in which a kernel can misbehave, and what is said of it."""

import ctypes
import platform
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

import reconcile
from reconcile.exceptions import BuildError
from reconcile.kernel import PYTHON, FunctionKernel
from reconcile.replay import Call, KernelFailureError, KernelLinear, Prepared, poisoned_memory
from reconcile.report import Reason

N, K = 3, 4
WEIGHT = torch.arange(12.0).reshape(N, K).bfloat16() - 5
X = torch.tensor([[1.0, -2.0, 0.0, 4.0], [0.5, 0.0, -1.0, 3.0]], dtype=torch.bfloat16)


def right(x, weight, bias=None):
    return functional.linear(x, weight, bias)


def prepared(function, weight=None, bias=None, output=torch.bfloat16):
    return Prepared(
        name="layer",
        kernel=FunctionKernel("test", function),
        engine=PYTHON,
        prepared=WEIGHT.clone() if weight is None else weight,
        bias=bias,
        n=N,
        k=K,
        output=output,
    )


def raising(error):
    def kernel(x, weight):
        raise error

    return kernel


def returning(value):
    return lambda x, weight: value(right(x, weight))


# --------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("shape", [(K,), (1, K), (2, K), (2, 3, K)])
def test_a_right_kernel(poison, shape):
    x = torch.randn(shape).bfloat16()
    bias = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    call = prepared(right, bias=bias).call(x, poison=poison)
    assert call.reason is None
    assert torch.equal(call.output, functional.linear(x, WEIGHT, bias))


NO_OUTPUT = {
    "raises": (raising(ValueError("bad tile")), Reason.RAISED, "ValueError on x .2, 4.: bad tile"),
    "asserts": (raising(AssertionError()), Reason.RAISED, "raised AssertionError"),
    "declines": (
        raising(NotImplementedError("K odd")),
        Reason.NOT_RUN,
        "declined on x .2, 4.: K odd",
    ),
    "declines silently": (raising(NotImplementedError()), Reason.NOT_RUN, "NotImplementedError"),
    "transposed": (returning(lambda y: y.t()), Reason.SHAPE, r"expected y \[2, 3\].*got \[3, 2\]"),
    "flattened": (returning(lambda y: y.flatten()), Reason.SHAPE, r"got \[6\]"),
    "a row missing": (returning(lambda y: y[:1]), Reason.SHAPE, r"got \[1, 3\]"),
    "float32": (returning(lambda y: y.float()), Reason.DTYPE, "expected torch.bfloat16, got torch"),
    "float16": (returning(lambda y: y.half()), Reason.DTYPE, "got torch.float16"),
    "None": (returning(lambda _: None), Reason.DTYPE, "got NoneType"),
    "tuple": (returning(lambda y: (y, None)), Reason.DTYPE, "got tuple"),
    "numpy": (returning(lambda y: y.float().numpy()), Reason.DTYPE, "got ndarray"),
}


@pytest.mark.parametrize("case", NO_OUTPUT)
@pytest.mark.parametrize("poison", [False, True])
def test_no_usable_output(case, poison):
    kernel, reason, text = NO_OUTPUT[case]
    call = prepared(kernel).call(X, poison=poison)
    assert call.output is None
    assert call.reason is reason
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(call.text)


def test_an_interrupt_is_not_a_kernel_failure():
    with pytest.raises(KeyboardInterrupt):
        prepared(raising(KeyboardInterrupt())).call(X)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), StopIteration()])
def test_a_kernel_cannot_end_the_program(error):
    call = prepared(raising(error)).call(X)
    assert call.reason is Reason.RAISED
    assert type(error).__name__ in call.text


def test_a_source_that_does_not_build_says_nothing_about_the_kernel():
    call = prepared(raising(BuildError("no such compiler"))).call(X)
    assert (call.output, call.reason) == (None, Reason.NOT_RUN)


def test_a_message_that_cannot_be_shown():
    class MuteError(Exception):
        def __str__(self):
            raise ValueError

    assert "cannot be shown" in prepared(raising(MuteError())).call(X).text


@pytest.mark.parametrize("output", [X.to_sparse(), X.to("meta")], ids=["sparse", "meta"])
def test_an_output_without_values_is_refused(output):
    call = prepared(lambda *_: output).call(X)
    assert (call.output, call.reason) == (None, Reason.DTYPE)


# --------------------------------------------------------------------------- what else it changed


def native_write(x, value):
    raw = (ctypes.c_uint16 * x.numel()).from_address(x.data_ptr())
    raw[1] = value


WRITES = {
    "scaled": (lambda x: x.mul_(2), 6),
    "one element": (lambda x: x[0, 1].fill_(7), 1),
    "through the address": (lambda x: native_write(x, 0x7FC0), 1),
    "-0 for +0": (lambda x: x[0, 2].fill_(-0.0), 1),
    "same values": (lambda x: x.add_(0).copy_(x.clone()), 0),
    "same through the address": (lambda x: native_write(x, 0xC000), 0),
    "there and back": (lambda x: x.mul_(2).mul_(0.5), 0),
}


@pytest.mark.parametrize("case", WRITES)
def test_input_mutation(case):
    write, changed = WRITES[case]

    def kernel(x, weight):
        y = right(x, weight)
        write(x)
        return y

    x = X.clone()
    call = prepared(kernel).call(x)
    assert torch.equal(call.output, right(X, WEIGHT))
    assert torch.equal(x, X)  # the kernel had a copy
    assert call.reason is (Reason.INPUT_MUTATED if changed else None)
    assert (f"changed {changed} of 8 elements" in call.text) == bool(changed)


def test_a_float32_input_that_is_normalised_in_place():
    def kernel(x, weight):
        wide = x.float()  # the same tensor where x is float32
        wide.mul_(0.5)
        return functional.linear(wide, weight.float()).to(x.dtype)

    assert prepared(kernel).call(X).reason is None
    call = prepared(kernel, output=torch.float32).call(X.float())
    assert call.reason is Reason.INPUT_MUTATED


def test_a_non_contiguous_input_is_passed_as_it_is():
    seen = []

    def kernel(x, weight):
        seen.append(x.stride())
        return right(x, weight)

    x = X.t().contiguous().t()
    call = prepared(kernel).call(x)
    assert call.reason is None
    assert torch.equal(call.output, right(X, WEIGHT))
    assert seen == [x.stride()]


@dataclass
class Packed:
    codes: torch.Tensor
    scales: tuple


@dataclass(slots=True)
class PackedSlots:
    codes: torch.Tensor
    scales: tuple


class Plain:
    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales


HOLDERS = {
    "tuple": lambda codes, scales: (codes, (scales,)),
    "mapping": lambda codes, scales: {"codes": codes, "scales": [scales]},
    "dataclass": lambda codes, scales: Packed(codes, (scales,)),
    "slots": lambda codes, scales: PackedSlots(codes, (scales,)),
    "plain object": lambda codes, scales: Plain(codes, {"s": scales}),
}
CHANGES = {
    "codes": lambda codes, _: codes[1, 2].add_(1),
    "codes transposed": lambda codes, _: codes[:2, :2].copy_(codes[:2, :2].t().clone()),
    "scales": lambda _, scales: scales.mul_(1.5),
    "-0": lambda _, scales: scales[0].fill_(-0.0),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("change", CHANGES)
def test_prepared_weight_mutation(holder, change):
    codes, scales = torch.arange(12, dtype=torch.uint8).reshape(3, 4), torch.tensor([0.0, 1.0])

    def kernel(x, weight):
        CHANGES[change](codes, scales)
        return right(x, WEIGHT)

    call = prepared(kernel, HOLDERS[holder](codes, scales)).call(X)
    assert call.reason is Reason.INPUT_MUTATED
    assert "prepared weight" in call.text
    assert call.output is not None
    untouched = prepared(lambda x, _: right(x, WEIGHT), HOLDERS[holder](codes, scales))
    assert untouched.call(X).reason is None


def test_bias_mutation():
    def kernel(x, weight, bias):
        y = right(x, weight, bias)
        bias.zero_()
        return y

    call = prepared(kernel, bias=torch.ones(N).bfloat16()).call(X)
    assert call.reason is Reason.INPUT_MUTATED


# --------------------------------------------------------------------------- unwritten memory


def leaves_out(make):
    def kernel(x, weight):
        y = make(x)
        y[:, :-1] = right(x, weight)[:, :-1]
        return y

    return kernel


@pytest.fixture
def empty_op():
    """A custom op whose output is allocated by torch.empty and half written."""
    with torch.library._scoped_library("reconcile_tests", "DEF") as library:
        library.define("half(Tensor x, int n) -> Tensor")

        def half(x, n):
            y = torch.empty(x.shape[0], n, dtype=x.dtype)
            y[:, :-1] = 1
            return y

        library.impl("half", half, "CPU")
        yield torch.ops.reconcile_tests.half


def test_unwritten_elements_are_nan():
    for make in (
        lambda x: torch.empty(len(x), N, dtype=x.dtype),
        lambda x: x.new_empty(len(x), N),
        lambda x: torch.empty_like(right(x, WEIGHT)),
    ):
        call = prepared(leaves_out(make)).call(X)
        assert call.output[:, -1].isnan().all()
        assert torch.equal(call.output[:, :-1], right(X, WEIGHT)[:, :-1])


def test_unwritten_elements_of_a_custom_op_are_nan(empty_op):
    call = prepared(lambda x, _: empty_op(x, N)).call(X)
    assert call.output[:, -1].isnan().all()
    assert (call.output[:, :-1] == 1).all()


def test_recycled_memory_does_not_hold_the_right_old_value():
    kernel = prepared(leaves_out(lambda x: torch.empty(len(x), N, dtype=x.dtype)))
    for _ in range(20):
        right(X, WEIGHT).clone()
        found = kernel.call(X).output
        assert not torch.equal(found, right(X, WEIGHT))
        assert found[:, -1].isnan().all()


def test_integers_are_filled_too():
    with poisoned_memory():
        assert (torch.empty(5, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
        assert torch.empty(5, dtype=torch.float16).isnan().all()


# --------------------------------------------------------------------------- aliases


def test_a_reused_workspace_cannot_change_an_earlier_output():
    workspace = torch.zeros(2, N, dtype=torch.bfloat16)

    def kernel(x, weight):
        return workspace.copy_(right(x, weight))

    kernel = prepared(kernel)
    first = kernel.call(X).output
    second = kernel.call(2 * X).output
    assert torch.equal(first, right(X, WEIGHT))
    assert torch.equal(second, right(2 * X, WEIGHT))
    call = Call(output=first)
    assert kernel.owning(call, X).reason is Reason.UNSTABLE
    assert prepared(right).owning(call, X) is call


def test_in_a_model_a_reused_workspace_shows():
    """There the output is passed on as it is: what a later call does to it happens."""
    workspace = torch.zeros(2, N, dtype=torch.bfloat16)
    linear = KernelLinear(prepared(lambda x, weight: workspace.copy_(right(x, weight))))
    first = linear(X)
    linear(2 * X)
    assert torch.equal(first, right(2 * X, WEIGHT))


def square(function):
    return Prepared(
        name="square", kernel=FunctionKernel("test", function), engine=PYTHON,
        prepared=torch.eye(K).bfloat16(), bias=None, n=K, k=K, output=torch.bfloat16,
    )  # fmt: skip


def test_an_output_that_is_its_input():
    call = square(lambda x, _: x).call(X)
    assert torch.equal(call.output, X)
    assert call.output.data_ptr() != X.data_ptr()
    call = square(lambda x, _: x.mul_(2)).call(X)
    assert call.reason is Reason.INPUT_MUTATED
    assert torch.equal(call.output, 2 * X)


def test_an_expanded_output_becomes_a_plain_one():
    call = prepared(lambda *_: torch.ones(1, 1).bfloat16().expand(2, N)).call(X)
    call.output[0, 0] = 5
    assert call.output.sum() == 10


# --------------------------------------------------------------------------- global state


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_flags_are_restored(enabled, warn_only, fill, error):
    flags = torch.utils.deterministic

    def state():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            flags.fill_uninitialized_memory,
        )

    before = state()
    try:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        flags.fill_uninitialized_memory = fill
        expected, filters = state(), list(warnings.filters)
        try:
            with poisoned_memory():
                assert state()[0]
                assert flags.fill_uninitialized_memory
                if error:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert state() == expected
        assert list(warnings.filters) == filters
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        flags.fill_uninitialized_memory = before[2]


def test_nested_poisoning():
    with poisoned_memory():
        with poisoned_memory():
            assert torch.empty(3).isnan().all()
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_no_warnings_even_from_nondeterministic_operators():
    def kernel(x, weight):
        y = torch.zeros(2, N, dtype=x.dtype)
        y.put_(torch.tensor([0, 0]), torch.ones(2).bfloat16(), accumulate=False)
        torch.kthvalue(y.float(), 1)
        return right(x, weight)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert prepared(kernel).call(X).reason is None
        KernelLinear(prepared(kernel))(X)
    assert [str(w.message) for w in caught] == []


def test_a_kernel_s_own_warnings_are_not_swallowed():
    def kernel(x, weight):
        warnings.warn("slow path", UserWarning, stacklevel=1)
        return right(x, weight)

    with pytest.warns(UserWarning, match="slow path"):
        prepared(kernel).call(X)


# --------------------------------------------------------------------------- in a model


def test_kernel_linear():
    linear = KernelLinear(prepared(right))
    assert torch.equal(linear(X), right(X, WEIGHT))
    assert torch.equal(linear(X[0]), right(X[0], WEIGHT))
    assert linear.calls == 2
    assert list(linear.parameters()) == []


@pytest.mark.parametrize("case", NO_OUTPUT)
def test_kernel_linear_never_falls_back(case):
    kernel, reason, _ = NO_OUTPUT[case]
    linear = KernelLinear(prepared(kernel))
    with pytest.raises(KernelFailureError, match="layer: ") as caught:
        linear(X)
    assert caught.value.module == "layer"
    assert caught.value.call.reason is reason
    assert caught.value.call.output is None
    assert linear.calls == 0
    assert not torch.are_deterministic_algorithms_enabled()


def test_kernel_linear_passes_x_itself():
    def kernel(x, weight):
        y = right(x, weight)
        x.zero_()
        return y

    x = X.clone()
    KernelLinear(prepared(kernel))(x)
    assert (x == 0).all()


def test_kernel_linear_shows_unwritten_elements():
    y = KernelLinear(prepared(leaves_out(lambda x: torch.empty(len(x), N, dtype=x.dtype))))(X)
    assert y[:, -1].isnan().all()


class Sub(torch.Tensor):
    """A tensor with a class of its own."""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda y: y.as_subclass(Sub), "got Sub, a subclass"),
        (lambda y: torch.nn.Parameter(y), "got Parameter, a subclass"),
    ],
)
def test_a_subclass_of_tensor_is_refused_not_compared(answer, said):
    weight = torch.randn(32, 64)
    report = reconcile.check_linear(
        lambda x, weight, bias=None: answer(x @ weight.T), weight, probes=["bound"]
    )
    assert report.exit_code == 1
    assert said in report.explain()


def test_a_changed_default_dtype_is_a_failure_and_is_undone():
    def kernel(x, weight, bias=None):
        torch.set_default_dtype(torch.float64)
        return x @ weight.T

    report = reconcile.check_linear(kernel, torch.randn(32, 64), probes=["bound"])
    assert torch.get_default_dtype() is torch.float32
    assert report.exit_code == 1
    assert "default dtype from torch.float32 to torch.float64" in report.explain()


@pytest.mark.parametrize(
    ("where", "said"),
    [("apply", "changed what the processor does with subnormals"), ("prepare", "prepare changed")],
)
def test_a_kernel_that_has_subnormals_flushed_cannot_hide_in_the_reference(where, said):
    """The reference would flush them too, and agree."""

    def kernel(x, weight, bias=None):
        if where == "apply":
            torch.set_flush_denormal(True)
        tiny = torch.finfo(torch.bfloat16).tiny
        y = torch.where(x.abs() < tiny, 0, x).float() @ weight.float().T
        return torch.where(y.abs() < tiny, 0, y).to(x.dtype)

    def prepare(weight):
        torch.set_flush_denormal(where == "prepare")
        return weight

    kernel.prepare = prepare
    report = reconcile.check_linear(kernel, torch.randn(32, 64).bfloat16(), probes=["special"])
    assert report.exit_code == 1
    assert said in report.explain()
    assert torch.tensor(2.0**-126) * 0.5 > 0


def test_what_was_flushed_before_does_not_reach_the_reference():
    """As a library that was compiled for speed leaves it."""

    def kernel(x, weight, bias=None):
        tiny = torch.finfo(torch.bfloat16).tiny
        y = torch.where(x.abs() < tiny, 0, x).float() @ weight.float().T
        return torch.where(y.abs() < tiny, 0, y).to(x.dtype)

    weight = torch.randn(32, 64).bfloat16()
    torch.set_flush_denormal(True)
    try:
        report = reconcile.check_linear(kernel, weight, probes=["special"])
        assert torch.tensor(2.0**-126) * 0.5 == 0
    finally:
        torch.set_flush_denormal(False)
    assert report.exit_code == 1


def test_every_output_of_a_kernel_that_may_differ_is_judged():
    calls = []

    def kernel(x, weight, bias=None):
        calls.append(0)
        return (x.float() @ weight.float().T * (2 if len(calls) % 3 == 0 else 1)).to(x.dtype)

    contract = reconcile.Contract(deterministic=False)
    weight = torch.randn(32, 64).bfloat16()
    report = reconcile.check_linear(kernel, weight, contract=contract, probes=["bound"])
    assert report.exit_code == 1
    assert {row.reason for row in report.failures()} == {Reason.OVER_LIMIT}


@pytest.mark.parametrize("mode", [0xC00, 0x400, 0x800])
def test_a_kernel_that_leaves_another_rounding_is_found(mode):
    """Toward zero, down and up, as fesetround of x86 has them."""
    if platform.machine() != "x86_64":
        mode = {0xC00: 0xC00000, 0x400: 0x800000, 0x800: 0x400000}[mode]

    def kernel(x, weight, bias=None):
        y = (x.float() @ weight.float().T).to(x.dtype)
        ctypes.CDLL(None).fesetround(mode)
        return y

    report = reconcile.check_linear(kernel, torch.randn(32, 64).bfloat16(), probes=["bound"])
    assert report.exit_code == 1
    assert "changed how the processor rounds from to nearest" in report.explain()
    assert ctypes.CDLL(None).fegetround() == 0
