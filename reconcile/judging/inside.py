"""The blocks inside a layer that runs on the reference's inputs: which of them is wrong first.

A layer gets the reference's inputs, its blocks what comes to them there. So a block counts as
wrong by itself only where what came to it is right; else what was wrong before it is the cause, or,
if all blocks before it are right, what the layer does between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from reconcile.judging.judge import Finding
from reconcile.report import Reason, Verdict
from reconcile.tracing.ports import output_tap, ports
from reconcile.tracing.taps import main_input
from reconcile.tracing.trace import Pass, Tap

Judge = Callable[[str, Pass, Pass], Finding]
"""A tap of the candidate's and the reference's pass to a finding."""
Pairs = Mapping[str, tuple[Pass, Pass]]


@dataclass(frozen=True, slots=True)
class InsideLayer:
    """What was found in one layer."""

    blocks: tuple[tuple[Tap, str, Finding], ...]
    """Tap, pass and finding of each block's output, in execution order."""
    whole: tuple[tuple[Tap, str, Finding], ...]
    """The same of the layer's own output."""


def judge_layer(
    layer: str, inner: Iterable[str], pairs: Pairs, failed: frozenset[str], judge: Judge
) -> InsideLayer:
    """A layer and its blocks, with failures that others explain ``blocked``.

    Args:
        layer: its module path.
        inner: its blocks in execution order.
        pairs: isolated passes by key, (candidate, reference).
        failed: modules that failed before, among them ops inside.
        judge: the verdict on one tap.
    """
    taps = {key: output_tap(layer, r) for key, (_, r) in pairs.items()}
    whole = {key: judge(taps[key], c, r) for key, (c, r) in pairs.items()}
    before = sorted(name for name in failed if name.startswith(f"{layer}."))
    found: list[tuple[Tap, str, Finding]] = []
    causes: dict[str, list[str]] = {key: [] for key in pairs}
    for block in inner:
        own = [name for name in before if name.startswith(f"{block}.")]
        for key, (c, r) in pairs.items():
            tap = _output(block, c, r)
            if tap is None:
                continue
            finding = judge(tap, c, r)
            if _fails(finding):
                arrives = not own and _arrives(block, c, r, judge)
                finding, cause = _explained(finding, arrives, own, causes[key], whole[key])
                whole[key] = _between(whole[key], block, cause)
                causes[key].append(block)
            causes[key] += own
            found.append((Tap.parse(tap), key, finding))
    named = dict.fromkeys(before)
    named |= {tap.module: None for tap, _, seen in found if _fails(seen)}
    layers = [(Tap.parse(taps[key]), key, blocked(whole[key], [*named])) for key in pairs]
    return InsideLayer(tuple(found), tuple(layers))


def _output(block: str, c: Pass, r: Pass) -> str | None:
    """The tap of a block's output on either side; None where it never ran."""
    for side in (r, c):
        if ports(side, block, "out"):
            return output_tap(block, side)
    return None


def _arrives(block: str, c: Pass, r: Pass, judge: Judge) -> bool:
    """Whether what comes to a block is right."""
    port = main_input(ports(r, block, "in"))
    return not port or not _fails(judge(str(Tap(block, port)), c, r))


BETWEEN = "what the layer computes between its blocks"


def _explained(
    finding: Finding, arrives: bool, own: list[str], before: list[str], whole: Finding
) -> tuple[Finding, str]:
    """A block's failure with what explains it, and the name of that; empty: itself."""
    if own:
        return blocked(finding, own), own[0]
    if arrives:
        return finding, ""
    if before:
        return blocked(finding, before), before[0]
    if _fails(whole):
        return blocked(finding, [BETWEEN]), BETWEEN
    text = f"what comes to it is wrong already, and every block before it right; {finding.text}"
    return replace(finding, text=text), ""


def _between(whole: Finding, block: str, cause: str) -> Finding:
    """The layer's finding, which says where between its blocks it goes wrong."""
    if cause != BETWEEN:
        return whole
    text = (
        f"the blocks before {block} are right, what comes to it is not: the fault is in "
        f"{BETWEEN}; {whole.text}"
    )
    return replace(whole, text=text)


def _fails(finding: Finding) -> bool:
    return finding.reason is not None and finding.reason.verdict is Verdict.FAIL


def blocked(finding: Finding, causes: list[str]) -> Finding:
    """A failure that a failing row below explains is not a second FAIL."""
    if not _fails(finding) or not causes:
        return finding
    more = f" and {len(causes) - 1} more" if len(causes) > 1 else ""
    text = f"explained by {causes[0]}{more}; {finding.text}"
    return replace(finding, reason=Reason.BLOCKED, text=text)
