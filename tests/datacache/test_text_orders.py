"""Which sentences, windows and streams of a text are read when: pure functions of seed, epoch and place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache import CacheDirs, Collation, DataCache, TextLines, Tokenized, unpack_tokens
from datacache.text_orders import LengthBuckets, Streams, Windows, bucket_boundaries
from tests.datacache.test_sources import Codepoints

WORLDS = [1, 2, 3, 4, 8]


def global_batch(order, epoch, step, world_size):
    """Return the ids of the rows that count, of all ranks in turn, as the rows are dealt out."""
    ids = [order.batch(epoch, step, rank, world_size) for rank in range(world_size)]
    counts = [order.counts(epoch, step, rank, world_size) for rank in range(world_size)]
    assert len({len(each) for each in ids}) == 1  # equally many rows on every rank
    return np.stack(ids, axis=1).ravel()[np.stack(counts, axis=1).ravel()]


def global_spans(order, epoch, step, world_size):
    """Return starts and stops of the rows of all ranks, rank after rank."""
    spans = [order.spans(epoch, step, rank, world_size) for rank in range(world_size)]
    assert len({len(each.starts) for each in spans}) == 1
    return np.concatenate([np.stack([each.starts, each.stops], axis=1) for each in spans])


def read(order, lines, epoch, step, rank, world_size):
    """Return a rank's rows of tokens, out of the lines of the text that its batch names."""
    ids = order.batch(epoch, step, rank, world_size)
    return order.rows(order.spans(epoch, step, rank, world_size), ids, [lines[number] for number in ids])


def check_rows(spans, rows, ahead, seen):
    """See that rows hold the tokens of their spans, and zeros after them; count the tokens in ``seen``."""
    for (start, stop), row in zip(spans, rows, strict=True):
        size = stop + ahead - start if stop > start else 0
        expected = np.zeros(len(row))  # tokens count from 1 in the order of the text
        expected[:size] = np.arange(start + 1, start + 1 + size)
        np.testing.assert_array_equal(row, expected)
        seen[row[: stop - start]] += 1


def text_of(counts):
    """Return lines of these many tokens: 1, 2, 3, … in the order of the text."""
    tokens = np.arange(1, sum(counts) + 1, dtype=np.int32)
    return np.split(tokens, np.cumsum(counts)[:-1])


# sentences

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=60)


@given(lengths, st.integers(1, 9), st.integers(30, 100), st.integers(0, 3), st.integers(0, 3))
def test_every_sentence_is_read_once_an_epoch_in_batches_of_at_most_so_many_padded_tokens(
    lengths, world_size, tokens, seed, epoch
):
    order = LengthBuckets(lengths, tokens, seed, boundaries=(4, 10, 30))
    lengths = np.array(lengths)
    seen = np.zeros(len(lengths), int)
    for step in range(order.steps()):
        ids = global_batch(order, epoch, step, world_size)
        assert len(ids) * lengths[ids].max() <= tokens
        assert len(np.unique(np.searchsorted((4, 10, 30), lengths[ids]))) == 1  # one bucket
        np.testing.assert_array_equal(ids, global_batch(order, epoch, step, 1))
        seen[ids] += 1
    assert (seen == 1).all()


def test_a_bucket_has_as_few_batches_as_its_tokens_allow_and_they_differ_by_one_sentence_at_most():
    # 10 sentences of 3 tokens, 4 a batch: 3 batches of 3, 3 and 4; 7 of 9 tokens, one a batch
    order = LengthBuckets([3] * 10 + [9] * 7, tokens=12, seed=1, boundaries=(3, 9))
    sizes = [len(order.batch(0, step, 0, 1)) for step in range(order.steps())]
    assert sorted(sizes) == [1] * 7 + [3, 3, 4]


def test_buckets_are_shuffled_and_sentences_meet_others_in_the_next_epoch():
    order = LengthBuckets([5] * 200 + [20] * 200, tokens=100, seed=3, boundaries=(5, 20))
    batches = [[order.batch(epoch, step, 0, 1) for step in range(order.steps())] for epoch in (0, 1)]
    assert [len(each) for each in batches[0]] != [len(each) for each in batches[1]]
    assert sorted(len(each) for each in batches[0]) == sorted(len(each) for each in batches[1])
    together = [{frozenset(each.tolist()) for each in epoch} for epoch in batches]
    assert not together[0] & together[1]


