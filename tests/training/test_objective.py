import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import LocalGroup
from paceline.data.base import Source, Spec
from paceline.data.batch import Batch
from paceline.data.masked_text import NOT_ASKED
from paceline.data.order import Interval
from paceline.replica import Replica
from paceline.training import MaskedLM, Objective
from paceline.training.objective import FunctionLoss

NUM_TOKENS, VOCABULARY = 6, 7
# What each of four samples is asked for: nothing, one token, four, and all six.
ASKED = torch.tensor([[0] * 6, [0, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 1], [1] * 6]).bool()


def make_batch(samples: slice = slice(0, 4), num_samples: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (4, NUM_TOKENS), generator=generator)
    inputs = torch.randint(VOCABULARY, (4, NUM_TOKENS), generator=generator)
    targets = tokens.masked_fill(~ASKED, NOT_ASKED)[samples]
    return Batch((inputs[samples], targets), len(targets) if num_samples is None else num_samples, Interval(0, 4))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Linear(5, VOCABULARY)).double()


def test_the_loss_is_a_mean_over_what_is_asked_for() -> None:
    batch, model = make_batch(), make_model()
    loss = Objective.model_validate("masked_lm").loss(model, batch)
    logits = model(batch.inputs)[ASKED]
    assert loss.weight == 11
    torch.testing.assert_close(loss.mean, F.cross_entropy(logits, batch.targets[ASKED]))
    assert loss.totals["accuracy"] == (logits.argmax(-1) == batch.targets[ASKED]).sum()


def test_parts_with_their_weights_make_the_whole() -> None:
    whole = MaskedLM().loss(make_model(), make_batch())
    parts = [MaskedLM().loss(make_model(), make_batch(slice(i, i + 1))) for i in range(4)]
    assert [part.weight for part in parts] == [0, 1, 4, 6]
    together = torch.stack([part.mean * part.weight for part in parts]).sum() / 11
    torch.testing.assert_close(whole.mean, together)
    assert sum(int(part.totals["accuracy"]) for part in parts) == int(whole.totals["accuracy"])


def test_nothing_asked_for_and_borrowed_samples_count_for_nothing() -> None:
    for batch in (make_batch(slice(0, 1)), make_batch(slice(3, 4), num_samples=0)):
        loss = MaskedLM().loss(make_model(), batch)
        assert (loss.weight, int(loss.totals["accuracy"])) == (0, 0)
        assert loss.mean.isfinite(), "an evaluation multiplies it by its weight"
        loss.mean.backward()


@pytest.mark.parametrize("shares", [(1, 3), (3, 1), (2, 2), (0, 4)])
def test_workers_that_are_asked_for_unequal_numbers_learn_as_one(shares: tuple[int, int]) -> None:
    start = make_model()  # not in threads, which share torch's generator

    def train(group: Any, samples: slice, num_samples: int) -> tuple[float, float, list[Tensor]]:
        module = copy.deepcopy(start)
        replica = Replica(module, torch.optim.SGD(module.parameters(), lr=1.0), group=group)
        for _ in range(3):
            loss = MaskedLM().loss(replica, make_batch(samples, num_samples))
            replica.backward(loss.mean, weight=loss.weight)
            result = replica.update()
        replica.close()
        return result.loss, result.weight, [parameter.detach() for parameter in module.parameters()]

    def work(group: Any) -> tuple[float, float, list[Tensor]]:
        first = shares[0] * group.rank
        count = shares[group.rank]
        return train(group, slice(first, first + max(count, 1)), count)

    alone = train(LocalGroup(), slice(0, 4), 4)
    for loss, weight, parameters in LocalGroup.run(2, work):
        assert weight == alone[1] == 11
        assert loss == pytest.approx(alone[0], abs=1e-12)
        for ours, expected in zip(parameters, alone[2], strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


class OneText(Source):
    """The single sample ``hidden`` with its vowels asked for."""

    def __init__(self, num_classes: int = 264) -> None:
        self.spec = Spec(num_classes, (6,))

    def __len__(self) -> int:
        return 1

    def read(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        text = torch.tensor([list(b"hidden")])
        is_vowel = (text == ord("i")) | (text == ord("e"))
        return text.masked_fill(is_vowel, 256), text.masked_fill(~is_vowel, NOT_ASKED)


class Guesser(nn.Module):
    """Guesses ``o`` where something is masked; it has numbers above the bytes too, which are no text."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        logits = F.one_hot(tokens.where(tokens < 256, ord("o")), 264).float()
        logits[..., 257:] = 2
        return logits + self.weight


def test_the_showcase_blots_out_and_fills_in() -> None:
    module = Guesser()
    assert MaskedLM().showcase(module, OneText()) == "h▯dd▯n\n▸\nhoddon"
    assert module.training
    assert MaskedLM().showcase(module, OneText(num_classes=1000)) is None, "of tokens that are no bytes"


def by_name(model, batch):
    return model(x=batch.data["points"]).mean()


def by_place(model, batch):
    return model(batch.data["points"], 3).mean()


def mixed(model, batch):
    return model(batch.data["points"], y=3).mean()


def of_parts(model, batch):
    return model.head(batch.data["points"]).mean()


def of_output(output, batch):
    return output.mean()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_name, {"x": "points"}),
        (by_place, ("points", 3)),
        *((function, {"points": "points"}) for function in (mixed, of_parts, of_output)),
    ],
)
def test_the_inputs_of_a_model_are_what_its_loss_gives_to_it(function, expected):
    batch = Batch({"points": "points", "label": None}, 1, Interval(0, 1))
    assert FunctionLoss(path=function).inputs_of(batch) == expected
