"""Reducer wrappers, around every sparse reducer."""

import numpy as np
import pytest

from commlib import (
    REDUCERS,
    BucketExchange,
    CommlibError,
    InvalidArgument,
    RanksDisagree,
    Topology,
    density,
    make_reducer,
)
from commlib.reducers import LocalClipping, MomentumCorrection, ReducerWrapper, SelectingReducer
from commlib.transport import simulated

SPARSE = [name for name, reducer in REDUCERS.items() if reducer.sparse]
# Each reducer with three ranks; those that stand for the flat and the hierarchical ones with every number.
WITH_THREE = pytest.mark.pairs(lambda ranks, name: ranks.size == 3 or name in ("oktopk", "hitopk"))


def drawn(size, rank, step):
    return np.random.default_rng([size, rank, step]).standard_t(2, size).astype(np.float32)


def everything(comm, size=4):
    """A reducer that applies all that it is given."""
    return make_reducer("allgather", Topology(comm, ranks_per_node=2), size, density=1.0)


def check_nothing_is_lost(seen, given, magnitude, terms):
    """Means and residuals of all ranks make what was given, to the rounding of sums of so many float32."""
    applied = len(seen) * np.sum(seen[0][0], axis=0, dtype=np.float64)
    residuals = sum(residual.astype(np.float64) for _, residual, *_ in seen)
    np.testing.assert_array_less(np.abs(applied + residuals - given), terms * 2.0**-23 * magnitude + 1e-30)


# ------------------------------------------------------------- local clipping


def test_a_gradient_longer_than_its_share_is_scaled_to_it(ranks):
    def body(comm):
        reducer = LocalClipping(everything(comm), norm=2 * comm.size**0.5)
        return reducer.reduce(np.array([0, 30, -40, 0]) * (comm.rank + 1))

    for mean in ranks.run(body):
        np.testing.assert_allclose(mean, [0, 1.2, -1.6, 0], rtol=1e-6)  # a division, a root and a product


def test_a_gradient_within_its_share_is_left_to_the_bit(ranks):
    gradient = drawn(1000, 0, 0)
    norm = float(np.linalg.norm(gradient.astype(np.float64)))

    def body(comm):
        reducer = LocalClipping(everything(comm, size=1000), norm=1.001 * norm * comm.size**0.5)
        return reducer.reduce(gradient)

    expected = ranks.run(lambda comm: everything(comm, size=1000).reduce(gradient))
    for mean, unclipped in zip(ranks.run(body), expected, strict=True):
        assert mean.tobytes() == unclipped.tobytes()


@pytest.mark.parametrize("magnitude", [1e-40, 1e-20, 1e20, 3e37])
def test_clipping_neither_overflows_nor_underflows(ranks, magnitude):
    def body(comm):
        reducer = LocalClipping(everything(comm), norm=0.5 * magnitude * comm.size**0.5)
        return reducer.reduce(np.array([magnitude, 0, 0, 0], np.float32))

    for mean in ranks.run(body):
        # half of a denormal is known to 16 bits
        np.testing.assert_allclose(mean, [0.5 * magnitude, 0, 0, 0], rtol=1e-4)


# ------------------------------------------------------------- momentum correction


def test_without_masking_the_mean_is_that_of_the_velocities(ranks):
    def body(comm):
        reducer = MomentumCorrection(everything(comm, size=50), 0.9, masking=False)
        return [reducer.reduce(drawn(50, comm.rank, step)) for step in range(4)]

    gradients = np.array([[drawn(50, rank, step) for rank in range(ranks.size)] for step in range(4)])
    velocity = np.zeros((ranks.size, 50))
    for step, mean in enumerate(ranks.run(body)[0]):
        velocity = 0.9 * velocity + gradients[step]
        scale = np.abs(gradients).sum(axis=(0, 1))
        # four roundings a step and rank, and 0.9 is no float32
        np.testing.assert_array_less(np.abs(mean - velocity.mean(axis=0)), 16 * 2.0**-23 * scale)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_masking_starts_the_velocity_of_what_was_sent_again(size):
    """k = 1 of 3: the first entry is sent in the first step, the second one has gathered more by the next."""

    def body(comm):
        reducer = make_reducer("allgather", Topology(comm), 3, density=1 / 3)
        corrected = MomentumCorrection(reducer, 0.5)
        gradient = np.array([8, 6, 0], np.float32)
        return [corrected.reduce(gradient) for _ in range(3)], corrected.residual

    for means, residual in simulated.run(body, size):
        # velocities 8, 6: 8 is sent, 6 stays. Then 8 (masked) and 3 + 6: 9 + 6 = 15 is sent, 8 stays.
        # Then 4 + 8 and 6 (masked): 12 + 8 = 20 is sent, 6 stays.
        assert [mean.tolist() for mean in means] == [[8, 0, 0], [0, 15, 0], [20, 0, 0]]
        assert residual.tolist() == [0, 6, 0]


