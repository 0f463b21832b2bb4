"""Letting the model of a training become deeper."""

from paceline.errors import SettingsError
from paceline.monitor.events import ModelGrown
from paceline.training.growth import grow_module, grow_optimizer
from paceline.training.training import Training, build_model, build_replica


def grow_if_due(training: Training) -> None:
    """Replace the replica by one of a deeper model, where the step to come is one to grow at. All workers call it.

    Raises:
        SettingsError: The model is deeper already than it should be, as it was saved by a run that grew earlier.
    """
    run, old, depth = training.run, training.replica, training.model.layer_stack
    if depth is None or not run.growth.steps:
        return
    first = run.model.layer_stack
    assert first is not None
    num_layers = run.growth.depth_at(training.step, first.num_layers)
    if num_layers == depth.num_layers:
        return
    if num_layers < depth.num_layers:
        raise SettingsError(
            f"a model must not become shallower, but it has {depth.num_layers} layers and growth gives it {num_layers} "
            f"at step {training.step}; resume with the growth that the run was started with"
        )
    state, feedback = old.state_dict(), old.feedback()
    old.close()
    training.model = training.model.with_depth(num_layers)
    module = build_model(run, training.splits, old.part.world, training.model)
    new = build_replica(run, module, training.splits, old.part.world)
    grow_module(old.module, new.module, depth, run.growth.method)
    grow_optimizer((old.module, old.optimizer), (new.module, new.optimizer), depth, run.growth.method)
    new.load_state_dict(state)
    if feedback:
        new.load_feedback([feedback if rank == new.group.rank else {} for rank in range(new.group.size)])
    training.replica = new
    if training.stopped_by:  # a signal may have come to the old one
        new.request_stop()
    if training.noise is not None:
        training.noise.use(new.module)
    num_parameters = sum(parameter.numel() for parameter in new.module.parameters())
    training.tell(ModelGrown(num_layers=num_layers, num_parameters=num_parameters, method=run.growth.method))
