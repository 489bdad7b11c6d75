"""Local steps of optimizers of torch, on the ranks of the job that pytest runs in."""

import io

import pytest

from commlib import InvalidArgument

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: scripts/install.sh frameworks")

from commlib.torch import LocalSteps  # noqa: E402
from tests.torch.models import batches, everywhere, in_ddp, loss_of, network, weights_of  # noqa: E402

DENSE = {"name": "dense"}
SPARSE = {"name": "hitopk", "density": 0.1, "decay": 0.95}
DILOCO = {"rate": 0.7, "momentum": 0.9, "nesterov": True}


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)


def adam(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


@pytest.mark.parametrize("make", [sgd, adam])
def test_by_default_the_weights_become_the_mean_of_those_of_all_ranks(topology, make):
    torch.manual_seed(topology.world.rank)
    model = torch.nn.Linear(8, 1)  # another one on each rank
    optimizer = make(model)
    with LocalSteps(model, optimizer, topology, DENSE, steps=3) as local:
        alone = torch.nn.Linear(8, 1)
        alone.load_state_dict(everywhere(topology, model.state_dict())[0])
        of_alone = make(alone)
        for batch in batches(topology.world.rank, 3):
            step(alone, of_alone, batch)
            step(model, optimizer, batch)
            ended = local.step()
        assert ended
        assert local.finite
    mean = sum(each.double() for each in everywhere(topology, weights_of(alone))) / topology.world.size
    torch.testing.assert_close(weights_of(model).double(), mean, rtol=1e-5, atol=1e-6)  # one float32 sum
    assert all(torch.equal(weights_of(model), each) for each in everywhere(topology, weights_of(model)))


def test_the_outer_optimizer_moves_the_common_weights(topology):
    """One rank's gradient is given: with steps of one, ``θ − w`` is the inner rate times the gradient."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with LocalSteps(model, optimizer, topology, DENSE, steps=1, **DILOCO) as local:
        for _ in range(2):
            model.weight.grad = torch.ones(1, 2)
            optimizer.step()
            local.step()
    # Δ = 1, v = 1 and 1.9: the weights move by 0.7·(1 + 0.9·v)
    expected = torch.full((1, 2), -0.7 * (1.9 + 2.71))
    torch.testing.assert_close(model.weight.detach(), expected)


def test_a_round_that_one_rank_spoils_is_skipped_on_all(topology):
    model = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(1))
    optimizer = adam(model)
    good, bad = batches(topology.world.rank, 2)
    with LocalSteps(model, optimizer, topology, SPARSE, steps=2) as local:
        for _ in range(2):
            step(model, optimizer, good)
            local.step()
        before, moments = weights_of(model), optimizer.state_dict()["state"][0]["exp_avg"].clone()
        mean = model[1].running_mean.clone()
        residual = local.exchange.residual
        step(model, optimizer, good)
        assert not local.step()
        bad[0, 0] = float("nan") if topology.world.rank == 0 else 1.0
        step(model, optimizer, bad)
        assert local.step()
        assert not local.finite
        assert torch.equal(weights_of(model), before)
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments)
        assert torch.equal(model[1].running_mean, mean)
        assert (local.exchange.residual == residual).all()


STREAMED = [{"delay": 1}, {"delay": 1, "eager": True}, {}]


@pytest.mark.parametrize("how", STREAMED, ids=str)
def test_fragments_are_exchanged_in_turns_and_settle_ends_with_equal_weights(topology, how):
    model = network()
    optimizer = adam(model)
    with LocalSteps(model, optimizer, topology, SPARSE, steps=4, fragments=2, **how, **DILOCO) as local:
        ended, common = [], []
        for batch in batches(topology.world.rank, 9):
            step(model, optimizer, batch)
            ended.append(local.step())
            topology.world.allgather_objects(len(ended))  # the caller may exchange during a delay
            with local.common_weights():
                common.append(weights_of(model))
        assert [number for number, each in enumerate(ended, 1) if each] == [
            number + how.get("delay", 0) for number in (2, 4, 6, 8)
        ]
        assert [reducer.steps for reducer in local.exchange.reducers] == [2, 2]
        for each in common:
            assert all(torch.equal(each, other) for other in everywhere(topology, each))
        if topology.world.size > 1:
            own = everywhere(topology, weights_of(model))
            assert not torch.equal(own[0], own[1])
        local.settle()
        settled = weights_of(model)
        assert all(torch.equal(settled, each) for each in everywhere(topology, settled))
        local.settle()  # nothing is left to exchange
        assert torch.equal(weights_of(model), settled)
        assert [reducer.steps for reducer in local.exchange.reducers] == [3, 3]


# ------------------------------------------------------------------------ ranks of different speed


def with_clock(local, seconds):
    """Let a clock of its own pass for a rank, ``seconds`` a step; return a function that lets it."""
    times = [0.0]
    local._now, local._since = (lambda: times[0]), 0.0

    def passes(more=seconds):
        times[0] += more

    return passes


def paced(local, model, optimizer, batch, passes):
    """Take a step, or pass it over; return whether it was taken."""
    if local.is_over:
        local.pass_over()
        return False
    step(model, optimizer, batch)
    passes()
    local.step()
    return True


def noting(local):
    """Return a list that gets a copy of each difference of this rank before it is weighed."""
    leave, differences = local._leave, []

    def note(part, difference):
        differences.append(torch.tensor(difference))
        leave(part, difference)

    local._rounds._submit = note
    return differences


def weighted(topology, count, difference):
    """Return the mean of the differences of all ranks, each of which counts ``count`` times."""
    of_ranks = everywhere(topology, (count, difference))
    return sum(n * own for n, own in of_ranks) / sum(n for n, _ in of_ranks)


def test_a_slow_rank_passes_steps_over_and_its_difference_counts_less(topology):
    model, rank = network(), topology.world.rank
    optimizer = sgd(model)
    with LocalSteps(model, optimizer, topology, DENSE, steps=4, round_seconds=3.5) as local:
        passes, differences, before = with_clock(local, 1.0 + rank), noting(local), weights_of(model)
        taken = []
        for number, batch in enumerate(batches(rank, 8), 1):
            taken.append(paced(local, model, optimizer, batch, passes))
            with local.common_weights():
                passes(100.0)  # a test does not count
            if number == 4:
                moved = before - weights_of(model)
    expected = [4, 2, 2, 1][rank]
    assert taken == [each < expected for each in range(4)] * 2
    torch.testing.assert_close(moved, weighted(topology, expected, differences[0]))
    assert all(torch.equal(weights_of(model), each) for each in everywhere(topology, weights_of(model)))


@pytest.mark.parametrize("by_samples", [False, True])
def test_differences_count_by_the_samples_of_their_steps_where_they_shall(topology, by_samples):
    model, rank = network(), topology.world.rank
    optimizer = sgd(model)
    with LocalSteps(model, optimizer, topology, DENSE, steps=2, by_samples=by_samples) as local:
        differences, before = noting(local), weights_of(model)
        for batch in batches(rank, 2):
            step(model, optimizer, batch)
            local.step(samples=3 + 2 * rank)
    plain, by_count = (weighted(topology, count, differences[0]) for count in (1, 3 + 2 * rank))
    torch.testing.assert_close(before - weights_of(model), by_count if by_samples else plain)
    assert topology.world.size == 1 or (plain - by_count).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("given", "saved_after"),
    [
        ({"steps": 3}, 5),  # within a round
        *(({"steps": 4, "fragments": 2, **how}, 6) for how in STREAMED),  # when a fragment is under way
        ({"steps": 6, "round_seconds": 3.5}, 3),  # of which a rank has spent a part
    ],
    ids=str,
)
def test_a_run_that_is_restored_goes_on_to_the_bit(topology, given, saved_after):
    rank, file, ends = topology.world.rank, io.BytesIO(), []
    for begin in (0, saved_after):
        model = network()
        optimizer = adam(model)
        with LocalSteps(model, optimizer, topology, SPARSE, **given, **DILOCO) as local:
            if begin:
                file.seek(0)
                for each, state in zip((model, optimizer, local), torch.load(file), strict=True):
                    each.load_state_dict(state)
            with local.common_weights():
                common = weights_of(model)
            assert all(torch.equal(common, each) for each in everywhere(topology, common))
            passes, taken = with_clock(local, 1.0 + rank), []
            for number, batch in enumerate(batches(rank, 12)[begin:], begin + 1):
                taken.append(paced(local, model, optimizer, batch, passes))
                if number == saved_after:
                    torch.save([each.state_dict() for each in (model, optimizer, local)], file)
            local.settle()
        ends.append((taken, weights_of(model)))
    (taken, through), (taken_again, restored) = ends
    assert taken_again == taken[saved_after:]
    assert all(taken_again) == ("round_seconds" not in given)
    assert torch.equal(restored, through)


def test_what_cannot_take_local_steps_is_refused_in_one_line(topology):
    optimizer = sgd(network())
    with pytest.raises(InvalidArgument, match="^model: expected .*, got DistributedDataParallel$"):
        LocalSteps(in_ddp(), optimizer, topology, DENSE, steps=2)
    wrong = {
        "steps: expected a whole number from 1, got 0$": {"steps": 0},
        "momentum: expected .*, got 1$": {"steps": 1, "momentum": 1},
        "fragments: expected a divisor of the 4 local steps, got 3": {"fragments": 3},
        "fragments: expected at most the": {"fragments": 4, "steps": 80, "momentum": 0.5},
        "delay: expected fewer steps than the 2 ": {"fragments": 2, "delay": 2},
        "delay: expected a whole number from 0, got -1": {"delay": -1},
        "mixing: expected a number .* with a delay": {"mixing": 0.5},
        "eager: expected False without a delay, got True": {"eager": True},
        "round_seconds: expected a number above 0, got 0": {"round_seconds": 0},
        "round_seconds: expected a number above 0, got 'soon'": {"round_seconds": "soon"},
    }
    for expected, more in wrong.items():
        few = torch.nn.Linear(2, 1)
        with pytest.raises(InvalidArgument, match=f"^{expected}"):
            LocalSteps(few, sgd(few), topology, DENSE, **{"steps": 4, **more})
    with pytest.raises(InvalidArgument, match="^0.weight: expected float32 on the CPU, got torch.float16"):
        LocalSteps(network(torch.float16), optimizer, topology, DENSE, steps=1)
