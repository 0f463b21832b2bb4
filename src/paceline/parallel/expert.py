"""Experts that the ranks of the expert axis share, each with its own samples.

Shapes: N tokens of this rank, K experts of a token, W width.
"""

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils._pytree import SequenceKey, keystr, tree_flatten_with_path, tree_map_only, tree_map_with_path

from paceline.data.batch import call, map_tensors
from paceline.errors import SettingsError
from paceline.parallel.activations import Activations
from paceline.parallel.context import full_sequences
from paceline.parallel.local import local
from paceline.parallel.mesh import Mesh
from paceline.parallel.mixture_of_experts import Experts, MixtureOfExperts, list_mixtures
from paceline.parallel.own_forward import note_split, running_forward
from paceline.parallel.parameter_hooks import ADVICE as HOOKS_ADVICE
from paceline.parallel.parameter_hooks import keep_hooks, list_hooks
from paceline.parallel.start import broadcast_sample
from paceline.parallel.tensor import distribute
from paceline.parallel.tensor_proof import relative_error, tolerance
from paceline.parallel.tensor_styles import apply
from paceline.parallel.token_exchange import TokenExchange
from paceline.parallel.trial import restored, undisturbed, vary, without_constants
from paceline.topology.layout import Layout

_KINDS: set[type[nn.Module]] = {Experts}
_TRANSFORMERS = ("hidden_states", "top_k_index", "top_k_weights")
"""Parameters of the forward of experts in the transformers library."""


def register_experts(kind: type[nn.Module]) -> type[nn.Module]:
    """Let an expert axis divide the modules of a class; may decorate it.

    Each parameter of such a module has the experts in its first dim, and ``forward(x_NW, index_NK, weight_NK)`` returns
    for each token the sum of its experts, each times its weight; an index of `num_experts`, an attribute of the module,
    stands for none. It may take further arguments: a tensor with a row for each token goes where its token goes, and
    all else must be the same for all samples. Experts of the transformers library (Mixtral, Qwen, DeepSeek, ...) are
    known without it.
    """
    _KINDS.add(kind)
    return kind


def find_experts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of experts in a model, by name."""
    return {name: part for name, part in module.named_modules() if _is_experts(part)}


def check_experts(module: nn.Module, layout: Layout) -> None:
    """Raise `SettingsError` if a layout cannot lay out a model's experts."""
    for name, mixture in list_mixtures(module):
        if reason := _find_reason(mixture, layout):
            raise SettingsError(f"a layout must fit the model's experts, but {name} has {reason}")
    if layout.expert == 1:
        return
    found = find_experts(module)
    if not found:
        raise SettingsError(
            f"a model for expert({layout.expert}) must have experts, but the {type(module).__name__} has none that are "
            "known; build it of paceline.parallel.MixtureOfExperts, name the class of its experts with one line, "
            "paceline.parallel.register_experts(MyExperts), or set Layout(expert=1) (--layout.expert 1)"
        )
    for name, experts in found.items():
        number = _num_experts(experts)
        if number < 1:
            raise SettingsError(
                f"experts must have their number as an attribute num_experts, but {name}, a {type(experts).__name__}, "
                "has none; set it where the class is made"
            )
        if layout.pipeline > 1 and type(experts) is not Experts:
            raise SettingsError(
                f"experts beside pipeline({layout.pipeline}) must be those of paceline.parallel.MixtureOfExperts, but "
                f"{name} is a {type(experts).__name__}, which is compared with the whole one before; leave the "
                "pipeline or the expert axis out"
            )
        wrong = [path for path, p in experts.named_parameters() if p.dim() < 2 or p.shape[0] != number]
        if wrong:
            raise SettingsError(
                f"each parameter of experts must have the {number} experts in its first dim, but {name}.{wrong[0]} has "
                f"the shape {tuple(experts.get_parameter(wrong[0]).shape)}; stack the experts' parameters"
            )
        held = [path for path, b in experts.named_buffers() if b.dim() and b.shape[0] == number]
        if held:
            raise SettingsError(
                f"a buffer of experts must be of all of them for expert({layout.expert}), which divides parameters "
                f"only, but {name}.{held[0]} has the {number} experts in its first dim; keep it in the module around"
            )
        hooked = [path for path, p in experts.named_parameters() if list_hooks(p)]
        if hooked:
            raise SettingsError(
                f"a parameter of experts must have no hooks on its gradient for expert({layout.expert}), whose ranks "
                f"have a part of it each, but {name}.{hooked[0]} has; {HOOKS_ADVICE}"
            )
        if number % layout.expert:
            raise SettingsError(
                f"the number of experts must be a multiple of expert({layout.expert}), but {name} has {number} = "
                f"{layout.expert} * {number // layout.expert} + {number % layout.expert}; choose another layout"
            )


