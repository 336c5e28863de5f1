"""Decoding: a request and a plan go into the one loop, steps come out."""

from arpg.decode.engine import Engine, Step, decode
from arpg.decode.plan import Plan, SamplePlan, make_plan
from arpg.decode.request import Request

__all__ = ["Engine", "Plan", "Request", "SamplePlan", "Step", "decode", "make_plan"]
