"""Functions of tensors as readable PyTorch code, recorded while they run on examples.

A kernel's program is a flat list of instructions. Here each call of one of the library's functions
stays a call: it becomes a function of the printed code, with its name, its docstring's first line
and the names of its local variables. The operations are PyTorch's own, in their order, so the
printed code has the bits of what was recorded. Choices that depend on formats are made while
recording; shapes must not matter to the function.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mcftensor.arithmetic.noise import Noise
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.formats import Format
from mcftensor.kernels import block_scales
from mcftensor.kernels.custom_ops import DEFINITIONS

WIDTH = 100
_ROOM = WIDTH - 16  # without indentation, and with an argument that may be added
_PACKAGE = Path(__file__).parents[1]
_RECORDED = [str(_PACKAGE / name) for name in ("arithmetic", "formats")]
_SHORTEST = 3
"""Operations of a function below which its callers contain it."""

BY_SHAPE = {name: DEFINITIONS[name] for name in ("block_max", "spread")}
"""Functions whose operations depend on shapes: printed from their source, and not recorded."""

_INFIX: dict[str, type[ast.operator] | type[ast.cmpop]] = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "truediv": ast.Div,
    "and": ast.BitAnd, "or": ast.BitOr, "xor": ast.BitXor, "lshift": ast.LShift,
    "rshift": ast.RShift, "eq": ast.Eq, "ne": ast.NotEq, "lt": ast.Lt, "le": ast.LtE,
    "gt": ast.Gt, "ge": ast.GtE,
}  # fmt: skip
_SCHOOL = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_PREFIX: dict[str, type[ast.unaryop]] = {"neg": ast.USub, "invert": ast.Invert}


# ---------------------------------------------------------------------------------- recording


@dataclass(eq=False)
class Applied:
    """An operation of PyTorch, or a call of a function in `BY_SHAPE`."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor


@dataclass(eq=False)
class Region:
    """A call of a function: what it did, and the names of its tensors."""

    name: str
    doc: str | None
    arguments: list[Tensor] = field(default_factory=list)
    steps: list[Applied | Region] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    returned: list[Tensor] = field(default_factory=list)

    def operations(self) -> Iterator[Applied]:
        """Yield all operations in order."""
        for x in self.steps:
            yield from x.operations() if isinstance(x, Region) else (x,)


class Recorder(TorchFunctionMode):
    """Records operations, and the library's functions that they belong to."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.stack, self.alive = [region], list[Any]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "_opname", "")
        if name in DEFINITIONS and name not in BY_SHAPE:
            with self:
                return DEFINITIONS[name](*args, **kwargs)
        if func is Tensor.clone:
            return args[0]  # which nothing changes
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not any(result is x for x in args):
            self.alive.append(result)  # so that its id stays its own
            self.stack[-1].steps.append(Applied(func, args, kwargs, result))
        return result

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Begin a region if a function of the library is called, as a trace function of Python."""
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or not _is_recorded(code):
            return None
        region = Region(*_title(frame))
        region.arguments = [x for y in frame.f_locals.values() for x in tensors_in(y)]
        self.stack[-1].steps.append(region)
        self.stack.append(region)

        def follow(frame: FrameType, event: str, arg: Any) -> Any:
            for name, value in frame.f_locals.items():
                found = tensors_in(value)
                if len(found) == 1 and name != "self":
                    region.names.setdefault(id(found[0]), name)
            if event == "return":
                region.returned = tensors_in(arg)
                self.stack.pop()
            return follow

        return follow(frame, "call", None)


def _is_recorded(code: CodeType) -> bool:
    return code.co_filename.startswith(tuple(_RECORDED))


