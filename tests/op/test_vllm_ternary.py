"""`quant_method: ternary` inside vLLM: the embedded Qwen3, served in process by the plug-in.

It runs where vLLM is: ``make vllm-ternary`` runs this file there. vLLM's own model is mapped to
the reference's taps (fused projections, deferred residuals, flattened tokens) and compared twice:
every linear with the bound of the kernel's contract on the inputs that it got, and everything from
the first projection to the logits with what plain torch loses.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import reconcile
from reconcile import registry
from reconcile.case import Tolerance
from reconcile.exceptions import FormatError, KernelError
from reconcile.grouped import baseline_linear, reference_linear
from reconcile.judging.judge import judge_bound
from reconcile.numbers.limits import BASELINE_FACTORS
from reconcile.numbers.metrics import error_stats
from reconcile.tracing.mapping import AddResidual, Rename, Split, Unflatten, map_trace
from reconcile.tracing.trace import Pass, Trace
from reconcile_kernels import vllm_ternary
from reconcile_kernels.linear_method import KernelLinearMethod, always
from reconcile_kernels.ternary_cpu import BF16, ops
from reconcile_kernels.vllm_ternary import VLLM, installed, register

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures" / "reconcile_fixtures"
HERE = importlib.util.find_spec("vllm") is not None  # without AVX512-BF16 it fails there
needs_vllm = pytest.mark.skipif(not HERE, reason="vLLM: make vllm-ternary")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
NEW = 4
"""Tokens that are generated after each prompt: one prefill and three decode steps."""
LINEARS = 42
"""6 layers of q, k, v, o, gate, up, down."""


def test_the_version_that_make_installs_is_the_one_that_was_shown():
    pinned = f"VLLM_VERSION := {VLLM}\n"
    assert pinned in (ROOT / "Makefile").read_text(), (
        f"the Makefile installs another vLLM than {VLLM}: run `make vllm-ternary`, and if all but "
        "the version is right, change VLLM in reconcile_kernels/vllm_ternary/__init__.py"
    )


@needs_vllm
def test_the_installed_version_is_the_one_that_was_shown():
    found = installed()
    assert found == VLLM, (
        f"vLLM {found} is installed, the plug-in was shown to be right in {VLLM}: look at the "
        "other results of this file, and if all are right, change VLLM in "
        "reconcile_kernels/vllm_ternary/__init__.py and VLLM_VERSION in the Makefile"
    )


@needs_vllm
def test_another_version_is_told(monkeypatch):
    monkeypatch.setattr(vllm_ternary, "installed", lambda: "0.33.0")
    with pytest.warns(
        UserWarning, match=rf"{re.escape(VLLM)}, this is 0\.33\.0: run `make vllm-ternary`"
    ):
        register()


@needs_vllm
def test_vllm_finds_the_plug_in_by_its_entry_point():
    (found,) = importlib.metadata.entry_points(
        group="vllm.general_plugins", name="reconcile_ternary"
    )
    assert found.load() is register


# The served model -----------------------------------------------------------------------------


@dataclass
class Served:
    """What one engine did for a few prompts."""

    prompts: list
    tokens: list
    """Generated ids of each prompt."""
    trace: Trace
    """vLLM's own taps, one pass per forward."""
    methods: dict
    """Names of the quantisation methods by module."""
    calls: int
    """Of the native kernel."""
    checkpoint: object


def fused(checkpoint):
    """vLLM's linear modules: the checkpoint's linears of each, in their order."""
    found = {}
    for name in checkpoint.weights:
        parent, _, leaf = name.rpartition(".")
        whole = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
        whole |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        found.setdefault(f"{parent}.{whole.get(leaf, leaf)}", []).append(name)
    return found


