"""Checkpoints that load, and every way in which one is refused."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from reconcile.exceptions import CheckpointError, FormatError
from reconcile.registry import model_source
from reconcile_references.scheme import Scheme
from reconcile_references.ternary import TERNARY_K_INTERLEAVED

GATE = "model.layers.1.mlp.gate_proj"
INDEX = "model.safetensors.index.json"
LINEARS = {
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}


def load(folder):
    return model_source().load(folder)


def refusal(folder):
    with pytest.raises((CheckpointError, FormatError)) as caught:
        load(folder)
    return str(caught.value)


# --- what loads --------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_one_file_and_shards_load_the_same(tiny, tmp_path, shards):
    made = tiny()
    checkpoint = load(made.write(tmp_path, shards))
    assert set(checkpoint.weights) == LINEARS
    assert set(checkpoint.dense) == {n for n in made.tensors if n.rpartition(".")[0] not in LINEARS}
    for name, weight in checkpoint.weights.items():
        assert torch.equal(weight.codes, made.tensors[f"{name}.weight"])
        assert torch.equal(weight.scales, made.tensors[f"{name}.weight_scale"])
        assert weight.name == name
    for name, tensor in checkpoint.dense.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, made.tensors[name])
    assert (checkpoint.dtype, checkpoint.vocab_size) == ("bfloat16", 40)
    assert checkpoint.structure.layers == ("model.layers.0", "model.layers.1")
    assert (checkpoint.structure.norm, checkpoint.structure.head) == ("model.norm", "lm_head")


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ({"linear_class": "bitlinear"}, "ternary_hf_divide"),
        ({}, "ternary_hf_divide"),
        ({"linear_class": "autobitlinear"}, "ternary_hf"),
        ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, "ternary_hf"),
    ],
    ids=str,
)
def test_bitnet_takes_its_convention_from_linear_class(tiny, tmp_path, declared, name):
    made = tiny(name=name)
    made.config["quantization_config"] = {"quant_method": "bitnet"} | declared
    checkpoint = load(made.write(tmp_path))
    assert {weight.format.name for weight in checkpoint.weights.values()} == {name}
    for module, weight in checkpoint.weights.items():
        expected = torch.tensor(made.dense[f"{module}.weight"])
        assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_without_a_list_only_the_output_head_is_dense(tiny, tmp_path, tied):
    """As transformers does, and as published BitNet checkpoints need."""
    made = tiny(kind="bitnet", name="ternary_hf", tie_word_embeddings=tied)
    made.config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
    }
    checkpoint = load(made.write(tmp_path))
    assert set(checkpoint.weights) == LINEARS
    assert ("lm_head.weight" in checkpoint.dense) is not tied


def test_a_tied_head_may_be_stored_if_it_is_equal(tiny, tmp_path):
    made = tiny(tie_word_embeddings=True)
    checkpoint = load(made.write(tmp_path / "without"))
    assert "lm_head.weight" not in checkpoint.dense
    model = checkpoint.build(torch.float32, lambda *_: torch.nn.Identity())
    embedding = made.tensors["model.embed_tokens.weight"]
    assert torch.equal(model.lm_head.weight, embedding.float())
    made.tensors["lm_head.weight"] = embedding.clone()
    assert "lm_head.weight" in load(made.write(tmp_path / "equal")).dense
    made.tensors["lm_head.weight"][3, 4] += 1
    said = refusal(made.write(tmp_path / "different"))
    assert "tied but different (1): lm_head.weight and model.embed_tokens.weight" in said


@pytest.mark.parametrize(
    ("entry", "module", "quantised"),
    [
        ("lm_head", "lm_head", False),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj", False),
        ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", True),
        ("up_proj", "model.layers.1.mlp.up_proj", False),
        ("mlp.up_proj", "model.layers.1.mlp.up_proj", False),
        ("proj", "model.layers.1.mlp.up_proj", True),
        ("p.up_proj", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", False),
        ("model.layers.1", "model.layers.11.mlp.up_proj", True),
        ("model", "model.layers.1.mlp.up_proj", False),
        ("layers", "model.layers.1.mlp.up_proj", True),
    ],
)
def test_an_ignored_entry_matches_whole_components(entry, module, quantised):
    scheme = Scheme(TERNARY_K_INTERLEAVED, (entry,))
    assert scheme.is_quantized(module, "lm_head") is quantised


def test_modules_that_the_list_names_are_dense(tiny, tmp_path):
    made = tiny()
    for name in sorted(LINEARS):
        if name.startswith("model.layers.0.") or name.endswith("o_proj"):
            made.tensors[f"{name}.weight"] = torch.tensor(made.dense[f"{name}.weight"]).bfloat16()
            del made.tensors[f"{name}.weight_scale"]
    ignored = ["lm_head", "model.layers.0", "o_proj"]
    made.config["quantization_config"]["modules_to_not_convert"] = ignored
    checkpoint = load(made.write(tmp_path))
    expected = {n for n in LINEARS if n.startswith("model.layers.1") and not n.endswith("o_proj")}
    assert set(checkpoint.weights) == expected


def test_the_hash_covers_the_config_and_every_shard(tiny, tmp_path):
    made = tiny()
    first = load(made.write(tmp_path / "a", shards=2)).sha256
    assert load(made.write(tmp_path / "b", shards=2)).sha256 == first
    made.config["note"] = "x"
    assert load(made.write(tmp_path / "c", shards=2)).sha256 != first
    del made.config["note"]
    made.tensors["model.norm.weight"][0] += 1
    assert load(made.write(tmp_path / "d", shards=2)).sha256 != first


# --- tensors that do not fit -------------------------------------------------------------------


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors.get(name))})


TENSORS = {
    "weight missing": (drop(f"{GATE}.weight"), [f"missing tensors (1): {GATE}.weight"]),
    "scale missing": (drop(f"{GATE}.weight_scale"), [f"missing tensors (1): {GATE}.weight_scale"]),
    "norm missing": (drop("model.norm.weight"), ["missing tensors (1): model.norm.weight"]),
    "head missing": (drop("lm_head.weight"), ["missing tensors (1): lm_head.weight"]),
    "tensor unused": (put("extra", lambda _: torch.ones(1)), ["unused tensors (1): extra"]),
    "scale under another name": (
        lambda t: t.update({f"{GATE}.weight_scale_inv": t.pop(f"{GATE}.weight_scale")}),
        [f"missing tensors (1): {GATE}.weight_scale"],
    ),
    "second scale": (
        put(f"{GATE}.input_scale", lambda _: torch.ones(1)),
        [f"unused tensors (1): {GATE}.input_scale"],
    ),
    "bias that the model has not": (
        put(f"{GATE}.bias", lambda _: torch.ones(48)),
        [f"unused tensors (1): {GATE}.bias"],
    ),
    "scale of a dense module": (
        put("lm_head.weight_scale", lambda _: torch.ones(1)),
        ["unused tensors (1): lm_head.weight_scale"],
    ),
    "dense where packed": (
        put(f"{GATE}.weight", lambda _: torch.ones(48, 32)),
        [GATE, "stores uint8 [48, 8]", "got float32 [48, 32]"],
    ),
    "int8 where uint8": (
        put(f"{GATE}.weight", lambda w: w.view(torch.int8)),
        [GATE, "stores uint8 [48, 8]", "got int8 [48, 8]"],
    ),
    "packed along the other dimension": (
        put(f"{GATE}.weight", lambda _: torch.zeros(12, 32, dtype=torch.uint8)),
        [GATE, "uint8 [48, 8]", "uint8 [12, 32]"],
    ),
    "scale per tensor": (
        put(f"{GATE}.weight_scale", lambda _: torch.ones(1)),
        [GATE, "one scale per channel, shape [48]", "float32 [1]"],
    ),
    "scale NaN": (
        put(f"{GATE}.weight_scale", lambda s: s * float("nan")),
        [GATE, "48 of 48 scales are not finite"],
    ),
    "invalid code": (
        put(f"{GATE}.weight", lambda w: w.index_fill(0, torch.tensor([5]), 0xC0)),
        [GATE, "invalid code", "3 at [n=5, k=3], 8 of 1536"],
    ),
    "norm of another size": (
        put("model.norm.weight", lambda _: torch.ones(31)),
        ["wrong shapes (1): model.norm.weight [31] instead of [32]"],
    ),
    "norm [1, K]": (
        put("model.norm.weight", lambda w: w[None]),
        ["wrong shapes (1): model.norm.weight [1, 32] instead of [32]"],
    ),
    "embedding packed": (
        put("lm_head.weight", lambda _: torch.zeros(40, 8, dtype=torch.uint8)),
        ["lm_head.weight [40, 8] instead of [40, 32]", "lm_head.weight torch.uint8"],
    ),
    "dense fp8": (
        put("lm_head.weight", lambda w: w.to(torch.float8_e4m3fn)),
        ["float64, float32, bfloat16, float16 (1): lm_head.weight torch.float8_e4m3fn"],
    ),
    "dense integers": (
        put("lm_head.weight", lambda w: w.to(torch.int32)),
        ["(1): lm_head.weight torch.int32"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_named(tiny, tmp_path, case):
    change, said = TENSORS[case]
    made = tiny()
    change(made.tensors)
    message = refusal(made.write(tmp_path))
    assert all(words in message for words in said), message


def test_a_missing_bias_of_a_quantised_linear_is_named(tiny, tmp_path):
    made = tiny(kind="qwen2")
    del made.tensors["model.layers.0.self_attn.q_proj.bias"]
    assert "missing tensors (1): model.layers.0.self_attn.q_proj.bias" in refusal(
        made.write(tmp_path)
    )


def test_a_bias_that_its_scale_would_multiply_is_refused(tiny, tmp_path):
    message = refusal(tiny(kind="qwen2", name="ternary_hf").write(tmp_path))
    assert "linears with a bias (6): model.layers.0.self_attn.k_proj" in message
    assert "autobitlinear" in message


# --- config.json -------------------------------------------------------------------------------


def quantization(**changes):
    return lambda c: c["quantization_config"].update(changes)


CONFIGS = {
    "no scheme": (
        lambda c: c.pop("quantization_config"),
        ["no quantization_config", "torch.uint8"],
    ),
    "scheme is no table": (lambda c: c.update(quantization_config=3), ["a table, got 3"]),
    "unknown method": (quantization(quant_method="bitnett"), ["'bitnett' is not", '"bitnet"?']),
    "method of others": (quantization(quant_method="awq"), ["'awq' is not supported", "Known:"]),
    "no method": (quantization(quant_method=None), ["quant_method None"]),
    "unknown format": (
        quantization(format="ternary_k_interleave"),
        ["unknown format", 'did you mean "ternary_k_interleaved"?'],
    ),
    "no format": (quantization(format=None), ["unknown format 'None'", "ternary_hf"]),
    "unknown linear class": (
        quantization(quant_method="bitnet", linear_class="autobitlinea"),
        ["linear_class 'autobitlinea'", 'did you mean "autobitlinear"?'],
    ),
    "quantised on the fly": (
        quantization(quant_method="bitnet", quantization_mode="online"),
        ["quantization_mode 'online'", "offline"],
    ),
    "another format": (quantization(format="ternary_hf"), ["stores uint8 [8, 32]", "[32, 8]"]),
    "list is a text": (quantization(modules_to_not_convert="lm_head"), ["list", "'lm_head'"]),
    "list of numbers": (quantization(modules_to_not_convert=[1]), ["expected a list", "[1]"]),
    "misspelt entry": (
        quantization(modules_to_not_convert=["lm_haed"]),
        ["missing tensors (1): lm_head.weight_scale", "modules_to_not_convert"],
    ),
    "empty list": (
        quantization(modules_to_not_convert=[]),
        ["missing tensors (1): lm_head.weight_scale"],
    ),
    "entry too many": (
        quantization(modules_to_not_convert=["lm_head", GATE]),
        [f"unused tensors (1): {GATE}.weight_scale"],
    ),
    "everything ignored": (
        quantization(modules_to_not_convert=["lm_head", "model"]),
        ["leaves no quantised linear"],
    ),
    "unknown architecture": (lambda c: c.update(model_type="qwen33"), ["qwen33"]),
    "no architecture": (lambda c: c.pop("model_type"), ["model_type"]),
    "no language model": (lambda c: c.update(model_type="t5"), ["no causal language model"]),
    "wrong type": (lambda c: c.update(hidden_size="wide"), ["hidden_size", "got str"]),
    "impossible size": (lambda c: c.update(num_attention_heads=0), ["no causal language model"]),
    "one layer more": (
        lambda c: c.update(num_hidden_layers=3, layer_types=None),
        ["missing tensors (14): model.layers.2.mlp.down_proj.weight"],
    ),
    "one layer less": (
        lambda c: c.update(num_hidden_layers=1, layer_types=None),
        ["unused tensors (18): model.layers.1.input_layernorm.weight"],
    ),
    "another width": (
        lambda c: c.update(intermediate_size=64),
        ["model.layers.0.mlp.gate_proj", "uint8 [64, 8]", "uint8 [48, 8]"],
    ),
    "tail": (
        lambda c: c.update(intermediate_size=50),
        ["model.layers.0.mlp.gate_proj", "uint8 [50, 8]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_does_not_fit_says_what_and_where(tiny, tmp_path, case):
    change, said = CONFIGS[case]
    made = tiny()
    change(made.config)
    message = refusal(made.write(tmp_path))
    assert all(words in message for words in said), message
    assert str(tmp_path) in message or "model.layers." in message


def test_a_quantised_head_that_is_tied_is_refused(tiny, tmp_path):
    made = tiny(tie_word_embeddings=True)
    made.config["quantization_config"]["modules_to_not_convert"] = []
    message = refusal(made.write(tmp_path))
    assert "tied to the embedding and declared quantised (1): lm_head.weight" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not found"),
        (b"", "unreadable"),
        (b"{", "unreadable"),
        (b"\xff\xfe", "unreadable"),
        (b"[1]", "expected a JSON object"),
    ],
)
def test_config_json_must_be_a_json_object(tiny, tmp_path, content, said):
    file = tiny().write(tmp_path) / "config.json"
    file.unlink() if content is None else file.write_bytes(content)
    message = refusal(tmp_path)
    assert str(file) in message
    assert said in message


@pytest.mark.parametrize("kind", ["absent", "file"])
def test_a_checkpoint_is_a_local_directory(tmp_path, kind):
    place = tmp_path / "org" / "name"
    if kind == "file":
        place.parent.mkdir()
        place.write_text("")
    assert refusal(place) == f"{place}: expected a local checkpoint directory, found none"


# --- files -------------------------------------------------------------------------------------


def header(file, edit):
    """Rewrite the JSON header of a safetensors file."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    body = edit(json.loads(raw[8 : 8 + length]))
    text = json.dumps(body).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def stretch(body):
    body["model.norm.weight"]["shape"] = [33]
    return body


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "header cut": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "data cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "data longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "header says more": lambda file: header(file, stretch),
    "header length absurd": lambda file: file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:]),
    "no safetensors": lambda file: file.write_bytes(b"PK\x03\x04" * 100),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tiny, tmp_path, damage):
    file = tiny().write(tmp_path) / "model.safetensors"
    DAMAGES[damage](file)
    message = refusal(tmp_path)
    assert message.startswith(f"{file}: truncated or damaged safetensors: ")


