"""Transformers decoders over unpacked, or unquantised, weights."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from reconcile.contract import DTYPES
from reconcile.exceptions import CheckpointError
from reconcile.grouped import GroupedWeight, StoredWeight
from reconcile.layout import LayoutConfig
from reconcile.linears import DenseWeight
from reconcile.model import MakeLinear, Structure
from reconcile.registry import formats
from reconcile.weight import QuantizedWeight
from reconcile_references.arranged import arrange
from reconcile_references.checkpoint import (
    checkpoint_hash,
    names,
    read_config,
    read_tensors,
)
from reconcile_references.dense import dense_linears, dense_weights
from reconcile_references.experts import (
    Place,
    expert_linears,
    expert_modules,
    fused,
    joined,
    original,
    places,
    routers,
    split_experts,
)
from reconcile_references.load_rules import apply_rule
from reconcile_references.precise import preserve_float64
from reconcile_references.scheme import Scheme, read_scheme
from reconcile_references.second_decoder import decode_again

_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
)
"""What transformers raises for a config that it cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersCheckpoint:
    """A quantised causal language model; satisfies `reconcile.model.Checkpoint`."""

    path: Path
    sha256: str
    dtype: str
    weights: Mapping[str, StoredWeight]
    dense: Mapping[str, Tensor]
    """Every tensor that is not part of one of ``weights``, by checkpoint name."""
    structure: Structure
    config: transformers.PreTrainedConfig
    experts: Mapping[str, Place] = field(default_factory=dict)
    """Batched linears of experts: which linears of the checkpoint they join."""
    activation: str = "none"
    """What the config asks of activations: ``none``, ``dynamic`` or ``static``."""
    activation_scales: Mapping[str, Tensor] = field(default_factory=dict)
    """Stored scales of static activation quantisation by module, float32 []; a kernel that does
    not quantise activations has no use for them."""
    notes: tuple[str, ...] = ()
    """What stays dense and what a load rule changed, for the report."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.config.vocab_size)

    def build(self, dtype: torch.dtype, make_linear: MakeLinear) -> nn.Module:
        """The model in ``dtype``; dense tensors are converted from their stored dtype once.

        In float64 the buffers that the model computes, as the frequencies of RoPE, are float64 too,
        and so are the parameters that the architecture keeps in float32 whatever ``dtype`` is.
        Attention is transformers' ``eager`` implementation, so that the reference, the
        baseline and the candidate run the same operations.
        """
        with self.precise(dtype):
            model = empty_model(self.config, dtype)
        split_experts(model, {name.rpartition(".")[0] for name in self.experts})
        for name, weight in self.weights.items():
            model.set_submodule(name, make_linear(name, weight))
        if dtype == torch.float64:
            model.to(dtype)
        model.load_state_dict(dict(self.dense), strict=False, assign=False)
        model.tie_weights()
        built: nn.Module = model.eval().requires_grad_(False)
        return built

    def precise(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """For float64: the float32 islands of transformers' modules keep float64."""
        return preserve_float64() if dtype == torch.float64 else nullcontext()

    def decode_again(self, module: str) -> Tensor | None:
        """The weight by the second decoder."""
        return decode_again(self.weights[module])

    def originals(self, path: Path) -> dict[str, Tensor]:
        """The quantised linears' dense weights in another checkpoint of the same names.

        Raises:
            CheckpointError: one is missing or has another shape.
        """
        tensors = read_tensors(path)
        found = {name: tensors.get(f"{name}.weight") for name in self.weights}
        found |= {
            name: original(place, tensors)
            for name, place in self.experts.items()
            if name in self.weights
        }
        bad = [
            name
            for name, tensor in found.items()
            if tensor is None or tuple(tensor.shape[-2:]) != self.weights[name].shape
        ]
        if bad:
            raise CheckpointError(f"{path}: {names('not the original of', bad)}")
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def tokens(self, prompt: str) -> list[int]:
        """Token ids by the checkpoint's own tokenizer files."""
        if not any(self.path.glob("tokenizer*")):
            raise CheckpointError(
                f"{self.path}: has no tokenizer; give the prompts as lists of token ids"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            self.path, local_files_only=True, trust_remote_code=False
        )
        return list(tokenizer(prompt)["input_ids"])


