"""Case files, prompts and kernel names: every mistake is named, with the nearest right name."""

import copy
import json
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from reconcile import registry
from reconcile.capture.plan import make_plan
from reconcile.case import Allowance, CandidateConfig, Tolerance, load_case, parse_contract
from reconcile.contract import Contract
from reconcile.exceptions import ConfigError, KernelError
from reconcile.kernel import FunctionKernel

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/reconcile_fixtures"
BODY = {
    "case": {"name": "demo"},
    "model": {"checkpoint": "model"},
    "candidate": [{"name": "a", "kernel": "ternary_cuda.naive"}],
}


def toml(value):
    """A value as TOML, tables inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


def write(folder, body, name="reconcile.toml"):
    file = folder / name
    file.write_text("".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in body.items()))
    return file


def changed(path, value=None):
    """The body with a value set at a path of keys (removed where it is None)."""
    body = copy.deepcopy(BODY)
    *way, last = path
    place = body
    for key in way:
        place = place[key] if isinstance(place, list) else place.setdefault(key, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return body


def refusal(folder, body):
    file = write(folder, body)
    with pytest.raises(ConfigError) as caught:
        load_case(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    return message.removeprefix(f"{file}: ")


# --- what loads --------------------------------------------------------------------------------


def test_the_smallest_case_has_the_documented_defaults(tmp_path):
    case = load_case(write(tmp_path, BODY))
    assert case.case.name == "demo"
    assert (case.model.checkpoint, case.model.prompts, case.model.max_tokens) == (
        Path("model"),
        None,
        64,
    )
    assert case.candidate == (CandidateConfig(name="a", kernel="ternary_cuda.naive"),)
    assert (case.candidate[0].engine, case.candidate[0].modules) == ("auto", ("*",))
    assert case.reference.dtype == "float64"
    assert case.levels.run == ("op", "module", "model")
    assert (case.limits, case.seed, case.base) == ({}, 0, tmp_path.resolve())
    assert (case.gate.require, case.gate.coverage, case.gate.allow_inconclusive) == ((), 1.0, ())


FULL = BODY | {
    "model": {"checkpoint": "m", "prompts": "p.json", "max_tokens": 8},
    "reference": {"dtype": "float32"},
    "candidate": [
        {
            "name": "a",
            "kernel": "k.py:f",
            "engine": "hardware",
            "dtype": "float16",
            "device": "cuda:0",
            "modules": ["*.mlp.*"],
            "contract": {"accumulator": "float32", "split_k": 2},
        },
        {"name": "b", "kernel": "k.py:g"},
    ],
    "levels": {"run": ["op"]},
    "limits": {"*.mlp.*.out": {"atol": 0.01, "rtol": 0.5, "source": "ADR"}},
    "gate": {
        "require": ["a"],
        "coverage": 0.5,
        "allow_inconclusive": [{"tap": "*.out", "reason": "slow"}],
    },
}


def test_every_key_is_read(tmp_path):
    case = load_case(write(tmp_path, FULL))
    assert case.model.prompts == Path("p.json")
    first = case.candidate[0]
    assert (first.engine, first.dtype, first.device) == ("hardware", "float16", "cuda:0")
    assert (first.modules, first.contract) == (
        ("*.mlp.*",),
        {"accumulator": "float32", "split_k": 2},
    )
    assert case.limits == {"*.mlp.*.out": Tolerance(atol=0.01, rtol=0.5, source="ADR")}
    assert case.gate.allow_inconclusive == (Allowance(tap="*.out", kernel="*", reason="slow"),)
    assert case.with_candidate(engine="auto").candidate[1].engine == "auto"


def test_pyproject_holds_a_case_under_tool_reconcile(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\nname = "x"\n[tool.reconcile.case]\nname = "demo"\n'
        '[tool.reconcile.model]\ncheckpoint = "model"\n'
        '[[tool.reconcile.candidate]]\nname = "a"\nkernel = "k.py:f"\n'
    )
    case = load_case(file)
    assert (case.case.name, case.candidate[0].kernel) == ("demo", "k.py:f")
    for content in ('[project]\nname = "x"\n', "[tool]\n", "[tool.reconcile]\n", ""):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"pyproject.toml: has no \[tool.reconcile\]"):
            load_case(file)
    for content in ("tool = 3\n", "[tool]\nreconcile = 3\n"):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"pyproject.toml: has no \[tool.reconcile\]"):
            load_case(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such case file"),
        (b"[case\n", "unreadable"),
        (b"\xff\xfe", "unreadable"),
        (b"", "case is missing"),
    ],
)
def test_a_file_that_is_no_case(tmp_path, content, said):
    file = tmp_path / "reconcile.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_case(file)
    assert str(file) in str(caught.value)


def test_a_directory_is_no_case(tmp_path):
    with pytest.raises(ConfigError, match="unreadable"):
        load_case(tmp_path)


# --- unknown keys, missing keys, wrong types ---------------------------------------------------

LIMIT = {"atol": 0.0, "rtol": 0.0, "source": "x"}
ALLOW = ("gate", "allow_inconclusive")
UNKNOWN = [
    (("cse",), {}, "cse", "case"),
    (("candidates",), [], "candidates", "candidate"),
    (("case", "nam"), "x", "case.nam", "name"),
    (("model", "checkpoit"), "x", "model.checkpoit", "checkpoint"),
    (("model", "prompt"), "x", "model.prompt", "prompts"),
    (("reference", "dtyp"), "float64", "reference.dtyp", "dtype"),
    (("candidate", 0, "kernal"), "x", "candidate.0.kernal", "kernel"),
    (("candidate", 0, "module"), ["*"], "candidate.0.module", "modules"),
    (("levels", "rum"), ["op"], "levels.rum", "run"),
    (("limits", "*"), LIMIT | {"rtoll": 1.0}, "limits.*.rtoll", "rtol"),
    (("gate", "coverag"), 1.0, "gate.coverag", "coverage"),
    (ALLOW, [{"reason": "x", "tapp": "*"}], "gate.allow_inconclusive.0.tapp", "tap"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "place", "near"), UNKNOWN, ids=lambda v: str(v)[:40])
def test_an_unknown_key_names_the_nearest_one(tmp_path, path, value, place, near):
    message = refusal(tmp_path, changed(path, value))
    assert message.startswith(f'unknown key {place}: did you mean "{near}"? Known: ')


def test_an_unknown_key_far_from_all_names_those_that_are_known(tmp_path):
    message = refusal(tmp_path, changed(("gate", "zzz"), 1))
    known = "accepted, allow_inconclusive, coverage, margin, require"
    assert message == f"unknown key gate.zzz: Known: {known}"


@pytest.mark.parametrize("key", ["base", "seed"])
def test_fields_that_are_set_by_the_program_are_unknown_in_a_file(tmp_path, key):
    assert f"unknown key '{key}'" in refusal(tmp_path, changed((key,), "0"))


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (("case",), "case"),
        (("model",), "model"),
        (("candidate",), "candidate"),
        (("case", "name"), "case.name"),
        (("model", "checkpoint"), "model.checkpoint"),
        (("candidate", 0, "name"), "candidate.0.name"),
        (("candidate", 0, "kernel"), "candidate.0.kernel"),
    ],
)
def test_a_required_key_that_is_missing_is_named(tmp_path, path, place):
    assert refusal(tmp_path, changed(path)) == f"{place} is missing"


@pytest.mark.parametrize("key", ["atol", "rtol", "source"])
def test_a_limit_needs_all_its_keys(tmp_path, key):
    limit = {name: value for name, value in LIMIT.items() if name != key}
    assert refusal(tmp_path, changed(("limits", "*"), limit)) == f"limits.*.{key} is missing"


VALUES = [
    (("case", "name"), 3, ["case.name", "string", "got 3"]),
    (("case",), 3, ["case", "got 3"]),
    (("model", "checkpoint"), 3, ["model.checkpoint", "got 3"]),
    (("model", "max_tokens"), "many", ["model.max_tokens", "integer", "'many'"]),
    (("model", "max_tokens"), 0, ["model.max_tokens must be positive, got 0"]),
    (("model", "max_tokens"), 1.5, ["model.max_tokens", "integer", "1.5"]),
    (("reference", "dtype"), "bfloat16", ["reference.dtype", "'float64' or 'float32'"]),
    (("candidate", 0, "dtype"), "fp16", ["candidate.0.dtype", "'float16'", "got 'fp16'"]),
    (("candidate", 0, "modules"), "*", ["candidate.0.modules", "got '*'"]),
    (("candidate", 0, "modules"), [], ["candidate 'a': modules is empty"]),
    (("candidate", 0, "contract"), 3, ["candidate.0.contract", "got 3"]),
    (("candidate",), [], ["at least one [[candidate]]"]),
    (("levels", "run"), [], ["levels.run is empty"]),
    (("levels", "run"), ["ops"], ["levels.run.0", "'op', 'module' or 'model'", "got 'ops'"]),
    (("levels", "run"), ["op", "op"], ["levels.run", "twice"]),
    (("gate", "coverage"), 0.0, ["gate.coverage must lie in (0, 1], got 0.0"]),
    (("gate", "coverage"), -0.5, ["gate.coverage must lie in (0, 1]"]),
    (("gate", "coverage"), 1.01, ["gate.coverage must lie in (0, 1], got 1.01"]),
    (("gate", "coverage"), float("nan"), ["gate.coverage must lie in (0, 1], got nan"]),
    (("gate", "coverage"), "all", ["gate.coverage", "number", "'all'"]),
    (("gate", "require"), "a", ["gate.require", "got 'a'"]),
    (ALLOW, [{}], ["gate.allow_inconclusive.0.reason is missing"]),
    (ALLOW, [{"reason": " "}], ["gate.allow_inconclusive", "reason is empty"]),
    (("model", "max_tokens"), "8", ["model.max_tokens", "integer", "'8'"]),
    (("model", "max_tokens"), True, ["model.max_tokens", "integer", "True"]),
    (("gate", "coverage"), True, ["gate.coverage", "number", "True"]),
    (("limits", "*"), LIMIT | {"atol": "0"}, ["limits.*.atol", "number", "'0'"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "said"), VALUES, ids=lambda v: str(v)[:40])
def test_a_value_that_does_not_fit_is_named(tmp_path, path, value, said):
    message = refusal(tmp_path, changed(path, value))
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    ("atol", "rtol", "accepted"),
    [
        (0.0, 0.0, True),
        (1e-3, 0.999, True),
        (0.0, 1.0, False),
        (0.0, 2.0, False),
        (-1e-9, 0.0, False),
        (0.0, -1e-9, False),
        (float("inf"), 0.0, False),
        (0.0, float("inf"), False),
        (float("nan"), 0.0, False),
        (0.0, float("nan"), False),
    ],
)
def test_limits_that_would_accept_anything_are_refused(tmp_path, atol, rtol, accepted):
    body = changed(("limits", "*"), {"atol": atol, "rtol": rtol, "source": "x"})
    if accepted:
        assert load_case(write(tmp_path, body)).limits["*"].rtol == rtol
    else:
        assert 'limits."*": expected atol >= 0 and 0 <= rtol < 1' in refusal(tmp_path, body)


@pytest.mark.parametrize("source", ["", "  "])
def test_a_limit_says_where_it_comes_from(tmp_path, source):
    body = changed(("limits", "*"), {"atol": 0.0, "rtol": 0.0, "source": source})
    assert refusal(tmp_path, body) == 'limits."*": source is empty; say why this number'


def test_two_candidates_of_one_name_are_refused(tmp_path):
    pair = [{"name": "a", "kernel": "x.py:f"}, {"name": "a", "kernel": "y.py:f"}]
    assert (
        refusal(tmp_path, changed(("candidate",), pair)) == "candidate names must differ, got a, a"
    )


# --- contract ----------------------------------------------------------------------------------


def test_a_contract_of_a_case_equals_one_made_in_python():
    assert parse_contract({"scale_applied": "after_sum"}) == Contract(scale_applied="after_sum")


def test_a_contract_of_a_case():
    fields = {"weight_rounding": "bfloat16", "split_k": 4, "epilogue": ["scale", "round"]}
    expected = Contract(weight_rounding="bfloat16", split_k=4, epilogue=("scale", "round"))
    parsed = parse_contract(fields)
    assert {n: getattr(parsed, n) for n in Contract.__dataclass_fields__} == {
        n: getattr(expected, n) for n in Contract.__dataclass_fields__
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"acumulator": "float32"}, 'unknown key acumulator: did you mean "accumulator"?'),
        ({"accumulator": "fp32"}, "contract.accumulator: expected one of float64, float32"),
        ({"partials": "int32"}, "contract.partials: expected one of"),
        ({"output": "float8_e4m3fn"}, "contract.output: expected one of"),
        ({"weight_rounding": "bf16"}, "contract.weight_rounding: expected one of"),
        ({"activation": "int8"}, "activation"),
        ({"accumulator_rounding": "up"}, "accumulator_rounding"),
        ({"split_k": "two"}, "split_k"),
        ({"flush_subnormals": "maybe"}, "flush_subnormals"),
        ({"split_k": True}, "split_k"),
        ({"by_batch": [[4, {"acumulator": "x"}]]}, "unknown key by_batch.0.1.acumulator"),
        ({"by_batch": [[4, {"accumulator": "x"}]]}, "contract.accumulator: expected one of"),
    ],
)
def test_a_contract_field_that_does_not_fit_is_named(fields, said):
    with pytest.raises(ConfigError) as caught:
        parse_contract(fields)
    assert said in str(caught.value)
    assert str(caught.value).startswith("contract: ")


# --- prompts and paths -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint():
    return registry.model_source().load(FIXTURES / "tiny-lm-ternary")


def plan(folder, checkpoint, prompts, **model):
    (folder / "kernel.py").write_text("def f(x, weight, bias=None):\n    return x\n")
    if prompts is not None:
        content = prompts if isinstance(prompts, str) else json.dumps(prompts)
        (folder / "prompts.json").write_text(content)
    body = changed(("model",), {"checkpoint": "model", "prompts": "prompts.json"} | model)
    body["candidate"][0]["kernel"] = "kernel.py:f"
    case = load_case(write(folder, body))
    return make_plan(case, case.candidate[0], checkpoint)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1, 2], [3]], ((1, 2), (3,))),
        ({"prompts": [[1, 2]]}, ((1, 2),)),
        ([{"tokens": [7, 258], "text": "ignored"}], ((7, 258),)),
        ([[1] * 100], ((1,) * 64,)),
    ],
)
def test_prompts_are_read_from_beside_the_case_file(
    tmp_path, checkpoint, monkeypatch, prompts, expected
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert plan(tmp_path, checkpoint, prompts).prompts == expected


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "no such prompts file"),
        ("{", "unreadable"),
        ("3", "expected a list of texts or of token-id lists"),
        ({"prompt": [[1]]}, "expected a list of texts or of token-id lists"),
        ([], "at least one token"),
        ([[]], "at least one token"),
        ([[1], []], "at least one token"),
        ([[1, 2], [1, 2]], "two prompts are equal"),
        ([[259]], "token id 259 is outside the vocabulary of 259"),
        ([[-1]], "expected a text or a list of token ids, got [-1]"),
        ([[1.0]], "got [1.0]"),
        ([[True]], "got [True]"),
        ([3], "got 3"),
        ([{"id": 1}], "got None"),
    ],
)
def test_prompts_that_cannot_be_used(tmp_path, checkpoint, prompts, said):
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, checkpoint, prompts)
    assert said in str(caught.value)
    assert str(tmp_path / "prompts.json") in str(caught.value)


def test_prompts_that_become_equal_by_cutting_are_refused(tmp_path, checkpoint):
    assert plan(tmp_path, checkpoint, [[1, 2, 3], [1, 2, 4]]).prompts[1] == (1, 2, 4)
    with pytest.raises(ConfigError, match="two prompts are equal after 2 tokens"):
        plan(tmp_path, checkpoint, [[1, 2, 3], [1, 2, 4]], max_tokens=2)


def test_paths_of_a_case_start_at_its_file(tmp_path, monkeypatch):
    write(tmp_path, BODY)
    monkeypatch.chdir(tmp_path.parent)
    relative = load_case(Path(tmp_path.name) / "reconcile.toml")
    assert relative.base == tmp_path.resolve()
    assert relative.base / relative.model.checkpoint == tmp_path.resolve() / "model"
    monkeypatch.chdir(tmp_path)
    assert load_case("reconcile.toml").base == tmp_path.resolve()


# --- kernel names ------------------------------------------------------------------------------

KERNELS = """
import math

