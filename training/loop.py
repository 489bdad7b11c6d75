"""The training loop: ``tf.GradientTape``, a reducer between gradients and optimizer, phase after phase."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from commlib import Communicator, LinkBytes, Report, Topology, cost
from commlib.profile import Profile
from commlib.tensorflow import DistributedGradients
from datacache import Batch
from training.choices import choose_reducers, count_weights
from training.config import Config, Phase
from training.data import Data, PhaseData
from training.job import Place
from training.metrics import RunFolder
from training.models import MODELS
from training.progress import Progress
from training.replicas import average_statistics, broadcast_weights, check_equal_weights
from training.summary import EpochResult, PhaseResult, Summary, epoch_line

VOID_STEPS_IN_A_ROW = 20


class TrainingDiverged(RuntimeError):
    """So many steps in a row were not finite that going on is a waste."""


def prepare_tensorflow(seed: int, comm: Communicator, place: Place) -> None:
    """Share cores and GPUs between the ranks of this machine, seed, and start Horovod."""
    tf.config.threading.set_intra_op_parallelism_threads(place.threads)
    tf.config.threading.set_inter_op_parallelism_threads(place.threads)
    if gpus := tf.config.list_physical_devices("GPU"):
        own = gpus[place.number % len(gpus)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)
    keras.utils.set_random_seed(seed + comm.rank)  # ranks differ in what they draw; weights are broadcast
    hvd.init()
    if (hvd.rank(), hvd.size()) != (comm.rank, comm.size):
        raise RuntimeError(
            f"rank {comm.rank} of {comm.size} in MPI is {hvd.rank()} of {hvd.size()} in Horovod"
        )


class Trainer:
    """One run of a configuration on the ranks of ``topology``.

    ``profile``: as :func:`training.choices.profile_for` returns it. ``config`` is the configuration with what
    was chosen from it written out, ``choices`` why.
    """

    def __init__(
        self, config: Config, topology: Topology, data: Data, profile: Profile | None = None
    ) -> None:
        self.topology = topology
        self.data = data
        self.rank, self.size = topology.world.rank, topology.world.size
        self.model = MODELS[config.model](data.dataset.channels, data.dataset.classes)
        self.optimizer = keras.optimizers.SGD(momentum=config.momentum)
        # Built before any step is traced: what is built inside a trace stays frozen in it.
        self.optimizer.build(self.model.trainable_variables)
        broadcast_weights(self.model, self.optimizer)
        self.choices = choose_reducers(config, topology, profile, count_weights(self.model))
        self.config = config.with_choices(self.choices)
        self.gradients = DistributedGradients(
            topology,
            self.model.trainable_variables,
            self.config.reducer_config(self.config.phases[0]),
        )

    def run(self, folder: RunFolder | None, progress: Progress) -> Summary:
        """Train all phases; rank 0 writes to ``folder``, the others have none."""
        start = time.perf_counter()
        progress.say(self._introduction())
        self._tell_choices(folder, progress)
        summary = Summary(correct=0, samples=0, seconds=0.0)
        epoch = 0
        for number, phase in enumerate(self.config.phases):
            if number:
                self._switch(self.config.phases[number - 1], phase, folder, progress)
            session = _PhaseSession(self, phase, folder, progress)
            for _ in range(phase.epochs):
                result = session.train_epoch(epoch)
                epoch += 1
            summary.correct, summary.samples = result.correct, result.samples
            summary.phases.append(session.result)
            session.data.close()
        summary.seconds = time.perf_counter() - start
        summary.held_back = float(np.linalg.norm(self.gradients.reducer.residual))
        reads = self.data.read_so_far()
        for line in reads.lines():
            progress.say(line)
        if folder is not None:
            folder.write("cache", **reads.counts, stand_ins=reads.stand_ins)
            folder.save_weights(self.model)
            folder.write("summary", accuracy=summary.accuracy, **asdict(summary))
        return summary

    def _introduction(self) -> str:
        config, nodes = self.config, [len(node) for node in self.topology.nodes]
        data = f"{len(self.data.training):,} training and {len(self.data.test):,} test samples"
        model = f"{config.model}: {self.gradients.size:,} weights"
        if self.size == 1:
            return (
                f"{config.dataset}: {data}; {model}; one rank, so nothing is exchanged and no reducer is used"
            )
        emulated = "emulated " if config.ranks_per_node else ""
        word = "node" if len(nodes) == 1 else "nodes"
        return (
            f"{config.dataset}: {data}; {model}; {self.size} ranks on {len(nodes)} {emulated}{word} {nodes}"
        )

    def _tell_choices(self, folder: RunFolder | None, progress: Progress) -> None:
        for number, choice in self.choices.items():
            progress.say(f"phase {number + 1}: auto picks {choice.reason}")
            if folder is not None:
                folder.write(
                    "choice",
                    phase=number,
                    reducer=choice.reducer,
                    options=choice.options,
                    predicted_seconds=choice.seconds,
                    predicted_dense_seconds=choice.dense_seconds,
                    reason=choice.reason,
                )

    def _switch(self, before: Phase, after: Phase, folder: RunFolder | None, progress: Progress) -> None:
        config = self.config.reducer_config(after)
        if config == self.config.reducer_config(before):
            return
        residual = float(np.linalg.norm(self.gradients.reducer.residual))
        self.gradients.switch(config)
        progress.say(
            f"switch from {before.reducer} to {after.reducer}: "
            f"the residual (norm {residual:.3g} on rank 0) goes into the next step"
        )
        if folder is not None:
            folder.write("switch", before=before.reducer, after=after.reducer, residual_norm=residual)


class _PhaseSession:
    """One phase of a trainer: its cache, its traced step, its counters."""

    def __init__(self, trainer: Trainer, phase: Phase, folder: RunFolder | None, progress: Progress) -> None:
        self.trainer, self.phase, self.folder, self.progress = trainer, phase, folder, progress
        self.data: PhaseData = trainer.data.of_phase(phase)
        self.steps = phase.epochs * self.data.steps
        self.step = 0
        self.voided_in_a_row = 0
        self.result = PhaseResult(
            trainer.config.reducer_config(phase)["name"], phase.input_size, phase.epochs
        )
        self._train_step = _traced_step(trainer, phase)
        self._predict = tf.function(
            lambda images: trainer.model(images, training=False), reduce_retracing=True
        )

    def train_epoch(self, epoch: int) -> EpochResult:
        """Train on every batch of an epoch, then test."""
        start, losses, sent = time.perf_counter(), [], LinkBytes()
        for batch in self.data.training_batches(epoch):
            loss, report = self._train(batch)
            losses.append(loss)
            sent += report.traffic.sent
            self._log_step(epoch, loss, report)
        result = self._add_up(epoch, losses, sent, time.perf_counter() - start)
        self._report(result)
        return result

    def _train(self, batch: Batch) -> tuple[float, Report]:
        trainer = self.trainer
        trainer.optimizer.learning_rate.assign(self.phase.learning_rate.at(self.step, self.steps))
        loss = float(self._train_step(tf.constant(batch.images), tf.constant(batch.labels)))
        self.step += 1
        report = trainer.gradients.reducer.last
        assert report is not None
        self.voided_in_a_row = 0 if report.finite else self.voided_in_a_row + 1
        self.result.void_steps += not report.finite
        if self.voided_in_a_row == VOID_STEPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{VOID_STEPS_IN_A_ROW} steps in a row had a NaN or an infinity in their gradients; "
                f"the learning rate is {float(trainer.optimizer.learning_rate):g}: try a smaller one"
            )
        return loss, report

    def _evaluate(self) -> tuple[int, int]:
        """Return correct answers and samples of the test part, each counted once over all ranks."""
        trainer = self.trainer
        average_statistics(trainer.model)
        check_equal_weights(trainer.model, trainer.topology.world)
        correct = samples = 0
        for batch in self.data.test_batches():
            answers = np.argmax(self._predict(tf.constant(batch.images)), axis=1)
            correct += int((answers == batch.labels)[batch.counts].sum())
            samples += int(batch.counts.sum())
        total = trainer.topology.world.agree([correct, samples]).sum(axis=0)
        return int(total[0]), int(total[1])

    def _log_step(self, epoch: int, loss: float, report: Report) -> None:
        self.progress.update(
            f"epoch {epoch + 1}  step {self.step}/{self.steps} of {self.result.reducer}"
            f" at {self.phase.input_size} px  loss {loss:.3f} (rank 0)"
        )
        if self.folder is not None and self.step % self.trainer.config.log_every == 0:
            self.folder.write(
                "step",
                epoch=epoch,
                step=self.step,
                loss=loss if np.isfinite(loss) else None,
                learning_rate=float(self.trainer.optimizer.learning_rate),
                finite=report.finite,
                selected=report.selected,
                applied=report.applied,
                traffic=asdict(report.traffic),
                stage_seconds=asdict(report.seconds),
            )

    def _add_up(self, epoch: int, losses: list[float], sent: LinkBytes, seconds: float) -> EpochResult:
        """Test, and add up over all ranks what they did in an epoch; all of them call it together."""
        trainer, steps = self.trainer, len(losses)
        correct, samples = self._evaluate()
        dense = steps * cost.dense(trainer.topology.nodes, trainer.rank, trainer.gradients.size).inter
        finite = np.isfinite(losses)
        loss_sum = hvd.allreduce(tf.constant(np.sum(losses, where=finite)), op=hvd.Sum)
        counts = [sent.intra, sent.inter, dense, int(finite.sum())]
        intra, inter, dense, counted = map(int, trainer.topology.world.agree(counts).sum(axis=0))
        self.result.sent += inter
        self.result.dense += dense
        return EpochResult(
            epoch=epoch,
            reducer=self.result.reducer,
            input_size=self.phase.input_size,
            steps=steps,
            loss=float(loss_sum) / counted if counted else None,
            correct=correct,
            samples=samples,
            train_seconds=seconds,
            images_per_second=steps * self.phase.batch_size * trainer.size / seconds,
            sent_intra_bytes=intra,
            sent_inter_bytes=inter,
            dense_inter_bytes=dense,
        )

    def _report(self, result: EpochResult) -> None:
        phases = self.trainer.config.phases
        self.progress.say(
            epoch_line(
                result,
                epochs=sum(phase.epochs for phase in phases),
                width=max(len(phase.reducer or "") for phase in phases),
            )
        )
        if self.folder is not None:
            self.folder.write("epoch", accuracy=result.accuracy, **asdict(result))


def _traced_step(trainer: Trainer, phase: Phase) -> Callable[..., Any]:
    """Return the compiled step of a phase: one graph for its input and batch size."""
    model, optimizer, gradients = trainer.model, trainer.optimizer, trainer.gradients
    variables = model.trainable_variables
    shape = (phase.batch_size, phase.input_size, phase.input_size, trainer.data.dataset.channels)

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.uint8), tf.TensorSpec(shape[:1], tf.int64)])
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses)
        means, finite = gradients.reduce(tape.gradient(loss, [variable.value for variable in variables]))
        if finite:
            optimizer.apply(means, variables)
        return loss

    return step
