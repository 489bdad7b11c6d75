"""The update rules against float64 references, and at their edges, with NumPy arrays."""

import math
import re

import numpy as np
import pytest

from pto.errors import InvalidArgument
from pto.rules import BIAS_AND_NORMALISATION, Adam, Lamb, Lars, LossScaling, Muon, Sgd, newton_schulz
from tests.pto import reference

RULES = {
    "sgd": (Sgd(0.9), lambda excluded: reference.Momentum(0.9)),
    "sgd-nesterov": (Sgd(0.9, nesterov=True), lambda excluded: reference.Momentum(0.9, True)),
    "sgd-plain": (Sgd(), lambda excluded: reference.Momentum()),
    "lars": (
        Lars(weight_decay=0.01, epsilon=1e-3),
        lambda excluded: reference.Lars(weight_decay=0.01, epsilon=1e-3, excluded=excluded),
    ),
    "lars-nesterov": (
        Lars(0.8, True, weight_decay=0.1, trust=0.02),
        lambda excluded: reference.Lars(0.8, True, weight_decay=0.1, trust=0.02, excluded=excluded),
    ),
    "lars-no-momentum": (Lars(0.0), lambda excluded: reference.Lars(0.0, excluded=excluded)),
    "lamb": (Lamb(weight_decay=0.01), lambda excluded: reference.Lamb(weight_decay=0.01, excluded=excluded)),
    "lamb-clipped": (
        Lamb(0.8, 0.95, 1e-3, 0.1, 1.5, 3.0),
        lambda excluded: reference.Lamb(
            0.8, 0.95, 1e-3, 0.1, least_norm=1.5, largest_norm=3.0, excluded=excluded
        ),
    ),
    "muon": (
        Muon(0.8, 0.95, weight_decay=0.1),
        lambda excluded: reference.Muon(0.8, 0.95, weight_decay=0.1, excluded=excluded),
    ),
    "muon-spectral": (
        Muon(momentum=0.5, nesterov=False, scale="spectral"),
        lambda excluded: reference.Muon(momentum=0.5, nesterov=False, scale="spectral", excluded=excluded),
    ),
}


def stepped(rule, weights, states, gradients, step, rate, adapted):
    """One step of all tensors, as an adapter makes it."""
    corrections = rule.corrections(np.float64(step), np)
    aimed = [
        rule.direction(*each, corrections, adapted=one, xp=np)
        for *each, one in zip(weights, gradients, states, adapted, strict=True)
    ]
    if isinstance(rule, Muon):
        of_each = list(zip(weights, gradients, states, adapted, strict=True))
        for number, (weight, gradient, state, one) in enumerate(of_each):
            if (matrix := rule.matrix("kernel", weight.shape)) is not None:
                aim, state = rule.momentum_of(gradient, state)
                orthogonal = newton_schulz(aim.reshape(matrix), np).reshape(weight.shape)
                aimed[number] = rule.along(orthogonal, matrix, weight, adapted=one), state
    aims, states = [aim for aim, _ in aimed], [state for _, state in aimed]
    ratios = np.ones(len(weights))
    if rule.adapts:
        squares = np.array([[np.sum(tensor**2) for tensor in tensors] for tensors in (weights, aims)])
        ratios = np.where(adapted, rule.ratio(squares, np), 1)
    moved = [
        rule.apply(weight, aim, state, rate * ratio, adapted=one)
        for weight, aim, state, ratio, one in zip(weights, aims, states, ratios, adapted, strict=True)
    ]
    return [weight for weight, _ in moved], [state for _, state in moved]


@pytest.mark.parametrize("rule, make", RULES.values(), ids=RULES)
def test_a_rule_is_the_reference_over_100_steps(rule, make):
    start, gradients = reference.weights_and_gradients(100)
    rates = np.linspace(0.5, 0.01, 100)
    adapted = [reference.EXCLUDED not in name for name in reference.NAMES]
    weights = [weight.astype(float) for weight in start]
    states = [tuple(np.zeros(weight.shape) for _ in rule.slots) for weight in weights]
    for number, (rate, step) in enumerate(zip(rates, gradients, strict=True)):
        step = [gradient.astype(float) for gradient in step]
        weights, states = stepped(rule, weights, states, step, number + 1, rate, adapted)
    for weight, expected in zip(weights, reference.trained(make, start, gradients, rates), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-10, atol=1e-12)  # other orders of float64 sums


