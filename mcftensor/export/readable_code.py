"""Recorded calls as readable PyTorch code.

A kernel's program is a flat list of instructions. Here each call of one of the library's functions
stays a call: it becomes a function of the printed code, with its name, the first line of its
docstring, and the names of its local variables. Functions that are short, or called once, are part
of their callers.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcftensor.export.call_recorder import BY_SHAPE, Applied, Region, tensors_in
from mcftensor.export.simplified_source import literal, simplified
from mcftensor.kernels.block_scales import BLOCK_SIZE

WIDTH = 100
_ROOM = WIDTH - 16  # without indentation, and with an argument that may be added
_SHORTEST = 3
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

    def add_source(
        self, function: Callable[..., Any], stored: Collection[str] = (), **known: Any
    ) -> None:
        """Print a function from its source, simplified by what is known of its names."""
        self._added.append(simplified(function, known, stored))

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
        body, chosen = _Body(nodes, inputs, outputs, names).statements()
        arguments = [ast.arg(chosen[id(x)]) for x in inputs]
        doc: list[ast.stmt] = [ast.Expr(ast.Constant(region.doc))] if region.doc else []
        own = ast.arguments([], arguments, None, [], [], None, [])
        definition = ast.FunctionDef(region.name, own, [*doc, *body], [])
        ast.fix_missing_locations(definition)
        constants = _numbers_in(body)
        structure = _structure(definition, set(chosen.values())) + "".join(x.key for x in nodes)
        if structure not in self._by_structure:
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


def _numbers_in(body: Sequence[ast.AST]) -> list[ast.Constant]:
    found = (y for x in body for y in ast.walk(x) if isinstance(y, ast.Constant))
    return [x for x in found if type(x.value) in (int, float)]


def _structure(definition: ast.FunctionDef, local: set[str]) -> str:
    """Return text that is equal for functions that differ in constants and names alone."""
    blank = copy.deepcopy(definition)
    for constant in _numbers_in([blank]):
        constant.value = 0
    numbers: dict[str, str] = {}
    for x in ast.walk(blank):
        if isinstance(x, ast.Name) and x.id in local:
            x.id = numbers.setdefault(x.id, str(len(numbers)))
        elif isinstance(x, ast.arg):
            x.arg = numbers.setdefault(x.arg, str(len(numbers)))
    return ast.dump(blank)


class _Body:
    """The statements of a function. A result with one use and no name of its own is a part of the
    expression that uses it."""

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
        ends = {id(x) for x in outputs} if len(outputs) == 1 else set()
        self.inlined = {
            id(node)
            for node in nodes
            if len(node.outputs) == 1
            and uses[key := id(node.outputs[0])] == 1
            and (key not in names or key in ends)
        }

    def statements(self) -> tuple[list[ast.stmt], dict[int, str]]:
        """Return statements that fit a line, and the names of tensors."""
        while True:
            found, names, parts = self._attempt()
            long = [y for x, y in zip(found, parts, strict=True) if len(ast.unparse(x)) > _ROOM]
            inner = [x for part in long for x in part if id(x) in self.inlined]
            if not inner:
                return found, names
            self.inlined -= {id(inner[len(inner) // 2])}

    def _attempt(self) -> tuple[list[ast.stmt], dict[int, str], list[list[_Node]]]:
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

        def of(x: Any) -> ast.expr:
            if not isinstance(x, Tensor):
                return literal(x)
            node = self.maker.get(id(x))
            if node is not None and id(node) in self.inlined:
                return node.expression(of)
            return ast.Name(names[id(x)])

        for x in self.inputs:
            name(x, -1)
        found: list[ast.stmt] = []
        for i, root in enumerate(roots):
            value = root.expression(of)
            targets: list[ast.expr] = [ast.Name(name(x, i)) for x in root.outputs]
            found.append(
                ast.Assign([targets[0] if len(targets) == 1 else ast.Tuple(targets)], value)
            )
        results = list(map(of, self.outputs))
        found.append(ast.Return(results[0] if len(results) == 1 else ast.Tuple(results)))
        for statement in found:
            ast.fix_missing_locations(statement)
        return found, names, parts

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
    head, *lines = ast.unparse(definition).splitlines()
    if len(head) > WIDTH:
        opening, _, rest = head.removesuffix("):").partition("(")
        head = "\n".join([f"{opening}(", *(f"    {x.strip()}," for x in rest.split(",")), "):"])
    found = map(_formatted, lines)
    return [*head.splitlines(), *(part for x in found for part in _divided(x))]


def _divided(line: str) -> list[str]:
    """Return a line, or a line for each item of the dict that it returns if it is too long."""
    opening = line.partition("{")[0]
    if len(line) <= WIDTH or opening.strip() != "return":
        return [line]
    margin = opening.removesuffix("return ")
    made = ast.parse(line.removeprefix(opening), mode="eval").body
    assert isinstance(made, ast.Dict)
    items = zip(made.keys, made.values, strict=True)
    lines = [f"    {ast.unparse(key)}: {ast.unparse(x)}," for key, x in items if key is not None]
    return [f"{opening}{{", *(margin + _formatted(x) for x in lines), f"{margin}}}"]


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
