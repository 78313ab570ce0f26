"""One file with an optimizer over bfloat16 parameters, which needs PyTorch alone.

The file is printed from what the library runs. Conversions are recorded, call by call. The
update is the source of the library's rule for fused steps, or of PyTorch's optimizer where the
library has no rule. Formats of states are those that a step of the library makes. Only the class
around all this is text of this module.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import mcftensor
from mcftensor.arithmetic import eft, write_counts
from mcftensor.arithmetic.machine_numbers import Machine
from mcftensor.arithmetic.noise import _STEPS, Balanced, Noise
from mcftensor.arithmetic.number_protocol import Sum
from mcftensor.arithmetic.rounding import collapse_terms
from mcftensor.convert import as_expansion
from mcftensor.export.call_recorder import record_calls
from mcftensor.export.readable_code import WIDTH, Code, as_source, expression
from mcftensor.export.simplified_source import folded, on_terms, statements
from mcftensor.formats import PLAIN, Format, bf16i8, bf16i16, bf16x2, is_vector, named
from mcftensor.options import say
from mcftensor.passes.expressions import Expression
from mcftensor.passes.operators import OPERATORS
from mcftensor.passes.optimizer_steps import RULES, integer_power, numbers_for
from mcftensor.tensor.components import stored_format_of
from mcftensor.training.collage import collage

LONGEST = 200
"""Lines of a file."""

_MODES = {bf16i16: "full", bf16x2: "plus", bf16i8: "compact"}
_WEIGHTS = {
    bf16i16: "an int16 tail keeps the rest of each float32 weight",
    bf16x2: "a second bfloat16 keeps the next bits of each weight",
    bf16i8: "an int8 tail keeps the next bits of each weight",
}
_MATRIX, _VECTOR = torch.Size((3, 40)), torch.Size((1, 40))


@dataclass(frozen=True)
class _Text:
    """An expression of the printed code, for the functions that make the numbers of a rule."""

    text: str

    def __neg__(self) -> _Text:
        return _Text(f"-{self.text}")

    def __rsub__(self, x: float) -> _Text:
        return _Text(f"{x} - {self.text}")


@dataclass(frozen=True)
class _Kind:
    """An optimizer to export.

    Attributes:
        optimizer: PyTorch's class.
        options: its options that the exported class has.
        begin: the lines before the update of a weight.
        given: what names and conditions of the update are in the printed code.
        known: names and conditions of the update that are decided.
        rule: the name of the library's rule for fused steps, if there is one.
        settings: the settings of the rule.
        names: names of states in the update, where they have others.
        states: states in the update that `begin` makes.
        functions: the functions of PyTorch that its step calls, else; the last one is the step.
        require: what is checked of a parameter `p` and its `param_group`, and the error.
    """

    optimizer: type[Optimizer]
    options: str
    begin: str
    given: dict[str, str]
    known: Mapping[str, Any]
    rule: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    require: tuple[str, str] = ("", "")


_OF_RULES = {"p": "weight", "g": "grad"}
_OF_TORCH = {"param": "weight", "grads[i]": "grad"}
_DECAY = 'group["weight_decay"]'

_KINDS = {
    "adamw": _Kind(
        torch.optim.AdamW,
        "lr betas eps weight_decay",
        """
        step = state["step"] = state.get("step", 0) + 1
        lr, (beta1, beta2), eps = float(group["lr"]), group["betas"], group["eps"]
        """,
        _OF_RULES
        | {"m": "exp_avg", "v": "exp_avg_sq", "states": "(exp_avg, exp_avg_sq)"}
        | {"'decay' in s": _DECAY, "s['decay']": f"lr * {_DECAY}"},
        {"v_max": (), "'l2' in s": False},
        rule="_fused_adamw_",
        settings={x: _Text(x) for x in ("beta1", "beta2", "eps")},
    ),
    "sgd": _Kind(
        torch.optim.SGD,
        "lr momentum weight_decay nesterov",
        "",
        _OF_RULES
        | {"states[0]": "momentum_buffer", "buffer": "momentum_buffer"}
        | {"'l2' in s": _DECAY, "s['l2']": _DECAY, "'nesterov' in s": 'group["nesterov"]'},
        {"not states": False, "'momentum' not in s": False, "first": False},
        rule="_fused_sgd_",
        settings={"lr": _Text('float(group["lr"])'), "momentum": _Text('group["momentum"]')}
        | {"nesterov": True},
        require=('param_group["momentum"] > 0', "momentum must be above 0"),
    ),
    "muon": _Kind(
        torch.optim.Muon,
        "lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn",
        "",
        _OF_TORCH | {"muon_momentum_bufs[i]": "buf", "param.shape": "p.shape"},
        {"has_complex": False},
        names={"momentum_buffer": "buf"},
        functions=("_zeropower_via_newtonschulz", "_adjust_lr", "_single_tensor_muon"),
        require=("p.dim() == 2", "give matrices, and other parameters to AdamW"),
    ),
    "adafactor": _Kind(
        torch.optim.Adafactor,
        "lr beta2_decay eps d weight_decay",
        """
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            if p.dim() > 1:
                state["row_var"] = grad.new_zeros(*p.shape[:-1], 1)
                state["col_var"] = grad.new_zeros(*p.shape[:-2], 1, p.shape[-1])
            else:
                state["variance"] = torch.zeros_like(grad)
        eps1, eps2 = group["eps"]
        """,
        _OF_TORCH
        | dict.fromkeys(("step_t", "state_steps[i]"), 'state["step"]')
        | dict.fromkeys(("row_var", "row_vars[i]"), 'state["row_var"]')
        | dict.fromkeys(("col_var", "col_vars[i]"), 'state["col_var"]')
        | dict.fromkeys(("variance", "variances[i]"), 'state["variance"]')
        | {"param.numel()": "p.numel()", "param.dtype": "torch.float32"},
        {"has_complex": False, "maximize": False, "grad_scale": None, "found_inf": None},
        states=tuple([f"state['{x}']" for x in ("row_var", "col_var", "variance")]),
        functions=("_single_tensor_adafactor",),
    ),
}

_FILE = Template('''\
"""$name for bfloat16 parameters: $weights.

    optimizer = $name($given, lr=1e-3)  # float32 parameters become bfloat16
    model.bfloat16()  # and so do buffers

