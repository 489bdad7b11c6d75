"""``sparse_tables``: gradients of embeddings travel as rows, and training is what it was."""

from functools import partial

import keras
import numpy as np
import pytest

from commlib.transport import simulated
from datacache import Batch
from tests.extent import more
from tests.training import small
from tests.training.refusal import refused
from tests.training.replicas import replica_of
from training import Trainer
from training.config.config import ConfigurationError, load
from training.results import StepHyperparameters

TOKENS, UNITS, CLASSES, BATCH, STEPS = 40, 6, 4, 4, 3
TABLES = (0, 3)  # of the variables of the model below
CLASSIFIER = f"""
name: classifier
task: text_classification
dataset: {{name: synthetic_text, kind: labelled, tokens: {TOKENS}, samples: 16, test_samples: 4, words: 6,
  classes: {CLASSES}}}
model: tests.training.test_sparse_tables:two_tables
optimizer: {{name: sgd, momentum: 0.9}}
reducer: dense
phases: [{{steps: {STEPS}, batch_size: {BATCH}, learning_rate: 0.5}}]
"""
SPARSE = "sparse_tables=true"


class TwoTables(keras.Model):
    """Logits by the mean of a table's rows, and by that of another's, which lies between dense weights."""

    def __init__(self, tokens, classes):
        super().__init__(name="two_tables")
        self.embedding = keras.layers.Embedding(tokens, UNITS, name="embedding")
        self.hidden = keras.layers.Dense(5, activation="tanh", name="hidden")
        self.scores = keras.layers.Embedding(tokens, classes, name="scores")
        self.head = keras.layers.Dense(classes, name="head")

    def call(self, tokens, training=False):
        x = self.hidden(keras.ops.mean(self.embedding(tokens), axis=1))
        return keras.ops.cast(self.head(x) + keras.ops.mean(self.scores(tokens), axis=1), "float32")


def two_tables(tokens, classes):
    model = TwoTables(tokens, classes)
    model(np.ones((1, 2), np.int32))
    return model


def configured(folder, *words, text=CLASSIFIER):
    (folder / "my.yaml").write_text(text)
    return load(folder / "my.yaml", [f"output={folder}/runs", *words])


def batch_of(rank, step):
    """Few of the tokens, some of them several times."""
    random = np.random.default_rng([rank, step])
    tokens = random.integers(1, 9 + rank, (BATCH, 5)).astype(np.int32)
    return Batch((tokens, random.integers(0, CLASSES, BATCH)), np.arange(BATCH), np.ones(BATCH, bool))


def stepped(replica, step):
    backward = replica.backward_of(replica.config.phases[0])
    batch = batch_of(replica.topology.world.rank, step)
    return replica.step(backward, batch, StepHyperparameters(0.5, 0.9))[1]


def learned(comm, config):
    """The weights after each step, and of each step what its report says, and the residual by variable."""
    replica, seen = replica_of(comm, config), []
    ends = np.cumsum([variable.numpy().size for variable in replica.variables])
    for step in range(STEPS):
        report = stepped(replica, step)
        assert report.finite
        weights = [variable.numpy() for variable in replica.variables]
        residual = np.split(replica.gradients.exchange.residual, ends[:-1])
        seen.append((weights, (report.selected, report.traffic), residual))
    return seen


def bits(arrays):
    return [array.tobytes() for array in arrays]


def trained(folder, *words, world_size=2):
    keras.utils.clear_session()
    config = configured(folder, *words)
    ranks = simulated.run(lambda comm: learned(comm, config), world_size)
    for others in ranks[1:]:
        for (weights, *_), (same, *_) in zip(ranks[0], others, strict=True):
            assert bits(weights) == bits(same)
    return ranks


LARS, LSTM = "lars, clipped, averaged", "an lstm"
CASES = {
    LSTM: ("model={name: lstm_classifier_small, units: 6, layers: 1, dropout: 0.0}",),
    LARS: (
        "optimizer={name: lars, trust: 0.1, weight_decay: 0.01, exclude: null}",
        "clip_norm=0.05",
        "average=0.9",
    ),
    "float16, in two parts": ("precision=float16", "accumulate=2", "overlap=false"),
    "lamb, buckets": ("optimizer={name: lamb, norms: local}", "bucket_mib=0.0003"),
}
MORE = {
    "plain": (),
    "adamw, updated in parts": ("optimizer={name: adamw, sharded: true}",),
    "without overlap, clipped": ("overlap=false", "clip_norm=0.05"),
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(LSTM, 1), *((name, 2) for name in CASES if name != LSTM), *more(*((name, 3) for name in CASES | MORE))],
    ids=str,
)
def test_with_a_dense_reducer_the_weights_are_those_of_dense_gradients(tmp_path, name, world_size):
    words = (CASES | MORE)[name]
    dense, sparse = (trained(tmp_path, *words, *more, world_size=world_size)[0] for more in ((), (SPARSE,)))
    # float16 rounds sums of repeated rows otherwise; else float32 sums in another order
    rounding = 1e-3 if "precision=float16" in words else 1e-5
    for (weights, *_), (others, *_) in zip(sparse, dense, strict=True):
        for one, other in zip(weights, others, strict=True):
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)


