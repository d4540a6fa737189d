"""Which experts a router chose, as sets: a choice among near equals is not a fault.

One token that goes to another expert has another hidden state from there on, and so have those that
attend to it. So the choice is compared by itself, and everything after it is computed with the
experts that the reference chose (`forced_routing`): by plain torch, whose error is the limit, by
the candidate, and by the reference on rounded inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reconcile.exceptions import TapError
from reconcile.tracing.trace import Pass, Tap


def routing_stats(candidate: Tensor, reference: Tensor, logits: Tensor) -> dict[str, Any]:
    """Statistics of chosen experts, integers [..., top_k], with the reference's logits [..., E].

    Returns:
        ``sets_equal``: share of tokens with the same set; ``set_gap``: the largest lead, in the
        reference's logits, of an expert that was left out over one that was taken for it, 0 where
        all sets agree; ``least_margin``: the smallest lead of a chosen expert over one that is not,
        over all tokens: the error of a logit that could change a set; ``experts_unused`` and
        ``experts_idle``: how many experts, and which, no token of the reference is routed to.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if candidate.shape != reference.shape or logits.shape[:-1] != reference.shape[:-1]:
        raise ValueError(
            f"shapes differ: candidate {list(candidate.shape)}, reference {list(reference.shape)}, "
            f"logits {list(logits.shape)}"
        )
    experts = logits.shape[-1]
    values = logits.to(torch.float64).reshape(-1, experts)
    mine, theirs = (_member(chosen, experts) for chosen in (candidate, reference))
    lowest_in = values.masked_fill(~theirs, math.inf).amin(1)
    best_out = values.masked_fill(theirs, -math.inf).amax(1)
    left, came = theirs & ~mine, mine & ~theirs
    lead = values.masked_fill(~left, -math.inf).amax(1) - values.masked_fill(~came, math.inf).amin(
        1
    )
    same = (mine == theirs).all(1)
    gap = float(torch.where(same, 0.0, lead).amax())
    return {
        "sets_equal": float(same.double().mean()),
        "set_gap": math.nan if bool(values.isnan().any()) else max(0.0, gap),
        "least_margin": float((lowest_in - best_out).amin()),
        "experts_unused": int((~theirs.any(0)).sum()),
        "experts_idle": (~theirs.any(0)).nonzero().flatten().tolist(),
    }


def _member(chosen: Tensor, experts: int) -> Tensor:
    """Chosen experts as a mask, bool [T, E]."""
    rows = chosen.long().reshape(-1, chosen.shape[-1])
    mask = torch.zeros(len(rows), experts, dtype=torch.bool)
    return mask.scatter(1, rows, True)


# --------------------------------------------------------------------------- forced choices


@contextmanager
def forced_routing(model: nn.Module, routers: Iterable[str], like: Pass | None) -> Iterator[None]:
    """While the block runs, each router hands on the experts that it chose in the pass ``like``.

    None: every router hands on its own.

    Their scores are still the model's own: the router computes them anew, with the given indices
    in place of what its `torch.topk` finds. Hooks that were there before see its own choice.

    Raises:
        TapError: a router that does not choose by one `torch.topk`, or has other tokens.
    """
    with ExitStack() as stack:
        for name in routers:
            if like is not None and (chosen := choice_of(name, like)) is not None:
                hook = _choosing(name, chosen)
                handle = model.get_submodule(name).register_forward_hook(hook)
                stack.callback(handle.remove)
        yield


def choice_of(router: str, recorded: Pass) -> Tensor | None:
    """The experts that a router chose in a pass, integers [T, top_k]; None: it did not run."""
    found = [
        tensor
        for name, tensor in recorded.tensors.items()
        if (tap := Tap.parse(name)).module == router
        and tap.port.startswith("out")
        and not tensor.is_floating_point()
    ]
    return found[0] if len(found) == 1 else None


def _choosing(name: str, chosen: Tensor) -> Callable[..., Any]:
    def hook(router: nn.Module, args: tuple[Any, ...], _: object) -> Any:  # noqa: ANN401
        with _Choose(chosen) as mode:
            output = router.forward(*args)
        if mode.asked != 1:
            raise TapError(
                f"{name} called torch.topk {mode.asked} times on {list(chosen.shape)} choices; "
                "expected once"
            )
        return output

    return hook


class _Choose(TorchFunctionMode):
    """`torch.topk` takes given indices."""

    def __init__(self, chosen: Tensor) -> None:
        super().__init__()
        self._chosen = chosen
        self.asked = 0

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found.indices.shape != self._chosen.shape:
            return found
        self.asked += 1
        indices = self._chosen.to(found.indices)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))