$about
"""

$imports

OPTIONS = $options


$functions


class $name(torch.optim.Optimizer):
    def __init__(self, $argument, **options):
        if unknown := options.keys() - OPTIONS.keys():
            raise TypeError(f"$name has no option {sorted(unknown)}; it has {list(OPTIONS)}")
$begin
        super().__init__($params, OPTIONS | options)

    def add_param_group(self, param_group):
        """Add parameters in float32 or bfloat16; they become bfloat16."""
        super().add_param_group(param_group)
        for p in param_group["params"]:
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise TypeError(f"$name: a parameter is {p.dtype}; give float32 or bfloat16")
$prepare

    def number(self, p):
        """Return a whole weight in float32."""
        return $decode(p.detach(), self.state[p]["tail"])

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step, and return the result of the closure."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(p, p.grad.to(torch.float32), self.state[p], group)
        return loss

    def _update(self, p, grad, state, group):
$update

    def load_state_dict(self, state_dict):
        """Load states as they were saved; PyTorch alone would convert them to bfloat16."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, i in zip(group["params"], saved["params"], strict=True):
                self.state[p] = torch.utils._pytree.tree_map_only(
                    torch.Tensor, lambda x, p=p: x.to(p.device, copy=True), state_dict["state"][i]
                )
''')


_READ = '''