def serve(patch):
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    from vllm import LLM, SamplingParams

    path = FIXTURES / "tiny-lm-ternary"
    checkpoint = registry.model_source().load(path)
    prompts = [
        p["tokens"][:48] for p in json.loads((FIXTURES / "prompts.json").read_text())["prompts"]
    ]
    llm = LLM(
        str(path),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        seed=0,
    )
    (model,) = llm.apply_model(lambda model: model)
    called, logits = [], []
    multiply = ops.multiply
    patch.setattr(ops, "multiply", lambda *args: called.append(1) or multiply(*args))
    handle = model.logits_processor.register_forward_hook(lambda *a: logits.append(a[-1].clone()))
    layers = checkpoint.structure.layers
    options = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    tokens = []
    with reconcile.taps(model, [*fused(checkpoint), *layers, "model.norm"]) as trace:
        for ids in prompts:
            (out,) = llm.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)
            tokens.append(list(out.outputs[0].token_ids))
    handle.remove()
    for at, (item, last) in enumerate(zip(trace.passes, logits, strict=True)):
        item.key = f"{at // NEW}-{at % NEW}"
        item.tensors = {**item.tensors, "lm_head:out": last[-1:].unsqueeze(0)}
    methods = {
        name: type(module.quant_method).__name__
        for name, module in model.named_modules()
        if hasattr(module, "quant_method")
    }
    return Served(prompts, tokens, trace, methods, len(called), checkpoint)


@pytest.fixture(scope="module")
def served():
    with pytest.MonkeyPatch.context() as patch:
        yield serve(patch)


def rules(served, tokens):
    """From vLLM's taps to transformers'."""
    weights = served.checkpoint.weights
    for module, names in fused(served.checkpoint).items():
        targets = tuple((f"{name}:out", weights[name].shape[0]) for name in names)
        yield Split(f"{module}:out.0", targets)
        yield from (Unflatten(tap, tokens) for tap, _ in targets)
    for layer in served.checkpoint.structure.layers:
        yield AddResidual(f"{layer}:out.0", f"{layer}:out.1", f"{layer}:out")
        yield Unflatten(f"{layer}:out", tokens)
    yield Rename("model.norm:out.0", "model.norm:out")
    yield Unflatten("model.norm:out", tokens)


def mapped(served, make=rules):
    """The outputs under the reference's taps; what only vLLM has is left out."""
    passes = []
    for item in served.trace.passes:
        prompt, step = map(int, item.key.split("-"))
        tokens = 1 if step else len(served.prompts[prompt])
        (found,) = map_trace(Trace(passes=[item]), make(served, tokens)).passes
        kept = {tap: t for tap, t in found.tensors.items() if tap.endswith(":out")}
        passes.append(replace(found, tensors=kept))
    return Trace(passes=passes)


def run(served, dtype, make):
    """Transformers' model over prompt and generated tokens, cut into vLLM's passes."""
    model = served.checkpoint.build(dtype, make)
    names = [
        *served.checkpoint.weights,
        *served.checkpoint.structure.layers,
        "model.norm",
        "lm_head",
    ]
    passes = []
    for at, (prompt, new) in enumerate(zip(served.prompts, served.tokens, strict=True)):
        with (
            torch.no_grad(),
            served.checkpoint.precise(dtype),
            reconcile.taps(model, names, inputs=False) as trace,
        ):
            model(input_ids=torch.tensor([prompt + new[:-1]]), use_cache=False)
        (whole,) = trace.passes
        for step in range(NEW):
            end = len(prompt) + step
            rows = slice(end - 1 if step else 0, end)
            tensors = {tap: y[:, rows] for tap, y in whole.tensors.items()}
            tensors["lm_head:out"] = tensors["lm_head:out"][:, -1:]
            passes.append(Pass(f"{at}-{step}", "chained", tensors))
    return Trace(passes=passes)


@pytest.fixture(scope="module")
def reference(served):
    double = torch.float64
    return run(served, double, lambda _, w: reference_linear(w, BF16.contract, double))


@pytest.fixture(scope="module")
def limits(served, reference):
    """By tap: reconcile's multiple of the largest error of transformers in bfloat16."""
    half = torch.bfloat16
    plain = run(served, half, lambda _, w: baseline_linear(w, half, BF16.contract))
    largest = {}
    for c, r in zip(plain.passes, reference.passes, strict=True):
        for tap, y in c.tensors.items():
            found = error_stats(y, r.tensors[tap]).max_abs
            largest[tap] = max(found, largest.get(tap, 0.0))
    factor = BASELINE_FACTORS["max_abs"]
    source = f"{factor:g}x the largest error of transformers in bfloat16 on the same weights"
    return {t: Tolerance(atol=factor * e, rtol=0.0, source=source) for t, e in largest.items()}


@needs_vllm
def test_every_linear_is_ours_and_the_native_kernel_ran_for_each(served):
    linears = {name for name, method in served.methods.items() if method == "TernaryLinearMethod"}
    assert linears == set(fused(served.checkpoint))
    assert served.methods["lm_head"] == "UnquantizedEmbeddingMethod"
    assert len(served.trace.passes) == len(served.prompts) * NEW
    assert served.calls == LINEARS * len(served.trace.passes)


