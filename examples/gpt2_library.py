"""GPT-2 of the transformers library, unchanged, trained with Paceline as a library.

Alone:             python examples/gpt2_library.py
On two workers:    torchrun --nproc-per-node 2 examples/gpt2_library.py

It learns Python, byte by byte, from the standard library's own source. Weights are random and nothing is downloaded.
"""

import argparse

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import paceline
from paceline.data.text import Text


def build_gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 of 0.9 million parameters over bytes."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=4,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def train(num_steps: int) -> None:
    """Train for `num_steps` updates on whatever workers there are."""
    torch.manual_seed(0)
    text = Text(sequence_length=128, max_bytes=5_000_000).open()
    with paceline.join() as group:
        model = build_gpt2().to(group.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        replica = paceline.Replica(model, optimizer, clip_norm=1.0)
        for batch in paceline.Loader(text.train, global_batch=16, num_steps=num_steps):
            logits = replica(batch.inputs).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            replica.backward(loss, weight=batch.count())
            result = replica.update()
            step = replica.num_updates
            if group.rank == 0 and (step % 20 == 0 or step in (1, num_steps)):
                print(f"step {step}: loss {result.loss:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with Paceline as a library.")
    parser.add_argument("--num-steps", type=int, default=100, help="optimizer updates")
    train(parser.parse_args().num_steps)
