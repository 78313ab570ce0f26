"""Finds where a source writes to modules and classes of torch, or to names of its objects.

Names that are imported from torch, and attributes and items of them, belong to torch; what is made
by calling them does not, except for `getattr`, `vars`, `type` and `import_module`. The operators
that the library registers are its own.
"""

import ast
from collections.abc import Iterable, Iterator

CHANGING = {
    *("append", "clear", "extend", "insert", "move_to_end", "pop", "popitem", "remove"),
    *("__setattr__", "__setitem__", "setdefault", "update"),
}
LOOKING_UP = {"getattr", "import_module", "type", "vars"}


def writes(source: str, names: Iterable[str] = ()) -> list[int]:
    """The lines of a source that write to torch, or to attributes of these names of any object."""
    tree = [*ast.walk(ast.parse(source))]
    torchs = _names_of_torch(tree)
    names = set(names)

    def is_torchs(node: ast.AST) -> bool:
        match node:
            case ast.Name(name):
                return name in torchs
            case ast.Constant(str(text)):
                return text.partition(".")[0] == "torch"
            case ast.Attribute() if ast.unparse(node) == "torch.ops.mcftensor":
                return False
            case ast.Attribute(value) | ast.Subscript(value):
                return is_torchs(value) or getattr(node, "attr", None) in names
            case ast.Call(ast.Name("type"), [_]):
                return True
            case ast.Call(ast.Name(name) | ast.Attribute(_, name), [first, *_]):
                return name in LOOKING_UP and is_torchs(first)
        return False

    def is_written(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(value, attribute, ast.Store() | ast.Del()):
                return is_torchs(value) or attribute in names
            case ast.Subscript(value, _, ast.Store() | ast.Del()):
                return is_torchs(value)
            case ast.Call(ast.Name("setattr" | "delattr"), [owner, name, *_]):
                return is_torchs(owner) or getattr(name, "value", None) in names
            case ast.Call(ast.Attribute(owner, method)):
                return method in CHANGING and is_torchs(owner)
            case ast.AugAssign(ast.Name() as target):
                return is_torchs(target)
        return False

    _add_aliases(tree, torchs, is_torchs)
    return sorted({node.lineno for node in tree if is_written(node)})


def _names_of_torch(tree: list[ast.AST]) -> set[str]:
    names = set()
    for node in tree:
        match node:
            case ast.Import(aliases):
                found = [a for a in aliases if a.name.partition(".")[0] == "torch"]
                names |= {a.asname or "torch" for a in found}
            case ast.ImportFrom(module, aliases, 0) if str(module).partition(".")[0] == "torch":
                names |= {a.asname or a.name for a in aliases}
    return names


def _add_aliases(tree, torchs, is_torchs) -> None:
    """Other names for them: `x = torch.y`, and `for x in (torch.y, torch.z)`."""
    for name, value in _assignments(tree):
        if any(map(is_torchs, value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value])):
            torchs.add(name)


def _assignments(tree: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in tree:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.For(ast.Name(name), value):
                yield name, value
            case ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                yield name, value
