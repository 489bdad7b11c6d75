"""Linear models on data that is sparse by nature: nothing is dropped, only zeros are not sent.

``LinearClassifier`` has scikit-learn's interface; ``cloudtrain train`` takes
configurations of ``task: linear``. Nothing here imports TensorFlow.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.linear.estimator import LinearClassifier

__all__ = ["LinearClassifier"]


def __getattr__(name: str) -> Any:
    """Import what needs scikit-learn only when it is accessed."""
    if name != "LinearClassifier":
        raise AttributeError(f"module 'training.linear' has no attribute {name!r}")
    from training.linear.estimator import LinearClassifier

    return LinearClassifier