class TransformersModels:
    """Model source for transformers checkpoints; satisfies `reconcile.model.ModelSource`."""

    def load(
        self, path: Path, rule: str | None = None, layout: LayoutConfig | None = None
    ) -> TransformersCheckpoint:
        """Read and check a checkpoint.

        Every linear that the architecture has and the config does not exclude must be there in
        the declared format, or unquantised where none is declared; every other parameter must be
        there dense, the experts of a layer all or none of them; nothing may be left over.

        Args:
            path: directory of the checkpoint.
            rule: what a serving engine changes when it loads the weights, of `load_rules.RULES`;
                None: the weights as they are stored.
            layout: how the weights are stored, in place of what the config declares.

        Raises:
            CheckpointError: names what is missing, unused or wrong.
        """
        folder = layout.config if layout and layout.config else path
        body = read_config(folder)
        scheme = read_scheme(body, path) if layout is None else None
        config = model_config(folder)
        skeleton = meta_model(config, folder)
        structure = structure_of(skeleton)
        if scheme is not None:
            split_experts(skeleton, _quantized_experts(skeleton, scheme, structure.head, path))
        if layout is None:
            tensors = read_tensors(path)
        else:
            scheme, tensors = _arranged(path, layout, skeleton)
        tensors = fused(skeleton, tensors)
        weights: Mapping[str, StoredWeight]
        parts: dict[str, Parts] = {}
        notes: tuple[str, ...] = ()
        if scheme is None:
            weights = _unquantized(skeleton, structure.head, tensors, path, rule)
            consumed = {f"{n}.bias" for n, weight in weights.items() if weight.bias is not None}
        else:
            linears = _quantized_linears(skeleton, scheme, structure.head, path)
            parts = _parts(linears, scheme, tensors, path)
            stored = _quantized(linears, scheme, parts, tensors, path)
            consumed = {f"{name}.weight" for name in stored}
            consumed = consumed.union(*(p.names for p in parts.values()))
            notes = _kept_dense(skeleton, linears, structure.head) if layout is None else ()
            if rule:
                stored, changed = apply_rule(rule, stored)
                notes += changed
            weights = _batched(places(skeleton), stored)
        consumed |= {f"{name}.weight" for name in weights}
        dense = {name: tensor for name, tensor in tensors.items() if name not in consumed}
        _check_names(skeleton, consumed, dense, path)
        _check_dense(skeleton, dense, path)
        return TransformersCheckpoint(
            path=path,
            sha256=checkpoint_hash(path, rule, layout),
            dtype=_dense_dtype(dense),
            weights=weights,
            notes=notes,
            experts={} if scheme is None else places(skeleton),
            activation="none" if scheme is None else scheme.activation,
            activation_scales=_activation_scales(parts, tensors, path),
            dense=dense,
            structure=structure,
            config=config,
        )


def _arranged(
    path: Path, layout: LayoutConfig, skeleton: nn.Module
) -> tuple[Scheme, dict[str, Tensor]]:
    """Scheme and tensors by the layout of a case; the linears that it does not name are dense."""
    form = layout.number_format(formats())
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Linear)
    }
    ignored = tuple(name for name in linears if name not in layout.linears)
    return Scheme(form, ignored), arrange(path, layout, form, linears)


def _unquantized(
    skeleton: nn.Module,
    head: str | None,
    tensors: Mapping[str, Tensor],
    path: Path,
    rule: str | None,
) -> dict[str, DenseWeight | GroupedWeight]:
    """The weights of a checkpoint that declares no quantisation."""
    if rule:
        raise CheckpointError(f"{path}: load rule {rule!r} needs quantised weights, here are none")
    return dense_weights(dense_linears(skeleton, head), tensors, path)


