"""One trained model in the layouts of many checkpoints, packed from the definitions with numpy.

Nothing here uses the product's own packings: a layout that is read wrongly must not agree with a
layout that was written wrongly in the same way.
"""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/reconcile_fixtures"
MASTER = FIXTURES / "tiny-lm-master"
PROMPTS = FIXTURES / "prompts.json"
I2_S = 36
TO_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def read_config(folder=MASTER):
    return json.loads((folder / "config.json").read_text())


def master():
    return load_file(MASTER / "model.safetensors")


def linears(tensors):
    return [n.removesuffix(".weight") for n in tensors if re.search(r"_proj\.weight$", n)]


def ternary(weight, per_row):
    """Absmean: values -1, 0, 1 and the scale, per row or for the whole weight."""
    wide = weight.double().numpy()
    scale = np.abs(wide).mean(axis=1 if per_row else None, keepdims=True)
    return np.clip(np.round(wide / scale), -1, 1).astype(np.int64), scale.reshape(-1)


# --- packings ------------------------------------------------------------------------------------


def coded(values, table):
    """Values to codes by a table of the value of each code."""
    return sum((values == value) * code for code, value in table.items()).astype(np.uint8)


def four(slots, *, high=False):
    """Four arrays of codes to bytes, the first in the low (or high) bits."""
    shifts = (6, 4, 2, 0) if high else (0, 2, 4, 6)
    return sum(s << shift for s, shift in zip(slots, shifts, strict=True)).astype(np.uint8)


MINUS_ONE = {0: -1, 1: 0, 2: 1}
ZERO_FIRST = {0: 0, 1: 1, 2: -1}


def k_interleaved(values, table=ZERO_FIRST, *, high=False):
    codes = coded(values, table)
    return four([codes[:, i::4] for i in range(4)], high=high)


def k_planar(values):
    return four(np.split(coded(values, ZERO_FIRST), 4, axis=1))


def n_planar(values, *, high=False):
    return four(np.split(coded(values, MINUS_ONE), 4, axis=0), high=high)


def flat_strided(values, stride):
    groups = coded(values, MINUS_ONE).reshape(-1, 4, stride)
    return four([groups[:, i] for i in range(4)], high=True).reshape(-1)


def four_rows(values):
    codes = coded(values, MINUS_ONE)
    return four([codes[i::4] for i in range(4)], high=True).reshape(-1)


