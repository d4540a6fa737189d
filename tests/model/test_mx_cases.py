"""The embedded MXFP8 cases by name."""

import dataclasses
import json

import pytest
import torch
from small_checkpoints import first_layer, mxfp8_case, write

import reconcile
from reconcile.exceptions import CheckpointError
from reconcile_references import derived
from reconcile_references.fp8 import FP8_E4M3_BLOCK
from reconcile_references.models import TransformersCheckpoint

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


def test_a_mixture_of_experts_passes_with_its_routing():
    report = reconcile.run("tiny-mxfp8-moe", only="model.layers.0.*", levels=["op", "module"])
    report.raise_for_verdict()
    assert (report.coverage.expected, report.coverage.compared) == (6, 6)
    routing = [row for row in report.rows if "set_gap" in row.stats]
    assert {row.tap for row in routing} == {f"model.layers.{i}.mlp.gate:out.2" for i in (0, 1)}
    assert all(row.limits.bounds["set_gap"] > 0 for row in routing)
    assert {row.verdict for row in routing} == {"PASS"}
    idle = [row for row in routing if row.pass_.startswith("decode")]
    assert len(idle) == len(routing) * 2 / 3
    for row in idle:  # one token, two of four experts
        experts = row.stats["experts_idle"]
        assert len(experts) == 2
        assert row.text == f"no token is routed to expert {experts[0]}, {experts[1]}"
    ran = [row for row in report.rows if "experts" in row.tap and row.level == "op"]
    one = [row for row in ran if row.pass_.startswith("decode") and row.check == "chained"]
    assert {row.shape[:2] for row in one} == {(4, 1)}  # every expert is compared, idle or not
    assert all(row.stats["calls"] == 1 for row in one)
    steps = [
        row.check for row in report.rows if row.tap.startswith("model.layers.0.mlp.experts.w2")
    ]
    assert "resolve.0" in steps
    assert "persist.3" in steps


def test_a_router_that_chooses_other_experts_fails(monkeypatch):
    """The model goes on with the reference's experts, but its own choice is what is judged."""
    build, built = TransformersCheckpoint.build, []

    def third_is_the_candidate(self, dtype, make):
        model = build(self, dtype, make)
        built.append(model)
        if len(built) == 3:
            model.model.layers[0].mlp.gate.weight.neg_()
        return model

    monkeypatch.setattr(TransformersCheckpoint, "build", third_is_the_candidate)
    report = reconcile.run("tiny-mxfp8-moe", only="*.0.self_attn.q_proj", levels=["module"])
    failed = {row.tap for row in report.failures() if "set_gap" in row.stats}
    assert "model.layers.0.mlp.gate:out.2" in failed
    assert report.exit_code == 1


MODELOPT = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}


def modelopt(folder, like):
    """One layer, declared as ModelOpt does, in a file of its own."""
    config, tensors = dataclasses.replace(like, reshape=first_layer).derive()
    config.pop("quantization_config")
    write(folder, config, tensors)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": MODELOPT}))
    return folder


def test_a_checkpoint_of_modelopt_skips_resolving(tmp_path):
    report = reconcile.run(mxfp8_case(modelopt(tmp_path / "modelopt", derived.mxfp8_native)))
    report.raise_for_verdict()
    steps = {row.check for row in report.rows if row.level == "stage"}
    assert steps == {"repack", "persist"}
    losses = {row.stats["sqnr_db"] for row in report.rows if row.level == "stage"}
    assert losses == {float("inf")}


def test_a_checkpoint_of_modelopt_that_is_not_serialised_is_refused(tmp_path):
    dense = dataclasses.replace(
        derived.mxfp8_native, store=lambda name, weight: {f"{name}.weight": weight}
    )
    case = mxfp8_case(modelopt(tmp_path / "dense", dense))
    with pytest.raises(CheckpointError, match=r"missing tensors \(7\): .*weight_scale"):
        reconcile.run(case)


def powers_of_two(name, weight):
    """Block FP8 whose scales are the least powers of two under which nothing saturates."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float().abs(), (0, -k % 128, 0, -n % 128))
    largest = padded.reshape(-(-n // 128), 128, -(-k // 128), 128).amax((1, 3))
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    codes = weight.float() / FP8_E4M3_BLOCK.spread(scales, (n, k))
    return {
        f"{name}.weight": codes.to(torch.float8_e4m3fn),
        f"{name}.weight_scale_inv": scales,
    }


@pytest.mark.parametrize(
    ("kernel", "lossless"), [("mxfp8_npu", False), ("mxfp8_npu.scale_alg_1", True)]
)
def test_what_requantising_powers_of_two_loses(tmp_path, kernel, lossless):
    """Nothing under ``rceil`` (scale_alg 1); under ``floor`` (0) the groups that saturate."""
    source = dataclasses.replace(
        derived.fp8_block,
        declared=derived.fp8_block.declared | {"scale_fmt": "ue8m0"},
        store=powers_of_two,
        reshape=first_layer,
    )
    case = mxfp8_case(write(tmp_path / "powers", *source.derive()))
    report = reconcile.Session(case).run(kernel=kernel, levels=["op"])
    report.raise_for_verdict()
    stages = [row.stats for row in report.rows if row.check == "requantise"]
    assert len(stages) == 7
    for stats in stages:
        assert (stats["changed_share"] == 0) is lossless
        assert (stats["sqnr_db"] == float("inf")) is lossless
        assert (stats["saturating_share"] == 0) is lossless
