"""A small BERT learns which of its first two tokens is larger; run it by torchrun."""

import os

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, set_seed

import paceline

RANK = int(os.environ.get("RANK", "0"))


def make_dataset(num_samples=1024, length=8):
    tokens = torch.randint(32, (num_samples, length), generator=torch.Generator().manual_seed(0))
    masks = torch.ones_like(tokens)
    labels = (tokens[:, 0] > tokens[:, 1]).long()
    return [{"input_ids": t, "attention_mask": m, "labels": y} for t, m, y in zip(tokens, masks, labels, strict=True)]


def build():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=2, **sizes, **dropout))


def main(num_epochs=3, batch_size=16, shuffle=True):
    with paceline.join() as group:
        set_seed(0)
        loader = DataLoader(make_dataset(), batch_size=batch_size, shuffle=shuffle)
        model = build().to(group.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        replica, loader = paceline.Replica(model, optimizer), paceline.Loader(loader, num_epochs=num_epochs)

        num_steps = 0
        model.train()
        for batch in loader:
            replica.backward(replica(**batch.data).loss, weight=batch.count())
            loss = replica.update().loss
            optimizer.zero_grad()
            num_steps += 1
            if RANK == 0 and num_steps % 20 == 0:
                print(f"step {num_steps}: loss {loss:.3f}")
        return model


if __name__ == "__main__":
    main()
