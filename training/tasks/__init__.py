"""Tasks by name: of the table, of an entry point ``cloudtrain.tasks``, or by an import path.

>>> TASKS["image_classification"].unit
'images'
"""

from training.tasks.image_classification import ImageClassification
from training.tasks.language_model import LanguageModel
from training.tasks.masked_language_model import MaskedLanguageModel
from training.tasks.task import (
    EpochSize,
    Evaluation,
    Inputs,
    Means,
    Metric,
    Reading,
    Samples,
    Task,
    Tested,
    Tiny,
)
from training.tasks.text_classification import TextClassification
from training.tasks.translation import Translation

__all__ = [
    "TASKS",
    "EpochSize",
    "Evaluation",
    "Inputs",
    "Means",
    "Metric",
    "Reading",
    "Samples",
    "Task",
    "Tested",
    "Tiny",
]

# Their modules import no framework; their methods do.
TASKS: dict[str, type[Task]] = {
    "image_classification": ImageClassification,
    "language_model": LanguageModel,
    "masked_language_model": MaskedLanguageModel,
    "translation": Translation,
    "text_classification": TextClassification,
}
