"""What torch's libraries do with a wrapper: local SGD, quantizing hooks, checkpoints, optimizers."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from test_ddp_hooks import TINY, Net, data, gradients, make, wanted
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, quantization_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

import pycomm
from ddp_cases import start_gloo
from ranks import run_ranks

# ---- post-local SGD: averaged over all, then over each half only, and the models every other step

START, PERIOD, N_STEPS, RATE = 2, 2, 7, 0.5


def halves(size):
    middle = (size + 1) // 2
    return [ranks for ranks in (list(range(middle)), list(range(middle, size))) if ranks]


def train_locally(rank, size):
    start_gloo(rank, size)
    [mine] = [group for group in map(dist.new_group, halves(size)) if dist.get_rank(group) >= 0]
    state = post_localSGD_hook.PostLocalSGDState(None, mine, start_localSGD_iter=START)
    net = make()
    ddp = pycomm.DistributedDataParallel(net, bucket_cap_mb=TINY * 6, overlap="async")
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(net.parameters(), lr=RATE), PeriodicModelAverager(PERIOD, warmup_steps=START)
    )
    found = []
    for step in range(N_STEPS):
        optimizer.zero_grad()
        ddp(data(step, rank)).backward()
        optimizer.step()
        found.append({name: p.detach().clone() for name, p in net.named_parameters()})
    dist.barrier()
    dist.destroy_process_group()
    return found


def mean(tensors):
    return sum(tensors) / len(tensors)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_post_local_sgd(size):
    by_rank = run_ranks(size, train_locally)
    nets = [make(torch.float64) for _ in range(size)]
    for step in range(N_STEPS):
        for rank, net in enumerate(nets):
            net.zero_grad()
            net(data(step, rank, torch.float64)).backward()
        groups = [list(range(size))] if step < START else halves(size)
        with torch.no_grad():
            for each in zip(*(net.parameters() for net in nets), strict=True):
                for group in groups:
                    gradient = mean([each[rank].grad for rank in group])
                    for rank in group:
                        each[rank].sub_(RATE * gradient)
                if step >= START and (step - START) % PERIOD == 0:
                    model = mean([p.clone() for p in each])
                    for p in each:
                        p.copy_(model)
        for rank, net in enumerate(nets):
            for name, p in net.named_parameters():
                torch.testing.assert_close(by_rank[rank][step][name].double(), p, rtol=1e-4, atol=1e-6)


# ---- torch's quantizing hooks


class FuturesLikeNccls:
    """torch.distributed, but the Future of all_gather holds [[tensors]], as it does over NCCL.

    torch's quantizing hooks index it so; over gloo it is [tensors], and they raise, whatever the wrapper.
    """

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_gather(self, outputs, mine, group, async_op):
        work = dist.all_gather(outputs, mine, group=group, async_op=async_op)

        class Work:
            def get_future(self):
                return work.get_future().then(lambda _: [torch.stack(outputs)])

        return Work()


def quantize(rank, size):
    start_gloo(rank, size)
    quantization_hooks.dist = FuturesLikeNccls()
    found = {}
    for name in ("quantization_pertensor_hook", "quantization_perchannel_hook"):
        for overlap in ("async", "inline", "end"):
            net = make()
            ddp = pycomm.DistributedDataParallel(net, bucket_cap_mb=TINY * 6, overlap=overlap)
            ddp.register_comm_hook(dist.group.WORLD, getattr(quantization_hooks, name))
            for step in range(2):
                ddp.zero_grad()
                ddp(data(step, rank)).backward()
            assert len(ddp.buckets) > 2
            found[name, overlap] = gradients(net)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_torchs_quantizing_hooks(size):
    by_rank = run_ranks(size, quantize)
    exact = wanted(size, 1)
    # Half a step for the value, half for the zero point; a step is at most the range of its gradients / 255.
    steps = []
    for rank in range(size):
        net = make(torch.float64)
        net(data(1, rank, torch.float64)).backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters()])
        steps.append(float(flat.max().clamp(min=0) - flat.min().clamp(max=0)) / 255)
    for how, name in itertools.product(by_rank[0], exact):
        for found in by_rank:
            torch.testing.assert_close(found[how][name].double(), exact[name], rtol=1e-5, atol=mean(steps))
            assert torch.equal(found[how][name], by_rank[0][how][name])


# ---- checkpoints


def save_and_load(rank, size):
    start_gloo(rank, size)
    net = make()
    ddp = pycomm.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    ddp(data(0, rank)).backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(ddp, optimizer)
    assert list(model_state) == list(net.state_dict())  # no "module." in it
    assert set(optimizer_state["state"]) == set(dict(net.named_parameters()))
    kept = copy.deepcopy((model_state, optimizer_state))
    optimizer.zero_grad()
    ddp(data(1, rank)).backward()
    optimizer.step()
    after = {name: p.detach().clone() for name, p in net.named_parameters()}

    torch.manual_seed(99)
    again = pycomm.DistributedDataParallel(Net())
    its_optimizer = torch.optim.Adam(again.parameters(), lr=0.1)
    set_state_dict(again, its_optimizer, model_state_dict=kept[0], optim_state_dict=kept[1])
    again(data(1, rank)).backward()
    its_optimizer.step()
    for name, p in again.module.named_parameters():
        assert torch.equal(p.detach(), after[name]), name
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_torchs_checkpoints_go_through_the_wrapper(size):
    run_ranks(size, save_and_load)


# ---- optimizers


class Remembers(torch.optim.Optimizer):
    """Steps with the gradient tensors that it met first, as fused and flattened optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.gradients = []

    @torch.no_grad()
    def step(self):
        parameters = self.param_groups[0]["params"]
        self.gradients = self.gradients or [p.grad for p in parameters]
        for p, g in zip(parameters, self.gradients, strict=True):
            p -= 0.5 * g


