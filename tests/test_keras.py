"""``model.fit`` on many ranks: the optimizer, what Keras does with it, and the callbacks."""

import copy
import importlib
import subprocess
import sys
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tensorflow_config

import commlib.keras
from commlib import InvalidArgument, RanksDisagree, Topology, UnknownName
from commlib.errors import UseAfterClose
from commlib.keras import (
    AverageMetrics,
    AverageMovingStatistics,
    BackupAndRestore,
    BroadcastVariables,
    DistributedOptimizer,
    LearningRateSchedule,
    LearningRateWarmup,
    SynchronizeEpochs,
    default_callbacks,
)
from commlib.tensorflow import DistributedGradients
from commlib.transport import simulated

DENSE = {"name": "dense"}
SPARSE = {"name": "allgather", "density": 0.25}


def data(rank, batches=4):
    """Return ``batches`` of 8 samples of each rank's own."""
    inputs = np.random.default_rng(rank).normal(size=(8 * batches, 3)).astype(np.float32)
    return inputs, inputs @ np.array([1.0, -2.0, 0.5], np.float32)


def linear(initializer="ones"):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=initializer)])


def distributed(comm, optimizer="sgd", config=DENSE):
    return DistributedOptimizer(optimizer, Topology(comm, ranks_per_node=1), config)


def compiled(comm, optimizer="sgd", config=DENSE, model=None, **options):
    model = model or linear()
    model.compile(optimizer=distributed(comm, optimizer, config), loss="mse", **options)
    return model


def values(variables):
    return [variable.numpy() for variable in variables]


def equal(some, others):
    return len(some) == len(others) and all(map(np.array_equal, some, others))


def after_steps(function):
    """Return a callback that calls a function after every step."""
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: function())


def before_tests(function):
    return keras.callbacks.LambdaCallback(on_test_begin=lambda logs: function())


# ------------------------------------------------------------- steps


def fitted(comm, batches=4, poison=None):
    """Fit a linear model on ``batches`` of 8 samples of each rank; return weights, steps and samples."""
    inputs, targets = data(comm.rank, batches)
    if poison == comm.rank:
        targets[8:16] = np.nan
    model = compiled(comm, keras.optimizers.SGD(0.05, momentum=0.5))
    model.fit(inputs, targets, batch_size=8, shuffle=False, verbose=0)
    return values(model.weights), int(model.optimizer.iterations), (inputs, targets)


def by_hand(data, batches=4, epochs=1):
    """Return what SGD makes of the mean gradients, in float64; a rank that has no more data adds zero."""
    weights, bias = np.ones(3), 0.0
    velocity = np.zeros(4)
    for batch in [*range(batches)] * epochs:
        own = slice(8 * batch, 8 * batch + 8)
        gradients = []
        for inputs, targets in data:
            if own.start >= len(inputs):
                gradients.append(np.zeros(4))
                continue
            error = inputs[own].astype(float) @ weights + bias - targets[own]
            gradients.append([*(2 * error @ inputs[own] / 8), 2 * error.mean()])
        velocity = 0.5 * velocity - 0.05 * np.mean(gradients, axis=0)
        weights, bias = weights + velocity[:3], bias + velocity[3]
    return weights, bias


def assert_by_hand(found, data, **options):
    """Compare a kernel and an offset with those made by hand, to the roundings of float32."""
    weights, bias = by_hand(data, **options)
    np.testing.assert_allclose(found[0][:, 0], weights, rtol=1e-5)
    np.testing.assert_allclose(found[1], [bias], rtol=1e-5, atol=1e-6)


def test_fit_steps_along_the_mean_gradient_of_all_ranks():
    results = simulated.run(fitted, 3)
    for weights, steps, _ in results:
        assert equal(weights, results[0][0])
        assert_by_hand(weights, [samples for *_, samples in results])
        assert steps == 4


def test_an_optimizer_that_is_closed_has_freed_its_own_communicators():
    def body(comm):
        topology = Topology(comm)
        with DistributedOptimizer("sgd", topology, {"name": "hitopk"}) as optimizer:
            optimizer.build([keras.Variable(np.zeros(3, np.float32))])
        with pytest.raises(UseAfterClose):
            optimizer.ranks.gather("the end", None)
        optimizer.close()
        return comm.allgather_objects(comm.rank), topology.node.allgather_objects(comm.rank)  # these are open

    assert simulated.run(body, 2) == [([0, 1], [0, 1])] * 2


