"""Every row of the table of fallbacks in a run: what is refused, what runs dense, what is shown.

A required MXFP8 kernel that other code stood in for is INCONCLUSIVE, whatever the numbers are.
"""

import dataclasses
import importlib
import sys
import types
from functools import partial

import pytest
import torch
from small_checkpoints import first_layer, mxfp8_case, write
from transformers import AutoConfig, AutoModelForCausalLM

import reconcile
from reconcile.cli import main
from reconcile.exceptions import FormatError
from reconcile_kernels.mxfp8_npu import device, linear, operators
from reconcile_references import derived
from reconcile_references.fp8 import FP8_E4M3_BLOCK
from reconcile_references.quantise import Fp8Rule
from reconcile_reports import loading, summary, terminal

BLOCK = derived.fp8_block
DOWN = "model.layers.0.mlp.down_proj"


def run(folder, **options):
    case = mxfp8_case(folder)
    return reconcile.Session(case).run(**options)


def rows(report, level, **fields):
    return [
        row
        for row in report.rows
        if row.level == level and all(getattr(row, n) == v for n, v in fields.items())
    ]


def is_no_pass(report, *fell_back):
    """INCONCLUSIVE because of exactly these modules, and the gate names the kernel."""
    assert (report.exit_code, report.verdict) == (2, "INCONCLUSIVE")
    assert report.required_not_run == ("mxfp8_npu",)
    assert report.coverage.missing == fell_back
    assert {row.tap.rpartition(":")[0] for row in rows(report, "op", reason="fell_back")} == {
        *fell_back
    }
    assert report.counts()["FAIL"] == 0


def shown(report):
    """The report as a terminal shows it, on one line."""
    return " ".join(terminal.render(report).split())


# --- not implemented -----------------------------------------------------------------------------


def test_fp8_without_blocks_is_not_implemented(tmp_path):
    tensor = dataclasses.replace(derived.fp8_tensor, reshape=first_layer)
    report = run(write(tmp_path / "tensor", *tensor.derive()))
    assert (report.exit_code, report.coverage.compared) == (2, 0)
    assert report.required_not_run == ("mxfp8_npu",)
    said = {row.text for row in rows(report, "op", check="isolated", reason="not_run")}
    assert said == {"mxfp8_npu: FP8 without weight_block_size is not implemented on Ascend"}


def test_static_activations_are_not_implemented(tmp_path):
    static = dataclasses.replace(
        BLOCK,
        declared=BLOCK.declared | {"activation_scheme": "static"},
        store=partial(
            derived._store_fp8,
            rule=Fp8Rule(form=FP8_E4M3_BLOCK),
            scale="weight_scale_inv",
            activation=0.0625,
        ),
        reshape=first_layer,
    )
    report = run(write(tmp_path / "static", *static.derive()))
    assert (report.exit_code, report.coverage.compared) == (2, 0)
    assert report.required_not_run == ("mxfp8_npu",)
    said = {row.text for row in rows(report, "op", check="isolated")}
    assert said == {
        "mxfp8_npu: activation_scheme 'static' is not implemented on Ascend; expected 'dynamic'"
    }


# --- dense ---------------------------------------------------------------------------------------


def test_k_of_no_whole_groups_runs_dense_and_is_shown(tmp_path):
    """down_proj has K = 96 + 16; the other layers of the same model stay in MXFP8."""
    small = dataclasses.replace(BLOCK, reshape=partial(first_layer, sizes=112))
    report = run(write(tmp_path / "k112", *small.derive()))
    is_no_pass(report, DOWN)
    reason = "K = 112 is no multiple of 32: dense in the model's dtype"
    assert {row.text for row in rows(report, "op", reason="fell_back")} == {reason}
    assert {f"mxfp8_npu: {reason} (1 layers)", "mxfp8_npu: MXFP8 (6 layers)"} <= {*report.notices}
    stages = {row.check: row for row in rows(report, "stage", tap=f"{DOWN}:param.weight")}
    assert list(stages) == ["resolve", "requantise"]
    assert (stages["resolve"].verdict, stages["resolve"].stats["differing"]) == ("PASS", 0)
    assert stages["resolve"].stats["runs"] == f"dense: {reason}"
    assert (stages["requantise"].reason, stages["requantise"].text) == ("fell_back", reason)
    step = {step.name: step for step in loading.steps(report)}["requantise"]
    assert (step.weights, step.wrong, step.fell_back) == (7, 0, ((reason, 1),))
    assert f"1 fell back ({reason})" in shown(report)
    assert summary.most_used(report)["op"].utilisation <= 1  # of the kernel's own rows
    passed = {row.tap for row in rows(report, "op", verdict="PASS")}
    assert len(passed) == 6


