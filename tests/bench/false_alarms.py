"""How far correct kernels stray from plain torch: the evidence behind the baseline factors.

A correct kernel (float32 sums in another order) runs on random prompts of the Python
documentation; for each gated statistic the ratio to plain torch's own is collected.

    python tests/bench/false_alarms.py --runs 40 --prompts 4 --draws 4
    python tests/bench/false_alarms.py --runs 100 --prompts 1 --draws 1 \\
        --factors max_abs=2,worst_row_nmse=4,kl_max=4    # one draw of the same prompt
"""

import argparse
import json
import pydoc_data.topics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

import reconcile
from reconcile import registry
from reconcile.capture import reference as capture_reference
from reconcile.numbers.limits import BASELINE_FACTORS

KERNEL = f"{Path(__file__).parents[1] / 'model' / 'kernels.py'}:order_0"


def random_prompts(count, generator):
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()
    places = torch.randint(0, len(text) - 64, (count,), generator=generator)
    return [list(text[place : place + 64]) for place in places.tolist()]


def ratios(case, prompts):
    """(level, check, statistic) to the ratios of one run."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        report = reconcile.run(replace(case, model=replace(case.model, prompts=Path(file.name))))
    found = defaultdict(list)
    for row in report.rows:
        if row.limits and row.limits.kind == "baseline":
            for name, bound in row.limits.bounds.items():
                if name in BASELINE_FACTORS and bound > 0:
                    plain = bound / BASELINE_FACTORS[name]
                    found[row.level.value, row.check, name].append(row.stats[name] / plain)
    return found, report.verdict is not reconcile.Verdict.PASS


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--draws", type=int, default=capture_reference.DRAWS)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--factors", default="", help="other factors, name=number,...")
    options = parser.parse_args()
    for pair in filter(None, options.factors.split(",")):
        name, _, number = pair.partition("=")
        BASELINE_FACTORS[name] = float(number)
    capture_reference.DRAWS = options.draws
    generator = torch.Generator().manual_seed(options.seed)
    case = reconcile.load_case(registry.embedded_case()).with_candidate(kernel=KERNEL)
    case = replace(
        case,
        gate=replace(case.gate, require=()),
        levels=replace(case.levels, run=("module", "model")),
    )
    table, alarms = defaultdict(list), 0
    for _ in range(options.runs):
        found, alarm = ratios(case, random_prompts(options.prompts, generator))
        alarms += alarm
        for key, values in found.items():
            table[key] += values
    print(
        f"{options.runs} runs, {options.prompts} prompts, {options.draws} draws: "
        f"{alarms} runs not PASS"
    )
    print(
        f"{'level check statistic':<34} {'n':>6} {'median':>8} {'99 %':>8} {'max':>8} {'limit':>6}"
    )
    for key, values in table.items():
        ordered = sorted(values)
        middle, high = ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]
        print(f"{' '.join(key):<34} {len(ordered):>6} {middle:>8.2f} {high:>8.2f} "
              f"{ordered[-1]:>8.2f} {BASELINE_FACTORS[key[2]]:>6g}")  # fmt: skip


if __name__ == "__main__":
    main()