def test_a_skipped_step_of_one_rank_changes_no_weight_on_any():
    results = simulated.run(lambda comm: fitted(comm, batches=2, poison=1), 2)
    clean = simulated.run(lambda comm: fitted(comm, batches=1), 2)
    for (weights, steps, _), (before, *_) in zip(results, clean, strict=True):
        assert equal(weights, before)
        assert steps == 1


def test_an_optimizer_is_named_and_wrong_settings_are_refused_when_it_is_made():
    def body(comm):
        assert isinstance(distributed(comm, "adam"), keras.optimizers.Adam)
        with pytest.raises(InvalidArgument, match="optimizer: Could not interpret optimizer identifier: 5"):
            distributed(comm, 5)
        with pytest.raises(InvalidArgument, match="not distributed yet"):
            distributed(comm, distributed(comm))
        with pytest.raises(UnknownName, match='unknown reducer "hitop" .*did you mean "hitopk"'):
            distributed(comm, config={"name": "hitop"})
        with pytest.raises(InvalidArgument, match="density: expected"):
            distributed(comm, config={"name": "hitopk", "density": 7})
        with pytest.raises(InvalidArgument, match='config: expected {"name": .* got {}'):
            distributed(comm, config={})
        with pytest.raises(InvalidArgument, match="timeout: expected seconds above 0.*got 0"):
            DistributedOptimizer("sgd", Topology(comm), DENSE, timeout=0)

    simulated.run(body, 1)


def test_layers_that_are_unfrozen_without_compile_are_named():
    def body(comm):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, name="backbone"), keras.layers.Dense(1)]
        )
        model.layers[0].trainable = False
        compiled(comm, model=model)
        inputs, targets = data(comm.rank)
        model.optimizer.build(model.trainable_variables)
        model.layers[0].trainable = True
        with pytest.raises(InvalidArgument, match="backbone/bias had no part.*compile with a new"):
            model.fit(inputs, targets, verbose=0)

    simulated.run(body, 1)


def test_layers_that_are_frozen_after_the_optimizer_was_built_stay_as_they_are():
    def body(comm):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        compiled(comm, keras.optimizers.SGD(0.1, momentum=0.9), model=model)
        model.fit(*data(comm.rank), batch_size=8, verbose=0)
        model.layers[0].trainable = False
        model.make_train_function(force=True)
        before = values(model.weights)
        model.fit(*data(comm.rank), batch_size=8, verbose=0)
        return [np.array_equal(*each) for each in zip(before, values(model.weights), strict=True)]

    assert simulated.run(body, 2) == [[True, True, False, False]] * 2


def test_xla_is_refused_in_one_line_and_switched_off_by_the_callbacks(monkeypatch):
    # With determinism, which a training run of another test switches on, Keras leaves XLA out by itself.
    monkeypatch.setattr(tensorflow_config, "is_op_determinism_enabled", lambda: False)

    def body(comm):
        model = compiled(comm, jit_compile=True)
        with pytest.raises(InvalidArgument, match="jit_compile: .* expected False, got True"):
            model.fit(*data(comm.rank), verbose=0)
        model = compiled(comm, jit_compile=True)
        with pytest.warns(UserWarning, match="jit_compile: .*: off"):
            model.fit(*data(comm.rank), verbose=0, callbacks=[SynchronizeEpochs()])
        return int(model.optimizer.iterations)

    assert simulated.run(body, 1) == [1]


