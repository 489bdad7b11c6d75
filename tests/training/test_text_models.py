"""Text models: their sizes, what each position may know, carried state, precision, and options."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import InvalidArgument
from tests.extent import dealt
from training.models import MODELS, AttentionOptions
from training.models.transformer import Attention, sinusoids

TINY_ATTENTION = {"layers": 2, "width": 8, "heads": 2, "hidden": 12, "longest": 9}
TINY = {
    "transformer": TINY_ATTENTION,
    "gpt": TINY_ATTENTION,
    "bert_base": TINY_ATTENTION,
    "lstm_lm": {"units": 6},
    "lstm_classifier": {"layers": 2, "units": 6},
}
VOCABULARY, CLASSES = 11, 3
HALF = ["mixed_float16", "mixed_bfloat16"]


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(5)


def tiny(name, **options):
    sizes = (VOCABULARY, CLASSES) if name == "lstm_classifier" else (VOCABULARY,)
    return MODELS[name](*sizes, **{**TINY[name], **options})


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(1, VOCABULARY, shape, dtype=np.int32)


def inputs_of(name, sequences, model):
    """Return the model's inputs with these sequences as those whose next tokens are predicted."""
    if name == "transformer":
        return [tokens(len(sequences), 4, seed=9), sequences]
    return [sequences, model.zero_state(len(sequences))] if name == "lstm_lm" else sequences


def specs_of(inputs):
    """Return what a graph is made for: any number of sequences of any length."""
    return tf.nest.map_structure(
        lambda each: tf.TensorSpec((None, None, *each.shape[2:]), each.dtype), inputs
    )


def logits_of(name, model, inputs, training=False):
    found = model(inputs, training=training)
    return found[0] if name == "lstm_lm" else found


def weights(name, *sizes, **options):
    """Return the number of trainable weights, none of which is allocated."""
    with keras.StatelessScope(initialize_variables=False):
        model = MODELS[name](*sizes, **options)
    keras.utils.clear_session()  # forgets the variables that wait for values
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def dense(inputs, outputs):
    return inputs * outputs + outputs


def block(width, hidden, attentions=1):
    norms = (attentions + 1) * 2 * width
    return attentions * 4 * dense(width, width) + dense(width, hidden) + dense(hidden, width) + norms


def lstm(inputs, units):
    return 4 * (inputs * units + units * units + units)


TRANSFORMER = 6 * block(512, 2048) + 6 * block(512, 2048, attentions=2) + 37_000 * 512
GPT = 12 * block(768, 3072) + (50_257 + 1024) * 768 + 2 * 768
WORDS = 30_522
BERT = 12 * block(768, 3072) + (WORDS + 512) * 768 + 2 * 768 + dense(768, 768) + 2 * 768 + WORDS
LSTM = 10_000 * 1500 + 2 * lstm(1500, 1500) + dense(1500, 10_000)
CLASSIFIER = 943 * 768 + 4 * lstm(768, 768) + dense(768, 128)


@pytest.mark.parametrize(
    ("name", "sizes", "options", "expected"),
    [
        ("transformer", (37_000,), {}, TRANSFORMER),
        ("transformer", (37_000,), {"norm": "pre"}, TRANSFORMER + 2 * 2 * 512),
        ("gpt", (50_257,), {}, GPT),
        ("bert_base", (WORDS,), {}, BERT),
        ("bert_base", (WORDS,), {"tied": False}, BERT + WORDS * 768),
        ("lstm_lm", (10_000,), {}, LSTM),
        ("lstm_lm_small", (10_000,), {}, 10_000 * 200 + 2 * lstm(200, 200) + dense(200, 10_000)),
        ("lstm_classifier", (943, 128), {}, CLASSIFIER),
        ("lstm_classifier_small", (90, 7), {}, 90 * 128 + lstm(128, 128) + dense(128, 7)),
    ],
)
def test_a_model_has_the_weights_of_its_closed_form(name, sizes, options, expected):
    assert weights(name, *sizes, **options) == expected


def test_the_closed_forms_are_the_papers_counts():
    assert pytest.approx(65e6, rel=0.03) == TRANSFORMER  # Vaswani et al. 2017, table 3
    assert GPT == 124_439_808
    next_sentences, segments = dense(768, 768) + dense(768, 2), 2 * 768
    assert BERT + WORDS * 768 + next_sentences + segments == 133_547_324  # Ok-Topk, table 2
    assert LSTM == 66_022_000  # the papers' model for PTB
    assert pytest.approx(20e6, rel=0.02) == CLASSIFIER  # SparCML


@pytest.mark.parametrize("name", TINY)
def test_paths_of_weights_differ_and_no_two_kernels_start_equal(name):
    model = tiny(name)
    assert len({variable.path for variable in model.variables}) == len(model.variables)
    drawn = [each for each in model.trainable_variables if each.name in ("kernel", "embeddings")]
    drawn = [each.numpy().ravel()[:8] for each in drawn]
    starts = {tuple(values) for values in drawn}
    assert len(starts) == len(drawn) >= 4