def test_overlap_changes_no_bit(tmp_path):
    words = (SPARSE, "reducer={name: gtopk, density: 0.2}", "bucket_mib=0.0003", "clip_norm=0.05")
    overlapped, plain = (trained(tmp_path, *words, f"overlap={each}") for each in ("true", "false"))
    for one, other in zip(overlapped, plain, strict=True):
        for (weights, report, residual), (same, same_report, same_residual) in zip(one, other, strict=True):
            assert bits(weights) == bits(same)
            assert (report, bits(residual)) == (same_report, bits(same_residual))


def test_with_a_sparse_reducer_all_rows_are_sent_and_none_is_held_back(tmp_path):
    fifth, few = (f"reducer={{name: allgather, density: {each}, selector: exact}}" for each in (0.2, 0.02))
    dense, whole, sparse = (trained(tmp_path, *words) for words in ((), (few,), (fifth, SPARSE)))
    for rank in range(2):
        # the first step: later ones are those of other weights
        weights, (selected, _), residual = sparse[rank][0]
        rows = len(np.unique(batch_of(rank, 0).arrays[0]))
        # of the hidden layer's 35 weights and of the head's 24, between which a table lies, a fifth each
        assert selected == rows * (UNITS + CLASSES) + 7 + 5
        for number in TABLES:
            np.testing.assert_allclose(weights[number], dense[rank][0][0][number], rtol=1e-6)
            assert not residual[number].any()
            assert whole[rank][0][2][number].any()
        for number in {*range(6)} - {*TABLES}:
            assert residual[number].any() or number in (2, 5)  # all of a bias may be sent


@pytest.mark.parametrize(
    ("before", "readers"),
    [((SPARSE,), [((SPARSE,), 2), ((), 3), *more(((SPARSE,), 3))]), ((), [((SPARSE,), 2)])],
    ids=["with", "without"],
)
def test_a_checkpoint_is_read_with_and_without_sparse_tables(tmp_path, before, readers):
    """Residuals stay at their weights: two ranks write them, and as many or more read them."""
    reducer = "reducer={name: allgather, density: 0.05}"

    def written(comm):
        replica = replica_of(comm, configured(tmp_path, reducer, *before))
        stepped(replica, 0)
        replica.save(tmp_path / "kept", 1)
        seen = replica.gradients.exchange.residual
        stepped(replica, 1)
        return seen, [variable.numpy() for variable in replica.variables]

    def read(comm, after):
        replica = replica_of(comm, configured(tmp_path, reducer, *after))
        _, lines = replica.restore_from(tmp_path / "kept")
        seen = replica.gradients.exchange.residual
        assert bool(lines) == (before != after or comm.size == 3)
        stepped(replica, 1)
        return seen, [variable.numpy() for variable in replica.variables]

    keras.utils.clear_session()
    wrote = simulated.run(written, 2)
    held_back = sum(residual for residual, _ in wrote)
    for after, world_size in readers:
        keras.utils.clear_session()
        found = simulated.run(partial(read, after=after), world_size)
        np.testing.assert_allclose(sum(residual for residual, _ in found), held_back, rtol=1e-6, atol=1e-9)
        if before == after and world_size == 2:
            for (_, one), (_, other) in zip(wrote, found, strict=True):
                assert bits(one) == bits(other)


GPT = """
name: gpt
task: language_model
dataset: {name: synthetic_text, tokens: 25, samples: 30, test_samples: 6, words: 8}
model: {name: gpt_small, layers: 1, width: 8, heads: 2, hidden: 8, dropout: 0.0, longest: 16}
phases: [{steps: 1, sequence_length: 6, batch_size: 2, learning_rate: 0.01}]
"""
TRANSFORMER = """
name: transformer
task: translation
dataset: {name: synthetic_text, kind: pairs, tokens: 25, samples: 30, test_samples: 6, words: 6}
model: {name: transformer_small, layers: 1, width: 8, heads: 2, hidden: 8, dropout: 0.0}
phases: [{steps: 1, tokens: 64, sequence_length: 8, learning_rate: 0.01}]
"""


def test_a_table_that_makes_the_logits_too_stays_dense_and_is_named(tmp_path):
    keras.utils.clear_session()
    run = Trainer(configured(tmp_path, SPARSE, text=GPT))
    (line,) = run.parts.model.tables.lines()
    assert line == (
        "gradients that stay rows: gpt/positions/embeddings; "
        "dense: gpt/embedding/embeddings, of which the model uses all rows"
    )


WRAPPED = ("reducer.wrappers=[{name: local_clipping, norm: 1.0}]", "reducer.name=gtopk")


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (TRANSFORMER, (), "/embedding/embeddings, of which it uses all rows"),
        (CLASSIFIER, WRAPPED, "expected false where a reducer is wrapped, phases[0] has local_clipping"),
    ],
    ids=["only tied", "wrapped"],
)
def test_where_no_gradient_can_travel_as_rows_one_line_says_so(tmp_path, text, words, expected):
    keras.utils.clear_session()
    with refused(expected, ConfigurationError) as error:
        Trainer(configured(tmp_path, SPARSE, *words, text=text))
    assert "sparse_tables: " in str(error.value)


def test_a_model_without_an_embedding_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="^sparse_tables: .*only looks rows up, got linear with no"):
        small.trainer(tmp_path, SPARSE)