def linear(x, weight, bias=None):
    return x

class Broken:
    pass

number = 3
"""


@pytest.fixture
def kernels(tmp_path):
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    (tmp_path / "raises.py").write_text("raise ValueError('on import')\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(0)\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    return tmp_path


def test_a_registered_kernel_is_found_by_its_name():
    assert registry.kernel("ternary_cuda.naive").name == "ternary_cuda.naive"
    assert "ternary_cuda.naive" in registry.kernel_names()


def test_a_function_in_a_file_is_a_kernel(kernels, monkeypatch):
    found = registry.kernel("my_kernels.py:linear", kernels)
    assert isinstance(found, FunctionKernel)
    assert found.name == "my_kernels.py:linear"
    assert registry.kernel(f"{kernels}/my_kernels.py:linear").function(1, None) == 1
    monkeypatch.chdir(kernels)
    assert registry.kernel("my_kernels.py:linear").function(2, None) == 2
    (kernels / "sub").mkdir()
    assert registry.kernel("../my_kernels.py:linear", kernels / "sub").function(3, None) == 3


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "k.py").write_text(f"def f(x, weight):\n    return '{name}'\n")
    first, second = (registry.kernel("k.py:f", tmp_path / name).function for name in ("a", "b"))
    assert (first(0, 0), second(0, 0)) == ("a", "b")
    assert first.__module__ != second.__module__
    assert sys.modules[first.__module__].f is first


def test_an_attribute_of_a_package_is_a_kernel():
    naive = registry.kernel("reconcile_kernels.ternary_cuda:NAIVE")
    assert naive is registry.kernel("ternary_cuda.naive")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("ternary_cuda.naiv", ['did you mean "ternary_cuda.naive"?', "path/to/file.py:attr"]),
        ("", ["'' names no kernel", "path/to/file.py:attr"]),
        ("my_kernels.py", ["names no function: give my_kernels.py:FUNCTION"]),
        ("absent.py:f", ["absent.py: no such file"]),
        ("my_kernels.py:linaer", ["my_kernels.py has no 'linaer'", 'did you mean "linear"?']),
        ("my_kernels.py:", ["names no function: give my_kernels.py:FUNCTION"]),
        ("raises.py:f", ["cannot import", "raises.py: ValueError: on import"]),
        ("syntax.py:f", ["cannot import", "syntax.py: SyntaxError"]),
        ("leaves.py:f", ["cannot import", "leaves.py: SystemExit: 0"]),
        ("needs.py:f", ["cannot import", "needs.py: ModuleNotFoundError", "no_such_package"]),
        ("no_such_package:f", ["cannot import no_such_package: ModuleNotFoundError"]),
        (":f", ["':f' names no kernel", "path/to/file.py:attr"]),
        ("reconcile_kernels.ternary_cuda:NAIV", ["has no 'NAIV'", 'did you mean "NAIVE"?']),
        ("my_kernels.py:number", ["expected a function", "Kernel protocol", "got int"]),
        ("my_kernels.py:Broken", ["expected a function", "got type"]),
        ("my_kernels.py:math", ["expected a function", "got module"]),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_be_used_says_why(kernels, spec, said):
    with pytest.raises(KernelError) as caught:
        registry.kernel(spec, kernels)
    assert all(words in str(caught.value) for words in said), str(caught.value)


def test_a_file_that_fails_leaves_no_module_behind(kernels):
    with pytest.raises(KernelError):
        registry.kernel("raises.py:f", kernels)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    assert str(kernels / "raises.py") not in files


def test_a_registered_kernel_that_fails_to_import_says_so(monkeypatch):
    broken = EntryPoint("broken", "no_such_package:K", "reconcile.kernels")
    monkeypatch.setattr(registry, "_group", lambda _: {"broken": broken})
    with pytest.raises(KernelError, match="cannot import no_such_package:K: ModuleNotFoundError"):
        registry.kernel("broken")


def test_two_packages_that_register_one_name_are_refused(monkeypatch):
    both = [EntryPoint("k", f"{package}:K", "reconcile.kernels") for package in ("one", "two")]
    monkeypatch.setattr(registry, "entry_points", lambda **_: both)
    with pytest.raises(ConfigError, match="two packages register kernels 'k': one:K and two:K"):
        registry._group.__wrapped__("kernels")


def test_a_relative_kernel_of_a_case_starts_at_its_file(kernels, checkpoint, monkeypatch):
    body = changed(("candidate", 0, "kernel"), "my_kernels.py:linear")
    body["model"]["prompts"] = str(FIXTURES / "prompts.json")
    case = load_case(write(kernels, body))
    (kernels / "sub").mkdir()
    monkeypatch.chdir(kernels / "sub")
    assert make_plan(case, case.candidate[0], checkpoint).kernel.name == "my_kernels.py:linear"
    missing = replace(case.candidate[0], kernel="absent.py:f")
    with pytest.raises(KernelError, match=r"absent\.py: no such file"):
        make_plan(case, missing, checkpoint)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: registry.model_source("transformer"), 'did you mean "transformers"?'),
        (lambda: registry.reporter("jsn"), 'unknown reporter .jsn.: did you mean "json"?'),
    ],
)
def test_other_registered_things_are_named_alike(call, said):
    with pytest.raises(ConfigError, match=said):
        call()
