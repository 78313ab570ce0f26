"""The source of a function, without annotations, checks, and choices that are decided."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

_LONGEST = 84
"""Characters of a statement, without what indents it."""


class _Simplify(ast.NodeTransformer):
    """Puts constants and expressions for names, and takes the choices that they decide."""

    def __init__(
        self, known: Mapping[str, Any], given: Mapping[str, str], after: Mapping[str, str]
    ) -> None:
        self.known, self.given, self.after = known, given, after

    def visit(self, node: ast.AST) -> Any:
        text = self.given.get(ast.unparse(node)) if isinstance(node, ast.expr) else None
        return super().visit(node) if text is None else ast.parse(text, mode="eval").body

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_read = isinstance(node.ctx, ast.Load) and node.id in self.known
        return literal(self.known[node.id]) if is_read else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        text = ast.unparse(node)
        return literal(self.known[text]) if text in self.known else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        text = ast.unparse(node)
        return literal(self.known[text]) if text in self.known else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name("isinstance"), args=[_, ast.Name("Tensor")]):
                return ast.Constant(False)
            case ast.Call(func=ast.Name("_to_scalar"), args=[x]):
                return x
            case ast.Call(func=ast.Attribute(x, "sqrt"), args=[]):
                root = ast.parse(self.given["x.sqrt()"], mode="eval").body
                return _Simplify({}, {"x": ast.unparse(x)}, {}).visit(root)
        return ast.Constant(False) if ast.unparse(node) == "torch.jit.is_scripting()" else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if not node.body:
            return node.orelse
        if isinstance(node.body[0], ast.Raise) and not node.orelse:
            return None
        decided = _decided(node.test)
        return node if decided is None else node.body if decided else node.orelse

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        decided = _decided(node.test)
        return node if decided is None else node.body if decided else node.orelse

    def visit_Assert(self, node: ast.Assert) -> None:
        return None

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        return node.body if ast.unparse(node.iter) == "enumerate(params)" else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        is_same = isinstance(node.op, ast.Mult) and ast.unparse(node.right) == "1.0"
        return node.left if is_same else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        assert node.value is not None
        return ast.Assign([node.target], node.value)

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        target = ast.unparse(node.targets[0])
        return None if target in (*self.known, ast.unparse(node.value)) else node

    def visit_Starred(self, node: ast.Starred) -> ast.expr | None:
        return None if ast.unparse(node.value) in self.known else node

    def visit_Expr(self, node: ast.Expr) -> Any:
        self.generic_visit(node)
        match node.value:
            case ast.Call(func=ast.Attribute(ast.Name(name), method)) if name in self.after:
                if method.endswith("_"):
                    return [node, *ast.parse(self.after[name]).body]
        return node


def _decided(test: ast.expr) -> bool | None:
    """Return the value of a condition without names, or None."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        operand = _decided(test.operand)
        return None if operand is None else not operand
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute):
        return True if test.func.attr == "numel" else None  # there are elements
    if any(isinstance(x, (ast.Name, ast.Call)) for x in ast.walk(test)):
        return None
    return bool(eval(ast.unparse(test)))


