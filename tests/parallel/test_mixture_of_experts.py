"""Mixture-of-experts layers in one process: what they compute, what they drop, and how their use is balanced."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import SettingsError
from paceline.parallel import MixtureOfExperts, balance_loss
from paceline.parallel.mixture_of_experts import take_routing

WIDTH = 6
NUM_EXPERTS = 4


def make(**settings: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(WIDTH, NUM_EXPERTS, hidden=10, **settings).double()


def make_samples(batch: int = 3, length: int = 8) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run_expert(layer: MixtureOfExperts, number: int, x_W: Tensor) -> Tensor:
    experts = layer.experts
    gated = F.silu(experts.gate[number] @ x_W) * (experts.expand[number] @ x_W)
    return experts.project[number] @ gated


def mix_by_definition(layer: MixtureOfExperts, x_BTW: Tensor) -> tuple[Tensor, float, list[int], int]:
    """Return output, unevenness, uses and drops, token by token."""
    capacity = x_BTW.shape[1] * layer.top_k
    if layer.capacity_factor is not None:
        capacity = -(-layer.capacity_factor * capacity // NUM_EXPERTS)
    output, unevenness, uses, num_dropped = torch.zeros_like(x_BTW), 0.0, [0] * NUM_EXPERTS, 0
    for sample, x_TW in enumerate(x_BTW):
        taken, wanted = [0] * NUM_EXPERTS, [0] * NUM_EXPERTS
        probability_TE = (x_TW @ layer.router.weight.T).softmax(-1)
        for place, (x_W, probability_E) in enumerate(zip(x_TW, probability_TE, strict=True)):
            chosen = probability_E.argsort(descending=True)[: layer.top_k].tolist()
            total = float(probability_E[chosen].sum()) if layer.top_k > 1 else 1.0
            for number in chosen:
                wanted[number] += 1
                if taken[number] == capacity:
                    num_dropped += 1
                    continue
                taken[number] += 1
                output[sample, place] += probability_E[number] / total * run_expert(layer, number, x_W)
        uses = [a + b for a, b in zip(uses, taken, strict=True)]
        shares = torch.tensor(wanted, dtype=torch.float64) / sum(wanted)
        unevenness += float(NUM_EXPERTS * (shares * probability_TE.mean(0)).sum()) / len(x_BTW)
    return output, unevenness, uses, num_dropped


@pytest.mark.parametrize("top_k", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("capacity_factor", [None, 1.25, 0.5])
def test_a_layer_computes_its_definition(top_k: int, capacity_factor: float | None) -> None:
    layer, x_BTW = make(top_k=top_k, capacity_factor=capacity_factor, balance=0.5), make_samples()
    with torch.no_grad():
        output, unevenness, uses, num_dropped = mix_by_definition(layer, x_BTW)

    torch.testing.assert_close(layer(x_BTW), output)
    assert balance_loss(layer).item() == pytest.approx(0.5 * unevenness)
    [routing] = take_routing(layer)
    assert (routing.counts, routing.num_dropped) == (uses, num_dropped)
    assert (num_dropped > 0) == (capacity_factor is not None and top_k * capacity_factor < 4)


def test_what_is_dropped_depends_on_neither_batch_nor_later_tokens() -> None:
    layer, x_BTW = make(capacity_factor=0.75), make_samples()
    together = layer(x_BTW)
    assert take_routing(layer)[0].num_dropped

    torch.testing.assert_close(together, torch.cat([layer(x_BTW[i : i + 1]) for i in range(3)]))
    later = x_BTW.clone()
    later[:, 5:] = -later[:, 5:]
    torch.testing.assert_close(layer(later)[:, :5], together[:, :5])


def test_nothing_is_dropped_or_counted_in_evaluation() -> None:
    layer, x_BTW = make(capacity_factor=0.25), make_samples()
    whole = make(capacity_factor=None)
    layer.eval()

    torch.testing.assert_close(layer(x_BTW), whole(x_BTW))
    assert balance_loss(layer).item() == 0.0
    assert take_routing(layer)[0].counts == [0] * NUM_EXPERTS
    assert balance_loss(nn.Linear(2, 2)).item() == 0.0


def test_balance_is_least_where_experts_are_used_evenly_and_its_loss_makes_them() -> None:
    layer, x_BTW = make(top_k=1, balance=1.0), make_samples(4, 64)
    with torch.no_grad():
        layer.router.weight[0] += 1.0  # most tokens go there, or to another
    optimizer = torch.optim.Adam([layer.router.weight], lr=0.05)
    losses, busiest = [], []
    for _ in range(60):
        layer(x_BTW)
        busiest.append(max(take_routing(layer)[0].counts))
        loss = balance_loss(layer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    assert losses[-1] < losses[0]
    assert busiest[-1] < 0.8 * busiest[0]
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(x_BTW)
    assert balance_loss(layer).item() == pytest.approx(1.0)  # all probabilities are the same
    assert balance_loss(layer).item() == 0.0, "each forward counts once"


def test_each_use_of_a_layer_in_a_forward_counts_and_no_earlier_forward() -> None:
    layer, one_BTW, other_BTW = make(balance=0.1), make_samples(2, 8), make_samples(3, 8)
    layer(one_BTW)
    first = balance_loss(layer).item()
    layer(other_BTW).sum().backward()  # whose loss nobody takes
    layer(one_BTW)
    output = layer(other_BTW)
    both = balance_loss(layer)
    output.sum().backward()
    layer(other_BTW)
    second = balance_loss(layer).item()
    assert min(first, second) >= 0.1
    assert both.item() == pytest.approx(first + second)


def test_a_recomputed_layer_counts_once_and_has_the_same_gradients() -> None:
    gradients = []
    for is_recomputed in (False, True):
        layer, x_BTW = make(capacity_factor=1.0, balance=0.1), make_samples()
        output = checkpoint(layer, x_BTW, use_reentrant=False) if is_recomputed else layer(x_BTW)
        loss = output.square().mean() + balance_loss(layer)
        loss.backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
        assert balance_loss(layer).item() == 0.0
        [routing] = take_routing(layer)
        assert sum(routing.counts) + routing.num_dropped == 3 * 8 * 2
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_router_chooses_in_32_bits_under_autocast() -> None:
    layer, x_BTW = make().float(), make_samples().float()
    seen = []
    layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    layer(x_BTW)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x_BTW)

    assert torch.equal(seen[0], seen[1])
    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 5}, r"top_k must be between 1 and num_experts\(4\), but got 5"),
        ({"top_k": 0}, r"top_k must be between 1 and num_experts\(4\), but got 0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be more than 0, but got 0.0; None drops nothing"),
        ({"balance": -1.0}, "balance must be at least 0, but got -1.0; 0 balances nothing"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make(**settings)


def test_tokens_without_samples_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"shape \(samples, tokens, width\), but got \(24, 6\)"):
        make()(make_samples().flatten(0, 1))
