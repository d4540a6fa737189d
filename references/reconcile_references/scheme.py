"""What a checkpoint declares about its quantisation: format, tensor names, what stays dense.

Nothing is inferred from tensors. Where a declaration leaves two spellings of one scale (a scalar
as [] or [1]; a power of two as a float or as an E8M0 byte), both are read and everything else is
refused.

Sources of the names: transformers `integrations/finegrained_fp8.py` (``fp8``), compressed-tensors
`config/` and `quantization/` (``compressed-tensors``), vLLM `quantization/modelopt.py` and
`mxfp8.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from reconcile.exceptions import CheckpointError, FormatError, nearest
from reconcile.registry import formats
from reconcile.weight import Format, Shape
from reconcile_references.fp8 import (
    FP8_E4M3_BLOCK,
    FP8_E4M3_BLOCK_E8M0,
    FP8_E4M3_CHANNEL,
    FP8_E4M3_TENSOR,
    MXFP8_E4M3,
)

Declared = Mapping[str, Any]
"""A ``quantization_config``."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt declares its quantisation if config.json does not."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The declared quantisation of a checkpoint."""

    format: Format
    ignored: tuple[str, ...] | None
    """Modules that stay dense (``modules_to_not_convert``, ``ignore``, ...); None: the output
    head alone."""
    scales_bias: bool = False
    """Whether the scale multiplies the bias also (`AutoBitLinear`)."""
    scale_names: tuple[str, ...] = ("weight_scale",)
    """Names that the scale beside ``weight`` may have; a module has exactly one of them."""
    spelling: Literal["own", "scalar", "column"] = "own"
    """How the scale's shape is written: as the format has it; also as a scalar []; [N, 1]."""
    powers_of_two: bool = False
    """``scale_fmt: ue8m0``: scales are powers of two, as floats or as E8M0 bytes."""
    activation: Literal["none", "dynamic", "static"] = "none"
    """Whether the checkpoint asks for quantised activations; ``static``: with stored scales."""

    @property
    def activation_names(self) -> tuple[str, ...]:
        """Names that a stored activation scale may have; a module has exactly one of them."""
        return ("activation_scale", "input_scale") if self.activation == "static" else ()

    def is_quantized(self, module: str, head: str | None) -> bool:
        """Whether the linear at this path is stored in the format.

        An entry of ``ignored`` names a module by its whole path, by its last components, or a
        parent of it; with ``re:`` before it, it is a regular expression that the path begins
        with; with ``*`` in it, a glob over the whole path. ``head`` is the path of the output
        head.
        """
        if self.ignored is None:
            return module != head
        return not any(_names(entry, module) for entry in self.ignored)

    def read_scale(self, stored: Tensor, shape: Shape, where: str) -> tuple[Format, Tensor]:
        """A stored scale as the format that reads it and in that format's own shape.

        A shape that the declaration does not have passes unchanged; the weight refuses it.

        Raises:
            FormatError: declared powers of two that are none; MXFP8 over a K that its groups do
                not divide, which no loader accepts.
        """
        form = self.format
        if form.name == MXFP8_E4M3.name and shape[1] % 32:
            raise FormatError(
                f"{where}: an MXFP8 checkpoint has K in whole groups of 32, got {list(shape)}"
            )
        if self.powers_of_two and stored.dtype in FP8_E4M3_BLOCK_E8M0.scale_dtypes:
            form = replace(FP8_E4M3_BLOCK_E8M0, block=form.block)
        elif self.powers_of_two:
            _check_powers(stored, where)
        spelt = {"own": None, "scalar": (), "column": (shape[0], 1)}[self.spelling]
        if tuple(stored.shape) == spelt:
            stored = stored.reshape(form.scale_shape(shape))
        return form, stored


def read_scheme(config: Declared, where: Path) -> Scheme | None:
    """The quantisation that ``config.json`` or ModelOpt's ``hf_quant_config.json`` declares.

    None where neither declares any: then every weight is stored as it is.

    ======================= ===================================================================
    quant_method            format
    ======================= ===================================================================
    ternary                 ``format`` names a registered one
    bitnet                  ``linear_class`` bitlinear divides, autobitlinear multiplies
    fp8                     ``weight_block_size`` [rows, columns]: one scale per block; null: per
                            tensor. The scale is ``weight_scale_inv`` (per tensor also
                            ``weight_scale``) and multiplies under either name
    compressed-tensors      float-quantized: ``strategy`` tensor, channel or block;
                            mxfp8-quantized
    modelopt, mxfp8         MXFP8: E8M0 bytes [N, K/32]; modelopt FP8: per tensor
    ======================= ===================================================================

    Raises:
        CheckpointError: a declaration that is not supported, or one that contradicts itself.
    """
    file, declared = _declaration(config, where)
    if declared is None:
        return None
    method = str(declared.get("quant_method"))
    if method not in _READERS:
        raise CheckpointError(
            f"{file}: quant_method {declared.get('quant_method')!r} is not supported: "
            f"{nearest(method, _READERS)}"
        )
    return _READERS[method](declared, file)


