"""Reducers in PyTorch. Only this package imports torch.

``register`` makes ``DistributedDataParallel`` average its gradients by a reducer. Every backpropagation
then leaves in ``parameter.grad`` the mean over all ranks::

    topology = commlib.Topology(commlib.transport.mpi.world())
    init_process_group(topology)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    gradients = register(ddp, topology, {"name": "hitopk", "density": 0.01})
    …
    loss.backward()
    if gradients.finite:  # no NaN and no infinity on any rank
        optimizer.step()

``LocalSteps`` exchanges weights every few steps instead, of a model without DDP.
"""

from commlib.torch.gradients import DistributedGradients, broadcast, init_process_group, register
from commlib.torch.local_steps import LocalSteps

__all__ = ["DistributedGradients", "LocalSteps", "broadcast", "init_process_group", "register"]
