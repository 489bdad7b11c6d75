"""Sums of squares: right to float64 rounding, equal on all ranks to the bit, however they are cut."""

import functools
import math

import ml_dtypes
import numpy as np
import pytest

import pto
from benchmarks.shapes import SHAPES
from commlib import Link, Network, transport
from tests.extent import more

WAYS = ["auto", "layers", "slices", "local"]
EPSILON = 2.0**-53  # the relative error of one float64 operation


def exact(tensor: np.ndarray) -> float:
    """The sum of squares, rounded once: squares of float32 and narrower numbers are exact in float64."""
    wide = np.asarray(tensor, np.float64).reshape(-1)
    return math.fsum((wide * wide).tolist())


def bound(size: int) -> float:
    """The relative error that the docstring of ``sum_of_squares`` allows."""
    return (size / 64 + 7) * EPSILON


def draw(shape, seed, dtype=np.float32) -> np.ndarray:
    """Entries of very different magnitudes from tensor to tensor, all below float16's largest."""
    generator = np.random.default_rng(seed)
    scale = 10.0 ** generator.uniform(-4, 1.5)
    return np.asarray(scale * generator.standard_t(2, shape)).astype(dtype)


def random_layers(seed: int) -> list[np.ndarray]:
    """1 to 300 tensors of 0 to 4 dimensions and 1 to about 10⁴ entries, of every type that is taken."""
    generator = np.random.default_rng([seed, 1])
    types = [np.float32, np.float32, np.float16, ml_dtypes.bfloat16]
    shapes = []
    for _ in range(generator.integers(1, 301)):
        dimensions = int(generator.integers(0, 5))
        largest = 10 ** generator.uniform(0, 4 / max(1, dimensions))
        shapes.append(tuple(generator.integers(1, largest + 1, dimensions).tolist()))
    return [draw(shape, [seed, i], types[generator.integers(4)]) for i, shape in enumerate(shapes)]


