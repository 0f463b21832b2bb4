"""Layer 2: typed events of a run, the log that they are written to, and its readers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.monitor.data_events import DataGrown, StoreRead
from paceline.monitor.encoding import from_json, to_json
from paceline.monitor.events import (
    AnomalyFound,
    BadSampleFound,
    BatchChanged,
    BucketExchanged,
    BucketSizeChosen,
    BudgetSpent,
    CheckpointIntervalChosen,
    CheckpointSaved,
    CheckpointSkipped,
    CodecChanged,
    ConsensusMeasured,
    DataRead,
    Evaluated,
    Event,
    EventError,
    ExpertsUsed,
    Failed,
    GradientNoiseMeasured,
    ModelGrown,
    PipelineMeasured,
    PlanCompared,
    Preempted,
    ReadersChosen,
    Record,
    ReplicasHealed,
    ResourceLow,
    ResourcesUsed,
    Restarted,
    RolledBack,
    RunFinished,
    RunStarted,
    SharesChanged,
    Showcased,
    SlowWorker,
    StalenessMeasured,
    StateCopied,
    StepFinished,
    StepTimed,
    StoppedEarly,
    UnusedParameters,
    Warned,
    list_kinds,
)
from paceline.monitor.log import EventLog
from paceline.monitor.reader import Records, RunSummary, follow, read_log, select, summarise

if TYPE_CHECKING:
    from paceline.monitor.live import LiveView
    from paceline.monitor.report import write_report
    from paceline.monitor.tensorboard import export_tensorboard
    from paceline.monitor.trace import export_trace

_HOMES = {
    "LiveView": "live",
    "export_tensorboard": "tensorboard",
    "export_trace": "trace",
    "write_report": "report",
}

__all__ = [
    "AnomalyFound",
    "BadSampleFound",
    "BatchChanged",
    "BucketExchanged",
    "BucketSizeChosen",
    "BudgetSpent",
    "CheckpointIntervalChosen",
    "CheckpointSaved",
    "CheckpointSkipped",
    "CodecChanged",
    "ConsensusMeasured",
    "DataGrown",
    "DataRead",
    "Evaluated",
    "Event",
    "EventError",
    "EventLog",
    "ExpertsUsed",
    "Failed",
    "GradientNoiseMeasured",
    "LiveView",
    "ModelGrown",
    "PipelineMeasured",
    "PlanCompared",
    "Preempted",
    "ReadersChosen",
    "Record",
    "Records",
    "ReplicasHealed",
    "ResourceLow",
    "ResourcesUsed",
    "Restarted",
    "RolledBack",
    "RunFinished",
    "RunStarted",
    "RunSummary",
    "SharesChanged",
    "Showcased",
    "SlowWorker",
    "StalenessMeasured",
    "StateCopied",
    "StepFinished",
    "StepTimed",
    "StoppedEarly",
    "StoreRead",
    "UnusedParameters",
    "Warned",
    "export_tensorboard",
    "export_trace",
    "follow",
    "from_json",
    "list_kinds",
    "read_log",
    "select",
    "summarise",
    "to_json",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # these import rich and more, which a worker never needs
        return getattr(import_module(f"paceline.monitor.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'paceline.monitor' has no attribute {name!r}; it has: {', '.join(__all__)}")
