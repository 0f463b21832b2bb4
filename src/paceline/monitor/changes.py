"""What a report says of batches and models that changed on the way, and of the noise of gradients."""

from paceline.monitor.events import BatchChanged, Event, GradientNoiseMeasured, ModelGrown
from paceline.monitor.formatting import number
from paceline.monitor.html_elements import safe, section, table
from paceline.monitor.reader import Summary

_MAX_ROWS = 20


def describe_change(event: Event) -> str:
    """Return what changed, or was measured, as part of a sentence."""
    match event:
        case BatchChanged(global_batch=batch, start=start):
            return f"{batch:,} samples a step, from sample {start:,} on"
        case ModelGrown(num_layers=layers, num_parameters=parameters, method=method):
            return f"{layers:,} layers with {parameters:,} parameters, by {method}"
        case GradientNoiseMeasured(noise_scale=None):
            return "gradient noise scale too large to be told"
        case GradientNoiseMeasured(noise_scale=scale):
            assert scale is not None
            return f"gradient noise scale {number(scale)} samples"
        case _:
            raise AssertionError(event)


def render_changes(summary: Summary) -> str:
    """Return the section of a report's page; nothing where nothing changed or was measured."""
    if not summary.changes:
        return ""
    shown = summary.changes[-_MAX_ROWS:]
    rows = [[f"{one.step:,}", describe_change(one.event)] for one in reversed(shown)]
    hidden = len(summary.changes) - len(shown)
    before = f"<p>{safe(f'{hidden:,} earlier ones are not shown.')}</p>" if hidden else ""
    return section("Batch and model", before + table(["after step", "what"], rows, num_numeric=1))
