"""Handwritten digits with PyTorch: two percent of the gradient for four epochs, then all of it.

mpirun -np 4 python examples/torch_digits.py      (needs: pip install '.[torch]' scikit-learn)
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.torch import init_process_group, register

SPARSE = {"name": "hitopk", "density": 0.02, "wire": "gap+fp16"}
DENSE = {"name": "dense"}

topology = commlib.Topology(commlib.transport.mpi.world(), ranks_per_node=2)
rank, ranks = topology.world.rank, topology.world.size
init_process_group(topology)
torch.set_num_threads(1)  # the ranks share the cores
torch.manual_seed(1)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
order = torch.randperm(len(images))
train, test = order[:1500], order[1500:]

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1, stride=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 10),
)
ddp = DistributedDataParallel(model)
gradients = register(ddp, topology, SPARSE)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

for epoch in range(6):
    if epoch == 4:
        gradients.switch(DENSE)  # its first step sends what was held back
    sent = 0
    batches = train[torch.randperm(len(train))].split(20 * ranks)
    for batch in batches[:-1]:  # each rank takes its part of a batch
        own = batch[rank::ranks]
        loss = nn.functional.cross_entropy(ddp(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        if gradients.finite:
            optimizer.step()
        sent += gradients.report.traffic.sent.inter
    sent = topology.world.allgather_ints([sent]).sum()
    with torch.no_grad():
        right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    if rank == 0:
        print(f"epoch {epoch + 1}: accuracy {right:.3f}, {sent:,} bytes between the nodes")

gradients.close()
