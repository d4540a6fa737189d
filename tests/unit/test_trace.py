"""Traces on disk: round trips, what other tools read, and every way in which one is broken."""

import json
import signal
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from reconcile.exceptions import TraceError
from reconcile.report import Provenance
from reconcile.rounding import bitwise_equal
from reconcile.tracing import trace as trace_module
from reconcile.tracing.trace import Pass, Tap, Trace, TraceMemory, TraceWriter, visit_tensors

PROVENANCE = Provenance(
    side="reference",
    model="m",
    checkpoint_sha256="0" * 64,
    dtype="float64",
    machine="x",
    versions={"torch": "2"},
    command="run",
    created="now",
    notes=("one", "two"),
)
FLOATS = ("float64", "float32", "float16", "bfloat16", "complex64")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
DTYPES = [getattr(torch, name) for name in (*FLOATS, *FLOAT8, *INTEGERS)]


def values(dtype, shape=(3, 5)):
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return bits % 2 == 1 if dtype is torch.bool else bits.view(dtype)


def saved(tmp_path, tensors, **fields):
    trace = Trace(passes=[Pass("key", "chained", tensors, **fields)])
    trace.save(tmp_path / "t")
    return Trace.load(tmp_path / "t")


def bits_equal(a, b):
    return (
        a.dtype == b.dtype and a.shape == b.shape and bitwise_equal(a.contiguous(), b.contiguous())
    )


# --------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path, dtype):
    x = values(dtype)
    loaded = saved(tmp_path, {"a:out": x, "b:out": x[0, 0], "c:out": x[:0]})
    for tap, expected in (("a:out", x), ("b:out", x[0, 0]), ("c:out", x[:0])):
        assert bits_equal(loaded.passes[0].tensors[tap], expected)


