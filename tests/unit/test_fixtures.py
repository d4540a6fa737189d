"""The stored data: complete, as recorded, and derived by the rule that the README states."""

import hashlib
import json
import math
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file

from reconcile.contract import Contract
from reconcile.linears import ReferenceLinear
from reconcile.registry import embedded_case, model_source
from reconcile_references.ternary import pack_k_interleaved, quantize_ternary

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures/reconcile_fixtures"
GENERATE = ROOT / "fixtures/generate"
MANIFEST = json.loads((FIXTURES / "manifest.json").read_text())
PROMPTS = json.loads((FIXTURES / "prompts.json").read_text())["prompts"]
UNLISTED = ("README.md", "manifest.json")


# --- the manifest ------------------------------------------------------------------------------


def test_the_manifest_lists_every_file():
    present = {
        file.relative_to(FIXTURES).as_posix()
        for file in FIXTURES.rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc") and file.name not in UNLISTED
    }
    assert set(MANIFEST["files"]) == present


@pytest.mark.parametrize("name", sorted(MANIFEST["files"]))
def test_a_file_is_what_the_manifest_says(name):
    entry, content = MANIFEST["files"][name], (FIXTURES / name).read_bytes()
    assert len(content) == entry["bytes"]
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    assert entry["generator"]
    assert len(content) < (8_000_000 if name.startswith("tiny-lm-master/") else 2_000_000)


def test_all_files_together_stay_small():
    assert sum(entry["bytes"] for entry in MANIFEST["files"].values()) < 9_000_000


