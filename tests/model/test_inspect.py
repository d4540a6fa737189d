"""`reconcile inspect`: the right layout with evidence, ties as ties, never a wrong one for sure."""

import importlib.util
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reconcile import registry
from reconcile.cli import main
from reconcile.exceptions import CheckpointError
from reconcile.registry import formats
from reconcile_references.inspection.run import inspect

_SPEC = importlib.util.spec_from_file_location(
    "disguises", Path(__file__).with_name("disguises.py")
)
d = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(d)

SURE = ("proved", "declared")


def flat(stride):
    return lambda values: d.flat_strided(values, stride)


HIGH_FIRST = "4 per byte along K, interleaved, high bits first; codes 0:+0 1:-1 2:+1"
CASES = {
    "in-house": (d.in_house, "prompts", "proved", "ternary_k_interleaved"),
    "hf multiplies": (d.hf_multiplies, "prompts", "proved", "ternary_hf"),
    "hf divides": (d.hf_divides, "twin", "proved", "ternary_hf_divide"),
    "gpu int2": (d.microsoft_gpu, "twin", "proved", "ternary_ms_gpu"),
    "i2_s x86": (lambda f: d.i2_s(f, flat(32)), "twin", "proved", "ternary_i2_s_x86"),
    "i2_s arm": (lambda f: d.i2_s(f, flat(16)), "twin", "proved", "ternary_i2_s_arm"),
    "i2_s rows": (lambda f: d.i2_s(f, d.four_rows), "prompts", "proved", "ternary_i2_s_rows"),
    "tq1_0": (lambda f: d.tq(f, "TQ1_0"), "", "declared", "ternary_tq1_0"),
    "tq2_0": (lambda f: d.tq(f, "TQ2_0"), "", "declared", "ternary_tq2_0"),
    "bits and table swapped": (d.swapped, "prompts", "proved", HIGH_FIRST),
    "shuffled names": (d.shuffled, "", "likely", "ternary_k_interleaved"),
    "no config": (d.without_config, "twin", "proved", "ternary_k_interleaved"),
    # beyond the twelve
    "no config, no twin": (d.without_config, "", "likely", "ternary_k_interleaved"),
    "i2_s without a witness": (lambda f: d.i2_s(f, flat(32)), "", "likely", "ternary_i2_s_x86"),
    "i2_s without config": (
        lambda f: d.i2_s(f, d.four_rows, config=False), "", "likely", "ternary_i2_s_rows"
    ),
    "a byte per code": (d.unpacked_codes, "twin", "proved", "ternary_bytes"),
    "planar along K": (d.planar, "twin", "proved", "4 per byte along K, planar, low bits first"),
    "planar, high bits": (
        d.n_planar_high, "twin", "proved", "4 per byte along N, planar, high bits first"
    ),
    "fp8 blocks": (lambda f: d.fp8(f, (128, 128)), "", "declared", "fp8_e4m3_block"),
    "fp8 blocks, twin": (
        lambda f: d.fp8(f, (64, 64), declare=False), "twin", "proved", "fp8_e4m3_block"
    ),
    "fp8 rows": (
        lambda f: d.fp8(f, "row", declare=False, suffix="weight_scale"), "twin", "proved",
        "fp8_e4m3_channel",
    ),
    "fp8 tensor": (lambda f: d.fp8(f), "", "declared", "fp8_e4m3_tensor"),
    "mxfp8": (
        lambda f: d.fp8(f, (1, 32), e8m0=True, suffix="weight_scale"), "", "declared",
        "mxfp8_e4m3",
    ),
}  # fmt: skip


def look(folder, witness):
    given = {"twin": {"twin": d.MASTER}, "prompts": {"prompts": d.PROMPTS}, "": {}}[witness]
    return inspect(folder, **given)


@pytest.mark.parametrize("name", CASES)
def test_the_right_layout_is_named(name, tmp_path):
    make, witness, confidence, expected = CASES[name]
    found = look(make(tmp_path / "checkpoint"), witness)
    assert found.layouts
    for layout in found.layouts:
        assert layout.confidence == confidence
        assert layout.best.candidate.name.removeprefix("unpublished: ").startswith(expected)
    assert found.exit_code == (0 if confidence in SURE else 2)
    assert not [trap for trap in found.traps if trap.serious]


