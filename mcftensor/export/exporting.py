"""One file with an optimizer over bfloat16 parameters, which needs PyTorch alone.

The file is printed from what the library runs. Conversions are recorded, call by call. The
update is the source of the library's rule for fused steps, or of PyTorch's optimizer where the
library has no rule. Formats of states are those that a step of the library makes. Only the class
around all this is text of this module.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import io
import textwrap
import tokenize
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
from mcftensor.convert import as_expansion
from mcftensor.export.call_recorder import record_calls
from mcftensor.export.readable_code import WIDTH, Code
from mcftensor.formats import PLAIN, Format, bf16i8, bf16i16, bf16x2, is_vector, named
from mcftensor.options import say
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
class _Kind:
    """An optimizer to export.

    Attributes:
        optimizer: PyTorch's class.
        options: its options that the exported class has.
        update: the lines that update a weight and its states.
        rule: the name of the library's rule for fused steps, if there is one.
        functions: the functions of PyTorch that its step calls, else; the last one is the step.
        stored: its names of tensors whose format may round.
        known: names and conditions of the step that are decided.
        require: what is checked of a parameter `p` and its `group`, and the error.
    """

    optimizer: type[Optimizer]
    options: str
    update: str
    rule: str = ""
    functions: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    known: Mapping[str, Any] = field(default_factory=dict)
    require: tuple[str, str] = ("", "")


_KINDS = {
    "adamw": _Kind(
        torch.optim.AdamW,
        "lr betas eps weight_decay",
        """
        step = state["step"] = state.get("step", 0) + 1
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        s = _of_adam({"beta1": beta1, "beta2": beta2, "eps": group["eps"]})
        s["-rate"], s["1 / root_correction"] = adam_corrections(step, lr, beta1, beta2)
        if group["weight_decay"]:
            s["decay"] = lr * group["weight_decay"]
        change, (exp_avg, exp_avg_sq) = adam(weight, grad, [exp_avg, exp_avg_sq], s)
        """,
        rule="_fused_adamw_",
        known={"v_max": (), "'l2' in s": False},
    ),
    "sgd": _Kind(
        torch.optim.SGD,
        "lr momentum weight_decay nesterov",
        """
        given = {"lr": float(group["lr"]), "momentum": group["momentum"]}
        s = _of_sgd(given | ({"nesterov": True} if group["nesterov"] else {}))
        if group["weight_decay"]:
            s["l2"] = group["weight_decay"]
        change, (momentum_buffer,) = sgd(weight, grad, [momentum_buffer], s)
        """,
        rule="_fused_sgd_",
        known={"not states": False, "'first' not in s": True, "first": False},
        require=('group["momentum"] > 0', "momentum must be above 0"),
    ),
    "muon": _Kind(
        torch.optim.Muon,
        "lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn",
        """
        options = {name: group[name] for name in OPTIONS}
        _single_tensor_muon([weight], [grad], [momentum_buffer], **options$store)
        """,
        functions=("_zeropower_via_newtonschulz", "_adjust_lr", "_single_tensor_muon"),
        stored=("buf", "param"),
        known={"has_complex": False},
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
        states = [[state.get(name)] for name in ("row_var", "col_var", "variance", "step")]
        options = {name: group[name] for name in OPTIONS}
        options["eps1"], options["eps2"] = options.pop("eps")
        _single_tensor_adafactor([weight], [grad], *states, **options$store)
        """,
        functions=("_single_tensor_adafactor",),
        stored=("param",),
        known={"has_complex": False, "maximize": False, "grad_scale": None, "found_inf": None},
    ),
}

