"""Models split by tracing: in stages on ranks they compute what they did in one process, in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pycomm.pipeline import SplitPoint, get_schedule_class, pipe_split, pipeline
from pycomm.pipeline.schedule.catalog import CATALOG, build
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
ATOL = 1e-12


class Block(nn.Module):
    """Branches on values: it can only be taken whole."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv(x)) if x.sum() < 1e9 else x


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Block(2, 4), Block(4, 6)])
        self.middle = Block(6, 6)
        self.up = nn.ModuleList([Block(12, 4), Block(8, 2)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, *, gain=1.0):
        skips = []
        for block in self.down:
            x = block(x) * self.scale
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x) * gain
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:])
            x = block(torch.cat([x, skip], 1))
        return F.dropout(x, 0.0, self.training) * self.scale


class GPT(nn.Module):
    def __init__(self, n_vocab=11, width=8, n_layers=4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(n_vocab, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True) for _ in range(n_layers)]
        )
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_vocab, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).triu(1))

    def forward(self, ids, labels=None):
        length = ids.shape[1]
        x = self.wte(ids) + self.wpe(torch.arange(length))
        mask = self.mask[:length, :length]
        for block in self.h:
            x = block(x, src_mask=mask)
        logits = self.head(self.ln_f(x))
        if labels is not None:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits


class Inner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, keep):
        x = torch.where(keep, torch.tanh(self.a(x)), x)
        pipe_split()
        return self.b(x), keep.sum()


class Masked(nn.Module):
    """Nested input, an int mask, pipe_split in two depths, a constant, and a dict as output."""

    def __init__(self, width=4):
        super().__init__()
        self.embed, self.inner = nn.Embedding(9, width), nn.ModuleDict({"x": Inner(width)})
        self.head = nn.Linear(width, 3)

    def forward(self, batch, **extra):
        ids, mask = batch["ids"], batch["mask"]
        x = self.embed(ids) * mask.unsqueeze(-1) * torch.tensor(2.0)
        x, n = self.inner["x"](x, (mask > 0).unsqueeze(-1))
        pipe_split()
        logits = self.head(x) + extra["bias"]
        return {"logits": logits, "embedded": x, "n": n.reshape(1), "mask": mask, "name": "masked"}


def u_net():
    torch.manual_seed(1)
    whole = UNet().double()
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    return whole, (x,), {"gain": 2.0}, {"middle": SplitPoint.BEGINNING, "up.0": SplitPoint.BEGINNING}


def gpt():
    torch.manual_seed(2)
    spec = {"h.1": SplitPoint.BEGINNING, "h.2": SplitPoint.END}
    return GPT().double(), (torch.arange(10).reshape(2, 5),), {}, spec