def test_a_pickle_is_not_read(tiny, tmp_path):
    file = tiny().write(tmp_path) / "model.safetensors"
    file.rename(tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert f"{file}: expected a safetensors file, found none" in message
    assert "pytorch_model.bin is a pickle and is not read: convert it" in message


def test_a_directory_without_weights_says_so(tiny, tmp_path):
    file = tiny().write(tmp_path) / "model.safetensors"
    file.unlink()
    assert refusal(tmp_path) == f"{file}: expected a safetensors file, found none"


def edit_index(change):
    def edit(folder):
        body = json.loads((folder / INDEX).read_text())
        change(body["weight_map"])
        (folder / INDEX).write_text(json.dumps(body))

    return edit


def duplicate(folder):
    first, second = folder / "part-0.safetensors", folder / "part-1.safetensors"
    held = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file(held | {name: tensor}, second)


NORM = "model.norm.weight"
OTHER = {f"part-{i}.safetensors": f"part-{1 - i}.safetensors" for i in (0, 1)}
INDICES = {
    "shard missing": (
        lambda folder: (folder / "part-1.safetensors").unlink(),
        ["part-1.safetensors: expected a safetensors file, found none"],
    ),
    "shard cut": (
        lambda folder: (folder / "part-1.safetensors").write_bytes(b"\0" * 40),
        ["part-1.safetensors: truncated or damaged"],
    ),
    "lists too much": (
        edit_index(lambda listed: listed.update(ghost="part-0.safetensors")),
        ["missing (1): ghost in part-0.safetensors", "not listed: none"],
    ),
    "lists too little": (
        edit_index(lambda listed: listed.pop(NORM)),
        [f"not listed (1): {NORM} in part-"],
    ),
    "names another shard": (
        edit_index(lambda listed: listed.update({NORM: OTHER[listed[NORM]]})),
        [f"missing (1): {NORM} in part-", f"not listed (1): {NORM} in part-"],
    ),
    "a tensor in two shards": (duplicate, ["not listed (1): ", " in part-1.safetensors"]),
    "shard outside": (
        edit_index(lambda listed: listed.update({NORM: "../part-0.safetensors"})),
        ["a shard must lie beside it, got '../part-0.safetensors'"],
    ),
    "shard absolute": (
        edit_index(lambda listed: listed.update({NORM: "/part-0.safetensors"})),
        ["a shard must lie beside it"],
    ),
    "shard below": (
        edit_index(lambda listed: listed.update({NORM: "sub/part-0.safetensors"})),
        ["a shard must lie beside it"],
    ),
    "shard is the directory": (
        edit_index(lambda listed: listed.update({NORM: ""})),
        ["expected a safetensors file, found none"],
    ),
    "shard is the parent": (
        edit_index(lambda listed: listed.update({NORM: ".."})),
        ["expected a safetensors file, found none"],
    ),
    "shard is a list": (
        edit_index(lambda listed: listed.update({NORM: ["part-0.safetensors"]})),
        ["expected a weight_map"],
    ),
    "no weight_map": (
        lambda folder: (folder / INDEX).write_text("{}"),
        ["expected a weight_map of tensor name to shard file"],
    ),
    "index no JSON": (lambda folder: (folder / INDEX).write_text("{"), ["unreadable"]),
    "one file as well": (
        lambda folder: save_file({"a": torch.ones(1)}, folder / "model.safetensors"),
        ["found both; remove one"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INDICES)
def test_an_index_must_list_exactly_what_its_shards_hold(tiny, tmp_path, case):
    change, said = INDICES[case]
    folder = tiny().write(tmp_path / "model", shards=2)
    save_file({NORM: torch.ones(32)}, tmp_path / "part-0.safetensors")
    change(folder)
    message = refusal(folder)
    assert all(words in message for words in said), message
    assert str(folder) in message


def test_prompts_need_a_tokenizer(tiny, tmp_path):
    checkpoint = load(tiny().write(tmp_path))
    with pytest.raises(CheckpointError, match="has no tokenizer; give the prompts as lists"):
        checkpoint.tokens("text")