def _find_reason(mixture: MixtureOfExperts, layout: Layout) -> str:
    limits = "capacity and balance are of whole samples"
    if layout.tensor > 1:
        return f"matrices that no plan splits over tensor({layout.tensor}); take the expert axis instead"
    if layout.context > 1 and mixture.needs_whole_samples:
        return (
            f"parts of samples with context({layout.context}), while {limits}; set capacity_factor to none and balance "
            "to 0, or leave the context axis out"
        )
    if layout.pipeline > 1 and mixture.balance:
        return (
            f"a balance of {mixture.balance:g}, whose loss a stage of pipeline({layout.pipeline}) cannot add unless it "
            "is the last; set balance to 0, with a capacity_factor, or leave the pipeline out"
        )
    return ""


def split_experts(module: nn.Module, mesh: Mesh, sample: Any) -> list[TokenExchange]:
    """Divide a model's experts among the ranks of the expert axis, in place.

    Parameters become DTensors on ``mesh.device_mesh["expert"]``: those of experts split along their first dim, all
    others whole, whose gradients are still to be summed over the axis; modules see their part as a plain tensor. Each
    rank trains on its own samples, and experts see those of all. With one rank the module does not change.

    Args:
        module: Module to split, the same on every rank of the axis.
        mesh: Mesh of the layout.
        sample: Model inputs of a sample, by which experts that are not ours are proved to compute what they did.

    Raises:
        SettingsError: The experts do something else when they are divided.
    """
    if mesh.size("expert") == 1:
        return []
    found = find_experts(module)
    if any(type(experts) is not Experts for experts in found.values()):
        with full_sequences(module), undisturbed(module), without_constants(module):
            proofs = _start_proofs(module, found, broadcast_sample(sample, mesh.world))
            exchanges = _divide(module, found, mesh)
            for proof in proofs:
                proof.compare(mesh)
        return exchanges
    return _divide(module, found, mesh)


