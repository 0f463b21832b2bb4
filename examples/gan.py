"""A GAN: two networks, two optimizers, one loop of your own.

Alone:             python examples/gan.py
On two workers:    torchrun --nproc-per-node 2 examples/gan.py

The generator learns to put points on a ring. Each network is a replica; both are in one checkpoint.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline


def make_net(num_inputs: int, num_outputs: int, width: int = 64) -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(num_inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, num_outputs))


def make_ring(num_samples: int = 4096) -> TensorDataset:
    """Return points near a circle, each with the noise that it is compared with, the same on every worker."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(num_samples, generator=generator) * 2 * math.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    points += 0.05 * torch.randn(points.shape, generator=generator)
    return TensorDataset(points, torch.randn(num_samples, 8, generator=generator))


def judged(logits: Tensor, target: float) -> Tensor:
    """Return the loss of taking points for real (1) or made (0)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def train(num_steps: int, folder: str | None = None) -> dict[str, Tensor]:
    """Train on whatever workers there are, and return the generator's weights."""
    torch.manual_seed(0)
    with paceline.join() as group:
        nets = [make_net(8, 2).to(group.device), make_net(2, 1).to(group.device)]
        generator, critic = (
            paceline.Replica(net, torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999))) for net in nets
        )
        loader = paceline.Loader(make_ring(), global_batch=128, num_steps=num_steps)
        if folder:
            paceline.load_latest(folder, generator, critic, loader)
        for batch in loader:
            real, noise = batch.data
            made = generator(noise)

            loss = judged(critic(real), 1.0) + judged(critic(made.detach()), 0.0)
            critic.backward(loss, weight=batch.count())
            critic_loss = critic.update().loss

            generator.backward(judged(nets[1](made), 1.0), weight=batch.count())
            nets[1].zero_grad()  # the generator's loss went back through the critic too
            generator_loss = generator.update().loss

            if group.rank == 0 and generator.num_updates % 50 == 0:
                print(f"step {generator.num_updates}: critic {critic_loss:.3f}, generator {generator_loss:.3f}")
            if folder and generator.should_save(every=100):
                paceline.save(folder, generator, critic, loader)
        return nets[0].state_dict()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GAN with Paceline as a library.")
    parser.add_argument("--num-steps", type=int, default=300, help="updates of each network")
    parser.add_argument("--checkpoints", help="where to save, and to go on from")
    arguments = parser.parse_args()
    train(arguments.num_steps, arguments.checkpoints)