def findings(served, weights):
    """Every linear in every pass, on the inputs that vLLM gave it."""
    contract = BF16.contract
    made = {n: reference_linear(w, contract, torch.float64) for n, w in weights.items()}
    outputs = mapped(served)
    for raw, item in zip(served.trace.passes, outputs.passes, strict=True):
        for module, names in fused(served.checkpoint).items():
            x = raw.tensors[f"{module}:in0"]
            for name in names:
                y = item.tensors[f"{name}:out"][0]
                k = x.shape[-1]
                exact, size = made[name](x), made[name].magnitude(x)
                yield name, judge_bound(y, exact, size, k, contract, "float64")


@needs_vllm
def test_every_linear_keeps_its_contract_on_the_inputs_that_it_got(served):
    found = list(findings(served, served.checkpoint.weights))
    assert len(found) == LINEARS * len(served.trace.passes)
    assert [(name, f.reason, f.text) for name, f in found if f.reason] == []
    print(f"largest utilisation {max(f.utilisation for _, f in found):.3f}")


@needs_vllm
def test_another_layers_weight_would_be_seen(served):
    weights = dict(served.checkpoint.weights)
    first, second = (f"model.layers.{i}.mlp.up_proj" for i in (0, 1))
    weights[first], weights[second] = weights[second], weights[first]
    assert {name for name, f in findings(served, weights) if f.reason} == {first, second}


@needs_vllm
def test_the_model_agrees_with_the_float64_reference(served, reference, limits):
    report = reconcile.compare(reference, mapped(served), limits=limits)
    bad = [(row.tap, row.pass_, row.text) for row in report.rows if str(row.verdict) != "PASS"]
    assert bad == []
    assert report.exit_code == 0
    taps = LINEARS + len(served.checkpoint.structure.layers) + 2
    assert (report.coverage.compared, report.coverage.expected) == (taps, taps)
    assert len(report.rows) == taps * len(served.trace.passes)
    worst = max(report.rows, key=lambda row: row.utilisation)
    print(f"largest share of its limit {worst.utilisation:.3f} at {worst.tap}")


def _swapped(served, tokens):
    for rule in rules(served, tokens):
        if isinstance(rule, Split) and rule.source.endswith("gate_up_proj:out.0"):
            yield Split(rule.source, rule.targets[::-1])
        else:
            yield rule


def _not_added(served, tokens):
    for rule in rules(served, tokens):
        yield Rename(rule.hidden, rule.target) if isinstance(rule, AddResidual) else rule


@needs_vllm
@pytest.mark.parametrize("make", [_swapped, _not_added])
def test_a_wrong_map_would_be_seen(served, reference, limits, make):
    assert reconcile.compare(reference, mapped(served, make), limits=limits).exit_code == 1


@pytest.fixture(scope="module")
def sure(served, reference, limits):
    """Per prompt the reference's token after each pass; None where a legal error may change it.

    It may where the margin is below twice the limit of the logits.
    """
    least = 2 * limits["lm_head:out"].atol
    best = [item.tensors["lm_head:out"].flatten().topk(2) for item in reference.passes]
    tokens = [int(b.indices[0]) if float(-b.values.diff()) > least else None for b in best]
    return [tokens[start : start + NEW] for start in range(0, len(tokens), NEW)]


def check_tokens(tokens, served, sure):
    """Generated tokens, as long as those before them are the ones that the reference was fed."""
    compared = 0
    for ours, eager, right in zip(tokens, served.tokens, sure, strict=True):
        for step in range(NEW):
            if ours[:step] == eager[:step] and right[step] is not None:
                assert ours[step] == right[step]
                compared += 1
    return compared


@needs_vllm
def test_greedy_tokens_are_the_references_where_it_is_sure(served, sure):
    compared = check_tokens(served.tokens, served, sure)
    assert compared >= len(served.prompts)
    print(f"{compared} of {len(served.prompts) * NEW} tokens are beyond a tie")


