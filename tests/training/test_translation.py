"""Translation and text classification: weights of tokens, losses, BLEU over ranks, runs, bad input."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sacrebleu.metrics.bleu import BLEU

from commlib import transport
from datacache import DataCache, unpack_tokens
from tests.training.refusal import refused
from tests.training.small import records_of
from training import Trainer
from training.config.config import Config, ConfigurationError, load
from training.datasets.vocabulary import PAD, START
from training.tasks import Samples
from training.tasks.translation import Translation, bleu, shifted

TINY = "{layers: 1, width: 16, heads: 2, hidden: 16, longest: 40}"
PAIRS = "{name: synthetic_text, kind: pairs, tokens: 25, samples: 60, test_samples: 13, words: 8}"
LABELLED = "{name: synthetic_text, kind: labelled, tokens: 25, samples: 64, test_samples: 21, words: 6}"
ALONE = ("cache={}", "reducer=dense", "evaluate_every=1")
PHASE = {"epochs": 1, "tokens": 60, "sequence_length": 9, "learning_rate": 0.01, "label_smoothing": 0.1}
TEXTS = {"epochs": 1, "batch_size": 16, "learning_rate": 0.05}


def word(keys):
    return "{" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}"


def translation(*words, model=TINY, dataset=PAIRS, **keys) -> Config:
    named = model if model.startswith("tests.") else "{name: transformer, " + model.strip("{")
    phases = f"phases=[{word({**PHASE, **keys})}]"
    return load(
        "configs/ende_transformer.yaml", [*ALONE, f"model={named}", f"dataset={dataset}", phases, *words]
    )


def classification(*words, **keys) -> Config:
    phases = f"phases=[{word({**TEXTS, **keys})}]"
    given = [*ALONE, f"dataset={LABELLED}", "model={name: lstm_classifier, units: 12, layers: 1}"]
    return load("configs/intents_lstm.yaml", [*given, phases, *words])


def samples_of(config, ranks=1) -> Samples:
    dataset = config.make_dataset()
    return Samples(config, dataset, dataset.manifest("training"), dataset.manifest("test"), ranks)


def batches_of(samples, part="training"):
    reading = getattr(samples.config.task.make().inputs(samples.config.phases[0], samples), part)
    manifest = getattr(samples, part)
    cache = DataCache(getattr(samples.dataset, part), manifest=manifest, preprocessing=reading.preprocessing)
    return [
        list(cache.batches(reading.order, reading.collation, rank, samples.ranks, 0))
        for rank in range(samples.ranks)
    ]


def pairs_of(samples, part="training"):
    manifest, source = getattr(samples, part), getattr(samples.dataset, part)
    payloads = source.read(manifest, np.arange(len(manifest)))
    return [tuple(map(tuple, unpack_tokens(payload, pair=True))) for payload in payloads]


def stripped(row):
    return tuple(int(token) for token in row if token != PAD)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (3, 2), (5, 1)])
def test_every_pair_is_read_once_and_the_mean_over_rows_and_ranks_is_that_of_all_tokens(
    world_size, accumulate
):
    samples = samples_of(translation(f"accumulate={accumulate}"), world_size)
    of_ranks, found = batches_of(samples), []
    for step in zip(*of_ranks, strict=True):
        assert len({len(batch.arrays[0]) for batch in step}) == 1
        assert len(step[0].arrays[0]) % accumulate == 0
        sums, tokens = [], 0
        for batch in step:
            sources, targets, weights = batch.arrays
            assert (targets.dtype, weights.dtype, targets.shape) == (np.int32, np.float32, weights.shape)
            np.testing.assert_array_equal(weights > 0, (targets != PAD) & batch.counts[:, None])
            tokens += int((weights > 0).sum())
            sums.append((weights * targets.astype(float)).sum(axis=1).mean())  # of any number a token has
            counts = batch.counts
            found += [
                (stripped(s), stripped(t)) for s, t in zip(sources[counts], targets[counts], strict=True)
            ]
        total = sum(float((b.arrays[1] * (b.arrays[2] > 0)).sum()) for b in step)
        assert np.mean(sums) == pytest.approx(total / tokens, rel=1e-6)
    assert sorted(found) == sorted(pairs_of(samples))
    assert all(len(steps) > 2 for steps in of_ranks)


def test_the_loss_is_that_of_float64_with_label_smoothing():
    config = translation(label_smoothing=0.3)
    samples, task = samples_of(config), config.task.make()
    keras.utils.clear_session()
    model = task.make_model(config, samples.dataset)
    model.dropout.rate = 0.0
    for block in (*model.encoder, *model.decoder):
        block.dropout.rate = block.attention.dropout.rate = 0.0
        if block.cross is not None:
            block.cross.dropout.rate = 0.0
    sources, targets, weights = batches_of(samples)[0][0].arrays
    given = np.concatenate([np.full((len(targets), 1), START), targets[:, :-1]], axis=1)
    np.testing.assert_array_equal(shifted(tf.constant(targets)), given)
    logits = model([sources, given]).numpy().astype(np.float64)
    likely = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    right = np.take_along_axis(likely, targets[:, :, None].astype(int), axis=2)[:, :, 0]
    expected = -(weights * (0.7 * right + 0.3 * likely.mean(axis=-1))).sum(axis=1)
    found = task.losses(
        model, (tf.constant(sources), tf.constant(targets), tf.constant(weights)), config.phases[0]
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_bleu_is_that_of_sacrebleu_and_a_perfect_translation_has_100():
    references = ["das Haus ist klein .", "ein Test", "viele Worte stehen hier und dort"]
    assert bleu(references, references) == pytest.approx(100)
    found = ["das Haus ist sehr klein .", "", "viele Worte stehen hier"]
    assert bleu(found, references) == BLEU().corpus_score(found, [references]).score
    assert 0 < bleu(found, references) < 100


def test_all_ranks_have_the_bleu_and_the_perplexity_of_all_pairs():
    config = translation("task.beams=2")
    samples, task = samples_of(config, 3), config.task.make()
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model = task.make_model(config, samples.dataset)
    batches = batches_of(samples, "test")
    test = task.evaluation(model, samples)
    results = transport.simulated.run(lambda comm: test.evaluate(batches[comm.rank], comm), 3)
    assert all(result == results[0] for result in results)

    pairs, texts = pairs_of(samples, "test"), samples.dataset.test.texts(samples.test, np.arange(13))
    losses, tokens, found = 0.0, 0, []
    for source, target in pairs:
        logits = model([np.array([source]), np.array([[START, *target[:-1]]])]).numpy().astype(np.float64)[0]
        likely = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        losses, tokens = losses - likely[np.arange(len(target)), list(target)].sum(), tokens + len(target)
        (row,) = test._decoder(np.array([source], np.int32))
        found.append(samples.dataset.vocabulary.decode(row.tolist()))
    result = results[0]
    assert result.values["perplexity"] == pytest.approx(np.exp(losses / tokens), rel=1e-5)
    assert result.values["bleu"] == pytest.approx(bleu(found, [target for _, target in texts]), abs=1e-9)
    assert result.count == 13
    assert [each["reference"] for each in result.examples] == [texts[n][1] for n in (0, 5, 10)]
    assert [each["source"] for each in result.examples] == [texts[n][0] for n in (0, 5, 10)]
    assert [each["translation"] for each in result.examples] == [found[n] for n in (0, 5, 10)]


def run_of(config) -> Trainer:
    keras.utils.clear_session()
    return Trainer(config)


def test_a_run_of_half_precision_with_clipping_and_tied_tables_learns_and_shows_translations(tmp_path, capfd):
    words = ["precision=float16", "clip_norm=0.5", "task.beams=1", f"output={tmp_path}", "accumulate=2"]
    run = run_of(translation(*words, "evaluate_every=3", epochs=6))
    before = run.parts.model.evaluation.evaluate(run.phases[0].data.test_batches(), run.topology.world)
    summary = run.fit()
    assert sum(phase.skipped_steps for phase in summary.phases) < 4  # the loss scale is found
    assert summary.metrics["perplexity"] < before.values["perplexity"] / 2
    records = records_of(tmp_path, "examples")
    assert [each["epoch"] for each in records] == [2, 5]
    assert [set(each) for each in records[-1]["examples"]] == [{"source", "translation", "reference"}] * 3
    shown = capfd.readouterr()
    assert records[-1]["examples"][1]["reference"] in shown.out + shown.err
    epoch = records_of(tmp_path, "epoch")[5]
    assert {"bleu", "perplexity", "tokens_per_second"} <= set(epoch)


def test_a_classifier_learns_what_the_first_word_says(tmp_path):
    run = run_of(classification(f"output={tmp_path}", epochs=12))
    summary = run.fit()
    assert summary.tested == 21
    assert summary.metrics["accuracy"] > 0.6  # four classes
    # the metric is the share of right answers, counted by hand
    right = 0
    for batch in run.phases[0].data.test_batches():
        answers = run.model(batch.arrays[0]).numpy().argmax(axis=1)
        right += int((answers == batch.arrays[1])[batch.counts].sum())
    assert summary.metrics["accuracy"] == right / 21


@pytest.mark.parametrize(
    ("words", "keys", "line"),
    [
        ([], {"tokens": 8}, "phases[0].tokens: expected at least the 9 of one sentence (sequence_length)"),
        ([], {"sequence_length": 41}, "phases[0].sequence_length: expected at most the 40 tokens that trans"),
        ([], {"sequence_length": 1}, "phases[0].sequence_length: expected at least 2 tokens, a word and its"),
        (["task.beams=0"], {}, "task.beams: expected a whole number from 1, got 0"),
        (["task.length_penalty=-1"], {}, "task.length_penalty: expected a number from 0, got -1"),
        (["model=gpt_small"], {}, "model: expected a model of translations, got gpt_small"),
        (["target={metric: top1, at_least: 0.5}"], {}, "target.metric: expected one of bleu, perplexity, "),
    ],
)
def test_what_does_not_go_together_is_one_line(words, keys, line):
    with refused(line, ConfigurationError):
        translation(*words, **keys)


def test_a_test_sentence_longer_than_the_model_takes_is_one_line():
    samples = samples_of(translation(model=TINY.replace("40", "7"), sequence_length=7))
    with pytest.raises(ValueError, match="^model.longest: expected at least 9, .*, got 7$"):
        samples.config.task.make().check_samples(samples)


def test_sentences_that_are_left_out_are_told():
    samples = samples_of(translation(sequence_length=6))
    task = samples.config.task.make()
    longer = sum(max(map(len, pair)) > 6 for pair in pairs_of(samples))
    (note,) = task.notes(samples)
    assert note.startswith(f"phase 1: {longer} of 60 pairs are left out")
    read = sum(int(batch.counts.sum()) for batch in batches_of(samples)[0])
    assert read == 60 - longer > 0
    assert list(task.notes(samples_of(translation()))) == []


def without_search(vocabulary_size):
    tokens = [keras.Input((None,), dtype="int32") for _ in range(2)]
    embedding = keras.layers.Embedding(vocabulary_size, vocabulary_size)
    return keras.Model(tokens, embedding(tokens[1]) + embedding(tokens[0])[:, :1])


def test_a_model_that_beam_search_cannot_use_is_one_line():
    config = translation(model="tests.training.test_translation:without_search")
    with pytest.raises(ValueError, match="^model: expected one that beam search can use, with encode"):
        Translation().make_model(config, config.make_dataset())
