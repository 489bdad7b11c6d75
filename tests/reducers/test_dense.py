"""``dense`` with levels that the ring adds up; test_promises.py has it among its cases."""

import numpy as np
import pytest
from scipy.linalg import hadamard

from commlib import InvalidArgument, Topology, bytes_sent, make_reducer
from commlib.transport import simulated
from commlib.wire.hadamard import SIGNS

LARGEST = {"hadamard8": 127, "hadamard4": 7}


def gradient(size, rank, step=0):
    return np.random.default_rng([size, rank, step]).standard_t(3, size).astype(np.float32)


def reduced(ranks, size, values, steps=1, name="dense", given=gradient):
    """On every rank its means, its residual and the bytes that it sent in the last step."""

    def body(comm):
        reducer = make_reducer(name, Topology(comm, 1), size, values=values)
        means = [reducer.reduce(given(size, comm.rank, step)).copy() for step in range(steps)]
        return means, reducer.residual, reducer.last.traffic.sent.inter

    return simulated.run(body, ranks)


def transcription(given, values):
    """The mean of a step and the residuals in float64, from the matrix of the transform."""
    matrix, applied = hadamard(512) * SIGNS / 512, np.zeros_like(given)
    for low in range(0, given.shape[1], 512):
        bucket = given[:, low : low + 512]
        is_whole = bucket.shape[1] == 512
        rotated = bucket @ matrix.T if is_whole else bucket
        step = np.abs(rotated).max() / LARGEST[values]
        rounded = step * np.rint(rotated / step)
        applied[:, low : low + 512] = rounded @ (512 * matrix) if is_whole else rounded
    return applied.mean(axis=0), given - applied


@pytest.mark.parametrize(("world", "size"), [(2, 511), (3, 1300), (5, 512), (4, 3), (19, 1100)])
@pytest.mark.parametrize("values", LARGEST)
def test_all_ranks_apply_the_mean_of_their_rounded_values_and_keep_the_rest(world, size, values):
    seen = reduced(world, size, values, steps=3)
    residuals = np.zeros((world, size))
    for step in range(3):
        given = np.array([gradient(size, rank, step) for rank in range(world)], np.float64)
        mean, residuals = transcription(given + residuals, values)
        for means, _, _ in seen:
            assert means[step].tobytes() == seen[0][0][step].tobytes()
        # float32's roundings are some 1e-7 of the largest value, and no value lies so near to half a level
        np.testing.assert_allclose(seen[0][0][step], mean, atol=1e-5 * np.abs(given).max())
    np.testing.assert_allclose([own for _, own, _ in seen], residuals, atol=1e-4 * np.abs(given).max())


@pytest.mark.parametrize(
    ("values", "world", "width"),
    [("hadamard4", 18, 1), ("hadamard4", 19, 2), ("hadamard8", 2, 2), ("hadamard8", 3, 2)],
)
def test_levels_travel_in_the_smallest_integers_that_hold_their_sums(values, world, width):
    size = 512 * 2 * world  # two buckets a rank
    # the same on all ranks, and all ones after the rotation: all sums of levels are the largest
    same = np.zeros(size, np.float32)
    same[::512] = 512 * SIGNS[0]
    for (mean, *_), residual, sent in reduced(world, size, values, given=lambda *_: same):
        assert sent == 2 * (world - 1) * (width * 1024 + 4 * 2)
        np.testing.assert_allclose(mean, same, atol=1e-4)
        assert np.abs(residual).max() < 1e-4


@pytest.mark.parametrize("values", LARGEST)
def test_a_step_loses_what_levels_of_that_width_lose_and_less_than_a_torus(values):
    """With steps of ``s``, rounding loses ``s²/12`` of a rotated value in the mean."""
    ranks, size = 4, 512 * 200
    given = np.array([gradient(size, rank) for rank in range(ranks)], np.float64)
    rotated = given.reshape(ranks, -1, 512) @ (hadamard(512) * SIGNS / 512).T
    steps = np.abs(rotated).max(axis=(0, 2)) / LARGEST[values]
    # Of 512 values of each rank; the norm is 512^½ times as large when rotated back.
    expected = np.sqrt(512 * ranks * 512 * (steps**2).sum() / 12)
    lost = {
        name: np.linalg.norm(np.sum(given, axis=0) - ranks * reduced(ranks, size, values, name=name)[0][0][0])
        for name in ("dense", "torus2d")
    }
    assert lost["dense"] == pytest.approx(expected, rel=0.02)  # 400,000 independent errors
    assert lost["dense"] < 0.9 * lost["torus2d"]


def test_a_single_rank_rounds_nothing():
    (((mean,), residual, sent),) = reduced(1, 1300, "hadamard4")
    assert mean.tobytes() == gradient(1300, 0).tobytes()
    assert not residual.any()
    assert sent == 0


def test_values_too_large_to_rotate_back_void_the_step_on_every_rank():
    def body(comm):
        reducer = make_reducer("dense", Topology(comm), 600, values="hadamard8")
        reducer.reduce(gradient(600, comm.rank))
        before = reducer.residual
        huge = gradient(600, comm.rank)
        huge[:512] = SIGNS * 3e38 if comm.rank == 1 else 0
        reducer.reduce(huge)
        return reducer.last.finite, reducer.residual.tobytes() == before.tobytes(), before.any()

    assert simulated.run(body, 3) == [(False, True, True)] * 3


@pytest.mark.parametrize("values", ["qsgd4", "lloyd2", "fp16", "hadamard5", None])
def test_codecs_whose_sums_cannot_be_added_up_are_refused(values):
    with pytest.raises(InvalidArgument) as caught:
        reduced(2, 100, values)
    known = "fp32, hadamard8, hadamard4"
    expected = f"values: expected fp32 or a codec whose levels can be added up ({known}), got {values!r}"
    assert str(caught.value) == expected
    with pytest.raises(InvalidArgument, match="values: expected"):
        bytes_sent("dense", [[0], [1]], 0, 100, values=values)


def test_a_plain_ring_takes_states_from_before_it_had_options_and_none_of_rounded_values():
    def body(comm):
        plain, rounded = (
            make_reducer("dense", Topology(comm), 100, **values) for values in ({}, {"values": "hadamard4"})
        )
        plain.load_state_dict({"settings": plain.settings(), "steps": 3, "carried": None})
        assert "values" not in plain.settings()
        with pytest.raises(InvalidArgument, match="values is 'hadamard4' there and None here"):
            plain.load_state_dict(rounded.state_dict())
        return plain.steps

    assert simulated.run(body, 2) == [3, 3]
