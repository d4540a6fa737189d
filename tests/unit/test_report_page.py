"""What the page takes from a report: the numbers of each part, apart from their markup."""

import math

import pytest

from reconcile.evidence import Evidence, HeatMap, Histogram, Profile, Ranked, Ranking
from reconcile.report import (
    Coverage,
    Diagnosis,
    Level,
    Limits,
    Provenance,
    Reason,
    Report,
    Row,
    Verdict,
)
from reconcile_reports import depth, detail, figures, funnel_map, model_level, reproduce, story

OVER = {"verdict": Verdict.FAIL, "reason": Reason.OVER_LIMIT}
BLOCKED = {"verdict": Verdict.INCONCLUSIVE, "reason": Reason.BLOCKED}


def row(tap, level=Level.OP, check="isolated", used=0.1, **fields):
    fields.setdefault("verdict", Verdict.PASS)
    return Row(level=level, tap=tap, check=check, utilisation=used, **fields)


def report(*rows, **fields):
    fields.setdefault("coverage", Coverage(expected=1, compared=1))
    return Report(case="case", rows=rows, **fields)


def growth(values, **lists):
    stats = {"growth_share": 0.2, "rmse_by_layer": values}
    stats |= {f"{name}_by_layer": value for name, value in lists.items()}
    return row("model.layers.0:out", Level.MODEL, "growth", stats=stats)


# --------------------------------------------------------------------------- depth


def test_the_curve_is_relative_to_the_reference_and_of_the_worst_pass():
    found = depth.curve(
        report(
            growth([0.1, 0.1]),
            growth(
                [1.0, 3.0],
                local_rmse=[1.0, None],
                inherited_rmse=[0.0, 2.0],
                floor_rmse=[0.5, 0.5],
                allowed_rmse=[4.0, 4.0],
                gain=[1.0, 2.0],
                reference_rms=[2.0, 4.0],
            ),
        )
    )
    first, second = found.layers
    assert (first.accumulated, first.local, first.floor, first.allowed) == (0.5, 0.5, 0.25, 2.0)
    assert (second.accumulated, second.local, second.inherited) == (0.75, None, 0.5)
    assert (first.amplification, second.amplification) == (None, 3.0)
    assert second.gain == 2.0


def test_a_curve_of_nan_and_of_an_older_report():
    found = depth.curve(report(growth([math.nan, 1.0])))
    assert math.isnan(found.layers[0].accumulated)
    assert found.layers[1].local is None
    assert depth.curve(report(row("a:out"))) is None


def test_the_budget_of_an_op_is_that_of_its_worst_pass():
    rows = [
        row(
            "model.layers.0.a:out",
            check="chained",
            stats={"nmse": nmse, "propagated_nmse": 2 * nmse, "accumulated_nmse": 3 * nmse},
        )
        for nmse in (1e-6, 1e-4, 1e-5)
    ]
    (op,) = depth.ops(report(*rows, row("b:out", stats={"nmse": 1.0})))
    assert (op.local, op.propagated, op.accumulated) == (1e-4, 2e-4, pytest.approx(3e-4))


# --------------------------------------------------------------------------- funnel


def funnel_report():
    return report(
        row("model.layers.0.a:param.weight", Level.WEIGHT, "decode", None),
        row("model.layers.0.a:out", used=0.2),
        row("model.layers.0.a:out", check="chained", used=0.3),
        row("model.layers.1.a:out", used=7.0, **OVER),
        row("model.layers.1:out", Level.MODULE, text="explained by model.layers.1.a; x", **BLOCKED),
        row("lm_head:out", Level.MODULE, used=0.9),
        row(":out.logits", Level.MODEL, "kl", used=0.5),
    )


def test_the_funnel_has_a_line_for_each_layer_and_a_column_for_each_place():
    layers, others = funnel_map.maps(funnel_report())
    assert [(column.level, column.name) for column in layers.columns] == [
        ("weight", "weights"),
        ("op", "a"),
        ("module", "whole layer"),
    ]
    (_, first), (_, second) = layers.lines
    assert [cell and (cell.index, cell.text, cell.css) for cell in first] == [
        (0, "✓", "u0"),
        (2, "0.3", "u2"),
        None,
    ]
    assert [cell and (cell.index, cell.text, cell.css) for cell in second] == [
        None,
        (3, "✕ 7", "FAIL"),
        (3, "blocked", "blocked"),  # leads to its cause
    ]
    assert [name for name, _ in others.lines] == ["lm_head:out", "model"]