BASE = torch.arange(24.0).reshape(4, 6)
LAYOUTS = {
    "transposed": BASE.t(),
    "every other": BASE[:, ::2],
    "slice": BASE[1:3],
    "expanded": BASE[:1].expand(5, 6),
    "scalar expanded": torch.tensor(2.0).expand(3, 3),
    "0-d": torch.tensor(1.5),
    "empty": torch.empty(0),
    "empty in the middle": torch.empty(3, 0, 2),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
    "needs grad": BASE.clone().requires_grad_(),
    "special": torch.tensor([-0.0, float("nan"), float("inf"), 1e-45]),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout(tmp_path, case):
    x = LAYOUTS[case]
    loaded = saved(tmp_path, {"a:out": x, "b:out": x})
    for tap in ("a:out", "b:out"):
        assert bits_equal(loaded.passes[0].tensors[tap], x.detach())
        assert loaded.passes[0].strides[tap] == tuple(x.stride())


def test_a_slice_does_not_take_its_whole_storage(tmp_path):
    saved(tmp_path, {"a:out": torch.zeros(1_000_000)[:1000]})
    (shard,) = (tmp_path / "t").glob("*.safetensors")
    assert shard.stat().st_size < trace_module.HEADER_RESERVE + 10_000


def test_mixed_dtypes_are_aligned_and_readable_by_others(tmp_path):
    tensors = {
        f"m{i}:out": values(dtype, (1 + i % 3, 1 + i % 2)) for i, dtype in enumerate(DTYPES * 3)
    }
    loaded = saved(tmp_path, tensors)
    (shard,) = (tmp_path / "t").glob("*.safetensors")
    theirs = load_file(shard)
    for tap, tensor in tensors.items():
        assert bits_equal(theirs[tap], tensor)
        assert bits_equal(loaded.passes[0].tensors[tap], tensor)
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    for tap, tensor in tensors.items():
        assert (8 + length + header[tap]["data_offsets"][0]) % tensor.element_size() == 0
    assert {k for k in theirs if k not in tensors} == {k for k in header if "__filler" in k}
    assert list(loaded.passes[0].tensors) == list(tensors)


def test_a_header_longer_than_its_reserve(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "HEADER_RESERVE", 256)
    tensors = {f"model.layers.{i}:out": torch.full((i % 5,), float(i)) for i in range(300)}
    loaded = saved(tmp_path, tensors)
    (shard,) = (tmp_path / "t").glob("*.safetensors")
    theirs = load_file(shard)
    for tap, tensor in tensors.items():
        assert torch.equal(loaded.passes[0].tensors[tap], tensor)
        assert torch.equal(theirs[tap], tensor)
    assert sorted(p.suffix for p in (tmp_path / "t").iterdir()) == [".json", ".safetensors"]


def test_everything_else_in_a_trace(tmp_path):
    trace = Trace(
        provenance=PROVENANCE,
        passes=[
            Pass("k1", "chained", {"a:out": BASE}, meta={"n": 1, "deep": {"x": [1.5, None]}}),
            Pass("k1", "isolated", {}),
            Pass("k2", "chained", {"z:out": BASE, "a:out": BASE + 1}),
        ],
        facts={"order": ["b", "a"], "π": "ü"},
    )
    trace.save(tmp_path / "t")
    loaded = Trace.load(str(tmp_path / "t"))
    assert loaded.provenance == PROVENANCE
    assert loaded.facts == trace.facts
    assert [(p.key, p.kind, p.meta) for p in loaded.passes] == [
        (p.key, p.kind, p.meta) for p in trace.passes
    ]
    assert list(loaded.passes[2].tensors) == ["z:out", "a:out"]
    assert len(loaded.passes[1].tensors) == 0
    assert set(loaded.select("chained")) == {"k1", "k2"}
    loaded.save(tmp_path / "again")
    assert torch.equal(Trace.load(tmp_path / "again").passes[2].tensors["a:out"], BASE + 1)


def test_reading_is_lazy_and_absent_taps_are_key_errors(tmp_path):
    tensors = saved(tmp_path, {"a:out": BASE}).passes[0].tensors
    assert "b:out" not in tensors
    with pytest.raises(KeyError):
        tensors["b:out"]
    assert torch.equal(tensors["a:out"], BASE)


def test_a_shard_that_is_gone_is_an_error(tmp_path):
    saved(tmp_path, {"a:out": BASE})
    next((tmp_path / "t").glob("*.safetensors")).unlink()
    with pytest.raises(TraceError, match="missing, truncated or damaged"):
        Trace.load(tmp_path / "t")


def test_a_tensor_that_several_taps_saw_is_written_once(tmp_path):
    seen, like = BASE.clone(), BASE.clone()
    tensors = {"a:out": seen, "b:in0": seen, "c:in0": like, "d:in0": seen}
    Trace(passes=[Pass("k", "chained", tensors, {"b:in0": (9,)})]).save(tmp_path / "once")
    Trace(passes=[Pass("k", "chained", {"a:out": seen})]).save(tmp_path / "one")
    found = Trace.load(tmp_path / "once")
    found.save(tmp_path / "again")

    for folder in ("once", "again"):
        (item,) = Trace.load(tmp_path / folder).passes
        assert list(item.tensors) == list(tensors)
        assert all(torch.equal(item.tensors[tap], BASE) for tap in tensors)
        assert item.strides["b:in0"] == (9,)
        with pytest.raises(KeyError):
            item.tensors["x:out"]
    sizes = {
        name: next((tmp_path / name).glob("*.safetensors")).stat().st_size
        for name in ("one", "once", "again")
    }
    assert sizes["once"] - sizes["one"] == BASE.numel() * BASE.element_size()
    assert sizes["again"] > sizes["once"]  # of a trace on disk nobody knows what was the same


def test_two_passes_with_the_same_inputs():
    trace = Trace(passes=[Pass("k", "chained"), Pass("k", "isolated"), Pass("k", "chained")])
    assert list(trace.select("isolated")) == ["k"]
    assert trace.select("other") == {}
    with pytest.raises(TraceError, match=r"two chained passes have the same inputs \(k\)"):
        trace.select("chained")


# --------------------------------------------------------------------------- broken traces


def written(tmp_path):
    root = tmp_path / "t"
    Trace(passes=[Pass("key", "chained", {"a:out": BASE, "b:out": BASE})]).save(root)
    return root


def edited(root, change):
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def in_pass(**fields):
    return lambda manifest: manifest["passes"][0].update(fields)


EDITS = {
    "unknown tensor": (
        lambda m: m["passes"][0]["taps"].append({"tap": "zz:out", "stride": [1]}),
        "names tensors that it lacks.*zz:out",
    ),
    "as an unknown tensor": (
        lambda m: m["passes"][0]["taps"][1].update({"as": "zz:out"}),
        "names tensors that it lacks.*zz:out",
    ),
    "as a list": (lambda m: m["passes"][0]["taps"][1].update({"as": []}), "incomplete manifest"),
    "schema": (lambda m: m.update(schema=2), "schema 1"),
    "no schema": (lambda m: m.pop("schema"), "schema 1"),
    "no passes": (lambda m: m.pop("passes"), "incomplete manifest"),
    "no provenance": (lambda m: m.pop("provenance"), "incomplete manifest"),
    "provenance is text": (lambda m: m.update(provenance="x"), "incomplete manifest"),
    "provenance lacks fields": (
        lambda m: m.update(provenance={"side": "x"}),
        "incomplete manifest",
    ),
    "passes are numbers": (lambda m: m.update(passes=[1]), "incomplete manifest"),
    "no key": (lambda m: m["passes"][0].pop("key"), "incomplete manifest"),
    "parent": (in_pass(shard="../x.safetensors"), "must lie beside it"),
    "absolute": (in_pass(shard="/etc/passwd"), "must lie beside it"),
    "subfolder": (in_pass(shard="a/x.safetensors"), "must lie beside it"),
    "dots": (in_pass(shard=".."), "must lie beside it|missing"),
    "folder itself": (in_pass(shard=""), "must lie beside it|missing"),
    "NUL": (in_pass(shard="a\0b"), "must lie beside it|missing"),
    "other file": (in_pass(shard="pass-0007.safetensors"), "missing, truncated or damaged"),
    "manifest as a shard": (in_pass(shard="manifest.json"), "missing, truncated or damaged"),
    "shard is a number": (in_pass(shard=3), "incomplete manifest"),
}


@pytest.mark.parametrize("case", EDITS)
def test_edited_manifests(tmp_path, case):
    root = written(tmp_path)
    change, match = EDITS[case]
    edited(root, change)
    with pytest.raises(TraceError, match=match):
        Trace.load(root)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", '"x"'])
def test_manifests_that_are_no_manifests(tmp_path, text):
    root = written(tmp_path)
    (root / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=r"unreadable|expected a trace manifest"):
        Trace.load(root)


@pytest.mark.parametrize("left", [0, 4, 1000, -1])
def test_truncated_shards(tmp_path, left):
    root = written(tmp_path)
    (shard,) = root.glob("*.safetensors")
    raw = shard.read_bytes()
    shard.write_bytes(raw[:left])
    with pytest.raises(TraceError, match="missing, truncated or damaged"):
        Trace.load(root)


KILLED = """
import os, signal, sys, torch
from reconcile.tracing.trace import TraceWriter
with TraceWriter(sys.argv[1]) as writer:
    writer.begin("one", "chained")
    writer.put("a:out", torch.ones(3))
    writer.end()
    writer.begin("two", "chained")
    writer.put("a:out", torch.ones(3))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_no_trace(tmp_path):
    root = tmp_path / "t"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(root)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(root.iterdir())) == 2
    with pytest.raises(TraceError, match=r"no manifest\.json: not a trace, or the capture did not"):
        Trace.load(root)
    Trace(passes=[Pass("k", "chained", {"b:out": BASE})]).save(root)
    assert [p.key for p in Trace.load(root).passes] == ["k"]


def test_no_directory(tmp_path):
    with pytest.raises(TraceError, match="not a trace"):
        Trace.load(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceError, match="cannot write a trace"):
        Trace().save(tmp_path / "file" / "t")
    with pytest.raises(TraceError, match=r"cannot write|unreadable"):
        Trace().save(tmp_path / "file")


def test_an_existing_trace_is_not_overwritten(tmp_path):
    root = written(tmp_path)
    before = (root / "manifest.json").read_text()
    with pytest.raises(TraceError, match="already holds a trace"):
        Trace().save(root)
    assert (root / "manifest.json").read_text() == before


def test_a_writer_that_fails_removes_what_it_wrote(tmp_path):
    root = tmp_path / "t"
    with pytest.raises(TraceError, match=r"safetensors cannot store torch\.complex128"):
        Trace(
            passes=[
                Pass("k", "chained", {"a:out": BASE}),
                Pass("l", "chained", {"a:out": BASE.to(torch.complex128)}),
            ]
        ).save(root)
    assert not root.exists()


@pytest.mark.parametrize("make", [TraceMemory, None], ids=["memory", "disk"])
def test_stores_refuse_a_wrong_order_of_calls(tmp_path, make):
    store = make() if make else TraceWriter(tmp_path / "t")
    with pytest.raises(TraceError, match="no pass is open"):
        store.end()
    with pytest.raises(TraceError, match=r"no pass is open|outside one"):
        store.put("a:out", BASE)
    store.begin("k", "chained")
    store.put("a:out", BASE)
    with pytest.raises(TraceError, match="recorded twice"):
        store.put("a:out", BASE)
    store.end()
    with pytest.raises(TraceError, match="no pass is open"):
        store.end()
    with pytest.raises(TraceError, match=r"no pass is open|outside one"):
        store.put("b:out", BASE)


def test_a_pass_that_was_left_open_is_dropped(tmp_path):
    with TraceWriter(tmp_path / "t") as writer:
        for key in ("broken", "whole"):
            writer.begin(key, "chained")
            writer.put(f"{key}:out", BASE)
        writer.end()
        writer.finish(None, {})
    loaded = Trace.load(tmp_path / "t")
    assert [list(p.tensors) for p in loaded.passes] == [["whole:out"]]
    assert len(list((tmp_path / "t").iterdir())) == 2


# --------------------------------------------------------------------------- taps as text

NAMES = ["", "a", "model.layers.3", "a:b", "x#1", "%", "%3A", "a%23:#%", "ü λ", "a b", "☃", "%25"]
PORTS = ["out", "in0", "in.hidden_states", "out.1", "out.k:v", "out.a#2", "in.%", "out.%3A"]


@pytest.mark.parametrize("call", [0, 1, 12])
def test_taps_round_trip(call):
    seen = {}
    for module in NAMES:
        for port in PORTS:
            tap = Tap(module, port, call)
            assert Tap.parse(str(tap)) == tap
            seen[str(tap)] = tap
    assert len(seen) == len(NAMES) * len(PORTS)


def test_odd_taps_on_disk(tmp_path):
    tensors = {str(Tap(m, p)): torch.ones(1) for m in NAMES for p in PORTS}
    assert list(saved(tmp_path, tensors).passes[0].tensors) == list(tensors)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a:",
        ":",
        "a:#1",
        "a:out#",
        "a:out#x",
        "a:out#-1",
        "a:out#1#2",
        "a:b:c",
        "a:out#²",
        "a:out# 1",
    ],
)
def test_what_is_no_tap(text):
    with pytest.raises(TraceError, match="expected a tap"):
        Tap.parse(text)


def test_plain_taps_are_written_plainly():
    assert str(Tap("model.layers.3.mlp.down_proj", "out")) == "model.layers.3.mlp.down_proj:out"
    assert str(Tap("", "out.logits", 2)) == ":out.logits#2"


def test_visit_passes_over_what_holds_no_tensor():
    seen = []
    visit_tensors(
        [None, 1, "ab", {1: {2}}, object(), Trace, print], "out", lambda *a: seen.append(a)
    )
    assert seen == []


def test_a_shard_of_an_earlier_capture_is_refused(tmp_path):
    """Same names and shapes: a copy that took only some files of a new capture."""
    for name, value in (("old", 1.0), ("new", 2.0)):
        Trace(passes=[Pass("k", "chained", {"a:out": torch.full((4,), value)})]).save(
            tmp_path / name
        )
    shard = "pass-0000.safetensors"
    (tmp_path / "new" / shard).write_bytes((tmp_path / "old" / shard).read_bytes())
    assert Trace.load(tmp_path / "old").passes[0].tensors["a:out"].sum() == 4
    with pytest.raises(TraceError, match="another capture"):
        Trace.load(tmp_path / "new")
