"""The bench: nccl-tests' table for pycomm, its peers (gloo, MPI, NCCL) and the memory's limit, in one run.

Reading order: ``options`` (what is asked), ``collectives`` (what each one moves), ``exact`` (inputs and right
results), ``buffers`` (memory that is rewritten before each timed call), ``libraries`` (how each library is
called), ``limit`` (the memory probe), ``timing`` (the clock), ``control``, ``sweep`` and ``worker`` (a rank;
``device_sweep`` on CUDA tensors), ``launch`` (all ranks), ``report``, ``table``, ``plot``.

Words: a *library* is pycomm, a peer, or the limit; a *place* is ``out`` (of place) or ``in`` (place); a
*case* is one library, buffer kind and place at one size; *dirtied* means that every rank rewrites the buffers
just before each timed call, outside of the timed region, *hot* that calls are looped on the same buffers.

Example:
    >>> from pycomm.bench import Options, launch
    >>> report = launch(Options(max_bytes=1 << 16, peers=("gloo",)))  # doctest: +SKIP
    >>> report.rows[0].find("gloo").busbw  # doctest: +SKIP
"""

from pycomm.bench.launch import launch
from pycomm.bench.options import Options, parse_size
from pycomm.bench.report import Measurement, Report, Row

__all__ = ["Measurement", "Options", "Report", "Row", "launch", "parse_size"]