def masked():
    torch.manual_seed(3)
    batch = {"ids": torch.arange(6).reshape(2, 3), "mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    bias = torch.randn(2, 1, 3, dtype=torch.float64, requires_grad=False)
    return Masked().double(), (batch,), {"bias": bias}, None


def test_the_pieces_are_the_model():
    for made, skips, ties in (
        (u_net, 1, [((0, "scale"), (2, "scale"))]),
        (gpt, 1, [((0, "wte.weight"), (2, "head.weight"))]),
        (masked, 2, []),
    ):
        whole, args, kwargs, spec = made()
        before = copy.deepcopy(whole.state_dict())
        pipe = pipeline(whole, args, kwargs, spec)
        assert pipe.num_stages == 3 and list(pipe.ties) == ties, (str(pipe), pipe.ties)
        assert len(pipe.skips) == skips and set(pipe.skips.values()) == {(0, 2)}, pipe.skips
        assert not [name for name in vars(whole) if name.startswith("_constant")]
        for key, value in whole.state_dict().items():
            assert torch.equal(value, before[key])
        for mode in (True, False):
            whole.train(mode)
            for s in range(3):
                pipe.get_stage_module(s).train(mode)
            found, want = pipe(*args, **kwargs), whole(*args, **kwargs)
            if made is masked:
                assert found.pop("name") == want.pop("name") == "masked"
            torch.testing.assert_close(found, want, atol=ATOL, rtol=0)
        names = [set(pipe.get_stage_module(s).state_dict()) for s in range(3)]
        assert set().union(*names) == set(whole.state_dict())  # as in one process


def test_training_is_read_when_it_runs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.b(F.dropout(self.a(x), 0.5, training=self.training))

    net = Net()
    pipe = pipeline(net, (torch.ones(1, 2),), split_spec={"b": SplitPoint.BEGINNING})
    x = torch.randn(50, 2)
    for mode in (True, False):
        net.train(mode)
        pipe.get_stage_module(0).train(mode)
        torch.manual_seed(0)
        want = net(x)
        torch.manual_seed(0)
        assert torch.equal(pipe(x), want)


def test_cut_by_cost():
    whole, args, kwargs, _ = gpt()
    pipe = pipeline(whole, args, kwargs, num_stages=3)  # the best cut of [88+128, b, b, b, b, 16, 88]
    block = sum(p.numel() for p in whole.h[0].parameters())
    assert pipe.costs == (88 + 16 * 8 + block, 2 * block, block + 16 + 88)
    torch.testing.assert_close(pipe(*args), whole(*args), atol=ATOL, rtol=0)
    sequence = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2), nn.ReLU(inplace=True))
    for method in ("uniform", "parameters", "time", "memory"):
        x = torch.ones(3, 2)
        assert str(pipeline(sequence, (x,), num_stages=2, partition_method=method)).startswith(
            "stage 0: 0 - 1, 6 parameters, cost"
        )
    assert all(p.grad is None for p in sequence.parameters())
    policy = pipeline(whole, args, split_policy=lambda g: [n for n in g.nodes if n.target == "h.2"])
    assert str(policy).splitlines()[0].startswith("stage 0: wte - h.1")
    with pytest.raises(ValueError, match="2 layers cannot make 3 parts"):
        pipeline(sequence, (torch.ones(3, 2),), num_stages=3)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.twice = nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()

    def forward(self, x, flag=False):
        x = self.twice(self.twice(self.a(x)))
        if flag and x.sum() > 0:
            x = x + 1
        return self.b(x)


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x, what):
        x = self.a(x)
        if what == "norm":
            return self.norm(self.b(self.norm(x)))
        if what == "grad":
            with torch.no_grad():
                x = x * 2
        if what == "state":
            self.last = x
        if what == "alias":
            y = x
            x += 1
            return self.b(x + y)
        if what == "mode" and self.training:
            return self.b(x + 1)
        return self.b(x)


def test_what_cannot_be_split_is_said():
    net, x = Branching(), torch.ones(3, 2)
    cut = {"b": SplitPoint.BEGINNING}
    with pytest.raises(RuntimeError, match=r"test_pipeline_tracing.py:\d+, forward: 'if flag and x.sum") as e:
        pipeline(net, (x, True), split_spec=cut)
    assert "LayerSpec" in str(e.value) and "cannot trace Branching" in str(e.value)
    pipe = pipeline(net, (x,), split_spec=cut)
    assert torch.equal(pipe(x, flag=False), net(x))
    with pytest.raises(ValueError, match=r"argument 'flag' was False when the model was traced.* got True"):
        pipe(x, True)
    for spec, said in (
        ({"c": SplitPoint.END}, "Branching has no submodule 'c'; there are a, b, twice"),
        ({"b": "end"}, "must be SplitPoint.BEGINNING or SplitPoint.END, got 'end'"),
        ({"twice": SplitPoint.END}, "'twice' is called 2 times"),
        ({"a": SplitPoint.BEGINNING}, "stage 0 would be empty"),
        ({"b": SplitPoint.END}, "the last stage would be empty"),
        (None, "the model is not cut"),
    ):
        with pytest.raises(ValueError, match=said):
            pipeline(net, (x,), split_spec=spec)
    with pytest.raises(TypeError, match=r"do not fit Branching.forward\(x, flag=False\)"):
        pipeline(net, (), split_spec=cut)
    with pytest.raises(ValueError, match="one of split_spec, split_policy and num_stages"):
        pipeline(net, (x,), split_spec=cut, num_stages=2)
    for what, error, said in (
        ("plain", ValueError, r"b \(b\) changes in place what stage 0 made, in stage 1"),
        ("grad", RuntimeError, r"mul \(.*\) is under no_grad, enable_grad or autocast"),
        ("state", RuntimeError, "the forward sets Changing.last, which the graph would not"),
        ("mode", RuntimeError, "Changing does other things in training than in evaluation"),
    ):
        with pytest.raises(error, match=said):
            pipeline(Changing(), (x, what), split_spec=cut)
    aliasing = Changing()

    def before(name):
        return lambda graph: [node for node in graph.nodes if node.name == name]

    with pytest.raises(ValueError, match=r"iadd .* changes in place what stage 0 made"):
        pipeline(aliasing, (x, "alias"), split_policy=before("iadd"))
    aliased = pipeline(aliasing, (x, "alias"), split_policy=before("add"))
    assert torch.equal(aliased(x, "alias"), aliasing(x, "alias"))
    with pytest.raises(ValueError, match="'norm' is called in stages 0 and 1"):
        pipeline(Changing(), (x, "norm"), split_spec={"b": SplitPoint.END})
    twice = pipeline(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), (x,), split_spec={
        "0": SplitPoint.END, "1": SplitPoint.BEGINNING
    })  # fmt: skip
    assert twice.num_stages == 2  # the same cut, said twice


def loss_of(output, target):
    logits = output["logits"] if isinstance(output, dict) else output
    if target.is_floating_point():
        return F.mse_loss(logits, target)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def training(rank, size, names):
    for made in (u_net, gpt, masked):
        for name in names:
            if (CATALOG[name].stages_per_rank or 1) != 1:
                continue
            whole, args, kwargs, spec = made()
            pipe = pipeline(copy.deepcopy(whole), args, kwargs, spec)
            order = build(name, size, 3, 1)
            [s] = order.stages_of(rank)
            stage = pipe.build_stage(s, "cpu")
            schedule = get_schedule_class(name)(stage, 3, loss_fn=loss_of, loss_on_all_ranks=True)
            for n in (7, 4):  # uneven microbatches, of another size than when traced
                g = torch.Generator().manual_seed(n)
                if made is u_net:
                    given = (torch.randn(n, 2, 8, 8, dtype=torch.float64, generator=g),)
                    target = given[0]
                elif made is gpt:
                    given = (torch.randint(11, (n, 6), generator=g),)
                    target = given[0]
                else:
                    ids = torch.randint(9, (n, 3), generator=g)
                    given = ({"ids": ids, "mask": (ids > 3).long()},)
                    target = ids % 3
                    kwargs = {"bias": torch.randn(n, 1, 3, dtype=torch.float64, generator=g)}
                # keywords on all ranks, or only where they are used
                named = kwargs if rank == 0 or n == 4 else {}
                schedule.step(*given, target=target, **named)
                loss = loss_of(whole(*given, **kwargs), target)
                loss.backward()
                torch.testing.assert_close(schedule.loss, loss.detach(), atol=ATOL, rtol=0)
            want = dict(whole.named_parameters(remove_duplicate=False))
            for key, p in stage.submod.named_parameters():
                torch.testing.assert_close(p.grad, want[key].grad, atol=ATOL, rtol=0, msg=f"{name} {key}")


def test_traced_models_train_as_in_one_process():
    run_ranks(3, training, list(CATALOG), timeout=100)


def looped(rank, size):
    """Six stages on two ranks: ties and skips between stages of one rank as well."""
    torch.manual_seed(4)
    whole = GPT(n_layers=4).double()
    ids = torch.arange(20).reshape(4, 5) % 11
    pipe = pipeline(copy.deepcopy(whole), (ids[:1],), num_stages=6, partition_method="uniform")
    for name, v in (("Interleaved1F1B", 3), ("InterleavedZeroBubble", 3)):
        order = build(name, size, 2, v)
        stages = [pipe.build_stage(s) for s in order.stages_of(rank)]
        schedule = get_schedule_class(name)(stages, 2, loss_fn=loss_of, loss_on_all_ranks=True)
        schedule.step(ids, target=ids)
        loss = loss_of(whole(ids), ids)
        loss.backward()
        torch.testing.assert_close(schedule.loss, loss.detach(), atol=ATOL, rtol=0)
        want = dict(whole.named_parameters(remove_duplicate=False))
        for stage in stages:
            for key, p in stage.submod.named_parameters():
                torch.testing.assert_close(p.grad, want[key].grad, atol=ATOL, rtol=0)


def test_several_traced_stages_on_a_rank():
    run_ranks(2, looped)


def test_a_cut_by_type():
    """The classes that match are spread; others go along."""
    net = nn.Sequential(
        *[nn.Linear(2, 2) for _ in range(3)],
        nn.Conv1d(2, 2, 1),
        *[nn.Linear(2, 2) for _ in range(2)],
        nn.Conv1d(2, 2, 1),
    )
    x = torch.ones(2, 2, 2)
    pipe = pipeline(net, (x,), num_stages=2, partition_method="type:conv")
    assert pipe.costs == (1.0, 1.0)
    assert torch.equal(pipe(x), net(x))
    for stage in range(2):
        kinds = [type(m) for m in pipe.get_stage_module(stage).modules()]
        assert kinds.count(nn.Conv1d) == 1
    with pytest.raises(ValueError, match="no module's class matches 'lstm'; called are Conv1d, Linear"):
        pipeline(net, (x,), num_stages=2, partition_method="type:lstm")
