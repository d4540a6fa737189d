"""Hooks: what is copied, when, under which name, and what is an error."""

import ctypes
import gc
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from reconcile.exceptions import TapError, TraceError
from reconcile.rounding import round_to
from reconcile.tracing import trace as trace_module
from reconcile.tracing.taps import Recorder, fingerprint, forced_inputs, match_modules, taps
from reconcile.tracing.trace import Trace, TraceMemory


@pytest.fixture(params=["memory", "disk"])
def record(request, tmp_path):
    """``record(model, patterns)``: `taps` to either store."""

    def start(model, patterns=("*",), **options):
        to = tmp_path / "trace" if request.param == "disk" else None
        return taps(model, patterns, to=to, **options)

    return start


def no_hooks(model):
    return all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def overwrite(tensor, value=99.0):
    """What a native kernel does: write through the address, unseen by torch."""
    raw = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    raw[:] = [value] * tensor.numel()


class Call(nn.Module):
    """A module that computes ``function(*args, **kwargs)``."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


# --------------------------------------------------------------------------- copies


def test_an_in_place_relu_does_not_rewrite_the_output_before_it(record):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(inplace=True))
    model[0].weight.data = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    with record(model) as trace:
        model(torch.ones(1, 2))
    found = trace.passes[0].tensors
    assert found["0:out"].tolist() == [[1.0, -1.0]]
    assert found["1:in0"].tolist() == [[1.0, -1.0]]
    assert found["1:out"].tolist() == found[":out"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", [lambda x: x.mul_(5), overwrite], ids=["torch", "native"])
def test_inputs_are_captured_before_the_call(record, write, inference):
    def kernel(_, x):
        write(x)
        return x

    model = nn.Sequential(nn.Identity(), Call(kernel), nn.Identity())
    x = torch.tensor([[1.0, 2.0]])
    with torch.inference_mode(inference), torch.no_grad(), record(model) as trace:
        model(x)
    found = trace.passes[0].tensors
    assert found["0:out"].tolist() == found["1:in0"].tolist() == [[1.0, 2.0]]
    assert found["1:out"].tolist() == found["2:in0"].tolist() == x.tolist()
    assert x.tolist() != [[1.0, 2.0]]


def test_sharing_one_copy_never_joins_different_bits(record):
    def flip(_, x):  # -0 for +0, at the same address
        return x.neg_()

    model = nn.Sequential(nn.Identity(), Call(flip), nn.Identity())
    with record(model) as trace:
        model(torch.zeros(3))
    found = trace.passes[0].tensors
    assert not found["1:in0"].signbit().any()
    assert found["1:out"].signbit().all()
    assert found["2:in0"].signbit().all()


def test_equal_tensors_at_one_address_share_one_copy():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with taps(model) as trace:
        model(torch.ones(5))
    found = trace.passes[0].tensors
    assert len({t.data_ptr() for t in found.values()}) == 1
    assert list(found) == [":in0", "0:in0", "0:out", "1:in0", "1:out", ":out"]


def test_views_at_one_address_are_told_apart(record):
    model = Call(lambda self, x: self.inner(x.t()), inner=nn.Identity())
    x = torch.arange(4.0).reshape(2, 2)
    with record(model) as trace:
        model(x)
    (recorded,) = trace.passes
    assert recorded.tensors["inner:in0"].tolist() == x.t().tolist()
    assert recorded.strides["inner:in0"] == (1, 2)
    assert recorded.strides[":in0"] == (2, 1)


def test_each_captured_tensor_has_a_storage_of_its_own_size():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with taps(model) as trace:
        model(torch.randn(5, 4))
    for tensor in trace.passes[0].tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()


def test_memory_is_used_again_only_after_its_tensors_are_gone():
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))

    def capture(value):
        with taps(model) as trace:
            model(torch.full((1000, 300), value))
        return trace.passes[0].tensors

    kept = capture(1.0)
    one, view = kept["0:in0"], kept["1:out"][10:20].numpy()
    expected, seen = one.clone(), view.copy()
    del kept
    gc.collect()
    for value in (2.0, 3.0, 4.0):
        capture(value)
    assert torch.equal(one, expected)
    assert (view == seen).all()


def test_free_blocks_are_kept_up_to_a_limit(monkeypatch):
    arena = trace_module._Arena
    monkeypatch.setattr(arena, "_free", type(arena._free)(list))
    monkeypatch.setattr(arena, "KEPT", 3 * arena.BLOCK)
    held = [arena().take(torch.zeros(4)) for _ in range(10)]
    assert not any(arena._free.values())
    held.clear()
    gc.collect()
    assert 0 < sum(size * len(blocks) for size, blocks in arena._free.items()) <= 3 * arena.BLOCK


@pytest.mark.parametrize("place", [0, 3, 1000, -1])
def test_a_rewritten_capture_is_an_error(place):
    model = nn.Identity()
    with pytest.raises(TapError, match="rewritten"), taps(model) as trace:  # noqa: PT012
        model(torch.zeros(64 if place in (0, 3, -1) else 5000))
        flat = trace.passes[0].tensors[":in0"]
        if place == 1000:
            flat.add_(1)
        elif place == -1:
            overwrite(flat)
        else:
            flat[:: max(1, place)] = -0.0


# --------------------------------------------------------------------------- ports


@dataclass
class Pair:
    left: torch.Tensor
    right: object = None


@dataclass(slots=True)
class Slotted:
    left: torch.Tensor
    note: str = "x"


Named = namedtuple("Named", ["a", "b"])
ONE, TWO = torch.ones(1), torch.full((2,), 2.0)
STRUCTURES = {
    "tensor": (ONE, {"": ONE}),
    "tuple": ((ONE, TWO), {".0": ONE, ".1": TWO}),
    "list with others": ([ONE, None, 3, "x", TWO], {".0": ONE, ".4": TWO}),
    "namedtuple": (Named(ONE, TWO), {".0": ONE, ".1": TWO}),
    "mapping": ({"k": ONE, "j": TWO}, {".k": ONE, ".j": TWO}),
    "nested": ({"k": [ONE, {"z": (TWO,)}]}, {".k.0": ONE, ".k.1.z.0": TWO}),
    "dataclass": (Pair(ONE, [TWO]), {".left": ONE, ".right.0": TWO}),
    "slots": (Slotted(TWO), {".left": TWO}),
    "ModelOutput": (BaseModelOutput(last_hidden_state=TWO), {".last_hidden_state": TWO}),
    "nothing": (None, {}),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_ports_of_outputs_and_inputs(case, record):
    value, ports = STRUCTURES[case]
    model = Call(
        lambda self, _: self.inner(value, named=value)[0],
        inner=Call(lambda _, positional, **__: (ONE, positional)),
    )
    with record(model, ["inner"]) as trace:
        model(ONE)
    found = trace.passes[0].tensors
    expected = {f"inner:{port}{k}": t for port in ("in0", "in.named") for k, t in ports.items()}
    expected |= {"inner:out.0": ONE} | {f"inner:out.1{k}": t for k, t in ports.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[tap], tensor) for tap, tensor in expected.items())


def test_a_module_that_is_called_twice_and_one_under_two_names(record):
    shared = nn.Linear(2, 2)
    model = Call(lambda self, x: self.b(self.a(x)), a=shared, b=shared)
    with record(model) as trace:
        model(torch.ones(1, 2))
    taps_found = [t for t in trace.passes[0].tensors if not t.startswith(":")]
    assert taps_found == ["a:in0", "a:out", "a:in0#1", "a:out#1"]
    assert match_modules(model, ["b"]) == ("b",)
    assert match_modules(model, ["b", "a"]) == ("a",)


def test_call_numbers_start_again_in_every_pass(record):
    model = nn.Sequential(nn.Identity())
    with record(model, ["0"]) as trace:
        model(torch.ones(1))
        model(torch.zeros(1))
    assert [list(p.tensors) for p in trace.passes] == [["0:in0", "0:out"]] * 2
    assert trace.passes[0].key != trace.passes[1].key
    assert [p.kind for p in trace.passes] == ["chained"] * 2


def test_outputs_only(record):
    with record(model := nn.Sequential(nn.Identity()), inputs=False) as trace:
        model(torch.ones(1))
    assert list(trace.passes[0].tensors) == ["0:out", ":out"]


def test_odd_names_of_modules_and_keys(record):
    model = nn.ModuleDict({"a:b#1": nn.Identity(), "c%3Ad": nn.Identity()})
    model.forward = lambda x: model["c%3Ad"]({"x:y#2": model["a:b#1"](x)})
    with record(model) as trace:
        model(torch.ones(1))
    parsed = [trace_module.Tap.parse(tap) for tap in trace.passes[0].tensors]
    assert ("a:b#1", "out") in [(tap.module, tap.port) for tap in parsed]
    assert ("c%3Ad", "in0.x:y#2") in [(tap.module, tap.port) for tap in parsed]
    assert {tap.call for tap in parsed} == {0}


def test_complex_and_integer_tensors(record):
    model = nn.Sequential(nn.Identity())
    for value in (torch.tensor([1 + 2j]).conj(), torch.tensor([2**53 + 1]), torch.tensor([True])):
        memory = TraceMemory()
        with Recorder(model, ["0"], memory):
            model(value)
        assert torch.equal(memory.trace.passes[0].tensors["0:out"], value)


# --------------------------------------------------------------------------- hooks come off


def test_hooks_come_off_whatever_happens(record):
    def broken(_, x):
        raise RuntimeError("kernel")

    model = nn.Sequential(nn.Identity(), Call(broken))
    with pytest.raises(RuntimeError, match="kernel"), record(model):
        model(torch.ones(1))
    assert no_hooks(model)
    with pytest.raises(KeyboardInterrupt), record(model):
        raise KeyboardInterrupt
    assert no_hooks(model)
    with pytest.raises(TapError), record(model):
        pass
    assert no_hooks(model)
    first = model[:1]
    with record(first) as trace:
        first(torch.ones(1))
    assert no_hooks(model)
    assert len(trace.passes) == 1


def test_hooks_come_off_where_registering_fails(monkeypatch):
    model = nn.Sequential(nn.Identity(), nn.Identity())

    def refuse(*_, **__):
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(model[1], "register_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no hooks"), taps(model):
        pass
    assert no_hooks(model)


def test_a_pass_that_raised_is_dropped_and_the_next_one_counts(record):
    def sometimes(_, x):
        if x.sum() < 0:
            raise ValueError("negative")
        return x

    model = nn.Sequential(nn.Identity(), Call(sometimes))
    with record(model) as trace:
        with pytest.raises(ValueError, match="negative"):
            model(-torch.ones(1))
        model(torch.ones(1))
    assert [p.tensors["0:in0"].item() for p in trace.passes] == [1.0]


# --------------------------------------------------------------------------- errors


def layered():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


@pytest.mark.parametrize(
    ("patterns", "match"),
    [
        (["0", "2.*"], r"no module matches '2\.\*'"),
        (["1.00"], 'did you mean "1.0"'),
        ([], "no pattern"),
        ("nothing", "no module matches 'nothing'"),
    ],
)
def test_patterns_that_match_nothing(patterns, match, record):
    with pytest.raises(TapError, match=match), record(layered(), patterns):
        pass


@pytest.mark.parametrize(
    ("patterns", "modules"),
    [
        ("*", ("", "0", "1", "1.0", "1.1")),
        ("1.*", ("1.0", "1.1")),
        (["1.1", "0"], ("0", "1.1")),
        (["[01]"], ("0", "1")),
        ([""], ("",)),
    ],
)
def test_patterns(patterns, modules):
    assert (
        match_modules(layered(), [patterns] if isinstance(patterns, str) else patterns) == modules
    )


def test_one_pattern_may_be_given_as_a_string(record):
    with record(model := layered(), "1.*") as trace:
        model(torch.ones(1, 2))
    assert list(trace.passes[0].tensors) == ["1.0:in0", "1.0:out", "1.1:in0", "1.1:out"]


def test_containers_are_not_expected_to_run(record):
    model = Call(lambda self, x: self.layers[0](x), layers=nn.ModuleList([nn.Identity()]))
    with record(model) as trace:
        model(torch.ones(1))
    assert "layers.0:out" in trace.passes[0].tensors
    with pytest.raises(TapError, match="only containers"):
        match_modules(model, ["layers"])


def test_a_module_that_never_runs_is_named(record):
    model = Call(lambda self, x: self.a(x), a=nn.Identity(), dead=nn.Identity())
    with pytest.raises(TapError, match=r"1 of 3 tapped modules never ran: dead"), record(model):
        model(torch.ones(1))


def test_forward_called_directly_on_a_part(record):
    model = Call(lambda self, x: self.a.forward(x), a=nn.Identity())
    with pytest.raises(TapError, match=r"a\. Hooks fire only through"), record(model):
        model(torch.ones(1))


@pytest.mark.parametrize("inputs", [False, True])
def test_forward_called_directly_on_the_model(record, inputs):
    model = nn.Sequential(nn.Identity())
    with (
        pytest.raises(TapError, match="outside a call of the model"),
        record(model, ["0"], inputs=inputs),
    ):
        model.forward(torch.ones(1))


def test_no_pass(record):
    with pytest.raises(TapError, match="no pass was recorded"), record(nn.Identity()):
        pass


def test_compiled_before_the_hooks(record):
    model = layered()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 2))
    with pytest.raises(TapError, match=r"never ran|no pass was recorded"), record(model):
        compiled(torch.ones(1, 2))
    assert no_hooks(model)


# --------------------------------------------------------------------------- on disk


def test_to_a_directory(tmp_path):
    model = layered()
    x = torch.randn(3, 2)
    with taps(model) as kept:
        model(x)
    with taps(model, to=tmp_path / "deep" / "trace") as trace:
        assert trace.passes == []
        trace.facts["why"] = "test"
        model(x)
    again = Trace.load(tmp_path / "deep" / "trace")
    for found in (trace, again):
        assert found.facts == {"why": "test"}
        assert list(found.passes[0].tensors) == list(kept.passes[0].tensors)
        assert found.passes[0].key == kept.passes[0].key
        assert found.passes[0].strides == kept.passes[0].strides
        for tap, tensor in kept.passes[0].tensors.items():
            assert torch.equal(found.passes[0].tensors[tap], tensor)


@pytest.mark.parametrize("existing", [False, True])
def test_nothing_is_left_if_the_block_raises(tmp_path, existing):
    root = tmp_path / "trace"
    if existing:
        root.mkdir()
        (root / "mine.txt").write_text("kept")
    model = layered()
    with pytest.raises(ZeroDivisionError), taps(model, to=root):  # noqa: PT012
        model(torch.ones(1, 2))
        raise ZeroDivisionError
    with pytest.raises(TapError), taps(model, to=root):
        pass
    assert [p.name for p in tmp_path.rglob("*")] == (["trace", "mine.txt"] if existing else [])


def test_a_directory_that_holds_a_trace_is_refused(tmp_path):
    model = layered()
    with taps(model, to=tmp_path):
        model(torch.ones(1, 2))
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(TraceError, match="already holds a trace"), taps(model, to=tmp_path):
        model(torch.ones(1, 2))
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert no_hooks(model)


# --------------------------------------------------------------------------- fingerprints

IDS = torch.tensor([[1, 2, 3]])


class Cache:
    def __init__(self, length):
        self.length = length

    def get_seq_length(self):
        return self.length


BASE = {"input_ids": IDS, "attention_mask": torch.ones(1, 3, dtype=torch.bool)}
OTHERS = {
    "ids": BASE | {"input_ids": torch.tensor([[1, 2, 4]])},
    "order": BASE | {"input_ids": torch.tensor([[2, 1, 3]])},
    "shape": BASE | {"input_ids": IDS.reshape(3, 1)},
    "mask": BASE | {"attention_mask": torch.tensor([[True, True, False]])},
    "positions": BASE | {"position_ids": torch.tensor([[0, 1, 2]])},
    "name": {"ids": IDS, "attention_mask": BASE["attention_mask"]},
    "cache": BASE | {"past_key_values": Cache(0)},
    "longer cache": BASE | {"past_key_values": Cache(7)},
}


def test_fingerprints_differ_where_the_inputs_do():
    found = {name: fingerprint((), kwargs) for name, kwargs in (OTHERS | {"base": BASE}).items()}
    assert len(set(found.values())) == len(found)
    assert all(len(key) == 16 for key in found.values())


def test_fingerprints_do_not_depend_on_what_does_not_matter():
    base = fingerprint((), BASE)
    assert fingerprint((), dict(reversed(BASE.items()))) == base
    assert fingerprint((), BASE | {"use_cache": False, "labels": None}) == base
    wide = torch.zeros(1, 6, dtype=torch.int64)
    wide[:, ::2] = IDS
    assert fingerprint((), BASE | {"input_ids": wide[:, ::2]}) == base
    for dtype in (torch.float64, torch.bfloat16):
        assert fingerprint((), BASE | {"inputs_embeds": torch.randn(1, 3, 4).to(dtype)}) == base


def test_floating_point_inputs_identify_a_pass_across_dtypes():
    x = torch.randn(4, 5, dtype=torch.float64)
    keys = {fingerprint((value,), {}) for value in (x, round_to(x, torch.bfloat16))}
    assert len(keys) == 1
    assert fingerprint((x + 1,), {}) not in keys


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_in_two_dtypes_have_the_same_passes(dtype, record):
    torch.manual_seed(0)
    model = Call(lambda self, input_ids: self.e(input_ids), e=nn.Embedding(5, 3)).to(dtype)
    with record(model) as trace:
        model(input_ids=IDS)
        model(input_ids=IDS + 1)
    assert [p.key for p in trace.passes] == [
        fingerprint((), {"input_ids": ids}) for ids in (IDS, IDS + 1)
    ]


# --------------------------------------------------------------------------- forced inputs


def test_forced_inputs():
    seen = {}

    def inner(_, x, pair, scale=None):
        seen.update(x=x, pair=pair, scale=scale)
        return x

    model = Call(lambda self, x: self.inner(x, (x, "text"), scale=x), inner=Call(inner))
    given = {"in0": torch.full((2,), 5.0), "in1.0": torch.full((2,), 6.0)}
    with forced_inputs(model, {"inner": given}, torch.float64), taps(model, ["inner"]) as trace:
        model(torch.zeros(2))
    assert (seen["x"].tolist(), seen["x"].dtype) == ([5.0, 5.0], torch.float64)
    assert (seen["pair"][0].tolist(), seen["pair"][1]) == ([6.0, 6.0], "text")
    assert seen["scale"].tolist() == [0.0, 0.0]
    assert trace.passes[0].tensors["inner:in0"].tolist() == [5.0, 5.0]
    assert no_hooks(model)
    model(torch.zeros(2))
    assert seen["x"].tolist() == [0.0, 0.0]