def simplified(
    function: Callable[..., Any],
    known: Mapping[str, Any],
    given: Mapping[str, str] | None = None,
    after: Mapping[str, str] | None = None,
) -> ast.FunctionDef:
    """Return the definition of a function, without annotations, checks and what is decided.

    Args:
        function: the function.
        known: values of names and conditions.
        given: expressions for names and other expressions.
        after: what follows a change in place, by the name of what is changed.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list, definition.returns = [], None
    own = definition.args
    own.args = [x for x in own.args if x.arg not in known]
    own.kwonlyargs = [x for x in own.kwonlyargs if x.arg not in known]
    own.kw_defaults = [None] * len(own.kwonlyargs)
    for x in (*own.args, *own.kwonlyargs):
        x.annotation = None
    doc = ast.get_docstring(definition)
    if doc:
        line = re.split("; |[.] ", " ".join(doc.partition("\n\n")[0].split()))[0].rstrip(".") + "."
        definition.body[0] = ast.Expr(ast.Constant(line))
    return ast.fix_missing_locations(_Simplify(known, given or {}, after or {}).visit(definition))


def statements(
    function: Callable[..., Any],
    known: Mapping[str, Any],
    given: Mapping[str, str],
    after: Mapping[str, str] | None = None,
) -> tuple[list[ast.stmt], list[ast.expr]]:
    """Return the statements of a function, as `simplified` has them, and what it returns."""
    body = simplified(function, known, given, after).body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    match body[-1]:
        case ast.Return(ast.Tuple(results)):
            return body[:-1], results
    return body, []


class _OnTerms(ast.NodeTransformer):
    """Calls functions of terms in place of methods; see `on_terms`."""

    def __init__(self, terms: Collection[str], prints: Callable[[str], bool]) -> None:
        self.kinds, self.prints = dict.fromkeys(terms, "terms"), prints

    def visit_Expr(self, node: ast.Expr) -> Any:
        match node.value:
            case ast.Call(ast.Attribute(target)) if self._kind(target) == "terms":
                return self.visit_Assign(ast.Assign([target], node.value))
        return node

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        self.generic_visit(node)
        self.kinds[ast.unparse(node.targets[0])] = self._kind(node.value)
        return _with_operands(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        operands = [node.left, node.right]
        if [self._kind(x) for x in operands] != ["terms", "terms"]:
            return node
        if isinstance(node.op, ast.Mult):
            return self._applied("mul", operands)
        node.left, node.right = map(self._wide, operands)
        return self._rounded(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(x, method) as function, args, keywords) if "terms" in map(
                self._kind, (x, *args)
            ):
                name = function.attr = method.removesuffix("_")
                if name == "clone":  # which nothing changes
                    return x
                if name in ("dim", "numel", "size"):
                    function.value = ast.Subscript(x, ast.Constant(0))
                    return node
                if self.prints(name):
                    return self._applied(name, [x, *args, *(y.value for y in keywords)])
                function.value, node.args = self._wide(x), list(map(self._wide, args))
                return node if name == "item" else self._rounded(node)
            case ast.Call(ast.Name(), [x, *others]) if self._kind(x) == "terms":
                self.kinds[ast.unparse(node.func)] = "tensor"
                node.args = [_parsed(f"{ast.unparse(x)}[0].clone()"), *others]
        return node

    def _applied(self, name: str, operands: Sequence[ast.expr]) -> ast.expr:
        """Return a call of the function of an operation."""
        self.prints(name)
        self.kinds[name] = "terms"
        texts = {"terms": "*{}", "tensor": "{0}, torch.zeros_like({0})", "number": "*pair({}, p)"}
        given = ", ".join(texts[self._kind(x)].format(ast.unparse(x)) for x in operands)
        return _parsed(f"{name}({given})")

    def _rounded(self, node: ast.expr) -> ast.expr:
        """Return a call of the function that rounds float64 numbers."""
        self.kinds["rounded"] = "terms"
        return ast.Call(ast.Name("rounded"), [node], [])

    def _kind(self, x: ast.expr) -> str:
        match x:
            case ast.Call(function):
                return self.kinds.get(ast.unparse(function), "number")
            case ast.IfExp(_, value, _):
                return self._kind(value)
        return self.kinds.get(ast.unparse(x), "number")

    def _wide(self, x: ast.expr) -> ast.expr:
        return _parsed(f"wide(*{ast.unparse(x)})") if self._kind(x) == "terms" else x


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _with_operands(node: ast.Assign) -> list[ast.stmt]:
    """Return an assignment, after one of its longest operand if it is too long for a line."""
    found = [x for x in ast.walk(node.value) if isinstance(x, ast.Starred)]
    calls = [x for x in found if isinstance(x.value, ast.Call) and "pair" not in ast.unparse(x)]
    if len(ast.unparse(ast.fix_missing_locations(node))) <= _LONGEST or not calls:
        return [node]
    longest = max(calls, key=lambda x: len(ast.unparse(x)))
    operand = ast.Assign([ast.Name("operand")], longest.value)
    longest.value = ast.Name("operand")
    return [*_with_operands(operand), node]


def on_terms(
    body: list[ast.stmt], terms: Collection[str], prints: Callable[[str], bool]
) -> list[ast.stmt]:
    """Return statements that call functions of terms in place of methods of tensors.

    Args:
        body: statements with methods of tensors.
        terms: the names of numbers that are kept as terms.
        prints: prints the function of an operation, and returns whether it has one. Other
            operations are evaluated in float64 and rounded.
    """
    made, found = _OnTerms(terms, prints), list[ast.stmt]()
    for x in body:
        result = made.visit(x)
        found += result if isinstance(result, list) else [result]
    return found


def folded(body: list[ast.stmt], results: list[ast.expr]) -> list[ast.stmt]:
    """Return statements that assign different names, without those of names that one other
    statement alone uses."""
    parts = [*body, *results, *results]
    used = Counter(x.id for y in parts for x in ast.walk(y) if isinstance(x, ast.Name))
    given: dict[str, str] = {}
    kept: list[ast.stmt] = []
    for x in body:
        match _Simplify({}, given, {}).visit(x):
            case ast.Assign([ast.Name(name)], value) if used[name] == 2:
                given[name] = ast.unparse(value)
            case statement:
                kept.append(statement)
    return kept


def literal(x: Any) -> ast.expr:
    """Return a number, dtype or other constant as an expression."""
    if isinstance(x, torch.dtype):
        return ast.Name(str(x))
    if isinstance(x, float) and not abs(x) < torch.inf:
        return ast.Name(f"torch.{x}" if x != -torch.inf else "-torch.inf")
    return ast.Constant(x)
