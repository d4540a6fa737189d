"""Layer-by-layer numerical reconciliation of quantised kernels against a PyTorch reference."""

from reconcile.case import Case, load_case
from reconcile.checking.batched import check_batched_linear
from reconcile.checking.linear import check_linear
from reconcile.compare import compare
from reconcile.contract import Contract
from reconcile.exceptions import ReconcileError
from reconcile.fallback import fell_back
from reconcile.grouped import GroupedWeight
from reconcile.kernel import Engine, Kernel, LinearSpec, Support
from reconcile.numbers.metrics import ErrorStats, error_stats
from reconcile.report import Limits, Reason, Report, Row, Verdict
from reconcile.session import Session, run
from reconcile.tracing.taps import taps
from reconcile.tracing.trace import Pass, Tap, Trace
from reconcile.weight import Format, Misreading, Packing, QuantizedWeight

session = Session
"""``reconcile.session(case)`` keeps the checkpoint and the reference loaded."""

__all__ = [
    "Case",
    "Contract",
    "Engine",
    "ErrorStats",
    "Format",
    "GroupedWeight",
    "Kernel",
    "Limits",
    "LinearSpec",
    "Misreading",
    "Packing",
    "Pass",
    "QuantizedWeight",
    "Reason",
    "ReconcileError",
    "Report",
    "Row",
    "Session",
    "Support",
    "Tap",
    "Trace",
    "Verdict",
    "check_batched_linear",
    "check_linear",
    "compare",
    "error_stats",
    "fell_back",
    "load_case",
    "run",
    "session",
    "taps",
]
