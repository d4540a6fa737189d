"""Two reports side by side: every kind of change, and every renderer of it."""

import importlib
import json
from dataclasses import replace

import pytest

from reconcile.cli import main
from reconcile.diff import Change, difference
from reconcile.report import Coverage, Level, Limits, Provenance, Reason, Report, Row, Verdict

SIDE = Provenance(
    side="naive",
    model="m",
    checkpoint_sha256="0" * 64,
    dtype="bfloat16",
    machine="x",
    versions={"torch": "2.13.0"},
    hashes={"kernel source k.py": "a" * 64},
    created="2026-01-01T00:00:00+00:00",
)
HOSTILE = "</script><img src=x onerror=1>|`_*\u202e\x1b[31m\n" + "x" * 300


def row(tap, used=0.1, verdict=Verdict.PASS, reason=None, digest="d0", bound=1.0, **fields):
    return Row(
        level=fields.pop("level", Level.OP),
        tap=tap,
        check=fields.pop("check", "isolated"),
        verdict=verdict,
        reason=reason,
        utilisation=used,
        digest=digest,
        stats={"max_abs": used, "nmse": 1e-6},
        limits=Limits(kind="bound", source="s", bounds={"utilisation": bound}),
        **fields,
    )


def fails(tap, used=5.0, **fields):
    return row(tap, used, Verdict.FAIL, Reason.OVER_LIMIT, digest="d1", text="1 outside", **fields)


def opens(tap, reason=Reason.NOT_RUN):
    return row(tap, None, Verdict.INCONCLUSIVE, reason, digest="", text="not here")


def report(*rows, side=SIDE):
    return Report(
        case="case", rows=rows, coverage=Coverage(expected=1, compared=1), provenance=(side,)
    )


CHANGES = [
    # before, after, change, exit code
    ([row("a")], [row("a")], Change.SAME, 0),
    ([row("a")], [row("a", 0.2)], Change.MOVED, 0),
    ([row("a")], [fails("a")], Change.NEWLY_FAILING, 1),
    ([opens("a")], [fails("a")], Change.NEWLY_FAILING, 1),
    ([row("b")], [row("b"), fails("a")], Change.NEWLY_FAILING, 1),
    ([fails("a")], [row("a")], Change.NEWLY_PASSING, 0),
    ([opens("a")], [row("a")], Change.NEWLY_PASSING, 0),
    ([row("a")], [opens("a")], Change.NEWLY_OPEN, 2),
    ([fails("a")], [opens("a")], Change.NEWLY_OPEN, 2),
    ([row("b"), row("a")], [row("b")], Change.LOST, 2),
    ([row("b")], [row("b"), row("a")], Change.NEW, 0),
    ([row("b")], [row("b"), opens("a")], Change.NEWLY_OPEN, 2),
    ([row("b"), opens("c")], [row("b"), opens("c"), opens("a")], Change.NEWLY_OPEN, 2),
    ([row("a")], [row("b")], Change.LOST, 2),
    ([], [], None, 2),
]


@pytest.mark.parametrize(("before", "after", "change", "code"), CHANGES)
def test_what_happened_to_a_row(before, after, change, code):
    found = difference(report(*before), report(*after))
    assert found.exit_code == code
    if change is not None:
        assert "a" in [item.row.tap for item in found.having(change)]
    assert sum(found.counts().values()) == len(found.pairings)


@pytest.mark.parametrize(
    "fields",
    [{"required_not_run": ("k",)}, {"coverage": Coverage(expected=2, compared=1)}],
    ids=["required kernel", "coverage"],
)
def test_what_no_row_says_is_not_green(fields):
    after = replace(report(row("a")), **fields)
    assert difference(report(row("a")), after).exit_code == after.exit_code == 2
    assert difference(after, after).exit_code == 0


def test_nan_equals_nan_and_order_of_rows_does_not_matter():
    nan = row("a", float("nan"), Verdict.FAIL, Reason.NONFINITE)
    found = difference(report(nan, row("b")), report(row("b"), nan))
    assert found.counts()[Change.SAME] == 2