_FILE = Template('''\
"""$name for bfloat16 parameters: $weights.

    optimizer = $name($given, lr=1e-3)  # float32 parameters become bfloat16
    model.bfloat16()  # and so do buffers
    model(inputs.bfloat16()).sum().backward()
    optimizer.step()

$about
"""

$imports

OPTIONS = $options


$functions


def read(state, name, decode, like):
    """Return a state in float32: zeros before the first step."""
    stored = state.get(name)
    if stored is None:
        return torch.zeros_like(like)
    return decode(*stored) if isinstance(stored, tuple) else stored.to(torch.float32)


def copied(x, p):
    """Return a copy of a state on the device of its parameter."""
    if isinstance(x, tuple):
        return tuple(copied(y, p) for y in x)
    return x.to(p.device, copy=True) if isinstance(x, torch.Tensor) else x


class $name(torch.optim.Optimizer):
    """$name over bfloat16 parameters, with the options in `OPTIONS`."""

    def __init__(self, $argument, **options):
        if unknown := options.keys() - OPTIONS.keys():
            raise TypeError(f"$name has no option {sorted(unknown)}; it has {list(OPTIONS)}")
$begin
        super().__init__($params, OPTIONS | options)

    def add_param_group(self, param_group):
        """Add parameters in float32 or bfloat16; they become bfloat16."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise TypeError(f"$name: a parameter is {p.dtype}; give float32 or bfloat16")
$prepare

    def number(self, p):
        """Return a whole weight in float32."""
        return $decode(p.detach(), self.state[p]["tail"])

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step, and return the result of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, params, strict=True):
            self.state[p] = {name: copied(x, p) for name, x in state_dict["state"][i].items()}
''')


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
    if format is bf16x2 and not kind.rule:
        raise ValueError(
            f"no file for {optimizer} over bf16x2: it has no fused step, and each of its "
            "operations rounds to two terms. Give --format bf16i16, which is exact"
        )
    text = _Export(optimizer.lower(), kind, format).text()
    if (lines := lines_of_code(text)) > LONGEST:
        raise ValueError(
            f"no file for {optimizer} over {format.name}: it has {lines} lines of code, and "
            f"{LONGEST} is the limit of what is readable. Give --format bf16i16"
        )
    return text


