"""``model.fit`` on all ranks: an optimizer and its callbacks. Imports TensorFlow and Keras."""

from commlib.keras.callbacks import (
    AverageMetrics,
    AverageMovingStatistics,
    BackupAndRestore,
    BroadcastVariables,
    LearningRateSchedule,
    LearningRateWarmup,
    SynchronizeEpochs,
    default_callbacks,
)
from commlib.keras.optimizer import DistributedOptimizer, load_model
from commlib.keras.ranks import SyncBatchNormalization, average_metrics, broadcast_variables

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
