"""BatchNorm over a worker's own samples, or exactly over those of all workers.

Ioffe and Szegedy 2015; over all workers, Peng et al. 2018 (MegDet). With one worker it is torch's own. Unlike torch's
SyncBatchNorm it runs on CPUs too, and supports borrowed samples, which do not count.

On the wire, for a layer of C channels: in forward an all-gather of 8 * (2C + 1) bytes, in backward an all-reduce of
16 * C bytes. The layer waits for both.
"""

import copyreg
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from paceline.comm.group import Group
from paceline.errors import SettingsError
from paceline.parallel.normalise import Normalise, Statistics, gather_statistics, statistics_dtype
from paceline.sync.rule import Rule
from paceline.topology.layout import Layout

BatchNormScope = Literal["local", "global"]
"""Samples of BatchNorm's statistics: a worker's own, or those of all workers."""
_TOO_FEW = "Expected more than 1 value per channel when training"
"""Beginning of torch's own error."""


def start_batch_norm(scope: BatchNormScope, module: nn.Module, group: Group) -> "LocalBatchNorm | None":
    """Give the BatchNorm layers of `module` that scope, in place, and return what runs them; None without any.

    Args:
        scope: Scope of the statistics.
        module: Module, the same on every worker; names of its tensors stay.
        group: Ranks with the same layers and different samples; each of them calls it.

    Raises:
        SettingsError: A layer cannot have that scope.
    """
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    for layer in layers.values():
        if isinstance(layer, _OverWorkers):  # from a replica that was not closed
            layer.make_plain()
    if not layers:
        return None
    return GlobalBatchNorm(layers, group) if scope == "global" and group.size > 1 else LocalBatchNorm(layers)


def check_batch_norm(scope: BatchNormScope, rule: Rule, layout: Layout, *, is_noise_measured: bool = False) -> None:
    """Raise `SettingsError` if statistics over all workers would be meaningless or impossible."""
    reason = ""
    if scope == "global" and not rule.keeps_replicas_equal:
        reason = f"with sync {rule.name}, whose workers' models differ between exchanges; take every_step"
    elif scope == "global" and layout.pipeline > 1:
        reason = f"with {layout.pipeline} pipeline ranks; leave one of them out, or take GroupNorm"
    elif scope == "global" and is_noise_measured:
        reason = "where the gradient noise scale compares workers' own gradients; leave one of them out"
    if reason:
        raise SettingsError(f"batch_norm must be local, but got global {reason}")


def too_few_values(where: str, scope: BatchNormScope = "local") -> SettingsError:
    """Return the error for BatchNorm layers of that scope that see a single value per channel, and where."""
    wider = "start fewer workers, or take statistics over all of them (batch_norm global)" if scope == "local" else ""
    return SettingsError(
        f"BatchNorm must see more than one value of each channel while it trains, but got one {where}; leave out an "
        "epoch's last samples (drop_last) or join them with the next epoch's (join_epochs), raise global_batch, take "
        f"fewer micro-batches{wider and ', '}{wider}"
    )


def too_few_samples(num_samples: int, global_batch: int, scope: BatchNormScope) -> SettingsError:
    """Return the error for BatchNorm layers of that scope that are going to see one sample of a data set."""
    whose = "all workers together" if scope == "global" else "some worker"
    cut = f"{num_samples} samples in global batches of {global_batch}"
    return too_few_values(f"where a micro-batch of {whose} has one sample ({cut})", scope)


def is_too_few_values(error: ValueError) -> bool:
    """Return whether torch raised `error` because a BatchNorm layer had a single value per channel."""
    return str(error).startswith(_TOO_FEW)


