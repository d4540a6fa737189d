"""A result that other code computed never looks like the kernel's."""

import threading

import torch

import reconcile
from reconcile.fallback import watching


def test_outside_of_a_run_it_is_silent():
    reconcile.fell_back("nobody listens")


def test_reasons_are_collected_once_each():
    with watching(object()) as watch:
        for reason in ("no GPU", "no GPU", "too small"):
            reconcile.fell_back(reason)
    assert watch.fallback == "no GPU; too small"


def test_watches_do_not_mix():
    with watching(object()) as outer:
        with watching(object()) as inner:
            reconcile.fell_back("inner")
        assert outer.fallback == ""
    assert inner.fallback == "inner"


def test_a_count_that_does_not_rise_is_a_fallback():
    class Counts:
        launches = 0

    with watching(Counts()) as watch:
        pass
    assert "count of launches" in watch.fallback
    kernel = Counts()
    with watching(kernel) as watch:
        kernel.launches += 1
    assert watch.fallback == ""


def test_a_kernel_that_says_nothing_and_counts_nothing_is_believed():
    with watching(object()) as watch:
        pass
    assert watch.fallback == ""


def test_another_thread_has_its_own_watch():
    with watching(object()) as watch:
        thread = threading.Thread(target=reconcile.fell_back, args=("elsewhere",))
        thread.start()
        thread.join()
    assert watch.fallback == ""


def plain(x, weight, bias=None):
    reconcile.fell_back("the library has no such kernel")
    return x @ weight.T


def test_check_linear_is_inconclusive_not_pass():
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    report = reconcile.check_linear(plain, weight, probes=["bound"], batch_sizes=[3])
    assert report.exit_code == 2
    assert {row.reason for row in report.rows} == {reconcile.Reason.FELL_BACK}
    assert "no such kernel" in report.rows[0].text