@pytest.mark.parametrize(
    ("path", "shape", "matrix"),
    [
        ("block/expand/kernel", (8, 32), (8, 32)),
        ("conv/kernel", (3, 3, 4, 16), (36, 16)),
        ("attention/query/kernel", (8, 2, 4), (16, 4)),
        ("embedding/embeddings", (100, 8), None),
        ("logits/kernel", (8, 10), None),
        ("my_logits/kernel", (8, 10), (8, 10)),
        ("depthwise/kernel", (3, 3, 8, 1), None),
        ("row/kernel", (1, 8), None),
        ("bias", (8,), None),
        ("scale", (), None),
    ],
)
def test_matrices_are_known_by_shape_and_path(path, shape, matrix):
    assert Muon().matrix(path, shape) == matrix
    assert Muon(adamw="").matrix(path, shape) is None


def test_orthogonal_matrices_stay_what_they_are_but_for_the_scale():
    """The iteration of a singular value is a polynomial; five steps bring all of them to 0.68 … 1.14."""
    random = np.random.default_rng(3)
    for rows, columns in ((6, 6), (4, 9), (9, 4)):
        left, _, right = np.linalg.svd(random.standard_normal((rows, columns)), full_matrices=False)
        values = np.geomspace(1, 0.01, 4 if rows != columns else 6)
        found = newton_schulz(np.float32(left * values @ right), np)
        along = left.T @ found @ right.T
        expected = values / np.sqrt(np.sum(values**2))
        for _ in range(5):
            expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
        np.testing.assert_allclose(along, np.diag(expected), atol=1e-4)  # float32 rounding, times 3.4445⁵
        assert ((expected > 0.68) & (expected < 1.14)).all()
        assert found.dtype == np.float32


@pytest.mark.parametrize(
    ("path", "is_excluded"),
    [
        ("dense/bias", True),
        ("batch_normalization/gamma", True),
        ("block/batch_normalization_3/beta", True),
        ("bias", True),
        ("dense/kernel", False),
        ("dense/unbias", False),
        ("beta/kernel", False),
        ("bias_correction/scale", False),
    ],
)
def test_biases_and_weights_of_normalisations_are_neither_decayed_nor_adapted(path, is_excluded):
    assert (re.search(BIAS_AND_NORMALISATION, path) is not None) == is_excluded


@pytest.mark.parametrize("rule", [Lars(weight_decay=0.1, epsilon=0.5), Lamb(weight_decay=0.1)])
def test_the_ratio_is_one_where_a_norm_is_zero_and_a_nan_stays(rule):
    squares = np.array([[0.0, 4.0, 0.0, 4.0, math.nan], [9.0, 0.0, 0.0, math.nan, 9.0]])
    assert np.array_equal(rule.ratio(squares, np), [1, 1, 1, math.nan, math.nan], equal_nan=True)


def test_the_ratios_are_the_papers():
    squares = np.array([[4.0, 100.0], [9.0, 0.25]])
    lars = Lars(weight_decay=0.1, trust=0.01, epsilon=0.5)
    np.testing.assert_allclose(lars.ratio(squares, np), [0.02 / 3.7, 0.1 / 2.0], rtol=1e-15)
    np.testing.assert_allclose(Lamb().ratio(squares, np), [2 / 3, 20], rtol=1e-15)
    clipped = Lamb(least_norm=3.0, largest_norm=5.0)
    np.testing.assert_allclose(clipped.ratio(squares, np), [1, 10], rtol=1e-15)
    assert Lamb(least_norm=0.5).ratio(np.array([[0.0], [4.0]]), np).tolist() == [0.25]


