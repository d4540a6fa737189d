"""A quantised linear as serving engines want it: create, load, process, apply.

The three methods have the signatures of vLLM's ``LinearMethodBase``; nothing of vLLM is imported.
Which checkpoint tensor becomes which parameter is said by `WeightNames`, never guessed, and a
tensor that is missing or left over is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.exceptions import FormatError, KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec, choose_engine
from reconcile.weight import Format, QuantizedWeight


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of a layer's tensors in the checkpoint, after the layer's own prefix."""

    codes: str = "weight"
    scales: str = "weight_scale"


@dataclass(frozen=True, slots=True)
class Shards:
    """Output sizes of the projections that one layer fuses, e.g. of q, k and v."""

    sizes: tuple[int, ...]
    k: int
    form: Format

    @property
    def stored(self) -> tuple[tuple[int, int], ...]:
        """Shape of each shard's codes; all have one width."""
        found = tuple(self.form.packing.stored_shape((n, self.k)) for n in self.sizes)
        if len({columns for _, columns in found}) != 1:
            raise FormatError(
                f"format {self.form.name} does not stack shards {list(self.sizes)} of K={self.k}: "
                f"their codes are {[list(shape) for shape in found]}"
            )
        return found

    def codes(self, shard: int) -> slice:
        """Rows of the codes parameter that hold a shard."""
        return _part([rows for rows, _ in self.stored], shard)

    def scales(self, shard: int) -> slice:
        """Rows of the scales parameter that hold a shard's scales."""
        return _part([self.form.scale_shape((n, self.k))[0] for n in self.sizes], shard)


def _part(sizes: Sequence[int], index: int) -> slice:
    ends = list(accumulate(sizes))
    return slice(ends[index] - sizes[index], ends[index])


