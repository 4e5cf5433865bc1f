"""Pipeline parallelism: a deep model in stages on ranks, all of them busy.

schedule/ holds what a rank does and when, as data; runtime.py executes it with stage.py (one stage's
forwards and backwards, backward.py in halves) and post.py (messages of any shape, messages.py their
contents); schedules.py has torch's classes around it. layers.py cuts a list of layers into stages, as
partition.py finds best.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycomm.pipeline.layers import LayerSpec as LayerSpec
    from pycomm.pipeline.layers import Plan as Plan
    from pycomm.pipeline.layers import TiedLayerSpec as TiedLayerSpec
    from pycomm.pipeline.layers import plan as plan
    from pycomm.pipeline.schedules import *  # noqa: F403
    from pycomm.pipeline.skips import pop as pop
    from pycomm.pipeline.skips import stash as stash
    from pycomm.pipeline.stage import PipelineStage as PipelineStage

# torch is imported with the first name that needs it: the command line has schedules without it.
_LATER = {
    "LayerSpec": "pycomm.pipeline.layers",
    "Plan": "pycomm.pipeline.layers",
    "TiedLayerSpec": "pycomm.pipeline.layers",
    "plan": "pycomm.pipeline.layers",
    "PipelineStage": "pycomm.pipeline.stage",
    "pop": "pycomm.pipeline.skips",
    "stash": "pycomm.pipeline.skips",
}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    module = importlib.import_module(_LATER.get(name, "pycomm.pipeline.schedules"))
    try:
        return getattr(module, name)
    except AttributeError:
        raise AttributeError(f"module 'pycomm.pipeline' has no attribute {name!r}") from None
