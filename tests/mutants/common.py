"""Correct kernels in stages, each of which a mutant can replace, and how a source is patched."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from reconcile import Contract, registry
from reconcile.checking.probes import random_weight, synthetic
from reconcile.native import NativeLibrary, cache_directory
from reconcile.weight import QuantizedWeight
from reconcile_kernels.ternary_cuda import NAIVE, ops
from reconcile_kernels.ternary_cuda.naive import CUDA_ON_CPU

SHAPE = (192, 256)
OP = "linear:out"
"""The one tap of `check_linear`."""
PLAIN = Contract()
"""Weights not rounded, float32 sums, bfloat16 output."""


def weight_of(name, shape=SHAPE, seed=0, scales=None):
    """A random weight of a registered format; ``scales`` changes the stored ones."""
    form = registry.formats()[name]
    seedling = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    made = random_weight(seedling, shape, torch.Generator().manual_seed(seed))
    stored = made.scales if scales is None else scales(made.scales)
    return QuantizedWeight.from_tensors(made.codes, stored, format=form, shape=shape)


def weight(name, shape=SHAPE, seed=0, scales=None):
    """`weight_of` for later: a mutant makes its weight when it runs."""
    return functools.partial(weight_of, name, shape, seed, scales)


# ------------------------------------------------------------------ torch kernels, in stages


def fp8_values(weight):
    """Codes by torch's own float8 dtype, float32 [N, K]."""
    names = {"e5m2": torch.float8_e5m2, "fnuz": torch.float8_e4m3fnuz}
    kind = next((dtype for part, dtype in names.items() if part in weight.format.name), None)
    return weight.codes.view(kind or torch.float8_e4m3fn).float()


def ternary_values(weight, shifts=(0, 2, 4, 6), table=None):
    """Either ternary packing, float32 [N, K]."""
    slots = [(weight.codes >> shift) & 3 for shift in shifts]
    if weight.format.name == "ternary_k_interleaved":
        codes, usual = torch.stack(slots, -1).flatten(1), (0.0, 1.0, -1.0, 0.0)
    else:
        codes, usual = torch.cat(slots, 0)[: weight.shape[0]], (-1.0, 0.0, 1.0, 2.0)
    return torch.tensor(table or usual)[codes.long()]


def values(weight):
    """Codes to numbers before the scale."""
    return ternary_values(weight) if "ternary" in weight.format.name else fp8_values(weight)


def numbers(weight):
    """Stored scales to float32."""
    if weight.format.scale_encoding == "e8m0":
        return weight.scales.view(torch.uint8).view(torch.float8_e8m0fnu).float()
    scales = weight.scales.float()
    return 1 / scales if weight.format.scale_convention == "divide" else scales


def spread(scales, weight):
    """One scale per weight, broadcastable to [N, K]."""
    if weight.format.block is None:
        return scales.reshape(-1, 1)
    rows, columns = weight.format.block
    n, k = weight.shape
    place = torch.arange(n)[:, None] // rows, torch.arange(k)[None, :] // columns
    return scales[place]


def product(x, w):
    """Float32 sums."""
    return x @ w.T


def finish(y, weight, bias):
    """The bias, in float32."""
    return y if bias is None else y + bias.float()


def store(y, dtype):
    """One rounding, to nearest."""
    return y.to(dtype)


@dataclass(frozen=True, kw_only=True)
class TorchKernel:
    """y = x W^T (+ b) in stages; `replace` one of them and there is a mutant."""

    values: Callable = values
    numbers: Callable = numbers
    spread: Callable = spread
    combine: Callable = torch.mul
    load: Callable = torch.Tensor.float
    product: Callable = product
    finish: Callable = finish
    store: Callable = store

    def weight(self, weight):
        """The effective weight, float32 [N, K]."""
        return self.combine(self.values(weight), self.spread(self.numbers(weight), weight))

    def __call__(self, x, weight, bias=None):
        rows = self.load(x.reshape(-1, x.shape[-1]))
        y = self.finish(self.product(rows, self.weight(weight)), weight, bias)
        return self.store(y, x.dtype).reshape(*x.shape[:-1], -1)


TORCH = TorchKernel()
"""The correct one, for every format."""


# ------------------------------------------------------------------ native sources


def patched(library, *changes):
    """The native library with each (old, new) replaced in its first source or a header, once.

    Args:
        library: a `NativeLibrary`.
        changes: pairs of texts; each old one must occur exactly once in all the files.
    """
    source = library.sources[0]
    files = {file.name: file.read_text() for file in (source, *library.headers)}
    for old, new in changes:
        places = sum(text.count(old) for text in files.values())
        assert places == 1, f"{source.name}: {places} places of {old!r}"
        files = {name: text.replace(old, new) for name, text in files.items()}
    key = hashlib.sha256("\0".join(files.values()).encode()).hexdigest()[:16]
    folder = cache_directory() / "mutants" / key
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if not (folder / name).exists():
            (folder / name).write_text(content)
    return NativeLibrary(
        name=f"mutant-{library.name}",
        sources=(folder / source.name, *library.sources[1:]),
        headers=tuple(folder / header.name for header in library.headers),
        language=library.language,
        flags=library.flags,
    )


class PatchedNaive:
    """``ternary_cuda.naive`` on the CPU with one place of its source changed."""

    name = "ternary_cuda.naive"
    contract = NAIVE.contract
    engines = (CUDA_ON_CPU,)
    formats = NAIVE.formats
    is_supported = staticmethod(NAIVE.is_supported)
    can_implement = staticmethod(NAIVE.can_implement)
    prepare = staticmethod(NAIVE.prepare)

    def __init__(self, *changes):
        self.changes = changes

    @functools.cached_property
    def library(self):
        return patched(ops.CPU, *self.changes)

    def apply(self, x, prepared, bias=None):
        with mock.patch.object(ops, "CPU", self.library):
            return NAIVE.apply(x, prepared, bias)


NAIVE_ON_CPU = PatchedNaive()
"""The unpatched source: the twin of every patched one."""
