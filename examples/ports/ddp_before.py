"""A small network learns digits; run it by torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

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
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=shuffle)
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp_model = DistributedDataParallel(model)

    num_steps = 0
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = compute_loss(ddp_model, batch)
            loss.backward()
            optimizer.step()
            num_steps += 1
            if RANK == 0 and num_steps % 20 == 0:
                print(f"step {num_steps}: loss {loss:.3f}")
    if RANK == 0:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
