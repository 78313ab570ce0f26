"""Small changes of a module that should make it wrong, found in its syntax tree."""

from __future__ import annotations

import ast
import builtins
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
LOGIC = {ast.And: ast.Or, ast.Or: ast.And}
# Operators of which one operand can be left out.
TERMS = (ast.Add, ast.Sub, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor)
# Roundings and choices, each with its opposite.
NAMES = {
    "floor": "ceil", "ceil": "floor", "round": "trunc", "trunc": "round", "max": "min",
    "min": "max", "maximum": "minimum", "minimum": "maximum", "amax": "amin", "amin": "amax",
    "any": "all", "all": "any", "two_sum": "fast_two_sum", "fast_two_sum": "two_sum",
}  # fmt: skip
# Functions and methods that round correctly, and the same with another rounding.
ROUNDED = {
    "add_odd": "{0} + {1}",
    "collapse_odd": "{0}[0]",
    "round_to": "{0}.to({1})",
    "to_odd": "{0}.to(torch.float32)",
}
SYMMETRIC = {"maximum", "minimum", "add_odd", "two_sum", "two_prod"}
UNCHANGED = {"annotation", "returns", "decorator_list"}


@dataclass(frozen=True)
class Mutant:
    """One node and the text in its place. Its identity outlives changes of the lines around it."""

    function: str
    kind: str
    old: str
    new: str
    node: ast.expr | ast.stmt = field(compare=False)

    def applied(self, source: str) -> str:
        """The changed source, whose remaining text is the same."""
        lines = source.encode().splitlines(keepends=True)
        first, last = self.node.lineno - 1, self.node.end_lineno - 1
        before = b"".join(lines[:first]) + lines[first][: self.node.col_offset]
        after = lines[last][self.node.end_col_offset :] + b"".join(lines[last + 1 :])
        bare = isinstance(self.node, (ast.stmt, ast.keyword, ast.Slice))
        return (before + (self.new if bare else f"({self.new})").encode() + after).decode()

    def difference(self, source: str, path: str) -> str:
        """The change as a unified diff."""
        lines = source.splitlines(), self.applied(source).splitlines()
        return "\n".join(difflib.unified_diff(*lines, path, path, n=1, lineterm=""))


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its text."""
    found = []
    for function, node, bound in _nodes(ast.parse(source), "", set()):
        for kind, old, new in [*_constants(node), *_changes(node, bound)]:
            found.append(Mutant(function, kind, ast.unparse(old), ast.unparse(new), old))
    return found


def _nodes(node: ast.AST, function: str, bound: set[str]) -> Iterator[tuple[str, ast.AST, set]]:
    """Each node that is evaluated, its function, and the names that are bound before it.

    Annotations, decorators, docstrings, imports and messages are not mutated.
    """
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.FunctionDef():
            function = f"{function}.{node.name}".lstrip(".")
            bound = {x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)}
        case ast.ClassDef():
            function, bound = f"{function}.{node.name}".lstrip("."), set()
        case ast.Name(ctx=ast.Store()):
            bound.add(node.id)
    yield function, node, bound
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in UNCHANGED:
                yield from _nodes(child, function, bound)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _constants(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Each constant of a node off by one. The whole node tells it from the function's others."""
    is_whole = isinstance(node, (ast.expr, ast.keyword, ast.Assign, ast.Return, ast.AugAssign))
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if isinstance(child, ast.Constant) and isinstance(child.value, (int, float)):
                is_flag, number = isinstance(child.value, bool), child.value
                for other in [not number] if is_flag else [number + 1, number - 1]:
                    new = ast.Constant(other)
                    several = [*children[:i], new, *children[i + 1 :]]
                    whole = _with(node, **{name: several if isinstance(value, list) else new})
                    yield ("constant", *((node, whole) if is_whole else (child, new)))


def _changes(node: ast.AST, bound: set[str]) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """The kind of each change of a node, the old node and the new one."""
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                ops = [*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]]
                yield "comparison", node, _with(node, ops=ops)
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            yield "operator", node, _with(node, op=OPERATORS[type(node.op)]())
            if isinstance(node, ast.AugAssign):
                yield "statement", node, ast.Pass()
            elif isinstance(node.op, TERMS):
                minus = isinstance(node.op, ast.Sub)
                yield "term", node, node.left
                yield "term", node, ast.UnaryOp(ast.USub(), node.right) if minus else node.right
        case ast.BoolOp():
            yield "logic", node, _with(node, op=LOGIC[type(node.op)]())
        case ast.UnaryOp():
            yield "sign", node, node.operand
        case ast.If() | ast.While() | ast.IfExp():
            yield "condition", node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.comprehension():
            for test in node.ifs:
                yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.Call():
            yield from _calls(node)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", node, ast.Return(ast.Constant(None))
        case ast.Expr() | ast.Raise() | ast.Break() | ast.Continue() | ast.Delete():
            yield "statement", node, ast.Pass()
        case ast.Assign():
            targets = [x for target in node.targets for x in ast.walk(target)]
            new = {
                x.id for x in targets if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
            }
            if new <= bound:  # else its removal raises a NameError
                yield "statement", node, ast.Pass()


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Changes of a call: its name, the order of its arguments, and an argument as its result."""
    match node.func:
        case ast.Name(id=name):
            operands = node.args
        case ast.Attribute(attr=name, value=ast.Name(id="torch" | "self" | "cls" | "eft")):
            operands = node.args
        case ast.Attribute(attr=name, value=receiver):
            operands = [receiver, *node.args]
        case _:
            return
    if name in NAMES:
        field = "id" if isinstance(node.func, ast.Name) else "attr"
        yield "name", node, _with(node, func=_with(node.func, **{field: NAMES[name]}))
    if name in ROUNDED:
        text = ROUNDED[name].format(*map(ast.unparse, operands))
        yield "rounding", node, ast.parse(text, mode="eval").body
    if len(node.args) == 2 and name not in SYMMETRIC and not hasattr(builtins, name):
        yield "arguments", node, _with(node, args=node.args[::-1])
    if len(operands) > len(node.args) > 0 or hasattr(builtins, name) or name[0].isupper():
        return  # methods with arguments, built-in functions and classes rarely give what they get
    if operands and not isinstance(operands[0], ast.Starred):
        yield "call", node, operands[0]
