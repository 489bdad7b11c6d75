"""States of reducers as ``torch.save`` takes them, and ``torch.load`` reads them with its defaults."""

from typing import Any

import numpy as np
import torch


def with_tensors(state: Any) -> Any:
    """Return a state with tensors in place of arrays, which share their memory, and plain numbers."""
    if isinstance(state, dict):
        return {key: with_tensors(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(with_tensors(each) for each in state)
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state)
    return state.item() if isinstance(state, np.generic) else state


def with_arrays(state: Any) -> Any:
    """Return a state of ``with_tensors`` with arrays in place of tensors, which share their memory."""
    if isinstance(state, dict):
        return {key: with_arrays(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(with_arrays(each) for each in state)
    return state.numpy() if isinstance(state, torch.Tensor) else state
