"""Checkpoints that are derived on first use: the same bytes everywhere, whole or made again."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from reconcile import registry
from reconcile.exceptions import CheckpointError, ConfigError
from reconcile_references import derived
from reconcile_references.fp8 import FP8_E4M3_BLOCK, FP8_E4M3_CHANNEL, FP8_E4M3_TENSOR
from reconcile_references.quantise import Fp8Rule

DERIVED = [derived.fp8_tensor, derived.fp8_channel, derived.fp8_block]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("made", DERIVED, ids=lambda made: made.name)
def test_a_derived_checkpoint_loads_whole(cache, made):
    place = made()
    assert place.parent == cache / "checkpoints"
    checkpoint = registry.model_source().load(place)
    assert len(checkpoint.weights) == 42
    masters = checkpoint.originals(registry.embedded_case().parent.parent / "tiny-lm-master")
    for name, weight in checkpoint.weights.items():
        exact, values = masters[name].double(), weight.dequantize()
        assert torch.equal(values, checkpoint.decode_again(name))
        noise = (values - exact).square().sum() / exact.square().sum()
        assert -10 * torch.log10(noise) > 30  # dB; E4M3 under any of these scales


def test_a_damaged_copy_is_made_again_and_a_whole_one_is_kept(cache):
    place = derived.fp8_block()
    file = place / "model.safetensors"
    whole, touched = file.read_bytes(), file.stat().st_mtime_ns
    assert derived.fp8_block() == place
    assert file.stat().st_mtime_ns == touched
    for damage in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        file.write_bytes(damage)
        assert derived.fp8_block() == place
        assert load_file(file).keys() == load_file(derived.fp8_block() / file.name).keys()
        assert file.read_bytes() == whole
    (place / "config.json").write_text("{}")
    derived.fp8_block()
    assert "quantization_config" in (place / "config.json").read_text()
    assert [item.name for item in place.parent.iterdir()] == [place.name]


def test_other_bytes_than_pinned_are_refused(cache):
    other = dataclasses.replace(derived.fp8_block, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=r"expected sha256 0000.*derives e0defab8"):
        other()
    assert not (cache / "checkpoints").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set RECONCILE_CACHE"):
        derived.fp8_block()


def test_a_case_names_a_derived_checkpoint(cache, tmp_path):
    assert registry.checkpoint("derived:tiny-lm-fp8-block", tmp_path) == derived.fp8_block()
    assert registry.checkpoint("a/b", tmp_path) == tmp_path / "a/b"
    with pytest.raises(ConfigError, match='did you mean "tiny-lm-fp8-block"'):
        registry.checkpoint("derived:tiny-lm-fp8-blok", tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "rows", "columns"),
    [
        (FP8_E4M3_TENSOR, 300, 200),
        (FP8_E4M3_CHANNEL, 1, 200),
        (FP8_E4M3_BLOCK, 128, 128),
        (dataclasses.replace(FP8_E4M3_BLOCK, block=(7, 64)), 7, 64),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_fp8_rule_is_what_it_says(form, rows, columns, dtype):
    rng = np.random.default_rng(3)
    dense = rng.normal(size=(300, 200)).astype(np.float32)
    dense[:rows, :columns] = 0
    codes, scales = Fp8Rule(form=form, scale_dtype=dtype)(torch.tensor(dense))
    numpy_dtype = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16}[dtype]
    grid = scales.float().numpy().reshape(-(-300 // rows), -(-200 // columns))
    for i, j in np.ndindex(grid.shape):
        part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        largest = np.abs(dense[part]).max()
        scale = np.float32(numpy_dtype(largest / np.float32(448))) or np.float32(1)
        assert grid[i, j] == scale
        expected = np.clip(dense[part] / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        assert np.array_equal(codes.view(torch.uint8).numpy()[part], expected.view(np.uint8))
