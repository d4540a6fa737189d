"""The route around the batched GEMM: when it is open, what it calls, and how it closes."""

import builtins
import itertools
import os
import sys
import threading
import warnings

import pytest
import torch

from reconcile.fallback import watching
from reconcile_kernels.aiter_bf16.route import FLAG, USE_AITER, Facts, Route, einsum, eligible

OPEN = Facts(flag=True, use_aiter=True, is_hip=True, is_gfx95=True)


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(5, 3, 16, generator=generator).bfloat16()
    return o, torch.randn(3, 8, 16, generator=generator).bfloat16()


def marked(x, w):
    """A kernel whose result is told from einsum's: twice as much."""
    return 2 * torch.einsum("gtd,grd->gtr", x, w)


class Breaks:
    """A kernel that fails, and counts how often it was asked."""

    def __init__(self, meet=None):
        self.asked = 0
        self.meet = meet

    def __call__(self, x, w):
        self.asked += 1
        if self.meet is not None:
            self.meet.wait()
        raise RuntimeError("hipErrorInvalidImage")


@pytest.mark.parametrize("facts", list(itertools.product((False, True), repeat=4)))
def test_eligibility(facts):
    """Sixteen combinations; only all four open the route, and what is missing is named."""
    assert eligible(*facts) == (facts == (True, True, True, True))
    named = [FLAG, USE_AITER, "ROCm", "gfx95"]
    missing = Facts(*facts).missing
    assert [name in missing for name in named] == [not fact for fact in facts]


@pytest.mark.parametrize(
    ("environment", "flag", "use_aiter"),
    [
        ({}, False, False),
        ({FLAG: "1"}, True, False),
        ({USE_AITER: "1"}, False, True),
        ({FLAG: "true", USE_AITER: "TRUE"}, True, True),
        ({FLAG: "0", USE_AITER: "false"}, False, False),
        ({FLAG: "", USE_AITER: "yes"}, False, False),
    ],
)
def test_switches_are_off_by_default(environment, flag, use_aiter):
    facts = Facts.here(environment)
    assert (facts.flag, facts.use_aiter) == (flag, use_aiter)
    if torch.version.hip is None:
        assert not facts.is_hip
        assert not facts.is_gfx95
        assert not Route(facts, lambda: marked).enabled


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("decode", [False, True])
def test_dispatch(operands, enabled, decode):
    route = Route(OPEN if enabled else Facts(False, True, True, True), lambda: marked)
    with watching(route) as watch:
        y = route(*operands, decode)
    kernel = enabled and decode
    expected = einsum(*operands) * (2 if kernel else 1)
    assert torch.equal(y, expected)
    assert y.is_contiguous() or not kernel
    assert route.calls == {"kernel" if kernel else "einsum": 1}
    assert bool(watch.fallback) == (decode and not enabled)  # prefill is einsum by design


def test_a_closed_route_imports_nothing():
    def load():
        raise AssertionError("imported")

    assert not Route(Facts(False, True, True, True), load).enabled


def test_the_kernel_is_imported_when_the_route_is_made():
    loads = []
    Route(OPEN, lambda: loads.append(1) or marked)
    assert loads == [1]


@pytest.mark.parametrize("error", [ImportError("no aiter"), OSError("no libamdhip64.so"), KeyError])
def test_an_import_that_fails_closes_the_route_with_one_warning(operands, error):
    def load():
        raise error

    with pytest.warns(RuntimeWarning, match="could not be imported") as seen:
        route = Route(OPEN, load)
    assert len(seen) == 1
    assert route.warned == 1
    with warnings.catch_warnings(), watching(route) as watch:
        warnings.simplefilter("error")
        assert torch.equal(route(*operands, True), einsum(*operands))
    assert "could not be imported" in watch.fallback


def test_a_call_that_fails_closes_the_route_with_one_warning(operands):
    kernel = Breaks()
    route = Route(OPEN, lambda: kernel)
    with pytest.warns(RuntimeWarning, match="hipErrorInvalidImage") as seen:
        outputs = [route(*operands, True) for _ in range(3)]
    assert len(seen) == 1
    assert kernel.asked == 1
    assert not route.enabled
    assert all(torch.equal(y, einsum(*operands)) for y in outputs)
    assert route.calls == {"einsum": 3}


def test_threads_that_fail_together_give_one_warning(operands):
    """All of them are inside the kernel when it fails."""
    count = 8
    kernel = Breaks(threading.Barrier(count))
    route = Route(OPEN, lambda: kernel)
    outputs, said = [], []

    def call():
        with watching(route) as watch:
            outputs.append(route(*operands, True))
        said.append(watch.fallback)

    threads = [threading.Thread(target=call) for _ in range(count)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert kernel.asked == count
    assert route.warned == 1
    assert len([w for w in seen if w.category is RuntimeWarning]) == 1
    assert all("hipErrorInvalidImage" in text for text in said)
    assert len(outputs) == count
    assert all(torch.equal(y, einsum(*operands)) for y in outputs)


def test_reset_forgets_the_failure(operands):
    kernels = [Breaks(), marked]
    route = Route(OPEN, lambda: kernels.pop(0))
    with pytest.warns(RuntimeWarning, match="failed"):
        route(*operands, True)
    route.reset()
    assert route.enabled
    assert (route.closed, route.warned, dict(route.calls)) == ("", 0, {})
    assert torch.equal(route(*operands, True), 2 * einsum(*operands))


@pytest.mark.parametrize("decode", [False, True])
def test_a_call_reads_no_environment_and_imports_nothing(operands, monkeypatch, decode):
    route = Route(OPEN, lambda: marked)
    route(*operands, decode)  # torch imports what einsum needs once

    def forbidden(*names, **_):
        raise AssertionError(f"the hot path asked for {names[:1]}")

    usual = builtins.__import__

    def imports(name, scope=None, *rest):
        """torch.einsum has an import statement of a module that is there; the route has none."""
        if name not in sys.modules or str((scope or {}).get("__name__")).startswith("reconcile"):
            raise AssertionError(f"the hot path imported {name}")
        return usual(name, scope, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "getenv", forbidden)
        patch.setattr(os._Environ, "__getitem__", forbidden)
        patch.setattr(os._Environ, "get", forbidden)
        patch.setattr(builtins, "__import__", imports)
        y = route(*operands, decode)
    assert y.shape == (5, 3, 8)


def test_the_kernel_gets_a_contiguous_operand_with_the_group_in_front(operands):
    seen = []

    def kernel(x, w):
        seen.append((tuple(x.shape), x.is_contiguous()))
        return marked(x, w)

    Route(OPEN, lambda: kernel)(*operands, True)
    assert seen == [((3, 5, 16), True)]
