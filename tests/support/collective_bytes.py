"""Bytes of collectives by kind and mesh axes: those that a plan states, and those of a compiled program."""

from collections import Counter


def in_plan(plan):
    found = Counter()
    for exchange in plan.exchanges:
        found[exchange.kind, exchange.axis] += exchange.nbytes
    return found


def in_program(step):
    found = Counter()
    for collective in step.collectives:
        found[collective.kind, "+".join(collective.axes)] += collective.total_bytes
    return found