def test_keras_on_another_backend_is_refused_with_the_way_to_go(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(InvalidArgument, match="KERAS_BACKEND: expected tensorflow, got torch: commlib.torch"):
        simulated.run(distributed, 1)
    monkeypatch.setenv("KERAS_BACKEND", "openvino")
    with pytest.raises(InvalidArgument, match="KERAS_BACKEND: expected .* openvino, which is not installed$"):
        importlib.reload(commlib.keras)


# ------------------------------------------------------------- what Keras does with an optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2},
        {"weight_decay": 0.1, "global_clipnorm": 0.1},
        {"loss_scale_factor": 64.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_an_optimizer_is_told_holds_when_it_is_distributed(options):
    """One rank, whose mean gradient is its own: the same as without commlib."""

    def body(comm):
        weights = []
        for wrap in (lambda optimizer: distributed(comm, optimizer), lambda optimizer: optimizer):
            model = linear()
            optimizer = keras.optimizers.SGD(0.1, momentum=0.5, **options)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            model.compile(optimizer=wrap(optimizer), loss="mse")
            model.fit(*data(0), batch_size=8, shuffle=False, verbose=0, epochs=2)
            weights.append(values([*model.weights, *model.optimizer.variables]))
        for own, others in zip(*weights, strict=True):
            # TensorFlow fuses other operations inside of a condition: roundings of float32
            np.testing.assert_allclose(own, others, rtol=1e-5, atol=1e-7)

    simulated.run(body, 1)


@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"steps_per_execution": 2}], ids=lambda o: str(*o)
)
def test_steps_are_the_same_however_keras_runs_them(options):
    def body(comm):
        weights = []
        for each in ({}, options):
            model = compiled(comm, keras.optimizers.SGD(0.05, momentum=0.5), **each)
            model.fit(*data(comm.rank), batch_size=8, shuffle=False, verbose=0, callbacks=default_callbacks())
            weights.append(values(model.weights))
        for own, others in zip(*weights, strict=True):
            np.testing.assert_allclose(own, others, rtol=1e-5, atol=1e-7)  # roundings of float32

    simulated.run(body, 2)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_fit_with_overlap_has_the_bits_of_fit_without(policy):
    def body(comm, overlap):
        keras.config.set_dtype_policy(policy)  # of this thread
        inputs, targets = data(comm.rank, 4)
        if comm.rank == 1:
            targets[8:16] = np.nan  # a step that is skipped
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(width) for width in (5, 4, 1))])
        config = {"name": "hitopk", "density": 0.3}
        optimizer = DistributedOptimizer(
            *("sgd", Topology(comm, ranks_per_node=2), config), bucket_bytes=4 * 20, overlap=overlap
        )
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False, steps_per_execution=2)
        model.fit(inputs, targets, batch_size=8, shuffle=False, verbose=0)
        assert (optimizer.gradients.buckets, optimizer.gradients.overlaps) == (3, overlap)
        optimizer.close()
        return [weight.tobytes() for weight in values(model.weights)]

    overlapped, plain = (simulated.run(partial(body, overlap=each), 2) for each in (True, False))
    assert overlapped == plain == [plain[0]] * 2


BLOCKED = """
import sys
sys.modules["commlib"] = None
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
keras.models.load_model(sys.argv[2])
state = np.load(sys.argv[3])
assert type(model.optimizer) is keras.optimizers.Adam, type(model.optimizer)
found = [*model.weights, *model.optimizer.variables]
assert len(found) == len(state.files)
assert all(np.array_equal(value.numpy(), state[name]) for value, name in zip(found, state.files))
model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
"""


@pytest.mark.slow
def test_a_saved_model_loads_where_commlib_is_missing_with_its_optimizer(tmp_path):
    def body(comm):
        model = compiled(comm, keras.optimizers.Adam(0.05), SPARSE)
        callbacks = [
            keras.callbacks.ModelCheckpoint(tmp_path / f"checkpoint{comm.rank}.keras"),
            keras.callbacks.TensorBoard(tmp_path / f"logs{comm.rank}"),
        ]
        model.fit(*data(comm.rank), batch_size=8, verbose=0, callbacks=callbacks)
        if comm.rank == 0:
            model.save(tmp_path / "model.keras")
            model.save(tmp_path / "bare.keras", include_optimizer=False)
            np.savez(tmp_path / "state.npz", *values([*model.weights, *model.optimizer.variables]))
        assert type(copy.deepcopy(model).optimizer) is keras.optimizers.Adam
        assert type(copy.deepcopy(model.optimizer)) is DistributedOptimizer
        config = keras.saving.serialize_keras_object(model.optimizer)
        again = keras.saving.deserialize_keras_object(config)
        assert type(again) is keras.optimizers.Adam
        return float(again.learning_rate)

    assert simulated.run(body, 2) == [pytest.approx(0.05)] * 2
    paths = [str(tmp_path / name) for name in ("checkpoint0.keras", "bare.keras", "state.npz")]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_model_that_is_loaded_goes_on_distributed_with_its_optimizers_state(tmp_path):
    def body(comm):
        through = compiled(comm, keras.optimizers.Adam(0.05))
        through.fit(*data(comm.rank), batch_size=8, shuffle=False, verbose=0)
        path = tmp_path / f"{comm.rank}.keras"
        through.save(path)
        model = commlib.keras.load_model(path, Topology(comm, ranks_per_node=1), DENSE)
        for each in (through, model):
            each.fit(*data(comm.rank), batch_size=8, shuffle=False, verbose=0)
        return equal(values(model.weights), values(through.weights)), int(model.optimizer.iterations)

    assert simulated.run(body, 2) == [(True, 8)] * 2


