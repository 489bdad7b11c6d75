"""Numbers that travel with the mean: sums of squares of segments, against a float64 reference."""

import numpy as np
import pytest

from commlib import InvalidArgument, RanksDisagree, SparseVector, Topology, make_reducer
from commlib.memory import ALIGNMENT_BYTES
from commlib.reducers import REDUCERS, Passenger
from commlib.transport import simulated

CASES = {
    "torus2d": ("torus2d", {}),
    "hitopk": ("hitopk", {"density": 0.05}),
    "hitopk-dense-messages": ("hitopk", {"density": 0.9}),
    "hitopk-gap+fp16": ("hitopk", {"density": 0.05, "wire": "gap+fp16"}),
    "hioktopk": ("hioktopk", {"density": 0.05}),
}
WORLD_SIZES = [1, 2, 3, 4, 6, 8]
SIZE = 1009  # a prime: no part is as long as the next
LIMITS = np.cumsum([0, 1, 300, 7, 400, 1, 300])  # segments that begin and end inside of parts
STEPS = 3


def layouts(ranks: int) -> list:
    uneven = {1: [1], 2: [1, 1], 3: [2, 1], 4: [1, 3], 6: [3, 1, 2], 8: [3, 2, 3]}
    return [1, 2, 3, uneven[ranks]]


def gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_t(3, SIZE).astype(np.float32)


class Segments:
    """The sums of squares, of the mean and of weights, of the segments that a part touches."""

    def __init__(self, weights: np.ndarray | None = None) -> None:
        self.weights = np.arange(SIZE, dtype=np.float32) if weights is None else weights
        self.asked: list[tuple[int, int]] = []
        self.trips: list[list] = []

    def look(self, arrays):
        (self.weights,) = arrays

    def _touched(self, low, high):
        cuts = np.clip(LIMITS, low, high)
        return [(first, last) for first, last in zip(cuts[:-1], cuts[1:], strict=True) if first < last]

    def count(self, low, high):
        assert low < high
        return 2 * len(self._touched(low, high))

    def numbers(self, low, high, mean):
        self.asked.append((low, high))
        dense = mean.to_dense() if isinstance(mean, SparseVector) else mean
        assert dense.shape == (high - low,)
        squares = [
            np.square(values, dtype=np.float64).sum()
            for first, last in self._touched(low, high)
            for values in (dense[first - low : last - low], self.weights[first:last])
        ]
        return np.array(squares)

    def arrived(self, shards):
        self.trips.append(shards)

    def sums(self, shards) -> np.ndarray:
        """Put what arrived together: shape ``(2, segments)``."""
        total = np.zeros((2, len(LIMITS) - 1))
        for low, high, numbers in shards:
            for (first, _), pair in zip(self._touched(low, high), numbers.reshape(-1, 2), strict=True):
                total[:, np.searchsorted(LIMITS, first, side="right") - 1] += pair
        return total