@dataclass(frozen=True, slots=True)
class KernelLinearMethod:
    """Linear layers of one number format by one kernel.

    ``choose`` gives the kernel for a layer's (N, K, dtype): a table by measured crossover, or
    always the same.
    """

    form: Format
    choose: Callable[[int, int, torch.dtype], Kernel]
    names: WeightNames = WeightNames()
    engine: str = "auto"

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,  # noqa: ARG002
        output_size: int,  # noqa: ARG002
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ANN401
    ) -> None:
        """Register parameters of the stored shapes, not trainable, and refuse what cannot run.

        Raises:
            KernelError: no engine of the kernel runs here, or it does not take the layer.
        """
        shards = Shards(tuple(output_partition_sizes), input_size_per_partition, self.form)
        for n in shards.sizes:
            self._engine(self.choose(n, shards.k, params_dtype), n, shards.k, params_dtype)
        stored = shards.stored
        codes = torch.empty(sum(r for r, _ in stored), stored[0][1], dtype=self.form.code_dtypes[0])
        rows = sum(self.form.scale_shape((n, shards.k))[0] for n in shards.sizes)
        width = self.form.scale_shape((1, shards.k))[1:]
        scales = torch.empty(rows, *width, dtype=self.form.scale_dtypes[0])
        for name, tensor in ((self.names.codes, codes), (self.names.scales, scales)):
            parameter = nn.Parameter(tensor, requires_grad=False)
            for key, value in extra_weight_attrs.items():
                setattr(parameter, key, value)
            layer.register_parameter(name, parameter)
        layer.reconcile_shards = shards  # type: ignore[assignment]
        layer.reconcile_dtype = params_dtype  # type: ignore[assignment]
        layer.reconcile_loaded = set()  # type: ignore[assignment]

    def load_weights(
        self, layer: nn.Module, tensors: Mapping[str, Tensor], prefixes: Sequence[str]
    ) -> None:
        """Copy the checkpoint's tensors ``<prefix>.<name>`` into the layer, one prefix a shard.

        Raises:
            FormatError: a tensor that is missing, left over under a prefix, or of another shape.
        """
        shards: Shards = layer.reconcile_shards  # type: ignore[assignment]
        if len(prefixes) != len(shards.sizes):
            raise FormatError(f"expected {len(shards.sizes)} prefixes, got {list(prefixes)}")
        for shard, prefix in enumerate(prefixes):
            wanted = {
                f"{prefix}.{self.names.codes}": self.names.codes,
                f"{prefix}.{self.names.scales}": self.names.scales,
            }
            own = {name for name in tensors if name.startswith(f"{prefix}.")}
            if own != set(wanted):
                missing, extra = sorted(set(wanted) - own), sorted(own - set(wanted))
                raise FormatError(f"{prefix}: missing {missing}, not mapped {extra}")
            for name, parameter in wanted.items():
                self.load_shard(layer, parameter, shard, tensors[name], name)

    def load_shard(
        self, layer: nn.Module, parameter: str, shard: int, tensor: Tensor, where: str
    ) -> None:
        """Copy one tensor of the checkpoint, named ``where``, to its shard's place.

        Raises:
            FormatError: a shard that the layer does not have, another shape, codes of another
                dtype, or scales that the parameter's dtype does not hold exactly.
        """
        shards: Shards = layer.reconcile_shards  # type: ignore[assignment]
        if not 0 <= shard < len(shards.sizes):
            raise FormatError(f"{where}: the layer has {len(shards.sizes)} shards, got {shard}")
        is_codes = parameter == self.names.codes
        rows = shards.codes(shard) if is_codes else shards.scales(shard)
        target = getattr(layer, parameter).data[rows]
        if tensor.shape != target.shape:
            raise FormatError(f"{where}: expected {list(target.shape)}, got {list(tensor.shape)}")
        stored = tensor.to(target.dtype)
        if tensor.dtype != target.dtype and (
            is_codes or not torch.equal(stored.double(), tensor.double())
        ):
            raise FormatError(f"{where}: expected {target.dtype}, got {tensor.dtype}")
        target.copy_(stored)
        loaded: set[tuple[str, int]] = layer.reconcile_loaded  # type: ignore[assignment]
        loaded.add((parameter, shard))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check the codes, let the kernel repack every shard, and give the parameters back.

        Raises:
            FormatError: a tensor that was not loaded, or codes that no encoder writes.
        """
        shards: Shards = layer.reconcile_shards  # type: ignore[assignment]
        self._require_loaded(layer, len(shards.sizes))
        dtype: torch.dtype = layer.reconcile_dtype  # type: ignore[assignment]
        codes = getattr(layer, self.names.codes).data
        scales = getattr(layer, self.names.scales).data
        ready = []
        for shard, n in enumerate(shards.sizes):
            weight = QuantizedWeight.from_tensors(
                codes[shards.codes(shard)].contiguous(),
                scales[shards.scales(shard)].contiguous(),
                format=self.form,
                shape=(n, shards.k),
            )
            kernel = self.choose(n, shards.k, dtype)
            engine = self._engine(kernel, n, shards.k, dtype)
            ready.append((kernel, kernel.prepare(weight, engine)))
        layer.reconcile_ready = ready  # type: ignore[assignment]
        for name in (self.names.codes, self.names.scales):
            delattr(layer, name)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Y [..., sum of the shards' N] for x [..., K] of any number of leading dimensions."""
        shards: Shards = layer.reconcile_shards  # type: ignore[assignment]
        parts = (
            [None] * len(shards.sizes) if bias is None else torch.split(bias, list(shards.sizes))
        )
        ready: list[tuple[Kernel, Any]] = layer.reconcile_ready  # type: ignore[assignment]
        found = [k.apply(x, p, b) for (k, p), b in zip(ready, parts, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _require_loaded(self, layer: nn.Module, shards: int) -> None:
        loaded: set[tuple[str, int]] = layer.reconcile_loaded  # type: ignore[assignment]
        wanted = {(p, i) for p in (self.names.codes, self.names.scales) for i in range(shards)}
        missing = sorted(wanted - loaded)
        if missing:
            named = ", ".join(f"{parameter} of shard {shard}" for parameter, shard in missing)
            raise FormatError(f"of {shards} shards the checkpoint did not give {named}")

    def _engine(self, kernel: Kernel, n: int, k: int, dtype: torch.dtype) -> Engine:
        engine, note = choose_engine(kernel, self.engine)
        if engine is None:
            raise KernelError(note)
        spec = LinearSpec(n=n, k=k, format=self.form.name, bias=False, activation_dtype=dtype)
        if not (support := kernel.can_implement(spec)):
            raise KernelError(support.reason)
        return engine


def always(kernel: Kernel) -> Callable[[int, int, torch.dtype], Kernel]:
    """A choice that does not look at the layer."""
    return lambda n, k, dtype: kernel  # noqa: ARG005