def _divide(module: nn.Module, found: Mapping[str, nn.Module], mesh: Mesh) -> list[TokenExchange]:
    counts = {name: _num_experts(experts) for name, experts in found.items()}
    held = {id(parameter) for experts in found.values() for parameter in experts.parameters()}
    placements: dict[int, Placement] = {id(p): Shard(0) if id(p) in held else Replicate() for p in module.parameters()}
    activations = Activations(mesh.device_mesh["expert"], cuts_tokens=False)
    before = dict(module.named_parameters())
    distribute(module, placements, activations.device_mesh)
    note_split(module)
    keep_hooks([(before[name], parameter) for name, parameter in module.named_parameters()])
    for name, part in list(module.named_modules()):
        attributes = {"num_experts": counts[name] // mesh.size("expert")} if name in found else {}
        apply("replicate", part, activations, is_in_block=False, attributes=attributes)
    group = mesh.group("expert").duplicate("tokens of experts")
    mixtures = {mixture.experts: mixture for _, mixture in list_mixtures(module)}
    return [TokenExchange(name, experts, group, counts[name], mixtures.get(experts)) for name, experts in found.items()]


class _Proof:
    """Comparison of divided experts with whole ones, on the tokens of a sample: outputs and gradients."""

    def __init__(self, name: str, module: nn.Module, given: inspect.BoundArguments) -> None:
        self._name, self._module, self._given = name, module, given
        self._passed: set[str] = set()  # results of which this rank has all, unlike gradients of parameters
        self._whole = self._run()

    def compare(self, mesh: Mesh) -> None:
        """Raise `SettingsError` on all ranks if the experts compute something else on one."""
        said = self._find_difference(mesh.size("expert"), mesh.coordinate("expert"))
        if wrong := next(filter(None, mesh.world.gather_documents(said, name="comparison of divided experts")), ""):
            raise SettingsError(
                f"divided experts must compute what whole ones do, but {self._name} ({type(self._module).__name__}) "
                f"{wrong}; its experts must see each token by itself, and its output be the sum of a token's experts, "
                "each times its weight; or set Layout(expert=1) (--layout.expert 1)"
            )

    def _find_difference(self, size: int, place: int) -> str:
        try:
            with running_forward():
                found = self._run()
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
            return f"fails on a rank's part with {type(error).__name__}: {error}"
        for key, whole in self._whole.items():
            # Every rank sends the same tokens, so that experts see each as often as there are ranks.
            expected = whole if key in self._passed else whole.chunk(size)[place] * size
            gap = relative_error(found[key], expected, float(whole.norm()) / size)
            if gap > tolerance(whole.dtype):
                return f"has another {key}, by {gap:.1e} of its size"
        return ""

    def _run(self) -> dict[str, Tensor]:
        first = [*self._given.arguments][:3]
        num_tokens = len(self._given.arguments[first[0]])
        inputs: dict[str, Tensor] = {}

        def copy(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            tensor = leaf.clone()
            if leaf.is_floating_point() and leaf.shape[:1] == (num_tokens,):
                inputs[f"gradient of {keystr(path)}"] = tensor.requires_grad_()
            return tensor

        given = inspect.BoundArguments(
            self._given.signature, OrderedDict(tree_map_with_path(copy, dict(self._given.arguments)))
        )
        with torch.enable_grad():
            output = self._module(*given.args, **given.kwargs)
            factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
            (output * factors.to(output)).sum().backward()
        results = {"output": output.detach()}
        for key, tensor in inputs.items():
            results[key] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        self._passed.update(results)
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                results[f"gradient of {name}"] = local(parameter.grad).clone()
            parameter.grad = None
        return results


def _start_proofs(module: nn.Module, experts: Mapping[str, nn.Module], sample: Any) -> list[_Proof]:
    """Return the proofs of experts, with what they are given for a sample.

    Raises:
        SettingsError: A further argument of experts depends on the tokens, but has no row for each of them, or their
            forward changes a buffer.
    """
    given = _note_arguments(module, experts, sample)
    try:
        others = _note_arguments(module, experts, vary(sample))
    except Exception:  # other values are none that the model takes
        others = {}
    for name in others.keys() & given.keys():
        _check_further(name, experts[name], given[name], others[name])
    for name, arguments in given.items():
        _check_buffers(name, experts[name], arguments)
    return [_Proof(name, experts[name], arguments) for name, arguments in given.items()]


def _note_arguments(
    module: nn.Module, experts: Mapping[str, nn.Module], sample: Any
) -> dict[str, inspect.BoundArguments]:
    noted: dict[str, inspect.BoundArguments] = {}
    hooks = []
    for name, part in experts.items():
        signature = inspect.signature(part.forward)

        def note(_: nn.Module, args: Any, kwargs: Any, name: str = name, signature: Any = signature) -> None:
            kept = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            noted[name] = signature.bind(*kept[0], **kept[1])

        hooks.append(part.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with torch.no_grad(), restored(module):
            call(module, map_tensors(torch.clone, sample))
    finally:
        for hook in hooks:
            hook.remove()
    return noted


def _check_further(name: str, module: nn.Module, given: inspect.BoundArguments, other: inspect.BoundArguments) -> None:
    """Refuse what no rank can know of the others' tokens: a value of all of them, such as their mean."""
    num_tokens = len(next(iter(given.arguments.values())))
    found = dict(tree_flatten_with_path([*other.arguments.items()][3:])[0])
    for path, leaf in tree_flatten_with_path([*given.arguments.items()][3:])[0]:
        if isinstance(leaf, Tensor):
            is_same = leaf.shape[:1] == (num_tokens,) or torch.equal(leaf, found.get(path, torch.empty(0)))
        else:
            is_same = leaf == found.get(path)
        if not is_same:
            assert isinstance(path[0], SequenceKey)
            raise SettingsError(
                f"a further argument of experts must have a row for each token or be the same for all samples, but "
                f"{[*given.arguments][3 + path[0].idx]!r} of {name} ({type(module).__name__}) depends on the sample; "
                "pass it as a row for each token, or set Layout(expert=1) (--layout.expert 1)"
            )


def _check_buffers(name: str, module: nn.Module, given: inspect.BoundArguments) -> None:
    """Refuse buffers of what experts have seen, of which each rank would keep its own."""
    before = {path: buffer.clone() for path, buffer in module.named_buffers()}
    with torch.no_grad(), restored(module):
        module.train()
        module(*tree_map_only(Tensor, torch.clone, given.args), **tree_map_only(Tensor, torch.clone, given.kwargs))
        changed = [
            path for path, buffer in module.named_buffers() if path not in before or not buffer.equal(before[path])
        ]
    if changed:
        raise SettingsError(
            "a buffer of experts must stay as it is in forward, since each rank sees the tokens of its own experts, "
            f"but {name}.{changed[0]} ({type(module).__name__}) changes; change it in the module around them, or set "
            "Layout(expert=1) (--layout.expert 1)"
        )


def _is_experts(module: nn.Module) -> bool:
    if isinstance(module, tuple(_KINDS)):
        return True
    names = tuple(inspect.signature(module.forward).parameters)[:3] if _num_experts(module) > 1 else ()
    return names == _TRANSFORMERS


def _num_experts(module: nn.Module) -> int:
    number = vars(module).get("num_experts")
    return number if isinstance(number, int) else 0
