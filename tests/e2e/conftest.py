"""Reports in a real browser: Debian's Chromium, driven by Playwright."""

import importlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from playwright.sync_api import sync_playwright

import reconcile
from reconcile.diff import difference
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

FLAGS = [
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = (
    "<script>window.hurt = 1</script>",
    '"><img src=x onerror="window.hurt = 1">',
    "\u202egnp.exe\u2066\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "long" * 500,
    "one\ntwo\r\nthree",
    "javascript:window.hurt=1",
    "'\"><svg/onload=window.hurt=1>&amp;{{ 7 * 7 }}",
)
LAYERS, OPS = 6, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def browser_path():
    names = (os.environ.get("RECONCILE_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("no Chromium here: run `make e2e`, which installs it where apt-get can")
    return found


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page and everything that it did besides showing itself."""

    page: object
    console: list = field(default_factory=list)
    requests: list = field(default_factory=list)


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens HTML text, or a file: ``open_page(text, fragment="", width=1280, **context)``."""
    contexts = []

    def opened(text, fragment="", width=1280, height=900, **options):
        path = text if isinstance(text, Path) else tmp_path / f"page-{len(contexts)}.html"
        if path is not text:
            path.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.set_default_timeout(30_000)
        page = context.new_page()
        found = Opened(page)
        page.on("console", lambda message: found.console.append(message.text))
        page.on("pageerror", lambda error: found.console.append(str(error)))
        page.on("dialog", lambda dialog: found.console.append(dialog.message) or dialog.dismiss())
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(path.as_uri() + fragment)
        return found

    yield opened
    for context in contexts:
        context.close()


def render(name, report):
    return importlib.import_module(f"reconcile_reports.{name}").render(report)


@pytest.fixture(scope="session")
def html():
    """``html(report)`` or ``html(difference)``: the page as text."""

    def made(report):
        return render("html" if isinstance(report, Report) else "diff_html", report)

    return made


@pytest.fixture(scope="session")
def as_json():
    return lambda report: render("json", report)


# --------------------------------------------------------------------------- reports


def row(tap="model.layers.0.mlp.down_proj:out", used=0.25, **fields):
    return Row(
        level=fields.pop("level", Level.OP),
        tap=tap,
        check=fields.pop("check", "isolated"),
        shape=(64, 192, 448),
        pass_=fields.pop("pass_", "396efe0903991a09"),
        kernel=fields.pop("kernel", "ternary_cuda.naive"),
        engine="cuda-on-cpu",
        implementation="ours",
        execution=fields.pop("execution", "emulated"),
        fidelity="bit_exact",
        verdict=fields.pop("verdict", Verdict.PASS),
        utilisation=used,
        stats={"max_abs": 0.001 * (used or 0), "nmse": 1e-6, "max_ulp": 1, "n": 12288},
        limits=Limits(kind="bound", source="a-priori bound, K = 448", bounds={"utilisation": 1.0}),
        digest="0123456789abcdef",
        **fields,
    )


SIDE = Provenance(
    side="naive",
    model="tiny-lm-ternary",
    checkpoint_sha256="9c" * 32,
    dtype="bfloat16",
    machine="a processor",
    versions={"torch": "2.13.0"},
    commit="ab" * 20,
    seeds={"case": 0},
    hashes={"kernel source naive.cu": "cd" * 32},
    settings={"torch threads": "1", "OMP_NUM_THREADS": "1"},
)


def report(*rows, **fields):
    return Report(
        case=fields.pop("case", "tiny-ternary"),
        rows=rows,
        coverage=fields.pop("coverage", Coverage(expected=42, compared=42)),
        provenance=fields.pop("provenance", (SIDE,)),
        command=fields.pop("command", "reconcile run --out x"),
        created="2026-01-01T00:00:00+00:00",
        seconds=6.1,
        **fields,
    )


def layer_rows(change=lambda layer, op: {}):
    return [
        row(f"model.layers.{layer}.{op}:out", 0.01 * (layer + at), **change(layer, op))
        for layer in range(LAYERS)
        for at, op in enumerate(OPS)
    ]


def growth(**fields):
    numbers = {
        "rmse_by_layer": [0.01 * (n + 1) for n in range(LAYERS)],
        "local_rmse_by_layer": [0.005] * LAYERS,
        "reference_rms_by_layer": [1.0] * LAYERS,
        "floor_rmse_by_layer": [0.02] * LAYERS,
        "allowed_rmse_by_layer": [0.1] * LAYERS,
    }
    made = row("model.layers.0:out", 0.3, level=Level.MODEL, check="growth", **fields)
    made.stats.update(numbers)
    return made


def off_by_one(x, weight, bias=None):
    """Adds 1 to the outputs 48 ... 63."""
    y = x.float() @ weight.T.float()
    y[..., 48:64] += 1
    return y.to(x.dtype)


def looked_at():
    """Rows of a real check, with evidence; 16 columns of 96 are wrong."""
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(0))
    return reconcile.check_linear(
        off_by_one, weight, batch_sizes=(1, 33), probes=("impulse", "bound"), repeats=1
    )


def passing():
    return report(*layer_rows(), growth())


def failing():
    bad = {
        "verdict": Verdict.FAIL,
        "reason": Reason.OVER_LIMIT,
        "text": "12288 of 12288 elements outside the bound",
        "diagnosis": (
            Diagnosis(name="bit_order", explains=1.0, text="its codes are read high bits first"),
            Diagnosis(name="scale_missing", explains=0.31, text="its scale is missing"),
        ),
    }
    rows = layer_rows(lambda layer, op: bad if (layer, op) == (3, "down_proj") else {})
    blocked = {
        "level": Level.MODULE,
        "verdict": Verdict.INCONCLUSIVE,
        "reason": Reason.BLOCKED,
        "text": "explained by model.layers.3.down_proj; nmse 19 exceeds 2e-4",
    }
    rows += [row(f"model.layers.{n}:out", 900.0, **blocked) for n in range(3, LAYERS)]
    return report(*rows, growth(), *looked_at().rows)


def inconclusive():
    declined = {
        "verdict": Verdict.INCONCLUSIVE,
        "reason": Reason.NOT_RUN,
        "text": "no AMX tiles on this processor",
    }
    rows = [row(f"model.layers.{n}.q_proj:out", None, **declined) for n in range(LAYERS)]
    return report(*rows, coverage=Coverage(expected=42, compared=36, missing=("lm_head",)))


def hostile():
    rows = [
        row(
            text,
            3.0,
            level=level,
            check=text,
            pass_=text,
            kernel=text,
            verdict=Verdict.FAIL,
            reason=Reason.RAISED,
            text=text,
            diagnosis=(Diagnosis(name=text, explains=0.5, parameters={text: text}, text=text),),
        )
        for level in (Level.WEIGHT, Level.OP, Level.MODEL)
        for text in HOSTILE
    ]
    names = dict.fromkeys(HOSTILE, HOSTILE[0])
    side = Provenance(
        side=HOSTILE[0],
        model=HOSTILE[1],
        checkpoint_sha256=HOSTILE[2],
        dtype=HOSTILE[3],
        machine=HOSTILE[4],
        versions=names,
        settings=names,
        hashes=names,
        build=names,
        commit=HOSTILE[0],
        config=HOSTILE[1],
        notes=HOSTILE,
    )
    return report(
        *rows,
        case=HOSTILE[0],
        command=f"reconcile run {HOSTILE[1]}",
        provenance=(side,),
        notices=HOSTILE,
        allowed=HOSTILE,
        required_not_run=HOSTILE,
        coverage=Coverage(expected=9, compared=1, missing=HOSTILE),
    )


def big(count=10_000):
    def change(at):
        if at % 50:
            return {}
        return {"verdict": Verdict.FAIL, "reason": Reason.OVER_LIMIT, "text": "3 outside: " * 8}

    rows = [
        row(
            f"model.layers.{at % 80}.mlp.experts.{at % 7}.down_proj:out",
            at / count,
            pass_=f"{at:016x}",
            **change(at),
        )
        for at in range(count)
    ]
    return report(*rows)


def empty():
    return report(coverage=Coverage(expected=0, compared=0))


KINDS = {
    "pass": passing,
    "fail": failing,
    "inconclusive": inconclusive,
    "hostile": hostile,
    "empty": empty,
    "diff": lambda: difference(passing(), failing()),
    "diff-hostile": lambda: difference(passing(), hostile()),
}


@pytest.fixture(scope="session")
def made():
    """``made(kind)``: the report (or difference) and its page, made once."""
    known = {}

    def get(kind):
        if kind not in known:
            found = big() if kind == "big" else KINDS[kind]()
            name = "html" if isinstance(found, Report) else "diff_html"
            known[kind] = (found, render(name, found))
        return known[kind]

    return get


def pytest_generate_tests(metafunc):
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS)
