"""`kernel.py` as a module: executed by torch, or in Triton's own language."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from reconcile.native import cache_directory

SOURCE = Path(__file__).with_name("kernel.py")
"""The one source."""
_IMPORTS = {
    "from reconcile_kernels.aiter_bf16 import torch_language as tl\n": (
        "import triton.language as tl\n"
    ),
    "from reconcile_kernels.aiter_bf16.torch_language import jit\n": "from triton import jit\n",
    "from __future__ import annotations\n": "",  # Triton reads annotations as they are
}


def in_torch(text: str | None = None) -> ModuleType:
    """The source, or a changed copy of it, executed by torch."""
    return _module(SOURCE.read_text(encoding="utf-8") if text is None else text, "torch")


def in_triton(text: str | None = None) -> ModuleType:
    """The source, or a changed copy of it, in Triton's language; needs Triton."""
    text = SOURCE.read_text(encoding="utf-8") if text is None else text
    for ours, theirs in _IMPORTS.items():
        if ours not in text:
            raise ValueError(f"{SOURCE}: expected the line {ours!r}")
        text = text.replace(ours, theirs)
    return _module(text, "triton")


def _module(text: str, language: str) -> ModuleType:
    """A module of this text; it lies in the cache, because Triton reads its functions' source."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = f"_reconcile_{language}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    file = cache_directory() / "triton" / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
