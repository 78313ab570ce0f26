"""Recorded calls as readable PyTorch code.

A kernel's program is a flat list of instructions. Here each call of one of the library's functions
stays a call: it becomes a function of the printed code, with its name, the first line of its
docstring, and the names of its local variables. Functions that are short, or called once, are part
of their callers.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcftensor.export.call_recorder import BY_SHAPE, Applied, Region, tensors_in
from mcftensor.export.simplified_source import literal, simplified
from mcftensor.kernels.block_scales import BLOCK_SIZE

WIDTH = 100
_ROOM = WIDTH - 4  # without indentation
_SHORTEST = 5
"""Operations of a function below which its callers contain it."""

_INFIX: dict[str, type[ast.operator] | type[ast.cmpop]] = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "truediv": ast.Div,
    "and": ast.BitAnd, "or": ast.BitOr, "xor": ast.BitXor, "lshift": ast.LShift,
    "rshift": ast.RShift, "eq": ast.Eq, "ne": ast.NotEq, "lt": ast.Lt, "le": ast.LtE,
    "gt": ast.Gt, "ge": ast.GtE,
}  # fmt: skip
_SCHOOL = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_PREFIX: dict[str, type[ast.unaryop]] = {"neg": ast.USub, "invert": ast.Invert}


@dataclass(eq=False)
class _Node:
    """An operation or call of the printed code."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    expression: Callable[[Callable[[Any], ast.expr]], ast.expr]
    names: Mapping[int, str] = field(default_factory=dict)
    key: str = ""


@dataclass(eq=False)
class _Function:
    """A printed function. Its calls are listed, since constants that differ between them become
    arguments."""

    definition: ast.FunctionDef
    constants: list[ast.Constant]
    calls: list[tuple[ast.Call, list[Any]]]


