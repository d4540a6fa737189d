"""Faults of batched bfloat16 GEMMs: one place of the source of ``aiter_bf16``, run by torch.

The same changed sources run in Triton's interpreter too, where Triton is: tests/triton.
"""

from __future__ import annotations

import functools

import torch

from reconcile import check_batched_linear
from reconcile.selftest import BatchedTrial, Mutant, Variant
from reconcile_kernels.aiter_bf16 import source
from reconcile_kernels.aiter_bf16.config import Config, config_for, contract

BATCH, N, K = 3, 32, 512
"""K = 512 is four blocks of 128: one for each of the parts that 65 to 128 rows are split into."""
SHORT = 160
"""A K that reaches two of the four parts, the second not to its end."""
SIZES = (1, 5, 70)
"""Rows of the random probes; 70 are split over K."""
PROBES = ("impulse", "integer", "layout", "bound")
"""Enough for these faults; every probe takes seconds, because the grid is a loop in Python."""
OP = "linear.1:out"
"""Group 1 is probed, between two neighbours."""
ALL_GROUPS = "linear:out"
"""What is between the groups is seen, and named, in the call on all of them."""


class Kernel:
    """The kernel with texts of its source replaced; ``config`` in place of its own tiles."""

    contract = contract()
    __name__ = "aiter_bf16"

    def __init__(self, *changes, load=source.in_torch, config=config_for):
        self._changes, self._load, self._config = changes, load, config

    @functools.cached_property
    def module(self):
        text = source.SOURCE.read_text()
        for old, new in self._changes:
            assert old in text, f"kernel.py no longer holds {old!r}"
            text = text.replace(old, new)
        return self._load(text)

    def __call__(self, x, w, bias=None):
        (batch, m, _), n = x.shape, w.shape[1]
        y = torch.empty((m, batch, n), dtype=x.dtype).transpose(0, 1)
        return self.module.run(x, w, bias, y, self._config(m))


CLEAN = Kernel()


def weight_of(seed=0, shape=(BATCH, N, K)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bias_of(seed=0, shape=(BATCH, N)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100)).bfloat16()


def mutant(name, causes, source, patch, *changes, bias=False, op=OP, hard=False, k=K, quick=True):
    """The kernel's source with texts replaced, executed by torch."""
    options = {"groups": (1,), "batch_sizes": SIZES, "repeats": 2, "probes": PROBES}
    return Mutant(
        id=f"aiter_bf16/{name}",
        area="kernels",
        source=source,
        patch=f"kernel.py: {patch}",
        trial=BatchedTrial(
            faulty=Kernel(*changes),
            clean=CLEAN,
            weight=functools.partial(weight_of, shape=(BATCH, N, k)),
            contract=CLEAN.contract,
            options=options | ({"bias": bias_of()} if bias else {}),
        ),
        op=op,
        causes=causes,
        hard=hard,
        quick=quick,
    )


Y_STRIDES = "*x.stride(), *w.stride(), *y.stride(), *strides_b,"
K_MASK_X = "(m[:, None] < M) & (k[None, :] < end)"
K_MASK_W = "(n[None, :] < N) & (k[:, None] < end)"
PARTIALS = "torch.empty((splits, batch, m, n), dtype=torch.float32, device=x.device)"
DOT = "acc = tl.dot(xs, ws, acc)"
BIAS = "acc = acc + tl.load(at, mask=n < N, other=0.0).to(tl.float32)[None, :]"
ADD_PART = "acc = acc + tl.load(at, mask=inside, other=0.0)\n"

