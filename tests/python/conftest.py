"""Settings of the Python suite: one thread each, hypothesis without wall-clock deadlines, the rank harness.

Tests run two at a time on small machines, and ranks are processes of their own (ranks.py), so a torch thread
pool here would only disturb them.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import hypothesis
import torch

from ranks import run_ranks

__all__ = ["run_ranks"]

torch.set_num_threads(1)

# A deadline per example would fail on a busy machine; pytest's timeout bounds the whole test.
hypothesis.settings.register_profile("pycomm", deadline=None, max_examples=100)
hypothesis.settings.register_profile("pycomm-ci", deadline=None, max_examples=100, derandomize=True)
hypothesis.settings.load_profile("pycomm-ci" if os.environ.get("CI") == "true" else "pycomm")
