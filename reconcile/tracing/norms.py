"""Norms on small inputs: where their epsilon decides, and every other rounding is harmless.

On the rows that a model meets the epsilon of a norm is far below the rounding of a 16-bit dtype,
until a row is small. So each norm is also called on rows of rms 2^-10 and 2^-5 of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reconcile.tracing.trace import Pass, Tap

KIND = "norms"
"""Kind of the pass that holds these calls; there is one in each trace."""
KEY = "norms"
SIZES = (2.0**-10, 2.0**-5, 1.0)
"""Rms of the rows."""
ROWS = 4
"""Rows of each size."""


def norm_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Norms with one weight and nothing inside, by module path."""
    return {
        name: module
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and _is_plain(module)
    }


def _is_plain(module: nn.Module) -> bool:
    own = list(module.named_parameters(recurse=False))
    return not list(module.children()) and [n for n, p in own if p.dim() == 1] == ["weight"]


def norm_inputs(size: int, dtype: torch.dtype) -> Tensor:
    """[rows, size] in the candidate's dtype, the same for every side."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(len(SIZES) * ROWS, size, generator=generator, dtype=torch.float64)
    sizes = torch.tensor(SIZES, dtype=torch.float64).repeat_interleave(ROWS)
    return (rows * sizes[:, None]).to(dtype)


def call_norms(model: nn.Module, given: torch.dtype, dtype: torch.dtype) -> Pass:
    """Every norm of a model in ``dtype`` on rows that were rounded to ``given``."""
    tensors: dict[str, Tensor] = {}
    for name, module in norm_modules(model).items():
        weight = module.weight
        assert isinstance(weight, Tensor)
        x = norm_inputs(weight.numel(), given)
        y = module(x.to(device=weight.device, dtype=dtype))
        if isinstance(y, Tensor) and y.shape == x.shape:
            tensors[str(Tap(name, "in0"))] = x
            tensors[str(Tap(name, "out"))] = y.detach().cpu().clone()
    return Pass(KEY, KIND, tensors)
