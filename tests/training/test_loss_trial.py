"""Losses that a layout would make other losses are refused before the first step, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import join
from paceline.data.batch import Batch
from paceline.data.order import Interval
from paceline.errors import DataError, SettingsError
from paceline.monitor import RunFinished, read_log, select
from paceline.parallel.parallelize import find_shard, parallelize
from paceline.parallel.pipeline import PipelineSettings
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout
from paceline.training.loss_trial import LossTrial
from paceline.training.objective import FunctionLoss, NextToken

VOCABULARY, WIDTH, NUM_TOKENS = 24, 16, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A language model whose logits are zeros at first, so that all targets cost the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encode(input_ids))

    def encode(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return mean, float((targets != -100).sum())


def aligned(output: Tensor, batch: Batch) -> tuple[Tensor, float]:
    return entropy(output, batch.next_labels)


def shifting(output: Tensor, batch: Batch) -> tuple[Tensor, float]:
    return entropy(output[:, :-1], batch.targets[:, 1:])


def shifting_ids(model: Any, batch: Batch) -> Tensor:
    ids = batch.data["input_ids"]
    return entropy(model(ids)[:, :-1], ids[:, 1:])[0]


def alone(output: Tensor, batch: Batch) -> Tensor:
    assert batch.num_samples > 1, "a mistake that the first step shows"
    return output.mean()


def noisy(output: Tensor, batch: Batch) -> tuple[Tensor, float]:
    return entropy(output + torch.randn_like(output), batch.next_labels)


def by_hand(model: Any, batch: Batch) -> tuple[Tensor, float]:
    hidden = model.encode(batch.data["input_ids"])
    return entropy(model.head(nn.Dropout(0.0)(hidden)), batch.next_labels)


def decayed(model: Any, batch: Batch) -> tuple[Tensor, float]:
    mean, weight = entropy(model(batch.data["input_ids"]), batch.next_labels)
    return mean + 1e-9 * sum(parameter.square().sum() for parameter in model.parameters()), weight


def of_norm(model: Any, batch: Batch) -> tuple[Tensor, float]:
    mean, weight = entropy(model(batch.data["input_ids"]), batch.next_labels)
    return mean + model.layers[0].out.weight.norm(), weight


def beside(model: Any, batch: Batch) -> tuple[Tensor, float]:
    mean, weight = entropy(model(batch.data["input_ids"]), batch.next_labels)
    matrix = model.layers[0].out.weight
    return mean + (matrix.T @ matrix - torch.eye(matrix.shape[1])).square().sum(), weight


def of_positive(model: Any, batch: Batch) -> tuple[Tensor, float]:
    """Torch has no rule for entries that are chosen of divided matrices."""
    mean, weight = entropy(model(batch.data["input_ids"]), batch.next_labels)
    matrix = model.layers[0].out.weight
    return mean + matrix[matrix > 0].sum(), weight


def of_gram(model: Any, batch: Batch) -> tuple[Tensor, float]:
    """Torch has no rule for the backward of a norm of what is not summed yet."""
    mean, weight = entropy(model(batch.data["input_ids"]), batch.next_labels)
    matrix = model.layers[0].out.weight
    return mean + (matrix @ matrix.T - torch.eye(WIDTH)).norm(), weight


def scaled_by_number(model: Any, batch: Batch) -> tuple[Tensor, float]:
    mean, weight = entropy(model(batch.data["input_ids"]), batch.next_labels)
    return mean * float(model.layers[0].out.weight.detach().norm()), weight


LOSSES = [aligned, shifting, shifting_ids, alone, noisy, by_hand, decayed, of_norm, beside, NextToken]
LOSSES += [of_positive, of_gram, scaled_by_number]
WITHOUT_RULE = {"of_positive", "of_gram", "scaled_by_number"}
OF_OUTPUT = {"aligned", "shifting", "alone", "noisy", "NextToken"}


def refuse(layouts: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return what is said of the losses that each layout refuses, by the loss's name."""
    said = []
    torch.set_num_threads(1)
    data = {"input_ids": torch.arange(NUM_TOKENS)[None] * 5 % VOCABULARY}
    with join() as group:
        for layout in layouts:
            torch.manual_seed(0)
            module = parallelize(
                Model(), Layout(**layout), group=group, sample=data, pipeline=PipelineSettings(num_micro_batches=1)
            )
            shard, refused = find_shard(module, group), {}
            for function in LOSSES:
                if shard.pipeline is not None and function.__name__ not in OF_OUTPUT:
                    continue
                loss = NextToken() if function is NextToken else FunctionLoss(path=function)
                try:
                    LossTrial(loss, shard).check({**data, "labels": data["input_ids"]})
                except SettingsError as error:
                    refused[function.__name__] = str(error)
            assert module.training
            assert all(parameter.grad is None for parameter in module.parameters())
            said.append(refused)
            shard.close()
    return said


LAYOUTS: list[dict[str, Any]] = [{"context": 2}, {"tensor": 2}, {"sharded": 2}, {"sharded": 2, "zero_stage": 2}]