FAULTS = {
    "logical_output_strides": (
        ("strided_output",),
        "ROCm/aiter#4181 and its kind: strides of the logical shape for an output that has others",
        "the output's strides are those of a contiguous [B, M, N]",
        (
            (Y_STRIDES, "*x.stride(), *w.stride(), m * n, n, 1, *strides_b,"),
            (
                "partials, y, added, batch, m, n, *y.stride(), *strides_b,",
                "partials, y, added, batch, m, n, m * n, n, 1, *strides_b,",
            ),
        ),
        {"op": ALL_GROUPS},
    ),
    "logical_input_strides": (
        ("strided_input",),
        "vllm-project/vllm#33139 and its kind: a strided view is read as if it were contiguous",
        "the strides of x are those of a contiguous [B, M, K]",
        ((Y_STRIDES, "m * k, k, 1, *w.stride(), *y.stride(), *strides_b,"),),
        {"op": ALL_GROUPS},
    ),
    "mask_of_packed_k": (
        ("k_tail_dropped", "split_missing"),
        "ROCm/aiter#4181: the mask uses the packed K, half of the logical one",
        "the masks of x and w compare with K // 2",
        (
            (K_MASK_X, "(m[:, None] < M) & (k[None, :] < K // 2)"),
            (K_MASK_W, "(n[None, :] < N) & (k[:, None] < K // 2)"),
        ),
        {"k": SHORT},
    ),
    "no_mask_of_k": (
        ("k_tail_dropped", "block_boundary"),
        "ROCm/aiter#4181: K that is no multiple of the tile; the tail reads the next row",
        "x and w are masked by whole blocks of 64 in place of K",
        (
            (K_MASK_X, "(m[:, None] < M) & (k[None, :] < K // 64 * 64)"),
            (K_MASK_W, "(n[None, :] < N) & (k[:, None] < K // 64 * 64)"),
        ),
        {"k": SHORT, "quick": False},
    ),
    "overlapping_splits": (
        ("k_term_doubled",),
        "modular/modular#7165: split boundaries that overlap",
        "a part ends one block of K late",
        (
            (
                "end = tl.minimum(start + SPLIT_K, K)",
                "end = tl.minimum(start + SPLIT_K + (SPLITS - 1) * BLOCK_K // 4, K)",
            ),
        ),
        {"quick": False},
    ),
    "bfloat16_partials": (
        ("narrow_partials",),
        "ROCm/aiter#4581: split-K partial sums rounded to bfloat16 before they are added",
        "the partial sums are kept in bfloat16",
        (
            (PARTIALS, PARTIALS.replace("float32", "bfloat16")),
            ("tl.store(at, acc, mask=inside)", "tl.store(at, acc.to(tl.bfloat16), mask=inside)"),
            (
                ADD_PART,
                "acc = acc + tl.load(at, mask=inside, other=0.0).to(tl.float32)\n",
            ),
        ),
        {"hard": True},
    ),
    "partials_never_written": (
        ("unwritten",),
        "ROCm/aiter#4181: partial buffers of splits that never ran are added",
        "all four parts are added, also those that K does not reach and nothing was launched for",
        (
            (PARTIALS, PARTIALS.replace("splits", "config.splits")),
            (
                "HAS_BIAS=bias is not None, SPLITS=splits,\n            BLOCK_M=ADDED",
                "HAS_BIAS=bias is not None, SPLITS=config.splits,\n            BLOCK_M=ADDED",
            ),
        ),
        {"k": SHORT},
    ),
    "last_split_not_added": (
        ("k_tail_dropped", "split_missing"),
        "ROCm/aiter#4581: a part of the sum that is missing",
        "the last part is not added",
        (("for split in range(SPLITS):", "for split in range(SPLITS - 1):"),),
        {"quick": False},
    ),
    "bfloat16_accumulator": (
        ("narrow_accumulator",),
        "ROCm/aiter#4581: up to 40 % relative error; a running sum in bfloat16",
        "the sum is rounded to bfloat16 after every 16 of K",
        (
            (DOT, "acc = tl.dot(xs, ws, acc).to(tl.bfloat16).to(tl.float32)"),
            ("BLOCK_K=config.block_k,", "BLOCK_K=16,"),
        ),
        {"hard": True},
    ),
    "bias_after_rounding": (
        ("bias_after_rounding", "double_rounding"),
        "amd-aiter 0.1.7.post2: the sum is rounded to the bias's dtype and the bias added there",
        "the sum is rounded to bfloat16 before the bias is added",
        ((BIAS, BIAS.replace("acc + ", "acc.to(tl.bfloat16).to(tl.float32) + ")),),
        {"bias": True, "hard": True},
    ),
    "bias_of_group_0": (
        ("group_bias",),
        "Wenyueh/MinivLLM#80 and its kind: the bias of another shard",
        "the bias of group 0 for all",
        (("bias + (b * stride_bb + n * stride_bn)", "bias + (n * stride_bn)"),),
        {"bias": True, "op": ALL_GROUPS, "quick": False},
    ),
    "bias_in_every_split": (
        ("bias_doubled", "bias_scaled"),
        "Wenyueh/MinivLLM#80: a bias that is added once per part",
        "each partial sum gets the bias",
        (
            (
                ADD_PART,
                f"{ADD_PART}        if HAS_BIAS and split > 0:\n"
                "            at = bias + (b * stride_bb + n * stride_bn)\n"
                f"            {BIAS}\n",
            ),
        ),
        {"bias": True, "quick": False},
    ),
    "weight_of_the_next_group": (
        ("group_shifted",),
        "vllm-project/vllm#44630 and its kind: an operand of another group",
        "group b multiplies the weight of group b - 1",
        (("w + (b * stride_wb", "w + ((b + B - 1) % B * stride_wb"),),
        {"op": ALL_GROUPS, "quick": False},
    ),
}
"""By name: causes, the public report, the patch in words, the texts replaced, and options."""

MUTANTS = [
    mutant(name, causes, report, patch, *changes, **options)
    for name, (causes, report, patch, changes, options) in FAULTS.items()
]


# ------------------------------------------------------------------ clean


def variant(name, what, config=config_for, bias=False, promised=None):
    """The unchanged source under other tiles."""

    def run(seed):
        return check_batched_linear(
            Kernel(config=config),
            weight_of(seed),
            contract=promised or CLEAN.contract,
            groups=[seed % BATCH],
            batch_sizes=SIZES,
            repeats=1,
            probes=PROBES,
            seed=seed,
            **({"bias": bias_of(seed)} if bias else {}),
        )

    return Variant(id=f"aiter_bf16/{name}", what=what, run=run)


VARIANTS = [
    variant("own_tiles", "its own tiles by M, four parts of K from 65 to 128 rows", bias=True),
    variant("small_tiles", "tiles of 16 x 16 x 32 for every M", lambda m: Config(16, 16, 32)),
    variant("wide_tiles", "one block of K for every M", lambda m: Config(64, 64, 512)),
    variant(
        "always_split",
        "three parts of K for every M",
        lambda m: Config(32, 32, 32, splits=3),
        bias=True,
    ),
]
