"""Every renderer, over reports that pass, fail, are empty, or carry hostile text."""

import base64
import hashlib
import importlib
import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest

from reconcile.report import (
    Coverage,
    Diagnosis,
    Level,
    Limits,
    Provenance,
    Reason,
    Report,
    Row,
    Scope,
    Verdict,
)

NAMES = ("html", "json", "junit", "markdown", "terminal")
HOSTILE = (
    "</script><img src=x onerror=1>",
    "]]>",
    "\x00\x1b[31m\x07",
    "a|b\\|c",
    "one\ntwo\r\nthree\u2028four",
    "`code` ```fence```",
    "\ufffe\u202egnp",
    "{{ 7 * 7 }}{% raw %}",
    "$\\frac{1}$ _a_ *b* [c](http://d) @e #1",
    "'\"><svg/onload=1>&amp;",
)
ENGINES = {
    "kernel": "ternary_cuda.naive",
    "engine": "cuda-on-cpu",
    "implementation": "ours",
    "execution": "emulated",
    "fidelity": "bit_exact",
}


def module(name):
    return importlib.import_module(f"reconcile_reports.{name}")


def render(name, report):
    return module(name).render(report)


def row(tap="model.layers.0.mlp.down_proj:out", level=Level.OP, check="bound", **fields):
    fields.setdefault("verdict", Verdict.PASS)
    return Row(level=level, tap=tap, check=check, **fields)


def limited(utilisation, **fields):
    return row(
        stats={"max_abs": utilisation * 0.25, "nmse": 1e-6, "max_abs_index": [0, 1]},
        limits=Limits(kind="bound", source="K = 8", bounds={"max_abs": 0.25}),
        utilisation=utilisation,
        **ENGINES,
        **{"shape": (4, 16, 8)} | fields,
    )


def chained(layer, nmse, **fields):
    return row(f"model.layers.{layer}:out", Level.MODULE, "chained", stats={"nmse": nmse}, **fields)


def report(*rows, **fields):
    fields.setdefault("coverage", Coverage(expected=2, compared=2))
    fields.setdefault("created", "2026-03-04T10:11:12Z")
    return Report(case="case", rows=rows, **fields)


def passing():
    return report(limited(0.5), chained(0, 1e-6), chained(1, 0.0), command="reconcile run")


def failing():
    cause = Diagnosis(name="msb_first", explains=0.99, text="codes read MSB-first")
    return report(
        limited(0.5),
        limited(
            2.0,
            tap="model.layers.1.mlp.down_proj:out",
            verdict=Verdict.FAIL,
            reason=Reason.OVER_LIMIT,
            text="max_abs 0.5 at [0, 1]",
            diagnosis=(cause,),
        ),
        chained(0, 1e-6),
        chained(1, 1e-2, verdict=Verdict.INCONCLUSIVE, reason=Reason.BLOCKED, text="see the op"),
    )


def hostile():
    rows = [
        row(
            tap=text,
            level=level,
            check=text if level is not Level.MODULE else "chained",
            verdict=Verdict.FAIL,
            reason=Reason.RAISED,
            text=text,
            pass_=text,
            kernel=text,
            engine=text,
            execution="emulated",
            fidelity="semantic",
            stats={text: text, "nmse": 1e-3, "nested": {text: [text, 1.5, None]}},
            limits=Limits(kind="bound", source=text, bounds={text: 1.0}),
            utilisation=3.0,
            diagnosis=(Diagnosis(name=text, explains=0.5, parameters={text: text}, text=text),),
        )
        for level in Level
        for text in HOSTILE
    ]
    everything = "".join(HOSTILE)
    side = Provenance(
        side=everything,
        model=everything,
        checkpoint_sha256=everything,
        dtype=everything,
        machine=everything,
        versions={everything: everything},
        command=everything,
        created=everything,
        notes=HOSTILE,
    )
    return Report(
        case=everything,
        rows=tuple(rows),
        coverage=Coverage(expected=99, compared=1, missing=HOSTILE),
        provenance=(side,),
        command=everything,
        created=everything,
        notices=HOSTILE,
        required_not_run=HOSTILE,
        allowed=HOSTILE,
    )


