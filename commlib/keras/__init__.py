"""``model.fit`` on all ranks: an optimizer and its callbacks. Imports TensorFlow and Keras."""

import os
from importlib.util import find_spec

from commlib.errors import InvalidArgument

if find_spec(backend := os.environ.get("KERAS_BACKEND") or "tensorflow") is None:
    raise InvalidArgument(f"KERAS_BACKEND: expected tensorflow, got {backend}, which is not installed")

from commlib.keras.callbacks import (  # noqa: E402
    AverageMetrics,
    AverageMovingStatistics,
    BackupAndRestore,
    BroadcastVariables,
    LearningRateSchedule,
    LearningRateWarmup,
    SynchronizeEpochs,
    default_callbacks,
)
from commlib.keras.optimizer import DistributedOptimizer, load_model  # noqa: E402
from commlib.keras.ranks import (  # noqa: E402
    SyncBatchNormalization,
    average_metrics,
    broadcast_variables,
)

__all__ = [
    "AverageMetrics",
    "AverageMovingStatistics",
    "BackupAndRestore",
    "BroadcastVariables",
    "DistributedOptimizer",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "SyncBatchNormalization",
    "SynchronizeEpochs",
    "average_metrics",
    "broadcast_variables",
    "default_callbacks",
    "load_model",
]