def test_rows_are_told_apart_by_pass_shape_and_repetition():
    rows = [row("a", 0.1, pass_="p"), row("a", 0.2, pass_="q"), row("a", 0.3, shape=(1, 2, 3))]
    rows += [row("a", 0.4, shape=(1, 2, 3))]
    found = difference(report(*rows), report(*rows))
    assert found.counts()[Change.SAME] == 4


def test_another_kernel_is_the_same_row_and_two_candidates_are_not():
    one, other = row("a", kernel="x"), row("a", 0.2, kernel="y")
    assert difference(report(one), report(other)).counts()[Change.MOVED] == 1
    both = report(one, other)
    assert difference(both, report(other, one)).counts()[Change.SAME] == 2


def test_a_row_of_the_model_moves_with_its_worst_tap():
    rows = [row(tap, 0.3, level=Level.MODEL, check="growth") for tap in ("l.1:out", "l.2:out")]
    assert difference(report(rows[0]), report(rows[1])).counts()[Change.SAME] == 1


def test_bits_factor_and_limits():
    before = report(row("a"), row("b"), row("c", digest=""))
    after = report(row("a", 0.4), row("b", digest="e"), row("c", bound=2.0, digest=""))
    found = difference(before, after)
    assert found.bits() == (1, 2)
    assert [item.row.tap for item in found.limits_moved()] == ["c"]
    assert [item.factor for item in found.pairings] == [4.0, 1.0, 1.0]


def test_provenance_that_differs_is_listed():
    side = replace(SIDE, versions={"torch": "2.14.0"}, hashes={}, created="later")
    found = difference(report(row("a")), report(row("a"), side=side))
    assert found.facts == (
        ("candidate 0: torch", "2.13.0", "2.14.0"),
        ("candidate 0: kernel source k.py", "a" * 64, "-"),
    )


def many():
    before = [row(f"m.{'deep.' * 20}{n}:out", 0.1) for n in range(300)]
    after = [fails(item.tap) if n % 3 else row(item.tap, 0.5) for n, item in enumerate(before)]
    return difference(report(*before), report(*after))


def hostile():
    before = report(row(HOSTILE), row("b"))
    bad = row(HOSTILE, 3.0, Verdict.FAIL, Reason.RAISED, text=HOSTILE, kernel=HOSTILE)
    side = replace(SIDE, hashes={HOSTILE: HOSTILE}, machine=HOSTILE)
    return difference(before, report(bad, row("b"), side=side))


def nothing():
    return difference(report(), report())


MAKERS = [many, hostile, nothing]


def render(name, found):
    return importlib.import_module(f"reconcile_reports.diff_{name}").render(found)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["html", "markdown", "terminal"])
def test_every_renderer_says_the_counts_and_nothing_hidden(name, make):
    text = render(name, make())
    assert text == render(name, make())
    assert not {"\x1b", "\u202e"} & set(text)
    if make is many:
        assert "200" in text
        assert "newly failing" in text


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_sizes_of_the_texts(make):
    assert len(render("markdown", make()).splitlines()) <= 60
    assert max(map(len, render("terminal", make()).splitlines())) <= 100


def test_html_is_inert():
    text = render("html", hostile())
    assert "<img" not in text
    assert text.count("</script>") == 1


def written(folder, found):
    folder.mkdir()
    text = importlib.import_module("reconcile_reports.json").render(found)
    (folder / "report.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [([row("a")], [row("a")], 0), ([row("a")], [fails("a")], 1), ([row("a")], [opens("a")], 2)],
)
def test_the_command(tmp_path, capsys, before, after, code):
    a, b = (written(tmp_path / name, report(*rows)) for name, rows in (("a", before), ("b", after)))
    assert main(["diff", str(a), str(b)]) == code
    assert (b / "diff.html").is_file()
    assert (b / "diff.md").is_file()
    assert "diff.html" in capsys.readouterr().out
    assert main(["diff", str(a), str(b), "--out", str(tmp_path / "c")]) == code
    assert (tmp_path / "c" / "diff.html").is_file()
    assert json.loads((b / "report.json").read_text())["schema"] == 1


def test_the_command_refuses_what_is_no_run(tmp_path, capsys):
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 3
    assert "report.json" in capsys.readouterr().err
