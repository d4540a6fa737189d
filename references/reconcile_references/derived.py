"""Checkpoints that are derived from the embedded model on first use, each with a pinned sha256.

A derivation leaves no freedom, so every machine gets the same tensors. They are kept beside the
built libraries (`reconcile.native.cache_directory`), written under a temporary name and renamed;
what is there already is hashed again before it is used.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from reconcile.exceptions import CheckpointError
from reconcile.native import cache_directory
from reconcile.numbers import mx
from reconcile_references.checkpoint import SINGLE, read_config, read_tensors
from reconcile_references.fp8 import FP8_E4M3_BLOCK, FP8_E4M3_CHANNEL, FP8_E4M3_TENSOR
from reconcile_references.quantise import Fp8Rule

MASTER = "tiny-lm-master"
"""Folder of the dense model in `reconcile_fixtures`."""
DENSE_HEAD = "lm_head"
Tensors = dict[str, Tensor]


def _as_it_is(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    return config, tensors


Store = Callable[[str, Tensor], Tensors]
"""Name and dense weight [N, K] of a linear to the tensors that a checkpoint stores of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A checkpoint that is made from a dense one, linear by linear."""

    name: str
    declared: Mapping[str, Any]
    """Its ``quantization_config``."""
    store: Store
    sha256: str
    """Of its config and tensors, by `content_hash`."""
    master: str = MASTER
    reshape: Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]] = _as_it_is
    """What becomes of the master's config and tensors before they are quantised."""

    def __call__(self) -> Path:
        """The directory, made where it is missing or not what it should be.

        Raises:
            CheckpointError: the cache cannot be written, or this machine derives other bytes.
        """
        place = cache_directory() / "checkpoints" / f"{self.name}-{self.sha256[:16]}"
        if not self._is_whole(place):
            self._make(place)
        return place

    def _is_whole(self, place: Path) -> bool:
        try:
            return content_hash(read_config(place), read_tensors(place)) == self.sha256
        except CheckpointError:
            return False

    def _make(self, place: Path) -> None:
        config, tensors = self.derive()
        found = content_hash(config, tensors)
        if found != self.sha256:
            raise CheckpointError(
                f"{self.name}: expected sha256 {self.sha256}, this torch {torch.__version__} "
                f"derives {found}"
            )
        try:
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                made = Path(folder) / "checkpoint"
                made.mkdir()
                save_file(tensors, made / SINGLE, metadata={"format": "pt"})
                (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
                shutil.rmtree(place, ignore_errors=True)  # damaged, or nothing
                _rename(made, place)
        except OSError as error:
            raise CheckpointError(
                f"{self.name}: cannot write to {place.parent}: {error}; set RECONCILE_CACHE to a "
                "directory that can be written"
            ) from error

    def derive(self) -> tuple[dict[str, Any], Tensors]:
        """The config and the tensors."""
        source = _fixtures() / self.master
        config, dense = self.reshape(read_config(source), read_tensors(source))
        config |= {"quantization_config": dict(self.declared)} if self.declared else {}
        tensors: Tensors = {}
        for name, tensor in dense.items():
            module = name.removesuffix(".weight")
            tensors |= self.store(module, tensor) if _is_linear(module) else {name: tensor}
        return config, tensors


def content_hash(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the config and every tensor's name, dtype, shape and bytes, in name order."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _rename(made: Path, place: Path) -> None:
    """Another process may have been first; what it made is the same."""
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def _fixtures() -> Path:
    return Path(str(importlib.import_module("reconcile_fixtures").__file__)).parent


def _is_linear(module: str) -> bool:
    return module.endswith("_proj")


def _store_fp8(
    module: str,
    weight: Tensor,
    rule: Fp8Rule,
    scale: str,
    shape: tuple[int, ...] | None = None,
    activation: float | None = None,
) -> Tensors:
    """A linear's codes, its scale under ``scale`` in ``shape``, and a static activation scale."""
    codes, scales = rule(weight)
    stored = {
        f"{module}.weight": codes,
        f"{module}.{scale}": scales if shape is None else scales.reshape(shape),
    }
    if activation is not None:
        stored[f"{module}.activation_scale"] = torch.tensor(activation)
    return stored


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": [DENSE_HEAD]}

fp8_tensor = Derived(
    name="tiny-lm-fp8-tensor",
    declared=_FP8 | {"activation_scheme": "static", "weight_block_size": None},
    store=partial(
        _store_fp8,
        rule=Fp8Rule(form=FP8_E4M3_TENSOR),
        scale="weight_scale_inv",
        shape=(),
        activation=0.0625,  # not calibrated: it says only that the names are there
    ),
    sha256="e23fc5f93ea7b1aa30695c4520f7b929a8a5c16218e8a81af31a203592cf2417",
)
"""Ministral's layout: float32 scalars ``weight_scale_inv`` and ``activation_scale``."""

fp8_channel = Derived(
    name="tiny-lm-fp8-channel",
    declared={
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": [DENSE_HEAD],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    },
    store=partial(
        _store_fp8,
        rule=Fp8Rule(form=FP8_E4M3_CHANNEL, scale_dtype=torch.bfloat16),
        scale="weight_scale",
        shape=(-1, 1),
    ),
    sha256="86cdec6d3e0c38f7b176ec958dc61ff4ed66db49d01900f4b52f5e5e57684605",
)
"""RedHatAI's FP8-dynamic layout: bfloat16 ``weight_scale`` [N, 1]."""

fp8_block = Derived(
    name="tiny-lm-fp8-block",
    declared=_FP8 | {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    store=partial(
        _store_fp8,
        rule=Fp8Rule(form=FP8_E4M3_BLOCK, scale_dtype=torch.bfloat16),
        scale="weight_scale_inv",
    ),
    sha256="e0defab8e3bc5e1b9803a3e8a1f00a4b9aff4bde7738e38379d83e0eda47a30e",
)
"""Qwen3-FP8's layout: bfloat16 ``weight_scale_inv`` per 128 x 128 block, partial at the edges."""


def _store_mx(module: str, weight: Tensor, rule: str) -> Tensors:
    """Codes and E8M0 bytes, uint8 [N, K / 32]."""
    found = mx.quantise(weight, mx.RULES[rule])
    return {
        f"{module}.weight": found.codes.view(torch.float8_e4m3fn),
        f"{module}.weight_scale": found.scales,
    }


mxfp8_native = Derived(
    name="tiny-lm-mxfp8",
    declared={"quant_method": "mxfp8", "ignored_layers": [DENSE_HEAD]},
    store=partial(_store_mx, rule="rceil"),
    sha256="54b0d4eec350fabd52974d537c8cb2f7fdf29c9ece424a10fae7e660849354dc",
)
"""MiniMax's layout: uint8 ``weight_scale`` [N, K / 32], quantised by the rule ``rceil``."""


EXPERTS, TOP_K, NEURONS, MOE_LAYERS = 4, 2, 128, 2
"""The tiny mixture: experts, experts per token, neurons of an expert, layers that are kept."""


def _mixture(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The master's first layers as Qwen3-MoE: expert e has 128 neurons of the dense MLP from 128 e.

    They wrap around at the end, so that experts differ and together hold every neuron. The
    router's weights are integers over 256 from a hash of their place: no library's random
    numbers are in the pinned bytes.
    """
    made: Tensors = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[1:2] == ["layers"] and int(parts[2]) >= MOE_LAYERS:
            continue
        if ".mlp." not in name:
            made[name] = tensor
            continue
        prefix, _, part = name.removesuffix(".weight").rpartition(".")
        size = int(config["intermediate_size"])
        for expert in range(EXPERTS):
            chosen = (torch.arange(NEURONS) + NEURONS * expert) % size
            rows = tensor[:, chosen] if part == "down_proj" else tensor[chosen]
            made[f"{prefix}.experts.{expert}.{part}.weight"] = rows.contiguous()
        made[f"{prefix}.gate.weight"] = _router(int(parts[2]), int(config["hidden_size"]))
    changes = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": MOE_LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": NEURONS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return config | changes, made


def _router(layer: int, hidden: int) -> Tensor:
    """Router weights bfloat16 [E, H], multiples of 1/256 in [-1/4, 1/4)."""
    place = torch.arange(EXPERTS * hidden, dtype=torch.int64) + 1_000_003 * (layer + 1)
    mixed = (place * 2_654_435_761) % 2**32 // 2**25
    return ((mixed - 64).to(torch.float32) / 256).to(torch.bfloat16).reshape(EXPERTS, hidden)


moe_master = Derived(
    name="tiny-moe-master",
    declared={},
    store=lambda module, weight: {f"{module}.weight": weight},
    reshape=_mixture,
    sha256="49edd28b890be6bfa04575396c244877648c03a9f68640e3e8e9bda8127d433a",
)
"""The mixture before quantisation."""

moe_fp8_block = Derived(
    name="tiny-moe-fp8-block",
    declared=_FP8 | {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    store=fp8_block.store,
    reshape=_mixture,
    sha256="a19d5dd0578179f76574ec7674a0c185469076b7ec855af3bb74d930ae069ed5",
)
"""Qwen3-MoE FP8's layout: every expert's linears with bfloat16 ``weight_scale_inv`` per block."""