class Code:
    """Functions in the order in which they need each other."""

    def __init__(self) -> None:
        self._added: list[Region | ast.FunctionDef] = []
        self._functions: dict[str, _Function] = {}
        self._by_structure: dict[str, str] = {}
        self._callers: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)

    def add(self, region: Region) -> None:
        """Print a recorded function and those that it calls."""
        self._added.append(region)
        self._callers[region.name] |= {("", 0), ("", 1)}
        self._count_callers(region)

    def add_source(self, function: Callable[..., Any], **known: Any) -> None:
        """Print a function from its source, simplified by what is known of its names."""
        self._added.append(simplified(function, known))

    def lines(self) -> list[str]:
        """Return the text of all functions."""
        for x in self._added:
            if isinstance(x, Region):
                needed = {id(y) for y in x.returned}
                for operation in reversed(list(x.operations())):
                    if id(operation.result) in needed:
                        needed |= set(map(id, _operands(operation)))
                name, values = self._function(x, x.arguments, x.returned, x.names, needed)
                self._functions[name].calls.append((_call(name, []), values))
            else:
                self._functions.setdefault(x.name, _Function(x, [], []))
        for function in self._functions.values():
            _take_constants(function)
        texts = [as_lines(x.definition) for x in self._functions.values()]
        return [line for text in texts for line in ["", "", *text]][2:]

    def _count_callers(self, region: Region) -> None:
        for i, x in enumerate(region.steps):
            if isinstance(x, Region):
                if x.name != region.name:
                    self._callers[x.name].add((region.name, i))
                self._count_callers(x)

    def _function(
        self,
        region: Region,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        outer: Mapping[int, str],
        needed: set[int],
    ) -> tuple[str, list[Any]]:
        """Print a function, unless it is there; return its name and the constants of this call."""
        steps = self._steps(region, outputs, needed)
        names = dict(region.names)
        nodes = [self._node(x, names, needed, later) for x, later in steps]
        for x in (*inputs, *outputs):
            if id(x) in outer:
                names.setdefault(id(x), outer[id(x)])
        for node in nodes:
            for x in node.outputs:
                if id(x) in node.names:
                    names.setdefault(id(x), node.names[id(x)])
        body, chosen, constants = _Body(nodes, inputs, outputs, names).statements()
        structure = _structure(region.name, nodes, inputs, outputs)
        if structure not in self._by_structure:
            arguments = [ast.arg(chosen[id(x)]) for x in inputs]
            doc: list[ast.stmt] = [ast.Expr(ast.Constant(region.doc))] if region.doc else []
            own = ast.arguments([], arguments, None, [], [], None, [])
            definition = ast.FunctionDef(region.name, own, [*doc, *body], [])
            ast.fix_missing_locations(definition)
            while definition.name in self._functions:
                definition.name += "_"
            self._functions[definition.name] = _Function(definition, constants, [])
            self._by_structure[structure] = definition.name
        return self._by_structure[structure], [x.value for x in constants]

    def _node(
        self, x: Applied | Region, names: Mapping[int, str], needed: set[int], later: set[int]
    ) -> _Node:
        if isinstance(x, Applied):
            name = x.function.__name__.partition(".")[0]
            if name in BY_SHAPE:
                made = simplified(BY_SHAPE[name], {"BLOCK_SIZE": BLOCK_SIZE})
                self._functions.setdefault(name, _Function(made, [], []))
            return _Node(_operands(x), [x.result], lambda of: _expression(x, name, of))
        own = {id(y.result): y.result for y in x.operations()}
        results = {key: y for key, y in own.items() if key in later}
        outputs = [*({id(y): y for y in x.returned if id(y) in results} | results).values()]
        free = {id(y): y for y in _used(x, needed) if id(y) not in own}
        inputs = [*({id(y): y for y in x.arguments if id(y) in free} | free).values()]
        name, values = self._function(x, inputs, outputs, names, needed)

        def expression(of: Callable[[Any], ast.expr]) -> ast.expr:
            call = _call(name, list(map(of, inputs)))
            self._functions[name].calls.append((call, values))
            return call

        return _Node(inputs, outputs, expression, x.names, f"{name}{values}")

    def _steps(
        self, region: Region, outputs: Sequence[Tensor], needed: set[int]
    ) -> list[tuple[Applied | Region, set[int]]]:
        """Return the steps of a function, and the tensors that are used after each."""
        steps = list(self._inner(region, region, needed))
        used = [{id(y) for y in _used(x, needed)} for x in steps]
        ends = {id(x) for x in outputs}
        return [(x, ends.union(*used[i + 1 :])) for i, x in enumerate(steps)]

    def _inner(self, owner: Region, root: Region, needed: set[int]) -> Iterator[Applied | Region]:
        """Yield the steps of a call. Functions that are short, or called once, are part of it."""
        for x in owner.steps:
            if isinstance(x, Applied):
                if id(x.result) in needed:
                    yield x
                continue
            inner = list(self._inner(x, x, needed))
            is_long = sum(id(y.result) in needed for y in x.operations()) >= _SHORTEST
            passes_on = len(inner) == 1 and isinstance(inner[0], Region)
            is_alone = x.name == root.name or len(self._callers[x.name]) < 2
            if is_long and not passes_on and not is_alone:
                yield x
                continue
            if is_alone and is_long:
                for key, name in x.names.items():
                    root.names.setdefault(key, name)
            yield from inner


def _operands(x: Applied) -> list[Tensor]:
    return tensors_in([*x.args, *x.kwargs.values()])


def _used(x: Applied | Region, needed: set[int]) -> list[Tensor]:
    own = x.operations() if isinstance(x, Region) else [x]
    return [z for y in own if id(y.result) in needed for z in _operands(y)]


def _expression(x: Applied, name: str, of: Callable[[Any], ast.expr]) -> ast.expr:
    """Return an operation as an expression."""
    short = name.strip("_")
    operands = list(map(of, x.args))
    if short in ("lshift", "rshift") and x.args[1] == 0:
        return operands[0]
    if short not in _INFIX and short.removeprefix("r") in _INFIX:
        short, operands = short.removeprefix("r"), operands[::-1]
    if short in _PREFIX:
        return ast.UnaryOp(_PREFIX[short](), operands[0])
    if short in _INFIX and not x.kwargs:
        sign = _INFIX[short]()
        a, b = (_in_brackets(y, sign) for y in operands)
        return (
            ast.BinOp(a, sign, b) if isinstance(sign, ast.operator) else ast.Compare(a, [sign], [b])
        )
    if name in BY_SHAPE:
        function: ast.expr = ast.Name(name)
    elif inspect.isbuiltin(x.function):
        function = ast.Attribute(ast.Name("torch"), name)
    else:
        function, operands = ast.Attribute(operands[0], name), operands[1:]
    return ast.Call(function, operands, [ast.keyword(key, of(y)) for key, y in x.kwargs.items()])


