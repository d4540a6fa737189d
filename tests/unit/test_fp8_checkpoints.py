"""FP8 and MXFP8 checkpoints under the names of their publishers, against ml_dtypes and numpy."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch

from reconcile.exceptions import CheckpointError, FormatError
from reconcile.judging.suspect import weight_facts
from reconcile.registry import model_source

GATE = "model.layers.1.mlp.gate_proj"
HEAD = {"modules_to_not_convert": ["lm_head"]}
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24], **HEAD}
TENSOR = {"quant_method": "fp8", "weight_block_size": None, **HEAD}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}


def compressed(kind="float-quantized", static=False, **weights):
    inputs = GROUP["input_activations"] | {"dynamic": not static}
    group = GROUP | {"weights": GROUP["weights"] | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


MODELOPT = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
F32, BF16, U8, E8M0 = torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu

# name: declaration, name of the scale, its dtype, rows and columns under one scale (0: all), its
# shape as it is spelled (None: the grid), other scalars
SCHEMES = {
    "qwen3 block, float32": (BLOCK, "weight_scale_inv", F32, (16, 24), None, ()),
    "qwen3 block, bfloat16": (BLOCK, "weight_scale_inv", BF16, (16, 24), None, ()),
    "ue8m0 as floats": (
        BLOCK | {"scale_fmt": "ue8m0"},
        "weight_scale_inv",
        F32,
        (16, 24),
        None,
        (),
    ),
    "ue8m0 as bytes": (
        BLOCK | {"scale_fmt": "ue8m0"},
        "weight_scale_inv",
        E8M0,
        (16, 24),
        None,
        (),
    ),
    "ministral": (
        TENSOR | {"activation_scheme": "static"},
        "weight_scale_inv",
        BF16,
        (0, 0),
        (),
        ("activation_scale",),
    ),
    "per tensor [1]": (TENSOR, "weight_scale", F32, (0, 0), (1,), ()),
    "static, vLLM's names": (
        TENSOR | {"activation_scheme": "static"},
        "weight_scale",
        F32,
        (0, 0),
        (1,),
        ("input_scale",),
    ),
    "compressed channel": (
        compressed(strategy="channel"),
        "weight_scale",
        BF16,
        (1, 0),
        (-1, 1),
        (),
    ),
    "compressed tensor, static": (
        compressed(strategy="tensor", static=True),
        "weight_scale",
        F32,
        (0, 0),
        (1,),
        ("input_scale",),
    ),
    "compressed block": (
        compressed(strategy="block", block_structure=[16, 24]),
        "weight_scale",
        F32,
        (16, 24),
        None,
        (),
    ),
    "compressed mxfp8": (compressed("mxfp8-quantized"), "weight_scale", U8, (1, 32), None, ()),
    "mxfp8": (
        {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]},
        "weight_scale",
        U8,
        (1, 32),
        None,
        (),
    ),
    "modelopt mxfp8": (
        {"quant_method": "modelopt"} | MODELOPT,
        "weight_scale",
        U8,
        (1, 32),
        None,
        (),
    ),
    "modelopt_mxfp8": (
        {"quant_method": "modelopt_mxfp8", "exclude_modules": ["lm_*"]},
        "weight_scale",
        U8,
        (1, 32),
        None,
        (),
    ),
}


class Made:
    """A tiny checkpoint under a scheme, and what its weights are by ml_dtypes."""

    def __init__(self, tiny, scheme, **changes):
        self.declared, self.scale, dtype, block, spelt, others = SCHEMES[scheme]
        self.made = tiny(intermediate_size=64, **changes)
        self.made.config["quantization_config"] = self.declared
        self.expected = {}
        rng = np.random.default_rng(1)
        for name in [n.removesuffix("_scale") for n in self.made.tensors if n.endswith("_scale")]:
            module = name.removesuffix(".weight")
            n, k = self.made.dense[name].shape
            codes = rng.integers(0, 0x7E, (n, k), dtype=np.uint8)
            grid = self._grid(rng, dtype, n, k, block)
            self._expect(module, codes, grid, block)
            stored = grid if spelt is None else grid.reshape(spelt)
            self._store(module, codes, stored, others)

    def _grid(self, rng, dtype, n, k, block):
        rows, columns = block[0] or n, block[1] or k
        shape = (-(-n // rows), -(-k // columns))
        if dtype in (U8, E8M0):
            return torch.tensor(rng.integers(110, 125, shape), dtype=U8).view(dtype)
        if "ue8m0" in self.declared.values():
            return torch.tensor(2.0 ** rng.integers(-9, -4, shape), dtype=dtype)
        return torch.tensor(rng.uniform(0.001, 0.02, shape), dtype=dtype)

    def _expect(self, module, codes, grid, block):
        n, k = codes.shape
        if grid.dtype in (U8, E8M0):
            values = 2.0 ** (grid.view(U8).numpy().astype(np.float64) - 127)
        else:
            values = grid.double().numpy()
        row = np.arange(n)[:, None] // (block[0] or n)
        column = np.arange(k)[None, :] // (block[1] or k)
        decoded = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        self.expected[module] = decoded * values[row, column]

    def _store(self, module, codes, scales, others):
        tensors = self.made.tensors
        del tensors[f"{module}.weight_scale"]
        tensors[f"{module}.weight"] = torch.tensor(codes).view(torch.float8_e4m3fn)
        tensors[f"{module}.{self.scale}"] = scales
        for other in others:
            tensors[f"{module}.{other}"] = torch.tensor(0.5)


def load(folder, rule=None):
    return model_source().load(folder, rule)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_is_read_under_its_publishers_names(tiny, tmp_path, scheme):
    made = Made(tiny, scheme)
    checkpoint = load(made.made.write(tmp_path, shards=2))
    assert set(checkpoint.weights) == set(made.expected)
    assert len(made.expected) == 14
    for module, weight in checkpoint.weights.items():
        assert np.array_equal(weight.dequantize().numpy(), made.expected[module]), module
        facts = weight_facts(weight, checkpoint.decode_again(module), None)
        assert facts["stats"]["second_decoder_agrees"], module
        assert facts["suspicions"] == []
    static = SCHEMES[scheme][-1] != ()
    assert set(checkpoint.activation_scales) == (set(made.expected) if static else set())
    assert all(scale == 0.5 for scale in checkpoint.activation_scales.values())
    assert "lm_head.weight" in checkpoint.dense


def test_modelopt_may_declare_in_a_file_of_its_own(tiny, tmp_path):
    made = Made(tiny, "modelopt mxfp8")
    del made.made.config["quantization_config"]
    folder = made.made.write(tmp_path)
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": MODELOPT}))
    first = load(folder)
    assert set(first.weights) == set(made.expected)
    file.write_text(json.dumps({"quantization": MODELOPT, "producer": "x"}))
    assert load(folder).sha256 != first.sha256
    for key in ("kv_cache_quant_algo", "exclude_modules"):
        file.write_text(
            json.dumps({"quantization": {k: v for k, v in MODELOPT.items() if k != key}})
        )
        with pytest.raises(CheckpointError, match=f"{key} is missing"):
            load(folder)
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="expected a table 'quantization'"):
        load(folder)


def test_deepseek_v3_with_576_rows(tiny, tmp_path):
    """kv_a_proj_with_mqa: 576 rows are four and a half blocks of 128, so five rows of scales."""
    module = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    rng = np.random.default_rng(2)
    made = tiny(
        kind="deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
    )
    made.config["quantization_config"] = BLOCK | {"weight_block_size": [128, 128]}
    for name in [n for n in made.tensors if n.endswith(".weight_scale")]:
        weight = name.removesuffix("_scale")
        n, k = made.dense[weight].shape
        grid = torch.tensor(rng.uniform(0.001, 0.02, (-(-n // 128), -(-k // 128))), dtype=F32)
        made.tensors[f"{weight}_scale_inv"] = grid
        made.tensors[weight] = torch.tensor(rng.integers(0, 0x7E, (n, k)), dtype=U8)
        del made.tensors[name]
    codes = made.tensors[f"{module}.weight"].numpy().view(ml_dtypes.float8_e4m3fn)
    grid = made.tensors[f"{module}.weight_scale_inv"].double().numpy()
    assert grid.shape == (5, 1)
    weight = load(made.write(tmp_path)).weights[module]
    assert weight.shape == (576, 32)
    assert np.array_equal(
        weight.dequantize().numpy(), codes.astype(float) * np.repeat(grid, 128, 0)[:576]
    )
    made.tensors[f"{module}.weight_scale_inv"] = made.tensors[f"{module}.weight_scale_inv"][:4]
    with pytest.raises(FormatError, match=r"shape \[5, 1\].*got float32 \[4, 1\]"):
        load(made.write(tmp_path / "four"))


# --- what is refused ---------------------------------------------------------------------------


def declare(**changes):
    return lambda made: made.made.config["quantization_config"].update(changes)


def change(part, make):
    name = f"{GATE}.{part}"
    return lambda made: made.made.tensors.update({name: make(made.made.tensors[name])})


def drop(part):
    return lambda made: made.made.tensors.pop(f"{GATE}.{part}")


def rename(old, new):
    def change(made):
        tensors = made.made.tensors
        tensors[f"{GATE}.{new}"] = tensors.pop(f"{GATE}.{old}")

    return change


def groups(**weights):
    return declare(config_groups=compressed(**weights)["config_groups"])


B, T, C, X = "qwen3 block, float32", "ministral", "compressed channel", "mxfp8"
REFUSED = {
    "grid of another block": (
        B,
        declare(weight_block_size=[32, 24]),
        ["block [32, 24]", "[1, 2]", "[2, 2]"],
    ),
    "grid rounded down": (
        B,
        change("weight_scale_inv", lambda s: s[:, :1]),
        [GATE, "[4, 2]", "[4, 1]"],
    ),
    "grid transposed": (B, change("weight_scale_inv", lambda s: s.T.contiguous()), ["transposed"]),
    "block declared, one scale": (
        B,
        change("weight_scale_inv", lambda _: torch.ones(())),
        [GATE, "block", "[]"],
    ),
    "one scale declared, grid": (
        T,
        change("weight_scale_inv", lambda _: torch.ones(4, 2)),
        [GATE, "per tensor", "[4, 2]"],
    ),
    "one scale declared, rows": (
        T,
        change("weight_scale_inv", lambda _: torch.ones(64)),
        [GATE, "per tensor", "[64]"],
    ),
    "channel declared, one scale": (
        C,
        change("weight_scale", lambda _: torch.ones(1)),
        [GATE, "channel", "[64]", "[1]"],
    ),
    "bytes where floats": (
        B,
        change("weight_scale_inv", lambda s: s.to(U8)),
        [GATE, "float32", "uint8"],
    ),
    "floats where bytes": (
        X,
        change("weight_scale", lambda s: s.float()),
        [GATE, "uint8", "float32 [64, 1]"],
    ),
    "ue8m0, no power of two": (
        "ue8m0 as floats",
        change("weight_scale_inv", lambda s: s * 1.5),
        [GATE, "powers of two", "8 of 8"],
    ),
    "ue8m0 without blocks": (T, declare(scale_fmt="ue8m0"), ["ue8m0", "weight_block_size"]),
    "name of block scales": (
        B,
        rename("weight_scale_inv", "weight_scale"),
        [f"missing tensors (1): {GATE}.weight_scale_inv"],
    ),
    "static without its scale": (
        T,
        drop("activation_scale"),
        [f"{GATE}.activation_scale or input_scale"],
    ),
    "dynamic with a stored scale": (
        T,
        declare(activation_scheme="dynamic"),
        ["unused tensors (14)", "activation_scale"],
    ),
    "activation scale zero": (
        T,
        change("activation_scale", lambda s: s * 0),
        ["not one positive number (1)", GATE],
    ),
    "activation scales": (
        T,
        change("activation_scale", lambda s: s.expand(2).clone()),
        ["not one positive", "[2]"],
    ),
    "block of one number": (
        B,
        declare(weight_block_size=128),
        ["weight_block_size", "[rows, columns]", "128"],
    ),
    "block zero": (B, declare(weight_block_size=[0, 128]), ["weight_block_size", "[0, 128]"]),
    "another fmt": (B, declare(fmt="e5m2"), ["fmt 'e5m2'", "e4m3"]),
    "another activation scheme": (
        B,
        declare(activation_scheme="sttic"),
        ["activation_scheme", '"static"'],
    ),
    "another strategy": (C, groups(strategy="group"), ["strategy 'group'", "channel"]),
    "four bits": (C, groups(strategy="channel", num_bits=4), ["num_bits", "expected 8, got 4"]),
    "two groups": (C, declare(config_groups={}), ["config_groups", "expected one group"]),
    "pattern": (C, declare(ignore=["re:("]), ["ignore", "'re:('", "no pattern"]),
    "another algorithm": (
        "modelopt mxfp8",
        declare(quant_algo="NVFP4"),
        ["quant_algo 'NVFP4'", "MXFP8"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_its_declaration_names_both(tiny, tmp_path, case):
    scheme, wrong, said = REFUSED[case]
    made = Made(tiny, scheme)
    made.made.config = json.loads(json.dumps(made.made.config))
    wrong(made)
    with pytest.raises((CheckpointError, FormatError)) as caught:
        load(made.made.write(tmp_path))
    assert all(words in str(caught.value) for words in said), str(caught.value)


def test_an_mxfp8_k_of_no_whole_groups_is_refused(tiny, tmp_path):
    made = Made(tiny, "mxfp8")
    made.made.config["intermediate_size"] = 80
    for name in ("gate_proj", "up_proj", "down_proj"):
        for layer in range(2):
            module = f"model.layers.{layer}.mlp.{name}"
            shape = (32, 80) if name == "down_proj" else (80, 32)
            made.made.tensors[f"{module}.weight"] = torch.ones(shape).to(torch.float8_e4m3fn)
            made.made.tensors[f"{module}.weight_scale"] = torch.full(
                (shape[0], -(-shape[1] // 32)), 120, dtype=U8
            )
    with pytest.raises(FormatError, match=r"whole groups of 32, got \[32, 80\]"):
        load(made.made.write(tmp_path))


@pytest.mark.parametrize(
    ("entry", "dense"),
    [
        ("re:.*mlp.*", ["mlp"]),
        ("re:mlp", []),
        ("model.layers.*.mlp.*", ["mlp"]),
        ("*self_attn*", ["self_attn"]),
        ("*.mlp", []),
    ],
)
def test_patterns_and_globs_among_the_ignored(tiny, tmp_path, entry, dense):
    made = Made(tiny, "compressed channel")
    made.made.config["quantization_config"]["ignore"] = ["lm_head", entry]
    for module in [m for m in made.expected if any(part in m for part in dense)]:
        made.made.tensors[f"{module}.weight"] = torch.tensor(made.expected.pop(module)).bfloat16()
        del made.made.tensors[f"{module}.weight_scale"]
    assert set(load(made.made.write(tmp_path)).weights) == set(made.expected)


# --- load rules --------------------------------------------------------------------------------


def test_vllm_requantises_shards_to_their_largest_scale(tiny, tmp_path):
    made = Made(tiny, "per tensor [1]")
    checkpoint = load(made.made.write(tmp_path), "vllm_shard_maximum")
    plain = load(tmp_path)
    for group in (
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ):
        modules = [
            m
            for m in plain.weights
            if m.startswith("model.layers.1.") and m.split(".")[-1] in group
        ]
        assert len(modules) == len(group)
        largest = max(plain.weights[m].scales.item() for m in modules)
        for module in modules:
            weight, before = checkpoint.weights[module], plain.weights[module]
            decoded = before.codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            half = (decoded * np.float32(before.scales.item())).astype(np.float16)
            scaled = half.astype(np.float32) * (np.float32(1) / np.float32(largest))
            codes = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            assert weight.scales.item() == largest
            assert np.array_equal(weight.codes.numpy(), codes), module
    changed = sum(
        int((w.codes != plain.weights[m].codes).sum()) for m, w in checkpoint.weights.items()
    )
    assert changed > 1000
    assert checkpoint.notes == (f"load rule vllm_shard_maximum: {changed} of 18432 codes changed",)
    assert checkpoint.sha256 != plain.sha256
    assert plain.notes == ()


@pytest.mark.parametrize(
    ("scheme", "rule", "said"),
    [
        ("per tensor [1]", "vllm_shard_max", 'did you mean "vllm_shard_maximum"'),
        (
            "compressed channel",
            "vllm_shard_maximum",
            "is for fp8_e4m3_tensor; .* is fp8_e4m3_channel",
        ),
    ],
)
def test_a_rule_that_does_not_apply_is_refused(tiny, tmp_path, scheme, rule, said):
    with pytest.raises(CheckpointError, match=said):
        load(Made(tiny, scheme).made.write(tmp_path), rule)