# --- ambiguity, and never wrong with confidence --------------------------------------------------


def one_layer(folder, pack, *, scales=None, quantization=None, rng=0, probabilities=None):
    """Random, independent codes: nothing but a declaration says where they lie."""
    tensors = d.master()
    generator = np.random.default_rng(rng)
    for module in d.linears(tensors):
        shape = tensors[f"{module}.weight"].shape
        values = generator.choice([-1, 0, 1], shape, p=probabilities)
        tensors[f"{module}.weight"] = torch.from_numpy(pack(values))
        count = shape[0] if scales is None else scales
        tensors[f"{module}.weight_scale"] = torch.rand(count) / 8 + 0.05
    return d.write(folder, tensors, d.read_config(), quantization)


PACKINGS = {
    "k_interleaved": (d.k_interleaved, None),
    "k_planar": (d.k_planar, None),
    "n_planar": (d.n_planar, 1),
    "n_planar_high": (lambda v: d.n_planar(v, high=True), 1),
    "gpu_tiles": (d.gpu_tiles, 1),
}


@pytest.mark.parametrize(
    ("name", "witness"),
    [*((n, w) for n in PACKINGS for w in ("", "twin")), ("k_interleaved", "prompts")],
)
def test_random_codes_prove_nothing(name, witness, tmp_path):
    """Not even where a twin or a model is at hand that they do not belong to."""
    pack, scales = PACKINGS[name]
    found = look(one_layer(tmp_path / "checkpoint", pack, scales=scales), witness)
    for layout in found.layouts:
        assert layout.confidence not in SURE
        assert layout.ties
    assert found.exit_code == 2


def test_i2_s_of_random_weights_is_ambiguous(tmp_path):
    """Two of its layouts fit any bytes, and nothing in the file says which it is."""
    rng = np.random.default_rng(0)

    def pack(values):
        return d.flat_strided(rng.integers(-1, 2, values.shape), 16)

    found = inspect(d.i2_s(tmp_path / "checkpoint", pack))
    (layout,) = found.layouts
    assert layout.confidence == "ambiguous"
    named = {layout.best.candidate.name, *layout.ties}
    assert {"ternary_i2_s_x86", "ternary_i2_s_arm", "ternary_i2_s_rows"} <= named