@pytest.mark.parametrize(
    ("used", "text"),
    [
        (0.0, "0"),
        (0.0004, "4e-4"),
        (0.123, "0.12"),
        (0.999, "0.999"),
        (1.0, "1"),
        (123456.0, "1.2e5"),
        (math.inf, "inf"),
    ],
)
def test_a_cell_is_short_and_never_rounds_to_its_limit(used, text):
    assert funnel_map._two(used) == text


def test_blocked_rows_know_their_cause():
    found = funnel_report()
    assert [story.cause_of(found, item) for item in found.rows].count(3) == 1
    assert story.cause_of(found, found.rows[4]) == 3


# --------------------------------------------------------------------------- details


def evidence(values=((0.1, 2.0), (0.0, 0.3)), **fields):
    return Evidence(
        heat=HeatMap(
            rows=2,
            columns=256,
            row_axis="m",
            column_axis="n",
            bin_rows=1,
            bin_columns=128,
            tile_rows=None,
            tile_columns=fields.get("tile"),
            unit="share of the bound",
            values=values,
        ),
        histogram=Histogram(
            seen=((-3, 5), (0, 1)), expected=((-4, 3),), seen_zero=2, expected_zero=5
        ),
        row_profile=Profile(axis="m", size=2, step=1, values=(0.0, 1.0)),
        column_profile=Profile(axis="n", size=256, step=128, values=(0.5, 1.0)),
    )


def test_rows_that_differ_in_their_pass_only_are_one_detail():
    rows = [row("a:out", used=3.0, pass_=p, **OVER) for p in ("p", "q", "r")]
    rows[1] = row("a:out", used=3.0, pass_="q", evidence=evidence(), **OVER)
    found = detail.details(report(*rows, row("b:out"), row("c:out", evidence=evidence())))
    assert [(item.index, item.alike) for item in found] == [(1, (0, 2)), (4, ())]
    assert detail.shown_at(found) == {1: 1, 0: 1, 2: 1, 4: 4}


def test_three_errors_are_kept_apart():
    stats = {"quantisation_sqnr_db": 5.9, "second_decoder_agrees": True}
    weight = row("m.a:param.weight", Level.WEIGHT, "decode", None, stats=stats)
    bad = row("m.a:out", used=3.0, stats={"max_abs": 0.5, "nmse": 0.1}, **OVER)
    (found,) = detail.details(report(weight, bad))
    said = dict(found.errors)
    assert [text for what, text in said.items() if what.startswith("quant")] == [
        "signal to noise 5.9 dB; no kernel's fault"
    ]
    assert "bit by bit the same" in " ".join(said.values())
    assert "max |c - r| 0.5" in " ".join(said.values())


def test_the_heat_map_says_in_words_where_it_is_over():
    found = figures.heat_figure(evidence(tile=64).heat)
    assert "1 of 4 bins hold an element over its bound" in found.words
    assert "in n 128-255" in found.words
    assert "in m 0-0" in found.words
    assert "every 64 along n" in found.words
    assert str(found.svg).count('class="tile"') == 3
    assert str(found.svg).count("M") == 4 + 3  # a square for each bin, a line for each boundary


@pytest.mark.parametrize(
    "values", [((math.inf,),), ((math.nan,),), ((0.0,),), ((5.0, 9.0), (2.0, 3.0))]
)
def test_every_heat_map_can_be_drawn(values):
    found = figures.heat_figure(evidence(values=values).heat)
    assert "<path" in str(found.svg)
    assert "nan" not in str(found.svg)


def test_the_histogram_compares_with_one_correct_rounding():
    found = figures.histogram_figure(evidence().histogram)
    assert found.words == (
        "2 of 8 elements have no error (of a correct rounding: 5); the middle error is about "
        "2^-3, of a correct rounding about 2^-4."
    )


def test_profiles_say_where_the_largest_is():
    found = figures.profile_figure(evidence().column_profile)
    assert found.words == "Largest 1 at n 128-255; the middle one is 1."
    step = Profile(axis="m", size=4, step=1, values=(0.0, 1e-9, 1.0, 0.5))
    assert figures.profile_figure(step).words == (
        "Largest 1 at m 2; the middle one is 0.5; at most 2% of the largest in m 0-1."
    )
    flat = Profile(axis="n", size=2, step=1, values=(0.0, 0.0))
    assert figures.profile_figure(flat).words == "No error."


# --------------------------------------------------------------------------- model