@pytest.mark.parametrize("shared", [True, False], ids=["shared-folder", "a-folder-each"])
def test_a_backup_has_the_whole_epoch_of_unequal_batches_and_every_residual(tmp_path, shared):
    def callbacks(comm):
        folder = tmp_path / ("all" if shared else str(comm.rank))
        return [*default_callbacks(), BackupAndRestore(folder, delete_checkpoint=False)]

    def interrupted(comm):
        model = compiled(comm, keras.optimizers.Adam(0.05), SPARSE)
        model.fit(*data(comm.rank, 2 + 2 * comm.rank), batch_size=8, verbose=0, callbacks=callbacks(comm))
        return values(model.weights), model.optimizer.gradients.exchange.residual

    def resumed(comm):
        model, seen = compiled(comm, "adam", SPARSE, model=linear("zeros")), []
        look = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, _: seen.append(
                (epoch, values(model.weights), model.optimizer.gradients.exchange.residual)
            )
        )
        model.fit(*data(comm.rank), verbose=0, epochs=2, callbacks=[*callbacks(comm), look])
        return seen, int(model.optimizer.iterations)

    before = simulated.run(interrupted, 2)
    assert all(np.linalg.norm(residual) > 0 for _, residual in before)
    for (weights, residual), (seen, steps) in zip(before, simulated.run(resumed, 2), strict=True):
        ((epoch, restored, held),) = seen
        assert epoch == 1
        assert equal(restored, weights)
        np.testing.assert_array_equal(held, residual)
        assert steps == 4 + 1  # 2 or 4 of 8 samples before, one of all 32 after


def test_a_residual_of_another_step_or_damaged_is_not_used_and_that_is_said(tmp_path):
    def body(comm, optimizer, epochs):
        model = compiled(comm, optimizer, SPARSE)
        own = BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(*data(comm.rank), batch_size=8, verbose=0, epochs=epochs, callbacks=[own])
        return model

    simulated.run(lambda comm: body(comm, "sgd", 1), 2)
    path = tmp_path / "residual-1-of-2.npz"
    np.savez(path, residual=np.ones(4, np.float32), step=3)
    with pytest.warns(UserWarning, match="residual-1-of-2.npz .*of step 3, the model of 4"):
        simulated.run(lambda comm: body(comm, "sgd", 2), 2)
    for damaged in (b"", b"PK"):  # as after a loss of power
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="residual-1-of-2.npz is not used, it begins at zero"):
            simulated.run(lambda comm: body(comm, "sgd", 2), 2)


def test_keras_own_backup_says_that_it_has_no_residual(tmp_path):
    def body(comm):
        for _ in range(2):
            model = compiled(comm, config=SPARSE)
            model.optimizer.build(model.trainable_variables)
            own = keras.callbacks.BackupAndRestore(tmp_path / str(comm.rank), delete_checkpoint=False)
            model.fit(*data(comm.rank), verbose=0, callbacks=[own])

    with pytest.warns(UserWarning, match="holds no residual.*commlib.keras.BackupAndRestore keeps it"):
        simulated.run(body, 2)


