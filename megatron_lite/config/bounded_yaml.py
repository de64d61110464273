"""Load YAML with a bound on the values after alias expansion, so that a short file cannot exhaust memory."""

from __future__ import annotations

import yaml

MAX_VALUES = 100_000


class BoundedLoader(yaml.SafeLoader):
    """Load YAML safely and refuse a document of more than `MAX_VALUES` values, with aliases expanded."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the root node. Raises yaml.YAMLError for bad syntax, too many values, deep nesting and cyclic aliases."""
        try:
            node = super().get_single_node()
            count = 0 if node is None else _count(node, {})
        except RecursionError:
            raise yaml.constructor.ConstructorError(None, None, "sections nested too deeply", None) from None
        if node is not None and count > MAX_VALUES:
            words = f"its aliases expand to more than {MAX_VALUES:,} values"
            raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
        return node


def _count(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return the number of values of a node, itself included. An alias counts at every place that uses it."""
    if id(node) not in known:
        known[id(node)] = None
        inner = []
        if isinstance(node, yaml.MappingNode):
            inner = [one for pair in node.value for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[id(node)] = 1 + sum(_count(one, known) for one in inner)
    count = known[id(node)]
    if count is None:
        raise yaml.constructor.ConstructorError(None, None, "an alias that holds itself", node.start_mark)
    return count
