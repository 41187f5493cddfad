"""How long an answer holds, by its host's own words."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from pixelgate.media.freshness import seconds

DATE = "Mon, 30 Nov 2026 12:00:00 GMT"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 0),
        ({"Last-Modified": DATE, "Date": DATE, "ETag": '"1"'}, 0),
        ({"Cache-Control": "max-age=60"}, 60),
        ({"Cache-Control": "public, MAX-AGE=60, immutable"}, 60),
        ({"Cache-Control": 'private, max-age="60"'}, 60),
        ({"Cache-Control": "max-age = 60"}, 60),
        ({"Cache-Control": "max-age=60, s-maxage=5"}, 60),
        ({"Cache-Control": "max-age=60", "Age": "45"}, 15),
        ({"Cache-Control": "max-age=60", "Age": "100"}, 0),
        ({"Cache-Control": "max-age=60", "Age": "young"}, 60),
        ({"Cache-Control": "max-age=60, no-store"}, 0),
        ({"Cache-Control": "no-cache, max-age=60"}, 0),
        ({"Cache-Control": 'no-cache="Set-Cookie", max-age=60'}, 0),
        ({"Cache-Control": "max-age=soon"}, 0),
        ({"Cache-Control": "max-age=-1"}, 0),
        ({"Cache-Control": "max-age"}, 0),
        ({"Cache-Control": "max-age=99999999999"}, 86400),
        ({"Cache-Control": "max-age=60", "Vary": "*"}, 0),
        ({"Cache-Control": "max-age=60", "Vary": "Accept-Encoding"}, 60),
        ({"Expires": "Mon, 30 Nov 2026 12:01:30 GMT", "Date": DATE}, 90),
        ({"Expires": "Mon, 30 Nov 2026 12:01:30 GMT", "Date": DATE, "Age": "30"}, 60),
        ({"Expires": "Mon, 30 Nov 2026 11:00:00 GMT", "Date": DATE}, 0),
        ({"Expires": "0", "Date": DATE}, 0),
        ({"Expires": "Mon, 30 Nov 2026 12:01:30 GMT"}, 0),
        ({"Expires": "Mon, 30 Nov 2026 12:01:30 -0000", "Date": DATE}, 0),
        ({"Expires": "Mon, 30 Nov 2026 12:01:30 GMT", "Date": DATE, "Cache-Control": "max-age=5"}, 5),
    ],
)
def test_what_headers_say(headers, expected):
    assert seconds(CIMultiDict(headers)) == expected


def test_headers_on_several_lines_are_one():
    lines = [("cache-control", "max-age=60"), ("Cache-Control", "no-store")]
    assert seconds(CIMultiDict(lines)) == 0
    assert seconds(CIMultiDict([*lines[:1], ("Vary", "Accept"), ("Vary", "*")])) == 0
    assert seconds(CIMultiDict([*lines[:1], ("Cache-Control", "public")])) == 60