# ------------------------------------------------------------- loss scale


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_an_overflow_on_one_rank_halves_the_loss_scale_on_all(config):
    def body(comm):
        keras.config.set_dtype_policy("mixed_float16")  # of this thread
        inputs, targets = data(comm.rank)
        if comm.rank == 1:
            inputs[8] = 6e4  # finite in float16; the gradient times the loss scale is not
        assert isinstance(distributed(comm).inner_optimizer, keras.optimizers.SGD)
        assert float(distributed(comm).initial_scale) == 2**15  # Keras' own loss scale
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2**8)
        model = compiled(comm, scaled, config)
        scales = []
        watch = after_steps(
            lambda: scales.append((float(model.optimizer.dynamic_scale), int(model.optimizer.iterations)))
        )
        model.fit(inputs, targets, batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
        return scales, values(model.weights), model.optimizer.gradients.exchange.residual

    results = simulated.run(body, 2)
    for scales, weights, residual in results:
        assert scales == [(256, 1), (128, 1), (128, 2), (128, 3)]
        assert equal(weights, results[0][1])
        assert np.abs(residual).max() < 100  # of gradients, not of gradients times a scale


def test_a_loss_scale_around_a_distributed_optimizer_is_refused_when_compiled():
    def body(comm):
        layers = [keras.Input((3,)), keras.layers.Dense(1, dtype="mixed_float16")]
        model = keras.Sequential(layers)
        model.dtype_policy = keras.DTypePolicy("mixed_float16")
        with pytest.raises(InvalidArgument, match="each rank's own: expected DistributedOptimizer"):
            model.compile(optimizer=distributed(comm), loss="mse")

    simulated.run(body, 1)


# ------------------------------------------------------------- callbacks


def test_other_first_weights_are_refused_in_the_first_step():
    def body(comm):
        model = compiled(comm, model=linear(keras.initializers.Constant(comm.rank)))
        with pytest.raises(tf.errors.OpError, match=r"kernel on ranks \[1, 2\].*BroadcastVariables"):
            model.fit(*data(comm.rank), verbose=0)
        return values(model.weights)[0].ravel().tolist()

    assert simulated.run(body, 3) == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_rank_0_gives_its_weights_and_its_optimizers_state_and_no_seed():
    def body(comm):
        keras.utils.set_random_seed(comm.rank)
        dropout = keras.layers.Dropout(0.5)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(20), dropout, keras.layers.Dense(1)])
        compiled(comm, keras.optimizers.Adam(0.1 + comm.rank), model=model)
        first = values(model.weights)
        model.fit(*data(comm.rank), verbose=0, callbacks=[BroadcastVariables()])
        rate = float(model.optimizer.learning_rate.numpy())
        return first, values(model.weights), rate, dropout.seed_generator.state.numpy().tolist()

    (first, last, rate, seed), (others, same, its_rate, its_seed) = simulated.run(body, 2)
    assert not equal(first, others)
    assert equal(last, same)
    assert (rate, its_rate) == (pytest.approx(0.1), pytest.approx(0.1))
    assert seed != its_seed


def test_models_of_other_shapes_are_refused_by_the_broadcast():
    def body(comm):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1 + comm.rank)])
        topology = Topology(comm)
        with pytest.raises(RanksDisagree, match=r"equal shapes.*variable 0 is \(3, 1\) on ranks \[0\]"):
            commlib.keras.broadcast_variables(model.weights, topology)

    simulated.run(body, 2)


def test_models_that_only_their_first_batches_build_end_alike():
    def body(comm):
        keras.utils.set_random_seed(comm.rank)
        first = []
        look = after_steps(lambda: first or first.extend(values(model.weights)))
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(5), keras.layers.Dense(1)]
        model = compiled(comm, "adam", SPARSE, model=keras.Sequential(layers))
        model.fit(*data(comm.rank), batch_size=8, epochs=2, verbose=0, callbacks=[look, *default_callbacks()])
        return first, values([*model.weights, *model.optimizer.variables]), int(model.optimizer.iterations)

    (first, last, steps), (other, same, its_steps) = simulated.run(body, 2)
    assert not equal(first, other)
    assert equal(last, same)
    assert steps == its_steps == 8