@pytest.mark.parametrize(("name", "size"), [*((name, 1) for name in SPARSE), ("powersgd", 2)])
def test_where_no_entries_are_sent_the_velocity_goes_on(name, size):
    """A single rank sends nothing, and PowerSGD factors."""

    def body(comm):
        corrected = MomentumCorrection(make_reducer(name, Topology(comm), 3, density=0.5), 0.5)
        return [corrected.reduce(np.ones(3)).tolist() for _ in range(3)]

    assert simulated.run(body, size) == [[[1.0] * 3, [1.5] * 3, [1.75] * 3]] * size


def test_masking_in_nodes_starts_the_velocity_of_what_was_applied_again():
    """As above in each of two shards, of which a node sends one entry; its owner has the residual."""

    def body(comm):
        reducer = make_reducer("hitopk", Topology(comm, ranks_per_node=2), 6, density=1 / 3)
        corrected = MomentumCorrection(reducer, 0.5)
        means = [corrected.reduce(np.array([8, 6, 0] * 2, np.float32)).tolist() for _ in range(3)]
        return means, corrected.residual.tolist()

    for rank, (means, residual) in enumerate(simulated.run(body, 4)):
        assert means == [[8, 0, 0] * 2, [0, 15, 0] * 2, [20, 0, 0] * 2]
        assert residual == ([0] * 3 + [0, 12, 0] if rank % 2 else [0, 12, 0] + [0] * 3)


@WITH_THREE
@pytest.mark.parametrize("name", SPARSE)
def test_velocities_are_what_is_not_lost(ranks, name):
    """Replays the masks that each rank reports, in float64."""

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), 1000, density=0.05)
        corrected = MomentumCorrection(reducer, 0.5)
        means, masks = [], []
        for step in range(6):
            means.append(corrected.reduce(drawn(1000, comm.rank, step)))
            masks.append(corrected.sent_indices(means[-1]))
        return means, corrected.residual, masks

    seen = ranks.run(body)
    given, magnitude = np.zeros(1000), np.zeros(1000)
    for rank, (*_, masks) in enumerate(seen):
        velocity = np.zeros(1000)
        for step in range(6):
            velocity = 0.5 * velocity + drawn(1000, rank, step)
            given += velocity
            magnitude += np.abs(velocity)
            velocity[masks[step]] = 0
    check_nothing_is_lost(seen, given, magnitude, 60)  # at most 6·P terms
    for means, *_ in seen:
        assert [mean.tobytes() for mean in means] == [mean.tobytes() for mean in seen[0][0]]


# ------------------------------------------------------------- density


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", [each for each in SPARSE if issubclass(REDUCERS[each], SelectingReducer)])
def test_a_warm_up_sets_a_density_an_epoch(size, name):

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=1), 1000, density=0.003, selector="exact")
        wrapped, selected = LocalClipping(MomentumCorrection(reducer, 0.5), 1.0), []
        for step, own in enumerate(np.repeat([*density.GTOPK_WARM_UP, 0.003], 2)):
            wrapped.set_density(float(own))
            wrapped.reduce(drawn(1000, comm.rank, step))
            assert wrapped.density == reducer.density == own
            selected.append(wrapped.last.selected)
        return selected

    # round(0.0725·1000) = 72: 72.5 to even
    assert simulated.run(body, size) == [[250, 250, 72, 72, 15, 15, 4, 4, 3, 3]] * size