def test_kv_b_proj_is_kept_dense(tmp_path):
    report = run(latent_attention(tmp_path))
    name = "model.layers.0.self_attn.kv_b_proj"
    is_no_pass(report, name)
    assert "mxfp8_npu: kv_b_proj is kept dense (1 layers)" in report.notices
    said = {row.text for row in rows(report, "op", reason="fell_back")}
    assert said == {"kv_b_proj is kept dense"}


def test_with_kv_b_proj_left_out_of_the_case_the_rest_passes(tmp_path):
    """It is then the checkpoint's dense weight on both sides, as it is where it is served."""
    others = ("*q_proj", "*kv_a*", "*o_proj", "*.mlp.*")
    report = reconcile.run(mxfp8_case(latent_attention(tmp_path), modules=others))
    report.raise_for_verdict()
    assert report.coverage.expected == 6


def latent_attention(tmp_path):
    """A DeepSeek-V3 of one dense layer with random weights, in blocks of 32 x 32."""
    sizes = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "first_k_dense_replace": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    config = AutoConfig.for_model("deepseek_v3", **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rule = Fp8Rule(form=dataclasses.replace(FP8_E4M3_BLOCK, block=(32, 32)))
    tensors = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if isinstance(model.get_submodule(module), torch.nn.Linear) and module != "lm_head":
            tensors |= derived._store_fp8(module, 8 * tensor, rule, "weight_scale_inv")
        else:
            tensors[name] = tensor
    declared = BLOCK.declared | {"weight_block_size": [32, 32]}
    body = config.to_dict() | {"quantization_config": dict(declared), "dtype": "bfloat16"}
    return write(tmp_path / "latent", body | {"architectures": ["DeepseekV3ForCausalLM"]}, tensors)


def mixture(tmp_path, monkeypatch, neurons, **declared):
    monkeypatch.setattr(derived, "NEURONS", neurons)
    monkeypatch.setattr(derived, "MOE_LAYERS", 1)
    rule = Fp8Rule(form=dataclasses.replace(FP8_E4M3_BLOCK, block=(16, 128)))
    small = dataclasses.replace(
        derived.moe_fp8_block,
        declared=derived.moe_fp8_block.declared | {"weight_block_size": [16, 128]} | declared,
        store=partial(derived._store_fp8, rule=rule, scale="weight_scale_inv"),
    )
    return write(tmp_path / "mixture", *small.derive())


def test_one_dimension_off_makes_all_experts_dense(tmp_path, monkeypatch):
    """w2 has K = 48; w13, whose K is right, is dense with it."""
    report = run(mixture(tmp_path, monkeypatch, neurons=48))
    experts = "model.layers.0.mlp.experts"
    is_no_pass(report, f"{experts}.w13", f"{experts}.w2")
    reason = "w2 has K = 48, no multiple of 32: all experts dense in the model's dtype"
    assert {row.text for row in rows(report, "op", reason="fell_back")} == {reason}
    assert f"mxfp8_npu: {reason} (2 layers)" in report.notices
    dense = rows(report, "stage", reason="fell_back")
    assert {row.check for row in dense} == {f"requantise.{expert}" for expert in range(4)}
    assert {row.text for row in dense} == {reason}


def test_experts_of_an_odd_number_of_groups_are_not_implemented(tmp_path, monkeypatch):
    report = run(mixture(tmp_path, monkeypatch, neurons=96), levels=["op"])
    assert report.exit_code == 2
    (said,) = {row.text for row in rows(report, "op", reason="not_run", check="isolated")}
    assert said.startswith("mxfp8_npu: w2 has K = 96: experts need an even number of groups of 32")


# --- what the checkpoint itself keeps dense ------------------------------------------------------


def test_ignored_layers_stay_dense(tmp_path):
    ignored = ["lm_head", "o_proj", "model.layers.0.mlp.up_proj"]
    kept = dataclasses.replace(
        BLOCK,
        declared=BLOCK.declared | {"modules_to_not_convert": ignored},
        store=lambda name, weight: (
            {f"{name}.weight": weight}
            if name.endswith(("o_proj", "up_proj"))
            else BLOCK.store(name, weight)
        ),
        reshape=first_layer,
    )
    report = run(write(tmp_path / "ignored", *kept.derive()))
    report.raise_for_verdict()
    assert report.coverage.expected == 5
    assert not any("o_proj" in row.tap for row in rows(report, "op"))
    note = (
        "dense, as the checkpoint declares (2): model.layers.0.mlp.up_proj, "
        "model.layers.0.self_attn.o_proj"
    )
    assert note in {note for source in report.provenance for note in source.notes}


def test_ignored_experts_stay_dense(tmp_path, monkeypatch):
    """One mixture is ignored, with its tensors expert by expert in bfloat16."""
    monkeypatch.setattr(derived, "MOE_LAYERS", 2)
    ignored = "model.layers.1.mlp.experts"
    kept = dataclasses.replace(
        derived.moe_fp8_block,
        declared=derived.moe_fp8_block.declared | {"modules_to_not_convert": ["lm_head", ignored]},
        store=lambda name, weight: (
            {f"{name}.weight": weight} if name.startswith(ignored) else BLOCK.store(name, weight)
        ),
    )
    report = run(write(tmp_path / "experts", *kept.derive()))
    report.raise_for_verdict()
    assert report.coverage.expected == 10
    assert {row.tap for row in rows(report, "op") if "experts" in row.tap} == {
        "model.layers.0.mlp.experts.w13:out",
        "model.layers.0.mlp.experts.w2:out",
    }
    (note,) = {
        note for source in report.provenance for note in source.notes if note.startswith("dense")
    }
    assert note == f"dense, as the checkpoint declares (1): {ignored}"


def test_a_grid_of_another_shape_names_both(tmp_path, capsys):
    config, tensors = dataclasses.replace(BLOCK, reshape=first_layer).derive()
    tensors[f"{DOWN}.weight_scale_inv"] = tensors[f"{DOWN}.weight_scale_inv"][:, :3]
    folder = write(tmp_path / "grid", config, tensors)
    said = rf"{DOWN}.*\[2, 4\].*\[2, 3\]"
    with pytest.raises(FormatError, match=said):
        run(folder)
    file = reconcile.registry.case_file("tiny-mxfp8")
    text = file.read_text().replace("derived:tiny-lm-fp8-block", str(folder))
    text = text.replace("../prompts.json", str(file.parent.parent / "prompts.json"))
    case = tmp_path / "reconcile.toml"
    case.write_text("\n".join(line for line in text.splitlines() if "original" not in line))
    assert main(["run", str(case)]) == 3
    assert "[2, 3]" in capsys.readouterr().err


# --- the device ----------------------------------------------------------------------------------


@pytest.fixture
def npu(monkeypatch):
    """A torch_npu that sees the NPU of a name, and whose operators are the emulated ones."""

    def see(name):
        module = types.ModuleType("torch_npu")
        module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
        module.npu = types.SimpleNamespace(
            is_available=lambda: bool(name), get_device_name=lambda: name
        )
        module.npu_dynamic_mx_quant = operators.npu_dynamic_mx_quant
        module.npu_quant_matmul = operators.npu_quant_matmul
        module.float8_e8m0fnu = 293
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        monkeypatch.setattr(linear, "place_of", lambda engine: "cpu")

    return see


def one_layer(tmp_path):
    return write(tmp_path / "one", *dataclasses.replace(BLOCK, reshape=first_layer).derive())


def test_on_another_npu_every_layer_is_dense_and_nothing_passes(tmp_path, npu):
    npu("Ascend910B1")
    report = run(one_layer(tmp_path), engine="npu")
    assert report.coverage.compared == 0
    is_no_pass(report, *report.coverage.missing)
    assert len(report.coverage.missing) == 7
    reason = "Ascend910B1 has no MX operators: dense in the model's dtype"
    assert f"mxfp8_npu: {reason} (7 layers)" in report.notices
    assert {row.text for row in rows(report, "op", check="isolated")} == {reason}


def test_a_fallback_that_is_not_said_fails(tmp_path, npu, monkeypatch):
    """Its numbers are those of another arithmetic, at every op."""
    npu("Ascend910B1")
    monkeypatch.setattr(linear, "fell_back", lambda reason: None)
    report = run(one_layer(tmp_path), engine="npu", levels=["op"])
    alone = rows(report, "op", check="isolated")
    assert {(row.verdict, row.reason) for row in alone} == {("FAIL", "over_limit")}
    assert report.exit_code == 1


def test_what_a_fallback_does_further_on_is_no_failure_of_its_own(tmp_path, npu, monkeypatch):
    """Other code has other numbers, here eight times as large."""
    npu("Ascend910B1")
    dense = linear._dense
    monkeypatch.setattr(linear, "_dense", lambda *arguments: 8 * dense(*arguments))
    report = run(one_layer(tmp_path), engine="npu")
    is_no_pass(report, *report.coverage.missing)
    later = [row for row in rows(report, "module") if row.reason]
    assert {row.reason for row in later} == {"blocked"}
    assert all("explained by model.layers.0." in row.text for row in later)


def test_on_an_ascend_950_the_npu_runs_it(tmp_path, npu):
    npu("Ascend950PR_9599")
    folder = one_layer(tmp_path)
    report = run(folder, engine="npu", levels=["op"])
    report.raise_for_verdict()
    assert {row.engine for row in report.rows} == {"npu"}
    auto = run(folder, levels=["op"])
    assert {row.engine for row in auto.rows} == {"npu"}


def test_without_an_npu_the_engine_is_not_run(tmp_path, npu):
    npu("")
    assert device.npu_device().reason == "torch_npu sees no NPU"
    report = run(one_layer(tmp_path), engine="npu")
    assert (report.exit_code, report.coverage.compared) == (2, 0)
    assert {row.reason for row in report.rows} == {"not_run"}
    assert all("torch_npu sees no NPU" in row.text for row in report.rows)