@pytest.mark.parametrize("is_unknown", [True, False])
def test_ranks_that_end_early_join_the_others_with_zeros(is_unknown):
    """Rank 0 has 3 batches, the others 5."""

    def body(comm):
        inputs, targets = data(comm.rank, 3 if comm.rank == 0 else 5)
        batches = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(8)
        if is_unknown:
            batches = batches.filter(lambda *_: True)  # their number is unknown now
        model = compiled(comm, keras.optimizers.SGD(0.05, momentum=0.5))
        model.fit(batches, epochs=2, verbose=0, callbacks=default_callbacks())
        return values(model.weights), (inputs, targets), int(model.optimizer.iterations)

    everywhere = simulated.run(body, 3)
    for weights, _, steps in everywhere:
        assert equal(weights, everywhere[0][0])
        assert_by_hand(weights, [samples for _, samples, _ in everywhere], batches=5, epochs=2)
        assert steps == 10


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_ends_early_has_the_learning_rate_and_validates_the_weights_of_all(overlap):
    def body(comm):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        optimizer = DistributedOptimizer(
            keras.optimizers.SGD(0.05), Topology(comm), SPARSE, bucket_bytes=20, overlap=overlap
        )
        model.compile(optimizer, loss="mse", jit_compile=False)
        validated = []
        test = before_tests(lambda: validated.append(values(model.weights)))
        model.fit(
            *data(comm.rank, 2 + 2 * comm.rank),
            batch_size=8,
            verbose=0,
            validation_data=data(9) if comm.rank == 0 else None,
            callbacks=[*default_callbacks(), LearningRateWarmup(0.05, epochs=1), test],
        )
        return validated, values(model.weights), float(optimizer.learning_rate.numpy())

    (validated, weights, rate), (_, others, its_rate) = simulated.run(body, 2)
    assert equal(validated[0], weights)
    assert equal(weights, others)
    assert rate == its_rate == pytest.approx(0.05)


def test_a_rank_that_stops_alone_is_named():
    def body(comm):
        model = compiled(comm)

        def stop(epoch, logs):
            model.stop_training = comm.rank == 1

        callbacks = [SynchronizeEpochs(), keras.callbacks.LambdaCallback(on_epoch_end=stop)]
        with pytest.raises(
            RanksDisagree, match=r"beginning of epoch 1' on .*0\], 'the end of fit' on ranks \[1"
        ):
            model.fit(*data(comm.rank), batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
        return int(model.optimizer.iterations)

    assert simulated.run(body, 2) == [4, 4]


def test_numbers_by_name_are_averaged_by_samples():
    def body(comm):
        own = {"loss": 1.0 + comm.rank} | ({"top": 0.5} if comm.rank == 1 else {})
        return [commlib.keras.average_metrics(own, Topology(comm), samples=n) for n in (None, 3 - comm.rank)]

    assert (
        simulated.run(body, 2)
        == [[{"loss": 1.5, "top": 0.5}, {"loss": pytest.approx(7 / 5), "top": 0.5}]] * 2
    )


def test_metrics_are_averaged_by_samples_so_that_all_stop_in_one_epoch():
    def body(comm):
        model = compiled(comm, keras.optimizers.SGD(0.3), metrics=["mae"])
        inputs, targets = data(comm.rank)
        samples = 32 - 2 * comm.rank  # 4 steps, the last shorter
        own = []
        keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: own.append(dict(logs)))
        stop = keras.callbacks.EarlyStopping("loss", patience=0, mode="max")  # stops as it falls
        history = model.fit(
            *(inputs[:samples], targets[:samples]),
            batch_size=8,
            epochs=5,
            verbose=0,
            validation_data=data(10 + comm.rank, 1 + comm.rank) if comm.rank < 2 else None,
            callbacks=[*default_callbacks()[:3], keep, AverageMetrics(), stop],
        )
        return own, history.history

    results = simulated.run(body, 3)
    history, *others = (history for _, history in results)
    assert others == [history] * 2
    assert len(history["loss"]) == 2
    for name, samples in {"loss": [32, 30, 28], "mae": [32, 30, 28], "val_loss": [8, 16]}.items():
        for epoch, found in enumerate(history[name]):
            own = [logs[epoch][name] for logs, _ in results[: len(samples)]]
            assert found == pytest.approx(np.average(own, weights=samples), rel=1e-12)


def test_the_moving_averages_of_batch_normalization_are_averaged_before_validation():
    def body(comm):
        layers = [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        model = compiled(comm, model=keras.Sequential(layers))
        inputs, targets = data(comm.rank)
        seen = []
        moving = [model.layers[0].moving_mean, model.layers[0].moving_variance]
        look = after_steps(lambda: seen.append(values(moving)))
        validated = []
        test = before_tests(lambda: validated.append(values(moving)))
        model.fit(
            *(inputs + comm.rank, targets),
            batch_size=8,
            verbose=0,
            validation_data=(inputs, targets),
            callbacks=[BroadcastVariables(), look, AverageMovingStatistics(), test],
        )
        return seen[-1], validated[0]

    results = simulated.run(body, 2)
    own, validated = zip(*results, strict=True)
    assert not equal(own[0], own[1])
    assert equal(validated[0], validated[1])
    for number in range(2):
        mean = (own[0][number].astype(float) + own[1][number]) / 2
        np.testing.assert_array_equal(validated[0][number], mean.astype(np.float32))


def normalizing(layer, seed=3):
    init = keras.initializers.GlorotUniform(seed=seed)
    layers = [keras.Input((4, 4, 3)), keras.layers.Conv2D(5, 3, kernel_initializer=init), layer()]
    layers += [keras.layers.ReLU(), layer(), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer=init)])