def _title(frame: FrameType) -> tuple[str, str | None]:
    """Return the name of a function or of its class, and the first line of its docstring."""
    name, own = frame.f_code.co_name, frame.f_locals.get("self")
    doc = frame.f_code.co_consts[0] if frame.f_code.co_consts else None
    if name == "__init__":
        name, doc = type(own).__name__.lower(), type(own).__doc__
    elif isinstance(own, Format):
        name = f"{name}_{own.nearest.name.removesuffix('rn')}"
    line = doc.strip().partition("\n")[0] if isinstance(doc, str) else ""
    for argument, value in frame.f_locals.items():  # which the printed function has not
        if isinstance(value, (int, torch.dtype)):
            line = line.replace(f"`{argument}`", str(value).removeprefix("torch."))
    return name.strip("_"), line if line.endswith(".") else None


def tensors_in(x: Any) -> list[Tensor]:
    """Return the tensors of a value: of a number its floats, of noise its pattern."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [z for y in x for z in tensors_in(y)]
    if isinstance(x, (Sum, Noise)):
        return [z for y in vars(x).values() for z in tensors_in(y)]
    return []


def record_calls(
    name: str,
    doc: str,
    function: Callable[..., Any],
    examples: Mapping[str, Tensor],
    results: Sequence[str] = (),
) -> Region:
    """Return what a function does with examples of its arguments; results have names."""
    region = Region(name, doc, list(examples.values()))
    region.names = {id(x): argument for argument, x in examples.items()}
    recorder, previous = Recorder(region), sys.gettrace()
    try:
        sys.settrace(recorder.enter)
        with recorder:
            result = function(*examples.values())
    finally:
        sys.settrace(previous)
    region.returned = tensors_in(result)
    for x, own in zip(region.returned, results, strict=False):
        region.names.setdefault(id(x), own)
    region.steps.append(Region("", None, recorder.alive))  # keeps ids unique
    return region


# ----------------------------------------------------------------------------------- printing


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
                made = simplified(BY_SHAPE[name], {"BLOCK_SIZE": block_scales.BLOCK_SIZE})
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


def _constant(x: Any) -> ast.expr:
    if isinstance(x, torch.dtype):
        return ast.Name(str(x))
    if isinstance(x, float) and not abs(x) < torch.inf:
        return ast.Name(f"torch.{x}" if x != -torch.inf else "-torch.inf")
    return ast.Constant(x)


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
                return _constant(x)
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


# --------------------------------------------------------------------------- source and its text


class _Simplify(ast.NodeTransformer):
    """Puts constants for names, and takes the choices that they decide."""

    def __init__(self, known: Mapping[str, Any], stored: Collection[str] = ()) -> None:
        self.known, self.stored = known, stored

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_read = isinstance(node.ctx, ast.Load) and node.id in self.known
        return _constant(self.known[node.id]) if is_read else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        text = ast.unparse(node)
        return _constant(self.known[text]) if text in self.known else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        text = ast.unparse(node)
        return _constant(self.known[text]) if text in self.known else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name("isinstance"), args=[_, ast.Name("Tensor")]):
                return ast.Constant(False)
            case ast.Call(func=ast.Name("_to_scalar"), args=[x]):
                return x
            case ast.Call(func=ast.Attribute(x, "sqrt"), args=[]):
                return ast.Call(ast.Name("sqrt"), [x], [])
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
            case ast.Call(func=ast.Attribute(ast.Name(name), method)) if name in self.stored:
                if method.endswith("_"):
                    return [node, ast.Expr(ast.Call(ast.Name("store"), [ast.Name(name)], []))]
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
    function: Callable[..., Any], known: Mapping[str, Any], stored: Collection[str] = ()
) -> ast.FunctionDef:
    """Return the definition of a function, without annotations, checks and what is decided.

    After each change in place of a tensor in `stored`, the printed function calls `store` with it.
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
    if stored:
        own.kwonlyargs.append(ast.arg("store"))
        own.kw_defaults.append(None)
    return ast.fix_missing_locations(_Simplify(known, stored).visit(definition))


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
    line = re.sub(r"\b([\w.]+) \*\* ([\w.]+)(?![\w.(\[])", r"\1**\2", line)
    return re.sub(r"(return|=|in) \(([^()]+(?:\([^()]*\)[^()]*)*)\)$", r"\1 \2", line)
