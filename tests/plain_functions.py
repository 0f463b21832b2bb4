"""Functions as a person writes them for a run, and runs of them on workers that are threads."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.comm import LocalGroup
from paceline.monitor.events import StepFinished
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.training import Run, train

VOCABULARY, IGNORED = 11, -100


class Sentences(torch.utils.data.Dataset):
    """Token sequences of different lengths, as dicts; labels at some tokens are ignored."""

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        self._num_samples, self._seed = num_samples, seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(1000 * self._seed + index)
        length = 2 + index % 5
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        return {"input_ids": tokens, "labels": (tokens * 3 + 1) % VOCABULARY}


class Told(IterableDataset):
    """The same sentences, one after another."""

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        self._sentences = Sentences(num_samples, seed)

    def __iter__(self):
        return iter([self._sentences[index] for index in range(len(self._sentences))])


class Reader(nn.Module):
    """Logits of each token, by the transformers library's conventions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(input_ids) * attention_mask[..., None])


def build(width: int = 6) -> nn.Module:
    return Reader(width).double()


def make_sentences(num_samples: int = 30):
    return Sentences(num_samples), Sentences(7, seed=1)


def make_told():
    return {"train": Told(30), "held_out": Told(7, seed=1)}


def make_loaders():
    return (
        DataLoader(Sentences(30), batch_size=5, shuffle=True, collate_fn=pad, drop_last=True),
        DataLoader(Sentences(7, seed=1), batch_size=5, collate_fn=pad),
    )


def make_one():
    return Sentences(30)


def pad(samples: list[dict[str, torch.Tensor]], padding: int = 0) -> dict[str, torch.Tensor]:
    def stack(name: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)

    labels = stack("labels", IGNORED)
    return {"input_ids": stack("input_ids", padding), "attention_mask": (labels != IGNORED).double(), "labels": labels}


def compute_loss(model, batch):
    """Return the mean over tokens, and their number, which is wrong for a borrowed sample."""
    labels = batch.data["labels"]
    logits = model(batch.data["input_ids"], attention_mask=batch.data["attention_mask"])
    mask = labels != IGNORED
    return F.cross_entropy(logits[mask], labels[mask]), mask.sum()


def compute_loss_of_output(output, batch):
    mask = batch.targets != IGNORED
    return F.cross_entropy(output[mask], batch.targets[mask]), mask.sum()


def measure(output, batch):
    mask = batch.targets != IGNORED
    is_right = output.argmax(-1) == batch.targets
    return {
        "right": (is_right[mask].sum(), mask.sum()),
        "length": mask.double().sum() / len(mask),
    }


def measure_model(model, batch):
    return measure(model(**batch.inputs), batch)


def make_points(num_samples: int = 40):
    """Return one data set cut at random."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return torch.utils.data.random_split(TensorDataset(inputs, inputs.sum(1, keepdim=True)), [0.75, 0.25])


def build_linear(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)).double()


def build_deeper(width: int = 5) -> nn.Module:
    return build_linear(width).append(nn.Linear(1, 1).double())


def squared_error(output, batch):
    return F.mse_loss(output, batch.targets)


def make_run(**changes: Any) -> Run:
    settings = {
        "model": build,
        "data": make_sentences,
        "loss": compute_loss,
        "metrics": measure,
        "collate_fn": pad,
        "global_batch": 8,
        "num_steps": 9,
        "evaluate_interval": 4,
        "checkpoint_interval": 4,
        "hash_interval": 3,
    }
    return Run(**(settings | changes))


def make_points_run(**changes: Any) -> Run:
    """Return a run of the smallest model, whose loss takes the output."""
    plain = {"model": build_linear, "data": make_points, "loss": squared_error, "collate_fn": None, "metrics": None}
    return make_run(**(plain | changes))


def train_here(run: Run, directory, num_workers: int = 1, recipe: str = "test") -> list[bool]:
    directory.mkdir(exist_ok=True)

    def worker(group):
        with EventLog(directory / "events.jsonl", run="r", rank=group.rank) as log:
            return train(run, directory, group, log, recipe=recipe)

    return LocalGroup.run(num_workers, worker)


def read(directory, kind):
    return select(read_log(directory / "events.jsonl"), kind)


def losses_of(directory) -> list[float]:
    return [record.event.loss for record in read(directory, StepFinished)]


def parameters_of(directory) -> dict[str, torch.Tensor]:
    """Return what the newest checkpoint has."""
    from safetensors.torch import load_file

    newest = sorted(directory.glob("checkpoints/step-*"))[-1]
    tensors: dict[str, torch.Tensor] = {}
    for file in newest.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors
