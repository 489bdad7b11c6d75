"""Beam search with a Transformer, one token a step; keys and values of earlier tokens are kept.

One graph serves sources of any number and length. Of equal candidates the first wins: the earlier hypothesis,
then the smaller token. Padding and the start token are never chosen. At the maximum length
of its target, which depends on its source alone, a hypothesis must end: except for rounding, the result for a
source does not depend on the other sources of its batch.

Shapes: B sources, K hypotheses of each, n tokens so far, V tokens of the vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from training.datasets.vocabulary import END, PAD, START
from training.models.transformer import Encoded, Transformer

Tokens = npt.NDArray[np.int32]


class Search(NamedTuple):
    """The state of the search after some steps."""

    length: Any  # tokens of a hypothesis after the next step
    targets: Any  # hypotheses that go on, after the token that begins them, (B, K, length)
    sums: Any  # logarithms of their probabilities, the largest first, (B, K); −∞ where there is none
    best: Any  # the ended hypothesis of the best score, padded, (B, length)
    score: Any  # its score, (B,)
    ended: Any  # how many have ended, (B,)
    past: Any  # keys and values of `targets` but the last token, of each layer (B·K, heads, length − 1, size)


class Decoder:
    """Finds a likely target of each source.

    ``beams``: hypotheses that are kept of each source (one is greedy search). ``length_penalty``: α of the
    score ``log p/((5 + n)/6)^α`` of a hypothesis of ``n`` tokens, its end among them, and probability ``p``
    (Wu et al. 2016, equation 14). ``extra``: tokens that a target may have more than its source.
    """

    def __init__(
        self, model: Transformer, *, beams: int, length_penalty: float = 0.6, extra: int = 50
    ) -> None:
        self._model, self._size = model, model.vocabulary_size
        self._beams, self._alpha, self._extra = beams, length_penalty, extra
        self._search = tf.function(self._found, input_signature=[tf.TensorSpec((None, None), tf.int32)])

    def __call__(self, sources: Tokens) -> Tokens:
        """Return the targets of sources (B, S), int32 (B, n): tokens, then the end, then padding."""
        return np.asarray(self._search(sources))

    def _found(self, sources: Any) -> Any:
        memory = tf.nest.map_structure(
            lambda each: tf.repeat(each, self._beams, axis=0), self._model.encode(sources)
        )
        lengths = tf.reduce_sum(tf.cast(sources != PAD, tf.int32), axis=1)
        # Of a source that is all padding, the target is the end alone.
        limits = tf.where(lengths > 0, tf.minimum(lengths + self._extra, self._model.longest), 1)
        start = self._start(tf.shape(sources)[0])
        # Without the dimensions that differ between steps.
        shapes = tf.nest.map_structure(lambda each: tf.TensorShape([n or None for n in each.shape]), start)
        targets, best = tf.TensorShape([None, self._beams, None]), tf.TensorShape([None, None])
        (search,) = tf.while_loop(
            lambda search: tf.reduce_any(search.sums > -np.inf),
            lambda search: [self._step(search, memory, limits)],
            [start],
            [shapes._replace(targets=targets, best=best)],
        )
        return search.best[:, 1:]

    def _step(self, search: Search, memory: Encoded, limits: Any) -> Search:
        """Extend the hypotheses by a token, and keep the K likeliest that go on.

        A hypothesis ends if it does so among the K likeliest. The search for a source is over when K have
        ended, or when no other can reach a better score.
        """
        beams, is_last = self._beams, limits == search.length
        sums, origins, tokens, past = self._candidates(search, memory, is_last)
        targets = tf.gather(search.targets, origins, batch_dims=1)
        targets = tf.concat([targets, tokens[:, :, None]], axis=2)
        is_end = tokens == END

        has_ended = is_end[:, :beams] & (sums[:, :beams] > -np.inf)
        scores = tf.where(has_ended, sums[:, :beams] / self._penalty(search.length), -np.inf)
        # top_k takes the first of equal entries, which argmax does not promise
        top = tf.math.top_k(scores)
        best = tf.pad(search.best, [[0, 0], [0, 1]], constant_values=PAD)
        is_better = top.values > search.score[:, None]
        best = tf.where(is_better, tf.gather(targets, top.indices, batch_dims=1)[:, 0], best)
        score = tf.maximum(search.score, top.values[:, 0])
        ended = search.ended + tf.reduce_sum(tf.cast(has_ended, tf.int32), axis=1)

        going = tf.math.top_k(tf.cast(~is_end, tf.int32), beams).indices
        targets, sums, origins = (tf.gather(each, going, batch_dims=1) for each in (targets, sums, origins))
        is_over = is_last | (ended >= beams) | (score >= sums[:, 0] / self._penalty(limits))
        sums = tf.where(is_over[:, None], -np.inf, sums)
        rows = tf.reshape(origins + beams * tf.range(tf.shape(origins)[0])[:, None], [-1])
        past = tf.nest.map_structure(lambda each: tf.gather(each, rows), past)
        return Search(search.length + 1, targets, sums, best, score, ended, past)

    def _candidates(self, search: Search, memory: Encoded, is_last: Any) -> tuple[Any, Any, Any, Any]:
        """Return the 2K likeliest hypotheses of one more token, of which at most K end.

        As the sums, the numbers of the extended hypotheses, the tokens; and the new keys and values.
        """
        latest = tf.reshape(search.targets[:, :, -1], [-1, 1])
        logits, past = self._model.decode(latest, memory, search.past)
        tokens = tf.range(self._size)
        barred = (tokens == PAD) | (tokens == START) | (is_last[:, None] & (tokens != END))
        likely = tf.reshape(tf.nn.log_softmax(logits[:, 0]), [-1, self._beams, self._size])
        sums = tf.where(barred[:, None], -np.inf, search.sums[:, :, None] + likely)
        sums, places = tf.math.top_k(tf.reshape(sums, [-1, self._beams * self._size]), 2 * self._beams)
        return sums, places // self._size, places % self._size, past

    def _penalty(self, length: Any) -> Any:
        return ((5 + tf.cast(length, tf.float32)) / 6) ** self._alpha

    def _start(self, rows: Any) -> Search:
        """Return the search before its first step: one hypothesis of each source, of no token."""
        one = [[0.0] + [-np.inf] * (self._beams - 1)]
        return Search(
            length=tf.constant(1),
            targets=tf.fill([rows, self._beams, 1], START),
            sums=tf.tile(tf.constant(one), [rows, 1]),
            best=tf.fill([rows, 1], START),
            score=tf.fill([rows], -np.inf),
            ended=tf.zeros([rows], tf.int32),
            past=self._model.start(rows * self._beams),
        )
