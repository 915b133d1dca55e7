"""Stop strings do not depend on how the text was cut, and no part of one gets out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.stop_strings import StopStringMatcher

texts = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read one character at a time: the first end of any stop string counts, the longest of those there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(texts, stop_lists, st.data())
def test_cuts_do_not_matter(text, stops, data):
    matcher = StopStringMatcher(stops)
    got = ""
    rest = text
    want, stop = expected(text, stops)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        got += matcher.feed(rest[:size])
        rest = rest[size:]
        assert want.startswith(got), "a part of a stop string got out"
    if matcher.matched is None:
        got += matcher.flush()
    assert (got, matcher.matched) == (want, stop)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["abcE", "N", "D more"], ["abc", "", ""]),
        (["END"], ["abcE", "N", "O"], ["abc", "", "ENO"]),
        (["aab"], ["aaa", "b"], ["a", ""]),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_only_what_may_become_a_stop_string_is_held_back(stops, pieces, shown):
    matcher = StopStringMatcher(stops)

    assert [matcher.feed(piece) for piece in pieces] == shown


def test_the_match_may_be_kept():
    matcher = StopStringMatcher(["END"], include_match=True)

    assert matcher.feed("abcEN") + matcher.feed("D more") == "abcEND"
    assert matcher.matched == "END"
    assert matcher.feed("x") == ""
