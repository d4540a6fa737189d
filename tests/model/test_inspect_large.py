"""A checkpoint of 2 GB is inspected in little private memory: its bytes are only mapped."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

GIGABYTE = 1 << 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "ternary",
        "format": "ternary_k_interleaved",
        "modules_to_not_convert": ["lm_head"],
    },
}


def shapes():
    """Name, dtype and stored shape of every tensor."""
    k, kv, wide = 4096, 1024, 14336
    yield "model.embed_tokens.weight", "BF16", (32000, k)
    yield "lm_head.weight", "BF16", (32000, k)
    yield "model.norm.weight", "BF16", (k,)
    parts = {"self_attn.q_proj": (k, k), "self_attn.k_proj": (kv, k), "self_attn.v_proj": (kv, k)}
    parts |= {"self_attn.o_proj": (k, k), "mlp.gate_proj": (wide, k), "mlp.up_proj": (wide, k)}
    parts |= {"mlp.down_proj": (k, wide)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", "BF16", (k,)
        for part, (rows, columns) in parts.items():
            yield f"{at}.{part}.weight", "U8", (rows, columns // 4)
            yield f"{at}.{part}.weight_scale", "F32", (rows,)


def write_large(folder):
    """Header and data by hand: the file is larger than what should be in memory here either."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, (4, 1 << 24)).astype(np.uint8)
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    dense = (rng.normal(size=1 << 23).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    scales = rng.uniform(0.01, 0.1, 1 << 14).astype(np.float32)
    source = {"U8": packed, "BF16": dense.view(np.uint8), "F32": scales.view(np.uint8)}
    width = {"U8": 1, "BF16": 2, "F32": 4}
    header, start = {}, 0
    for name, dtype, shape in shapes():
        end = start + int(np.prod(shape)) * width[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            data = source[entry["dtype"]]
            while left:  # from another place each time, so that no two tensors are alike
                place = 4 * int(rng.integers(0, data.size // 8))
                part = data[place : place + left]
                file.write(part)
                left -= part.size
    return folder


def private(pid):
    """Anonymous resident memory of a process in bytes; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(lines.get("RssAnon", "0 kB").split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_two_gigabytes_in_one_of_private_memory(tmp_path, capsys):
    made = write_large(tmp_path / "checkpoint")
    size = (made / "model.safetensors").stat().st_size
    assert size >= 2 * GIGABYTE
    command = [sys.executable, "-m", "reconcile", "inspect", str(made)]
    before, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, cwd=tmp_path)
        peak = 0
        while process.poll() is None:
            peak = max(peak, private(process.pid))
            time.sleep(0.02)
    wall = time.perf_counter() - before
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    text = (tmp_path / "out").read_text()
    with capsys.disabled():
        sys.stdout.write(
            f"\n{size / 1e9:.2f} GB: {wall:.1f} s, {cpu:.1f} s CPU, {peak / 1e6:.0f} MB private\n"
        )
    assert process.returncode == 0, text
    assert "DECLARED: ternary_k_interleaved" in text
    assert 0 < peak <= GIGABYTE
    assert cpu <= 60
