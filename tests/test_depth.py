"""What a usual run leaves out."""

from types import SimpleNamespace

import pytest

from tests.depth import left_out


def item(test: str, case: str | None = None, mark: pytest.Mark | None = None) -> SimpleNamespace:
    """What `left_out` reads of a test."""
    named = {} if case is None else {"callspec": SimpleNamespace(id=case)}
    nodeid = test if case is None else f"{test}[{case}]"
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda _: mark, **named)


def table(mark: pytest.MarkDecorator) -> list[SimpleNamespace]:
    return [item("t.py::test", case, mark.mark) for case in "abcdefghij"]


def names(items: list[SimpleNamespace]) -> str:
    return "".join(x.callspec.id for x in items)


def test_a_test_that_is_marked_is_left_out():
    plain, deep = item("t.py::one"), item("t.py::two", None, pytest.mark.deep.mark)
    assert left_out([plain, deep]) == [deep]


def test_some_cases_of_a_table_stay():
    assert names(left_out(table(pytest.mark.deep))) == "abcdefghij"
    assert names(left_out(table(pytest.mark.deep(every=4)))) == "abdefhij"
    assert names(left_out(table(pytest.mark.deep(every=4, but=["a", "c"])))) == "bdefhij"


def test_each_test_counts_its_own_cases():
    others = [item("t.py::other", case, pytest.mark.deep(every=2).mark) for case in "xyz"]
    assert names(left_out(table(pytest.mark.deep(every=4)) + others)) == "abdefhijxz"


def test_a_name_that_no_case_has_is_an_error():
    with pytest.raises(pytest.UsageError, match=r"t\.py::test: marked deep but for \['k'\], which no case of it"):
        left_out(table(pytest.mark.deep(but=["a", "k"])))


def test_some_tests_of_a_file_stay():
    mark = pytest.mark.deep(every=3, of_file=True).mark
    tests = [item(f"t.py::{name}", None, mark) for name in "abcdef"]
    assert [x.nodeid[-1] for x in left_out(tests)] == ["a", "c", "d", "f"]
