"""The hook of DistributedDataParallel against plain DDP, on the ranks of the job that pytest runs in."""

import copy
import io

import numpy as np
import pytest

from commlib import REDUCERS, InvalidArgument, RanksDisagree, UnknownName
from commlib.errors import UseAfterClose

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: scripts/install.sh frameworks")

from torch import distributed  # noqa: E402

from commlib.torch import broadcast, register  # noqa: E402
from commlib.torch.gradients import _Bucket  # noqa: E402
from tests.torch.models import (  # noqa: E402
    batches,
    everywhere,
    gradients_of,
    in_ddp,
    loss_of,
    network,
    own_gradients,
    train,
    weights_of,
)

SPARSE = {"name": "hitopk", "density": 0.02}


def backward(ddp, batch):
    """Return the gradients that a step leaves."""
    ddp.zero_grad()
    loss_of(ddp, batch).backward()
    return gradients_of(ddp)


def mean_over_ranks(topology, tensors):
    """Return the means in float64, added up in the order of the ranks."""
    return {
        name: sum(each[name].double() for each in everywhere(topology, tensors)) / topology.world.size
        for name in tensors
    }


def equal(some, others):
    return all(torch.equal(some[name], others[name]) for name in {**some, **others})


# ------------------------------------------------------------------------ against plain DDP


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_dense_trains_as_plain_ddp_does_on_batches_of_other_sizes(topology, options):
    rank = topology.world.rank
    plain = train(in_ddp(**options), rank, 50)
    with register(ddp := in_ddp(**options), topology, {"name": "dense"}) as gradients:
        assert (train(ddp, rank, 50) - plain).abs().max() <= 1e-6
        assert len(gradients.exchange.sizes) > 1
        assert gradients.report.finite


def test_buckets_that_overlap_give_the_same_bits(topology):
    weights = []
    for overlap in (True, False):
        ddp = in_ddp()
        with register(ddp, topology, SPARSE, overlap=overlap) as gradients:
            weights.append(train(ddp, topology.world.rank, 8))
            assert gradients.exchange.overlaps == (overlap and topology.world.size > 1)
    assert torch.equal(*weights)
    assert all(torch.equal(weights[0], other) for other in everywhere(topology, weights[0]))


def test_ddp_has_the_other_means_while_the_last_bucket_is_exchanged(topology, monkeypatch):
    ddp, order, complete = in_ddp(), [], _Bucket.complete
    monkeypatch.setattr(_Bucket, "complete", lambda *given: order.append("mean") or complete(*given))
    with register(ddp, topology, SPARSE) as gradients:
        train(ddp, topology.world.rank, 4)
        propose = (last := gradients.exchange.reducers[-1]).propose
        last.propose = lambda *given: order.append("last") or propose(*given)
        order.clear()
        backward(ddp, batches(topology.world.rank, 1)[0])
        others, overlaps = ["mean"] * (len(gradients.exchange.sizes) - 1), gradients.exchange.overlaps
    assert order == ([*others, "last", "mean"] if overlaps else ["last", *others, "mean"])


def test_a_mean_that_cannot_be_converted_leaves_ddp_with_its_gradient():
    bucket = _Bucket(["weight"], torch.ones(3, dtype=torch.float16))
    with pytest.raises(TypeError):
        bucket.complete(None)
    assert bucket.future.value() is bucket.buffer


def test_accumulated_gradients_are_exchanged_once(topology):
    batch, more = batches(topology.world.rank, 2)
    ddp = in_ddp()
    with register(ddp, topology, {"name": "dense"}) as gradients:
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                loss_of(ddp, batch).backward()
            loss_of(ddp, more).backward()
        assert gradients.exchange.steps == 1  # since the buckets were remade
        found = gradients_of(ddp)
    both = {name: one + own_gradients(ddp, more)[name] for name, one in own_gradients(ddp, batch).items()}
    for name, mean in mean_over_ranks(topology, both).items():
        torch.testing.assert_close(found[name].double(), mean, rtol=1e-5, atol=1e-6)  # float32 sums