def thinned(name: str) -> list[np.ndarray]:
    """The tensors of a network, each with a fiftieth of its entries: number and proportions are true."""
    return [draw(max(1, math.prod(shape) // 50), [7, i]) for i, shape in enumerate(SHAPES[name]())]


LISTS = {
    **{f"random-{seed}": lambda seed=seed: random_layers(seed) for seed in range(5)},
    "resnet50": lambda: thinned("resnet50"),
    "transformer-base": lambda: thinned("transformer-base"),
    "none": list,
    "one-number": lambda: [np.array(3.0, np.float32)],
    "giant": lambda: [draw(1, 0), draw(300_001, 1), draw((), 2)],
    "fewer-than-ranks": lambda: [draw((2, 3), 3), draw(1, 4)],
    "empty-among-them": lambda: [np.empty((0, 4), np.float32), draw(9, 5), np.empty(0, np.float32)],
}


@functools.cache
def case_of(name: str):
    """Return two lists of tensors, the right sums ``(2, L)``, and those of one rank."""
    weights = LISTS[name]()
    lists = weights, [(np.asarray(weight, np.float32) / 3).T for weight in weights]
    return lists, *(
        np.array([[of(each) for each in own] for own in lists]) for of in (exact, pto.sum_of_squares)
    )


def sizes_of(tensors) -> list[int]:
    return [tensor.size for tensor in tensors]


def squares_of(ranks, way, *lists) -> np.ndarray:
    """The sums of squares, after two calls have given the same bits on every rank."""

    def body(comm):
        norms = pto.Norms(sizes_of(lists[0]), comm, lists=len(lists), partition=way)
        return norms.squares(*lists), norms.squares(*lists)

    results = [result for both in ranks.run(body) for result in both]
    for result in results:
        assert (result.shape, result.dtype) == ((len(lists), len(lists[0])), np.float64)
        assert result.tobytes() == results[0].tobytes()
    return results[0]


@pytest.mark.world_sizes(3, *more(1, 8))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LISTS)
def test_sums_are_right_and_equal_on_all_ranks(ranks, way, name):
    lists, right, local = case_of(name)
    sums = squares_of(ranks, way, *lists)
    # The sums of the pieces of a tensor are all positive: P − 1 additions more, each rounded once.
    bounds = np.array([bound(size) + ranks.size * EPSILON for size in sizes_of(lists[0])])
    assert (abs(sums - right) <= bounds * right).all()
    if way in ("layers", "local"):
        assert sums.tobytes() == local.tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_zeros_are_zero_and_bad_numbers_are_not_hidden(ranks, way):
    tensors = [draw(500, 1), np.zeros((20, 20), np.float32), draw((4, 5), 2), draw(300, 3)]
    tensors[0][77], tensors[2][3, 4] = np.inf, np.nan
    sums = squares_of(ranks, way, tensors, [np.zeros_like(tensor) for tensor in tensors])
    assert sums[0, 0] == np.inf
    assert sums[0, 1] == 0
    assert np.isnan(sums[0, 2])
    assert np.isfinite(sums[0, 3])
    assert (sums[1] == 0).all()


def test_the_largest_and_the_smallest_float32_are_squared_in_float64():
    info = np.finfo(np.float32)
    for value in (info.max, info.tiny, info.smallest_subnormal):
        assert pto.sum_of_squares(np.array([value, 0], np.float32)) == float(value) ** 2


@pytest.mark.parametrize("size", [0, 65, 100_003, *more(1, 2, 63, 64, 127, 4096, 32_768)])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_narrow_tensor_has_the_bits_of_its_float32_copy(size, dtype):
    narrow = np.random.default_rng(size).standard_normal(size).astype(dtype)
    assert pto.sum_of_squares(narrow) == pto.sum_of_squares(narrow.astype(np.float32))
    assert abs(pto.sum_of_squares(narrow) - exact(narrow)) <= bound(size) * exact(narrow)


@pytest.mark.parametrize("size", [1, 64, 65, 12_345])
def test_the_order_of_the_additions_is_the_stated_one(size):
    vector = np.random.default_rng(size).standard_normal(size)
    padded = np.zeros(-(-size // 64) * 64)
    padded[:size] = vector
    lanes = np.zeros(64)
    for row in padded.reshape(-1, 64):
        lanes += row * row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert pto.sum_of_squares(vector) == lanes[0]


def test_views_and_read_only_arrays_are_taken():
    matrix = draw((30, 40), 1)
    matrix.flags.writeable = False
    assert pto.sum_of_squares(matrix.T) == pto.sum_of_squares(matrix.T.copy())
    assert pto.sum_of_squares(matrix[::2, ::3]) == pto.sum_of_squares(matrix[::2, ::3].copy())
    unaligned = np.frombuffer(b"\0" + matrix.tobytes(), np.float32, offset=1)
    assert pto.sum_of_squares(unaligned) == pto.sum_of_squares(matrix)


@pytest.mark.parametrize("dtype", [np.int64, np.complex64, object, ">f4"])
def test_other_types_are_refused(dtype):
    with pytest.raises(
        pto.InvalidArgument, match=r"^tensor: expected float16, bfloat16, float32 or float64, got "
    ):
        pto.sum_of_squares(np.ones(3, dtype))


@pytest.mark.parametrize("way", ["layers", "slices"])
def test_all_lists_are_gathered_in_one_exchange_of_eight_bytes_a_piece(way):
    tensors = random_layers(2)

    def body(comm):
        norms = pto.Norms(sizes_of(tensors), comm, partition=way)
        allgather_ints, exchanged = comm.allgather_ints, []
        comm.allgather_ints = lambda values: exchanged.append(len(values)) or allgather_ints(values)
        comm.allgather = comm.allgather_objects = None  # neither is called any more
        norms.squares(tensors, tensors)
        return exchanged, max(map(len, norms.partition.pieces))

    for exchanged, pieces in transport.simulated.run(body, 3):
        assert exchanged == [2 * pieces]
        assert len(tensors) / 3 <= pieces <= len(tensors)


@pytest.mark.parametrize("way", ["layers", "slices"])
def test_a_rank_reads_its_own_part_only(way):
    tensors = [draw(size, size) for size in (700, 400, 200, 100, 50)]

    def body(comm):
        norms = pto.Norms(sizes_of(tensors), comm, lists=1, partition=way)
        mine = [np.full(tensor.size, np.nan, np.float32) for tensor in tensors]
        for piece in norms.partition.pieces[comm.rank]:
            mine[piece.tensor][piece.low : piece.high] = tensors[piece.tensor][piece.low : piece.high]
        return norms.squares(mine), norms.squares(tensors)

    for ours, theirs in transport.simulated.run(body, 3):
        assert np.isfinite(ours).all()
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("alpha", "in_parts"), [(0.0, True), (1.0, False)])
def test_auto_computes_in_parts_where_that_is_faster_and_says_so(alpha, in_parts):
    network = Network(Link(alpha, 0.0), Link(alpha, 0.0))
    sizes = [1_000_000] * 4

    def body(comm):
        norms = pto.Norms(sizes, comm)
        return norms.choice, norms.partition

    (choice, partition), *others = transport.simulated.run(body, 2, network=network, cores=2)
    assert others == [(choice, partition)]
    assert choice.in_parts is in_parts is (partition is not None)
    assert (choice.seconds.part + choice.seconds.exchange < choice.seconds.whole) is in_parts
    assert choice.seconds.part == pytest.approx(choice.seconds.whole / 2, rel=0.01)  # four equal tensors
    assert choice.reason.startswith("norms in parts by " if in_parts else "norms locally: ")


def test_one_rank_and_no_communicator_compute_locally():
    def body(comm):
        comm.allgather_ints = comm.allgather = comm.allgather_objects = None
        norms = pto.Norms([2], comm, lists=1, partition="slices")
        return norms.squares([np.array([3, 4], np.float32)]), norms.choice, norms.partition

    ((sums, choice, partition),) = transport.simulated.run(body, 1)
    assert sums.tolist() == [[25]]
    alone = pto.Norms([2], None, lists=1)
    assert choice == alone.choice == pto.Choice(False, "norms locally: there is one rank")
    assert partition is None
    assert alone.squares([np.array([3, 4], np.float32)]).tolist() == [[25]]


def test_ranks_that_disagree_are_named():
    def body(comm):
        with pytest.raises(pto.RanksDisagree) as sizes:
            pto.Norms([5, 6 + (comm.rank == 1)], comm)
        with pytest.raises(pto.RanksDisagree) as ways:
            pto.Norms([5], comm, partition="slices" if comm.rank else "layers")
        return str(sizes.value), str(ways.value)

    expected = (
        "tensors: tensor 1 is of 6 entries on ranks [0, 2], of 7 entries on ranks [1]",
        "settings: partition is layers on ranks [0], slices on ranks [1, 2]",
    )
    assert transport.simulated.run(body, 3) == [expected] * 3


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        ([], "lists: expected 2, got 0"),
        ([[np.ones(2)], [np.ones(2)] * 2], "list 1: expected 1 tensors, got 2"),
        ([[np.ones(2)], [np.ones(3)]], "list 1, tensor 0: expected 2 entries, got 3"),
    ],
)
def test_lists_that_were_not_planned_are_refused(ranks, lists, says):
    def body(comm):
        norms = pto.Norms([2], comm, partition="slices")
        with pytest.raises(pto.InvalidArgument) as error:
            norms.squares(*lists)
        return str(error.value)

    assert ranks.run(body) == [says] * ranks.size


def test_unknown_settings_are_refused():
    with pytest.raises(
        pto.InvalidArgument, match='^partition: expected one of auto, layers, slices, local, got "x"$'
    ):
        pto.Norms([1], None, partition="x")
