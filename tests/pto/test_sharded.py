"""Sharded updates against the optimizers that hold everything, on simulated ranks or those of an MPI job."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.transport import simulated
from pto.errors import InvalidArgument, RanksDisagree
from pto.keras import ADAM, ADAMW, LAMB, LARS, MUON
from pto.sharded import ShardedUpdate, restore, state_of
from tests.extent import more
from tests.pto import reference
from tests.pto.variables import SIZES, applied, same, variables_of

WITHOUT_NORMS = {
    "sgd": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "sgd-nesterov": lambda: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "sgd-plain": lambda: keras.optimizers.SGD(0.5),
    "adam": lambda: ADAM(0.01, weight_decay=0.01, exclude=reference.EXCLUDED),
    "adam-frozen": lambda: ADAM(0.01, freeze_variance=2),
    "adamw": lambda: ADAMW(0.01, 0.8, 0.95, weight_decay=0.01, exclude=reference.EXCLUDED),
}
WITH_NORMS = {
    "lars": lambda: LARS(0.5, weight_decay=0.01, exclude=reference.EXCLUDED),
    "lars-nesterov": lambda: LARS(0.5, 0.8, True, 0.1, 0.02, exclude=None),
    "lamb": lambda: LAMB(0.01, weight_decay=0.01, least_norm=0.1, exclude=reference.EXCLUDED),
}
BY_TENSOR = {"muon": lambda: MUON(0.01, weight_decay=0.01, exclude=reference.EXCLUDED, adamw="dense")}
ALL = {**WITHOUT_NORMS, **WITH_NORMS, **BY_TENSOR}
# One of each kind of state: none, a momentum, two moments of which one stays, with norms, of whole matrices.
STATEFUL = ["sgd-plain", "sgd", "adam-frozen", "lamb", "muon"]
STATEFUL += more(*sorted(ALL.keys() - STATEFUL))


def unsharded(make, weights, gradients, traced=False):
    """The optimizer, its variables and the weights after all steps."""
    optimizer, variables = make(), variables_of(weights)
    optimizer.build(variables)
    return optimizer, variables, applied(optimizer, variables, gradients, traced)


def sharded(make, comm, weights, gradients, traced=False):
    """The same of a sharded update."""
    update, variables = ShardedUpdate(make(), comm), variables_of(weights)
    update.build(variables)
    return update, variables, applied(update, variables, gradients, traced)


def expect_same(name, found, expected):
    """Expect the weights to be equal; bitwise if the optimizer has no norms and no products of matrices."""
    for weight, whole in zip(found, expected, strict=True):
        # The unsharded one adds its squares in float32, so its ratios are off by some 2⁻²⁴. TensorFlow may
        # compile the products of two graphs differently.
        atol = 0 if name in WITHOUT_NORMS else 3e-6 * np.abs(whole).max()
        np.testing.assert_allclose(weight, whole, rtol=0, atol=atol)


@pytest.mark.world_sizes(3)
@pytest.mark.pairs(lambda name, traced, ranks: traced == (name in STATEFUL))
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_an_update_in_parts_is_the_whole_one_and_bitwise_equal_on_all_ranks(name, traced, ranks):
    weights, gradients = reference.weights_and_gradients(10)
    _, _, expected = unsharded(ALL[name], weights, gradients, traced)
    results = ranks.run(lambda comm: sharded(ALL[name], comm, weights, gradients, traced)[2])
    for of_rank in results:
        assert same(of_rank, results[0])
        expect_same(name, of_rank, expected)


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("name", {**WITHOUT_NORMS, **WITH_NORMS})
def test_a_rank_holds_its_share_of_the_bytes_of_the_slots(name, ranks):
    weights, _ = reference.weights_and_gradients(0)

    def bytes_of_slots(comm):
        update, _, _ = sharded(ALL[name], comm, weights, [])
        return sum(slot.numpy().nbytes for slot in update.slots)

    shares = ranks.run(bytes_of_slots)
    optimizer, _, _ = unsharded(ALL[name], weights, [])
    slots = sum(variable.numpy().nbytes for variable in optimizer.variables[2:])  # after iterations and rate
    assert sum(shares) == slots
    assert max(shares) - min(shares) <= slots // sum(SIZES)  # slices differ by one entry at most


def test_a_rank_holds_whole_matrices_of_about_equal_work():
    weights, _ = reference.weights_and_gradients(0)

    def body(comm):
        update, _, _ = sharded(BY_TENSOR["muon"], comm, weights, [])
        return [piece.tensor for piece in update._shards.own]

    # Work: of number 4 its 30 entries × 5 columns, of number 5 its 72 × 2, of all others their 21 entries.
    assert simulated.run(body, 3) == [[4], [5], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", ALL)
def test_a_step_sends_the_weights_once_and_eight_bytes_a_norm(name):
    weights, gradients = reference.weights_and_gradients(1)

    def body(comm):
        update, variables, _ = sharded(ALL[name], comm, weights, [])
        before, allgather_ints, exchanged = comm.sent_bytes.sum(), comm.allgather_ints, []
        comm.allgather_ints = lambda values: exchanged.append(len(values)) or allgather_ints(values)
        applied(update, variables, gradients)
        return int(comm.sent_bytes.sum() - before), exchanged, len(update._shards.own)

    sent, exchanged, pieces = zip(*simulated.run(body, 3), strict=True)
    # Round a ring, every part is sent by all ranks but the last to get it.
    assert sum(sent) == 2 * 4 * sum(SIZES)
    assert set(map(tuple, exchanged)) == {(2 * max(pieces),) if name in WITH_NORMS else ()}


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("name", STATEFUL)
def test_a_full_state_goes_on_bitwise_at_the_same_world_size(name, ranks):
    make = ALL[name]
    weights, gradients = reference.weights_and_gradients(8)

    def body(comm):
        whole = sharded(make, comm, weights, gradients)[2]
        first, _, at_half = sharded(make, comm, weights, gradients[:4])
        state = first.full_state()
        second, variables, _ = sharded(make, comm, at_half, [])
        second.load_full_state(state)
        assert int(second.iterations.numpy()) == 4
        assert same(second.full_state().values(), state.values())
        return same(applied(second, variables, gradients[4:]), whole)

    assert all(ranks.run(body))


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("name", STATEFUL)
def test_a_phase_may_be_sharded_and_the_next_not(name, ranks):
    make = ALL[name]
    weights, gradients = reference.weights_and_gradients(9)
    _, _, expected = unsharded(make, weights, gradients)

    def body(comm):
        optimizer, variables, moved = unsharded(make, weights, gradients[:3])
        update, variables, _ = sharded(make, comm, moved, [])
        update.load_full_state(state_of(optimizer, variables))
        moved = applied(update, variables, gradients[3:6])
        optimizer, variables, _ = unsharded(make, moved, [])
        restore(optimizer, variables, update.full_state())
        assert int(optimizer.iterations.numpy()) == 6
        return applied(optimizer, variables, gradients[6:])

    for of_rank in ranks.run(body):
        expect_same(name, of_rank, expected)


@pytest.mark.parametrize("name", ["sgd", "lars", "lamb"])
def test_a_full_state_is_named_whole_and_of_any_world_size(name):
    weights, gradients = reference.weights_and_gradients(3)
    by_five = simulated.run(lambda comm: sharded(ALL[name], comm, weights, gradients)[0].full_state(), 5)
    names = {"sgd": ["velocity"], "lars": ["velocity"], "lamb": ["mean", "square"]}[name]
    keys = [f"{path.replace('/', '_')}/{slot}" for slot in names for path in reference.NAMES]
    assert list(by_five[4]) == ["iterations", *keys]
    for key, shape in zip(keys, reference.SHAPES * len(names), strict=True):
        assert (by_five[4][key].shape, by_five[4][key].dtype) == (shape, np.float32)

    def loaded(comm):
        update, _, _ = sharded(ALL[name], comm, weights, [])
        update.load_full_state(by_five[4])
        return update.full_state()

    for state in [*by_five, *simulated.run(loaded, 2)]:
        assert same(state.values(), by_five[0].values())


def test_more_ranks_than_entries_leave_some_with_nothing():
    def body(comm):
        variable = keras.Variable([3.0, 4.0], name="kernel")
        update = ShardedUpdate(LARS(0.5, trust=1.0), comm)
        update.build([variable])
        update.apply([tf.constant([1.0, 0.0])])
        return len(update.slots), variable.numpy().tolist()

    assert simulated.run(body, 5) == [(int(rank in (2, 4)), [0.5, 4.0]) for rank in range(5)]


def test_a_nan_reaches_the_weights_of_all_ranks():
    def body(comm):
        variables = [keras.Variable([1.0, 2.0, 3.0], name=name) for name in ("one", "two")]
        update = ShardedUpdate(LARS(0.5), comm)
        update.build(variables)
        update.apply([tf.constant([1.0, 1.0, 1.0]), tf.constant([1.0, np.nan, 1.0])])
        return [np.isnan(variable.numpy()).tolist() for variable in variables]

    assert simulated.run(body, 3) == [[[False] * 3, [True] * 3]] * 3


def test_constraints_and_schedules_are_kept():
    def body(comm):
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_constraint="non_neg", kernel_initializer="ones")]
        )
        update = ShardedUpdate(keras.optimizers.SGD(schedule), comm)
        update.build(model.trainable_variables)
        for _ in range(2):
            update.apply([tf.constant([[3.0]]), tf.constant([3.0])], model.trainable_variables)
        return [float(variable.numpy().item()) for variable in model.trainable_variables]

    assert simulated.run(body, 2) == [[0.0, -4.5]] * 2


def alone(optimizer):
    return simulated.run(lambda comm: ShardedUpdate(optimizer, comm), 1)[0]


@pytest.mark.parametrize(
    "optimizer, message",
    [
        (lambda: keras.optimizers.Adam(), "optimizer: expected an SGD or one of pto.keras, got Adam"),
        (lambda: LARS(clipnorm=1.0), "clipnorm: expected none in a sharded update, got 1.0"),
        (lambda: LAMB(use_ema=True), "use_ema: expected none in a sharded update, got True"),
        (
            lambda: keras.optimizers.SGD(weight_decay=0.1),
            "weight_decay: expected none in a sharded update, got 0.1",
        ),
    ],
)
def test_what_a_sharded_update_lacks_is_refused(optimizer, message):
    with pytest.raises(InvalidArgument, match=message):
        alone(optimizer())


def test_a_wrong_use_is_refused():
    built = LARS()
    variable = keras.Variable([1.0], name="kernel")
    built.build([variable])
    with pytest.raises(InvalidArgument, match="expected one that is not built, got lars, built"):
        alone(built)
    update = alone(LARS())
    with pytest.raises(InvalidArgument, match="build: expected a call of it before"):
        update.apply([tf.ones(1)])
    with pytest.raises(InvalidArgument, match="half: expected float32 in a sharded update, got float16"):
        update.build([keras.Variable([1.0], dtype="float16", name="half")])
    with pytest.raises(InvalidArgument, match="kernel: expected one variable of this path, got 2"):
        update.build([variable, variable])
    update.build([variable])
    with pytest.raises(InvalidArgument, match="variables: expected those of build"):
        update.apply([tf.ones(1)], [keras.Variable([1.0], name="kernel")])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kernel/velocity": np.zeros(3)}, "expected kernel/velocity of shape (2,), got (3,)"),
        ({"bias/velocity": np.zeros(2)}, "expected bias/velocity of shape None, got (2,)"),
        ({"iterations": None}, "expected iterations of shape (), got None"),
    ],
)
def test_a_state_of_other_variables_is_refused(change, message):
    update = alone(LARS())
    update.build([keras.Variable([1.0, 2.0], name="kernel")])
    state = {**update.full_state(), **change}
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        update.load_full_state({key: value for key, value in state.items() if value is not None})


def test_ranks_with_other_variables_are_named():
    def body(comm):
        update = ShardedUpdate(LARS(), comm)
        update.build([keras.Variable(np.ones(2 + comm.rank // 2, np.float32), name="kernel")])

    with pytest.raises(RanksDisagree, match=re.escape("kernel is (2,) on ranks [0, 1], (3,) on ranks [2]")):
        simulated.run(body, 3)