def lines_of_code(text: str) -> int:
    """Return the number of lines that are neither blank nor documentation."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = (x for x in tokens if x.string.strip() and not x.string.startswith(("#", '"""')))
    return len({x.start[0] for x in code})


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
        used = {"hashlib": "hashlib.", "math": "math."}
        imports = [f"import {name}" for name, use in used.items() if use in functions]
        imports += [*([""] if imports else []), "import torch"]
        imports += ["import torch.nn.functional as F"] if "F.pad" in functions else []
        begin = "self.names = {p: name for name, p in named_parameters}"
        named = "named_parameters" if self.rounds else "parameters"
        text = _FILE.substitute(
            name=self.name,
            weights=_WEIGHTS[self.format],
            given=f"model.{named}()",
            about=self._about(),
            imports="\n".join(imports),
            options=self._options(),
            functions=functions,
            argument=named if self.rounds else "params",
            params="self.names" if self.rounds else "params",
            begin=textwrap.indent(begin, " " * 8) if self.rounds else "",
            prepare=textwrap.indent("\n".join(prepare), " " * 12),
            decode=f"decode_{self.format.name}",
            update=textwrap.indent("\n".join(update), " " * 8),
        )
        return text.replace("\n\n        super", "\n        super")

    def _about(self) -> str:
        states = ", ".join(
            f"`{name}` in {'float32' if f.is_exact else f.name}" for name, f in self.states.items()
        )
        if self.has_exact_vectors:
            states += " (those of vectors in float32)"
        mode = f'mcf.collage(torch.optim.{self.name}(...), "{_MODES[self.format]}")'
        licence = "; the update from torch, BSD-3-Clause" if self.kind.functions else ""
        about = [
            f"The bits are those of {mode} over parameters in {self.format.name}. "
            f"States: {states or 'in float32'}. Save `optimizer.state_dict()` with the model: it "
            "has the tails. `optimizer.number(p)` is a whole weight in float32.",
            f"Printed by `python -m mcftensor export {self.command} --format {self.format.name}`, "
            f"mcftensor {mcftensor.__version__}, torch {torch.__version__}. Source: "
            f"https://github.com/mcftensor/mcftensor, Apache-2.0{licence}.",
        ]
        return "\n\n".join(textwrap.fill(x, WIDTH, break_on_hyphens=False) for x in about)

    def _options(self) -> str:
        found = inspect.signature(self.kind.optimizer).parameters
        options = {name: found[name].default for name in self.kind.options.split()}
        if self.command == "sgd":
            options["momentum"] = 0.9
        items = [f'"{name}": {x!r}'.replace("'", '"') for name, x in options.items()]
        line = "{" + ", ".join(items) + "}"
        return (
            line if len(line) < WIDTH - 10 else "\n".join(["{", *(f"    {x}," for x in items), "}"])
        )

    def _prepare(self) -> list[str]:
        """Return the lines that convert a parameter and make its first states."""
        lines, (condition, reason) = [], self.kind.require
        if condition:
            lines = [f"if not {condition}:", f'    raise ValueError("{self.name}: {reason}")']
        made = '{"tail": tail}'
        if self.rounds:
            self.code.add_source(write_counts._salted, _SALT=write_counts._SALT)
            made = '{"tail": tail, "count": count + 1}'
            lines += [
                "salt = _salted(self.names[p]) if p in self.names else 0",
                "count = torch.tensor(salt, device=p.device)",
                _INDEX,
            ]
        lines += ["x = p.detach().to(torch.float32)"]
        encoded = self._encoded(self.format, "x")
        return [*lines, f"p.data, tail = {encoded}", f"self.state[p] = {made}"]

    def _update(self) -> list[str]:
        """Return the lines that take a step of one parameter."""
        lines = [f'weight = {self._decoded(self.format)}(p, state["tail"])']
        lines += ['count = state["count"]', _INDEX] if self.rounds else []
        for name, f in self.states.items():
            decode = "None" if f.is_exact or f.arithmetic == "plain" else self._decoded(f)
            lines += [f'{name} = read(state, "{name}", {decode}, weight)']
        update = textwrap.dedent(self.kind.update).strip()
        if self.kind.rule:
            self._print_rule()
            return [*lines, *update.splitlines(), *self._after_rule()]
        module = importlib.import_module(f"torch.optim._{self.command}")
        *others, step = [getattr(module, name) for name in self.kind.functions]
        for function in others:
            self.code.add_source(function)
        self.code.add_source(step, self.kind.stored if self.rounds else (), **self.kind.known)
        if self.rounds:
            update = Template(update).substitute(store=", store=store")
            return [*lines, *self._storing(), *update.splitlines()]
        return [*lines, *Template(update).substitute(store="").splitlines(), *self._after_step()]

    def _print_rule(self) -> None:
        rule = RULES[self.kind.rule]
        if rule.by_step is not None:
            root = "The square root, rounded to nearest."
            self.code.add(record_calls("sqrt", root, eft.sqrt, {"x": torch.ones(1, device="cpu")}))
            self.code.add_source(integer_power)
            self.code.add_source(rule.by_step)
        self.code.add_source(rule.fixed)
        self.code.add_source(rule.update, **self.kind.known)

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
        lines = [f'leading, state["tail"] = {moved_weight}', "p.copy_(leading)"]
        written = [
            f'state["{name}"] = {self._written(f, name, i)}'
            for i, (name, f) in enumerate(self.states.items(), 1)
        ]
        if self.has_exact_vectors:
            self.code.add_source(is_vector)
            of_vectors = [f'state["{name}"] = {name}' for name in self.states]
            written = [part for x in written for part in _divided(x, 12)]
            written = ["if is_vector(p.shape):", *_inner(of_vectors), "else:", *_inner(written)]
        return [*lines, *written, *(['state["count"] = count + 1'] if self.rounds else [])]

    def _after_step(self) -> list[str]:
        """Return the lines that store a weight and states that are exact."""
        encoded = self._encoded(self.format, "weight")
        lines = [f'leading, state["tail"] = {encoded}', "p.copy_(leading)"]
        return [*lines, *(f'state["{name}"] = {name}' for name in self.states)]

    def _storing(self) -> list[str]:
        """Return the lines before a step whose operations round one by one."""
        weight, decode = self._encoded(self.format, "x"), self._decoded(self.format)
        lines, body = list[str](), ["if x is weight:"]
        rounded = [f'leading, state["tail"] = {weight}', "count.add_(1)", "p.copy_(leading)"]
        body += _inner([*rounded, f'x.copy_({decode}(p, state["tail"]))'])
        for name, f in self.states.items():
            self.code.add_source(write_counts.unwritten, _SALT=write_counts._SALT)
            self.code.add_source(write_counts.count_beside)
            lines += [  # zeros were written first
                'state["step"] = state.get("step", 0) + 1',
                f'own = count_beside(count, "{name}") + state["step"]',
            ]
            stored, encoded = f'state["{name}"]', self._encoded(f, "x").replace("count", "own")
            rounded = [f"{stored} = {encoded}", f"x.copy_({self._decoded(f)}(*{stored}))"]
            self.code.add_source(is_vector)
            body += ["elif is_vector(p.shape):", *_inner([f"{stored} = x"])]
            body += ["else:", *_inner(rounded)]
        return [*lines, "", "def store(x):", *_inner(body), ""]

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


def _divided(line: str, margin: int) -> list[str]:
    """Return a line in which noise is made, or two if it is too long."""
    if margin + len(line) <= WIDTH:
        return [line]
    beginning, _, noise = line.removesuffix(")").rpartition(", balanced")
    return [f"noise = balanced{noise}", f"{beginning}, noise)"]


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


_INDEX = "index = torch.arange(p.numel(), device=p.device).view(p.shape).to(torch.int32)"


def run_export(options: argparse.Namespace) -> int:
    """Print an optimizer as a file: the command `export`."""
    say(export(options.optimizer, named(options.format)).removesuffix("\n"))
    return 0
