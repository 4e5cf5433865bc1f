"""What torch.distributed gives as a tensor, and what the engine takes in its place: always the same memory.

* a tensor that requires a gradient: torch's collectives change it without autograd's knowledge;
* a subclass (an asynchronous result of torch's functional collectives, a user's): what it stands for;
* a dtype that is only moved, never reduced (unsigned ones of 16 bits and more, the rarer fp8): its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pycomm._setup import DTYPE_CODES
from pycomm.ddp.agree import as_bytes

__all__ = ["movable", "plain", "plain_list", "reducible"]


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a plain one on the same memory."""
    if type(tensor) is not Tensor:
        wait = getattr(tensor, "trigger_wait", None)  # AsyncCollectiveTensor
        if wait is not None:
            return plain(wait())
        tensor = tensor.as_subclass(Tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def plain_list(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`plain` of each."""
    return [plain(tensor) for tensor in tensors]


def reducible(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Plain tensors for a reduction.

    Raises:
        TypeError: a dtype that cannot be reduced.
    """
    found = plain_list(tensors)
    for tensor in found:
        if tensor.dtype not in DTYPE_CODES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
            raise TypeError(f"{call}: {tensor.dtype} cannot be reduced; these can: {known}")
    return found


def movable(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Plain tensors for a call that moves elements: as they are, or as bytes.

    Raises:
        TypeError: a dtype that the engine does not know, of a tensor that is not contiguous or is quantised.
    """
    return [_movable(call, tensor) for tensor in plain_list(tensors)]


def _movable(call: str, tensor: Tensor) -> Tensor:
    if tensor.dtype in DTYPE_CODES:
        return tensor
    if tensor.is_quantized:  # torch views its bytes as quantised ones, and crashes later
        raise TypeError(f"{call}: a quantised tensor has more than its elements; give its int_repr()")
    if not tensor.is_contiguous():
        raise TypeError(f"{call}: a tensor of {tensor.dtype} must be contiguous to be moved")
    flat = as_bytes(tensor)
    return flat.view(*tensor.shape, tensor.element_size()) if tensor.dim() > 0 else flat
