from __future__ import annotations

from pixelgate.gateway.sums import lasting, summed


def family(name, kind, mode, *samples):
    return {"name": name, "words": f"About {name}.", "kind": kind, "mode": mode, "samples": [list(s) for s in samples]}


def test_samples_of_the_same_labels_become_one_as_their_family_says():
    one = [
        family("a", "counter", "sum", ("a_total", {"x": "1", "y": "2"}, 3.0), ("a_total", {"x": "2", "y": "2"}, 1.0)),
        family("low", "gauge", "min", ("low", {}, 3.0)),
    ]
    two = [
        family("low", "gauge", "min", ("low", {}, 2.0)),
        family("high", "gauge", "max", ("high", {}, 2.0)),
        family("a", "counter", "sum", ("a_total", {"y": "2", "x": "1"}, 4.0)),
    ]
    assert summed([one, two, []]) == [
        family("a", "counter", "sum", ("a_total", {"x": "1", "y": "2"}, 7.0), ("a_total", {"x": "2", "y": "2"}, 1.0)),
        family("low", "gauge", "min", ("low", {}, 2.0)),
        family("high", "gauge", "max", ("high", {}, 2.0)),
    ]
    assert one[0]["samples"][0][2] == 3.0  # as it was
    assert summed([one]) == one


def test_what_has_been_counted_lasts():
    counter, gauge = family("a", "counter", "sum"), family("b", "gauge", "sum")
    assert lasting([counter, gauge, family("c", "histogram", "sum")]) == [counter, family("c", "histogram", "sum")]
