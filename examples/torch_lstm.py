"""An LSTM that learns to write Python, letter by letter: a hundredth of the gradient, with clipping and Adam.

It reads the source of a module of the standard library. A checkpoint holds what each rank has not sent.

mpirun -np 2 python examples/torch_lstm.py      (needs: pip install '.[torch]')
"""

import argparse
import inspect
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.torch import init_process_group, register

CONFIG = {"name": "oktopk", "density": 0.01, "wrappers": [{"name": "local_clipping", "norm": 5.0}]}
LENGTH, BATCH, STEPS = 40, 8, 120

topology = commlib.Topology(commlib.transport.mpi.world())
rank, ranks = topology.world.rank, topology.world.size
init_process_group(topology)
torch.set_num_threads(1)  # the ranks share the cores
torch.manual_seed(1)

text = inspect.getsource(argparse)
letters = sorted(set(text))
data = torch.tensor([letters.index(each) for each in text])
data = data[: len(data) // ranks * ranks].view(ranks, -1)[rank]  # of this rank


class Writer(nn.Module):
    """Predicts the next letter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(letters), 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.output = nn.Linear(128, len(letters))

    def forward(self, inputs):
        return self.output(self.lstm(self.embedding(inputs))[0])


ddp = DistributedDataParallel(Writer())
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.005)
gradients = register(ddp, topology, {"name": "dense"})  # Adam's moments settle first
folder = Path(tempfile.gettempdir())

for step in range(STEPS):
    if step == 30:
        gradients.switch(CONFIG)
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,))
    window = torch.stack([data[start : start + LENGTH + 1] for start in starts])
    loss = nn.functional.cross_entropy(ddp(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if gradients.finite:
        optimizer.step()
    if rank == 0 and step % 30 == 29:
        print(f"step {step + 1}: loss {loss.item():.2f}, {gradients.report.traffic.sent} sent", flush=True)

torch.save(gradients.state_dict(), folder / f"torch_lstm-{rank}.pt")  # beside those of model and optimizer
gradients.load_state_dict(torch.load(folder / f"torch_lstm-{rank}.pt"))
held = sum(float(each.abs().sum()) for each in gradients.residual.values())
print(f"rank {rank}: holds back {held:.1f}")
gradients.close()