def model_config(path: Path) -> transformers.PreTrainedConfig:
    """The architecture's config without its quantisation, which is ours to apply."""
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except _REFUSALS as error:
        raise CheckpointError(
            f"{path / 'config.json'}: no model of this transformers: {error}"
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def meta_model(config: transformers.PreTrainedConfig, path: Path) -> transformers.PreTrainedModel:
    """The model on the meta device: names and shapes without memory."""
    try:
        with torch.device("meta"):
            return _from_config(config, torch.float32)
    except _REFUSALS as error:
        raise CheckpointError(
            f"{path / 'config.json'}: no causal language model of this transformers: {error}"
        ) from error


def empty_model(
    config: transformers.PreTrainedConfig, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """The model with memory for its parameters and nothing in them."""
    with no_init_weights():
        return _from_config(config, dtype)


def _from_config(
    config: transformers.PreTrainedConfig, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_config(
        _eager_experts(config), dtype=dtype, attn_implementation="eager", trust_remote_code=False
    )


def _eager_experts(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """A copy under which a mixture of experts runs expert by expert, which float64 can do too."""
    own = copy.deepcopy(config)
    own._experts_implementation = "eager"
    return own


def _quantized_experts(
    skeleton: nn.Module, scheme: Scheme, head: str | None, path: Path
) -> set[str]:
    """Modules of which every expert is stored in the format; of the others none may be."""
    found = set()
    for name, module in expert_modules(skeleton).items():
        linears = expert_linears(name, module)
        dense = [linear for linear in linears if not scheme.is_quantized(linear, head)]
        if not dense:
            found.add(name)
        elif len(dense) < len(linears):
            what = f"some experts of {name} stay dense and others not"
            raise CheckpointError(f"{path}: {names(what, dense)}")
    return found


def _kept_dense(skeleton: nn.Module, linears: Collection[str], head: str | None) -> tuple[str, ...]:
    """Which linears and experts the config leaves out, in words; the output head is not counted."""
    kept = [
        name
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Linear) and name not in linears and name != head
    ]
    kept += expert_modules(skeleton)
    return (names("dense, as the checkpoint declares", kept),) if kept else ()


def _quantized_linears(
    skeleton: transformers.PreTrainedModel, scheme: Scheme, head: str | None, path: Path
) -> dict[str, nn.Linear]:
    linears = {
        name: module
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Linear) and scheme.is_quantized(name, head)
    }
    experts = {
        name: shape for place in places(skeleton).values() for name, shape in place.linears.items()
    }
    linears |= {
        n: nn.Linear(k, rows, bias=False, device="meta") for n, (rows, k) in experts.items()
    }
    if not linears:
        raise CheckpointError(f"{path}: modules_to_not_convert leaves no quantised linear")
    if tied := [name for name in tied_weights(skeleton) if name.removesuffix(".weight") in linears]:
        raise CheckpointError(
            f"{path}: {names('tied to the embedding and declared quantised', tied)}; add it to "
            "modules_to_not_convert"
        )
    return linears


def _quantized(
    linears: Mapping[str, nn.Linear],
    scheme: Scheme,
    parts: Mapping[str, Parts],
    tensors: Mapping[str, Tensor],
    path: Path,
) -> dict[str, QuantizedWeight]:
    weights = {
        name: _weight(name, module, scheme, parts[name], tensors)
        for name, module in linears.items()
    }
    biased = [name for name, weight in weights.items() if weight.bias is not None]
    if scheme.scales_bias and biased:
        raise CheckpointError(
            f"{path}: {names('linears with a bias', biased)}; autobitlinear multiplies the bias by "
            "the scale also, which is not supported"
        )
    return weights


def _batched(
    experts: Mapping[str, Place], weights: Mapping[str, QuantizedWeight]
) -> dict[str, StoredWeight]:
    """The weights with those of experts joined, in the model's order."""
    parts = {name for place in experts.values() for name in place.linears}
    plain: dict[str, StoredWeight] = {n: w for n, w in weights.items() if n not in parts}
    return plain | {name: joined(name, place, weights) for name, place in experts.items()}


def _weight(
    name: str, module: nn.Linear, scheme: Scheme, parts: Parts, tensors: Mapping[str, Tensor]
) -> QuantizedWeight:
    shape = (module.out_features, module.in_features)
    form, scales = scheme.read_scale(tensors[parts.scale], shape, name)
    return QuantizedWeight.from_tensors(
        tensors[f"{name}.weight"],
        scales,
        format=form,
        shape=shape,
        name=name,
        bias=tensors[parts.bias] if parts.bias else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Names of the tensors that a quantised linear has beside ``weight``."""

    scale: str
    activation: str | None
    bias: str | None

    @property
    def names(self) -> set[str]:
        """All of them that are there."""
        return {name for name in (self.scale, self.activation, self.bias) if name}


def _parts(
    linears: Mapping[str, nn.Linear], scheme: Scheme, tensors: Mapping[str, Tensor], path: Path
) -> dict[str, Parts]:
    """The tensors of every quantised linear by name; CheckpointError for what is missing."""
    missing: list[str] = []

    def one_of(module: str, candidates: tuple[str, ...]) -> str:
        found = [part for part in candidates if f"{module}.{part}" in tensors]
        if not found:
            missing.append(f"{module}.{' or '.join(candidates)}")
        return f"{module}.{(*found, *candidates)[0]}"

    parts = {}
    for name, module in linears.items():
        one_of(name, ("weight",))
        biased = "bias" in module.state_dict() and f"{name}.bias" in tensors
        activation = scheme.activation_names
        parts[name] = Parts(
            scale=one_of(name, scheme.scale_names),
            activation=one_of(name, activation) if activation else None,
            bias=f"{name}.bias" if biased else None,
        )
    if missing:
        raise CheckpointError(
            f"{path}: {names('missing tensors', missing)}; format {scheme.format.name} stores "
            f"weight and {' or '.join(scheme.scale_names)} for every linear outside "
            "modules_to_not_convert"
        )
    return parts


def _activation_scales(
    parts: Mapping[str, Parts], tensors: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Stored activation scales, one positive finite number each, float32 []."""
    found = {
        name: tensors[part.activation]
        for name, part in parts.items()
        if part.activation is not None
    }
    bad = [
        f"{name} {list(scale.shape)} {scale.dtype}"
        for name, scale in found.items()
        if scale.numel() != 1
        or scale.dtype not in DTYPES.values()
        or not (bool(scale.isfinite().all()) and bool((scale > 0).all()))
    ]
    if bad:
        what = "activation scales that are not one positive number"
        raise CheckpointError(f"{path}: {names(what, bad)}")
    return {name: scale.to(torch.float32).reshape(()) for name, scale in found.items()}


def _check_names(
    skeleton: transformers.PreTrainedModel,
    consumed: set[str],
    dense: Mapping[str, Tensor],
    path: Path,
) -> None:
    """Dense tensors must be exactly the model's other parameters."""
    needed = set(skeleton.state_dict()) - consumed
    missing, unused = needed - set(dense) - set(tied_weights(skeleton)), set(dense) - needed
    if missing or unused:
        raise CheckpointError(
            f"{path}: {names('missing tensors', missing)}; {names('unused tensors', unused)}"
        )


def _check_dense(
    skeleton: transformers.PreTrainedModel, dense: Mapping[str, Tensor], path: Path
) -> None:
    """Dense tensors must have the model's shapes, a dtype that needs no scale, and equal ties."""
    state = skeleton.state_dict()
    wrong = [
        f"{name} {list(tensor.shape)} instead of {list(state[name].shape)}"
        for name, tensor in dense.items()
        if tensor.shape != state[name].shape
    ]
    coded = [
        f"{name} {tensor.dtype}"
        for name, tensor in dense.items()
        if tensor.dtype not in DTYPES.values()
    ]
    untied = [
        f"{name} and {source}"
        for name, source in tied_weights(skeleton).items()
        if name in dense and not torch.equal(dense[name], dense[source])
    ]
    if wrong or coded or untied:
        kinds = f"in none of {', '.join(DTYPES)}"
        raise CheckpointError(
            f"{path}: {names('wrong shapes', wrong)}; "
            f"{names(kinds, coded)}; "
            f"{names('tied but different', untied)}"
        )


def tied_weights(skeleton: transformers.PreTrainedModel) -> dict[str, str]:
    """Parameters that need not be stored, as the config ties them, with what they are tied to."""
    return dict(skeleton.all_tied_weights_keys)


def _dense_dtype(dense: Mapping[str, Tensor]) -> str:
    """The dtype most dense elements have."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in dense.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def structure_of(skeleton: transformers.PreTrainedModel) -> Structure:
    """Decoder layers are the longest ModuleList; the final norm is its sibling."""
    lists = [(n, m) for n, m in skeleton.named_modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        return Structure(layers=(), norm=None, head=None)
    path, layers = max(lists, key=lambda item: len(item[1]))
    parent, _, _ = path.rpartition(".")
    norms = [
        name
        for name, module in skeleton.get_submodule(parent).named_children()
        if "norm" in type(module).__name__.lower()
    ]
    head = skeleton.get_output_embeddings()
    return Structure(
        layers=tuple(f"{path}.{index}" for index in range(len(layers))),
        norm=f"{parent}.{norms[-1]}".lstrip(".") if norms else None,
        head=next((n for n, m in skeleton.named_modules() if m is head), None),
        routers=routers(skeleton),
    )
