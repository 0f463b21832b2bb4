"""A layout applied to a model: the shard of each rank, made in the one order in which the axes can be combined."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.group import Group
from paceline.comm.join import find_group
from paceline.compression.codec import Codec
from paceline.data.batch import describe, list_tensors, map_tensors
from paceline.errors import SettingsError
from paceline.parallel.block_use import agree_on_blocks
from paceline.parallel.context import check_attention, check_length, full_sequences, is_foreign, split_attention
from paceline.parallel.deferred import Construction
from paceline.parallel.expert import check_experts, split_experts
from paceline.parallel.fully_sharded import adopt_parameters, check_parameters, shard_module, tied
from paceline.parallel.loss_graph import FormerParameters
from paceline.parallel.mesh import Mesh
from paceline.parallel.model_shard import ModelShard
from paceline.parallel.parameter_hooks import check_hooks
from paceline.parallel.pipeline import Pipeline, PipelineSettings
from paceline.parallel.pipeline.costs import cut_at
from paceline.parallel.pipeline.layers import list_layers
from paceline.parallel.pipeline.traced import find_layers, is_listed
from paceline.parallel.reduce_scatter import CodedReduceScatter
from paceline.parallel.second_order import refuse_transforms
from paceline.parallel.start import broadcast_module, broadcast_sample, check_same_model
from paceline.parallel.tensor import TensorSplit, split
from paceline.parallel.tensor_check import Runs, SplitCheck
from paceline.parallel.tensor_derivation import find_plan, is_derived
from paceline.parallel.tensor_plan import TensorPlan, make_plan
from paceline.parallel.trial import restored, undisturbed, without_constants
from paceline.topology.layout import Axis, Layout


def parallelize(
    module: nn.Module,
    layout: Layout,
    *,
    group: Group | None = None,
    tensor_plan: Mapping[str, str] | TensorPlan | None = None,
    pipeline: PipelineSettings | None = None,
    sharded_codec: Codec | None = None,
    sample: Any = None,
    gather_dtype: torch.dtype | None = None,
    construction: Construction | None = None,
    num_samples: int = 1,
) -> nn.Module:
    """Split a model over the ranks of a layout, and return this rank's part: the module to train.

    First the layers are split into stages, then those of each over the tensor axis, or their experts over the expert
    axis, then other parameters are sharded. Build the optimizer from the returned module, and give both to a `Replica`.
    A `Loader` made afterwards gives ranks of one worker the same samples, and each rank its part of their tokens.

    Args:
        module: Whole model, built on every rank; rank 0's values are used.
        layout: Axes, whose product is the number of ranks.
        group: Group of all ranks, processes if they share a model; by default the one that `paceline.join` has joined.
        tensor_plan: Styles (`Style`) of modules on the tensor axis, by patterns of their names
            (``layers.*.attention.project``): the last match counts, and unmatched modules are whole. By default what
            registered types say (`register_styles`), the model's own plan, or what is proved to be possible.
        pipeline: Settings of the stages and their order; needed for a pipeline only.
        sharded_codec: Codec of the gradients on the sharded axis; None sends them uncompressed.
        sample: Model inputs of at least one sample (a mapping by name), rank 0's. A pipeline's layers are found by it,
            and a model split over a tensor axis, or of other experts than `Experts`, is compared with the whole one.
        gather_dtype: Dtype in which sharded ranks gather parameters of ZeRO's stages 2 and 3, and run forward; by
            default the parameters' own. With bf16 half as many bytes are sent. Sums of gradients keep their own.
        construction: Construction of a module without memory, the same on every rank (`paceline.parallel.defer`), of
            which each makes only its part, or first the whole if that is run (`needs_values`).
        num_samples: Samples of a worker's micro-batch, for which a pipeline is balanced.

    Raises:
        SettingsError: The layout does not fit the ranks or the model.
    """
    world = group or find_group()
    axes, settings = layout.resolve(world.size), pipeline or PipelineSettings()
    check_sharding(layout, sharded_codec, settings)
    if layout.is_plain:
        _finish(construction, module, None, world)
        return _note(ModelShard(world, layout, module=module))
    _check_loaders(world)
    mesh, former = Mesh(world, axes), FormerParameters(module)
    construction, sample = _begin_alike(module, layout, settings, sample, world, construction)
    blocks, has_sample = agree_on_blocks(module, sample, mesh) if layout.shards_parameters else ([], False)
    plan: TensorPlan | None = None
    if layout.tensor > 1:
        sample = broadcast_sample(sample, world)
        plan = _agree_on_plan(module, tensor_plan, sample, mesh)
    boundaries = _list_boundaries(module, sample, settings) if min(layout.tensor, layout.pipeline) > 1 else {}
    is_context_split = layout.context > 1 and is_foreign(module)
    if is_context_split:
        check_tokens(sample, layout)
        split_attention(module, mesh, sample)
    driver = _cut_into_stages(module, mesh, layout, settings, sample, num_samples)
    tensor_split = _split_checked(module, mesh, plan, _list_runs(module, driver, sample, boundaries)) if plan else None
    if layout.context > 1 and not is_context_split:
        split_attention(module, mesh)
    _check_length(sample, mesh, plan)
    _shard_stages(module, driver, mesh, layout, blocks, gather_dtype)
    _finish(construction, module, driver, world)
    shard = ModelShard(
        mesh.group("data", "context", *(() if layout.shards_parameters else ("sharded",))),
        layout,
        mesh,
        module=module,
        pipeline=driver,
        tensor_split=tensor_split,
        reduce_scatter=CodedReduceScatter(module, mesh, sharded_codec) if sharded_codec is not None else None,
        experts=split_experts(module, mesh, sample),
        has_sample=has_sample,
        former=former,
    )
    return _note(shard)


def _check_loaders(world: Group) -> None:
    if world.membership.loaders:
        raise SettingsError(
            "a loader must be made after parallelize, which assigns samples to ranks, but one exists; make it later"
        )


def _find_peers(mesh: Mesh, layout: Layout) -> Group | None:
    """Return the ranks that must run their stages as often as this one, since they exchange inside them."""
    axes: list[Axis] = ["sharded"] if layout.shards_parameters else ["expert"] if layout.expert > 1 else []
    return mesh.group(*axes) if axes else None


def needs_values(module: nn.Module, layout: Layout, pipeline: PipelineSettings) -> bool:
    """Return whether `parallelize` runs the whole model, to find how it is split and to compare what comes of it."""
    finds_layers = layout.pipeline > 1 and not (pipeline.sequence or is_listed(module))
    return layout.tensor > 1 or layout.expert > 1 or finds_layers or (layout.context > 1 and is_foreign(module))


def _begin_alike(
    module: nn.Module,
    layout: Layout,
    settings: PipelineSettings,
    sample: Any,
    world: Group,
    construction: Construction | None,
) -> tuple[Construction | None, Any]:
    """Give every rank rank 0's values, unless the construction that is returned gives each its part later.

    Returns:
        The construction, and the sample on the module's device.
    """
    check_hooks(module, layout)
    check_experts(module, layout)
    check_same_model(module, world)
    sample = _take_two(module, sample) if layout.pipeline > 1 else sample
    if construction is not None and not needs_values(module, layout, settings):
        return construction, map_tensors(lambda tensor: tensor.to("meta"), sample)
    _finish(construction, module, None, world)
    broadcast_module(module, world)
    return None, sample


def _cut_into_stages(
    module: nn.Module, mesh: Mesh, layout: Layout, settings: PipelineSettings, sample: Any, num_samples: int
) -> Pipeline | None:
    """Split a module into stages, if there is a pipeline, in place, by measures of whole sequences."""
    if layout.pipeline == 1:
        return None
    num_samples //= settings.count_micro_batches(num_samples, layout.pipeline)
    with full_sequences(module):
        driver = Pipeline(module, mesh, settings, sample, _find_peers(mesh, layout), num_samples)
        tensors = [*list_tensors(sample), *driver.module.parameters()]
        if list_tensors(sample) and not any(one.is_meta or isinstance(one, FakeTensor) for one in tensors):
            driver.try_step(tuple(list_tensors(sample)))
        return driver


def _finish(construction: Construction | None, module: nn.Module, driver: Pipeline | None, world: Group) -> None:
    """Give this rank's part of a model without memory its values."""
    if construction is None:
        return
    construction.finish(module, world.device)
    for part in driver.stages if driver is not None else [module]:
        adopt_parameters(part)


