"""YAML whose aliases do not multiply: a short text can stand for more values than memory holds."""

from __future__ import annotations

import yaml

MOST_VALUES = 100_000


class BoundedLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses a document of more than `MOST_VALUES` values, aliases counted in full."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the document. Raises yaml.YAMLError, also for too many values, deep nesting, or an alias that holds itself."""
        try:
            node = super().get_single_node()
            count = 0 if node is None else _count(node, {})
        except RecursionError:
            raise yaml.constructor.ConstructorError(None, None, "sections nested too deeply", None) from None
        if node is not None and count > MOST_VALUES:
            words = f"its aliases stand for more than {MOST_VALUES:,} values"
            raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
        return node


def _count(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Values below a node and itself, those of an alias at each of its places."""
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
