"""BERT of the transformers library, unchanged, tells which module a line of Python is from: a batch of masks and ids.

    paceline train examples/bert_classifier.py:run

Lines have different lengths; attention masks say what is padding. Weights are random and nothing is downloaded.
"""

import argparse
import inspect
import typing
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import paceline

MODULES = (argparse, inspect, typing)


def build(width: int = 64, num_layers: int = 2) -> nn.Module:
    """Return a small BERT over bytes."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": num_layers}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=256, num_attention_heads=4, num_labels=len(MODULES), **sizes, **dropout)
    return BertForSequenceClassification(config)


def make_datasets(max_length: int = 48) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return lines to train on, and every tenth held out."""
    samples = []
    for label, module in enumerate(MODULES):
        for line in Path(module.__file__ or "").read_bytes().splitlines():
            if line := line.strip()[:max_length]:
                samples.append({"input_ids": torch.tensor(list(line)), "labels": torch.tensor(label)})
    return [sample for number, sample in enumerate(samples) if number % 10], samples[::10]


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch as the model takes it."""
    lines = [sample["input_ids"] for sample in samples]
    masks = [torch.ones_like(line) for line in lines]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(lines, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence(masks, batch_first=True),
        "labels": torch.stack([sample["labels"] for sample in samples]),
    }


def run() -> paceline.Run:
    """BERT with masks."""
    return paceline.Run(
        model=build,
        data=make_datasets,
        collate_fn=pad,
        loss="classification",
        optimizer={"name": "adamw", "learning_rate": 1e-3},
        global_batch=32,
        num_epochs=1,
    )
