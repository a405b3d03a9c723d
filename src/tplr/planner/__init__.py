"""Computes a run's needs on a host before it starts: memory, disk, traffic, its price, and a window's timeline.

Every figure is a formula over the run's constants (``HParams``) and a ``Host``; nothing is allocated. ``tplr plan``
prints the figures, and a node's start-up check refuses a configuration that does not fit.
"""

from tplr.planner.host import Host
from tplr.planner.plan import Plan, make_plan

__all__ = ["Host", "Plan", "make_plan"]