def pictures(rank):
    """Return 16 samples of each rank's own, of other mean and variance."""
    generator = np.random.default_rng(rank)
    return generator.normal(rank, 1 + rank, (16, 4, 4, 3)).astype("float32"), generator.normal(size=(16, 1))


def synchronizes(comm):
    """Compare two layers over ranks, in one batch and in ``fit``, with Keras' layer and the whole batch."""
    topology = Topology(comm, ranks_per_node=1)
    own = normalizing(lambda: commlib.keras.SyncBatchNormalization(topology, momentum=0.9))
    whole = normalizing(lambda: keras.layers.BatchNormalization(momentum=0.9))
    inputs, targets = pictures(comm.rank)
    parts = [pictures(rank) for rank in range(comm.size)]
    all_inputs, all_targets = (np.concatenate(each) for each in zip(*parts, strict=True))

    @tf.function
    def gradients(model, inputs, targets):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = model(inputs, training=True)
            loss = tf.reduce_mean((outputs - targets) ** 2)
        return outputs, *tape.gradient(loss, [inputs, model.trainable_variables])

    mine = slice(16 * comm.rank, 16 * comm.rank + 16)
    outputs, by_inputs, by_weights = gradients(own, tf.constant(inputs), tf.constant(targets, tf.float32))
    expected = gradients(whole, tf.constant(all_inputs), tf.constant(all_targets, tf.float32))
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(outputs, expected[0][mine])
    close(by_inputs / comm.size, expected[1][mine])  # of the mean over ranks of losses
    for one, other in zip(by_weights, expected[2], strict=True):
        close(np.mean(comm.allgather_objects(one.numpy()), axis=0), other)
    for one, other in zip(own.weights, whole.weights, strict=True):
        close(one, other)

    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.01), topology, DENSE, bucket_bytes=4 * 50, overlap=True
    )
    own.compile(optimizer, loss="mse", jit_compile=False)
    own.fit(inputs, targets, batch_size=16, epochs=3, verbose=0, callbacks=default_callbacks())
    whole.compile(keras.optimizers.SGD(0.01), loss="mse")
    whole.fit(all_inputs, all_targets, batch_size=16 * comm.size, epochs=3, verbose=0)
    for one, other in zip(own.weights, whole.weights, strict=True):
        close(one, other)


def test_batch_normalization_over_all_ranks_is_that_of_the_whole_batch():
    simulated.run(synchronizes, 2)


