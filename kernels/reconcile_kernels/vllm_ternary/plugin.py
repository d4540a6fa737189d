"""vLLM's two classes of a quantisation: its config, and the method of a linear layer.

Names and signatures are those of vLLM's ``quantization/base_config.py`` and ``linear.py``, for the
version in `reconcile_kernels.vllm_ternary.VLLM`. Tensors are loaded by a loader of our own:
vLLM's casts a tensor of another dtype, and no one asks whether every shard of a fused layer came.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from reconcile.exceptions import FormatError, KernelError, nearest
from reconcile.registry import formats
from reconcile.weight import Format
from reconcile_kernels.linear_method import KernelLinearMethod, always
from reconcile_kernels.ternary_cpu import BF16

NAME = "ternary"
"""The ``quant_method`` of config.json."""
_SHARDS = {None: 0, "q": 0, "k": 1, "v": 2}
"""vLLM's names of the shards of a fused layer; those of gate and up are numbers."""


class TernaryLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer by `KernelLinearMethod`; a layer cut over several ranks is refused."""

    def __init__(self, method: KernelLinearMethod, prefix: str) -> None:
        self._method = method
        self._prefix = prefix

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ANN401
    ) -> None:
        """Parameters of the stored shapes, with a loader that checks what it is given."""
        if (input_size_per_partition, sum(output_partition_sizes)) != (input_size, output_size):
            raise KernelError(
                f"{self._prefix}: a ternary layer is not cut over ranks: expected K={input_size}, "
                f"N={output_size}, got K={input_size_per_partition}, "
                f"N={sum(output_partition_sizes)}; serve with tensor_parallel_size=1"
            )
        extra_weight_attrs.pop("weight_loader", None)
        self._method.create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )
        for name in (self._method.names.codes, self._method.names.scales):
            getattr(layer, name).weight_loader = partial(self._load, layer, name)

    def _load(
        self,
        layer: nn.Module,
        name: str,
        parameter: nn.Parameter,  # noqa: ARG002 - it is the layer's
        loaded_weight: Tensor,
        loaded_shard_id: str | int | None = None,
    ) -> None:
        """The shard is named by an argument, or on the tensor."""
        if loaded_shard_id is None:
            loaded_shard_id = getattr(loaded_weight, "shard_id", None)
        shard = _SHARDS.get(loaded_shard_id, loaded_shard_id)  # type: ignore[arg-type]
        if not isinstance(shard, int):
            raise FormatError(f"{self._prefix}.{name}: no shard {loaded_shard_id!r} of one weight")
        where = f"{self._prefix}.{name}, shard {shard}"
        self._method.load_shard(layer, name, shard, loaded_weight, where)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check and repack; FormatError names what was not loaded."""
        self._method.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Y [..., N] for x [..., K]."""
        return self._method.apply(layer, x, bias)


class TernaryConfig(QuantizationConfig):  # type: ignore[misc]
    """``quantization_config`` of a ternary checkpoint; every linear of it by one kernel."""

    def __init__(self, form: Format, dense: Sequence[str]) -> None:
        super().__init__()
        self.form = form
        self.dense = list(dense)
        """Modules that are not quantised, by their whole path."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TernaryConfig:
        """The declared format and the modules that stay dense; without a list: the head alone."""
        name = str(config.get("format"))
        if name not in formats():
            raise FormatError(
                f"quantization_config: unknown format {name!r}: {nearest(name, formats())}"
            )
        dense = config.get("modules_to_not_convert")
        return cls(formats()[name], ["lm_head"] if dense is None else dense)

    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> TernaryLinearMethod | UnquantizedLinearMethod | None:
        """The method of a linear layer; None for what is no linear layer."""
        dense = is_layer_skipped(prefix, self.dense, self.packed_modules_mapping)
        if isinstance(layer, ParallelLMHead) and not dense:
            raise KernelError(f"{prefix}: a ternary output head is not supported")
        if not isinstance(layer, LinearBase):
            return None
        if dense:
            return UnquantizedLinearMethod()
        return TernaryLinearMethod(KernelLinearMethod(self.form, always(BF16)), prefix)

    def get_name(self) -> str:
        """``ternary``."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What the kernel reads."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU is asked for."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: config.json has it all."""
        return []


add = register_quantization_config(NAME)
"""Gives vLLM a class for ``ternary``."""
