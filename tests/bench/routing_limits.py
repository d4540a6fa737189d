"""How wide the limits behind a router are, with each model's own experts and with the reference's.

    python tests/bench/routing_limits.py

The table of docs/mxfp8.md: the accepted error at some taps of the case ``tiny-mxfp8-moe`` in its
free run, for prefill and decode.
"""

from contextlib import nullcontext
from unittest import mock

import reconcile
from reconcile.capture import passes
from reconcile.report import Row

TAPS = (
    "model.layers.0.mlp:out",
    "model.layers.1.self_attn:out.0",
    "model.layers.1.mlp:out",
    "model.norm:out",
    ":out.logits",
    "model.layers.1.mlp.gate:out.2",
)


def accepted(report: reconcile.Report) -> dict[tuple[str, str], tuple[str, float, str]]:
    """By tap and phase: the statistic, its largest accepted value, the reason of the row."""
    return {
        (row.tap, row.pass_.partition("-")[0]): gate(row)
        for row in report.rows
        if row.tap in TAPS and row.check in ("chained", "logits") and row.limits
    }


def gate(row: Row) -> tuple[str, float, str]:
    """The statistic of a row that says most, its limit, and why the row says nothing."""
    assert row.limits is not None
    bounds = row.limits.bounds
    name = next(n for n in ("nmse", "worst_row_nmse", "set_gap") if n in bounds)
    return name, bounds[name], row.reason or ""


def main() -> None:
    """Both runs, side by side."""
    with mock.patch.object(passes, "forced_routing", return_value=nullcontext()):
        before = accepted(reconcile.run("tiny-mxfp8-moe"))
    after = accepted(reconcile.run("tiny-mxfp8-moe"))
    for tap in TAPS:
        for phase in ("prefill", "decode"):
            (name, wide, why), (_, narrow, _) = before[tap, phase], after[tap, phase]
            print(f"{tap:32} {phase:8} {name:15} {wide:9.3g} -> {narrow:9.3g}  {why}")


if __name__ == "__main__":
    main()