def gpu_tiles(values):
    """By the word index and the shift of every element."""
    n, k = np.indices(values.shape)
    thread = n % 16 // 8 * 16 + k % 32 // 16 * 8 + n % 8
    word = (n // 16 * (values.shape[1] // 32) + k // 32) * 32 + thread
    shift = k % 16 % 4 * 8 + k % 16 // 4 * 2
    words = np.zeros(values.size // 16, np.uint32)
    np.bitwise_or.at(words, word, (values + 2).astype(np.uint32) << shift.astype(np.uint32))
    return words.astype("<u4").view(np.int8).reshape(len(values), -1)


# --- checkpoints ---------------------------------------------------------------------------------


def write(folder, tensors, config=None, quantization=None):
    folder.mkdir(parents=True, exist_ok=True)
    held = {n: torch.as_tensor(t).clone().contiguous() for n, t in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        if quantization is not None:
            config = config | {"quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def repacked(pack, *, per_row, scale=lambda s: s, dtype=torch.float32):
    """Every linear of the master as ``weight`` and ``weight_scale``."""
    tensors = master()
    for module in linears(tensors):
        values, scales = ternary(tensors[f"{module}.weight"], per_row)
        tensors[f"{module}.weight"] = torch.from_numpy(pack(values))
        tensors[f"{module}.weight_scale"] = torch.tensor(scale(scales)).to(dtype)
    return tensors


def in_house(folder):
    declared = {"quant_method": "ternary", "format": "ternary_k_interleaved"}
    declared["modules_to_not_convert"] = ["lm_head"]
    return write(folder, repacked(k_interleaved, per_row=True), read_config(), declared)


def hf_multiplies(folder):
    tensors = repacked(n_planar, per_row=False, dtype=torch.bfloat16)
    declared = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    return write(folder, tensors, read_config(), declared)


def hf_divides(folder):
    tensors = repacked(n_planar, per_row=False, scale=lambda s: 1 / s, dtype=torch.bfloat16)
    declared = {"quant_method": "bitnet", "linear_class": "bitlinear"}
    return write(folder, tensors, read_config(), declared)


def microsoft_gpu(folder):
    """Fused wqkv and w13 with four scales each, in Meta's names; nothing is declared."""
    source = master()
    made = {}
    for name, tensor in source.items():
        if not re.search(r"_proj\.weight$", name):
            made[meta_name(name)] = tensor
    for layer in range(6):
        at = f"model.layers.{layer}."
        groups = {
            "attention.wqkv": [f"{at}self_attn.{p}_proj" for p in "qkv"],
            "attention.wo": [f"{at}self_attn.o_proj"],
            "feed_forward.w13": [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"],
            "feed_forward.w2": [f"{at}mlp.down_proj"],
        }
        for name, modules in groups.items():
            parts = [ternary(source[f"{m}.weight"], False) for m in modules]
            values = np.concatenate([values for values, _ in parts])
            scales = np.zeros(4)
            scales[: len(parts)] = [scale[0] for _, scale in parts]
            made[f"layers.{layer}.{name}.weight"] = torch.from_numpy(gpu_tiles(values))
            stored = torch.tensor(scales).to(torch.bfloat16)
            made[f"layers.{layer}.{name}.weight_scale"] = stored
    return write(folder, made, read_config())


def meta_name(name):
    name = name.removeprefix("model.")
    for old, new in (
        ("embed_tokens", "tok_embeddings"),
        ("lm_head", "output"),
        ("self_attn.", "attention."),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        name = name.replace(old, new)
    return name


def gguf_name(name):
    stem = name.removesuffix(".weight")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.weight"
    layer, rest = re.match(r"model\.layers\.(\d+)\.(.*)", stem).groups()
    return f"blk.{layer}.{TO_GGUF[rest]}.weight"


def i2_s(folder, pack, config=True):
    """bitnet.cpp's GGUF: codes, then the scale, 32 bytes in all behind the codes."""
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3")
    tensors = master()
    packed = set(linears(tensors))
    for name, tensor in tensors.items():
        if name.removesuffix(".weight") in packed:
            values, scale = ternary(tensor, False)
            tail = np.zeros(32, np.uint8)
            tail[:4] = scale.astype(np.float32).view(np.uint8)
            stored = np.concatenate([pack(values).reshape(-1), tail]).view(np.int8)
            writer.add_tensor(
                gguf_name(name), stored, raw_shape=tuple(tensor.shape), raw_dtype=I2_S
            )
        else:
            writer.add_tensor(gguf_name(name), tensor.float().numpy())
    finish(writer)
    if config:
        (folder / "config.json").write_text(json.dumps(read_config()))
    return folder


def tq(folder, kind):
    """llama.cpp's own ternary types need K in whole blocks of 256: another, random model."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    config = read_config() | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3")
    sizes = {
        "self_attn.q_proj": (256, 256),
        "self_attn.k_proj": (64, 256),
        "self_attn.v_proj": (64, 256),
        "self_attn.o_proj": (256, 256),
        "mlp.gate_proj": (512, 256),
        "mlp.up_proj": (512, 256),
        "mlp.down_proj": (256, 512),
        "self_attn.q_norm": (32,),
        "self_attn.k_norm": (32,),
        "input_layernorm": (256,),
        "post_attention_layernorm": (256,),
    }
    quant = gguf.GGMLQuantizationType[kind]
    for layer in range(2):
        for part, size in sizes.items():
            values = rng.normal(size=size).astype(np.float32)
            name = gguf_name(f"model.layers.{layer}.{part}.weight")
            if len(size) == 2:
                stored = gguf.quants.quantize(values, quant)
                writer.add_tensor(name, stored, raw_dtype=quant)
            else:
                writer.add_tensor(name, np.abs(values))
    for name, size in (("token_embd", (259, 256)), ("output", (259, 256)), ("output_norm", (256,))):
        writer.add_tensor(f"{name}.weight", rng.normal(size=size).astype(np.float32))
    finish(writer)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def swapped(folder):
    """The in-house layout with the bits from the top and +1 and -1 exchanged; undeclared."""
    table = {0: 0, 1: -1, 2: 1}
    tensors = repacked(lambda v: k_interleaved(v, table, high=True), per_row=True)
    return write(folder, tensors, read_config())


def shuffled(folder):
    """Names that say nothing: modules are numbered at random, in another order."""
    tensors = repacked(k_interleaved, per_row=True)
    stems = sorted({name.rpartition(".")[0] for name in tensors})
    order = np.random.default_rng(7).permutation(len(stems))
    new = {stem: f"t{order[i]:03d}" for i, stem in enumerate(stems)}
    renamed = {f"{new[n.rpartition('.')[0]]}.{n.rpartition('.')[2]}": t for n, t in tensors.items()}
    return write(folder, dict(sorted(renamed.items())), read_config())


def without_config(folder):
    return write(folder, repacked(k_interleaved, per_row=True))


def unpacked_codes(folder):
    tensors = repacked(lambda v: coded(v, ZERO_FIRST), per_row=True)
    return write(folder, tensors, read_config())


def planar(folder):
    """Planar along K, as nobody has published it."""
    return write(folder, repacked(k_planar, per_row=True), read_config())


def n_planar_high(folder):
    tensors = repacked(lambda v: n_planar(v, high=True), per_row=False)
    return write(folder, tensors, read_config())


def fp8(folder, block=None, *, declare=True, suffix="weight_scale_inv", e8m0=False):
    """Block, channel (block ``row``) or tensor (None) scaled E4M3."""
    tensors = master()
    for module in linears(tensors):
        wide = tensors[f"{module}.weight"].double()
        n, k = wide.shape
        rows, columns = {None: (n, k), "row": (1, k)}.get(block, block)
        grid = (-(-n // rows), -(-k // columns))
        scales = torch.zeros(grid, dtype=torch.float64)
        codes = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
        for i in range(grid[0]):
            for j in range(grid[1]):
                place = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale = float(wide[place].abs().max()) / 448
                if e8m0:
                    scale = 2.0 ** np.ceil(np.log2(scale))
                scales[i, j] = float(np.float32(scale))
                codes[place] = (wide[place] / scales[i, j]).float().to(torch.float8_e4m3fn)
        tensors[f"{module}.weight"] = codes
        stored = scales.float() if block not in (None,) else scales.float().reshape(())
        if e8m0:
            stored = (torch.log2(scales) + 127).round().to(torch.uint8)
        tensors[f"{module}.{suffix}"] = stored
    config = read_config()
    declared = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    if isinstance(block, tuple):
        declared["weight_block_size"] = list(block)
    if e8m0:
        declared = {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}
    return write(folder, tensors, config, declared if declare else None)
