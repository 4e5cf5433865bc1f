"""Pipeline schedules as data: made by pure functions, drawn, proved, simulated, and run by pycomm.pipeline.

Reading order: ``action`` (the words), ``order`` (what every rank computes), a file a family (``gpipe``,
``one_f_one_b``, ``interleaved``, ``zero_bubble`` on ``greedy``, ``dual_pipe_v``), ``catalog`` (their names
and promises), ``verify``, ``simulate``, ``transfers`` (sends and receives put in) and
``verify_transfers``, ``reductions`` (of
gradients, put in), ``picture``.
"""