def test_rows_that_do_not_fit_the_ranks_repeat_one_that_counts_elsewhere():
    order = LengthBuckets([2] * 5, tokens=10, seed=1, boundaries=(2,))
    assert order.steps() == 1
    counts = [order.counts(0, 0, rank, 3).tolist() for rank in range(3)]
    assert counts == [[True, True], [True, True], [True, False]]
    assert order.batch(0, 0, 2, 3)[1] == order.batch(0, 0, 0, 1)[-1]


def test_ranks_have_multiples_of_rows_where_batches_are_divided():
    buckets = LengthBuckets([2] * 7, tokens=14, seed=1, boundaries=(2,), multiple=3)
    windows = Windows([29], length=4, global_batch=7, seed=1, multiple=3)
    for order, world_size, rows in ((buckets, 1, 9), (buckets, 2, 6), (windows, 3, 3), (windows, 2, 6)):
        counts = [order.counts(0, 0, rank, world_size) for rank in range(world_size)]
        assert [len(each) for each in counts] == [rows] * world_size
        assert sum(each.sum() for each in counts) == 7


def test_sentences_longer_than_the_last_bucket_are_left_out():
    order = LengthBuckets([3, 50, 4, 51], tokens=8, seed=1, boundaries=(4,))
    assert order.left_out == 2
    assert sorted(order.batch(0, 0, 0, 1)) == [0, 2]


@pytest.mark.parametrize(
    ("lengths", "tokens", "boundaries", "message"),
    [
        ([1, 2], 10, (), r"boundaries: expected ascending lengths from 1 on, got \(\)"),
        ([1, 2], 10, (4, 4), r"boundaries: expected ascending lengths from 1 on, got \(4, 4\)"),
        ([1, 2], 7, (4, 8), "tokens: expected at least 8, one sentence, got 7"),
        ([9, 9], 10, (4, 8), "boundaries: expected sentences of up to 8 tokens, found none"),
    ],
)
def test_buckets_that_cannot_be_are_refused(lengths, tokens, boundaries, message):
    with pytest.raises(ValueError, match=message):
        LengthBuckets(lengths, tokens, 1, boundaries)


@pytest.mark.parametrize("longest", [1, 7, 8, 9, 50, 256])
def test_boundaries_ascend_to_the_longest_and_pad_a_tenth_at_most(longest):
    boundaries = bucket_boundaries(longest)
    assert boundaries[-1] == longest
    for before, after in zip(boundaries, boundaries[1:], strict=False):
        assert before < after <= max(before + 1, 1.1 * before)


# windows

counts = st.lists(st.integers(0, 7), min_size=1, max_size=40).filter(lambda each: sum(each) > 1)


@given(counts, st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0, 1]))
def test_windows_have_every_token_once_an_epoch_and_what_follows_it(counts, length, batch, world_size, ahead):
    order = Windows(counts, length, batch, seed=5, ahead=ahead)
    lines, total = text_of(counts), sum(counts)
    for epoch in (0, 1):
        seen = np.zeros(total + 1, int)
        for step in range(order.steps()):
            spans = global_spans(order, epoch, step, world_size)
            rows = np.concatenate(
                [read(order, lines, epoch, step, rank, world_size) for rank in range(world_size)]
            )
            assert rows.shape[1] == length + ahead
            check_rows(spans, rows, ahead, seen)
            real = spans[spans[:, 1] > spans[:, 0]]
            assert len(real) <= batch
            assert sorted(real[:, 0]) == sorted(order.spans(epoch, step, 0, 1).starts)
        assert (seen[1 : total + 1 - ahead] == 1).all()
        assert seen.sum() == total - ahead


def test_windows_are_shuffled_anew_in_every_epoch():
    order = Windows([1000], length=10, global_batch=10, seed=1)
    starts = [[order.spans(epoch, step, 0, 1).starts for step in range(10)] for epoch in (0, 1)]
    flat = [np.concatenate(each) for each in starts]
    assert (np.diff(flat[0]) != 10).sum() > 80
    assert (flat[0] != flat[1]).sum() > 80
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(0, 1000, 10))