class LocalBatchNorm:
    """BatchNorm layers with statistics of this worker's own samples, as in torch.

    Args:
        layers: Layers by their names in the model.
    """

    scope: ClassVar[BatchNormScope] = "local"

    def __init__(self, layers: Mapping[str, _BatchNorm]) -> None:
        self._layers = layers
        self._is_watched = False
        self._num_values: dict[nn.Module, int] = {}

    def watch(self) -> None:
        """Note from now on how many values of a channel each layer sees in training."""
        self._is_watched = True

    def end_watch(self) -> int | None:
        """Return how many values of a channel the layer with the fewest saw last; None if none was trained."""
        self._is_watched = False
        return min(self._num_values.values(), default=None)

    @contextmanager
    def running(self, *, counts: bool) -> Iterator[None]:
        """Enter this to run the module forward, or backward if it recomputes blocks.

        Args:
            counts: Whether the samples count. Samples that do not are normalised by running statistics, which stay.

        Raises:
            SettingsError: A layer had a single value per channel.
        """
        try:
            with nullcontext() if counts else self._uncounted(), self._noting():
                yield
        except ValueError as error:
            if not is_too_few_values(error):
                raise
            raise too_few_values(f"in an input of shape {str(error).rpartition('size ')[2]}") from error

    def backward(self, loss: Tensor, *, counts: bool) -> None:
        """Run backward from `loss`, unless it does not count."""
        if counts:
            loss.backward()

    def close(self) -> None:
        """Restore the layers."""

    @contextmanager
    def _noting(self) -> Iterator[None]:
        def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            if layer.training and torch.is_grad_enabled() and inputs and isinstance(inputs[0], Tensor):
                self._num_values[layer] = inputs[0].numel() // max(1, inputs[0].shape[1])

        layers = self._layers.values() if self._is_watched else ()
        hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        layers = [layer for layer in self._layers.values() if layer.training]
        untracked = [layer for layer in layers if layer.running_mean is None]
        hooks = [layer.register_forward_pre_hook(_lend_statistics) for layer in untracked]
        for layer in layers:
            layer.training = False
        try:
            yield
        finally:
            for layer in layers:
                layer.training = True
            for hook in hooks:
                hook.remove()
            for layer in untracked:
                layer.running_mean = layer.running_var = None


def _check_layer(layer: _BatchNorm, name: str) -> None:
    reason = ""
    if isinstance(layer, nn.SyncBatchNorm):
        reason = "is a SyncBatchNorm; leave its conversion out"
    elif "forward" in vars(layer) and getattr(layer.forward, "_torchdynamo_orig_callable", None) is None:
        reason = "has another; replace it after the Replica is made"
    if reason:
        raise SettingsError(
            f"a BatchNorm layer must have the forward of its class for batch_norm global, but {name} {reason}"
        )


