"""Sparse training ends where dense training ends: on a convex problem, and on digits with a hidden layer.

Four ranks on two nodes, density 0.01 after gTop-k's warm-up of four epochs, plain SGD written out in NumPy.
"""

import functools

import numpy as np
import pytest
from sklearn.datasets import load_digits

from commlib import REDUCERS, Topology, density, make_reducer
from commlib.reducers import MomentumCorrection, ReducerWrapper
from commlib.transport import simulated
from tests.extent import ALL, more

RANKS = 4


class WarmUp(ReducerWrapper):
    """gTop-k's densities, one an epoch, and then the reducer's own."""

    def __init__(self, reducer, steps_per_epoch):
        super().__init__(reducer)
        self.densities, self.steps_per_epoch = [*density.GTOPK_WARM_UP, reducer.density], steps_per_epoch

    def _before(self, gradient):
        own = self.densities[min(self.steps // self.steps_per_epoch, len(self.densities) - 1)]
        if own != self.density:
            self.set_density(own)
        return gradient


def reducer_for(comm, name, size, steps_per_epoch):
    topology = Topology(comm, ranks_per_node=2)
    if not REDUCERS[name].sparse:
        return make_reducer(name, topology, size)
    reducer = make_reducer(name, topology, size, density=0.01)
    return WarmUp(reducer, steps_per_epoch)


# ------------------------------------------------------------- least squares


UNKNOWNS, STEPS = 300, 2000 if ALL else 1000


@functools.cache
def least_squares():
    """Every rank's part of ``|M·w − t|²/2``, as the matrix and vector of its gradient ``A·w − b``."""
    rng = np.random.default_rng(5)
    matrix = rng.standard_normal((RANKS, 300, UNKNOWNS)) / np.sqrt(300)
    target = rng.standard_normal((RANKS, 300))
    return [(own.T @ own, own.T @ its) for own, its in zip(matrix, target, strict=True)]


def excess(weights):
    """How far the objective is above its minimum, relative to where it began, at zero."""
    curvature, constant = (sum(parts) for parts in zip(*least_squares(), strict=True))
    away, began = weights - np.linalg.solve(curvature, constant), np.linalg.solve(curvature, constant)
    return (away @ curvature @ away) / (began @ curvature @ began)


def descend(gradient_of):
    weights = np.zeros(UNKNOWNS)
    for step in range(STEPS):
        weights -= 0.02 * (1 - step / STEPS) * gradient_of(weights)
    return weights


@functools.cache
def least_squares_excess(name):
    def body(comm):
        curvature, constant = least_squares()[comm.rank]
        reducer = reducer_for(comm, name, UNKNOWNS, steps_per_epoch=50)
        return descend(lambda weights: reducer.reduce(curvature @ weights - constant))

    weights, *others = simulated.run(body, RANKS)
    assert all((other == weights).all() for other in others)
    return excess(weights)


@pytest.mark.parametrize("name", ["hitopk", *more("oktopk", "allgather", "gtopk", "hioktopk")])
def test_least_squares_end_within_a_hundredth_of_the_way_from_the_minimum(name):
    assert 0 <= least_squares_excess("dense") < 0.01
    assert 0 <= least_squares_excess(name) < 0.01


# ------------------------------------------------------------- digits


@functools.cache
def digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 16).astype(np.float32)
    return images[:1000], labels[order][:1000], images[1000:], labels[order][1000:]


class Network:
    """64 inputs, 64 rectified units, 10 classes; all weights in one vector of 4,810."""

    size = 64 * 64 + 64 + 64 * 10 + 10

    def __init__(self):
        self.weights = np.random.default_rng(1).standard_normal(self.size).astype(np.float32) * 0.1
        parts = np.split(self.weights, np.cumsum([64 * 64, 64, 64 * 10]))
        self.first, self.first_bias = parts[0].reshape(64, 64), parts[1]
        self.second, self.second_bias = parts[2].reshape(64, 10), parts[3]

    def outputs(self, images):
        hidden = np.maximum(images @ self.first + self.first_bias, 0)
        return hidden, hidden @ self.second + self.second_bias

    def gradient(self, images, labels):
        hidden, outputs = self.outputs(images)
        error = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        back = (error @ self.second.T) * (hidden > 0)
        parts = [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        return np.concatenate([part.ravel() for part in parts])


@functools.cache
def digits_accuracy(name, momentum=0.0):
    images, labels, test_images, test_labels = digits()
    batch, epochs = 16, 24
    steps = len(images) // (RANKS * batch)

    def body(comm):
        network = Network()
        reducer = reducer_for(comm, name, Network.size, steps)
        if momentum and REDUCERS[name].sparse:
            reducer = MomentumCorrection(reducer, momentum)
        velocity = np.zeros(Network.size, np.float32)
        for epoch in range(epochs):
            order = np.random.default_rng([2, epoch]).permutation(len(images))
            rate = 0.5 * (1 - epoch / epochs)
            for step in range(steps):
                first = (step * RANKS + comm.rank) * batch
                own = order[first : first + batch]
                mean = reducer.reduce(network.gradient(images[own], labels[own]))
                velocity = mean if REDUCERS[name].sparse else momentum * velocity + mean
                network.weights -= np.float32(rate * (1 - momentum)) * velocity
        return np.mean(network.outputs(test_images)[1].argmax(axis=1) == test_labels)

    accuracies = simulated.run(body, RANKS)
    assert len(set(accuracies)) == 1
    return accuracies[0]


@pytest.mark.parametrize("name", ["gtopk", "oktopk", "hitopk", *more("allgather", "hioktopk")])
def test_digits_end_within_one_percent_of_dense(name):
    dense = digits_accuracy("dense")
    assert dense > 0.95
    assert digits_accuracy(name) > dense - 0.01


@pytest.mark.parametrize("name", ["oktopk", *more("allgather", "hitopk")])
def test_digits_with_corrected_momentum_end_near_dense_with_momentum(name):
    dense = digits_accuracy("dense", momentum=0.9)
    assert dense > 0.95
    # masking starts velocities again: 24 epochs are a little short for it
    assert digits_accuracy(name, momentum=0.9) > dense - 0.03


def test_without_the_residual_it_would_not_converge():
    """What the tests above hold on to: as many entries of every rank, and the rest thrown away."""

    def gradient_of(weights):
        mean = np.zeros(UNKNOWNS)
        for curvature, constant in least_squares():
            own = curvature @ weights - constant
            largest = np.argsort(-np.abs(own))[:3]
            mean[largest] += own[largest] / RANKS
        return mean

    assert excess(descend(gradient_of)) > 0.01