def test_from_when_the_variance_is_frozen_steps_are_linear_in_the_gradients():
    """Five gradients of one, then ``g``: the corrected second moment is one from the first to the last."""
    seen, g, rule = 5, np.array([0.0, -3.0, 1e30]), Adam(0.8, 0.9, epsilon=0.5, freeze_variance=5)
    weights, states, moved = [np.zeros(3)], [(np.zeros(3), np.zeros(3))], 0.0
    for step in range(1, 9):
        gradient = np.ones(3) if step <= seen else g
        frozen = states[0][1]
        weights, states = stepped(rule, weights, states, [gradient], step, 0.1, [False])
        later = max(0, step - seen)
        mean = (1 - 0.8 ** min(step, seen)) * 0.8**later + g * (1 - 0.8**later)
        moved = moved + 0.1 * mean / (1 - 0.8**step) / (1 + 0.5)
        np.testing.assert_allclose(-weights[0], moved, rtol=1e-14)
        assert np.array_equal(states[0][1], frozen) == (step > seen)


def test_rules_leave_what_they_are_given_as_it_was():
    for rule, _ in RULES.values():
        weight, gradient = np.array([3.0, 4.0]), np.array([1.0, 2.0])
        state = tuple(np.array([0.5, 0.25]) for _ in rule.slots)
        aim, new = rule.direction(weight, gradient, state, rule.corrections(1.0, np), adapted=True, xp=np)
        rule.apply(weight, aim, new, 0.1, adapted=True)
        assert (weight.tolist(), gradient.tolist()) == ([3, 4], [1, 2])
        assert [array.tolist() for array in state] == [[0.5, 0.25]] * len(rule.slots)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Sgd(momentum=1.0), "momentum: expected 0 or more, below 1, got 1.0"),
        (lambda: Sgd(nesterov=True), "nesterov: expected False where momentum is 0, got True"),
        (lambda: Lars(trust=0.0), "trust: expected more than 0, got 0.0"),
        (lambda: Lars(weight_decay=-1.0), "weight_decay: expected 0 or more, got -1.0"),
        (lambda: Lars(weight_decay=math.nan), "weight_decay: expected 0 or more, got nan"),
        (lambda: Lamb(beta_2=1.5), "beta_2: expected 0 or more, below 1, got 1.5"),
        (lambda: Lamb(epsilon=0.0), "epsilon: expected more than 0, got 0.0"),
        (lambda: Lamb(freeze_variance=0), "freeze_variance: expected at least 1, got 0"),
        (
            lambda: Lamb(least_norm=2.0, largest_norm=1.0),
            "largest_norm: expected more than least_norm, 2.0, got 1.0",
        ),
        (lambda: Muon(momentum=1.0), "momentum: expected 0 or more, below 1, got 1.0"),
        (lambda: Muon(scale="max"), "scale: expected rms or spectral, got max"),
        (lambda: Muon(adamw="(a"), r"adamw: expected a regular expression, got '\(a'"),
        (lambda: LossScaling(growth_steps=0), "growth_steps: expected at least 1, got 0"),
        (lambda: LossScaling(initial=0.0), "initial: expected 5.96.* to 16777216.0, got 0.0"),
    ],
)
def test_what_a_setting_allows_is_said(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_a_loss_scale_doubles_after_good_steps_and_halves_after_a_bad_one():
    scaling = LossScaling(initial=8.0, growth_steps=3)
    scale, good = np.float32(8), np.int64(0)
    seen = []
    for finite in [True, True, False, True, True, True, True, False, False]:
        scale, good = scaling.after(scale, good, finite, np)
        seen.append((float(scale), int(good)))
    assert seen == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1), (4, 0), (2, 0)]


def test_a_loss_scale_stays_within_its_bounds():
    scaling = LossScaling(growth_steps=1)
    up = down = np.float32(scaling.initial), np.int64(0)
    for _ in range(100):
        up, down = scaling.after(*up, True, np), scaling.after(*down, False, np)
    assert (up[0], down[0]) == (2.0**24, 2.0**-24)
