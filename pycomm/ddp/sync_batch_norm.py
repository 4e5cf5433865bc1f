"""``torch.nn.SyncBatchNorm`` on CPU and CUDA: the statistics of the batch are those of all ranks' batches.

torch's layer refuses CPU tensors, and on CUDA wants a process group of NCCL's. The wrapper gives each such
layer a class with a forward of our own; it stays an instance of torch's, with the same parameters, buffers
and state_dict. Its collectives use a communicator of their own. On the host they therefore need not keep any
order with the reduction of gradients; on CUDA the calls of all communicators have one order, so gradients
are reduced when backward is over (``overlap="end"``) unless the caller says otherwise. Nothing in it waits
for the GPU.

With n_r elements of a channel on rank r, their mean m_r and biased variance v_r, and N = Σ n_r, one
all_gather of (m, v, n) gives m = Σ n_r m_r / N and v = Σ n_r (v_r + (m_r − m)²) / N, in the order of ranks,
the same bits on all (T. Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979). Backward is one all_reduce of Σ dy and Σ dy·(x − m); the gradients of weight and bias
stay local, to be averaged as all others are. Half precision is computed in float32.

Differentiable twice and more, which torch's layer is not: with ``create_graph`` (on all ranks alike, as all
that needs collectives) backward computes m and v once more from x, in operations that autograd knows and a
sum over ranks whose gradient is the sum over ranks of the gradients.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator

__all__ = ["adopt_sync_batch_norms", "has_sync_batch_norm"]

# Not an attribute of the layer: copies and pickles of it must not hold a connection.
_communicators: weakref.WeakKeyDictionary[nn.Module, Communicator] = weakref.WeakKeyDictionary()


class _SyncBatchNorm(nn.SyncBatchNorm):
    """torch's layer with a forward of our own; outside of a wrapper it is a plain BatchNorm."""

    def forward(self, input: Tensor) -> Tensor:
        comm = _communicators.get(self)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if comm is None or not by_batch or not self.training:
            return self._alone(input, by_batch)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        apply: Any = _Normalise.apply
        out, mean, variance, n = apply(input, self.weight, self.bias, self.eps, comm)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            unbiased = variance * (n / (n - 1.0).clamp(min=1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        normalised: Tensor = out
        return normalised

    def _alone(self, input: Tensor, by_batch: bool) -> Tensor:
        keeps = not self.training or self.track_running_stats
        return nn.functional.batch_norm(
            input,
            self.running_mean if keeps else None,
            self.running_var if keeps else None,
            self.weight,
            self.bias,
            by_batch,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, comm: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        channels, dims = x.shape[1], [d for d in range(x.dim()) if d != 1]
        values = x.to(wide)
        n = values.numel() // channels
        mine = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if n > 0:
            variance, mean = torch.var_mean(values, dims, unbiased=False)
            mine[:channels], mine[channels:-1], mine[-1] = mean, variance, n
        table = mine.new_empty(comm.size, mine.numel())
        comm.all_gather(table, mine)
        means, variances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
        total = counts.sum()
        mean = (counts * means).sum(dim=0) / total
        variance = (counts * (variances + (means - mean).square())).sum(dim=0) / total
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        scale = (variance + eps).rsqrt().to(wide)
        centred = values - mean.to(wide).view(shape)
        out = centred * scale.view(shape)
        if weight is not None:
            out = out * weight.to(wide).view(shape)
        if bias is not None:
            out = out + bias.to(wide).view(shape)
        ctx.save_for_backward(x, weight, mean.to(wide), scale)
        ctx.facts = comm, total, dims, shape, eps, bias is not None  # total: the host waits for no GPU
        ctx.mark_non_differentiable(mean, variance, total)
        return out.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        comm, total, dims, shape, eps, has_bias = ctx.facts
        wide, channels = scale.dtype, scale.numel()
        dy, values = dy.to(wide), x.to(wide)
        if torch.is_grad_enabled():  # create_graph: mean and scale as functions of x
            mean = (_sum(values.sum(dims).double(), comm) / total).to(wide)
            centred = values - mean.view(shape)
            variance = _sum(centred.square().sum(dims).double(), comm) / total
            scale = (variance + eps).rsqrt().to(wide)
        else:
            centred = values - mean.view(shape)
        local = torch.cat([dy.sum(dims), (dy * centred).sum(dims)])
        sums = _sum(local.double(), comm).to(wide)
        sum_dy, sum_dy_x = (part.view(shape) for part in torch.split(sums, channels))
        wide_scale = scale.view(shape)
        dx = (dy - sum_dy / total - centred * wide_scale.square() * sum_dy_x / total) * wide_scale
        d_weight = d_bias = None
        if weight is not None:
            dx = dx * weight.to(wide).view(shape)
            d_weight = (local[channels:] * scale).to(weight.dtype)
        if has_bias:
            d_bias = local[:channels].to(x.dtype if weight is None else weight.dtype)
        return dx.to(x.dtype), d_weight, d_bias, None, None


class _Sum(torch.autograd.Function):
    """The sum over ranks; its gradient is the sum over ranks of the gradients."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        everyones = mine.clone()
        comm.all_reduce(everyones)
        return everyones

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.comm), None


def _sum(mine: Tensor, comm: Communicator) -> Tensor:
    apply: Any = _Sum.apply
    everyones: Tensor = apply(mine, comm)
    return everyones


def has_sync_batch_norm(module: nn.Module) -> bool:
    """Whether some layer of ``module`` is a SyncBatchNorm."""
    return any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())


def adopt_sync_batch_norms(module: nn.Module, comm: Communicator) -> None:
    """Makes the module's SyncBatchNorm layers work over the ranks of ``comm``. Not collective."""
    for layer in module.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            if type(layer) is nn.SyncBatchNorm:
                layer.__class__ = _SyncBatchNorm
            _communicators[layer] = comm