def test_prompts_collect_the_rows_of_their_pass():
    ranking = Ranking(
        position=3,
        positions=9,
        ranks=(
            Ranked(rank=1, token=5, logit=2.0, margin=None, candidate_token=6, candidate_logit=1.5),
        ),
    )
    rows = [
        row(
            ":out.logits",
            Level.MODEL,
            check,
            pass_=p,
            stats={"nll_reference": 0.0, "nll_candidate": math.log(2), "argmax_agreement": 0.5},
            evidence=Evidence(ranking=ranking) if check == "top10" else None,
        )
        for p in ("p", "q")
        for check in ("top10", "kl")
    ]
    first, second = model_level.prompts(report(*rows))
    assert (first.pass_, sorted(first.rows), second.pass_) == ("p", ["kl", "top10"], "q")
    facts = dict(first.facts)
    assert facts["perplexity, difference"] == "+1"
    assert facts["same first token, share"] == "50 %"
    assert first.ranking is ranking


# --------------------------------------------------------------------------- story


def diagnosed(*causes, **fields):
    return row("m.a:out", used=3.0, diagnosis=causes, text="1 outside", **OVER, **fields)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [
                row("m.b:out"),
                diagnosed(Diagnosis(name="bit_order", explains=1.0, text="bits reversed.")),
            ],
            "`m.a` is the first wrong op of 2; cause: bits reversed, which explains 100 % of the "
            "error",
        ),
        (
            [row("m.b:out"), diagnosed(Diagnosis(name="bit_order", explains=0.8))],
            "`m.a` is the first wrong op of 2; cause: bit order, which explains 80 % of the error",
        ),
        ([diagnosed()], "`m.a` fails 1 of 1 check, first isolated; 1 outside"),
        (
            [
                diagnosed(
                    Diagnosis(name="sign", explains=0.1, text="other", role="runner_up"),
                    Diagnosis(name="none_fits", explains=0.0, text="none fits"),
                )
            ],
            "`m.a` fails 1 of 1 check, first isolated; 1 outside; no known fault explains it",
        ),
        (
            [
                diagnosed(
                    Diagnosis(name="sign", explains=0.95, text="other", role="runner_up"),
                    Diagnosis(name="code_table", explains=1.0, text="a code", role="also"),
                    Diagnosis(name="block_ratio", explains=0.9, text="a block"),
                )
            ],
            "`m.a` fails 1 of 1 check, first isolated; cause: a block, which explains 90 % of the "
            "error; and also: a code",
        ),
        (
            [
                row("m.b:out"),
                row("m.c:out", Level.MODULE, text="x", **OVER),
                row("m.d:out", Level.MODULE),
            ],
            "`m.c` is the first wrong module of 2; x",
        ),
    ],
)
def test_the_sentence(rows, said):
    assert story.sentence(report(*rows)) == said


def test_a_backtick_in_a_name_cannot_end_the_code():
    found = story.sentence(report(row("a`b:out", used=3.0, text="`x`", **OVER)))
    assert found.count("`") == 2


def test_what_verdicts_rest_on_is_counted():
    limits = {kind: Limits(kind=kind, source="s", bounds={"x": 1.0}) for kind in ("bound", "fixed")}
    rows = [
        row("a:out", limits=limits["bound"]),
        row("b:out", limits=limits["fixed"]),
        row("c:out"),
    ]
    assert story.certainty(report(*rows)) == [
        "1 row judged by a bound derived from the declared contract",
        "1 row judged by a tolerance that somebody set",
        "1 row without a limit",
    ]


# --------------------------------------------------------------------------- reproduce


def side(**fields):
    made = {"side": "x", "model": "m", "checkpoint_sha256": "0", "dtype": "d", "machine": "m"}
    return Provenance(**made | fields)


def test_the_block_can_be_pasted():
    found = report(
        row("a:out"),
        command="reconcile run case.toml --kernel 'my file.py:f' --out 'some where'",
        provenance=(
            side(
                commit=f"{'ab' * 20}+changes",
                versions={"torch": "2.13.0+cpu", "python": "3.11.7", "numpy": "2.4.6"},
                settings={"OMP_NUM_THREADS": "1", "torch threads": "1", "CXX": "g++ -O2; rm"},
            ),
        ),
    )
    assert reproduce.block(found).splitlines() == [
        f"git checkout {'ab' * 20}",
        "# the working tree had changes that this commit does not hold",
        "pip install torch==2.13.0 numpy==2.4.6",
        "export OMP_NUM_THREADS=1",
        "export CXX='g++ -O2; rm'",
        "reconcile run case.toml --kernel 'my file.py:f'",
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"commit": "abc; rm -rf x"},
        {"versions": {"torch": "1; rm"}},
        {"settings": {"A=1; rm": "x"}},
    ],
)
def test_nothing_that_is_no_commit_version_or_variable_gets_into_the_block(bad):
    found = report(row("a:out"), command="reconcile run", provenance=(side(**bad),))
    assert "rm" not in reproduce.block(found)


def test_an_api_call_has_no_block():
    assert reproduce.block(report(row("a:out"), command="reconcile.check_linear")) == ""
