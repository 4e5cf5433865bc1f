"""What a bench run is asked to do, and the sweep of sizes; nccl-tests' meanings of -b -e -f -d -o -n -w."""

from __future__ import annotations

import dataclasses
import json
import re

from pycomm import _C

__all__ = ["COLLECTIVES", "DTYPES", "OPS", "Options", "format_size", "parse_size"]

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "sendrecv",
)
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)
OPS = ("sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
#: Where the tensors are -> what pycomm can be compared with there.
PEERS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl", "torch-symm-mem")}
BUFFERS = ("ordinary", "arena")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes as in nccl-tests: ``4``, ``64K``, ``1.5M``, ``1G`` (also ``KiB``, ``MB``), powers of 1024.

    Raises:
        ValueError: ``text`` is not such a size.

    Example:
        >>> parse_size("64M")
        67108864
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise ValueError(f"size {text!r}: expected a number of bytes such as 4, 64K, 1.5M or 1G")
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(n_bytes: int) -> str:
    """The shortest exact spelling of a byte count: ``1M`` for 1 << 20, ``6`` for 6."""
    for unit in ("G", "M", "K"):
        if n_bytes >= _UNITS[unit] and n_bytes % _UNITS[unit] == 0:
            return f"{n_bytes // _UNITS[unit]}{unit}"
    return str(n_bytes)


@dataclasses.dataclass(frozen=True)
class Options:
    """One bench run. Sizes are in bytes of the larger of a rank's buffers, as in nccl-tests.

    Attributes:
        collective: one of ``COLLECTIVES``.
        min_bytes: first size.
        max_bytes: no size is larger.
        factor: each size is this many times the one before (at least 2).
        ranks: processes to start; under torchrun or mpirun theirs is used instead.
        dtype: a torch dtype without the ``torch.`` prefix.
        op: reduction, for the collectives that have one.
        root: the root rank, for the collectives that have one.
        n_iters: timed iterations for each case and size, at most (the time limit may end them earlier).
        n_warmup: untimed iterations before.
        peers: of ``gloo`` and ``mpi``, on CUDA of ``nccl`` and ``torch-symm-mem``, measured in turns with
            pycomm.
        buffers: of ``ordinary`` and ``arena``: what pycomm is measured on; empty: only peers and the limit.
        algorithm: handed to pycomm, ``None`` for its own choice; on CUDA measured beside its own choice.
        max_seconds: bound on the measuring time of the whole run, shared evenly by the sizes left; at least
            three rounds over all cases are made for each size, so a slow library can exceed it.
        device: ``cpu`` or ``cuda``: where the tensors are; on CUDA a rank has a GPU.
    """

    collective: str = "all_reduce"
    min_bytes: int = 4
    max_bytes: int = 64 << 20
    factor: int = 4
    ranks: int = 2
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    n_iters: int = 100
    n_warmup: int = 5
    peers: tuple[str, ...] = ()
    buffers: tuple[str, ...] = BUFFERS
    algorithm: str | None = None
    max_seconds: float = 60.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            ValueError: a field is out of its range; the message names the field, what it was and may be.
        """
        _one_of("collective", self.collective, COLLECTIVES)
        _one_of("device", self.device, tuple(PEERS))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("op", self.op, OPS)
        if self.collective in _REDUCING:
            _one_of(f"op for {self.dtype}", self.op, tuple(_C.kernels.defined_ops(self.dtype).split(", ")))
        if self.algorithm is not None:
            known = [str(a.name) for a in _C.schedule.catalog() if a.collective == self.collective]
            known += self._device_ways() if known else []
            if not known:
                raise ValueError(f"algorithm {self.algorithm!r}: {self.collective} has none to choose from")
            _one_of(f"algorithm for {self.collective}", self.algorithm, tuple(known))
        for peer in self.peers:
            _one_of("peer", peer, PEERS[self.device])
        for kind in self.buffers:
            _one_of("buffer", kind, BUFFERS)
        _at_least("min_bytes", self.min_bytes, 1)
        _at_least("max_bytes", self.max_bytes, self.min_bytes)
        _at_least("factor", self.factor, 2)
        _at_least("ranks", self.ranks, 1)
        _at_least("n_iters", self.n_iters, 1)
        _at_least("n_warmup", self.n_warmup, 0)
        _at_least("root", self.root, 0)
        if not self.max_seconds > 0:
            raise ValueError(f"max_seconds {self.max_seconds}: expected a positive number of seconds")

    def _device_ways(self) -> list[str]:
        """Beside the catalog's; csrc/engine/device_engine.h."""
        if self.device == "cpu":
            return []
        two = self.collective in ("all_reduce", "broadcast")
        return ["nccl", "peer", *(["peer_one_shot", "peer_two_shot"] if two else [])]

    def beside(self) -> str | None:
        """The name in the report of pycomm with ``algorithm``, where it is measured beside its own choice."""
        return f"pycomm/{self.algorithm}" if self.device == "cuda" and self.algorithm is not None else None

    def compared(self) -> tuple[str, ...]:
        """The libraries that the table has columns for, beside pycomm's own choice."""
        extra = self.beside()
        return self.peers if extra is None else (extra, *self.peers)

    def sizes(self) -> list[int]:
        """The sweep: ``min_bytes * factor**k`` up to ``max_bytes``."""
        sizes = [self.min_bytes]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return sizes

    def to_json(self) -> str:
        """This run as JSON text, for the ranks."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The inverse of ``to_json``."""
        fields = json.loads(text)
        fields["peers"], fields["buffers"] = tuple(fields["peers"]), tuple(fields["buffers"])
        return cls(**fields)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} {value!r}: expected one of {', '.join(allowed)}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} {value}: expected at least {least}")