def test_a_backpropagation_past_ddp_is_no_step(topology):
    ddp, (batch,) = in_ddp(), batches(topology.world.rank, 1)
    with register(ddp, topology, SPARSE) as gradients:
        for _ in range(4):
            backward(ddp, batch)
            loss_of(ddp.module, batch).backward()
        assert gradients.exchange.steps == 2  # since the buckets were remade


def test_two_models_share_a_backpropagation(topology):
    first, second, dense = in_ddp(network()), in_ddp(torch.nn.Linear(1, 1)), {"name": "dense"}
    (batch,) = batches(topology.world.rank, 1)
    with register(first, topology, dense, overlap=False), register(second, topology, dense, overlap=False):
        for _ in range(5):
            first.zero_grad()
            second.zero_grad()
            second(first(batch)).mean().backward()
    grads = gradients_of(first) | gradients_of(second)
    assert all(equal(grads, other) for other in everywhere(topology, grads))


class Branches(torch.nn.Module):
    """Uses one of two layers, or none."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs, branch):
        layer = {"left": self.left, "right": self.right}[branch]
        return layer(self.first(inputs))


def test_parameters_that_some_ranks_do_not_use_are_exchanged_where_ddp_looks_for_them(topology):
    rank, found = topology.world.rank, []
    for reduced in (False, True):
        torch.manual_seed(1)
        ddp = in_ddp(Branches(), find_unused_parameters=True)
        gradients = register(ddp, topology, {"name": "dense"}) if reduced else None
        for step, batch in enumerate(batches(rank, 4)):
            ddp.zero_grad()
            ddp(batch, "left" if rank == 0 or step == 0 else "right").square().mean().backward()
        found.append({name: each.grad for name, each in ddp.named_parameters() if each.grad is not None})
        if gradients:
            gradients.close()
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-5, atol=1e-7)


def test_a_rank_that_has_joined_adds_zeros(topology):
    ddp = in_ddp()
    with register(ddp, topology, {"name": "dense"}) as gradients, ddp.join():
        for batch in batches(topology.world.rank, 5 - min(topology.world.rank, 1)):
            means = backward(ddp, batch)
        if topology.world.rank == 0:  # whose last step is without the others
            for name, own in own_gradients(ddp, batch).items():
                torch.testing.assert_close(means[name], own / topology.world.size)
    assert gradients.finite


# ------------------------------------------------------------------------------- residuals


@pytest.mark.parametrize("name", [name for name, each in REDUCERS.items() if each.sparse])
def test_what_is_applied_and_what_is_held_back_is_all_there_was(topology, name):
    ddp, layouts = in_ddp(), []
    sent = {key: torch.zeros_like(each) for key, each in ddp.module.named_parameters()}
    applied = {key: torch.zeros_like(each) for key, each in sent.items()}
    with register(ddp, topology, {"name": name, "density": 0.02}) as gradients:
        for batch in batches(topology.world.rank, 5):
            own, mean = own_gradients(ddp, batch), backward(ddp, batch)
            layouts.append(gradients.exchange.sizes)
            for key in sent:
                sent[key] += own[key]
                applied[key] += mean[key]
        held = gradients.residual
    assert layouts[0] != layouts[2] == layouts[4]  # the residuals of step 2 went on with the parameters
    if topology.world.size > 1:
        assert any(each.any() for each in held.values())
    held = {key: each.view(sent[key].shape) for key, each in held.items()}
    for key, total in mean_over_ranks(topology, sent).items():
        back = mean_over_ranks(topology, held)[key] + applied[key].double()
        torch.testing.assert_close(back, total, rtol=1e-5, atol=1e-6)  # five sums in float32


def test_a_switch_applies_what_the_reducer_before_held_back(topology):
    ddp, steps = in_ddp(), batches(topology.world.rank, 4)
    own = [own_gradients(ddp, batch) for batch in steps]
    with register(ddp, topology, SPARSE) as gradients:
        means = [backward(ddp, batch) for batch in steps[:3]]
        gradients.switch({"name": "dense"})
        means.append(backward(ddp, steps[3]))
        assert not any(each.any() for each in gradients.residual.values())
        assert gradients.config == {"name": "dense"}
    for name in own[0]:
        total = mean_over_ranks(topology, {name: sum(each[name] for each in own)})[name]
        applied = sum(each[name].double() for each in means)
        torch.testing.assert_close(applied, total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_sixteen_bits_are_added_up_in_float32(topology, dtype):
    ddp = in_ddp(network(dtype))
    with register(ddp, topology, {"name": "dense"}):
        for batch in batches(topology.world.rank, 3, dtype):
            own, mean = own_gradients(ddp, batch), backward(ddp, batch)
            for name, expected in mean_over_ranks(topology, own).items():
                assert mean[name].dtype == dtype
                assert torch.equal(mean[name], expected.to(dtype))


# ---------------------------------------------------------------------------- skipped steps


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_nan_on_one_rank_skips_the_step_on_all(topology, options):
    ddp, factor = in_ddp(**options), 1.0
    next(ddp.parameters()).register_hook(lambda gradient: gradient * factor)  # in the last bucket
    with register(ddp, topology, SPARSE) as gradients:
        for batch in batches(topology.world.rank, 4):
            backward(ddp, batch)
        before = gradients.residual
        factor = float("nan") if topology.world.rank == topology.world.size - 1 else 1.0
        assert all(each.isnan().all() for each in backward(ddp, batch).values())
        assert not gradients.finite
        assert equal(gradients.residual, before)
        factor = 1.0
        backward(ddp, batch)
        assert gradients.finite


def test_a_gradient_scaler_skips_the_step_on_all_ranks(topology):
    ddp = in_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with register(ddp, topology, SPARSE):
        before = weights_of(ddp)
        for batch in batches(topology.world.rank, 1):
            batch[0, 0] = float("inf") if topology.world.rank == 0 else 1.0
            scaler.scale(loss_of(ddp, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(weights_of(ddp), before)


# --------------------------------------------------------------------------------- a resume


WITH_VELOCITIES = {"wire": "gap+qsgd8", "wrappers": [{"name": "momentum_correction", "momentum": 0.9}]}
OTHERS = [{"name": name} for name in REDUCERS if name != "oktopk"]


@pytest.mark.parametrize("config", [SPARSE, SPARSE | {"name": "oktopk"} | WITH_VELOCITIES, *OTHERS], ids=str)
def test_a_restored_run_goes_on_to_the_bit(topology, config):
    rank, ddp = topology.world.rank, in_ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.02, momentum=0.5)
    with register(ddp, topology, config) as gradients:
        train(ddp, rank, 3, optimizer)
        file = io.BytesIO()
        torch.save([ddp.module.state_dict(), optimizer.state_dict(), gradients.state_dict()], file)
        through = train(ddp, rank, 7, optimizer, start=3)
        residual = gradients.residual
    file.seek(0)
    model, state, held = torch.load(file)
    restored = in_ddp()
    restored.module.load_state_dict(model)
    optimizer = torch.optim.SGD(restored.parameters(), 0.02, momentum=0.5)
    optimizer.load_state_dict(state)
    with register(restored, topology, config) as gradients:
        gradients.load_state_dict(held)
        assert torch.equal(train(restored, rank, 7, optimizer, start=3), through)
        assert equal(gradients.residual, residual)


def test_a_state_of_before_the_first_step_and_one_of_another_model(topology):
    ddp, other = in_ddp(), in_ddp(torch.nn.Linear(8, 1))
    with register(ddp, topology, SPARSE) as gradients, register(other, topology, SPARSE) as others:
        begin = gradients.state_dict()
        train(ddp, topology.world.rank, 3)
        train(other, topology.world.rank, 2)
        with pytest.raises(InvalidArgument, match="state: .*0.weight"):
            others.load_state_dict(gradients.state_dict())
        assert others.exchange.steps
        gradients.load_state_dict(begin)
        assert not any(each.any() for each in gradients.residual.values())
        train(ddp, topology.world.rank, 1)
        assert gradients.exchange.steps == 1


# -------------------------------------------------------------------------------- bad input


def test_what_cannot_be_registered_is_refused_in_one_line(topology):
    with pytest.raises(InvalidArgument, match=r"^ddp: expected a DistributedDataParallel, got Sequential$"):
        register(network(), topology, SPARSE)
    with pytest.raises(InvalidArgument, match=r"^0.weight: expected float32, .* got torch.float64$"):
        register(in_ddp(network(torch.float64)), topology, SPARSE)
    with pytest.raises(UnknownName, match='did you mean "hitopk"'):
        register(in_ddp(), topology, {"name": "hitop"})
    ddp, once = in_ddp(), pytest.raises(InvalidArgument, match="^ddp: .*without a hook: .*once")
    with register(ddp, topology, SPARSE), once:
        register(ddp, topology, SPARSE)


def test_ranks_that_disagree_raise_in_backpropagation(topology):
    if topology.world.size == 1:
        pytest.skip("one rank has no other to disagree with")
    own = 0.1 * (1 + topology.world.rank)
    expected = r"density is 0.1 on ranks \[0\], 0.2 on ranks \[1\]"
    register(first := in_ddp(), topology, {"name": "hitopk", "density": own})
    with pytest.raises(RanksDisagree, match=expected):
        train(first, topology.world.rank, 1)
    gradients = register(later := in_ddp(), topology, SPARSE)
    train(later, topology.world.rank, 4)  # from here on the exchange overlaps
    gradients.exchange.set_density(own)
    with pytest.raises(RanksDisagree, match=expected):
        train(later, topology.world.rank, 1)


def test_sparse_gradients_are_refused(topology):
    ddp = in_ddp(torch.nn.Sequential(torch.nn.Embedding(4, 8, sparse=True), torch.nn.Linear(8, 1)))
    register(ddp, topology, SPARSE)
    expected = "^gradient: expected a dense one, got a sparse one of 0.weight"
    with pytest.raises(InvalidArgument, match=expected):
        ddp(torch.tensor([1])).sum().backward()


def test_a_process_group_of_other_ranks_is_refused_on_all(topology):
    if topology.world.size == 1:
        pytest.skip("one rank has no other group")
    groups = [distributed.new_group([rank]) for rank in range(topology.world.size)]
    ddp = in_ddp(process_group=groups[topology.world.rank])
    expected = r"^process_group: expected the \d ranks .* groups of \[1\] ranks"
    with pytest.raises(RanksDisagree, match=expected):
        register(ddp, topology, SPARSE)


def test_parameters_that_no_gradient_comes_of_are_named_before_the_next_step(topology):
    gradients = register(ddp := in_ddp(Branches()), topology, SPARSE)
    (batch,) = batches(topology.world.rank, 1)
    ddp(batch, "left").sum().backward()
    with pytest.raises(InvalidArgument, match="rank . does not depend on right.weight, right.bias: expected"):
        ddp(batch, "left")
    with pytest.raises(InvalidArgument, match="right.weight, right.bias"):
        gradients.close()


def test_a_model_whose_hook_is_closed_computes_no_gradients(topology):
    register(ddp := in_ddp(), topology, SPARSE).close()
    with pytest.raises(UseAfterClose, match="wrap the model in DDP again"):
        backward(ddp, batches(topology.world.rank, 1)[0])


def test_weights_and_buffers_become_those_of_rank_0(topology):
    torch.manual_seed(topology.world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).to(torch.bfloat16)
    model(torch.randn(4, 2).to(torch.bfloat16))
    expected = everywhere(topology, copy.deepcopy(model.state_dict()))[0]
    broadcast(model, topology)
    assert equal(state := model.state_dict(), expected)
    assert np.isfinite(float(state["1.running_mean"].sum()))
