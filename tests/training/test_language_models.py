"""Language models and masked ones: weights of tokens, perplexity at any world size, carried state, masks."""

import math
import shutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import transport
from datacache import DataCache, Streams, Windows, unpack_tokens
from tests.training.refusal import refused
from tests.training.small import assert_same_weights, records_of
from training import Trainer
from training.config.config import load
from training.datasets import make_dataset
from training.datasets.vocabulary import END, MASK, SPECIAL
from training.tasks import Samples
from training.tasks.language_model import LanguageModel, MaskedLanguageModel, MaskedTokens, NextTokens
from training.tasks.text import weights_of

VOCABULARY = 25
TEXT = {"tokens": VOCABULARY, "samples": 60, "test_samples": 40, "words": 8}
WORLDS = (1, 2, 3, 5)


def text_of(part: str = "training", **options) -> tuple[DataCache, np.ndarray]:
    dataset = make_dataset("synthetic_text", **{**TEXT, **options})
    manifest, source = dataset.manifest(part), getattr(dataset, part)
    lines = [unpack_tokens(line)[0] for line in source.read(manifest, np.arange(len(manifest)))]
    return DataCache(source, manifest=manifest), np.concatenate(lines)


def batches(cache, order, collation, world_size, epoch=0, start=0):
    of_ranks = [
        list(cache.batches(order, collation, rank, world_size, epoch, start=start))
        for rank in range(world_size)
    ]
    return list(zip(*of_ranks, strict=True))


def sums(numbers, steps):
    """Return for each step the mean over ranks of the mean over rows of weighted numbers of (target)."""
    return [
        np.mean(
            [(batch.arrays[2].astype(float) * numbers[batch.arrays[1]]).sum(axis=1).mean() for batch in ranks]
        )
        for ranks in steps
    ]


@pytest.mark.parametrize("kind", ["streams", "windows", "masked"])
def test_the_mean_over_rows_and_ranks_is_that_over_the_tokens_of_the_global_batch(kind):
    cache, text = text_of()
    tokens = cache.manifest.more["tokens"]
    order = {
        "streams": Streams(tokens, 7, 30),
        "windows": Windows(tokens, 7, 11, seed=3),
        "masked": Windows(tokens, 7, 11, seed=3, ahead=0),
    }[kind]
    collation = MaskedTokens(order, 0.3, VOCABULARY) if kind == "masked" else NextTokens(order)
    numbers = np.random.default_rng(1).normal(size=VOCABULARY)
    alone = batches(cache, order, collation, 1)
    expected = []
    for step, (batch,) in enumerate(alone):
        counts = batch.arrays[2] > 0
        expected.append(numbers[batch.arrays[1][counts]].mean())
        if kind != "masked":
            spans = order.spans(0, step, 0, 1)
            targets = [
                text[start + 1 : stop + 1] for start, stop in zip(spans.starts, spans.stops, strict=True)
            ]
            assert expected[-1] == pytest.approx(numbers[np.concatenate(targets)].mean(), rel=1e-12)
    for world_size in WORLDS:
        # weights are float32
        np.testing.assert_allclose(
            sums(numbers, batches(cache, order, collation, world_size)), expected, rtol=1e-6
        )


def test_weights_of_a_row_that_only_pads_are_zero_and_nothing_is_divided_by_zero():
    counts = np.array([[True, True], [True, False], [False, False]])
    np.testing.assert_array_equal(weights_of(counts, 12, 4), np.where(counts, np.float32(1), 0))
    np.testing.assert_array_equal(weights_of(counts[2:], 0, 4), [[0, 0]])


class Bigrams(keras.Model):
    """Logits that depend on the token alone."""

    def __init__(self, table):
        super().__init__()
        self.table = tf.constant(table, tf.float32)

    def call(self, tokens, training=False):
        return tf.gather(self.table, tokens)