@pytest.mark.timeout(120)
def test_losses_of_parts_and_losses_of_parameters_are_refused() -> None:
    for result in run_processes(2, refuse, {"layouts": LAYOUTS}, timeout_s=100):
        assert result.exit_code == 0, result.output
        context, *divided = result.value
        assert context.keys() == {"shifting", "shifting_ids"}
        assert all("mean over tokens" in text and "batch.next_labels" in text for text in context.values())
        assert "shifting has other gradients for parts of a sample" in context["shifting"]
        tensor, *sharded = divided
        assert tensor.keys() == WITHOUT_RULE  # others are exact
        assert all("parameter.full_tensor() there, or take --layout.tensor 1" in text for text in tensor.values())
        of_parameters = {"decayed", "of_norm", "beside"} | WITHOUT_RULE
        for layout, refused in zip(LAYOUTS[2:], sharded, strict=True):
            assert of_parameters <= refused.keys() <= {*of_parameters, "by_hand"}, layout
            assert "of_norm uses layers.0.out.weight; leave penalties" in refused["of_norm"]


@pytest.mark.timeout(120)
def test_a_loss_of_parts_is_refused_beside_other_axes() -> None:
    layouts = [{"context": 2, "pipeline": 2}, {"context": 2, "tensor": 2}]
    for result in run_processes(4, refuse, {"layouts": layouts}, timeout_s=100):
        assert result.exit_code == 0, result.output
        pipeline, tensor = result.value
        assert pipeline.keys() == {"shifting"}
        assert tensor.keys() == {"shifting", "shifting_ids"} | WITHOUT_RULE


def test_next_labels_are_the_next_tokens_in_any_batch() -> None:
    tokens = torch.tensor([[3, 5, 7]])
    pair, mapping = Batch((tokens, tokens + 1), 1, Interval(0, 1)), Batch({"labels": tokens}, 1, Interval(0, 1))
    assert pair.next_labels.tolist() == [[4, 6, 8]]
    assert mapping.next_labels.tolist() == [[5, 7, -100]]
    part = Batch({"labels": tokens, "next_labels": tokens + 2}, 1, Interval(0, 1))
    assert part.next_labels.tolist() == [[5, 7, 9]]
    with pytest.raises(DataError, match="must be of tokens, but targets are int64"):
        _ = Batch({"labels": tokens[0]}, 1, Interval(0, 1)).next_labels
    with pytest.raises(DataError, match="must be a pair"):
        _ = Batch({"input_ids": tokens}, 1, Interval(0, 1)).next_labels


RUN = """
import torch, paceline
from functools import partial
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

def build():
    return GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=None,
                                      eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).double()

def make_data():
    ids = torch.arange(96).view(12, 8) * 5 % 24
    texts = [{"input_ids": one, "labels": one} for one in ids]
    return texts[:8], texts[8:]

def aligned(output, batch):
    mean = cross_entropy(output.logits.flatten(0, 1), batch.next_labels.flatten(), ignore_index=-100)
    return mean, batch.count(batch.next_labels != -100)

def shifting(output, batch):
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), batch.targets[:, 1:].flatten())

def decayed(model, batch):
    mean = aligned(model(**batch.inputs), batch)[0] + 0.1 * sum(p.square().sum() for p in model.parameters())
    return mean + sum((p.T @ p - torch.eye(p.shape[1], dtype=p.dtype)).square().mean()
                      for p in model.parameters() if p.dim() > 1)

def run():
    return paceline.Run(model=build, data=make_data, loss=aligned, optimizer=partial(torch.optim.SGD, lr=0.1),
                        global_batch=4, num_steps=2)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_refuses_a_loss_of_parts_and_evaluates_the_held_out_loss_of_whole_sequences(
    run_here: Any, tmp_path: Path
) -> None:
    recipe, out = tmp_path / "mine.py", tmp_path / "out"
    recipe.write_text(RUN)
    for loss, axis, said in (
        ("shifting", "context", "mean over tokens with their number as its weight for context(2)"),
        ("decayed", "sharded", "where each rank has parts of parameters, but "),
    ):
        refused = run_here(
            *("train", f"{recipe}:run", "--loss", f"{recipe}:{loss}", f"--layout.{axis}", 2),
            *("--workers", 1 if axis == "context" else 2, "--out", tmp_path / loss),
        )
        assert refused.returncode == 2
        assert said in refused.stdout
        assert "Traceback" not in refused.stdout + refused.stderr
    losses = []
    for place, layout in (("one", ()), ("tensor", ("--layout.tensor", 2))):
        log = tmp_path / place / "events.jsonl"
        kept = run_here("train", f"{recipe}:run", "--loss", f"{recipe}:decayed", *layout, "--out", tmp_path / place)
        assert kept.returncode == 0, kept.stdout + kept.stderr
        losses.append(select(read_log(log), RunFinished)[-1].event.held_out_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)  # fp64
    trained = run_here("train", f"{recipe}:run", "--layout.context", 2, "--out", out)
    assert trained.returncode == 0, trained.stderr
    logged = select(read_log(out / "events.jsonl"), RunFinished)[-1].event.held_out_loss
    evaluated = run_here("evaluate", out)
    assert evaluated.returncode == 0, evaluated.stderr
    assert float(evaluated.stdout.split()[-1]) == pytest.approx(logged, rel=1e-5)  # as many digits are printed
