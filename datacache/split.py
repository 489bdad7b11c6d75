"""A split into training and validation samples, by a seed, for data sets that have none of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from datacache.manifest import Manifest
from datacache.order import Ids, Permutation


@dataclass(frozen=True)
class Split:
    """One of two parts of a data set: the ``share`` of each class's samples for validation, or the rest.

    The choice depends only on the seed and the number of the class's samples, in the order of the manifest,
    so it is the same on every node.
    """

    part: Literal["training", "validation"]
    share: float
    seed: int = 0

    def of(self, manifest: Manifest) -> Manifest:
        """Return the manifest of this part; its files are those of the whole data set.

        Raises ``ValueError`` if a class had no training samples left, or no class had a validation sample.
        """
        held_out = self._held_out(manifest.labels, manifest.classes)
        chosen = held_out if self.part == "validation" else ~held_out
        columns = {name: getattr(manifest, name)[chosen] for name in ("file", "start", "sizes", "labels")}
        more = {name: column[chosen] for name, column in manifest.more.items()}
        return replace(manifest, **columns, more=more)

    def _held_out(self, labels: Ids, classes: Sequence[str]) -> npt.NDArray[np.bool_]:
        held_out = np.zeros(len(labels), bool)
        for label in np.unique(labels).tolist():
            ids = np.flatnonzero(labels == label)
            count = int(self.share * len(ids) + 0.5)
            if count == len(ids):
                name = classes[label] if classes else str(label)
                raise ValueError(
                    f"validation_share: expected one that leaves each class samples to train on, "
                    f"got {self.share}: class {name} would lose all its {len(ids)}"
                )
            held_out[ids[Permutation(len(ids), self.seed, label).at(np.arange(count))]] = True
        if not held_out.any():
            raise ValueError(
                f"validation_share: expected one that gives a class a sample, got {self.share} "
                f"of {len(labels)} samples"
            )
        return held_out
