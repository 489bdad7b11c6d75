"""The state of a run in a checkpoint, and how it is restored."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.errors import one_line
from commlib.memory import zeros
from commlib.vectors import Float32
from training.checkpoint.manifest import SHARED, own_file
from training.checkpoint.other_world import merged
from training.checkpoint.places import Location
from training.checkpoint.serialization import Damaged, Tree
from training.checkpoint.stored import Checkpoint
from training.run.learner import Learner

Array = npt.NDArray[Any]


class OtherModel(ValueError):
    """A checkpoint is of another model; one line names the first tensor that differs."""


class OtherOptimizer(ValueError):
    """A checkpoint is of another optimizer; one line with what was expected."""


def shared_state(learner: Learner) -> dict[str, Tree]:
    """Return the state that is equal on all ranks; collective.

    Of ranks in a round it has the common weights; of all with local steps the optimizer of the rank that
    writes it.
    """
    with learner.common_weights():
        weights = {each.path: each.numpy() for each in learner.model.weights}
    return {
        "task": _identity(learner),
        "weights": weights,
        "optimizer": dict(learner.optimizer_state()),
        "average": [each.numpy() for each in learner.average.averages] if learner.average else None,
        "loss_scale": [each.numpy() for each in learner.scale.variables] if learner.scale else None,
        "local_steps": None if learner.local is None else learner.local.shared_state(),
        "world_size": learner.topology.world.size,
    }


def own_state(learner: Learner) -> dict[str, Tree]:
    """Return the state of this rank alone: reducer, random generators, BatchNormalization statistics.

    And what the task carries over batches, and the state of local steps.
    """
    reducer: Any = learner.gradients.reducer
    return {
        "reducer": reducer.state_dict(),
        "random": [each.numpy() for each in _random_states(learner)],
        # They differ between ranks until they are averaged at the end of an epoch.
        "statistics": [each.numpy() for each in learner.model.non_trainable_weights],
        "carried": [each.numpy() for each in learner.task.carried],
        "local_steps": None if learner.local is None else learner.local.own_state(),
    }


@contextmanager
def readable(file: Location) -> Iterator[None]:
    """Raise :class:`~training.checkpoint.serialization.Damaged` if the contents are not those of a run.

    The digest of the bytes is correct: another program has written them.
    """
    try:
        yield
    except (OtherModel, OtherOptimizer, Damaged):
        raise
    except KeyError as error:
        raise Damaged(f"{file}: expected {error} in the state of a run, got none") from error
    except ValueError as error:
        raise Damaged(f"{file}: {one_line(str(error))}") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise Damaged(f"{file}: expected the state of a run, got {one_line(str(error))}") from error


def restore(learner: Learner, checkpoint: Checkpoint) -> list[str]:
    """Restore a learner from a checkpoint; return a line for each difference.

    The learner is in the phase of the checkpoint. Raises :class:`OtherModel` before anything is changed,
    :class:`OtherOptimizer`, and :class:`training.checkpoint.serialization.Damaged` where the checkpoint holds
    something else: the learner can then be given another.
    """
    reducer: Any = learner.gradients.reducer
    before = reducer.state_dict()
    try:
        with readable(checkpoint.path / SHARED):
            lines = _restore_shared(learner, checkpoint.shared)
        with readable(checkpoint.path / own_file(learner.topology.world.rank)):
            return lines + _restore_own(learner, checkpoint)
    except Damaged:
        reducer.load_state_dict(before)
        raise


def _restore_shared(learner: Learner, shared: Any) -> list[str]:
    weights = learner.model.weights
    _check_identity(learner, shared["task"])
    _check_weights(learner, shared["weights"])
    _check_local_steps(learner, shared)
    _assign("weights", weights, [shared["weights"][each.path] for each in weights])
    _restore_optimizer(learner, shared["optimizer"])
    if learner.local is not None:
        learner.local.restore_shared(shared["local_steps"])
    return _restore_extras(learner, shared)


def _restore_own(learner: Learner, checkpoint: Checkpoint) -> list[str]:
    own: Any = checkpoint.own
    if own is None:
        return _restore_of_another_world(learner, checkpoint)
    _assign("statistics", learner.model.non_trainable_weights, own["statistics"])
    _assign("random", _random_states(learner), own["random"])
    _assign("carried", learner.task.carried, own["carried"])
    if learner.local is not None:
        learner.local.restore_own(own["local_steps"])
    state = own["reducer"]
    dense_residual(state, learner.gradients.size)  # raises if the state is not a reducer's
    try:
        learner.gradients.reducer.load_state_dict(state)
    except ValueError as error:  # the configuration names another reducer now, or other nodes
        _absorb(learner, lambda rank: state, checkpoint.world_size)
        return [f"what the reducer held back goes into the next step: {error}"]
    return []


def _assign(name: str, variables: Sequence[Any], values: Sequence[Array]) -> None:
    """Assign values to variables; raise ``ValueError`` unless they are arrays of these shapes and dtypes."""
    if len(variables) != len(values):
        raise ValueError(f"{name}: expected {len(variables)} arrays, got {len(values)}")
    for number, (variable, value) in enumerate(zip(variables, values, strict=True)):
        expected, found = variable.numpy(), np.asarray(value)
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise ValueError(
                f"{name}[{number}]: expected {expected.dtype} of shape {expected.shape}, "
                f"got {found.dtype} of shape {found.shape}"
            )
        variable.assign(value)


def _restore_optimizer(learner: Learner, state: Any) -> None:
    try:
        learner.restore_optimizer(state)
    except ValueError as error:
        name = learner.config.optimizer.name
        raise OtherOptimizer(f"optimizer: the checkpoint is not of {name} and this model: {error}") from error


def _restore_extras(learner: Learner, shared: Any) -> list[str]:
    lines = []
    for name, variables in (
        ("average", learner.average and learner.average.averages),
        ("loss_scale", learner.scale and learner.scale.variables),
    ):
        if variables and shared[name] is not None:
            _assign(name, variables, shared[name])
        elif variables:
            lines.append(f"{name}: the checkpoint has none: it begins again")
    if learner.average and shared["average"] is None:
        learner.average.restart()
    return lines


def _restore_of_another_world(learner: Learner, checkpoint: Checkpoint) -> list[str]:
    def reducer_state(rank: int) -> Any:
        own: Any = checkpoint.own_of(rank)
        return own["reducer"]

    _absorb(learner, reducer_state, checkpoint.world_size)
    now = learner.topology.world.size
    return [
        f"{checkpoint.world_size} ranks have become {now}: what they held back goes into the next step, "
        "and random states of the model begin again",
        *_local_steps_of_another_world(checkpoint),
        *_take_over_carried(learner, checkpoint),
    ]


def _local_steps_of_another_world(checkpoint: Checkpoint) -> list[str]:
    """Return a line on what becomes of the local steps of other ranks, if they had any."""
    shared: Any = checkpoint.shared
    if (found := shared.get("local_steps")) is None:
        return []
    lost = ", and the local steps of the round that was under way are lost" if found["in_round"] else ""
    return [f"local steps: all ranks begin with the optimizer state of rank 0{lost}"]


def _take_over_carried(learner: Learner, checkpoint: Checkpoint) -> list[str]:
    """Assign this rank's rows of what all ranks carried over batches; return a line if there are others."""
    world, carried = learner.topology.world, learner.task.carried
    if not carried:
        return []
    of_ranks: list[Any] = [checkpoint.own_of(rank) for rank in range(checkpoint.world_size)]
    lines = []
    for number, variable in enumerate(carried):
        rows = np.concatenate([own["carried"][number] for own in of_ranks])
        expected = [world.size * variable.shape[0], *variable.shape[1:]]
        if list(rows.shape) == expected:
            variable.assign(np.split(rows, world.size)[world.rank])
        else:
            lines.append(
                f"what is carried over batches begins again: expected the shape {tuple(expected)} over all "
                f"ranks, got {rows.shape}"
            )
    return lines