@WITH_THREE
@pytest.mark.parametrize("name", SPARSE)
def test_nothing_is_lost_where_the_density_changes(ranks, name):
    def body(comm):
        reducer, means = make_reducer(name, Topology(comm, ranks_per_node=2), 1000, density=0.01), []
        for step, own in enumerate([*density.exponential(0.5, 0.01, 3), 0.01, 0.01]):
            reducer.set_density(own)
            means.append(reducer.reduce(drawn(1000, comm.rank, step)).copy())
        return means, reducer.residual

    seen = ranks.run(body)
    gradients = [drawn(1000, rank, step) for rank in range(ranks.size) for step in range(5)]
    given = np.sum(gradients, axis=0, dtype=np.float64)
    check_nothing_is_lost(seen, given, np.abs(gradients).sum(axis=0), 40)  # at most 5·P terms


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("name", ["oktopk", "hioktopk"])
def test_reused_thresholds_follow_a_new_density_at_once(size, name):
    """Also by less than the factor of two within which they are otherwise reused."""

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=1), 4000, density=0.02)
        for step in range(3):
            reducer.reduce(drawn(4000, comm.rank, step))
        reducer.set_density(0.0125)
        mean = reducer.reduce(drawn(4000, comm.rank, 3))
        return reducer.last.selected, np.count_nonzero(mean)

    assert simulated.run(body, size) == [(50, 50)] * size


def test_a_rank_that_did_not_change_its_density_is_named(ranks):
    def body(comm):
        reducer = make_reducer("allgather", Topology(comm), 100, density=0.5)
        if comm.rank == comm.size - 1:
            reducer.set_density(0.25)
        try:
            reducer.reduce(np.ones(100))
        except RanksDisagree as error:
            return str(error)
        return None

    for message in ranks.run(body):
        assert (message is None) == (ranks.size == 1)
        others = list(range(ranks.size - 1))
        named = f"density is 0.5 on ranks {others}, 0.25 on ranks [{ranks.size - 1}]"
        assert message is None or message == f"the reducer is not the same on all ranks: {named}"


