"""The harness judged: faults with known answers, clean variants, and the gates that others use.

A mutant is one small fault, taken from a public bug report, in a real kernel, loader, reference,
capture or gate; the answer that a run must give is written beside it. The suite itself is
`tests/mutants` of a source checkout; this package holds what a suite is made of and how it runs.
"""

from reconcile.selftest.schema import Cause, Mutant, Seen, Trial, Variant
from reconcile.selftest.trials import BatchedTrial, CanaryTrial, CaseTrial, OpTrial

__all__ = [
    "BatchedTrial",
    "CanaryTrial",
    "CaseTrial",
    "Cause",
    "Mutant",
    "OpTrial",
    "Seen",
    "Trial",
    "Variant",
]
