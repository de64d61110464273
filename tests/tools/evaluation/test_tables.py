"""The average of a table's columns and its standard error."""

from __future__ import annotations

import pytest

from tools.evaluation.suites import Column
from tools.evaluation.tables import Row, Table


def test_average_of_independent_columns_and_its_standard_error():
    columns = tuple(Column(label, "acc", label) for label in ("a", "b", "c"))
    rows = [
        Row("known", {"a": (60.0, 3.0), "b": (40.0, 4.0), "c": (0.0, 9.0)}),
        Row("one error unknown", {"a": (60.0, 3.0), "b": (40.0, None)}),
        Row("one column missing", {"a": (60.0, 3.0)}),
    ]
    table = Table("", columns, ("a", "b"), rows, {}, {})
    assert [table.average_of(row) for row in rows] == [50.0, 50.0, None]
    # The variance of a mean of two is a quarter of the sum of the variances: sqrt(9 + 16) / 2.
    assert [table.average_error(row) for row in rows] == [pytest.approx(2.5), None, None]
    assert Table("", columns, (), rows, {}, {}).average_error(rows[0]) is None
