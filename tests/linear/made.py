"""Rows of a rank for tests, and training in float64 as it is written in textbooks: with dense vectors."""

import numpy as np
from scipy import sparse

from training.linear.config import checked
from training.linear.rows import Rows

FEATURES = 300
VALUES = {
    "logistic": lambda z: np.logaddexp(0, -z),
    "hinge": lambda z: np.maximum(0, 1 - z),
    "squared_hinge": lambda z: np.maximum(0, 1 - z) ** 2,
}
SLOPES = {
    "logistic": lambda z: -1 / (1 + np.exp(z)),
    "hinge": lambda z: -1.0 * (z < 1),
    "squared_hinge": lambda z: -2 * np.maximum(0, 1 - z),
}


def matrix_of(rank, rows=40, features=FEATURES):
    """Few entries a row, more in the first columns than in the last; labels that a plane nearly separates."""
    rng = np.random.default_rng([7, rank])
    dense = rng.standard_normal((rows, features)) * (
        rng.random((rows, features)) < 8 / np.arange(1, features + 1)
    )
    truth = np.random.default_rng(7).standard_normal(features)
    labels = np.where(dense @ truth + 0.3 * rng.standard_normal(rows) > 0, 1, -1)
    return sparse.csr_array(dense.astype(np.float32)), labels


def rows_of(rank, rows=40, features=FEATURES):
    return Rows.of_matrix(*matrix_of(rank, rows, features))


def all_rows(ranks=2, fewer=0):
    """Return the matrix and the labels of all ranks, each of which has ``fewer`` rows than the one before."""
    parts = [matrix_of(rank, 40 - fewer * rank) for rank in range(ranks)]
    return sparse.vstack([matrix for matrix, _ in parts]).tocsr(), np.concatenate([y for _, y in parts])


def settings_of(**given):
    plain = {"learning_rate": {"rate": 0.5, "schedule": "constant"}, "batch_size": 8, "reducer": "dense"}
    return checked({**plain, **given})


def value_of(settings, matrix, labels, weights, intercept):
    """Return the objective of rows."""
    losses = VALUES[settings.loss](labels * (matrix @ weights + intercept))
    return losses.mean() + settings.l2 / 2 * (weights**2).sum() + settings.l1 * np.abs(weights).sum()


def trained(settings, parts, passes):
    """Return weights and intercept after some passes over the ``(matrix, labels)`` of each rank."""
    weights, intercept = np.zeros(parts[0][0].shape[1]), 0.0
    rate, schedule = settings.learning_rate.rate, settings.learning_rate.schedule
    steps = -(-max(len(labels) for _, labels in parts) // settings.batch_size)
    for done in range(passes):
        orders = [
            np.random.default_rng([settings.seed, done, rank]).permutation(len(labels))
            for rank, (_, labels) in enumerate(parts)
        ]
        for step in range(steps):
            gradient, of_intercept, count = np.zeros_like(weights), 0.0, 0
            for (matrix, labels), order in zip(parts, orders, strict=True):
                numbers = order[len(order) * step // steps : len(order) * (step + 1) // steps]
                given, signs = matrix[numbers].astype(np.float64), labels[numbers]
                slopes = signs * SLOPES[settings.loss](signs * (given @ weights + intercept))
                gradient, of_intercept = gradient + given.T @ slopes, of_intercept + slopes.sum()
                count += len(numbers)
            now = rate / (1 + done + step / steps) ** 0.5 if schedule == "power" else rate
            weights = (1 - now * settings.l2) * weights - now * gradient / count
            weights = np.sign(weights) * np.maximum(0, np.abs(weights) - now * settings.l1)
            intercept -= settings.intercept * now * of_intercept / count
    return weights, intercept
