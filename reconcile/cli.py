"""The command line. Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input, 4 internal error."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from reconcile import registry
from reconcile.capture_candidate import capture_candidate
from reconcile.capture_reference import capture_reference
from reconcile.case import Case, load_case
from reconcile.contract import Contract
from reconcile.exceptions import ConfigError, KernelError, ReconcileError, nearest
from reconcile.explain import explain
from reconcile.plan import Plan, Progress
from reconcile.report import ExitCode, Report
from reconcile.session import Session, compare_traces, override, run
from reconcile.threads import few_threads
from reconcile.trace import Trace, write_atomically

FORMATS = ("html", "json", "junit", "markdown")
"""What a run directory holds by default."""


class _Parser(argparse.ArgumentParser):
    """argparse whose usage errors are bad input (3), not its own exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(ExitCode.BAD_INPUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    options.command_line = shlex.join(["reconcile", *(arguments or sys.argv[1:])])
    try:
        code: int = options.handler(options)
    except ReconcileError as error:
        if options.debug:
            traceback.print_exc()
        print(f"reconcile: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print("reconcile: interrupted; nothing was reported", file=sys.stderr)
        return ExitCode.INTERNAL
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.INTERNAL
    except Exception as error:  # noqa: BLE001 - the last line of defence: exit code 4, not 1
        if options.debug:
            traceback.print_exc()
        print(
            f"reconcile: internal error: {type(error).__name__}: {error} (--debug shows where)",
            file=sys.stderr,
        )
        return ExitCode.INTERNAL
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="reconcile",
        description=(
            "Layer-by-layer numerical reconciliation of quantised kernels against a PyTorch "
            "reference."
        ),
        epilog="Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input, 4 internal error.",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_capture(commands)
    _add_compare(commands)
    _add_report(commands)
    _add_explain(commands)
    _command(commands, "kernels", _kernels, "every kernel x engine: runs here or not, and why")
    build = _command(commands, "build", _build, "compile native kernels ahead of time")
    build.add_argument("--kernel", help="only this kernel")
    return parser


def _command(
    commands: Any,  # noqa: ANN401 - argparse's private type
    name: str,
    handler: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    parser.set_defaults(handler=handler)
    return parser


def _add_run(commands: Any) -> None:  # noqa: ANN401
    parser = _command(commands, "run", _run, "reconcile a case; without CONFIG, the embedded one")
    parser.add_argument("config", nargs="?", help="case file (TOML)")
    _add_overrides(parser)
    parser.add_argument("--level", help="levels to run, e.g. op,module,model")
    parser.add_argument("--seed", type=_seed, help="seed of the random perturbations")
    parser.add_argument("--fail-fast", action="store_true", help="stop after the first bad level")
    _add_output(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", help="kernel in place of the case's own")
    parser.add_argument("--engine", help="engine, or hardware | emulated | vendor | auto")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only these modules")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=_path, help="run directory (default .reconcile/runs/...)")
    parser.add_argument("--format", default=",".join(FORMATS), help="html,json,junit,markdown")


def _add_capture(commands: Any) -> None:  # noqa: ANN401
    parser = _command(commands, "capture", _capture, "write the trace of one side")
    parser.add_argument("config", help="case file (TOML)")
    parser.add_argument("--side", required=True, choices=("reference", "candidate"))
    parser.add_argument("--inputs", type=Path, metavar="REF", help="the reference's trace")
    parser.add_argument("-o", "--output", type=_path, required=True, help="trace directory")
    parser.add_argument("--candidate", help="which candidate, where the case has several")
    _add_overrides(parser)


def _add_compare(commands: Any) -> None:  # noqa: ANN401
    parser = _command(commands, "compare", _compare, "report from traces; needs no kernel")
    parser.add_argument("reference", type=Path, metavar="REF")
    parser.add_argument("candidates", type=Path, nargs="+", metavar="CAND")
    _add_output(parser)


def _add_report(commands: Any) -> None:  # noqa: ANN401
    parser = _command(commands, "report", _report, "render a run's report again")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--format", default=",".join(FORMATS), help="html,json,junit,markdown")


def _add_explain(commands: Any) -> None:  # noqa: ANN401
    parser = _command(commands, "explain", _explain, "one tap of a run: limits, worst elements")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("tap", metavar="TAP", help="module path, with or without :port")


# --------------------------------------------------------------------------- commands


def _run(options: argparse.Namespace) -> int:
    _formats(options.format)
    case = _case(options)
    with _progress(case) as progress:
        report = run(
            case,
            only=options.only,
            fail_fast=options.fail_fast,
            command=options.command_line,
            progress=progress,
        )
    return _finish(report, options)


def _capture(options: argparse.Namespace) -> int:
    case = _case(options)
    if options.side == "candidate" and options.inputs is None:
        raise ConfigError("capture --side candidate needs --inputs REF, the reference's trace")
    if options.side == "reference" and options.inputs is not None:
        raise ConfigError("capture --side reference takes no --inputs")
    if (options.output / "manifest.json").exists():
        raise ConfigError(f"{options.output} already holds a trace; give another directory")
    plan = _one_plan(case, options)
    with _progress(case) as progress, few_threads(plan.size):
        if options.side == "reference":
            trace = capture_reference(plan, options.command_line, progress)
        else:
            reference = Trace.load(options.inputs)
            trace = capture_candidate(plan, reference, options.command_line, progress)
    trace.save(options.output)
    print(f"{options.side} trace of {len(trace.passes)} passes: {options.output}")
    if plan.engine is None and options.side == "candidate":
        print(f"the kernel did not run here: {plan.not_run}", file=sys.stderr)
        return ExitCode.INCONCLUSIVE
    return ExitCode.PASS


def _compare(options: argparse.Namespace) -> int:
    _formats(options.format)
    reference = Trace.load(options.reference)
    candidates = [Trace.load(path) for path in options.candidates]
    return _finish(compare_traces(reference, candidates, options.command_line), options)


def _report(options: argparse.Namespace) -> int:
    report = _load_report(options.run)
    directory = options.run.parent if options.run.is_file() else options.run
    written = _write(report, directory, _formats(options.format))
    print("\n".join(str(path) for path in written))
    return report.exit_code


def _explain(options: argparse.Namespace) -> int:
    report = _load_report(options.run)
    print(explain(report, options.tap))
    return ExitCode.PASS


def _kernels(_: argparse.Namespace) -> int:
    for name in registry.kernel_names():
        kernel = registry.kernel(name)
        print(name)
        print(f"  formats   {', '.join(kernel.formats or ('any',))}")
        print(f"  contract  {_describe_contract(kernel.contract)}")
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


# --------------------------------------------------------------------------- helpers


def _case(options: argparse.Namespace) -> Case:
    kernel = options.kernel
    if kernel and kernel.rpartition(":")[0].endswith(".py"):  # relative to here, not to the case
        place, _, attribute = kernel.rpartition(":")
        kernel = f"{Path(place).resolve()}:{attribute}"
    return override(
        load_case(options.config or registry.embedded_case()),
        kernel=kernel,
        engine=options.engine,
        levels=_words(options.level) if getattr(options, "level", None) is not None else None,
        seed=getattr(options, "seed", None),
    )


def _path(text: str) -> Path:
    """A path of an option; an empty one is a mistake, not the working directory."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("expected a path")
    return Path(text)


def _seed(text: str) -> int:
    """A seed that torch's generators take."""
    if not text.isdigit() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError("expected a number in [0, 2^31)")
    return int(text)


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _formats(text: str) -> tuple[str, ...]:
    chosen = tuple(_words(text))
    for part in chosen:
        if part not in FORMATS:
            raise ConfigError(f"--format {part!r}: {nearest(part, FORMATS)}")
    return chosen


def _one_plan(case: Case, options: argparse.Namespace) -> Plan:
    found = Session(case).plans(case, options.only, options.candidate)
    if len(found) > 1:
        names = ", ".join(plan.config.name for plan in found)
        raise ConfigError(f"the case has several candidates: choose one with --candidate: {names}")
    return found[0]


class _progress:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, case: Case) -> None:
        self._bar = tqdm(
            disable=not sys.stderr.isatty() or "CI" in os.environ,
            desc=case.case.name,
            unit="pass",
            leave=False,
        )

    def __enter__(self) -> Progress:
        return self._step

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _step(self, what: str) -> None:
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update()


def _finish(report: Report, options: argparse.Namespace) -> int:
    directory = options.out or _run_directory(report.case)
    written = _write(report, directory, _formats(options.format))
    if options.out is None:
        _point_latest(directory)
    render, _ = registry.reporter("terminal")
    main_file = next((path for path in written if path.suffix == ".html"), directory)
    try:
        print(f"{render(report).rstrip()}\nreport: {main_file}", flush=True)
    except BrokenPipeError:  # the reader has seen enough; the verdict stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return report.exit_code


def _run_directory(case: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", case).strip(".-") or "case"
    root = Path(".reconcile") / "runs"
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        directory = root / f"{stamp}-{safe}{suffix}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot write {directory}: {error}; give --out DIR") from error
        return directory
    raise ConfigError(f"{root} has too many runs of this second; give --out DIR")


def _point_latest(directory: Path) -> None:
    latest = directory.parent.parent / "latest"
    partial = latest.with_name(f".latest.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(directory.relative_to(latest.parent))
    partial.replace(latest)


def _write(report: Report, directory: Path, formats: Sequence[str]) -> list[Path]:
    """Render to files; ``report.json`` is always written, and last."""
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in [*(f for f in formats if f != "json"), "json"]:
            render, filename = registry.reporter(name)
            if filename is not None:
                path = directory / filename
                write_atomically(path, render(report))
                written.append(path)
    except OSError as error:
        raise ConfigError(f"cannot write the report to {directory}: {error}") from error
    return written


def _load_report(run_path: Path) -> Report:
    path = run_path if run_path.is_file() else run_path / "report.json"
    try:
        return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such report; give a run directory") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not a report of this version: {error}") from error


def _describe_contract(contract: Contract | None) -> str:
    if contract is None:
        return "none declared: judged against plain torch"
    plain = Contract()
    said = [
        f"{field.name}={getattr(contract, field.name)}"
        for field in fields(contract)
        if getattr(contract, field.name) != getattr(plain, field.name)
        or field.name in ("accumulator", "output", "scale_applied")
    ]
    return ", ".join(said)
