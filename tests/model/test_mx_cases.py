"""The embedded MXFP8 cases by name."""

import pytest

import reconcile

STAGES = {
    "tiny-mxfp8": ["resolve", "requantise", "repack", "persist"],
    "tiny-mxfp8-native": ["repack", "persist"],
}


@pytest.mark.parametrize("name", STAGES)
def test_one_layer_passes_with_its_stages(name):
    report = reconcile.run(name, only="model.layers.3.*", levels=["op"])
    report.raise_for_verdict()
    assert (report.coverage.expected, report.coverage.compared) == (7, 7)
    assert {row.execution for row in report.rows} == {"emulated"}
    rows = [row for row in report.rows if row.level == "stage"]
    assert [row.check for row in rows[: len(STAGES[name])]] == STAGES[name]
    assert len(rows) == 7 * len(STAGES[name])
    for row in rows:
        lossy = row.check in ("resolve", "requantise")
        assert (row.stats["changed_share"] > 0) is lossy
        if row.check == "requantise":
            assert 25 < row.stats["sqnr_db"] < 40
            assert 0 < row.stats["saturating_share"] < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_the_whole_case_passes(name):
    report = reconcile.run(name)
    report.raise_for_verdict()
    assert (report.coverage.expected, report.coverage.compared) == (42, 42)