@pytest.mark.parametrize(
    ("name", "options"), [("transformer", {}), ("transformer", {"norm": "pre"}), ("gpt", {}), ("lstm_lm", {})]
)
def test_a_later_token_changes_no_earlier_logit(name, options):
    model, sequences = tiny(name, **options), tokens(3, 7)
    before = logits_of(name, model, inputs_of(name, sequences, model)).numpy()
    sequences[:, 4] = sequences[:, 4] % (VOCABULARY - 1) + 1
    after = logits_of(name, model, inputs_of(name, sequences, model)).numpy()
    np.testing.assert_array_equal(after[:, :4], before[:, :4])
    assert (after[:, 4:] != before[:, 4:]).any(axis=(1, 2)).all()


def test_bert_knows_the_tokens_on_both_sides():
    model, sequences = tiny("bert_base"), tokens(2, 7)
    before = model(sequences).numpy()
    sequences[:, 4] = sequences[:, 4] % (VOCABULARY - 1) + 1
    assert (model(sequences).numpy() != before).any(axis=2).all()


@pytest.mark.parametrize("name", TINY)
def test_padding_changes_no_logit_of_a_token(name):
    model, sequences = tiny(name), tokens(2, 5)
    padded = np.pad(sequences, ((0, 1), (0, 3)))  # and a sequence of padding alone
    if name == "transformer":
        source = tokens(2, 4, seed=9)
        before = model([source, sequences]).numpy()
        after = model([np.pad(source, ((0, 1), (0, 2))), padded]).numpy()
    else:
        before = logits_of(name, model, inputs_of(name, sequences, model)).numpy()
        after = logits_of(name, model, inputs_of(name, padded, model)).numpy()
    assert np.isfinite(after).all()
    after = after[:2] if name == "lstm_classifier" else after[:2, :5]
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)  # sums of other lengths, values about 1


@pytest.mark.parametrize("name", TINY)
def test_one_step_in_a_graph_of_unknown_shapes_has_all_gradients_and_lowers_the_loss(name, capfd):
    model, sequences = tiny(name), tokens(4, 6)
    inputs = inputs_of(name, sequences, model)
    labels = tokens(4) % CLASSES if name == "lstm_classifier" else tokens(4, 6, seed=1)
    variables = [variable.value for variable in model.trainable_variables]

    def loss(inputs, training):
        logits = logits_of(name, model, inputs, training)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    @tf.function(input_signature=[specs_of(inputs)])
    def gradients_of(inputs):
        with tf.GradientTape() as tape:
            value = loss(inputs, training=True)
        return [tf.convert_to_tensor(each) for each in tape.gradient(value, variables)]

    before = float(loss(inputs, training=False))
    for variable, gradient in zip(variables, gradients_of(inputs), strict=True):
        assert np.isfinite(gradient).all()
        if not variable.name.endswith("key/bias"):  # the softmax takes it away again
            assert np.abs(gradient).max() > 0, variable.name
        variable.assign_sub(0.01 * gradient)
    assert float(loss(inputs, training=False)) < before
    assert "oneDNN" not in capfd.readouterr().err  # an error that TensorFlow logs for some operations


@pytest.mark.parametrize("name", ["transformer", "gpt", "bert_base"])
def test_one_table_makes_embedding_and_logits(name):
    model, sequences = tiny(name), tokens(4, 6)
    tables = [each for each in model.trainable_variables if each.shape == (VOCABULARY, 8)]
    assert [table.path.split("/")[-2:] for table in tables] == [["embedding", "embeddings"]]
    with tf.GradientTape() as tape:
        logits = logits_of(name, model, inputs_of(name, sequences, model))
        value = tf.reduce_sum(logits[:, :, 0])  # of a token that no sequence holds
    gradient = tf.convert_to_tensor(tape.gradient(value, tables[0].value)).numpy()
    assert np.abs(gradient[0]).max() > 0, "by the logits"
    assert np.abs(gradient[sequences[0, 0]]).max() > 0, "by the embedding"


@pytest.mark.parametrize("layers", [1, 3])
def test_carried_state_makes_two_windows_one(layers):
    model, sequences = tiny("lstm_lm", layers=layers), tokens(3, 8)
    whole, end = model([sequences, model.zero_state(3)])
    first, state = model([sequences[:, :5], model.zero_state(3)])
    second, last = model([sequences[:, 5:], state])
    assert state.shape == (3, layers, 2, 6)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(last, end, rtol=0, atol=1e-6)
    forgotten, _ = model([sequences[:, 5:], model.zero_state(3)])
    assert np.abs(forgotten - second).max() > 1e-3


