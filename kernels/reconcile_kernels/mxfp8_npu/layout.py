"""How the NPU wants an MXFP8 weight: codes [K, N], scale bytes in pairs [ceil(G / 2), N, 2].

The byte of (n, g) lies at [g // 2, n, g % 2]; an odd number of groups is padded with one byte 0.
Source: vllm-ascend, quantization/methods/w8a8_mxfp8.py at 182b75e.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from reconcile.exceptions import KernelError


def paired(scales: Tensor) -> Tensor:
    """Scale bytes [..., G] as the operators hold them, [..., ceil(G / 2), 2], odd G padded."""
    groups = scales.shape[-1]
    return pad(scales, (0, groups % 2)).reshape(*scales.shape[:-1], -(-groups // 2), 2)


def unpaired(pairs: Tensor, k: int) -> Tensor:
    """[..., ceil(G / 2), 2] back to [..., G] with G = ceil(K / 32); the padding is dropped."""
    return pairs.flatten(-2)[..., : -(-k // 32)]


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and bytes [N, G] to the kernel's layout, contiguous: [K, N], [ceil(G/2), N, 2].

    With a leading dimension of experts: [E, K, N] and [E, ceil(G/2), N, 2].
    """
    return (
        codes.transpose(-2, -1).contiguous(),
        paired(scales).transpose(-3, -2).contiguous(),
    )


def unpack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack`."""
    k = codes.shape[-2]
    return codes.transpose(-2, -1).contiguous(), unpaired(scales.transpose(-3, -2), k).contiguous()


@dataclass(slots=True)
class Buffers:
    """A layer's packed weight in memory that stays where it is when the weight is loaded again.

    A graph that was captured on the first load keeps the addresses.
    """

    codes: Tensor | None = None
    scales: Tensor | None = None

    def load(self, codes: Tensor, scales: Tensor) -> None:
        """Take packed tensors; the first load allocates, every later one copies in place.

        Raises:
            KernelError: other shapes than those of the first load.
        """
        if self.codes is None or self.scales is None:
            self.codes, self.scales = codes.clone(), scales.clone()
            return
        for name, old, new in (("codes", self.codes, codes), ("scales", self.scales, scales)):
            if old.shape != new.shape:
                raise KernelError(
                    f"{name}: the buffer holds {list(old.shape)}, the new weight {list(new.shape)}"
                )
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def addresses(self) -> tuple[int, int]:
        """Where the two lie in memory."""
        assert self.codes is not None
        assert self.scales is not None
        return self.codes.data_ptr(), self.scales.data_ptr()


def as_float8(codes: Tensor) -> Tensor:
    """Bytes as the dtype that the operators take."""
    return codes.view(torch.float8_e4m3fn)
