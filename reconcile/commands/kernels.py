"""``reconcile kernels`` and ``reconcile build``: what runs here, and compiling it."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from reconcile import registry
from reconcile.commands.common import command
from reconcile.contract import Contract
from reconcile.exceptions import KernelError
from reconcile.report import ExitCode


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the commands."""
    command(commands, "kernels", _kernels, "every kernel x engine: runs here or not, and why")
    build = command(commands, "build", _build, "compile native kernels ahead of time")
    build.add_argument("--kernel", help="only this kernel")


def _kernels(_: argparse.Namespace) -> int:
    for name in registry.kernel_names():
        kernel = registry.kernel(name)
        print(name)
        print(f"  formats   {', '.join(kernel.formats or ('any',))}")
        for label, said in _describe_contract(kernel.contract):
            print(f"  {label:<8}  {said}")
        for engine in kernel.engines:
            support = kernel.is_supported(engine)
            print(
                f"  {'runs here   ' if support else 'not run here'}  {engine.name} "
                f"({engine.implementation}, {engine.execution}, {engine.fidelity}): "
                f"{support.reason}"
            )
    return ExitCode.PASS


def _build(options: argparse.Namespace) -> int:
    """Compile what can be compiled here; 2 where nothing could be."""
    built = 0
    for name in [options.kernel] if options.kernel else registry.kernel_names():
        kernel = registry.kernel(name)
        build = getattr(kernel, "build", None)
        if build is None:
            print(f"{name}: has no native source")
            continue
        for engine in kernel.engines:
            try:
                print(f"{name} {engine.name}: {build(engine)}")
                built += 1
            except KernelError as error:
                print(f"{name} {engine.name}: not built: {error}")
    return ExitCode.PASS if built else ExitCode.INCONCLUSIVE


def _describe_contract(contract: Contract | None) -> list[tuple[str, str]]:
    """Lines (label, text): the contract, and what differs from it at fewer rows."""
    if contract is None:
        return [("contract", "none declared: judged against plain torch")]
    always = ("scale_applied", "accumulator", "output")
    lines = [("contract", _differences(contract, Contract(), always))]
    for largest, at_most in sorted(contract.by_batch, key=lambda pair: pair[0]):
        lines.append((f"M <= {largest}", _differences(at_most, contract) or "the same"))
    return lines


def _differences(contract: Contract, usual: Contract, always: Collection[str] = ()) -> str:
    """``field=value`` of the fields that differ from ``usual`` or are ``always`` said."""
    names = (field.name for field in fields(contract) if field.name != "by_batch")
    return ", ".join(
        f"{name}={_text(getattr(contract, name))}"
        for name in names
        if name in always or getattr(contract, name) != getattr(usual, name)
    )


def _text(value: object) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)