def reference(vector: np.ndarray) -> np.ndarray:
    squares = vector.astype(np.float64) ** 2
    return np.array([squares[low:high].sum() for low, high in zip(LIMITS[:-1], LIMITS[1:], strict=True)])


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request):
    return request.param


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sums_arrive_on_all_ranks_and_equal_a_float64_reference(case, world_size):
    name, options = case

    def body(comm):
        reducer = make_reducer(name, Topology(comm), SIZE, **options)
        reducer.passenger = passenger = Segments()
        means = [reducer.reduce(gradient(comm.rank, step)) for step in range(STEPS)]
        return means, passenger

    for ranks_per_node in layouts(world_size):
        seen = simulated.run(body, world_size, ranks_per_node)
        means, first = seen[0]
        for _, passenger in seen:
            assert len(passenger.trips) == STEPS
            for trip, same in zip(passenger.trips, first.trips, strict=True):
                assert [shard[:2] for shard in trip] == [shard[:2] for shard in same]
                assert [shard[2].tobytes() for shard in trip] == [shard[2].tobytes() for shard in same]
        for mean, trip in zip(means, first.trips, strict=True):
            assert [0, *(high for _, high, _ in trip)] == [*(low for low, _, _ in trip), SIZE]
            of_mean, of_weights = first.sums(trip)
            np.testing.assert_allclose(
                of_mean, reference(mean), rtol=1e-14
            )  # float64, added in another order
            np.testing.assert_allclose(of_weights, reference(first.weights), rtol=1e-14)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_is_asked_once_a_step_about_its_own_part(case, world_size):
    name, options = case

    def body(comm):
        topology = Topology(comm)
        reducer = make_reducer(name, topology, SIZE, **options)
        reducer.passenger = passenger = Segments()
        reducer.reduce(gradient(comm.rank, 0))
        return passenger.asked, topology.local_rank, topology.streams, topology.node_index

    for ranks_per_node in layouts(world_size):
        seen = simulated.run(body, world_size, ranks_per_node)
        for asked, local_rank, streams, _ in seen:
            assert len(asked) == (local_rank < streams)  # ranks beyond own nothing
        if name == "torus2d":  # each rank has a part of its own, as long as those of the other ranks
            asked = sorted(part for parts, *_ in seen for part in parts)
            lengths = [high - low for low, high in asked]
            assert [low for low, _ in asked] == [0, *(high for _, high in asked[:-1])]
            assert max(lengths) - min(lengths) <= 2  # a shard is cut to one entry, and so is each into parts
        else:  # each node holds all shards
            for node in {node for *_, node in seen}:
                asked = sorted(part for parts, *_, own in seen if own == node for part in parts)
                assert [low for low, _ in asked] == [0, *(high for _, high in asked[:-1])]
                assert asked[-1][1] == SIZE


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_passenger_changes_no_result_and_adds_only_its_numbers_to_the_bytes(case, world_size):
    name, options = case

    def body(comm):
        topology = Topology(comm)
        reducer, twin = (make_reducer(name, topology, SIZE, **options) for _ in range(2))
        reducer.passenger = passenger = Segments()
        for step in range(STEPS):
            mean, same = reducer.reduce(gradient(comm.rank, step)), twin.reduce(gradient(comm.rank, step))
            assert mean.tobytes() == same.tobytes()
        assert reducer.residual.tobytes() == twin.residual.tobytes()
        more = reducer.last.traffic - twin.last.traffic
        numbers = [len(shard[2]) for shard in passenger.trips[-1]]
        return more, numbers, topology

    for ranks_per_node in layouts(world_size):
        for more, numbers, topology in simulated.run(body, world_size, ranks_per_node):
            assert (more.sent.inter, more.received.inter) == (0, 0)
            own, node = topology.local_rank, topology.node.size
            if name == "torus2d" or node == 1:  # with the agreement, which is no payload; nobody to send to
                assert (more.sent.intra, more.received.intra) == (0, 0)
                continue
            # Round the ring each rank passes on all numbers but those of its right neighbour.
            of_rank = numbers + [0] * (node - len(numbers))
            assert more.sent.intra == 8 * (sum(numbers) - of_rank[(own + 1) % node])
            assert more.received.intra == 8 * (sum(numbers) - of_rank[own])


def test_numbers_take_no_message_of_their_own(case):
    name, options = case

    def messages(passenger):
        def body(comm):
            reducer = make_reducer(name, Topology(comm), SIZE, **options)
            reducer.passenger = passenger
            reducer.reduce(gradient(comm.rank, 0))

        record = []
        simulated.run(body, 6, 3, record=record)
        return len(record)

    assert messages(Segments()) == messages(None) > 0


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_void_step_brings_nothing(case, world_size):
    name, options = case
    if "wire" in options:  # half precision would send 65,504 of each, and keep the rest
        options = options | {"wire": "gap"}

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), SIZE, **options)
        reducer.passenger = passenger = Segments()
        poisoned = gradient(comm.rank, 0)
        poisoned[500] = np.nan if comm.rank == comm.size - 1 else 0
        trips = []
        # The second is finite on each rank, and infinite in the sum of two or more.
        for given in (poisoned, np.full(SIZE, 3e38, np.float32), gradient(comm.rank, 1)):
            reducer.reduce(given)
            trips.append(len(passenger.trips))
        return trips

    expected = [0, 1, 2] if world_size == 1 else [0, 0, 1]
    assert simulated.run(body, world_size) == [expected] * world_size