def _in_brackets(x: ast.expr, sign: ast.operator | ast.cmpop) -> ast.expr:
    """Return an operand in brackets where rules of precedence are not those of school."""
    is_plain = isinstance(x, ast.BinOp) and isinstance(x.op, _SCHOOL) and isinstance(sign, _SCHOOL)
    if is_plain or not isinstance(x, (ast.BinOp, ast.Compare)):
        return x
    return _call("", [x])


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name), arguments, [])


def _structure(
    name: str, nodes: Sequence[_Node], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> str:
    """Return text that is equal for functions that differ in constants, names of tensors and
    docstrings."""
    made = [*inputs, *(x for node in nodes for x in node.outputs)]
    numbers = {id(x): f"x{i}" for i, x in enumerate(made)}

    def of(x: Any) -> ast.expr:
        if isinstance(x, Tensor):
            return ast.Name(numbers[id(x)])
        return ast.Constant(0) if type(x) in (int, float) else literal(x)

    lines = [f"{ast.unparse(node.expression(of))} {node.key}" for node in nodes]
    return "\n".join(
        [name, *(numbers[id(x)] for x in inputs), *lines, *map(ast.unparse, map(of, outputs))]
    )


class _Body:
    """The statements of a function. A result with one use is a part of the expression that uses it,
    where that fits a line."""

    def __init__(
        self,
        nodes: Sequence[_Node],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        names: Mapping[int, str],
    ) -> None:
        self.nodes, self.inputs, self.outputs, self.given = nodes, inputs, outputs, names
        self.maker = {id(x): node for node in nodes for x in node.outputs}
        uses = Counter(id(x) for node in nodes for x in node.inputs)
        uses.update(map(id, outputs))
        self.inlined = {
            id(node) for node in nodes if len(node.outputs) == 1 and uses[id(node.outputs[0])] == 1
        }

    def statements(self) -> tuple[Sequence[ast.stmt], dict[int, str], list[ast.Constant]]:
        """Return statements that fit a line, the names of tensors, and constants in their order of
        evaluation."""
        while True:
            self.constants: dict[int, list[ast.Constant]] = {id(node): [] for node in self.nodes}
            found, names, parts = self._attempt()
            for statement, part in zip(found, parts, strict=True):
                inner = [x for x in part if id(x) in self.inlined]
                if len(ast.unparse(statement)) > _ROOM and inner:
                    named = [x for x in inner if id(x.outputs[0]) in self.given] or inner
                    sizes = [(abs(self._size(x) - len(inner) / 2), i) for i, x in enumerate(named)]
                    self.inlined -= {id(named[min(sizes)[1]])}
                    break
            else:
                return found, names, [x for node in self.nodes for x in self.constants[id(node)]]

    def _attempt(self) -> tuple[list[ast.Assign | ast.Return], dict[int, str], list[list[_Node]]]:
        roots = [node for node in self.nodes if id(node) not in self.inlined]
        parts = [list(self._parts(node.inputs)) for node in roots]
        parts.append(list(self._parts(self.outputs)))
        last = dict.fromkeys(map(id, self.outputs), len(roots))
        for i, part in enumerate(parts):
            used = [x for node in (*roots[i : i + 1], *part) for x in node.inputs]
            last |= {id(x): max(i, last.get(id(x), 0)) for x in used}
        names: dict[int, str] = {}
        holders: dict[str, int] = {}

        def name(x: Tensor, place: int) -> str:
            invented = {torch.bool: "condition", torch.float32: "x"}.get(x.dtype, "bits")
            stem = chosen = self.given.get(id(x), invented).strip("_")
            number = 2
            while chosen in holders and last.get(holders[chosen], -1) > place:
                chosen, number = f"{stem}{number}", number + 1
            holders[chosen], names[id(x)] = id(x), chosen
            return chosen

        def written(node: _Node) -> ast.expr:
            def of_node(x: Any) -> ast.expr:
                made = of(x)
                if isinstance(made, ast.Constant) and type(x) in (int, float):
                    self.constants[id(node)].append(made)
                return made

            return node.expression(of_node)

        def of(x: Any) -> ast.expr:
            if not isinstance(x, Tensor):
                return literal(x)
            node = self.maker.get(id(x))
            if node is not None and id(node) in self.inlined:
                return written(node)
            return ast.Name(names[id(x)])

        for x in self.inputs:
            name(x, -1)
        found: list[ast.Assign | ast.Return] = []
        for i, root in enumerate(roots):
            value = written(root)
            targets: list[ast.expr] = [ast.Name(name(x, i)) for x in root.outputs]
            found.append(
                ast.Assign([targets[0] if len(targets) == 1 else ast.Tuple(targets)], value)
            )
        if roots and list(map(id, roots[-1].outputs)) == list(map(id, self.outputs)):
            found[-1] = ast.Return(found[-1].value)
            parts[-2:] = [[*parts[-2], *parts[-1]]]
        else:
            results = list(map(of, self.outputs))
            found.append(ast.Return(results[0] if len(results) == 1 else ast.Tuple(results)))
        for statement in found:
            ast.fix_missing_locations(statement)
        return found, names, parts

    def _size(self, node: _Node) -> int:
        return 1 + len(list(self._parts(node.inputs)))

    def _parts(self, inputs: Sequence[Tensor]) -> Iterator[_Node]:
        for x in inputs:
            node = self.maker.get(id(x))
            if node is not None and id(node) in self.inlined:
                yield node
                yield from self._parts(node.inputs)


def _take_constants(function: _Function) -> None:
    """Turn constants that differ between the calls of a function into arguments."""
    rows = zip(*(values for _, values in function.calls), strict=True)
    differing = [i for i, row in enumerate(rows) if len(set(row)) > 1]
    for name, i in zip(("constant", *"abcdefgh"), differing, strict=False):
        function.definition.args.args.append(ast.arg(name))
        _rename(function.constants[i], name)
        for call, values in function.calls:
            call.args.append(ast.Constant(values[i]))


def _rename(x: Any, text: str) -> None:
    """Turn a node into a name, in place."""
    x.__class__, x.id, x.ctx = ast.Name, text, ast.Load()


def as_lines(definition: ast.FunctionDef) -> list[str]:
    """Return a definition as lines in the style of ruff's formatter."""
    for x in ast.walk(definition):
        if isinstance(x, ast.Constant) and type(x.value) is int and abs(x.value) > 999:
            _rename(x, hex(x.value).upper().replace("X", "x"))
    lines = ast.unparse(definition).splitlines()
    match definition.body[-1]:
        case ast.Return(ast.Tuple(results)):
            lines[-1] = f"    return {', '.join(map(ast.unparse, results))}"
    return [*map(_formatted, lines)]


def as_source(x: ast.AST) -> str:
    """Return an expression or a statement in the style of ruff's formatter."""
    return "\n".join(map(_formatted, ast.unparse(ast.fix_missing_locations(x)).splitlines()))


def expression(
    function: Callable[..., Any], *args: str, given: dict[str, str] | None = None, **known: Any
) -> str:
    """Return what a function of one statement returns for arguments, as an expression."""
    names = inspect.signature(function).parameters
    found = dict(zip(names, args, strict=False)) | (given or {})
    match simplified(function, known, found).body[-1]:
        case ast.Return(ast.expr() as value):
            return as_source(value)
    raise AssertionError(function)


def _formatted(line: str) -> str:
    """Return a line as formatters write it."""
    if '"""' in line:
        return line
    line = re.sub(r"\b(\w+)\(\((.* for .*)\)\)", r"\1(\2)", line.replace("'", '"'))
    # Python 3.10 has brackets around the targets of assignments and loops.
    line = re.sub(r"^( *)\((.+)\) = ", r"\1\2 = ", line)
    line = re.sub(r"\bfor \(([\w, ]+)\) in ", r"for \1 in ", line)
    line = re.sub(r"\b([\w.]+) \*\* ([\w.]+)(?![\w.(\[])", r"\1**\2", line)
    return re.sub(r"(return|=|in) \(([^()]+(?:\([^()]*\)[^()]*)*)\)$", r"\1 \2", line)