# streams


@given(counts, st.integers(1, 9), st.integers(1, 6), st.sampled_from(WORLDS))
def test_streams_continue_where_they_ended_and_have_every_token_once(counts, length, batch, world_size):
    lines, total = text_of(counts), sum(counts)
    batch = min(batch, total - 1)
    order = Streams(counts, length, batch)
    seen = np.zeros(total + 1, int)
    ends = None
    for step in range(order.steps()):
        spans = global_spans(order, 0, step, world_size)
        rows = np.concatenate([read(order, lines, 0, step, rank, world_size) for rank in range(world_size)])
        np.testing.assert_array_equal(spans[:batch], global_spans(order, 0, step, 1))
        assert (spans[batch:, 0] == spans[batch:, 1]).all()  # rows that only pad
        if ends is not None:
            np.testing.assert_array_equal(spans[:, 0], ends)
        ends = spans[:, 1]
        assert (np.diff(spans) <= length).all()
        check_rows(spans, rows, 1, seen)
    assert (seen[1:total] == 1).all()


def test_two_streams_of_nine_predicted_tokens():
    order = Streams([4, 6], length=2, global_batch=2)
    assert order.steps() == 3
    read_by_rank = [
        [read(order, text_of([4, 6]), 0, step, rank, 2).ravel().tolist() for step in range(3)]
        for rank in (0, 1)
    ]
    assert read_by_rank == [[[1, 2, 3], [3, 4, 5], [0, 0, 0]], [[5, 6, 7], [7, 8, 9], [9, 10, 0]]]
    assert [order.counts(0, 2, rank, 2).tolist() for rank in (0, 1)] == [[False], [True]]


def test_texts_too_short_and_lines_of_another_text_are_refused():
    with pytest.raises(ValueError, match="tokens: expected at least 2 in the text, got 1"):
        Windows([1], 3, 1, seed=1)
    with pytest.raises(ValueError, match="global_batch: expected at most 4, a stream for each .*, got 5"):
        Streams([5], 3, 5)
    with pytest.raises(ValueError, match="length: expected at least 1, got 0"):
        Streams([5], 0, 1)
    order = Streams([2, 3], 4, 1)
    with pytest.raises(ValueError, match="tokens: expected as many in each sample"):
        order.rows(order.spans(0, 0, 0, 1), np.array([0, 1]), [np.zeros(2, np.int32), np.zeros(2, np.int32)])
    for order in (Streams([5], 3, 1), Windows([5], 3, 1, seed=1), LengthBuckets([5], 5, 1, (5,))):
        with pytest.raises(ValueError, match="step: expected 0 to"):
            order.batch(0, order.steps(), 0, 1)
        with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
            order.batch(0, 0, 2, 2)


def test_a_rank_without_rows_reads_nothing(tmp_path):
    (tmp_path / "text").write_text("abc\nde\n")
    source = Tokenized(TextLines(str(tmp_path), "text"), Codepoints())
    cache = DataCache(source, dirs=CacheDirs(memory=tmp_path / "memory"))
    order = Streams(cache.manifest.more["tokens"], length=3, global_batch=1)
    (first, second) = cache.batches(order, Texts(order), 1, 2, 0)
    assert first.arrays[0].tolist() == second.arrays[0].tolist() == [[0] * 4]
    assert not first.counts.any() and len(first.ids) == 0
    tokens = [batch.arrays[0].tolist() for batch in cache.batches(order, Texts(order), 0, 2, 0)]
    assert tokens == [[[97, 98, 99, 0]], [[0, 100, 101, 0]]]


class Texts(Collation):
    """The rows of an order of text."""

    def __init__(self, order):
        self._order = order

    def arrays(self, samples, labels, spec, pools):
        spans = self._order.spans(spec.epoch, spec.step, spec.rank, spec.world_size)
        return (self._order.rows(spans, spec.ids, [unpack_tokens(each)[0] for each in samples]),)