def test_parts_without_entries_are_left_out(case):
    name, options = case

    class Length:
        def count(self, low, high):
            return high - low

        def numbers(self, low, high, mean):
            return np.arange(low, high, dtype=np.float64)

        def arrived(self, shards):
            self.shards = shards

    def body(comm):
        reducer = make_reducer(name, Topology(comm), 2, **options)
        reducer.passenger = passenger = Length()
        reducer.reduce(np.ones(2, np.float32))
        return [(low, high, numbers.tolist()) for low, high, numbers in passenger.shards]

    for shards in simulated.run(body, 8, 4):
        assert shards == [(0, 1, [0.0]), (1, 2, [1.0])]


@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_that_carries_none_refuses(name):
    def body(comm):
        reducer = make_reducer(name, Topology(comm), SIZE)
        assert reducer.passenger is None
        reducer.passenger = None
        if reducer.carries:
            reducer.passenger = passenger = Segments()
            return reducer.passenger is passenger
        with pytest.raises(InvalidArgument, match="passenger: expected a reducer that carries one, "):
            reducer.passenger = Segments()
        return reducer.passenger is None

    assert simulated.run(body, 2) == [True, True]
    assert REDUCERS[name].carries == (name in ("torus2d", "hitopk", "hioktopk"))


@pytest.mark.parametrize("there_is_another", [True, False])
def test_ranks_with_different_passengers_are_named(case, there_is_another):
    name, options = case

    class Another(Segments):
        def count(self, low, high):
            return 1

    def body(comm):
        reducer = make_reducer(name, Topology(comm), SIZE, **options)
        other = Another() if there_is_another else None
        with pytest.raises(RanksDisagree) as caught:
            reducer.passenger = other if comm.rank == 0 else Segments()
        return str(caught.value)

    # Of the six segments four touch the first half, and three the second.
    others = [1, 1] if there_is_another else None
    named = f"numbers of the passenger is {others} on ranks [0], [8, 6] on ranks [1]"
    assert simulated.run(body, 2) == [f"the reducer is not the same on all ranks: {named}"] * 2


@pytest.mark.parametrize("numbers", [np.zeros(7), np.zeros(8, np.float32), np.zeros((8, 1))], ids=str)
def test_numbers_that_are_not_those_announced_are_refused(case, numbers):
    name, options = case

    class Wrong(Segments):
        def count(self, low, high):
            return 8

        def numbers(self, low, high, mean):
            return numbers

    def body(comm):
        reducer = make_reducer(name, Topology(comm), SIZE, **options)
        reducer.passenger = Wrong()
        reducer.reduce(gradient(comm.rank, 0))

    with pytest.raises(InvalidArgument, match="passenger: expected 8 float64 numbers about entries 0 … "):
        simulated.run(body, 2)


def test_a_passenger_that_gets_off_costs_nothing(case):
    name, options = case

    def body(comm):
        reducer = make_reducer(name, Topology(comm), SIZE, **options)
        reducer.passenger = passenger = Segments()
        reducer.reduce(gradient(comm.rank, 0))
        state = reducer.state_dict()
        reducer.passenger = None
        reducer.reduce(gradient(comm.rank, 1))
        restored = make_reducer(name, Topology(comm), SIZE, **options)
        restored.load_state_dict(state)  # a passenger is no part of the state
        restored.reduce(gradient(comm.rank, 1))
        return len(passenger.trips), reducer.last.traffic == restored.last.traffic

    assert simulated.run(body, 4, 2) == [(1, True)] * 4


def test_a_class_of_ones_own_is_a_passenger():
    passenger: Passenger = Segments()
    assert passenger.count(0, SIZE) == 2 * (len(LIMITS) - 1)


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("density", [0.05, 0.9])
def test_means_lie_where_tensorflow_takes_them_over(name, density):
    options = {"density": density} if REDUCERS[name].sparse else {}

    def body(comm):
        reducer = make_reducer(name, Topology(comm), SIZE, **options)
        means = [reducer.reduce(gradient(comm.rank, step)) for step in range(STEPS)]
        return [mean.ctypes.data % ALIGNMENT_BYTES for mean in means]

    for world_size in (1, 3, 4):
        assert simulated.run(body, world_size, 2) == [[0] * STEPS] * world_size
