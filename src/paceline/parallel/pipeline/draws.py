"""Random numbers of a model's own forward, which runs on every rank of a pipeline and must draw the same on all."""

from typing import Any

import torch

_DRAWING = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "binomial", "random_", "uniform_", "normal_", "bernoulli_", "exponential_", "geometric_",
    "log_normal_", "cauchy_", "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "alpha_dropout_", "feature_dropout", "feature_alpha_dropout", "rrelu", "rrelu_", "gumbel_softmax",
}  # fmt: skip
"""Names of functions of torch that draw."""
_STRIDE = 0x9E3779B97F4A7C15
_NUM_SEEDS = 2**62


def draws(func: Any, kwargs: Any) -> bool:
    """Return whether a function draws from torch's own generator."""
    return getattr(func, "__name__", "") in _DRAWING and kwargs.get("generator") is None


def draw_seed() -> int:
    """Return a new random seed."""
    return int(torch.randint(_NUM_SEEDS, ()))


class SharedDraws:
    """Random numbers of one run of a forward: the same wherever it has the same seed.

    The generator is as before after each of them, so that blocks draw as they did.

    Args:
        seed: The random seed.
        device: Device of the model.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._devices = [device] if device.type == "cuda" else []

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that draws."""
        if _is_recomputed():
            return func(*args, **kwargs)
        self._seed = (self._seed + _STRIDE) % _NUM_SEEDS
        with torch.random.fork_rng(self._devices):
            torch.default_generator.manual_seed(self._seed)
            for device in self._devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(self._seed)
            return func(*args, **kwargs)


def _is_recomputed() -> bool:
    """Return whether `torch.utils.checkpoint` will run this again in backward, where it knows the generator's state."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__qualname__", "")
