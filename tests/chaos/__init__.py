"""The fault matrix: real faults, injected from outside, into real jobs; ``make chaos``.

Reading order: ``matrix`` (rows, operations, transports and what must happen), ``faults`` (how each fault is
made), ``rank`` (what a rank of a job does), ``cell`` (one job with one fault, and its verdict), ``__main__``.
"""