COMPILED = """
import json, sys
from vllm import LLM, SamplingParams
from reconcile_kernels.ternary_cpu import ops

path, prompts, new = json.loads(sys.argv[1])
llm = LLM(path, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=4,
          max_num_batched_tokens=256, enable_prefix_caching=False, seed=0)
called, multiply = [], ops.multiply
ops.multiply = lambda *args: called.append(len(args[1])) or multiply(*args)
options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
given = [{"prompt_token_ids": ids} for ids in prompts]
tokens = [list(out.outputs[0].token_ids) for out in llm.generate(given, options, use_tqdm=False)]
mode = llm.llm_engine.vllm_config.compilation_config.mode.name
print(json.dumps([mode, len(called), tokens]))
"""


@needs_vllm
def test_compiled_and_batched_as_vllm_serves_by_default(served, sure, tmp_path):
    """Traced by torch.compile, all prompts in one batch, by the same kernel."""
    given = json.dumps([str(FIXTURES / "tiny-lm-ternary"), served.prompts, NEW])
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, given],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    mode, calls, tokens = json.loads(done.stdout.splitlines()[-1])
    assert mode == "DYNAMO_TRACE_ONCE"  # vLLM's choice on a CPU; NONE would be eager
    assert calls == LINEARS * NEW
    assert check_tokens(tokens, served, sure) >= 1
    same = sum(
        a == b
        for ours, eager in zip(tokens, served.tokens, strict=True)
        for a, b in zip(ours, eager, strict=True)
    )
    print(f"{same} of {len(served.prompts) * NEW} tokens as in the eager run")


# Loading, without an engine ---------------------------------------------------------------------

K, SIZES = 64, (48, 16, 16)


def layer_of(shards=SIZES, input_size=K):
    from reconcile_kernels.vllm_ternary.plugin import TernaryLinearMethod

    form = registry.formats()["ternary_k_interleaved"]
    method = TernaryLinearMethod(KernelLinearMethod(form, always(BF16)), "attn.qkv_proj")
    layer = nn.Module()
    method.create_weights(
        layer, K, list(shards), input_size, sum(shards), torch.bfloat16, weight_loader=None
    )
    return method, layer


def load(layer, shard, n, dtype=torch.uint8):
    layer.weight.weight_loader(layer.weight, torch.zeros(n, K // 4, dtype=dtype), shard)
    layer.weight_scale.weight_loader(layer.weight_scale, torch.ones(n), shard)


@needs_vllm
def test_shards_by_argument_or_by_attribute():
    method, layer = layer_of()
    load(layer, "q", 48)
    load(layer, 1, 16)
    for parameter, tensor in (
        (layer.weight, torch.ones(16, K // 4, dtype=torch.uint8)),
        (layer.weight_scale, torch.full((16,), 2.0)),
    ):
        tensor.shard_id = "v"
        parameter.weight_loader(parameter, tensor)
    method.process_weights_after_loading(layer)
    y = method.apply(layer, torch.ones(3, K, dtype=torch.bfloat16))
    assert y.unique(dim=1).shape == (3, 2)
    assert torch.equal(y[:, -16:], torch.full((3, 16), 2.0 * K / 4).bfloat16())
    assert not y[:, :-16].any()


@needs_vllm
@pytest.mark.parametrize(
    ("shard", "n", "dtype", "message"),
    [
        ("q", 48, torch.float32, "expected torch.uint8, got torch.float32"),
        ("k", 48, torch.uint8, r"expected \[16, 16\], got \[48, 16\]"),
        (3, 16, torch.uint8, "the layer has 3 shards, got 3"),
        ((0, 1), 64, torch.uint8, "no shard"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(shard, n, dtype, message):
    _, layer = layer_of()
    with pytest.raises(FormatError, match=message):
        load(layer, shard, n, dtype)


@needs_vllm
def test_a_shard_that_never_came_is_named():
    method, layer = layer_of()
    load(layer, "q", 48)
    load(layer, "v", 16)
    with pytest.raises(FormatError, match="did not give weight of shard 1, weight_scale of shard"):
        method.process_weights_after_loading(layer)


@needs_vllm
def test_a_layer_that_is_cut_over_ranks_is_refused():
    with pytest.raises(KernelError, match="tensor_parallel_size=1"):
        layer_of(input_size=2 * K)


@needs_vllm
def test_an_unknown_format_is_refused():
    from reconcile_kernels.vllm_ternary.plugin import TernaryConfig

    with pytest.raises(FormatError, match="unknown format 'ternary_k_interleave'"):
        TernaryConfig.from_config({"format": "ternary_k_interleave"})
