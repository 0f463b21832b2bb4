"""A small network learns digits; run it by torchrun."""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline

RANK = int(os.environ.get("RANK", "0"))


def load_dataset():
    digits = load_digits()
    return TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))


def compute_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def main(num_epochs=3, batch_size=32, shuffle=True, path="digits.pt"):
    torch.manual_seed(0)
    dataset = load_dataset()
    loader = paceline.Loader(dataset, global_batch=batch_size, num_epochs=num_epochs, shuffle=shuffle)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = paceline.Replica(model, optimizer)

    num_steps = 0
    for batch in loader:
        optimizer.zero_grad()
        replica.backward(compute_loss(replica, batch.data), weight=batch.count())
        loss = replica.update().loss
        num_steps += 1
        if RANK == 0 and num_steps % 20 == 0:
            print(f"step {num_steps}: loss {loss:.3f}")
    if RANK == 0:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    with paceline.join():
        main()