def _absorb(learner: Learner, state_of: Any, world_size: int) -> None:
    """Add to the reducer the residuals of the ranks of ``world_size`` that this rank takes over."""
    size, world = learner.gradients.size, learner.topology.world
    residual = merged(
        lambda rank: dense_residual(state_of(rank), size),
        size,
        world_size=world_size,
        rank=world.rank,
        size=world.size,
    )
    learner.gradients.reducer.add_residual(residual)


def dense_residual(state: Any, size: int) -> Float32:
    """Return the residual in a reducer's state, as a dense vector of ``size`` entries."""
    if "buckets" in state:
        return np.concatenate([dense_residual(each, each["settings"]["size"]) for each in state["buckets"]])
    vector = zeros(size)
    if state["carried"] is not None:
        vector += state["carried"]
    if "residual" in state:
        low = state["low"]
        vector[low : low + len(state["residual"])] += state["residual"]
    return vector


def _random_states(learner: Learner) -> list[Any]:
    """Return the states of random generators (dropout): variables of the model that are not weights."""
    weights = {id(each) for each in learner.model.weights}
    return [each for each in learner.model.variables if id(each) not in weights]


def _identity(learner: Learner) -> str:
    """Return the task of the weights, and what else they belong to."""
    return f"{learner.config.task.name} {learner.task.identity(learner.samples.dataset)}".strip()


def _check_identity(learner: Learner, saved: str) -> None:
    if saved != (expected := _identity(learner)):
        raise OtherModel(f"the checkpoint is of another task: expected {expected}, got {saved}")


def _check_weights(learner: Learner, saved: Any) -> None:
    if not isinstance(saved, dict):
        raise ValueError(f"weights: expected arrays by name, got {type(saved).__name__}")  # noqa: TRY004 - a file
    here = {variable.path: tuple(variable.shape) for variable in learner.model.weights}
    for path in [*here, *(path for path in saved if path not in here)]:
        there = tuple(saved[path].shape) if path in saved else "none"
        if here.get(path, "none") != there:
            raise OtherModel(
                f"the checkpoint is of another model: {path}: expected {here.get(path, 'none')}, got {there}"
            )


def _check_local_steps(learner: Learner, shared: Any) -> None:
    found, expected = shared.get("local_steps") is not None, learner.local is not None
    if found != expected:  # they hold back gradients or differences of weights
        phase = ("a phase without local_steps", "a phase with local_steps")
        raise OtherModel(f"local_steps: the checkpoint is of {phase[found]}: expected {phase[expected]}")
