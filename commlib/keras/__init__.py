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
from commlib.keras.ranks import broadcast_variables

__all__ = [
    "AverageMetrics",
    "AverageMovingStatistics",
    "BackupAndRestore",
    "BroadcastVariables",
    "DistributedOptimizer",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "SynchronizeEpochs",
    "broadcast_variables",
    "default_callbacks",
    "load_model",
]
