"""The metrics of several processes as one.

Nothing but the standard library: the supervisor adds up what its workers report, and imports no metrics.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

_WAYS: Mapping[str, Callable[[float, float], float]] = {"sum": operator.add, "min": min, "max": max}


class Family(TypedDict):
    """A metric with its samples, each a name, labels and a value: as it goes from process to process in JSON.

    ``mode`` is how the values of several processes become one: sum, min or max.
    """

    name: str
    words: str
    kind: str
    mode: str
    samples: list[Any]


def summed(reports: Iterable[Iterable[Family]]) -> list[Family]:
    """One report of several, with families and samples in the order in which they are first seen."""
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[Any, ...], float]] = {}
    for report in reports:
        for family in report:
            families.setdefault(family["name"], family)
            known, join = values.setdefault(family["name"], {}), _WAYS[family["mode"]]
            for sample, labels, value in family["samples"]:
                key = (sample, *sorted(labels.items()))
                known[key] = join(known[key], value) if key in known else value
    return [
        {**family, "samples": [[sample, dict(labels), value] for (sample, *labels), value in values[name].items()]}
        for name, family in families.items()
    ]


def lasting(report: Iterable[Family]) -> list[Family]:
    """What remains true of a process that has ended: what it has counted, not what it was doing."""
    return [family for family in report if family["kind"] != "gauge"]
