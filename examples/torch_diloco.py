"""DiLoCo over PyTorch: ranks take 20 steps of AdamW alone, then exchange how far they have come.

mpirun -np 2 python examples/torch_diloco.py      (needs: pip install '.[torch]' scikit-learn)
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import commlib
from commlib.torch import LocalSteps

topology = commlib.Topology(commlib.transport.mpi.world())
rank, ranks = topology.world.rank, topology.world.size
torch.set_num_threads(1)  # the ranks share the cores
torch.manual_seed(1)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
labels = torch.tensor(labels)
order = torch.randperm(len(images))
train, test = order[:1500][rank::ranks], order[1500:]

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
outer = {"steps": 20, "rate": 0.7, "momentum": 0.9, "nesterov": True}
with LocalSteps(model, optimizer, topology, {"name": "dense"}, **outer) as local:
    for _ in range(10):
        for batch in train[torch.randperm(len(train))].split(30):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            local.step()  # true where it ended a round
    with local.common_weights(), torch.no_grad():
        right = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"rank {rank}: accuracy {right:.3f}")
