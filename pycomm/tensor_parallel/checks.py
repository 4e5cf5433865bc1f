"""On request: is what must be equal on all ranks really equal?

A layer whose input must be replicated cannot see that it is not: each rank's result is then right for its own
input, and the sum is of no model. With ``PYCOMM_TP_CHECK=1`` such inputs are compared before they are used,
at the price of one small collective and one pass over the input each.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["check_equal", "checks_are_on"]

CHECK_VARIABLE = "PYCOMM_TP_CHECK"


def checks_are_on() -> bool:
    """Whether ``PYCOMM_TP_CHECK`` is 1; the same on every rank.

    Raises:
        ValueError: it is neither empty, 0 nor 1.
    """
    text = os.environ.get(CHECK_VARIABLE, "0")
    if text not in ("", "0", "1"):
        raise ValueError(f"{CHECK_VARIABLE} must be 0 or 1, got {text!r}")
    return text == "1"


@untraced
def check_equal(tensor: Tensor, what: object, comm: Communicator) -> None:
    """Where checks are on: raises the same error on every rank unless all have the same tensor. Collective.

    Raises:
        ValueError: names ``what`` (such as the layer, shown only then), and the ranks that have another
            shape, dtype or values than rank 0.
    """
    if comm.size == 1 or not checks_are_on():
        return
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain: Any = values.reshape(-1).view(torch.uint8).cpu().numpy() if values.numel() else b""
    facts = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    mine = torch.tensor([facts, zlib.crc32(plain)], dtype=torch.int64, device="cpu")
    everyones = torch.empty(comm.size, 2, dtype=torch.int64, device="cpu")
    comm.all_gather(everyones, mine)
    for column, which in ((0, "shape or dtype"), (1, "values")):
        differing = (everyones[:, column] != everyones[0, column]).nonzero().flatten().tolist()
        if differing:
            raise ValueError(
                f"the input of {what} must be the same on all {comm.size} ranks; its {which} on rank"
                f"{'s' if len(differing) > 1 else ''} {', '.join(map(str, differing))} differ from rank 0's; "
                f"this is rank {comm.rank}, which has {tuple(tensor.shape)} of {tensor.dtype}. Give every "
                "rank the same, or use sequence_parallel=True where each has its part"
            )