def test_batch_normalization_over_all_ranks_counts_what_is_masked_and_is_keras_layer_when_cloned():
    def body(comm):
        layer = commlib.keras.SyncBatchNormalization(Topology(comm), momentum=0.0)
        steps = np.arange(12.0, dtype=np.float32).reshape(2, 3, 2) + comm.rank
        mask = np.array([[True, True, False], [comm.rank == 0, False, False]])
        layer(steps, training=True, mask=mask)
        everywhere = np.concatenate(comm.allgather_objects(steps[mask]))
        np.testing.assert_allclose(layer.moving_mean, everywhere.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(layer.moving_variance, everywhere.var(axis=0), rtol=1e-5)
        return type(layer.from_config(layer.get_config()))

    with pytest.warns(UserWarning, match="Keras' BatchNormalization, which exchanges nothing"):
        assert simulated.run(body, 2) == [keras.layers.BatchNormalization] * 2


def test_unequal_numbers_of_steps_are_refused_where_layers_exchange():
    def body(comm):
        layers = [
            keras.Input((3,)),
            commlib.keras.SyncBatchNormalization(Topology(comm)),
            keras.layers.Dense(1),
        ]
        model = compiled(comm, model=keras.Sequential(layers))
        with pytest.raises(RanksDisagree, match=r"got 8 on rank 0, 6 on rank 1 .*steps_per_epoch=6"):
            model.fit(
                *data(comm.rank, 8 - 2 * comm.rank), batch_size=8, verbose=0, callbacks=[SynchronizeEpochs()]
            )
        return int(model.optimizer.iterations)

    assert simulated.run(body, 2) == [0, 0]


WARM_UP = [LearningRateWarmup(0.8, epochs=2)]
SCHEDULES = [
    LearningRateWarmup(0.8, epochs=1),
    LearningRateSchedule(0.8, 0.5, start_epoch=1, end_epoch=2),
    LearningRateSchedule(0.8, lambda epochs: 1 / epochs, start_epoch=2, end_epoch=4),
    LearningRateSchedule(0.8, lambda epochs: 5 - epochs, start_epoch=4, staircase=False),
]


@pytest.mark.parametrize(
    ("world_size", "callbacks", "fits", "expected"),
    [
        # from 0.8/4 in 4 steps to 0.8, and in a fit of half as many steps in 2
        (4, WARM_UP, [(2, 3), (1, 2)], [0.35, 0.5, 0.65, 0.8, 0.8, 0.8, 0.5, 0.8]),
        (2, SCHEDULES, [(2, 5)], [0.6, 0.8, 0.4, 0.4, 0.4, 0.4, 0.8 / 3, 0.8 / 3, 0.8, 0.4]),
    ],
    ids=["warm-up", "schedules"],
)
def test_the_learning_rate_rises_from_that_of_one_rank_and_follows_schedules(
    world_size, callbacks, fits, expected
):
    def body(comm):
        model = compiled(comm, keras.optimizers.SGD(0.8))
        rates = []
        look = after_steps(lambda: rates.append(float(model.optimizer.learning_rate.numpy())))
        own = [*copy.deepcopy(callbacks), look]
        for batches, epochs in fits:
            model.fit(*data(comm.rank, batches), batch_size=8, epochs=epochs, verbose=0, callbacks=own)
        return rates

    assert simulated.run(body, world_size) == [pytest.approx(expected)] * world_size


def test_callbacks_say_what_they_need():
    def body(comm):
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        scheduled = compiled(comm, keras.optimizers.SGD(schedule))
        with pytest.raises(InvalidArgument, match="learning_rate: expected a number in the optimizer"):
            scheduled.fit(*data(0), verbose=0, callbacks=[LearningRateWarmup(0.1)])
        with pytest.raises(InvalidArgument, match="learning_rate: expected one above 0, got -1"):
            LearningRateWarmup(-1)
        with pytest.raises(InvalidArgument, match="end_epoch: expected one above start_epoch=3, got 3"):
            LearningRateSchedule(0.1, 0.5, 3, 3)
        alone = linear()
        alone.compile(optimizer="sgd", loss="mse")
        with pytest.raises(InvalidArgument, match="compiled with DistributedOptimizer, got SGD"):
            alone.fit(*data(0), verbose=0, callbacks=default_callbacks())
        unbuilt = compiled(comm, model=keras.Sequential([keras.layers.Dense(1)]))
        with pytest.raises(InvalidArgument, match="expected one that is built"):
            unbuilt.fit(*data(0), verbose=0, callbacks=[BackupAndRestore("backup")])

    simulated.run(body, 1)


# ------------------------------------------------------------- Keras 2


def test_distributed_gradients_work_in_a_train_step_of_tf_keras_and_its_optimizers_are_refused():
    import tf_keras

    class Model(tf_keras.Sequential):
        def train_step(self, pair):
            inputs, targets = pair
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(inputs, training=True)[:, 0] - targets) ** 2)
            means, _ = self.distributed.reduce(tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply_gradients(zip(means, self.trainable_variables, strict=True))
            return {"loss": loss}

    def body(comm):
        model = Model([tf_keras.Input((3,)), tf_keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = tf_keras.optimizers.SGD(0.05, momentum=0.5)
        with pytest.raises(InvalidArgument, match="optimizer: Could not interpret"):
            distributed(comm, optimizer)
        model.distributed = DistributedGradients(Topology(comm), model.trainable_variables, DENSE)
        model.compile(optimizer=optimizer)
        inputs, targets = data(comm.rank)
        model.fit(inputs, targets, batch_size=8, shuffle=False, verbose=0)
        return values(model.weights), (inputs, targets)

    results = simulated.run(body, 2)
    for weights, _ in results:
        assert_by_hand(weights, [samples for _, samples in results])
