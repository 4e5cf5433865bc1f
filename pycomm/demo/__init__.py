"""The demo: one small GPT trained three ways on the same data, and the curves laid over each other.

``python -m pycomm.demo`` (or ``make demo``) trains on the bytes of Python's standard library

1. with two ranks under torchrun and ``pycomm.DistributedDataParallel``,
2. in one process with the same global batch, data order and seeds,
3. with two ranks and torch's DDP over gloo,

checks that the runs agree within float tolerance, and prints speed, communication and the all_reduce table.
In reading order: model, data, train (what one rank does), launch, check, report, __main__.
"""
