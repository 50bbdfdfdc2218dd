"""A calculator as a tool: `environment=tools 'environment.tools=[rl_plugins.environments.calculator.calc]'`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LONGEST = 200


def calc(x: str) -> int:
    """Compute an expression of whole numbers with + - * // % and parentheses.

    Args:
        x: the expression, such as 17*25.
    """
    if len(x) > _LONGEST:
        raise ValueError(f"at most {_LONGEST} characters")
    return _value(ast.parse(x, mode="eval").body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers with + - * // % and parentheses")
