"""The published JSON schema: it is the generated one, and reports of every kind conform to it."""

import copy
import importlib
import json
import math
from pathlib import Path

import jsonschema
import pytest
import torch

import reconcile
from reconcile.report import Coverage, Diagnosis, Level, Limits, Reason, Report, Row, Verdict
from reconcile.report_schema import schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "report.schema.json"


def text_of(report):
    return importlib.import_module("reconcile_reports.json").render(report)


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft202012Validator.check_schema(schema())
    return jsonschema.Draft202012Validator(schema())


def off_by_one(x, weight, bias=None):
    y = x @ weight.T
    y[..., 3] += 1
    return y


def checked():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    return reconcile.check_linear(off_by_one, weight, batch_sizes=(1, 4), repeats=1)


def nonfinite():
    row = Row(
        level=Level.OP,
        tap="a:out",
        check="bound",
        verdict=Verdict.FAIL,
        reason=Reason.NONFINITE,
        stats={"max_abs": math.inf},
        limits=Limits(kind="bound", source="s", bounds={"max_abs": math.inf}),
        utilisation=math.nan,
        diagnosis=(Diagnosis(name="sign", explains=1.0, parameters={"n": [1, 2]}),),
    )
    return Report(case="c", rows=(row,), coverage=Coverage(expected=1, compared=1))


def empty():
    return Report(case="c", rows=(), coverage=Coverage(expected=0, compared=0))


def test_the_published_schema_is_the_generated_one():
    assert json.loads(PUBLISHED.read_text()) == schema(), (
        "python -m reconcile.report_schema > docs/report.schema.json"
    )


@pytest.mark.parametrize("make", [checked, nonfinite, empty], ids=lambda make: make.__name__)
def test_reports_conform(make, validator):
    body = json.loads(text_of(make()))
    assert list(validator.iter_errors(body)) == []
    again = Report.from_dict(body)
    assert text_of(again) == text_of(make()) or make is checked  # times differ


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body.update(schema=2),
        lambda body: body.pop("rows"),
        lambda body: body.update(verdict="OK"),
        lambda body: body["rows"][0].pop("diagnosis"),
        lambda body: body["rows"][0].update(verdict="SKIPPED"),
        lambda body: body["rows"][0].update(utilisation="high"),
        lambda body: body["rows"][0]["diagnosis"][0].update(explains="all"),
        lambda body: body["rows"][0].update(evidence={"worst": [{"index": "here"}]}),
        lambda body: body["rows"][0]["limits"].update(kind="hand-set"),
        lambda body: body.update(coverage={"expected": 1}),
    ],
)
def test_what_is_no_report_does_not_conform(spoil, validator):
    body = json.loads(text_of(nonfinite()))
    assert validator.is_valid(body)
    changed = copy.deepcopy(body)
    spoil(changed)
    assert not validator.is_valid(changed)


def test_a_key_that_a_later_version_adds_is_allowed(validator):
    body = json.loads(text_of(nonfinite()))
    body["rows"][0]["later"] = 1
    assert validator.is_valid(body | {"later": {}})