def read(state, name, decode, like):
    """Return a state in float32: zeros before the first step."""
    stored = state.get(name, torch.zeros_like(like))
    return decode(*stored) if isinstance(stored, tuple) else stored.to(torch.float32)'''


def export(optimizer: str, format: Format) -> str:
    """Return a file with an optimizer over parameters in a format, which needs PyTorch alone.

    Args:
        optimizer: `"adamw"`, `"sgd"`, `"muon"` or `"adafactor"`.
        format: `mcf.bf16i16`, `mcf.bf16x2` with the states of the mode "plus", or `mcf.bf16i8`
            with the states of the mode "compact".

    Raises:
        ValueError: an optimizer or a format that cannot be exported, and why.
    """
    kind = _KINDS.get(optimizer.lower())
    if kind is None:
        raise ValueError(f"no file for {optimizer!r}; give one of {', '.join(_KINDS)}")
    if format not in _MODES:
        raise ValueError(f"no file for {format.name}; give bf16i16, bf16x2 or bf16i8")
    text = _Export(optimizer.lower(), kind, format).text()
    if (lines := text.count("\n")) > LONGEST:
        raise ValueError(
            f"no file for {optimizer} over {format.name}: it has {lines} lines, and {LONGEST} "
            "are the limit of what is readable. Give --format bf16i16"
        )
    return text


class _Export:
    """The parts of a file."""

    def __init__(self, command: str, kind: _Kind, format: Format) -> None:
        self.command, self.kind, self.format = command, kind, format
        self.name, self.code = kind.optimizer.__name__, Code()
        states, of_vectors = _states(kind, format)
        self.states = {} if command == "adafactor" else states
        self.has_exact_vectors = self.states == states != of_vectors
        self.rounds = format.takes_key

    def text(self) -> str:
        """Return the file."""
        update, prepare = self._update(), self._prepare()
        functions = "\n".join(self.code.lines())
        # A tensor was recorded, and a number is given.
        number = "    x = like.new_tensor(x, dtype=torch.float64)"
        functions = re.sub(r"def pair\(x\):\n(.*)", rf"def pair(x, like):\n\1\n{number}", functions)
        used = "\n".join([functions, *update])
        functions += f"\n{_READ}" if "read(" in used else ""
        imports = [f"import {name}\n" for name in ("hashlib", "math") if f"{name}." in used]
        imports += [*(["\n"] if imports else []), "import torch"]
        begin = "self.names = {p: name for name, p in named_parameters}"
        named = "named_parameters" if self.rounds else "parameters"
        text = _FILE.substitute(
            name=self.name,
            weights=_WEIGHTS[self.format],
            given=f"model.{named}()",
            about=self._about(),
            imports="".join(imports),
            options=self._options(),
            functions=functions.replace("F.pad", "torch.nn.functional.pad"),
            argument=named if self.rounds else "params",
            params="self.names" if self.rounds else "params",
            begin=textwrap.indent(begin, " " * 8) if self.rounds else "",
            prepare=_indented(prepare, 12),
            decode=f"decode_{self.format.name}",
            update=_indented(update, 8),
        )
        return text.replace("\n\n        super", "\n        super")

    def _about(self) -> str:
        states = ", ".join(
            f"`{name}` in {'float32' if f.is_exact else f.name}" for name, f in self.states.items()
        )
        if self.has_exact_vectors:
            states += " (of vectors: float32)"
        mode = f'mcf.collage(torch.optim.{self.name}(...), "{_MODES[self.format]}")'
        licence = "; the update from torch, BSD-3-Clause" if self.kind.functions else ""
        return textwrap.fill(
            f"The bits are those of {mode} over parameters in {self.format.name}. "
            f"States: {states or 'in float32'}. Save `optimizer.state_dict()` with the model, for "
            "the tails. `optimizer.number(p)` is a whole weight in float32. "
            f"Printed by `python -m mcftensor export {self.command} --format {self.format.name}`, "
            f"mcftensor {mcftensor.__version__}, torch {torch.__version__}. Source: "
            f"https://github.com/mcftensor/mcftensor, Apache-2.0{licence}.",
            WIDTH,
            break_on_hyphens=False,
        )

    def _options(self) -> str:
        found = inspect.signature(self.kind.optimizer).parameters
        options = {name: found[name].default for name in self.kind.options.split()}
        if self.command == "sgd":
            options["momentum"] = 0.9
        lines = [""]
        for name, x in options.items():
            item = f'"{name}": {x!r}'.replace("'", '"')
            if len(lines[-1]) + len(item) > WIDTH - 15:
                lines += [""]
            lines[-1] += f"{', ' if lines[-1] else ''}{item}"
        return "\nOPTIONS |= ".join(f"{{{x}}}" for x in lines)

    def _prepare(self) -> list[str]:
        """Return the lines that convert a parameter and make its first states."""
        lines, (condition, reason) = [], self.kind.require
        if condition:
            lines = [f"if not {condition}:", f'    raise ValueError("{self.name}: {reason}")']
        if not self.rounds:
            encoded = self._encoded(self.format, "p.detach().to(torch.float32)")
            return [*lines, f'p.data, self.state[p]["tail"] = {encoded}']
        self.code.add_source(write_counts._salted, _SALT=write_counts._SALT)
        return [
            *lines,
            "salt = _salted(self.names[p]) if p in self.names else 0",
            "count, x = torch.tensor(salt, device=p.device), p.detach().to(torch.float32)",
            _INDEX,
            f"p.data, tail = {self._encoded(self.format, 'x')}",
            'self.state[p] = {"tail": tail, "count": count + 1}',
        ]

    def _update(self) -> list[str]:
        """Return the lines that take a step of one parameter."""
        lines = ["weight = self.number(p)"]
        if self.format.arithmetic == "terms" and not self.kind.rule:
            lines = ['weight = p, state["tail"]']
        elif self.rounds:
            lines = ['weight, count = self.number(p), state["count"]', _INDEX]
        for name, f in self.states.items():
            if f.arithmetic == "terms" and not self.kind.rule:
                zeros = "(torch.zeros_like(p), torch.zeros_like(p))"
                lines += [f'{self._name(name)} = state.get("{name}", {zeros})']
                continue
            decode = "None" if f.is_exact or f.arithmetic == "plain" else self._decoded(f)
            lines += [f'{self._name(name)} = read(state, "{name}", {decode}, weight)']
        self._decoded(self.format)
        begin = textwrap.dedent(self.kind.begin).strip()
        if self.format.arithmetic == "terms":
            zeros = r"= (.*zeros.*)$"
            begin = re.sub(zeros, rf"= encode_{self.format.name}(\1)", begin, flags=re.MULTILINE)
        lines += begin.splitlines()
        return [*lines, *(self._of_rule() if self.kind.rule else self._of_torch())]

    def _of_rule(self) -> list[str]:
        """Return the lines of a rule of the library, and of the rounding of its results."""
        kind, rule = self.kind, RULES[self.kind.rule]
        numbers, body = rule.fixed(kind.settings), list[ast.stmt]()
        if rule.by_step is not None:
            self.code.add_source(integer_power)
            body, found = statements(rule.by_step, {}, {})
            body = folded(body, found)
            numbers |= {x: _Text(as_source(y)) for x, y in zip(rule.varying, found, strict=True)}
        given = {f"s[{x!r}]": y.text for x, y in numbers.items() if isinstance(y, _Text)}
        given |= {f"s[{x!r}]": repr(y) for x, y in numbers.items() if isinstance(y, float)}
        root = Code()
        root.add(record_calls("", "", eft.sqrt, {"x": torch.ones(1, device="cpu")}))
        given |= {"x.sqrt()": root.lines()[-1].partition("return ")[2]}
        own, (change, _) = statements(rule.update, kind.known, given | kind.given)
        body += [*own, ast.Assign([ast.Name("change")], change)]
        lines = [line for x in body for line in as_source(x).splitlines()]
        return [*(x for x in lines if x != "change = change"), *self._after_rule()]

    def _after_rule(self) -> list[str]:
        """Return the lines that round a weight and its states."""
        format = self.format
        numbers = numbers_for([PLAIN[torch.bfloat16], format, *self.states.values()])
        assert numbers == Machine(torch.float32)

        def moved(*given: Tensor) -> Sequence[Tensor]:
            *stored, change = given
            number = numbers.of(format.decode(stored)).moved_by(numbers.of([change]))
            return format.encode(number, None)

        if format.arithmetic == "terms":
            doc, parts = "Return weights after a change, rounded once.", list(_stored(format))
            examples = {**_stored(format), "change": torch.ones(_MATRIX, device="cpu")}
            self.code.add(record_calls("moved", doc, moved, examples, parts))
            moved_weight = 'moved(p, state["tail"], change)'
        else:  # a weight is one float32
            moved_weight = self._encoded(format, "weight + change")
        lines = [f'p[...], state["tail"] = {moved_weight}']
        written = [
            f"{name} = {self._written(f, name, i)}"
            for i, (name, f) in enumerate(self.states.items(), 1)
        ]
        if self.has_exact_vectors:
            written = [f"if not {_IS_VECTOR}:", *_inner(written)]
        written = [x for x in written if x != " = ".join(2 * [x.partition(" = ")[0]])]
        count = {"count": "count + 1"} if self.rounds else {}
        places = {name: name for name in self.states} | count
        targets = ", ".join(f'state["{name}"]' for name in places)
        return [*lines, *written, f"{targets} = {', '.join(places.values())}"]

    def _of_torch(self) -> list[str]:
        """Return the lines of a step of PyTorch, and of the rounding of its results."""
        kind, after, lines = self.kind, dict[str, str](), list[str]()
        module = importlib.import_module(f"torch.optim._{self.command}")
        *others, step = [getattr(module, name) for name in kind.functions]
        for function in others:
            self.code.add_source(function)
        rounded = [f'p[...], state["tail"] = {self._encoded(self.format, "weight")}']
        last = [*rounded, *(f'state["{name}"] = {self._name(name)}' for name in self.states)]
        if self.rounds:  # each operation rounds
            last = ["count.add_(1)", "weight = self.number(p)"]
            after, last = {"weight": "\n".join([*rounded, *last])}, []
            for name, f in self.states.items():
                after[self._name(name)] = "\n".join(self._rounded_state(name, f))
                unwritten = expression(write_counts.unwritten, "count", _SALT=write_counts._SALT)
                given = {"unwritten(count)": unwritten, "name": f'"{name}"'}
                count = expression(write_counts.count_beside, "count", given=given)
                lines = ['state["step"] = state.get("step", 0) + 1']  # zeros were written first
                lines += [f'own = {count} + state["step"]']
        options = {name: f'group["{name}"]' for name in kind.options.split()}
        options |= {"lr": 'float(group["lr"])'}
        body, _ = statements(step, kind.known, options | kind.given, after)
        if self.format.arithmetic == "terms":
            terms = {"grad", "weight", *map(self._name, self.states), *kind.states}
            body = on_terms(body, terms, self._row)
            lines = ["grad = grad, torch.zeros_like(grad)"]
            self._print_pair()
        lines += [line for x in body for line in as_source(x).splitlines()]
        if lines[-1] == "weight = self.number(p)":
            del lines[-1]
        elif self.format.arithmetic == "terms":
            last[0] = lines.pop().replace("weight", 'p[...], state["tail"]', 1)
        return [*lines, *last]

    def _print_pair(self) -> None:
        """Print the function that makes terms of a number."""

        def levels(x: Tensor) -> Sequence[Tensor]:
            return Machine(torch.float32).of([x]).levels

        doc = "Return a number as a pair of float32 numbers."
        self.code.add(record_calls("pair", doc, levels, {"x": _float64(torch.Size(()))}))

    def _row(self, name: str) -> bool:
        """Print an operation on terms, if the library has it, or else what rounds its result."""
        f, stored = self.format, _stored(self.format)
        if name not in OPERATORS:
            self._print_rounded()
            return False
        operator = OPERATORS[name]
        operation, places = operator.formula(*"xyz"[: operator.operands + (name == "add")])
        names = sorted(set(places))
        leading, tail = stored.values()
        examples: dict[str, Tensor] = {}
        for x in names:
            examples |= {x: leading.clone(), f"{x}_tail": tail.clone()}

        def result(*given: Tensor) -> Sequence[Tensor]:
            own = dict(zip(names, zip(given[::2], given[1::2], strict=True), strict=True))
            return f.encode(Expression(operation, f).number([own[x] for x in places]), None)

        doc = f"Return {_DOCS[operation]} as terms, rounded once."
        self.code.add(record_calls(name, doc, result, examples, [*stored], ["formats"]))
        return True

    def _print_rounded(self) -> None:
        """Print the functions from terms to float64, and back."""
        f, stored = self.format, _stored(self.format)

        def collapsed(*terms: Tensor) -> Tensor:
            return collapse_terms(f.decode(terms), torch.float64)

        def rounded(x: Tensor) -> Sequence[Tensor]:
            return f.encode(Sum([x]), None)

        doc = "Return numbers in float64, rounded once."
        self.code.add(record_calls("wide", doc, collapsed, stored))
        doc, examples = "Return float64 numbers as terms, rounded once.", {"x": _float64(_MATRIX)}
        self.code.add(record_calls("rounded", doc, rounded, examples, [*stored], ()))

    def _name(self, state: str) -> str:
        """Return the name of a state in the update."""
        return self.kind.names.get(state, state)

    def _rounded_state(self, state: str, f: Format) -> list[str]:
        """Return the lines that round a state, after an operation."""
        name, stored = self._name(state), f'state["{state}"]'
        encoded = self._encoded(f, name).replace("count", "own")
        rounded = [f"{stored} = {encoded}", f"{name} = {self._decoded(f)}(*{stored})"]
        return [f"{stored} = {name}", f"if not {_IS_VECTOR}:", *_inner(rounded)]

    def _decoded(self, f: Format) -> str:
        """Return the name of the function that reads a format."""
        numbers, name = Machine(torch.float32), f"decode_{_stem(f)}"

        def decode(*stored: Tensor) -> Tensor:
            return numbers.of(f.decode(stored)).summed().floats[0]

        self.code.add(record_calls(name, "Return numbers in float32.", decode, _stored(f)))
        return name

    def _encoded(self, f: Format, x: str, stream: int = 0) -> str:
        """Return the call of the function that writes a format."""
        name, parts = f"encode_{_stem(f)}", list(_stored(f))
        examples = {"x": torch.ones(_MATRIX, device="cpu")}
        if f.takes_key:
            examples["noise"] = torch.zeros(_MATRIX, dtype=torch.int32, device="cpu")
        doc = f"Return float32 numbers as {' and '.join(parts)}, rounded once."
        self.code.add(record_calls(name, doc, functools.partial(_encode, f), examples, parts))
        return f"{name}({x}, {self._noise(stream)})" if f.takes_key else f"{name}({x})"

    def _written(self, f: Format, x: str, stream: int) -> str:
        """Return a state in its format; what is exact is stored as float32."""
        if f.arithmetic == "plain":
            return f"{x}.to({f.dtype})"
        return x if f.is_exact else self._encoded(f, x, stream)

    def _noise(self, stream: int) -> str:
        """Return the call of the function that makes noise."""

        def balanced(count: Tensor, index: Tensor) -> Tensor:
            return Balanced(count, index, stream).pattern

        examples = {
            "count": torch.zeros((), dtype=torch.int64, device="cpu"),
            "index": torch.zeros(_MATRIX, dtype=torch.int32, device="cpu"),
        }
        doc = "Return multiples of an irrational number, modulo 1, as int32."
        self.code.add(record_calls("balanced", doc, balanced, examples))
        factor = f", 0x{_STEPS[stream]:X}" if self.kind.rule else ""
        return f"balanced(count, index{factor})"


def _encode(f: Format, x: Tensor, *pattern: Tensor) -> Sequence[Tensor]:
    noise = None
    if pattern:
        noise = Noise()
        (noise.pattern,) = pattern
    return f.encode(Machine(torch.float32).of([x]), noise)


def _indented(lines: Sequence[str], margin: int) -> str:
    """Return lines with a margin. What is assigned in a line that is too long stands alone."""
    found = []
    for line in lines:
        head, equals, value = f"{' ' * margin}{line}".partition(" = ")
        if len(head + equals + value) > WIDTH:
            match ast.parse(value, mode="eval").body:
                case ast.Call(ast.Name(function)):
                    inner = value[len(function) + 1 : -1]
                case _:
                    function, inner = "", value
            space = " " * (len(head) - len(head.lstrip()))
            found += [f"{head} = {function}(", f"{space}    {inner}", f"{space})"]
        else:
            found += [head + equals + value]
    return "\n".join(found)


def _inner(lines: Sequence[str]) -> list[str]:
    return [f"    {x}" for x in lines]


def _states(kind: _Kind, format: Format) -> list[dict[str, Format]]:
    """Return the formats of the states of a matrix and of a vector, by steps of the library."""
    found: list[dict[str, Format]] = []
    make: Any = kind.optimizer
    for shape in (_MATRIX, _VECTOR):
        p = torch.nn.Parameter(as_expansion(torch.ones(shape, device="cpu"), format))
        p.grad = torch.ones(shape, dtype=torch.bfloat16, device="cpu")
        momentum = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = collage(make([p], lr=1e-3, **momentum), _MODES[format])
        optimizer.step()
        state = optimizer.state[p]
        found.append({name: stored_format_of(x) for name, x in state.items() if name != "step"})
    assert found[0] == found[1] or all(f.is_exact for f in found[1].values())
    return found


def _float64(shape: torch.Size) -> Tensor:
    return torch.ones(shape, dtype=torch.float64, device="cpu")


def _stem(f: Format) -> str:
    return f.nearest.name.removesuffix("rn")


def _stored(f: Format) -> dict[str, Tensor]:
    """Return examples of components."""
    names = ("leading", "tail") if f.arithmetic == "terms" else [x.name for x in f.components]
    shapes = [x.shape(_MATRIX) for x in f.components]
    made = [
        torch.ones(y, dtype=x.dtype, device="cpu")
        for x, y in zip(f.components, shapes, strict=True)
    ]
    return dict(zip(names, made, strict=True))


_DOCS = {
    "div": "x / y",
    "fma": "x + z * y",
    "lerp": "x + z * (y - x)",
    "mul": "x * y",
    "square": "x * x",
}
_IS_VECTOR = expression(is_vector, "p.shape")
_INDEX = "index = torch.arange(p.numel(), device=p.device).view(p.shape).to(torch.int32)"


def run_export(options: argparse.Namespace) -> int:
    """Print an optimizer as a file: the command `export`."""
    say(export(options.optimizer, named(options.format)).removesuffix("\n"))
    return 0
