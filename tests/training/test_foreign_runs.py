"""Models and data as other libraries have them, unchanged: one worker and three, whose shares are uneven."""

import pytest
import torch
from torch.utils.data import Dataset

from paceline.monitor.events import RunFinished
from paceline.optim import AdamW
from plain_functions import losses_of, make_run, read, train_here

NUM_TOKENS = 13


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": NUM_TOKENS, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    quiet = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet)).double()


class Texts(Dataset):
    """Texts of different lengths, as a tokenizer would return them."""

    def __init__(self, start, stop):
        self._range = range(start, stop)

    def __len__(self):
        return len(self._range)

    def __getitem__(self, index):
        number = self._range[index]
        return {"input_ids": [(number * 7 + i * i) % NUM_TOKENS for i in range(3 + number % 6)]}


def make_texts():
    return Texts(0, 40), Texts(40, 51)


def pad_texts(samples):
    """Pad as the library's collators for language models do: labels are the tokens, but -100 where there is none."""
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels != -100).long(), "labels": labels}


def library_loss(model, batch):
    """Return the model's own loss, with the number of tokens that it is a mean of."""
    return model(**batch.data).loss, batch.count(batch.targets[:, 1:] != -100)


class Pictures(Dataset):
    """Pictures as torchvision has them: an object and a number, with a transform."""

    def __init__(self, pictures, classes, transform):
        self._pictures, self._classes, self._transform = pictures, classes, transform

    def __len__(self):
        return len(self._classes)

    def __getitem__(self, index):
        return self._transform(self._pictures[index]), self._classes[index]


def to_tensor(picture):
    return torch.from_numpy(picture).flatten().double() / 16


def make_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    cut = 300
    return (
        Pictures(digits.images[:cut], [int(c) for c in digits.target[:cut]], to_tensor),
        Pictures(digits.images[cut : cut + 101], digits.target[cut : cut + 101], to_tensor),
    )


def build_classifier():
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)).double()


FOREIGN = {
    "gpt2": {"model": build_gpt2, "data": make_texts, "collate_fn": pad_texts, "loss": "next_token", "metrics": None},
    "pictures": {"model": build_classifier, "data": make_digits, "collate_fn": None, "loss": "classification"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_workers_equal_one_process(tmp_path, name):
    steps = {"metrics": None, "num_steps": 12, "schedule": "constant", "optimizer": AdamW(learning_rate=0.01)}
    run = make_run(**steps | FOREIGN[name])
    found = {}
    for num_workers in (1, 3):
        directory = tmp_path / str(num_workers)
        train_here(run.model_copy(update={"shares": (2, 1, 2)[:num_workers]}), directory, num_workers)
        finish = read(directory, RunFinished)[0].event
        found[num_workers] = [*losses_of(directory), finish.held_out_loss, *finish.metrics.values()]
    assert found[1][11] < found[1][0] - 0.02
    assert found[3] == pytest.approx(found[1], rel=1e-8)


def test_the_loss_by_name_is_that_of_the_library(tmp_path):
    by_name, by_model = tmp_path / "by_name", tmp_path / "by_model"
    train_here(make_run(**FOREIGN["gpt2"]), by_name)
    train_here(make_run(**FOREIGN["gpt2"] | {"loss": library_loss}), by_model)
    # Its loss is in float32.
    assert losses_of(by_model) == pytest.approx(losses_of(by_name), rel=1e-5)