def _list_runs(module: nn.Module, driver: Pipeline | None, sample: Any, boundaries: Mapping[str, Any]) -> Runs:
    """Return the runs that prove a tensor plan: of the model, or of each stage of this rank on what it gets."""
    if driver is None:
        return [(module, sample, False)]
    return [(stage, boundaries[stage.layers[0].name], stage.index > 0) for stage in driver.stages]


def _check_length(sample: Any, mesh: Mesh, plan: TensorPlan | None) -> None:
    """Raise `SettingsError` if a sample's sequences cannot be split over the context axis."""
    if sample is not None and mesh.size("context") > 1:
        num_parts = mesh.size("tensor") if plan is not None and plan.cuts_tokens else 1
        check_length(list_tensors(sample)[0].shape[1], context=mesh.size("context"), tensor=num_parts)


def _split_checked(module: nn.Module, mesh: Mesh, plan: TensorPlan, runs: Runs) -> TensorSplit:
    """Split a module over the tensor axis, and refuse the plan if it computes something else then.

    In a rehearsal, whose parameters have no contents, there is nothing to compare.
    """
    if any(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
        return split(module, mesh, plan)
    with full_sequences(module), undisturbed(module), without_constants(module):
        check = SplitCheck(module, runs, plan, position=mesh.coordinate("tensor"), size=mesh.size("tensor"))
        tensor_split = split(module, mesh, plan)
        check.compare(mesh.world)
    return tensor_split


def try_plan(module: nn.Module, patterns: Mapping[str, str] | None, size: int, sample: Any) -> TensorPlan:
    """Return the tensor plan that this rank finds for a whole model; see `find_plan`."""
    with restored(module), undisturbed(module), without_constants(module):
        return find_plan(module, patterns, size, sample)


def _agree_on_plan(
    module: nn.Module, patterns: Mapping[str, str] | TensorPlan | None, sample: Any, mesh: Mesh
) -> TensorPlan:
    """Return rank 0's plan, since ranks with other devices may round otherwise where they try plans."""
    if isinstance(patterns, TensorPlan):
        return patterns
    plan = try_plan(module, patterns, mesh.size("tensor"), sample)
    mine = [dict(plan.styles), {name: dict(seen) for name, seen in plan.attributes.items()}]
    styles, attributes = mesh.world.gather_documents(mine, name="tensor plan")[0]
    return TensorPlan(styles, attributes, plan.patterns)


def _list_boundaries(module: nn.Module, sample: Any, settings: PipelineSettings) -> dict[str, Any]:
    """Return the inputs of each layer of a pipeline, for a sample."""
    boundaries: dict[str, Any] = {}
    given = tuple(list_tensors(sample))
    value: Any = given[0] if len(given) == 1 else given
    with restored(module), undisturbed(module), torch.no_grad():
        for layer in find_layers(module, settings.sequence, sample):
            boundaries[layer.name] = value
            value = layer.run(value)
    return boundaries


def _take_two(module: nn.Module, sample: Any) -> Any:
    """Return the sample, twice if it is a single one of a model with norms over samples, which train on several."""
    tensors = list_tensors(sample)
    is_single = all(one.dim() and len(one) == 1 for one in tensors)
    if not is_single or not any(isinstance(part, _BatchNorm) for part in module.modules()):
        return sample
    return map_tensors(lambda one: torch.cat([one, one]), sample)


def check_tokens(sample: Any, layout: Layout) -> None:
    """Raise `SettingsError` if a sample's sequences cannot be split."""
    if sample is None:
        raise SettingsError(
            "sample must be inputs of a sample for a context axis, unless modules are ContextParallelModules, but got "
            "none; give parallelize one"
        )
    tensors = list_tensors(sample)
    if any(tensor.dim() < 2 or tensor.dim() > 3 for tensor in tensors):
        raise SettingsError(
            f"inputs must be sequences of tokens for context({layout.context}), of the shape (samples, tokens) or "
            f"(samples, tokens, width), but got {describe(sample)}; set Layout(context=1) (--layout.context 1)"
        )
    if len({one.shape[1] for one in tensors}) > 1:
        raise SettingsError(
            f"context({layout.context}) must have sequences to divide, all inputs of as many tokens, but got "
            f"{describe(sample)}, which are no such sequences; set Layout(context=1) (--layout.context 1)"
        )
    try:
        check_length(tensors[0].shape[1], context=layout.context)
    except SettingsError as error:
        if any(one.dim() == 3 or not one.is_floating_point() for one in tensors):
            raise
        advice = f"if {describe(sample)} is of features and no sequences, set Layout(context=1) (--layout.context 1)"
        raise SettingsError(f"{error}; {advice}") from None


def _note(shard: ModelShard) -> nn.Module:
    refuse_transforms(shard.module, shard.layout)
    membership = shard.world.membership
    membership.shards.append(shard)
    membership.reading = (shard.data_parallel_group, shard.split_context)
    return shard.module


def find_shard(module: nn.Module, group: Group) -> ModelShard:
    """Return the shard that `parallelize` has made of a module for the ranks of `group`; else one with all of it."""
    shards: list[ModelShard] = group.membership.shards
    return next((shard for shard in shards if shard.module is module), ModelShard(group, module=module))


def check_model(
    module: nn.Module, layout: Layout, *, tensor_plan: Mapping[str, str] | None, pipeline: PipelineSettings
) -> None:
    """Raise `SettingsError` if `parallelize` would, as far as the model shows; it may be on the meta device."""
    check_experts(module, layout)
    if layout.tensor > 1 and not is_derived(module, tensor_plan):  # which takes a sample
        make_plan(module, tensor_plan, layout.tensor)
    if layout.pipeline > 1 and (pipeline.sequence or is_listed(module)):  # others are run on a sample
        layers = list_layers(module, pipeline.sequence)
        pipeline.count_stages(layout.pipeline, len(layers))
        if isinstance(pipeline.cuts, tuple):
            cut_at(pipeline.cuts, [layer.name for layer in layers])
    if layout.context > 1 and not is_foreign(module):  # others are run on a sample
        check_attention(module, layout.context)
    if layout.shards_parameters:
        check_parameters(module)


def check_sharding(layout: Layout, sharded_codec: Codec | None, pipeline: PipelineSettings) -> None:
    """Raise `SettingsError` if the sharded or the expert axis cannot be combined with the others, or with a codec."""
    if layout.expert > 1 and (layout.tensor > 1 or layout.shards_parameters):
        other = f"tensor({layout.tensor})" if layout.tensor > 1 else f"zero_stage {layout.zero_stage}"
        advice = "put these ranks on the expert axis" if layout.tensor > 1 else "set zero_stage to 1"
        raise SettingsError(
            f"expert({layout.expert}), which divides parameters by experts, must come without other divisions of the "
            f"same parameters, but got {other}; {advice}, or leave the expert axis out"
        )
    if layout.shards_parameters and layout.pipeline > 1 and pipeline.behaviour.splits_backward:
        raise SettingsError(
            f"pipeline.order must not split backward with zero_stage {layout.zero_stage}, since torch "
            f"would miss some gradients, but got {pipeline.order}; take 1f1b or interleaved, or "
            "Layout(zero_stage=1) (--layout.zero_stage 1)"
        )
    advice = "leave it out, or give the codec to sync (--sync.codec), which uses it between replicas"
    if sharded_codec is not None and not layout.shards_parameters:
        raise SettingsError(
            "sharded_codec must go with sharded ranks of zero_stage 2 or 3, whose sum of gradients it encodes, but got "
            f"{layout}; {advice}"
        )
    if sharded_codec is not None and layout.pipeline > 1:
        raise SettingsError(
            "sharded_codec must go without a pipeline axis, since it weighs gradients by the whole batch as it encodes "
            "them, inside backward, and stages learn that weight from the last one's losses only afterwards, but got "
            f"{layout}; {advice}"
        )


def _shard_stages(
    module: nn.Module,
    driver: Pipeline | None,
    mesh: Mesh,
    layout: Layout,
    blocks: Sequence[str],
    gather_dtype: torch.dtype | None,
) -> None:
    if not layout.shards_parameters:
        return
    zero_stage: Literal[2, 3] = 3 if layout.zero_stage == 3 else 2
    if driver is None:
        shard_module(module, mesh, zero_stage=zero_stage, blocks=blocks, gather_dtype=gather_dtype)
        return
    modules = dict(module.named_modules())
    held = {modules[name] for name in blocks if name in modules}
    for stage in driver.stages:
        names = [name for name, child in stage.named_modules() if child in held]
        if next(stage.parameters(), None) is not None:
            with tied(module):
                shard_module(stage, mesh, zero_stage=zero_stage, blocks=names, gather_dtype=gather_dtype)