def _declaration(config: Declared, where: Path) -> tuple[Path, Declared | None]:
    """The file that declares the quantisation, and what it says; None: nothing."""
    file, own = where / "config.json", config.get("quantization_config")
    if isinstance(own, dict):
        return file, own
    other = where / MODELOPT_FILE
    if own is None and other.exists():
        try:
            body = json.loads(other.read_text(encoding="utf-8"))["quantization"]
            return other, {"quant_method": "modelopt"} | body
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{other}: expected a table 'quantization': {error}") from error
    if own is not None:
        raise CheckpointError(f"{file}: quantization_config: expected a table, got {own!r}")
    return file, None


# --------------------------------------------------------------------------- one per method


def _ternary(declared: Declared, file: Path) -> Scheme:
    name = str(declared.get("format"))
    if name not in formats():
        raise CheckpointError(f"{file}: unknown format {name!r}: {nearest(name, formats())}")
    return Scheme(formats()[name], _ignored(declared, file, "modules_to_not_convert"))


def _bitnet(declared: Declared, file: Path) -> Scheme:
    if declared.get("quantization_mode", "offline") != "offline":
        raise CheckpointError(
            f"{file}: quantization_mode {declared['quantization_mode']!r}: its weights are not "
            "stored in ternary; expected offline"
        )
    by_class = {"bitlinear": "ternary_hf_divide", "autobitlinear": "ternary_hf"}
    name = _choice(declared, file, "linear_class", by_class, "bitlinear")
    return Scheme(
        formats()[by_class[name]],
        _ignored(declared, file, "modules_to_not_convert"),
        scales_bias=name == "autobitlinear",
    )


def _fp8(declared: Declared, file: Path) -> Scheme:
    """Qwen3-FP8, DeepSeek-V3 (blocks), Ministral (per tensor)."""
    _choice(declared, file, "fmt", ("e4m3",), "e4m3")
    kind = _choice(declared, file, "activation_scheme", ("dynamic", "static"), "dynamic")
    encoding = _choice(declared, file, "scale_fmt", ("float", "ue8m0"), "float")
    block = _block(declared.get("weight_block_size"), file, "weight_block_size")
    if encoding == "ue8m0" and block is None:
        raise CheckpointError(f"{file}: scale_fmt ue8m0 belongs to a weight_block_size, got none")
    return Scheme(
        FP8_E4M3_TENSOR if block is None else replace(FP8_E4M3_BLOCK, block=block),
        _ignored(declared, file, "modules_to_not_convert", "ignored_layers"),
        scale_names=("weight_scale_inv",) if block else ("weight_scale_inv", "weight_scale"),
        spelling="scalar" if block is None else "own",
        powers_of_two=encoding == "ue8m0",
        activation="static" if kind == "static" else "dynamic",
    )


def _compressed_tensors(declared: Declared, file: Path) -> Scheme:
    """One group of linears, stored compressed; the ``*-FP8-dynamic`` releases are ``channel``."""
    kind = _choice(declared, file, "format", ("float-quantized", "mxfp8-quantized"), "")
    _choice(declared, file, "quantization_status", ("compressed", "frozen"), "compressed")
    groups = declared.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise CheckpointError(f"{file}: config_groups: expected one group, got {groups!r:.200}")
    (group,) = groups.values()
    if group.get("targets") != ["Linear"]:
        raise CheckpointError(f"{file}: targets: expected ['Linear'], got {group.get('targets')!r}")
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    expected = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    for key, value in expected.items():
        if weights.get(key, value) != value:
            raise CheckpointError(f"{file}: weights.{key}: expected {value}, got {weights[key]!r}")
    ignored = _ignored(declared, file, "ignore") or ()
    activation = _ct_activation(inputs)
    if kind == "mxfp8-quantized":
        return Scheme(MXFP8_E4M3, ignored, activation=activation)
    strategy = _choice(weights, file, "strategy", ("tensor", "channel", "block"), "")
    block = _block(weights.get("block_structure"), file, "block_structure")
    if (block is not None) != (strategy == "block"):
        raise CheckpointError(f"{file}: strategy {strategy!r} with block_structure {block}")
    form = {
        "tensor": FP8_E4M3_TENSOR,
        "channel": FP8_E4M3_CHANNEL,
        "block": replace(FP8_E4M3_BLOCK, block=block or FP8_E4M3_BLOCK.block),
    }[strategy]
    spelling: dict[str, Literal["own", "scalar", "column"]]
    spelling = {"tensor": "scalar", "channel": "column", "block": "own"}
    return Scheme(form, ignored, spelling=spelling[strategy], activation=activation)