def _lend_statistics(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Give running statistics to a layer that has none, and would use those of its input."""
    layer.running_mean, layer.running_var = _standard(inputs[0])


def _standard(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and variance per channel that leave an input unchanged."""
    mean = input.new_zeros(input.shape[1], dtype=statistics_dtype(input))
    return mean, torch.ones_like(mean)


class GlobalBatchNorm(LocalBatchNorm):
    """BatchNorm layers with statistics of all workers' samples.

    In training every worker must run forward equally often, with gradients or without, and backward too: after the
    time-out an error names the worker that did not. Layers in evaluation exchange nothing.

    Args:
        layers: Layers by their names in the model, the same on every worker. The class of each becomes a subclass;
            copies and pickles have their own class again.
        group: The workers.

    Raises:
        SettingsError: A layer is a torch SyncBatchNorm.
    """

    scope = "global"

    def __init__(self, layers: Mapping[str, _BatchNorm], group: Group) -> None:
        super().__init__(layers)
        for name, layer in self._layers.items():
            _check_layer(layer, name)
        # A separate group, since gradients are sent while forward and backward run.
        self.group = group.duplicate("batch norm")
        self.counts = True
        """Whether this worker's samples count."""
        self.edges: list[GradientEdge] = []
        """Outputs of layers whose backward has not run."""
        for name, layer in self._layers.items():
            kind: Any = type(layer)
            compiled = vars(layer).pop("forward", None)
            layer.__class__ = _over_workers(kind)
            assert isinstance(layer, _OverWorkers)
            layer.link = _Link(self, name, compiled)

    @contextmanager
    def running(self, *, counts: bool) -> Iterator[None]:
        """See `LocalBatchNorm.running`."""
        self.counts = counts
        with super().running(counts=True):
            yield

    def backward(self, loss: Tensor, *, counts: bool) -> None:
        """Run backward also from a loss that does not count, since other workers wait for this one's part."""
        if counts or (loss.requires_grad and loss.isfinite()):
            loss.backward()
        elif self.edges:  # NaN times 0 is NaN, and would reach all workers
            shapes = [edge.node._input_metadata[edge.output_nr] for edge in self.edges]
            zeros = [torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in shapes]
            torch.autograd.backward(self.edges, zeros)
        self.edges = []

    def close(self) -> None:
        """Restore the layers, and close connections."""
        for layer in self._layers.values():
            if isinstance(layer, _OverWorkers) and layer.link.workers is self:
                layer.make_plain()
        self.edges = []
        self.group.close()


class _Call(NamedTuple):
    """Arguments that a layer in training passes to `torch.nn.functional.batch_norm`."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float
    eps: float


class _Link(NamedTuple):
    """Connection of a layer to the other workers."""

    workers: GlobalBatchNorm
    name: str
    """Name of the layer."""
    compiled: Callable[..., Any] | None
    """Forward that `torch.compile` made for this layer alone, if any: it cannot communicate."""


class _Normalising(TorchFunctionMode):
    """Replaces `torch.nn.functional.batch_norm`, inside and in training, by `function`.

    The rest of a layer's forward stays, whatever its class.
    """

    def __init__(self, function: Callable[[_Call], Tensor]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._call if func is F.batch_norm else func)(*args, **(kwargs or {}))

    def _call(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        return self._function(_Call(input, running_mean, running_var, weight, bias, momentum, eps))


def _by_running_statistics(call: _Call) -> Tensor:
    mean, variance = call.running_mean, call.running_var
    if mean is None or variance is None:
        mean, variance = _standard(call.input)
    return F.batch_norm(call.input, mean, variance, call.weight, call.bias, eps=call.eps)


class _OverWorkers(_BatchNorm):
    """A BatchNorm layer, of any class, with statistics of all workers."""

    link: _Link
    plain: ClassVar[type[_BatchNorm]]
    """Own class of the layer."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        """Run the forward of the layer's own class."""
        if not self.training:
            return super().forward(input)
        with _Normalising(self._normalise):
            return super().forward(input)

    def make_plain(self) -> None:
        """Restore the layer's own class."""
        if self.link.compiled is not None:
            self.forward = self.link.compiled
        del self.link
        self.__class__ = self.plain  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copies and pickles of the layer's own class."""
        state = {key: value for key, value in vars(self).items() if key != "link"}
        return copyreg._reconstructor, (self.plain, object, None), state  # type: ignore[attr-defined]

    def _normalise(self, call: _Call) -> Tensor:
        (workers, name, _), operation = self.link, f"batch norm {self.link.name}"
        statistics = gather_statistics(call.input, workers.group, operation, counts=workers.counts)
        # Only a worker with fewer than 2 values of its own needs the total, for which the host would wait for a GPU.
        if statistics.num_own_values < 2 and statistics.num_values < 2:
            if statistics.num_values:
                raise too_few_values(f"of all workers together in {name}", "global")
            if self.track_running_stats and self.num_batches_tracked is not None:
                self.num_batches_tracked -= 1  # its own forward has counted the batch
            return _by_running_statistics(call)
        _update_running(call, statistics)
        output: Tensor = Normalise.apply(  # type: ignore[no-untyped-call]
            call.input, call.weight, call.bias, statistics, call.eps, workers.group, f"gradient of {operation}"
        )
        if output.requires_grad:
            workers.edges.append(get_gradient_edge(output))
        return output


@torch.no_grad()
def _update_running(call: _Call, statistics: Statistics) -> None:
    if call.running_mean is None or call.running_var is None:
        return
    unbiased = statistics.variance * (statistics.num_values / (statistics.num_values - 1))
    call.running_mean.lerp_(statistics.mean.to(call.running_mean.dtype), call.momentum)
    call.running_var.lerp_(unbiased.to(call.running_var.dtype), call.momentum)


@functools.cache
def _over_workers(kind: Any) -> Any:
    """Return the subclass of `kind` with statistics of all workers."""
    return type(f"Global{kind.__name__}", (_OverWorkers, kind), {"__module__": kind.__module__, "plain": kind})
