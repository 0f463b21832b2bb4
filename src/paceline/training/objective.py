"""The training loss of a run, with its weight, and metrics beside it."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from paceline.data.base import Source
from paceline.data.batch import Batch, call, describe
from paceline.data.masked_text import NOT_ASKED, NUM_SPECIAL_TOKENS
from paceline.errors import SettingsError
from paceline.functions import Function
from paceline.registry import Family, register
from paceline.replica.loss import Loss

NUM_BYTES = 256
BLOT = "▯".encode()


class Objective(Family):
    """Settings of a training loss."""

    family = "loss"

    @abstractmethod
    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the loss of `model` on `batch`."""

    def loss_of_output(self, output: Any, batch: Batch) -> Loss:
        """Return the loss of a model's output for a batch."""
        return self.loss(lambda *_, **__: output, batch)

    def inputs_of(self, batch: Batch) -> Any:
        """Return what the model is called with for a batch."""
        return batch.inputs

    def showcase(self, module: nn.Module, held_out: Source) -> str | None:
        """Return a text that demonstrates the trained module, or None."""
        return None


class OnBatch(Function):
    """A function of a batch and of the model or its output, by the name of its first parameter."""

    given: ClassVar[tuple[str, ...]] = ("the model or its output", "the batch")

    @model_validator(mode="after")
    def _check_first(self) -> Self:
        if self.first_parameter not in ("model", "output"):
            raise SettingsError(
                f"the first parameter of {self.path} must be called model, for a function that calls the model, or "
                f"output, for one of what the model returned, but got {self.first_parameter!r}; rename it, or give a "
                "function of your own, such as def loss(output, batch): return cross_entropy(output, batch.targets)"
            )
        return self

    @property
    def takes_model(self) -> bool:
        """Whether the function calls the model itself."""
        return self.first_parameter == "model"


@register("function")
class FunctionLoss(OnBatch, Objective):
    """The loss that a function returns.

    The function takes ``(model, batch)``, where the model is called like the module and has its attributes and methods
    (the module itself is its ``module``), or ``(output, batch)``. It returns a `Loss`; a mean over the batch's samples;
    or a pair of a mean and its weight, such as the number of tokens in it. A layout with a pipeline takes
    ``(output, batch)``.
    """

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Call the function."""
        return self.loss_of_output(model if self.takes_model else call(model, batch.inputs), batch)

    def loss_of_output(self, output: Any, batch: Batch) -> Loss:
        """Call the function with its parameters.

        Raises:
            SettingsError: The function returns something else than a loss.
        """
        made = self.call(output, batch)
        if isinstance(made, Tensor):
            made = (made, batch.count())
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor):
            made = Loss(made[0], float(made[1]))
        if not isinstance(made, Loss) or not isinstance(made.mean, Tensor) or made.mean.dim():
            self._refuse(made.mean if isinstance(made, Loss) else made)
        if batch.num_samples:
            return made
        # The sample is borrowed, and the function cannot know that it does not count.
        return Loss(made.mean, 0.0, {name: total * 0 for name, total in made.totals.items()})

    def inputs_of(self, batch: Batch) -> Any:
        """Return the arguments of the function's first call of the model, or those that a model gets by default."""
        if not self.takes_model:
            return batch.inputs
        try:
            self.call(_call_of_model, batch)
        except _ModelCalledError as called:
            return called.inputs or batch.inputs
        except Exception:  # of a function that does more than call the model, such as to use its attributes
            return batch.inputs
        return batch.inputs

    def _refuse(self, made: Any) -> NoReturn:
        advice = "take the mean"
        if made is None or (isinstance(made, tuple) and None in made[:1]):
            advice = "return one"
            if not self.takes_model:
                advice = (
                    "a model of the transformers library was not given the labels, so that its output.loss is None: "
                    "compute the loss from output.logits and batch.targets, such as by "
                    "loss next_token (--loss next_token)"
                )
        raise SettingsError(
            f"{self.path} must return a loss: a 0-dim tensor that is a mean over samples, a pair (mean, weight), "
            f"or a paceline.Loss, but got {describe(made)}; {advice}"
        )