ADVERSARIAL = {
    "zero looks like +1": (0.4, 0.4, 0.2),
    "zero looks like -1": (0.2, 0.4, 0.4),
    "no zeros": (0.5, 0.0, 0.5),
    "no minus": (0.0, 0.6, 0.4),
    "one value": (0.0, 1.0, 0.0),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_a_histogram_is_no_proof(name, tmp_path):
    made = one_layer(tmp_path / "checkpoint", d.k_interleaved, probabilities=ADVERSARIAL[name])
    found = inspect(made)
    for layout in found.layouts:
        assert layout.confidence not in SURE
    assert found.exit_code == 2


def test_a_declared_table_that_the_histogram_contradicts_is_not_confirmed(tmp_path):
    declared = {"quant_method": "ternary", "format": "ternary_k_interleaved"}
    made = one_layer(
        tmp_path / "checkpoint", d.k_interleaved, quantization=declared,
        probabilities=(0.45, 0.45, 0.1),
    )  # fmt: skip
    found = inspect(made)
    assert found.exit_code == 2
    assert all(layout.confidence not in SURE for layout in found.layouts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("declared", [False, True])
def test_random_bytes_are_unexplained(tmp_path, seed, declared):
    tensors = d.master()
    rng = np.random.default_rng(seed)
    for module in d.linears(tensors):
        n, k = tensors[f"{module}.weight"].shape
        tensors[f"{module}.weight"] = torch.tensor(
            rng.integers(0, 256, (n, k // 4)), dtype=torch.uint8
        )
        tensors[f"{module}.weight_scale"] = torch.rand(n)
    quantization = {"quant_method": "ternary", "format": "ternary_k_interleaved"}
    made = d.write(
        tmp_path / "checkpoint", tensors, d.read_config(), quantization if declared else None
    )
    found = inspect(made, twin=d.MASTER)
    assert [layout.confidence for layout in found.layouts] == ["unexplained"]
    assert found.exit_code == 2


def test_a_declaration_that_twin_and_bytes_contradict_is_overruled(tmp_path):
    """Declared low bits first, written high bits first: as legal as the other, and wrong."""
    tensors = d.repacked(lambda v: d.k_interleaved(v, high=True), per_row=True)
    declared = {"quant_method": "ternary", "format": "ternary_k_interleaved"}
    made = d.write(tmp_path / "checkpoint", tensors, d.read_config(), declared)
    found = inspect(made, twin=d.MASTER)
    (layout,) = found.layouts
    assert layout.confidence == "proved"
    assert "high bits first" in layout.best.candidate.name
    assert "declared ternary_k_interleaved, but the bytes prefer another" in layout.reasons
    assert found.exit_code == 2
    (layout,) = inspect(made).layouts  # the profiles alone speak against it, but prove nothing
    assert layout.confidence not in SURE


def test_layouts_that_are_mixed_are_taken_apart(tmp_path):
    """A sixth of the tensors has its bits the other way round: no vote decides for them."""
    low, high = (
        d.repacked(lambda v, h=h: d.k_interleaved(v, high=h), per_row=True) for h in (0, 1)
    )
    mixed = {n: high[n] if "layers.2" in n else t for n, t in low.items()}
    found = inspect(d.write(tmp_path / "checkpoint", mixed, d.read_config()), twin=d.MASTER)
    layouts = {layout.best.candidate.name[:60]: layout for layout in found.layouts}
    assert [layout.confidence for layout in found.layouts] == ["proved", "proved"]
    assert len(layouts.pop("ternary_k_interleaved").stems) == 35
    (other,) = layouts.values()
    assert "high bits first" in other.best.candidate.name
    assert all("layers.2" in stem for stem in other.stems)


def test_a_scale_that_divides_among_others_that_multiply_is_named(tmp_path):
    tensors = d.repacked(d.k_interleaved, per_row=True)
    for name in tensors:
        if name.endswith("q_proj.weight_scale") and "layers.3" in name:
            tensors[name] = 1 / tensors[name]
    found = inspect(d.write(tmp_path / "checkpoint", tensors, d.read_config()), twin=d.MASTER)
    named = [trap.tensors for trap in found.traps if "magnitude" in trap.text]
    assert named == [("model.layers.3.self_attn.q_proj.weight",)]
    assert found.exit_code == 2


# --- traps ---------------------------------------------------------------------------------------


def changed(folder, change, make=d.in_house):
    made = make(folder)
    file = made / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    return made


GATE = "model.layers.1.mlp.gate_proj"


def never_dequantised(tensors):
    codes = torch.randint(-1, 2, (448, 192)).to(torch.bfloat16)
    tensors[f"{GATE}.weight"] = codes
    del tensors[f"{GATE}.weight_scale"]


def fp8_as_bf16(tensors):
    codes = (torch.randn(448, 192) * 100).clamp(-448, 448)
    codes[0, 0] = 448
    tensors[f"{GATE}.weight"] = codes.to(torch.float8_e4m3fn).to(torch.bfloat16)


def two_conventions(tensors):
    for name in tensors:
        if name.endswith("weight_scale") and "layers.3" in name:
            tensors[name] = 1 / tensors[name]


TRAPS = {
    "ternary values as floats": (never_dequantised, "undequantised", "ternary values -1, 0, 1"),
    "fp8 codes as floats": (fp8_as_bf16, "undequantised", "float8_e4m3fn codes"),
    "an extra tensor": (
        lambda t: t.update({"model.rotary.inv_freq": torch.ones(16)}), "unused", "no parameter"
    ),
    "a scale that is gone": (
        lambda t: t.pop(f"{GATE}.weight_scale"), "scale", "without a scale tensor"
    ),
    "a scale of NaN": (
        lambda t: t[f"{GATE}.weight_scale"].fill_(float("nan")), "scale", "NaN or infinite"
    ),
    "a scale of zero": (lambda t: t[f"{GATE}.weight_scale"].zero_(), "scale", "zero"),
    "scales of two kinds": (two_conventions, "conventions", "one kind divides"),
    "a norm that is gone": (
        lambda t: t.pop("model.norm.weight"), "missing", "no tensor fills"
    ),
    "a padded vocabulary": (
        lambda t: t.update({"lm_head.weight": torch.zeros(320, 192)}), "padding", "[320, 192]"
    ),
    "a matrix on its side": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].t()}), "shape", "transposed"
    ),
    "declared quantised": (never_dequantised, "declaration", "stored dense"),
    "NaN in a norm": (
        lambda t: t["model.norm.weight"].fill_(float("nan")), "values", "NaN"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_flagged(name, tmp_path):
    change, kind, said = TRAPS[name]
    found = inspect(changed(tmp_path / "checkpoint", change))
    assert [trap for trap in found.traps if trap.kind == kind and said in trap.text]
    assert found.exit_code == (0 if kind == "shape" else 2)


def test_a_block_type_that_nobody_reads_is_named(tmp_path):
    made = tmp_path / "other.gguf"
    writer = d.gguf.GGUFWriter(made, "qwen3")
    quant = d.gguf.GGMLQuantizationType.Q4_0
    stored = d.gguf.quants.quantize(np.ones((64, 192), np.float32), quant)
    writer.add_tensor("blk.0.attn_k.weight", stored, raw_dtype=quant)
    d.finish(writer)
    found = inspect(made, prompts=d.PROMPTS)
    (entry,) = found.keys.entries
    assert entry.action == "not decoded: Q4_0"
    assert [trap.text for trap in found.traps if trap.serious] == ["Q4_0 is not decoded here"]
    assert (found.exit_code, found.layouts) == (2, ())


def test_a_clean_checkpoint_has_no_trap(tmp_path):
    assert inspect(d.in_house(tmp_path / "checkpoint")).traps == ()


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


FLOAT8 = torch.float8_e4m3fn
ODD = {
    "codes in three dimensions": ({"a.weight": torch.zeros(4, 16, 8).byte()}, [], 2),
    "nothing in it": ({"a.weight": torch.zeros(0, 5).byte(), "b.weight": torch.zeros(0)}, [], 0),
    "scalars": ({"a.weight": torch.tensor(3.0), "b.weight": torch.tensor(3).byte()}, [], 0),
    "other dtypes": ({"a": torch.ones(4, 4).bool(), "b": torch.arange(5)}, [], 0),
    "one byte": ({"a.weight": torch.zeros(1, 1).byte(), "a.weight_scale": torch.ones(1)},
                 ["ambiguous"], 2),
    "words of 32 bits": (
        {"a.qweight": torch.arange(128).mul(15_485_863).int().reshape(16, 8)}, ["unexplained"], 2
    ),
    "a scale of three": ({"a.weight": torch.ones(8, 8).to(FLOAT8), "a.weight_scale": torch.ones(3)},
                         ["unexplained"], 2),
    "an empty scale": ({"a.weight": torch.ones(8, 8).byte(), "a.weight_scale": torch.ones(0)},
                       ["unexplained"], 2),
    "a scale in three dimensions": (
        {"a.weight": torch.ones(8, 8).byte(), "a.weight_scale": torch.ones(1, 2, 3)},
        ["unexplained"], 2,
    ),
    "no scale": ({"a.weight": torch.ones(8, 8).to(FLOAT8)}, ["likely"], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_are_no_internal_error(cli, tmp_path, name):
    tensors, confidences, code = ODD[name]
    made = d.write(tmp_path / "checkpoint", tensors)
    assert [str(layout.confidence) for layout in inspect(made).layouts] == confidences
    assert cli("inspect", made, "--json", "x.json", "--write-doc", "x.md")[0] == code


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [d.swapped, d.microsoft_gpu, lambda f: d.i2_s(f, flat(32))])
def test_the_case_that_it_writes_runs(cli, tmp_path, make):
    made = make(tmp_path / "checkpoint")
    files = ["--json", "found.json", "--write-toml", "case.toml", "--write-doc", "format.md"]
    code, out, _ = cli("inspect", made, "--prompts", d.PROMPTS, "--twin", d.MASTER, *files)
    assert code == 0
    assert "PROVED" in out
    assert "everything is explained" in out
    record = json.loads((tmp_path / "found.json").read_text())
    assert (record["schema"], record["exit_code"]) == (1, 0)
    assert {layout["confidence"] for layout in record["layouts"]} == {"proved"}
    assert "PROVED".lower() in (tmp_path / "format.md").read_text()
    if make is d.swapped:
        code, out, err = cli("run", "case.toml", "--level", "op", "--only", "model.layers.0.*")
        assert (code, err) == (0, "")
        assert "7 of 7" in out
    checkpoint = load_case(tmp_path / "case.toml")
    source = d.master()
    for name, weight in checkpoint.weights.items():
        per_row = make is d.swapped
        values, scale = d.ternary(source[f"{name}.weight"], per_row)
        stored = torch.tensor(scale).to(weight.scales.dtype).double().numpy().reshape(-1, 1)
        assert np.array_equal(weight.dequantize().numpy(), values * stored)


def load_case(path):
    """The checkpoint of a case, loaded as `reconcile run` loads it."""
    from reconcile.case import load_case as read

    case = read(path)
    return registry.model_source().load(case.base / case.model.checkpoint, None, case.model.layout)


def test_a_case_spells_out_what_no_format_has(cli, tmp_path):
    cli("inspect", d.planar(tmp_path / "checkpoint"), "--twin", d.MASTER, "--write-toml", "c.toml")
    layout = tomllib.loads((tmp_path / "c.toml").read_text())["model"]["layout"]
    assert layout["packing"] == {
        "bits": 2, "dim": 1, "arrangement": "planar", "low_first": True,
    }  # fmt: skip
    assert layout["table"] == [0, 1, -1, 0]
    assert len(layout["linears"]) == 42


REFUSED = {
    "nothing there": (lambda f: f, [], "expected a checkpoint directory"),
    "empty": (lambda f: f.mkdir() or f, [], "found none"),
    "a pickle": (
        lambda f: f.mkdir() or ((f / "pytorch_model.bin").write_bytes(b"x") and f), [],
        "is a pickle and is not read",
    ),
    "garbage": (
        lambda f: f.mkdir() or ((f / "model.safetensors").write_bytes(b"x" * 99) and f), [],
        "truncated or damaged safetensors",
    ),
    "no gguf": (
        lambda f: f.mkdir() or ((f / "model.gguf").write_bytes(b"GGUF" + b"\1" * 99) and f), [],
        "truncated or damaged GGUF",
    ),
    "no twin": (d.in_house, ["--twin", "nowhere"], "nowhere"),
    "no prompts": (d.in_house, ["--prompts", "nowhere.json"], ""),
    "a case of unknown names": (
        d.shuffled, ["--write-toml", "x.toml"], "the parameter of"
    ),
    "a case without config": (
        d.without_config, ["--write-toml", "x.toml"], "architecture is not known"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in REFUSED if n != "no prompts"])
def test_bad_input_ends_with_3(cli, tmp_path, name):
    make, options, said = REFUSED[name]
    code, _, err = cli("inspect", make(tmp_path / "checkpoint"), *options)
    assert code == 3
    assert said in err


def test_a_key_that_the_layout_names_must_be_there(tmp_path):
    from reconcile.layout import LayoutConfig, LinearSource

    made = d.in_house(tmp_path / "checkpoint")
    source = LinearSource(codes="nowhere")
    layout = LayoutConfig(format="ternary_k_interleaved", linears={GATE: source})
    with pytest.raises(CheckpointError, match="nowhere"):
        registry.model_source().load(made, None, layout)
    assert formats()["ternary_k_interleaved"].granularity == "channel"