@pytest.mark.pairs(lambda name, policy: dealt(name, TINY, policy, HALF))
@pytest.mark.parametrize("policy", HALF, indirect=True)
@pytest.mark.parametrize("name", TINY)
def test_logits_and_state_are_float32_in_half_precision_and_about_the_same(name, policy):
    half, sequences = tiny(name), tokens(3, 6)
    keras.config.set_dtype_policy("float32")
    full = tiny(name)
    half.set_weights(full.get_weights())
    inputs = inputs_of(name, sequences, full)
    found, expected = (tf.nest.flatten(model(inputs)) for model in (half, full))
    assert {each.dtype for each in found} == {tf.float32}
    assert {variable.dtype for variable in half.weights} == {"float32"}
    largest = np.abs(expected[0]).max()
    # bfloat16 rounds to 2⁻⁹ at each of some twenty steps, float16 to 2⁻¹²
    allowed = {"mixed_float16": 0.01, "mixed_bfloat16": 0.08}[policy] * largest
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=allowed)
    assert (found[0].numpy() != expected[0].numpy()).any()


def attention_in_float64(layer, x, source, visible):
    """Return multi-head attention as its paper writes it, head after head."""

    def projected(dense, values):
        return values @ dense.kernel.numpy().astype(np.float64) + dense.bias.numpy()

    queries, keys, values = (
        projected(dense, given)
        for dense, given in [(layer.to_query, x), (layer.to_key, source), (layer.to_value, source)]
    )
    mixtures = np.zeros_like(queries)
    for head in range(layer.heads):
        part = slice(head * layer.size, (head + 1) * layer.size)
        scores = queries[..., part] @ keys[..., part].transpose(0, 2, 1) / np.sqrt(layer.size)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True)) * visible[:, 0]
        mixtures[..., part] = shares / shares.sum(axis=-1, keepdims=True) @ values[..., part]
    return projected(layer.to_output, mixtures)


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_is_that_of_the_paper(heads):
    layer = Attention(AttentionOptions(width=12, heads=heads, dropout=0.0), None)
    draw = np.random.default_rng(3)
    layer.build((None, None, 12))
    for dense in (layer.to_query, layer.to_key, layer.to_value, layer.to_output):
        dense.bias.assign(draw.normal(size=12))
    x, source = draw.normal(size=(2, 4, 12)).astype("f4"), draw.normal(size=(2, 5, 12)).astype("f4")
    visible = draw.random((2, 1, 4, 5)) < 0.6
    visible[..., 0] = True
    found = layer(x, *layer.keys_and_values(source), visible)
    np.testing.assert_allclose(found, attention_in_float64(layer, x, source, visible), rtol=0, atol=1e-5)


def test_dropout_is_for_training_alone():
    for name in TINY:
        model, sequences = tiny(name, dropout=0.5), tokens(3, 6)
        inputs = inputs_of(name, sequences, model)
        tested = [logits_of(name, model, inputs).numpy() for _ in range(2)]
        np.testing.assert_array_equal(*tested)
        assert (logits_of(name, model, inputs, training=True).numpy() != tested[0]).any(), name


def test_positions_have_the_papers_sines_and_cosines_and_may_begin_later():
    angles = np.arange(20)[:, None] / 10_000.0 ** (np.arange(0, 6, 2) / 6)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    np.testing.assert_allclose(sinusoids(0, 20, 6), expected, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(sinusoids(13, 7, 6), sinusoids(0, 20, 6)[13:])


@pytest.mark.parametrize("name", ["transformer", "gpt", "bert_base"])
def test_a_sequence_longer_than_the_model_takes_is_one_line(name):
    model = tiny(name)
    assert model.longest == 9
    logits_of(name, model, inputs_of(name, tokens(2, 9), model))
    expected = r"expected sequences of at most 9 tokens \(longest\), got 10"
    with pytest.raises(InvalidArgument, match=expected):
        model(inputs_of(name, tokens(2, 10), model))
    if name == "transformer":
        with pytest.raises(InvalidArgument, match=expected):
            model([tokens(2, 10), tokens(2, 3)])
    traced = tf.function(model, input_signature=[specs_of(inputs_of(name, tokens(2, 9), model))])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"at most 9 tokens \(longest\), got"):
        traced(inputs_of(name, tokens(2, 10), model))


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("transformer", {"layers": 0}, "layers: expected a whole number from 1, got 0"),
        ("transformer", {"heads": 7}, "heads: expected a divisor of width 512, got 7"),
        ("transformer", {"width": 9, "heads": 3}, "width: expected an even number, got 9"),
        ("transformer", {"norm": "both"}, "norm: expected 'post' or 'pre', got 'both'"),
        ("gpt_small", {"dropout": 1}, "dropout: expected a number in [0, 1), got 1"),
        ("lstm_lm", {"unit": 3}, 'unit: unknown key, did you mean "units"? (known here: layers, units, drop'),
    ],
)
def test_a_wrong_option_is_one_line(name, options, line):
    with pytest.raises(InvalidArgument) as caught:
        MODELS[name].checked(options)
    assert str(caught.value).startswith(line)