class _ModelCalledError(Exception):
    """Call of the model, with all inputs by position or all by name; none where they are mixed."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the model is called")
        self.inputs: Any = () if args and kwargs else args or kwargs


def _call_of_model(*args: Any, **kwargs: Any) -> NoReturn:
    raise _ModelCalledError(args, kwargs)


@register("next_token")
class NextToken(Objective):
    """Cross entropy of the next token, a mean over tokens whose target is not -100.

    The model's output is logits x_BTV, or an object with ``logits``. A pair's targets x_BT are the next
    tokens. A mapping's ``labels`` are the tokens themselves, as in the transformers library: the logits of each
    position are compared with the next label. Such a model's own ``loss`` is not used, since its number of tokens is
    unknown: shares with different numbers of tokens would be averaged wrongly.
    """

    sample_tokens: int = 200
    """Length of the text that is generated after training; 0 for none."""
    temperature: float = 0.8
    """Temperature of that sampling; higher is more varied."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean over tokens, weighted by tokens."""
        # In host memory, so that the host does not wait for a GPU.
        counted = batch.on_host
        num_tokens = counted.count(counted.next_labels != NOT_ASKED)
        logits, targets = _logits(call(model, batch.inputs)), batch.next_labels
        total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=NOT_ASKED, reduction="sum")
        return Loss(total / max(num_tokens, 1.0), num_tokens)

    def showcase(self, module: nn.Module, held_out: Source) -> str | None:
        """Continue the start of the held-out text."""
        if not self.sample_tokens or held_out.spec.num_classes != NUM_BYTES:
            return None
        device = next(module.parameters()).device
        inputs = held_out[0][0]
        start = inputs[0] if isinstance(inputs, tuple) else inputs  # packed rows have more inputs than tokens
        context_length = start.shape[-1]
        tokens = start[None, : max(1, context_length // 4)].to(device)
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
    """Cross entropy of the masked tokens, a mean over these (Devlin et al. 2019).

    Targets x_BT, or the ``labels`` of a mapping, are -100 at all other tokens; the model's output is logits x_BTV, or
    an object with ``logits``.
    """

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean over tokens to predict, weighted by their number, and the number of correct ones."""
        # In host memory, so that the host does not wait for a GPU.
        counted = batch.on_host
        num_asked = counted.count(counted.targets != NOT_ASKED)
        logits = _logits(call(model, batch.inputs))
        total = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=NOT_ASKED, reduction="sum")
        correct = (logits.detach().argmax(-1) == batch.targets).sum() * int(num_asked > 0)
        return Loss(total / max(num_asked, 1.0), num_asked, {"accuracy": correct})

    def showcase(self, module: nn.Module, held_out: Source) -> str | None:
        """Show a held-out text with its masked bytes hidden, and with the module's predictions."""
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
    """Cross entropy of the class, a mean over samples.

    Targets are x_B, or probabilities x_BC of mixed samples, or the ``labels`` of a mapping; the model's output is
    logits x_BC, or an object with ``logits``.
    """

    label_smoothing: float = 0.0
    """Probability mass spread over all classes (Szegedy 2016)."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean over samples, and the number of correct answers."""
        logits = _logits(call(model, batch.inputs))
        mean = F.cross_entropy(logits, batch.targets, label_smoothing=self.label_smoothing)
        counts = min(batch.num_samples, 1)  # a borrowed sample does not count
        labels = batch.targets.argmax(-1) if batch.targets.is_floating_point() else batch.targets
        correct = (logits.detach().argmax(-1) == labels).sum() * counts
        return Loss(mean, batch.num_samples, {"accuracy": correct})


def _logits(output: Any) -> Tensor:
    """Return the logits, in 32 bits at least."""
    logits = output if isinstance(output, Tensor) else output.logits
    assert isinstance(logits, Tensor)
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
