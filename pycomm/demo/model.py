"""A small GPT over bytes (vocabulary 256): pre-norm blocks, causal attention, embedding and head tied.

Shapes: B rows, T positions, D channels, H heads. No dropout, so a run is a function of its weights and data.
Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "ModelConfig"]

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults give 1.4 million parameters (5.6 MB of gradients)."""

    n_layers: int = 3
    n_heads: int = 4
    n_channels: int = 192
    n_positions: int = 128


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.n_channels
        self.n_heads = config.n_heads
        self.norm1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.norm2 = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x_btd: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        b, t, d = x_btd.shape
        heads = self.qkv(self.norm1(x_btd)).view(b, t, 3, self.n_heads, d // self.n_heads)
        q_bhtc, k_bhtc, v_bhtc = heads.permute(2, 0, 3, 1, 4)
        mixed_bhtc = F.scaled_dot_product_attention(q_bhtc, k_bhtc, v_bhtc, is_causal=True)
        x_btd = x_btd + self.out(mixed_bhtc.transpose(1, 2).reshape(b, t, d))
        up = F.gelu(self.up(self.norm2(x_btd)), approximate="tanh")
        down: Tensor = self.down(up)
        return x_btd + down


class GPT(nn.Module):
    """Returns the mean cross-entropy (nats per byte) of predicting each next byte.

    Example:
        >>> loss = GPT(ModelConfig())(torch.zeros(2, 129, dtype=torch.int64))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.n_channels
        self.bytes = nn.Embedding(VOCABULARY, d)
        self.positions = nn.Embedding(config.n_positions, d)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layers)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2: what is added to the residual stream 2 n_layers times starts smaller.
                into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.n_layers) ** (0.5 * into_stream))

    def forward(self, text_bt: Tensor) -> Tensor:
        """text_bt: int64, (B, T + 1) byte values. Returns a 0-dim float32 tensor."""
        inputs_bt, targets_bt = text_bt[:, :-1], text_bt[:, 1:]
        positions_t = torch.arange(inputs_bt.shape[1])
        x_btd = self.blocks(self.bytes(inputs_bt) + self.positions(positions_t))
        logits_btv = self.head(self.norm(x_btd))
        return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())