def test_the_package_ships_no_generator_and_names_its_case():
    assert embedded_case() == FIXTURES / "cases/tiny-ternary.toml"
    assert [file.name for file in FIXTURES.rglob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 1, "no --note says how these are made: a.bin"),
        (["--note", "a.bin=by hand"], 0, ""),
        (["--note", "a.bin=x=y", "--seed", "a.bin=3"], 0, ""),
        (["--note", "b.bin=by hand"], 1, "no such data files: b.bin"),
        (["--note", "a.bin"], 2, "expected path=text"),
    ],
)
def test_the_manifest_wants_a_note_for_every_file(tmp_path, arguments, code, said):
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "README.md").write_text("not listed")
    command = [sys.executable, str(GENERATE / "manifest.py"), "--directory", str(tmp_path)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert (done.returncode, said in done.stderr) == (code, True)
    if code == 0:
        assert json.loads((tmp_path / "manifest.json").read_text())["files"] == {
            "a.bin": {
                "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
                "bytes": 3,
                "generator": arguments[1].partition("=")[2],
                "seed": 3 if "--seed" in arguments else None,
            }
        }


# --- prompts and model -------------------------------------------------------------------------


def test_prompts_are_four_times_64_distinct_byte_tokens():
    assert [len(prompt["tokens"]) for prompt in PROMPTS] == [64] * 4
    assert len({tuple(prompt["tokens"]) for prompt in PROMPTS}) == 4
    for prompt in PROMPTS:
        assert bytes(prompt["tokens"]).decode("ascii") == prompt["text"]


def test_the_packed_model_has_learnt_its_text():
    """Loss of the packed model on the prompts: as recorded, and far below guessing by bytes."""
    checkpoint = model_source().load(FIXTURES / "tiny-lm-ternary")
    model = checkpoint.build(
        torch.float64, lambda _, w: ReferenceLinear(w, Contract(), torch.float64)
    )
    losses = []
    for prompt in PROMPTS:
        tokens = prompt["tokens"]
        with torch.no_grad(), checkpoint.precise(torch.float64):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        highest = logits.max(axis=1)
        total = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
        chosen = logits[np.arange(63), tokens[1:]]
        losses.append(float((total[:63] - chosen).mean()))
    assert losses == pytest.approx(MANIFEST["training"]["prompt_losses_ternary"], abs=1e-3)
    counts = Counter(token for prompt in PROMPTS for token in prompt["tokens"])
    entropy = -sum(c / 256 * math.log(c / 256) for c in counts.values())
    mean = sum(losses) / 4
    assert mean < 0.6 * entropy
    assert mean < 0.6 * MANIFEST["training"]["validation_unigram_entropy"]


# --- the derivation ----------------------------------------------------------------------------


def test_the_packed_checkpoint_is_derived_from_the_master_to_the_byte(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import tiny_lm;"
        "tiny_lm.derive_checkpoint(Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    arguments = [str(GENERATE), str(FIXTURES / "tiny-lm-master"), str(tmp_path)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    for file in ("config.json", "model.safetensors"):
        stored = (FIXTURES / "tiny-lm-ternary" / file).read_bytes()
        assert (tmp_path / file).read_bytes() == stored


def test_the_packed_bytes_follow_from_the_master_by_exact_arithmetic():
    """A few rows of every layer, by fractions and by the definition of the format."""
    master = load_file(FIXTURES / "tiny-lm-master/model.safetensors")
    packed = load_numpy_bits(FIXTURES / "tiny-lm-ternary/model.safetensors")
    quantised = [name for name in packed if name.endswith("proj.weight")]
    assert len(quantised) == 42
    for name in quantised:
        rows = [0, len(master[name]) // 2 + 1, len(master[name]) - 1]
        values, scales = exact_quantize(master[name][rows].double().tolist())
        codes = [[{0: 0, 1: 1, -1: 2}[v] for v in row] for row in values]
        expected = [
            [sum(row[4 * j + i] << (2 * i) for i in range(4)) for j in range(len(row) // 4)]
            for row in codes
        ]
        assert packed[name][rows].tolist() == expected
        assert packed[f"{name}_scale"][rows].tolist() == scales


def load_numpy_bits(file):
    """Quantised tensors of a checkpoint, by numpy, which has no bfloat16."""
    return {n: t.numpy() for n, t in load_file(file).items() if t.dtype != torch.bfloat16}


def test_tensors_that_are_not_quantised_are_those_of_the_master():
    master = load_file(FIXTURES / "tiny-lm-master/model.safetensors")
    packed = load_file(FIXTURES / "tiny-lm-ternary/model.safetensors")
    dense = {name for name, tensor in packed.items() if tensor.dtype == torch.bfloat16}
    assert dense == {name for name in master if not name.endswith("proj.weight")}
    assert all(torch.equal(packed[name], master[name]) for name in dense)


def exact_quantize(rows):
    """The ternary rule in rational arithmetic; the scale is the nearest float32, ties to even."""
    values, scales = [], []
    for row in rows:
        exact = [Fraction(value) for value in row]
        mean = sum(map(abs, exact)) / len(exact)
        scale = Fraction(nearest_float32(mean)) or Fraction(1)
        values.append([max(-1, min(1, round(value / scale))) for value in exact])
        scales.append(float(scale))
    return values, scales


def nearest_float32(exact):
    """Round a non-negative fraction to float32, by comparing distances to the neighbours."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-1)), guess, np.nextafter(guess, np.float32(np.inf))]
    finite = [float(x) for x in around if np.isfinite(x) and x >= 0]

    def preference(x):
        return abs(Fraction(x) - exact), int(np.float32(x).view(np.uint32)) & 1

    return min(finite, key=preference)


ROWS = {
    "mean of magnitudes": [[0.5, -1.5, 1.0, 1.0]],
    "ties at half the scale": [[1.0, 0.5, -0.5, 2.0], [2.0, 1.0, -1.0, 4.0]],
    "just beside the tie": [[1.0, 0.5 + 2**-30, -0.5 + 2**-30, 2.0 - 2**-29]],
    "ties at one and a half": [[1.5, -1.5, 0.5, 0.5]],
    "zero row": [[0.0, -0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]],
    "negative rows": [[-1.0, -2.0, -3.0, -4.0], [-0.1, -0.1, -0.1, -0.1]],
    "outlier": [[1e30, 1.0, -1.0, 0.0]],
    "tiny": [[1e-38, -3e-38, 1e-39, 0.0], [2**-149, 0.0, 0.0, 0.0]],
    "mean between two float32": [[1.0, 1.0 + 2**-22, 1.0, 1.0 + 2**-22]],
    "one column": [[3.0], [-0.25]],
}


@pytest.mark.parametrize("case", ROWS)
def test_the_ternary_rule_is_exact(case):
    values, scales = quantize_ternary(torch.tensor(ROWS[case], dtype=torch.float64))
    expected_values, expected_scales = exact_quantize(ROWS[case])
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert values.tolist() == expected_values
    assert scales.tolist() == expected_scales


@pytest.mark.parametrize("seed", range(6))
def test_the_ternary_rule_is_exact_on_bfloat16_matrices(seed):
    """bfloat16 has few digits, so that ties happen."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(0, 2.0 ** rng.integers(-8, 3), (5, 12)).astype(ml_dtypes.bfloat16)
    wide = dense.astype(np.float64)
    values, scales = quantize_ternary(torch.tensor(wide).bfloat16())
    assert (values.tolist(), scales.tolist()) == exact_quantize(wide.tolist())


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_a_long_row_is_rounded_once(seed):
    dense = np.random.default_rng(seed).normal(0, 1, (4, 300)).astype(np.float32)
    values, scales = quantize_ternary(torch.tensor(dense))
    assert (values.tolist(), scales.tolist()) == exact_quantize(dense.astype(np.float64).tolist())


def test_the_rule_by_hand():
    """Mean magnitude 1; 0.5 and -0.5 are ties and go to the even 0, 1.5 rounds to 2 and is cut."""
    values, scales = quantize_ternary(torch.tensor([[1.5, 0.5, -0.5, -1.5], [0, 0, 0, 0]]))
    assert scales.tolist() == [1.0, 1.0]
    assert values.tolist() == [[1, 0, 0, -1], [0, 0, 0, 0]]
    assert pack_k_interleaved(values).tolist() == [[0b10_00_00_01], [0]]


# --- vectors -----------------------------------------------------------------------------------


def test_vectors_are_described():
    described = (FIXTURES / "vectors/README.md").read_text()
    for file in sorted((FIXTURES / "vectors").glob("*.safetensors")):
        assert file.name in described
        prefixes = {name.split(".")[0] for name in load_numpy(file)}
        for prefix in sorted(prefixes):
            family = prefix.split("_")[0]
            assert f"`{prefix}`" in described or f"`{family}" in described, prefix
