"""A run to convert, and models of several kinds."""

from tests.tools.conftest import trained_run

__all__ = ["trained_run"]