class Counting(keras.Model):
    """Logits that depend on the sum of all tokens of the stream up to now, which is the state."""

    def __init__(self, table):
        super().__init__()
        self.table = tf.constant(table, tf.float32)

    def zero_state(self, rows):
        return tf.zeros((rows, 1))

    def call(self, inputs, training=False):
        tokens, state = inputs
        totals = state + tf.cumsum(tf.cast(tokens, tf.float32), axis=1)
        return [tf.gather(self.table, tf.cast(totals, tf.int32) % len(self.table)), totals[:, -1:]]


def log_softmax(table):
    shifted = table - table.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def evaluated(task, model, world_size, **options):
    """Return what each rank finds that a model's test gives."""
    dataset = make_dataset("synthetic_text", **{**TEXT, **options})
    parts = [dataset.manifest(part) for part in ("training", "test")]

    def evaluate(comm):
        samples = Samples(SimpleNamespace(seed=3, accumulate=1), dataset, *parts, comm.size)
        reading = task.inputs(SimpleNamespace(sequence_length=7, batch_size=2), samples).test
        cache, test = DataCache(dataset.test, manifest=parts[1]), task.evaluation(model, samples)
        found = [
            test.evaluate(cache.batches(reading.order, reading.collation, comm.rank, comm.size, 0), comm)
            for _ in range(2)
        ]
        assert found[0] == found[1]  # carried state begins again
        return found[0]

    results = transport.simulated.run(evaluate, world_size)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_perplexity_is_that_of_all_tokens_whatever_the_world_size(world_size):
    _, text = text_of("test")
    table = np.random.default_rng(2).normal(size=(VOCABULARY, VOCABULARY))
    tested = evaluated(LanguageModel(), Bigrams(table), world_size)
    expected = math.exp(-log_softmax(table)[text[:-1], text[1:]].mean())
    assert tested.count == len(text) - 1
    assert tested.values["perplexity"] == pytest.approx(expected, rel=1e-6)  # logits are float32
    uniform = evaluated(LanguageModel(), Bigrams(np.zeros((VOCABULARY, VOCABULARY))), world_size)
    assert uniform.values["perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_state_is_carried_along_the_streams_of_a_test_at_every_world_size(world_size):
    _, text = text_of("test")
    table = np.random.default_rng(2).normal(size=(VOCABULARY, VOCABULARY))
    tested = evaluated(LanguageModel(streams=True), Counting(table), world_size)
    bounds = np.arange(33) * (len(text) - 1) // 32  # 32 streams
    states = np.concatenate(
        [np.cumsum(text[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
    )
    expected = math.exp(-log_softmax(table)[states % VOCABULARY, text[1:]].mean())
    assert tested.count == len(text) - 1
    assert tested.values["perplexity"] == pytest.approx(expected, rel=1e-6)


def test_a_model_that_diverged_has_an_infinite_perplexity():
    table = np.full((VOCABULARY, VOCABULARY), -1e6)
    table[:, 0] = 1e6
    assert evaluated(LanguageModel(), Bigrams(table), 1).values["perplexity"] == math.inf


def test_a_test_in_which_no_token_is_hidden_gives_nan():
    tested = evaluated(MaskedLanguageModel(share=1e-9), Bigrams(np.zeros((VOCABULARY, VOCABULARY))), 2)
    assert tested.count == 0
    assert list(map(math.isnan, tested.values.values())) == [True, True]


def masked(order, share, *, seed=0, epoch=0, world_size=1):
    cache, _ = text_of(samples=400)
    collation = MaskedTokens(order, share, VOCABULARY)
    rows = {}
    for step, ranks in enumerate(batches(cache, order, collation, world_size, epoch)):
        for rank, batch in enumerate(ranks):
            starts = order.spans(epoch, step, rank, world_size).starts
            for row, (start, counts) in enumerate(zip(starts.tolist(), batch.counts, strict=True)):
                if counts:
                    rows[start] = [array[row] for array in batch.arrays]
    return [np.concatenate([rows[start][each] for start in sorted(rows)]) for each in range(3)]


def test_masks_are_drawn_as_in_bert_and_line_ends_are_never_hidden():
    cache, text = text_of(samples=400)
    order = Windows(cache.manifest.more["tokens"], 10, 8, seed=4, ahead=0)
    hidden, tokens, weights = (array[: len(text)] for array in masked(order, 0.15))
    np.testing.assert_array_equal(tokens, text)
    chosen = weights > 0
    np.testing.assert_array_equal(hidden[~chosen], text[~chosen])
    assert not chosen[text == END].any()

    def near(count, of, share):
        return abs(count - of * share) < 5 * math.sqrt(of * share * (1 - share))

    can_be = int((text != END).sum())
    assert near(chosen.sum(), can_be, 0.15)
    as_it_is, is_mask = (hidden == text)[chosen], (hidden == MASK)[chosen]
    assert near(is_mask.sum(), chosen.sum(), 0.8)
    assert near(as_it_is.sum(), chosen.sum(), 0.1 + 0.1 / (VOCABULARY - SPECIAL))
    others = hidden[chosen][~as_it_is & ~is_mask]
    assert others.min() >= SPECIAL and others.max() < VOCABULARY


def test_masks_are_a_function_of_seed_epoch_and_place():
    tokens = text_of(samples=400)[0].manifest.more["tokens"]

    def chosen(length=10, batch=8, seed=4, **options):
        return masked(Windows(tokens, length, batch, seed=seed, ahead=0), 0.15, **options)

    first = chosen()
    for same in (chosen(world_size=3), chosen(batch=5)):
        np.testing.assert_array_equal(same[0], first[0])
        np.testing.assert_array_equal(same[2] > 0, first[2] > 0)
    for other in (chosen(epoch=1), chosen(seed=5)):
        assert ((other[2] > 0) != (first[2] > 0)).mean() > 0.2  # of 0.255 in the mean


def test_the_loss_and_accuracy_are_those_of_hidden_tokens_at_every_world_size():
    table = np.random.default_rng(2).normal(size=(VOCABULARY, VOCABULARY))
    dataset = make_dataset("synthetic_text", **TEXT)
    order = Windows(dataset.manifest("test").more["tokens"], 7, 32, seed=0, ahead=0)
    cache = DataCache(dataset.test, manifest=dataset.manifest("test"))
    collation = MaskedTokens(order, 0.15, VOCABULARY)
    arrays = [batch.arrays for (batch,) in batches(cache, order, collation, 1)]
    hidden, tokens, weights = map(np.concatenate, zip(*arrays, strict=True))
    counts = weights > 0
    losses = -log_softmax(table)[hidden[counts], tokens[counts]]
    accuracy = (table[hidden[counts]].argmax(axis=1) == tokens[counts]).mean()
    for world_size in WORLDS:
        tested = evaluated(MaskedLanguageModel(), Bigrams(table), world_size)
        assert tested.count == counts.sum()
        assert tested.values["masked_loss"] == pytest.approx(losses.mean(), rel=1e-6)
        assert tested.values["masked_accuracy"] == accuracy


COMMON = """
dataset: {name: synthetic_text, tokens: 25, samples: 300, test_samples: 60, words: 8}
optimizer: adam
"""
LSTM = f"""{COMMON}
name: lstm
task: {{name: language_model, streams: true}}
model: {{name: lstm_lm_small, units: 24, layers: 1}}
phases: [{{epochs: 4, sequence_length: 10, batch_size: 4, learning_rate: 0.02}}]
"""
SMALL = "layers: 1, width: 32, heads: 2, hidden: 64, dropout: 0.0, longest: 16"
GPT = f"""{COMMON}
name: gpt
task: language_model
model: {{name: gpt_small, {SMALL}}}
phases: [{{epochs: 4, sequence_length: 12, batch_size: 8, learning_rate: 0.01}}]
"""
BERT = f"""{COMMON}
name: bert
task: {{name: masked_language_model, share: 0.2}}
model: {{name: bert_small, {SMALL}}}
phases: [{{epochs: 10, sequence_length: 12, batch_size: 8, learning_rate: 0.003}}]
"""


def trained(folder, text, *words):
    keras.utils.clear_session()
    (folder / "my.yaml").write_text(text)
    trainer = Trainer(load(folder / "my.yaml", [f"output={folder}/runs", *words]))
    return trainer, trainer.fit()


# of two words that can follow one is as likely as the other; the first of a line is one of 20
@pytest.mark.parametrize(
    ("text", "metric", "bounds"),
    [
        (LSTM, "perplexity", (2.0, 5.0)),
        (GPT, "perplexity", (2.0, 5.0)),
        (BERT, "masked_loss", (0.0, math.log(20) - 0.1)),  # less than knowing nothing
    ],
    ids=["lstm", "gpt", "bert"],
)
def test_a_small_model_learns_generated_text_and_its_run_goes_on_to_the_bit(tmp_path, text, metric, bounds):
    words = ["checkpoints={every_steps: 17, every_epochs: null, keep: 99}"]
    whole, summary = trained(tmp_path, text, *words)
    assert bounds[0] < summary.metrics[metric] < bounds[1]
    assert metric == "perplexity" or summary.metrics["masked_accuracy"] > 1 / 20
    epochs = records_of(tmp_path / "runs", "epoch")
    assert epochs[-1]["tokens_per_second"] > 0
    assert epochs[-1][metric] < epochs[0][metric] < 15

    if text is GPT:  # whose run has no state that those of the others lack
        return
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "summary.json").unlink()
    left = whole.position.steps - sum(line["steps"] for line in epochs[-2:]) + 17
    for saved in (folder / "checkpoints").glob("step-*"):
        if int(saved.name.removeprefix("step-")) > left:  # within the epoch before the last
            shutil.rmtree(saved)
    again, _ = trained(tmp_path, text, *words, "resume=auto")
    assert_same_weights(whole, again)


PHASES = [f"{{epochs: 1, sequence_length: 5, batch_size: {rows}, learning_rate: 0.1}}" for rows in (4, 2)]


@pytest.mark.parametrize(
    ("text", "word", "message"),
    [
        (GPT, "phases.0.sequence_length=17", "phases[0].sequence_length: "),
        (LSTM, "accumulate=2", "accumulate: expected 1 where text is read in streams, got 2"),
        (GPT, "model=bert_small", "a model of next tokens, got bert_small, which is one of masked tokens"),
        (BERT, "task.share=2.0", "share: expected a number in (0, 1), got 2.0"),
        (LSTM, "task.streams=3", "streams: expected true or false, got 3"),
        (GPT, "cache={shards: 2}", "cache.shards"),
        (GPT, "normalise={mean: [0.5], std: [0.5]}", "normalise"),
        (LSTM, f"phases=[{', '.join(PHASES)}]", "phases[1].batch_size: expected the 4 streams"),
        (LSTM, "task.streams=false", "task.streams: expected true, lstm_lm_small carries its state"),
        (GPT, "task={name: language_model, streams: true}", "task.streams: expected false, gpt_small"),
        (LSTM, "phases.0.batch_size=9999", "phases[0]: global_batch: expected at most "),
        (GPT, "dataset=digits", "dataset: expected one of kind TextDataset for the task language_model"),
    ],
)
def test_what_does_not_go_together_is_one_line(tmp_path, text, word, message):
    with refused(message):
        trained(tmp_path, text, word)


def test_a_masked_model_needs_a_vocabulary_with_a_mask(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for part in ("train", "test"):
        (tmp_path / f"{part}.txt").write_text("a b c d e f g\n" * 20)
    words = [f"dataset={{name: text, path: {tmp_path}, vocabulary: {{size: 11, type: word}}}}"]
    with refused("dataset.vocabulary.mask: expected true"):
        trained(tmp_path, BERT, *words)


def test_a_run_of_another_vocabulary_is_not_continued(tmp_path):
    words = "checkpoints={}", "phases.0.epochs=null", "phases.0.steps=1"
    trained(tmp_path, GPT, *words)
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "summary.json").unlink()
    with refused("vocabulary"):
        trained(tmp_path, GPT, *words, f"resume={folder}", "dataset.tokens=26")
