"""Tasks by name: of the table, of an entry point ``cloudtrain.tasks``, or by an import path.

>>> TASKS["image_classification"].unit
'images'
"""

from typing import Annotated, Any

from pydantic import TypeAdapter, model_validator

from commlib import registry
from commlib.errors import InvalidArgument
from training.config.records import AnyPhase, Phase
from training.config.schema import PartRecord, imported, part_in
from training.tasks.image_classification import ImageClassification
from training.tasks.language_model import LanguageModel, MaskedLanguageModel
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
from training.tasks.text import TextClassification
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
    "TaskRecord",
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

ATTRIBUTES = ("Phase", "signature", "metrics")  # of a task, without a default


class TaskRecord(PartRecord):
    """A task: its name, and its own options."""

    name: Annotated[str, part_in(TASKS, "task")] = "image_classification"
    """A name of ``training.tasks.TASKS``, or an import path."""

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> "TaskRecord":
        if self.kind is not None:
            self.check()
        return self

    @property
    def kind(self) -> type[Task] | None:
        """Return the class; ``None`` where its module would have to be imported for it."""
        found = imported(TASKS, "task", self.name)
        return found if isinstance(found, type) and issubclass(found, Task) else None

    def check(self) -> None:
        """Import it; raise ``InvalidArgument`` unless it is a task that takes these options."""
        kind = registry.resolve(TASKS, "task", self.name, subclass_of=Task)
        if missing := [name for name in ATTRIBUTES if not hasattr(kind, name)]:
            raise InvalidArgument(f'task "{self.name}": {kind.__name__} does not define {", ".join(missing)}')
        registry.check_options(f"task {self.name}", kind, self.options)

    def make(self) -> Task:
        """Return the task; raises a ``ValueError`` of one line if an option is invalid."""
        self.check()
        try:
            return registry.resolve(TASKS, "task", self.name)(**self.options)
        except ValueError as error:
            raise ValueError(f"task.{error}") from error

    def phases(self, given: list[Any]) -> list[Phase]:
        """Return the records of phases, with the keys of this task if it is imported."""
        kind: Any = AnyPhase
        if self.kind is not None:
            kind = self.kind.Phase
            given = [each.model_dump(exclude_none=True) if type(each) is AnyPhase else each for each in given]
        return TypeAdapter(list[kind]).validate_python(given)
