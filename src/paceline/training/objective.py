"""What a run minimises: a loss that carries its weight, and the metrics beside it."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.base import Source
from paceline.data.batch import Batch, call
from paceline.data.masked_text import NOT_ASKED, NUM_SPECIAL_TOKENS
from paceline.registry import Family, register
from paceline.replica.loss import Loss

NUM_BYTES = 256
BLOT = "▯".encode()


class Objective(Family):
    """Settings of what is minimised."""

    family = "objective"

    @abstractmethod
    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the loss of `model` on `batch`."""

    def loss_of_output(self, output: Any, batch: Batch) -> Loss:
        """Return the loss of what a model has made of a batch."""
        return self.loss(lambda *_, **__: output, batch)

    def showcase(self, module: nn.Module, held_out: Source) -> str | None:
        """Return a text that shows what the trained module can do, or None."""
        return None


@register("next_token")
class NextToken(Objective):
    """Cross entropy of the next token, a mean over tokens.

    Targets x_BT; the model's output is logits x_BTV, or an object that holds them as ``logits`` (as those of the
    transformers library do).
    """

    sample_tokens: int = 200
    """Length of the text that is generated after training; 0 for none."""
    temperature: float = 0.8
    """Of that sampling; higher is more varied."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean over tokens, weighted by tokens."""
        logits = _logits(call(model, batch.inputs))
        mean = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())
        return Loss(mean, batch.num_samples * batch.targets.shape[-1])

    def showcase(self, module: nn.Module, held_out: Source) -> str | None:
        """Continue the start of the held-out text."""
        if not self.sample_tokens or held_out.spec.num_classes != NUM_BYTES:
            return None
        device = next(module.parameters()).device
        context_length = held_out[0][0].shape[-1]
        tokens = held_out[0][0][None, : max(1, context_length // 4)].to(device)
        generator = torch.Generator(device).manual_seed(0)
        prompt_length = tokens.shape[1]
        training = module.training
        module.eval()
        with torch.no_grad():
            for _ in range(self.sample_tokens):
                logits = _logits(module(tokens[:, -context_length:]))[:, -1]
                probabilities = torch.softmax(logits / self.temperature, dim=-1)
                tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        module.train(training)
        as_text = [
            bytes(part.tolist()).decode("utf-8", errors="replace")
            for part in (tokens[0, :prompt_length], tokens[0, prompt_length:])
        ]
        return f"{as_text[0]}▸{as_text[1]}"


@register("masked_lm")
class MaskedLM(Objective):
    """Cross entropy of the tokens that were drawn, a mean over these (Devlin et al. 2019).

    Targets x_BT are `NOT_ASKED` but at those; the model's output is logits x_BTV, or an object that holds them as
    ``logits``.
    """

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean over tokens that are asked for, weighted by their number, and how many were right."""
        # Counted before the model runs, so that on a GPU nothing but the batch itself is waited for.
        num_asked = int((batch.targets != NOT_ASKED).sum()) if batch.num_samples else 0
        logits = _logits(call(model, batch.inputs))
        total = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=NOT_ASKED, reduction="sum")
        correct = (logits.detach().argmax(-1) == batch.targets).sum() * min(num_asked, 1)
        return Loss(total / max(num_asked, 1), num_asked, {"accuracy": correct})

    def showcase(self, module: nn.Module, held_out: Source) -> str | None:
        """Show a held-out text with its drawn bytes blotted out, and with what the module puts there."""
        if held_out.spec.num_classes != NUM_BYTES + NUM_SPECIAL_TOKENS:
            return None
        tokens, targets = held_out[0]
        is_asked = targets != NOT_ASKED
        training = module.training
        module.eval()
        with torch.no_grad():
            logits = _logits(module(tokens[None].to(next(module.parameters()).device)))
        module.train(training)
        guessed = torch.where(is_asked, logits[0, :, :NUM_BYTES].argmax(-1).cpu(), tokens)
        blotted = [BLOT if asked else bytes([token]) for token, asked in zip(guessed.tolist(), is_asked, strict=True)]
        as_text = [part.decode("utf-8", errors="replace") for part in (b"".join(blotted), bytes(guessed.tolist()))]
        return f"{as_text[0]}\n▸\n{as_text[1]}"


@register("classification")
class Classification(Objective):
    """Cross entropy of the class, a mean over samples. Targets x_B; the model's output is logits x_BC."""

    label_smoothing: float = 0.0
    """Probability mass spread over all classes (Szegedy 2016)."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean over samples, and how many answers were right."""
        logits = _logits(call(model, batch.inputs))
        mean = F.cross_entropy(logits, batch.targets, label_smoothing=self.label_smoothing)
        counts = min(batch.num_samples, 1)  # a borrowed sample counts for nothing
        correct = (logits.detach().argmax(-1) == batch.targets).sum() * counts
        return Loss(mean, batch.num_samples, {"accuracy": correct})


def _logits(output: Any) -> Tensor:
    """Return the logits, in 32 bits at least."""
    logits = output if isinstance(output, Tensor) else output.logits
    assert isinstance(logits, Tensor)
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
