"""Tiny quantised checkpoints, made from transformers' own random models."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DECLARED = {
    "ternary_k_interleaved": {"quant_method": "ternary", "format": "ternary_k_interleaved"},
    "ternary_hf": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
    "ternary_hf_divide": {"quant_method": "bitnet", "linear_class": "bitlinear"},
}


def pack_by_definition(name, values):
    """Bytes of a ternary matrix, written from the definition of each format."""
    if name == "ternary_k_interleaved":
        codes = np.where(values < 0, 2, values).astype(np.uint8)
        return sum(codes[:, i::4] << (2 * i) for i in range(4))
    codes = (values + 1).astype(np.uint8)
    rows = len(codes) // 4
    return sum(codes[i * rows : (i + 1) * rows] << (2 * i) for i in range(4))


class Tiny:
    """A quantised checkpoint in memory: what its files hold, and its plain float64 weights."""

    def __init__(self, kind, name, **changes):
        config = transformers.AutoConfig.for_model(kind, **SIZES | changes)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        rng = np.random.default_rng(0)
        self.config = json.loads(config.to_json_string(use_diff=False))
        self.config["quantization_config"] = DECLARED[name] | {
            "modules_to_not_convert": ["lm_head"]
        }
        self.tensors = dict(model.state_dict())
        self.dense = {n: t.double().numpy() for n, t in self.tensors.items()}
        if config.tie_word_embeddings:
            del self.tensors["lm_head.weight"]
        for module, linear in model.model.named_modules(prefix="model"):
            if isinstance(linear, torch.nn.Linear):
                self._quantize(name, module, tuple(linear.weight.shape), rng)

    def _quantize(self, name, module, shape, rng):
        values = rng.integers(-1, 2, shape)
        per_row = name == "ternary_k_interleaved"
        scales = rng.uniform(0.05, 0.2, shape[0] if per_row else 1)
        stored = torch.tensor(scales, dtype=torch.float32 if per_row else torch.bfloat16)
        wide = stored.double().numpy()[:, None]
        self.tensors[f"{module}.weight"] = torch.tensor(pack_by_definition(name, values))
        self.tensors[f"{module}.weight_scale"] = stored
        self.dense[f"{module}.weight"] = values / wide if "divide" in name else values * wide

    def write(self, folder, shards=1):
        """The files of the checkpoint; several shards come with an index."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        parts = {n: t.clone().contiguous() for n, t in self.tensors.items()}
        if shards == 1:
            save_file(parts, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        listed = {n: f"part-{i % shards}.safetensors" for i, n in enumerate(parts)}
        for file in set(listed.values()):
            save_file({n: t for n, t in parts.items() if listed[n] == file}, folder / file)
        index = {"metadata": {}, "weight_map": listed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


@pytest.fixture(scope="session")
def tiny():
    """Makes a `Tiny`: architecture, format, changes of the config."""

    def make(kind="qwen3", name="ternary_k_interleaved", **changes):
        head = {"head_dim": 8} if kind == "qwen3" else {}
        return Tiny(kind, name, **head | changes)

    return make


_QUARANTINED = re.findall(
    r"^\| `(.+?)` \|", Path(__file__).with_name("QUARANTINES.md").read_text(), re.MULTILINE
)
_skipped: list[str] = []


def pytest_runtest_logreport(report):
    if report.skipped and not any(fnmatchcase(report.nodeid, glob) for glob in _QUARANTINED):
        _skipped.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """A skip that nobody listed is not a pass."""
    if _skipped and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _skipped:
        terminalreporter.section("skips that tests/QUARANTINES.md does not list", red=True)
        terminalreporter.write_line("\n".join(_skipped))