def nonfinite():
    numbers = {"max_abs": math.inf, "nmse": math.nan, "cosine": -math.inf, "n": 4}
    limits = Limits(kind="bound", source="s", bounds={"max_abs": math.inf})
    bad = {"verdict": Verdict.FAIL, "reason": Reason.NONFINITE, "stats": numbers, "limits": limits}
    return report(
        row(utilisation=math.nan, **bad),
        row("model.layers.1.mlp.down_proj:out", utilisation=math.inf, **bad),
        chained(0, math.nan),
        chained(1, math.inf),
    )


def empty():
    return report(coverage=Coverage(expected=0, compared=0))


def allowed():
    open_row = row("b:out", verdict=Verdict.INCONCLUSIVE, reason=Reason.VACUOUS, text="constant")
    return report(limited(0.5), open_row, allowed=("b:out: known",), allowed_rows=frozenset({1}))


def uncovered():
    return report(limited(0.5), coverage=Coverage(expected=4, compared=3, missing=("lm_head",)))


def required():
    return report(limited(0.5), required_not_run=("ternary_cuda.naive",))


def many():
    rows = [
        row(f"model.layers.{n}:out", verdict=Verdict.FAIL, reason=Reason.SHAPE, text="shape")
        for n in range(45)
    ]
    return report(*rows)


def many_candidates():
    return report(*(chained(n % 2, 1e-5, kernel="$_" + "k" * 50 + str(n)) for n in range(12)))


REPORTS = (
    passing,
    failing,
    hostile,
    nonfinite,
    empty,
    allowed,
    uncovered,
    required,
    many,
    many_candidates,
)
each_report = pytest.mark.parametrize("make", REPORTS, ids=lambda make: make.__name__)
each_renderer = pytest.mark.parametrize("name", NAMES)


