"""Beam search: its cache, its limits, and that it finds what an exhaustive search does."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from training.datasets.vocabulary import END, PAD, START
from training.models import MODELS
from training.models.decoding import Decoder

VOCABULARY = 7
SOURCES = np.array([[4, 5, 6, 3, 0], [6, 3, 0, 0, 0], [1, 1, 4, 5, 3]], np.int32)


def made(**options):
    """Return a tiny model whose predictions differ."""
    keras.utils.set_random_seed(4)
    sizes = {"layers": 1, "width": 8, "heads": 2, "hidden": 12, "longest": 12}
    model = MODELS["transformer"](VOCABULARY, **{**sizes, **options})
    for variable in model.trainable_variables:
        variable.assign(3 * variable)
    return model


@pytest.fixture(scope="module")
def model():
    return made()


def log_probabilities(model, source, targets):
    """Return those of each target's tokens, without a cache: a matrix of one row a target."""
    given = np.array([[START, *target[:-1]] for target in targets], np.int32)
    logits = model([np.repeat(source[None], len(targets), axis=0), given])
    rows = tf.nn.log_softmax(tf.cast(logits, tf.float64)).numpy()
    return np.take_along_axis(rows, np.array(targets)[:, :, None], axis=2)[:, :, 0]


def exhaustive(model, source, limit, alpha):
    """Return the target of the best score of all that end with the limit, and its score."""
    free = [token for token in range(VOCABULARY) if token not in (PAD, START, END)]
    best, best_score = (), -np.inf
    for length in range(limit):
        targets = [(*tokens, END) for tokens in itertools.product(free, repeat=length)]
        scores = log_probabilities(model, source, targets).sum(axis=1) / ((6 + length) / 6) ** alpha
        if scores.max() > best_score:
            best, best_score = targets[scores.argmax()], scores.max()
    return best, best_score


def stripped(row):
    return tuple(int(token) for token in row[: list(row).index(END) + 1])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_cached_logits_are_those_of_the_whole_target(norm):
    model = made(layers=2, norm=norm)
    target = np.array([[2, 4, 6, 1, 5], [2, 5, 5, 3, 0], [2, 1, 6, 4, 4]], np.int32)
    whole = model([SOURCES, target]).numpy()
    memory, past, found = model.encode(SOURCES), None, []
    for first, last in [(0, 1), (1, 2), (2, 4), (4, 5)]:
        logits, past = model.decode(target[:, first:last], memory, past)
        found.append(logits)
    # float32 sums in an order that differs by processor, values of up to 20, weights that magnify errors
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, rtol=0, atol=1e-3)


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_beams_for_all_hypotheses_find_the_best_of_all(model, alpha):
    found = Decoder(model, beams=4**3 * VOCABULARY, length_penalty=alpha, extra=1)(SOURCES[1:2])
    expected, _ = exhaustive(model, SOURCES[1], 3, alpha)
    assert stripped(found[0]) == expected


def greedy(model, source, limit):
    """Return the likeliest token after each, computed anew from the whole target."""
    target = []
    while END not in target:
        logits = model([source[None], np.array([[START, *target]], np.int32)])[0, -1].numpy()
        logits[[PAD, START]] = -np.inf
        target.append(int(logits.argmax()) if len(target) + 1 < limit else END)
    return tuple(target)


def test_one_beam_is_greedy_search(model):
    found = Decoder(model, beams=1, extra=3)(SOURCES)
    limits = [min(12, (source != PAD).sum() + 3) for source in SOURCES]
    expected = [greedy(model, source, limit) for source, limit in zip(SOURCES, limits, strict=True)]
    assert [stripped(row) for row in found] == expected
    assert len(set(expected)) > 1


def test_a_source_has_the_same_target_alone_and_with_others(model):
    decoder = Decoder(model, beams=3, extra=4)
    together = [stripped(row) for row in decoder(SOURCES)]
    assert together == [stripped(decoder(source[source != PAD][None])[0]) for source in SOURCES]


def test_after_its_end_a_target_is_padding_and_a_source_of_padding_has_an_end_alone(model):
    found = Decoder(model, beams=2, extra=3)(np.concatenate([SOURCES, np.zeros((1, 5), np.int32)]))
    assert found.dtype == np.int32
    for row, source in zip(found, [*SOURCES, np.zeros(5)], strict=True):
        length = len(stripped(row))
        assert (row[length:] == PAD).all()
        assert not {PAD, START} & set(stripped(row))
        assert length <= max(1, min(12, (source != PAD).sum() + 3))
    assert stripped(found[-1]) == (END,)


@pytest.mark.parametrize("beams", [1, 3])
def test_of_equal_tokens_the_smallest_is_taken(model, beams):
    weights = model.get_weights()
    try:
        model.embedding.embeddings.assign(np.zeros((VOCABULARY, 8)))  # all logits are zero
        found = Decoder(model, beams=beams, length_penalty=0, extra=3)(SOURCES[:1])
    finally:
        model.set_weights(weights)
    # one beam: the smallest token until the limit; three: 1, then the end (3 of 1, 3, 4, …), found first
    assert stripped(found[0]) == ((1, 1, 1, 1, 1, 1, END) if beams == 1 else (END,))
