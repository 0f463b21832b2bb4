"""Any number of workers, shares and micro-batches against one process, on the recipes' own models and data.

In float64, so that nothing but the order of summation is tolerated.
"""

import itertools
from functools import cache

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.data.images import Images
from paceline.data.masked_text import MaskedText
from paceline.data.text import Text
from paceline.optim import SGD, AdamW
from paceline.recipes import find_recipe
from paceline.recipes.bert import Bert
from paceline.recipes.resnet import ResNet
from paceline.recipes.rnn import RNN
from paceline.recipes.transformer_lm import TransformerLM
from paceline.replica import Replica

NUM_STEPS = 10

# ResNet without batch statistics: with them every worker normalises by its own samples, on purpose.
CHANGES = {
    "transformer_lm": {
        "model": TransformerLM(width=32, num_layers=2, num_heads=2, dropout=0.0),
        "data": Text(sequence_length=32, max_bytes=200_000),
        "optimizer": AdamW(learning_rate=1e-3),
        "global_batch": 12,
    },
    "resnet": {
        "model": ResNet(depth=18, width=8, norm="group"),
        "data": Images(size=16),
        "optimizer": SGD(learning_rate=0.05, momentum=0.9),
        "global_batch": 12,
    },
    "bert": {
        "model": Bert(width=32, num_layers=2, num_heads=2, dropout=0.0),
        "data": MaskedText(sequence_length=32, max_bytes=200_000),
        "optimizer": AdamW(learning_rate=3e-3),
        "global_batch": 12,
    },
    "rnn": {
        "model": RNN(width=16, num_layers=2),
        "data": Images(size=16),
        "optimizer": AdamW(learning_rate=1e-2),
        "global_batch": 12,
    },
}


@cache
def get_recipe(name):
    run = find_recipe(name)().model_copy(update=CHANGES[name])
    splits = run.data.open()
    torch.manual_seed(0)
    return run, splits.train, run.model.build(splits.train.spec).state_dict()


def train(name, group, shares=None, num_micro_batches=1):
    run, source, weights = get_recipe(name)
    module = run.model.build(source.spec).double()
    module.load_state_dict(weights)
    replica = Replica(
        module, run.optimizer.build(module), group=group, clip_norm=1.0, bucket_bytes=20_000, hash_interval=5
    )
    loader = Loader(source, run.global_batch, group=group, shares=shares, num_micro_batches=num_micro_batches)
    losses, norms = [], []
    for batch in loader:
        loss = run.loss.loss(lambda x: replica(x.double() if x.is_floating_point() else x), batch)
        replica.backward(loss.mean, weight=loss.weight, last=batch.last)
        if batch.last:
            result = replica.update()
            losses.append(result.loss)
            norms.append(result.gradient_norm)
        if len(losses) == NUM_STEPS:
            return losses, norms, {key: value.detach() for key, value in module.named_parameters()}
    raise AssertionError


@cache
def get_reference(name):
    return train(name, LocalGroup())


SHARES = {1: [None], 2: [None, (1, 3)], 3: [None, (5, 1, 1)], 4: [None, (0, 1, 1, 4)]}
CASES = [
    (num_workers, shares, num_micro_batches)
    for num_workers in SHARES
    for shares, num_micro_batches in itertools.product(SHARES[num_workers], (1, 4))
    if (num_workers, num_micro_batches) != (1, 1)
]
FEW_CASES = [(2, None, 1), (3, (5, 1, 1), 4), (4, (0, 1, 1, 4), 1)]
"""For models that have nothing of their own in backward: the objective and the data are what is new."""


def list_cases():
    """Return all cases of one model, and few of the others; the other cases of the second are a campaign's."""
    for name in CHANGES:
        for case in FEW_CASES if name in ("bert", "rnn") else CASES:
            is_more = name == "resnet" and case not in FEW_CASES
            yield pytest.param(name, *case, marks=[pytest.mark.slow, pytest.mark.campaign] if is_more else [])


@pytest.mark.parametrize(("name", "num_workers", "shares", "num_micro_batches"), [*list_cases()])
def test_workers_equal_one_process(name, num_workers, shares, num_micro_batches):
    losses, norms, parameters = get_reference(name)
    results = LocalGroup.run(num_workers, lambda group: train(name, group, shares, num_micro_batches))
    # Sums in another order differ by about 1e-16 a step, which 10 steps of a deep network with kinks, and Adam's
    # division by small second moments, may multiply by thousands.
    for their_losses, their_norms, theirs in results:
        assert their_losses == pytest.approx(losses, rel=1e-10)
        assert their_norms == pytest.approx(norms, rel=1e-8)
        for key, value in parameters.items():
            torch.testing.assert_close(theirs[key], value, atol=1e-8, rtol=0)
            assert torch.equal(theirs[key], results[0][2][key])


def test_the_reference_learns():
    """Without this, models that stand still would be equal too."""
    for name in CHANGES:
        losses, _, _ = get_reference(name)
        assert losses[-1] < losses[0] - 0.05