class Page(HTMLParser):
    """Checks the nesting of a page and collects its tags and text."""

    VOID = frozenset({"meta", "wbr", "br", "hr", "img", "link", "input"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@each_report
@each_renderer
def test_rendering_is_deterministic_utf8_text(name, make):
    text = render(name, make())
    assert text == render(name, make())
    assert text.endswith("\n")
    assert text.encode("utf-8").decode("utf-8") == text


@each_report
@each_renderer
def test_verdict_is_in_words(name, make):
    assert make().verdict.value in render(name, make())


VERDICT_LINE = {
    "html": r"<h1[^>]*>.*</h1>",
    "junit": r"<system-out>.*",
    "markdown": r"^## .*",
    "terminal": r"\A.*",
}


@pytest.mark.parametrize("name", VERDICT_LINE)
def test_the_verdict_line_says_how_much_of_the_model_it_is_about(name):
    restricted = replace(passing(), scope=Scope(modules=2, of=42, levels=("op",)))
    pattern, said = VERDICT_LINE[name], "only 2 of the model's 42 modules, only level op"
    for made, present in ((restricted, True), (passing(), False)):
        line = re.search(pattern, unescape(render(name, made)), re.MULTILINE).group()
        assert "PASS" in line
        assert (said in line) is present, line


@pytest.mark.parametrize("name", VERDICT_LINE)
def test_the_numbers_of_rows_tried_are_said(name):
    made = report(*(limited(0.5, shape=(m, 16, 8)) for m in (37, 1, 12)))
    assert re.search(
        r'M tried: 1, 12, 37|m_tried" value="1, 12, 37|M tried +1, 12, 37',
        unescape(render(name, made)),
    )


@pytest.mark.parametrize("name", ["html", "junit", "markdown", "terminal"])
def test_empty_report_says_that_nothing_was_compared(name):
    text = render(name, empty())
    assert "INCONCLUSIVE" in text
    assert "othing was compared" in text


@pytest.mark.parametrize(
    ("name", "filename"),
    [
        ("html", "report.html"),
        ("json", "report.json"),
        ("junit", "junit.xml"),
        ("markdown", "summary.md"),
        ("terminal", None),
    ],
)
def test_file_names(name, filename):
    assert filename == module(name).FILENAME


@pytest.mark.parametrize("name", ["html", "junit", "markdown", "terminal"])
@pytest.mark.parametrize("make", [passing, failing, allowed], ids=lambda make: make.__name__)
def test_emulation_is_stated(name, make):
    text = render(name, make())
    assert "emulated" in text
    assert "cuda-on-cpu" in text


@pytest.mark.parametrize("name", ["html", "markdown", "terminal"])
def test_first_divergence_with_its_cause(name):
    text = render(name, failing()).replace("<wbr>", "")
    for part in ("model.layers.1.mlp.down_proj:out", "codes read MSB-first", "99 %", "0.25"):
        assert part in text


@pytest.mark.parametrize("name", ["html", "markdown", "terminal"])
def test_rounding_never_hides_that_a_limit_is_exceeded(name):
    over = limited(1.0004, verdict=Verdict.FAIL, reason=Reason.OVER_LIMIT, text="over")
    text = render(name, report(over))
    assert "1.0004" in text
    assert "0.2501" in text


@pytest.mark.parametrize("name", ["html", "junit", "markdown", "terminal"])
def test_lone_surrogates_are_spelt_out(name):
    bad = row("a\ud800:out", verdict=Verdict.FAIL, reason=Reason.SHAPE, text="b\udcff")
    text = render(name, report(bad)).replace("&#92;", "\\")
    assert r"\ud800" in text
    text.encode("utf-8")


# json


@each_report
def test_json_round_trip(make):
    text = render("json", make())
    body = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    again = Report.from_dict(body)
    assert render("json", again) == text
    if make is not nonfinite:
        assert again == make()


# html


@each_report
def test_html_nests_and_loads_nothing(make):
    page = Page(render("html", make()))
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not names & {"img", "link", "iframe", "object", "embed", "base", "video", "audio"}
    for tag, attributes in page.tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href", "data", "action", "clip-path"):
            assert attributes.get(name, "#").removeprefix("url(").startswith("#"), (tag, name)


@each_report
def test_html_fragments_lead_somewhere_and_ids_are_unique(make):
    page = Page(render("html", make()))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {a["href"][1:] for _, a in page.tags if "href" in a}
    assert targets <= set(ids)


@each_report
def test_html_policy_allows_exactly_its_style_sheet_and_script(make):
    text = render("html", make())
    policies = [
        attributes["content"]
        for tag, attributes in Page(text).tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policies == [
        f"default-src 'none'; style-src 'sha256-{digest}'; script-src 'sha256-{allowed}'; "
        "base-uri 'none'; form-action 'none'"
    ]
    for word in ("eval", "innerHTML", "Function(", "fetch", "import", "http"):
        assert word not in script
    assert "url(" not in style
    assert "@import" not in style


def test_html_escapes_hostile_text():
    text = render("html", hostile())
    for raw in ("<img", "onerror=1>", "<svg/onload", "\x00", "\x1b", "\u202e"):
        assert raw not in text
    assert text.count("</script>") == 1
    words = Page(text).text
    for shown in ("</script><img src=x onerror=1>", r"\x00\x1b[31m\x07", "{{ 7 * 7 }}", r"\u202e"):
        assert shown in words


def test_html_tables_have_captions_and_scoped_headers():
    page = Page(render("html", failing()))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") > 0
    assert all(a.get("scope") in {"col", "row"} for tag, a in page.tags if tag == "th")


def test_html_lists_every_row_and_shows_the_first_in_full():
    rows = [
        row(f"model.layers.{n}:out", verdict=Verdict.FAIL, reason=Reason.SHAPE, text="shape")
        for n in range(500)
    ]
    page = Page(render("html", report(*rows)))
    ids = [a["id"] for tag, a in page.tags if tag == "tr" and "id" in a]
    assert ids == [f"row-{index}" for index in range(500)]
    full = [a for tag, a in page.tags if tag == "details" and a.get("class") == "card FAIL"]
    assert [a["id"] for a in full] == [f"detail-{index}" for index in range(60)]
    assert ["open" in a for a in full] == [True] + [False] * 59
    (rows_details,) = [a for _, a in page.tags if a.get("id") == "rows-details"]
    assert "open" not in rows_details  # folded: the page opens at once


@pytest.mark.parametrize(
    ("make", "pictures"), [(passing, 1), (nonfinite, 1), (empty, 0), (many, 0)]
)
def test_html_picture_has_words_or_says_that_there_is_none(make, pictures):
    page = Page(render("html", make()))
    labels = [a["aria-label"] for _, a in page.tags if a.get("role") == "img"]
    assert len(labels) == pictures
    assert all(label.startswith("Error over depth") for label in labels)
    assert ("No picture" in page.text) is (pictures == 0)


# junit


@each_report
def test_junit_parses_and_counts(make):
    root = ET.fromstring(render("junit", make()))
    for element in (root, *root.iter("testsuite")):
        found = {
            "tests": len(list(element.iter("testcase"))),
            "failures": len(list(element.iter("failure"))),
            "errors": len(list(element.iter("error"))),
            "skipped": 0,
        }
        assert {name: int(element.get(name)) for name in found} == found
    assert root.find(".//skipped") is None
    names = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    assert len(names) == len(set(names)) == len(make().rows) + 1


@pytest.mark.parametrize(
    ("make", "failures", "errors"),
    [
        (passing, 0, 0),
        (failing, 1, 1),
        (allowed, 0, 0),
        (empty, 0, 1),
        (uncovered, 0, 1),
        (required, 0, 1),
        (many, 45, 0),
    ],
)
def test_junit_is_red_exactly_where_the_report_is(make, failures, errors):
    root = ET.fromstring(render("junit", make()))
    assert (root.get("failures"), root.get("errors")) == (str(failures), str(errors))
    assert (failures + errors == 0) is (make().verdict is Verdict.PASS)


def test_junit_case_names_reason_and_message():
    root = ET.fromstring(render("junit", failing()))
    (failure,) = root.iter("failure")
    assert failure.attrib == {"type": "over_limit", "message": "max_abs 0.5 at [0, 1]"}
    (case,) = [case for case in root.iter("testcase") if case.find("failure") is not None]
    assert case.get("classname") == "reconcile.case.op"
    assert case.get("name") == "model.layers.1.mlp.down_proj:out bound 4x16x8"


def test_junit_allowed_row_passes_and_says_so():
    root = ET.fromstring(render("junit", allowed()))
    assert any("allowed" in (text.text or "") for text in root.iter("system-out"))


def test_junit_uncovered_run_is_an_error_of_the_case_verdict():
    root = ET.fromstring(render("junit", uncovered()))
    (case,) = [case for case in root.iter("testcase") if case.find("error") is not None]
    assert case.get("name") == "verdict"
    assert case.find("error").get("type") == "coverage"


# markdown


def tables(text):
    """Blocks of lines that begin with a pipe."""
    blocks = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


@each_report
def test_markdown_tables_are_well_formed(make):
    for header, rule, *lines in tables(render("markdown", make())):
        assert set(rule) <= set("|- ")
        assert {line.count("|") for line in (header, rule, *lines)} == {header.count("|")}


def test_markdown_neutralises_hostile_text():
    text = render("markdown", hostile())
    outside = re.sub(r"`[^`\n]+`", "", text)
    for raw in ("<", "\x00", "\x1b", "`", "@e", "](", "http://", "$"):
        assert raw not in outside.replace("  \n", "\n")


def test_markdown_cuts_the_list_of_failing_rows():
    text = render("markdown", many())
    assert len(tables(text)[1]) == 2 + 12
    assert "... and 33 more failing rows" in text


@each_report
def test_markdown_is_of_the_size_of_a_comment(make):
    assert len(render("markdown", make()).splitlines()) <= 60


# terminal


@each_report
def test_terminal_is_plain_and_starts_with_the_verdict(make):
    text = render("terminal", make())
    assert text.startswith(f"{make().verdict.value}: ")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


def long_names():
    taps = [f"model.{'decoder.' * n}layers.3.mlp.down_proj:out" for n in (1, 8, 40)]
    bad = {"verdict": Verdict.FAIL, "reason": Reason.OVER_LIMIT, "text": "word " * 60}
    return report(*(limited(2.0, tap=tap, check="c" * n, **bad) for n, tap in enumerate(taps)))


@pytest.mark.parametrize("make", [*REPORTS, long_names], ids=lambda make: make.__name__)
def test_terminal_keeps_to_100_columns(make):
    assert max(map(len, render("terminal", make()).splitlines())) <= 100


def test_terminal_keeps_the_end_of_a_long_tap():
    lines = [line for line in render("terminal", long_names()).splitlines() if "word" in line]
    assert [line for line in lines if line.startswith("  over_limit")]
    assert all("mlp.down_proj:out" in line for line in lines if line.startswith("  over_limit"))


def test_terminal_cuts_the_list_of_failing_rows():
    lines = render("terminal", many()).splitlines()
    assert sum(line.startswith("  shape") for line in lines) == 20
    assert "... and 25 more" in lines


# the verdict's sentence, in every text


def explained(explains=1.0):
    causes = (
        Diagnosis(name="scale_missing", explains=0.2, text="the scale is missing"),
        Diagnosis(name="bit_order", explains=explains, text="codes are read high bits first"),
    )
    rows = [limited(0.1, tap=f"model.layers.{n}.mlp.up_proj:out") for n in range(3)]
    bad = {"verdict": Verdict.FAIL, "reason": Reason.OVER_LIMIT, "text": "3 elements outside"}
    rows.append(limited(9.0, tap="model.layers.3.mlp.up_proj:out", diagnosis=causes, **bad))
    return report(*rows)


@pytest.mark.parametrize("name", ["html", "markdown", "terminal"])
def test_the_sentence_names_op_place_cause_and_share(name):
    text = " ".join(render(name, explained()).replace("<wbr>", "").replace("`", "").split())
    text = re.sub(r"</?code>", "", text)
    assert (
        "model.layers.3.mlp.up_proj is the first wrong op of 4; cause: codes are read high bits "
        "first, which explains 100 % of the error"
    ) in text
    assert "the scale is missing" in text or name == "markdown"  # the runner-up


def test_a_cause_that_explains_nearly_all_is_not_said_to_explain_all():
    assert "explains 99.9 % of the error" in render("markdown", explained(0.99999))


def test_a_pass_says_what_is_nearest_to_its_limit():
    text = render("markdown", passing())
    assert "nearest to its limit is `model.layers.0.mlp.down_proj:out`" in text
    assert "at 0.5 of it" in text


@pytest.mark.parametrize("name", ["html", "markdown", "terminal"])
def test_what_was_not_checked_is_said_with_its_reason(name):
    open_row = row("b:out", verdict=Verdict.INCONCLUSIVE, reason=Reason.NOT_RUN, text="no AMX here")
    text = render(name, report(limited(0.5), open_row, notices=("sampled: 15% of K",)))
    for part in ("1 row not_run", "no AMX here", "15% of K", "no rows of level module, model"):
        assert part in text.replace("&#95;", "_"), part
