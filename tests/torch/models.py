"""Models and batches of tests with PyTorch, which differ by rank."""

import torch
from torch.nn.parallel import DistributedDataParallel


def network(dtype=torch.float32):
    """Return a network of 4,801 parameters, equal in every call."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 1)).to(dtype)


def in_ddp(model=None, **options):
    """Return a model in DDP, in several buckets, which DDP remakes after its first step."""
    return DistributedDataParallel(model or network(), bucket_cap_mb=0.004, **options)


def batches(rank, count, dtype=torch.float32):
    """Return batches of another size on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4 + 3 * rank, 8, generator=generator).to(dtype) for _ in range(count)]


def loss_of(model, batch):
    return ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()


def own_gradients(model, batch):
    """Return the gradients of this rank alone, by the parameter's name."""
    module = getattr(model, "module", model)
    gradients = torch.autograd.grad(loss_of(module, batch), list(module.parameters()))
    return dict(zip([name for name, _ in module.named_parameters()], gradients, strict=True))


def gradients_of(model):
    """Return copies of the gradients that DDP has left, by the parameter's name."""
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}


def train(model, rank, steps, optimizer=None, start=0):
    """Take steps of an optimizer, by default SGD; return the weights as one vector."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)
    for batch in batches(rank, steps)[start:]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return weights_of(model)


def weights_of(model):
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def everywhere(topology, value):
    """Return the values of all ranks."""
    return topology.world.allgather_objects(value)
