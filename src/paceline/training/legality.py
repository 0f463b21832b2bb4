"""What training refuses before a model is built, by numbers alone: of a run, and of the planner's candidates."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.compression.codec import Codec
from paceline.errors import SettingsError
from paceline.parallel.context import check_length
from paceline.parallel.parallelize import check_sharding
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.parallel.tensor_styles import check_multiple
from paceline.replica.checks import check_layout
from paceline.sync.rule import Rule
from paceline.topology.layout import Layout


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that axes must divide.

    Args:
        num_layers: Number of layers that stages of a pipeline are made of.
        divided: Numbers of things that tensor ranks divide evenly, by what they are; None if they cannot share it.
        num_tokens: Tokens of a sample; 0 if a sample is no sequence.
    """

    num_layers: int
    divided: Mapping[str, int] | None
    num_tokens: int


def check_division(layout: Layout, rule: Rule, sharded_codec: Codec | None, pipeline: PipelineSettings) -> None:
    """Raise `SettingsError` if a layout cannot go with a rule, a codec or an order of the pipeline."""
    check_layout(layout, rule)
    check_sharding(layout, sharded_codec, pipeline)


def check_counts(layout: Layout, num_workers: int, global_batch: int) -> None:
    """Raise `SettingsError` if workers do not make the layout, or have fewer than one sample each."""
    shared = f"sharded({layout.sharded})" + (f" * expert({layout.expert})" if layout.expert > 1 else "")
    of_replica = layout.workers_of_replica
    if layout.data is not None and num_workers != layout.data * of_replica:
        raise SettingsError(
            f"the number of workers must be data({layout.data}) * {shared} = {layout.data * of_replica}, but got "
            f"{num_workers}; give --workers {layout.data * of_replica}"
        )
    if num_workers % of_replica:
        raise SettingsError(
            f"the number of workers must be a multiple of {shared}, but got {num_workers}; give "
            f"--workers {-(-num_workers // of_replica) * of_replica}"
        )
    if global_batch < num_workers:
        raise SettingsError(
            f"global_batch must be at least the number of workers, but got {global_batch} for {num_workers} "
            "workers; raise --global_batch or lower --workers"
        )


def check_sizes(sizes: ModelSizes, layout: Layout, pipeline: PipelineSettings) -> None:
    """Raise `SettingsError` if a model of these sizes cannot be divided by a layout."""
    if layout.tensor > 1 and sizes.divided is None:
        raise SettingsError(
            f"a model must have matrices that ranks can share for tensor({layout.tensor}), but this one has none; take "
            "another axis"
        )
    if layout.tensor > 1 and sizes.divided is not None:
        for what, number in sizes.divided.items():
            check_multiple(what, number, layout.tensor)
    if layout.context > 1 and not sizes.num_tokens:
        raise SettingsError(f"samples must be sequences for context({layout.context}), but are not; take another axis")
    if layout.context > 1:
        check_length(sizes.num_tokens, context=layout.context)
    if layout.pipeline > 1:
        pipeline.count_stages(layout.pipeline, sizes.num_layers)