def _ct_activation(inputs: Declared | None) -> Literal["none", "dynamic", "static"]:
    if inputs is None:
        return "none"
    return "dynamic" if inputs.get("dynamic") else "static"


def _modelopt(declared: Declared, file: Path) -> Scheme:
    """ModelOpt: MXFP8 with E8M0 bytes, or FP8 with one scale per tensor and static activations."""
    algorithm = _choice(declared, file, "quant_algo", ("MXFP8", "FP8"), "")
    if file.name == MODELOPT_FILE:
        for key in ("kv_cache_quant_algo", "exclude_modules"):
            if key not in declared:
                raise CheckpointError(f"{file}: quantization.{key} is missing; vLLM requires it")
    ignored = _ignored(declared, file, "exclude_modules", "ignore") or ()
    if algorithm == "MXFP8":
        return Scheme(MXFP8_E4M3, ignored, activation="dynamic")
    return Scheme(FP8_E4M3_TENSOR, ignored, spelling="scalar", activation="static")


def _mxfp8(declared: Declared, file: Path) -> Scheme:
    """``quant_method`` mxfp8, as MiniMax releases declare it."""
    ignored = _ignored(declared, file, "ignored_layers", "modules_to_not_convert")
    return Scheme(MXFP8_E4M3, ignored, activation="dynamic")


_READERS: dict[str, Callable[[Declared, Path], Scheme]] = {
    "ternary": _ternary,
    "bitnet": _bitnet,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_mxfp8": lambda declared, file: _modelopt({"quant_algo": "MXFP8", **declared}, file),
    "mxfp8": _mxfp8,
}


# --------------------------------------------------------------------------- fields


def _choice(
    declared: Declared, file: Path, key: str, known: Mapping[str, Any] | tuple[str, ...], plain: str
) -> str:
    """The value of a field, of those that are known; ``plain`` where it is not declared."""
    value = declared.get(key)
    text = plain if value is None else str(value)
    if text not in known:
        raise CheckpointError(f"{file}: {key} {value!r}: {nearest(text, known)}")
    return text


def _block(value: object, file: Path, key: str) -> Shape | None:
    if value is None:
        return None
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and size > 0 for size in value)
    ):
        raise CheckpointError(f"{file}: {key}: expected [rows, columns] or null, got {value!r}")
    return value[0], value[1]


def _ignored(declared: Declared, file: Path, *keys: str) -> tuple[str, ...] | None:
    """The list under the first of the keys that is declared."""
    key = next((key for key in keys if declared.get(key) is not None), None)
    if key is None:
        return None
    value = declared[key]
    if not (isinstance(value, list) and all(isinstance(entry, str) and entry for entry in value)):
        raise CheckpointError(f"{file}: {key}: expected a list of module names, got {value!r}")
    for entry in value:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(f"{file}: {key}: {entry!r} is no pattern: {error}") from error
    return tuple(value)


def _names(entry: str, module: str) -> bool:
    """Whether an entry of the ignored modules covers a module."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if "*" in entry:
        return fnmatchcase(module, entry)
    return module == entry or module.startswith(f"{entry}.") or module.endswith(f".{entry}")


def _check_powers(scales: Tensor, where: str) -> None:
    wide = scales.to(torch.float64)
    odd = ~((torch.frexp(wide).mantissa == 0.5) & wide.isfinite())
    if bool(odd.any()):
        raise FormatError(
            f"{where}: scale_fmt ue8m0 declares powers of two; {int(odd.sum())} of "
            f"{scales.numel()} scales are none, the first is {float(wide[odd][0]):g}"
        )