# ------------------------------------------------------------- all together


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda reducer: LocalClipping(reducer, 0), "norm: expected a number above 0, got 0"),
        (lambda reducer: LocalClipping(reducer, float("nan")), "norm: expected a number above 0, got nan"),
        (lambda reducer: MomentumCorrection(reducer, 1), "momentum: expected a number in [0, 1), got 1"),
        (
            lambda reducer: LocalClipping(LocalClipping(reducer, 1), 1),
            "reducer: expected one without LocalClipping, got it inside",
        ),
        (
            lambda reducer: MomentumCorrection(ReducerWrapper(LocalClipping(reducer, 1.0)), 0.9),
            "reducer: expected LocalClipping around MomentumCorrection, got it inside",
        ),
        (lambda reducer: reducer.set_density(1.5), "density: expected a number in (0, 1], got 1.5"),
        (lambda reducer: density.exponential(0.5, 0.1, 0), "epochs: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(ranks, make, message):
    def body(comm):
        reducer = everything(comm)
        with pytest.raises(InvalidArgument) as caught:
            make(reducer)
        return str(caught.value), reducer.density

    assert ranks.run(body) == [(message, 1.0)] * ranks.size


def test_clipping_is_of_gradients_and_not_of_velocities(ranks):
    """A constant gradient of norm 5, clipped to 1, gathers momentum: 1, then 1.5, then 1.75."""

    def body(comm):
        reducer = MomentumCorrection(everything(comm), 0.5, masking=False)
        clipped = LocalClipping(reducer, norm=comm.size**0.5)
        return [clipped.reduce(np.array([0, 3, 4, 0])) for _ in range(3)]

    for means in ranks.run(body):
        for mean, norm in zip(means, [1, 1.5, 1.75], strict=True):
            np.testing.assert_allclose(mean, [0, 0.6 * norm, 0.8 * norm, 0], rtol=1e-6)  # a few roundings


@pytest.mark.parametrize(("wrapper", "value"), [(LocalClipping, 1.0), (MomentumCorrection, 0.5)])
def test_a_state_of_other_settings_is_refused_and_changes_nothing(ranks, wrapper, value):
    def body(comm):
        wrapped = wrapper(everything(comm, 20), value)
        others = [
            LocalClipping(everything(comm, 20), 2.0),
            MomentumCorrection(everything(comm, 20), 0.25),
            MomentumCorrection(everything(comm, 20), 0.5, masking=False),
            wrapper(everything(comm, 21), value),
        ]
        wrapped.reduce(drawn(20, comm.rank, 0))
        before = wrapped.residual.tobytes(), wrapped.density
        for other in others:
            with pytest.raises(InvalidArgument, match="state: expected one of equal settings"):
                wrapped.load_state_dict(other.state_dict())
        return (wrapped.residual.tobytes(), wrapped.density) == before

    assert all(ranks.run(body))


# ------------------------------------------------------------- by name

RECORDS = [{"name": "momentum_correction", "momentum": 0.5}, {"name": "local_clipping", "norm": 2.0}]


def test_make_reducer_puts_wrappers_around_the_innermost_first(ranks):
    def body(comm):
        topology = Topology(comm, ranks_per_node=2)
        by_name = make_reducer("hitopk", topology, 500, density=0.02, wrappers=RECORDS)
        inner = make_reducer("hitopk", topology, 500, density=0.02)
        by_hand = LocalClipping(MomentumCorrection(inner, 0.5), 2.0)
        gradients = [drawn(500, comm.rank, step) for step in range(3)]
        equal = [by_name.reduce(each).tobytes() == by_hand.reduce(each).tobytes() for each in gradients]
        return type(by_name).__name__, equal, by_name.settings() == by_hand.settings()

    assert ranks.run(body) == [("LocalClipping", [True] * 3, True)] * ranks.size


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"name": "momentum_corection"}, 'unknown wrapper "momentum_corection".*did you mean'),
        ({"name": "local_clipping", "nrom": 1}, "nrom: local_clipping has no such option.*did you mean"),
        ({"name": "momentum_correction"}, "momentum: momentum_correction needs this option, got none"),
        ({"name": "local_clipping", "norm": "large"}, "norm: expected a number above 0, got 'large'"),
        ({"name": "momentum_correction", "momentum": [0.9]}, r"momentum: expected a number .*, got \[0.9\]"),
        (RECORDS[0] | {"masking": "no"}, "masking: expected true or false, got 'no'"),
        ({"momentum": 0.9}, "wrappers: expected records of a name and options"),
        ("local_clipping", "wrappers: expected records of a name and options"),
    ],
)
def test_a_wrapper_that_cannot_be_made_is_refused(record, message):
    def body(comm):
        with pytest.raises(CommlibError, match=message):
            make_reducer("hitopk", Topology(comm), 10, wrappers=[record])
        with pytest.raises(CommlibError, match=message):
            BucketExchange(Topology(comm), [5, 5], {"name": "hitopk", "wrappers": [record]})
        with pytest.raises(InvalidArgument, match="reducer: expected a sparse one, got Dense"):
            make_reducer("dense", Topology(comm), 10, wrappers=[RECORDS[1]])
        return True

    assert all(simulated.run(body, 1))


def test_ranks_with_other_wrappers_are_named_before_a_step(ranks):
    def body(comm):
        last = comm.rank == comm.size - 1 > 0
        record = {"name": "momentum_correction", "momentum": 0.25 if last else 0.5}
        make_reducer("hitopk", Topology(comm), 10, wrappers=[record])

    if ranks.size > 1:
        with pytest.raises(RanksDisagree, match=r"MomentumCorrection is .*0\.5.* on ranks .*0\.25.* on"):
            ranks.run(body)


def test_a_state_of_a_wrapped_reducer_is_that_of_the_reducer_with_more(ranks):
    """So what reads residuals from states, as a resumed run at another world size, reads this one too."""

    def body(comm):
        wrapped = make_reducer("allgather", Topology(comm), 50, density=0.1, wrappers=RECORDS)
        wrapped.reduce(drawn(50, comm.rank, 0))
        state = wrapped.state_dict()
        inner = make_reducer("allgather", Topology(comm), 50, density=0.1)
        with pytest.raises(InvalidArgument, match="state: expected one of equal settings"):
            inner.load_state_dict(state)
        if comm.size > 1:
            inner.load_state_dict({**state, "settings": inner.settings()})
            assert inner.residual.tobytes() == wrapped.residual.tobytes()
        return set(state) - set(inner.state_dict()), wrapped.steps

    assert ranks.run(body) == [({"velocity"}, 1)] * ranks.size
