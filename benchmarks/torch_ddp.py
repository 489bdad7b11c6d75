r"""PyTorch's DistributedDataParallel with our hook, and with its own hooks over Gloo: seconds, and the loss.

    python -m benchmarks.emulated up --nodes 4 --rate 0.2gbit      # as root
    python -m benchmarks.emulated run -- .venv-frameworks/bin/mpirun --allow-run-as-root --bind-to none \
        -H node1:1,node2:1,node3:1,node4:1 --mca btl_tcp_if_include eth0 -x GLOO_SOCKET_IFNAME=eth0 \
        --mca mpi_yield_when_idle 1 -x OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m benchmarks.torch_ddp \
        --rate 0.2gbit

A network of ten million weights learns scikit-learn's digits. Every subject begins with the same weights and
sees the same batches. They take turns, in another order in each step; a step takes as long as on its slowest
rank. Rank 0 prints a JSON object each, with its ``ratio`` to the first, of all DDP over Gloo. PyTorch's
PowerSGD has a single bucket: with several, its callbacks wait for each other in Gloo's two threads, for ever;
two of our subjects have one, too. The models of all subjects are in memory at once, and nothing is printed
before the last step; ``--subject`` leaves others out.

``--network wide``: nine tenths of the weights in one layer, whose gradient comes last but one. ``deep``: in
twelve layers alike, in buckets of 5 MiB, for the share of the exchange that backpropagation hides.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.torch import DistributedGradients, init_process_group, register
from training.bench.record import Record, Seconds

WARM_UP_STEPS = 4  # in which DDP makes its buckets, PowerSGD starts, and our hook begins to overlap


def powersgd(ddp: DistributedDataParallel) -> None:
    """Register PyTorch's PowerSGD hook of rank 4, from the third step on."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def nothing(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange nothing: a hook with which a step takes the least that it can."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def subjects(topology: commlib.Topology) -> dict[str, Callable[[Any], DistributedGradients | None]]:
    ours = {
        "dense, no overlap": {"name": "dense"},
        "dense": {"name": "dense"},
        "hitopk": {"name": "hitopk", "density": 0.01},
        "hitopk, gap+fp16": {"name": "hitopk", "density": 0.01, "wire": "gap+fp16"},
        "powersgd": {"name": "powersgd", "matrix_rank": 4},
        "hitopk, gap+qsgd2, one bucket": {"name": "hitopk", "density": 0.01, "wire": "gap+qsgd2"},
        "powersgd, one bucket": {"name": "powersgd", "matrix_rank": 4},
    }
    return {
        "ddp over gloo": lambda ddp: None,
        "ddp, fp16 hook": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "ddp, PowerSGD hook of rank 4": powersgd,
        **{
            name: lambda ddp, name=name, config=config: register(
                ddp, topology, config, overlap="no overlap" not in name
            )
            for name, config in ours.items()
        },
        "no exchange": lambda ddp: ddp.register_comm_hook(None, nothing),
    }


WIDTHS = {"wide": [64, 3000, 3000, 300, 10], "deep": [64, *[900] * 13, 10]}
BUCKET_MIB = {"wide": None, "deep": 5}  # of PyTorch, 25


def network(name: str) -> nn.Sequential:
    """Return the network, with the same weights each time."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS[name]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches(rank: int, ranks: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(2)
    while True:
        own = rng.integers(0, len(images), size * ranks)[rank::ranks]
        yield torch.tensor(images[own] / 16, dtype=torch.float32), torch.tensor(labels[own])


class Subject:
    """The network with a subject's hook, trained from the first weights on; and what its steps took."""

    def __init__(self, name: str, hook: Callable[[Any], DistributedGradients | None], kind: str) -> None:
        bucket_mib = 1024 if hook is powersgd or name.endswith("one bucket") else BUCKET_MIB[kind]
        self._ddp = DistributedDataParallel(network(kind), bucket_cap_mb=bucket_mib)
        self._gradients = hook(self._ddp)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), 0.05, momentum=0.9)
        self._seconds, self._losses, self._hidden = list[float](), list[float](), list[float]()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(self._ddp(images), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._seconds.append(time.perf_counter() - start)
        self._losses.append(loss.item())
        if self._gradients is not None and self._gradients.report.busy:
            self._hidden.append(self._gradients.report.hidden / self._gradients.report.busy)

    def result(self, world: commlib.Communicator) -> tuple[Seconds, dict[str, Any]]:
        """Return the seconds of a step, the loss, and what was hidden; collective, and the end of it."""
        if self._gradients is not None:
            self._gradients.close()
        everywhere = world.allgather_objects((self._seconds, self._losses))
        slowest = np.max([times for times, _ in everywhere], axis=0)[WARM_UP_STEPS:]
        last = np.mean([losses for _, losses in everywhere], axis=0)[-10:]
        hidden = self._hidden[WARM_UP_STEPS:]
        share = float(np.median(hidden)) if hidden else None
        more = {"loss": float(last.mean()), "hidden_share": share, "torch": torch.__version__}
        return Seconds.of(slowest.tolist()), more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="samples of a rank in a step")
    parser.add_argument("--network", choices=WIDTHS, default="wide")
    parser.add_argument("--rate", help="of the links, as the records are to say")
    parser.add_argument("--subject", action="append", help="may be repeated; all by default")
    given = parser.parse_args()
    torch.set_num_threads(1)
    topology = commlib.Topology(commlib.transport.mpi.world())
    init_process_group(topology)
    chosen = subjects(topology)
    if unknown := set(given.subject or ()) - chosen.keys():
        parser.error(f"--subject: expected some of {', '.join(chosen)}, got {', '.join(sorted(unknown))}")
    case = {
        "ranks_of_nodes": [len(node) for node in topology.nodes],
        "network": given.network,
        "weights": sum(each.numel() for each in network(given.network).parameters()),
        "batch_size": given.batch,
        "rate": given.rate,
    }
    timed = {
        name: Subject(name, hook, given.network)
        for name, hook in chosen.items()
        if not given.subject or name in given.subject
    }
    world, order = topology.world, np.random.default_rng(3)
    for images, labels in islice(batches(world.rank, world.size, given.batch), WARM_UP_STEPS + given.steps):
        for name in order.permutation(list(timed)):
            world.barrier()
            timed[name].step(images, labels)
    first: Record | None = None
    for name, each in timed.items():
        seconds, more = each.result(world)
        record = Record("torch_ddp", case, name, seconds, bytes=None, more=more)
        first = first or record
        if world.rank == 0:
            print(record.beside(first.subject, first.seconds).line(), flush=True)


if __name__ == "__main__":
    main()
