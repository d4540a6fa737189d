"""Unquantised checkpoints: every linear as it is stored, batched ones by their class."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reconcile.exceptions import CheckpointError
from reconcile.grouped import GroupedWeight
from reconcile.linears import DenseWeight
from reconcile_fixtures import __file__ as fixtures
from reconcile_references.dense import decode_dense_again
from reconcile_references.models import TransformersModels


@pytest.fixture(scope="module")
def folder():
    from pathlib import Path

    return Path(fixtures).parent / "tiny-dsv4"


@pytest.fixture(scope="module")
def checkpoint(folder):
    return TransformersModels().load(folder)


def test_plain_and_batched_linears(checkpoint, folder):
    stored = load_file(folder / "model.safetensors")
    batched = {n: w for n, w in checkpoint.weights.items() if isinstance(w, GroupedWeight)}
    assert set(batched) == {f"model.layers.{i}.self_attn.o_a_proj" for i in range(3)}
    for name, weight in batched.items():
        tensor = stored[f"{name}.weight"]
        assert torch.equal(weight.dequantize(), tensor.double().view(8, 32, 128))
    plain = checkpoint.weights["model.layers.0.self_attn.o_b_proj"]
    assert isinstance(plain, DenseWeight)
    assert torch.equal(plain.tensor, stored["model.layers.0.self_attn.o_b_proj.weight"])
    assert "lm_head" not in checkpoint.weights


def test_the_module_is_the_architectures_own(checkpoint):
    """Our reference in its place gives what transformers' module gives, in float64."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

    name = "model.layers.1.self_attn.o_a_proj"
    weight = checkpoint.weights[name]
    theirs = DeepseekV4GroupedLinear(128, 256, 8).double()
    theirs.weight.data = weight.dequantize().reshape(256, 128)
    x = torch.randn(2, 3, 8, 128, dtype=torch.float64)
    ours = torch.einsum("...gk,gnk->...gn", x, weight.dequantize())
    assert torch.allclose(theirs(x), ours, rtol=1e-13, atol=1e-13)


def test_in_float64_nothing_is_kept_in_float32(checkpoint):
    model = checkpoint.build(torch.float64, lambda n, w: torch.nn.Identity())
    kinds = {p.dtype for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()}
    assert kinds == {torch.float64}
    kept = checkpoint.build(torch.bfloat16, lambda n, w: torch.nn.Identity())
    assert kept.model.norm.weight.dtype == torch.float32  # as the architecture has it


def change(folder, place, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    (place / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


NAME = "model.layers.0.self_attn.o_a_proj.weight"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(NAME), "missing tensors (1)"),
        (lambda t: t.update({NAME: t[NAME].float().to(torch.float8_e4m3fn)}), "float8_e4m3fn"),
        (lambda t: t.update({NAME: t[NAME][:-1].clone()}), "[255, 128]"),
        (lambda t: t.update({"model.layers.0.extra": torch.ones(1)}), "unused tensors (1)"),
    ],
)
def test_what_does_not_fit_is_named(folder, tmp_path, edit, said):
    with pytest.raises(CheckpointError) as error:
        TransformersModels().load(change(folder, tmp_path, edit))
    assert said in str(error.value)


def test_a_load_rule_needs_quantised_weights(folder):
    with pytest.raises(CheckpointError, match="needs quantised weights"):
        TransformersModels().load(folder, "vllm_shard_maximum")


def test_the_second_decoder_reads_bits():
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(256, 256)
    again = decode_dense_again(DenseWeight(tensor=tensor))
    assert torch.equal(again.nan_to_num(7.0), tensor.double().nan_to_num(7.0))
    assert decode_dense_again(DenseWeight(tensor=tensor.float())) is None