def remember(rank, size):
    comm = pycomm.init()
    found = []
    for as_view in (False, True):
        for compression in (None, "fp16"):
            net = make(torch.float64 if compression is None else torch.float32)
            ddp = pycomm.DistributedDataParallel(
                net,
                communicator=comm,
                bucket_cap_mb=TINY * 6,
                gradient_as_bucket_view=as_view,
                compression=compression,
            )
            # Buckets are built anew after the first backward; views stay where they are from the second on.
            for _ in range(2):
                ddp.zero_grad(set_to_none=False)
                ddp(data(0, rank).to(net.layers[0].weight.dtype)).backward()
            optimizer = Remembers(net.parameters())
            for step in range(1, 4):
                optimizer.zero_grad(set_to_none=False)
                ddp(data(step, rank).to(net.layers[0].weight.dtype)).backward()
                optimizer.step()
            found.append((compression, {name: p.detach().double() for name, p in net.named_parameters()}))
    return found


def zero_shards(rank, size):
    start_gloo(rank, size)
    net = make(torch.float64)
    ddp = pycomm.DistributedDataParallel(net, bucket_cap_mb=TINY * 6)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.5)
    for step in range(1, 4):
        optimizer.zero_grad()
        ddp(data(step, rank).double()).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    return [(None, {name: p.detach() for name, p in net.named_parameters()})]


@pytest.mark.parametrize("train", [remember, zero_shards])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_optimizers_that_remember_gradients_or_shard_parameters(size, train):
    net = make(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(1, 4):
        optimizer.zero_grad()
        mean([net(data(step, rank).double()) for rank in range(size)]).backward()
        optimizer.step()
    for compression, found in itertools.chain(*run_ranks(size, train)):
        for name, p in net.named_parameters():
            # compressed: 2^-10 of the gradients (at most 0.1 here) in each of three steps of 0.5
            rtol, atol = (1e-10, 1e-14) if compression is None else (0, 1e-3)
            torch.testing.assert_close(found[name], p.detach(), rtol=rtol, atol=atol)


# ---- what a step costs in calls, and arguments that change nothing


def count_calls(rank, size):
    comm = pycomm.init()
    calls = []
    plain, other = pycomm.Communicator.all_reduce, pycomm.Communicator._call

    def reduce(self, *arguments, **options):
        n_before = len(calls)
        done = plain(self, *arguments, **options)  # in C, or by way of _call
        calls[n_before:] = ["all_reduce"]
        return done

    def call(self, kind, *arguments, **options):
        calls.append(kind)
        return other(self, kind, *arguments, **options)

    pycomm.Communicator.all_reduce, pycomm.Communicator._call = reduce, call
    ddp = pycomm.DistributedDataParallel(make(), communicator=comm, bucket_cap_mb=TINY * 6)
    by_step = []
    for step in range(4):
        ddp.zero_grad()
        calls.clear()
        ddp(data(step, rank)).backward()
        facts = ddp.stats(torch.optim.SGD(ddp.parameters(), lr=0.1))
        assert facts["step"] == (step + 1 if size > 1 else 0)
        by_step.append(list(calls))
    return len(ddp.buckets), by_step


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_step_makes_one_call_for_each_bucket_and_one_for_the_status(size):
    """Statistics make none of their own: what they need travels with the status."""
    for n_buckets, by_step in run_ranks(size, count_calls):
        for calls in by_step[1:]:  # the first one agrees on the order, too
            assert calls == ["all_reduce"] * (n_buckets + 1 if size > 1 else 0)


def use_odd_arguments(rank, size):
    comm = pycomm.init()
    found = []
    for arguments in (
        {"dim": 1, "check_reduction": True, "batched_grad_copy": True},
        {"init_sync": False},
        {"device_ids": [], "broadcast_buffers": True, "static_graph": True},
        {"skip_all_reduce_unused_params": True},
    ):
        net = make(torch.float64)
        if arguments.get("init_sync") is False and rank > 0:
            with torch.no_grad():
                net.layers[0].bias += 1  # is kept: the user vouches for it
        before = net.layers[0].bias.detach().clone()
        ddp = pycomm.DistributedDataParallel(net, communicator=comm, **arguments)
        assert torch.equal(net.layers[0].bias, before)
        if "init_sync" in arguments:
            continue
        for step in range(2):
            ddp.zero_grad()
            ddp(data(step, rank).double()).backward()
        found.append(gradients(net))
    assert pycomm.DistributedDataParallel(make(), communicator=comm, dim=1).dim == 1
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_arguments_that_change_no_gradient(size):
    exact = wanted(size, 1)
    for found in run_ranks(size, use_odd_arguments):
        for each in found:
            torch.testing.assert_close(each, exact, rtol=1e-6, atol=1e-9)


def change_group(rank, size):
    start_gloo(rank, size)
    pair = dist.new_group([0, size - 1])
    net = make()
    ddp = pycomm.DistributedDataParallel(net)
    ddp(data(0, rank)).backward()
    ddp.zero_grad()
    if rank in (0, size - 1):
        ddp._update_process_group(pair)
        for step in range(2):
            ddp.zero_grad()
            ddp(data(step, 0 if rank == 0 else 1)).backward()
    dist.barrier()
    dist.destroy_process_group()
    return gradients(net) if rank in (0, size - 1) else None


@pytest.mark.parametrize("size", [3, 4])
def test_another_process_group(size):
    results = run_ranks(size, change_group)
    for found in (results[0], results[-1]):
        for name, gradient in wanted(2, 1).items():
            torch.testing.assert_close(found[name].double(), gradient, rtol=1e-4, atol=1e-7)
