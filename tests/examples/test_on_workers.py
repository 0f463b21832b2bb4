"""Each example learns the same on one, two and three workers, and learns something."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from paceline.cli.overrides import apply_overrides
from paceline.monitor.events import RunFinished
from paceline.optim import SGD
from paceline.testing.processes import run_processes
from plain_functions import losses_of, parameters_of, read, train_here

EXAMPLES = Path(__file__).parents[2] / "examples"

TINY = {"width": 16, "num_layers": 1}
CASES = {
    "gpt2_run": ("run", TINY, {"data.max_bytes": 60_000, "data.sequence_length": 16, "loss.sample_tokens": 0}),
    "bert_classifier": ("run", TINY, {}),
    "llama": ("run", TINY, {"data.arguments.length": 16}),
    "variable_length": ("run", {"width": 16}, {}),
    "two_inputs": ("run", {"width": 8}, {"data.arguments.num_samples": 500}),
    "timm_images vit": ("vit", {"depth": 1, "width": 16}, {}),
    "timm_images resnet": ("resnet", {"name": "resnet10t"}, {}),
}


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in ("transformers", "timm"):
            pytest.skip(f"{error.name} is not installed")
        raise


def make_small(name, monkeypatch, **changes):
    """Return the run of an example as the command line would make it smaller."""
    function, arguments, overrides = CASES[name]
    run = getattr(load(name.split()[0], monkeypatch), function)()
    given = {f"model.arguments.{key}": value for key, value in arguments.items()} | overrides
    return apply_overrides(run, [(key, str(value)) for key, value in given.items()]).model_copy(update=changes)


@pytest.mark.parametrize("name", CASES)
def test_workers_learn_what_one_process_does(tmp_path, monkeypatch, name):
    """Of uneven shares, which hold uneven numbers of tokens."""
    run = make_small(
        name,
        monkeypatch,
        optimizer=SGD(learning_rate=0.1, momentum=0.9),
        global_batch=8,
        num_steps=4,
        num_epochs=None,
        evaluate_samples=10,
        hash_interval=2,
    )
    for num_workers in (1, 2, 3):
        train_here(run, tmp_path / str(num_workers), num_workers)
    losses, parameters, finishes = (
        [of(tmp_path / str(number)) for number in (1, 2, 3)]
        for of in (losses_of, parameters_of, lambda path: read(path, RunFinished)[0].event)
    )
    for number in (1, 2):
        # Sums of floats in another order.
        assert losses[number] == pytest.approx(losses[0], rel=2e-5)
        assert finishes[number].held_out_loss == pytest.approx(finishes[0].held_out_loss, rel=2e-5)
        assert parameters[number].keys() >= {key for key in parameters[0] if key.startswith("model/")}
        for key, tensor in parameters[0].items():
            if key.startswith("model/"):
                torch.testing.assert_close(parameters[number][key], tensor, rtol=1e-3, atol=2e-5, msg=key)
    assert len(set(losses[0])) == 4, "batches and parameters change"


def train_gan(num_steps):
    """Train the GAN on this process's workers, and return the generator's parameters as numbers."""
    sys.path.insert(0, str(EXAMPLES))
    gan = importlib.import_module("gan")
    return [tensor.flatten().tolist() for tensor in gan.train(num_steps).values()]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_train_the_gan_that_one_process_does(num_workers):
    alone = train_gan(6)
    for result in run_processes(num_workers, train_gan, {"num_steps": 6}):
        assert result.exit_code == 0, result.output
        for theirs, ours in zip(result.value, alone, strict=True):
            # Sums of floats in another order, and Adam, whose first steps are as large for small gradients.
            assert theirs == pytest.approx(ours, rel=1e-3, abs=2e-5)


def test_the_gan_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, monkeypatch, capsys):
    gan = load("gan", monkeypatch)
    straight = gan.train(103)
    gan.train(101, str(tmp_path / "checkpoints"))
    resumed = gan.train(103, str(tmp_path / "checkpoints"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())
    assert capsys.readouterr().out.count("step 50:") == 2, "the resumed training begins after step 100"
