"""Random sequences of what training scripts do with parameters and optimizers, against float64.

The reference is the same optimizer of torch over float64 parameters, which shares no code with
expansions: it is given the same gradients, and whatever else is done to the parameters.
"""

import copy
import io
import itertools
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

import mcftensor as mcf

FORMATS = {x.name: x for x in (mcf.bf16x2, mcf.bf16x3, mcf.fp32x2, mcf.fp64x2)}
# Terms of parameters of one optimizer are of one dtype, as its states in `collage` by name are.
OTHER = {"bf16x2": "bf16x3", "bf16x3": "bf16x2", "fp32x2": "fp32x3", "fp64x2": "fp64x2"}
PRECISION = {"bf16x2": 16, "bf16x3": 24, "fp32x2": 48, "fp32x3": 52, "fp64x2": 52}
PATHS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.875, "weight_decay": 0.125}),
    "plain SGD": (torch.optim.SGD, {}),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.125}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.25}),
    "AMSGrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.125}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.125}),
    "RAdam": (torch.optim.RAdam, {}),
}
FUSED = ("SGD", "plain SGD", "Nesterov", "Adam", "AdamW", "AMSGrad", "Adagrad")
# What they add to gradients, or multiply them by, is rounded as gradients are.
BY_GRADIENTS = ("SGD", "Adam", "Adagrad")


def takes_groups(name):
    """Whether one of PyTorch's optimizers makes the states of groups that are added: Adagrad of
    releases before 2.12 does not, and fails over plain tensors too."""
    cls, options = OPTIMIZERS[name]
    p, q = (nn.Parameter(torch.ones(1)) for _ in range(2))
    q.grad = torch.ones(1)
    optimizer = cls([p], **options)
    optimizer.add_param_group({"params": [q]})
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


ADDS_GROUPS = [name for name in OPTIMIZERS if takes_groups(name)]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4)]
LAYOUTS = ["contiguous", "transposed", "strided", "shared"]

INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}

numbers = st.integers(0, 2**31)
formats = st.sampled_from(sorted(FORMATS))


def random(shape, seed):
    """Numbers that every dtype holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-31, 32, shape, generator=generator).double() / 16


def laid_out(x, format, layout):
    """An expansion of numbers that lies in memory as this layout says, as a parameter."""
    if layout == "transposed" and x.dim() > 1:
        x = mcf.as_expansion(x.mT.contiguous(), format).mT
    elif layout == "strided" and x.dim():
        x = mcf.as_expansion(x.repeat_interleave(2, -1), format)[..., ::2]
    elif layout == "shared":
        x = mcf.as_expansion(torch.stack([x, x]), format)[1]
    else:
        x = mcf.as_expansion(x, format)
    return nn.Parameter(x)


def exact(x):
    return mcf.as_plain(x.detach(), torch.float64)


def assert_normalized(x):
    """The leading term is nearest, and on ties the even one, and so is each of what is left."""
    rest = torch.zeros(x.shape, dtype=torch.float64)  # what follows a term
    for last, term in itertools.pairwise(x.components[::-1]):
        rest = rest + last.double()
        assert not term.isnan().any()
        for end in (-torch.inf, torch.inf):
            neighbour = term.nextafter(torch.full_like(term, end))
            other = (term.double() - neighbour.double() + rest).abs()
            is_even = term.view(INTEGERS[term.dtype]) % 2 == 0
            error = rest.abs()
            assert ((error < other) | ((error == other) & is_even) | (other == torch.inf)).all()


class Training(RuleBasedStateMachine):
    """Parameters that are expansions, and the same in float64; an optimizer over each."""

    @initialize(
        name=st.sampled_from(sorted(OPTIMIZERS)),
        path=st.sampled_from(sorted(PATHS)),
        format=formats,
        shape=st.sampled_from(SHAPES),
        mode=st.sampled_from(["plus", "full"]),
        lr=st.sampled_from([2.0**-7, 0.01, torch.tensor(0.01, dtype=torch.float64)]),
        seed=numbers,
    )
    def begin(self, name, path, format, shape, mode, lr, seed):
        self.name, self.mode, self.lr = name, mode, lr
        self.path = path if path != "fused" or name in FUSED else "foreach"
        if isinstance(lr, torch.Tensor) and self.path == "foreach":
            self.path = "for-loop"  # as torch demands
        self.cls, self.options = OPTIMIZERS[name]
        self.base = format
        self.parameters, self.references, self.formats = [], [], []
        self.allowed, self.moved = [], []
        self.optimizer = self.other = None
        self._new(format, shape, "contiguous", seed)
        self.optimizer = self._optimizer(self.parameters)
        self.reference = self.cls(self.references, lr=self._lr(), **self.options, foreach=False)
        mcf.collage(self.optimizer, mode)

    def _lr(self):
        return self.lr.clone() if isinstance(self.lr, torch.Tensor) else self.lr

    def _optimizer(self, parameters):
        flags = PATHS[self.path]
        if self.name not in FUSED:
            flags = {"foreach": flags["foreach"]}
        return self.cls(parameters, lr=self._lr(), **self.options, **flags)

    def _new(self, format, shape, layout, seed):
        x = random(shape, seed) + 1.0
        self.parameters.append(laid_out(x, FORMATS[format], layout))
        self.references.append(nn.Parameter(x.clone()))
        self.formats.append(format)
        self.allowed.append(0.0)
        self.moved.append(0.0)

    # ---------------------------------------------------------------------------------- steps

    def _gradients(self, seed, missing, scale=1.0):
        """Gradients for all but some, the same on both sides."""
        for i, (p, q) in enumerate(zip(self.parameters, self.references, strict=True)):
            if not p.requires_grad or (missing >> i) & 1:
                p.grad = q.grad = None
                continue
            g = random(p.shape, seed + i)
            p.grad = mcf.as_plain(torch.empty_like(p), p.dtype).copy_(g * scale)
            q.grad = g * scale

    def _share_gradients(self):
        """What has been done to gradients is done to those of the reference."""
        for p, q in zip(self.parameters, self.references, strict=True):
            q.grad = None if p.grad is None else p.grad.double().clone()

    def _step_reference(self):
        before = [q.detach().clone() for q in self.references]
        self.reference.step()
        for i, (old, q) in enumerate(zip(before, self.references, strict=True)):
            if q.numel():
                step = (q.detach() - old).abs().max().item()
                self.moved[i] = max(self.moved[i], step)
                self._allow(i, self.moved[i])

    def _allow(self, i, step=0.0):
        """An error of a step's last bits, and one rounding of the parameter."""
        bits = PRECISION[self.formats[i]]
        plain = self.mode == "plus" or self.name in BY_GRADIENTS
        of_state = min(bits - 6, self._bits() - 4 if plain else bits)
        if self.name == "NAdam":
            of_state = min(of_state, 18)  # torch keeps a product of betas in float32
        size = self.references[i].detach().abs().max().item() if self.references[i].numel() else 0
        self.allowed[i] += step * 2.0**-of_state + 4 * size * 2.0**-bits

    def _bits(self):
        return {"bf16x2": 8, "bf16x3": 8, "fp32x2": 24, "fp64x2": 52}[self.base]

    @rule(seed=numbers, missing=st.sampled_from([0, 0, 0, 1, 2, 5]))
    def step(self, seed, missing):
        self._gradients(seed, missing)
        self.optimizer.step()
        self._step_reference()

    @rule(seed=numbers, most=st.sampled_from([0.25, 100.0]))
    def clipped_step(self, seed, most):
        self._gradients(seed, 0)
        norms = [
            nn.utils.clip_grad_norm_(x, most, foreach=self.path != "for-loop")
            for x in (self.parameters, self.references)
        ]
        torch.testing.assert_close(
            torch.as_tensor(norms[0]).double(),
            torch.as_tensor(norms[1]).double(),
            rtol=2e-2,
            atol=1e-6,
        )
        self._share_gradients()
        self.optimizer.step()
        self._step_reference()

    @rule(seed=numbers, overflows=st.booleans())
    def scaled_step(self, seed, overflows):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        self._gradients(seed, 0, 2.0**4)
        given = [p for p in self.parameters if p.grad is not None and p.numel()]
        if not given:
            return
        scaler.scale(torch.ones(()))  # which makes its scale
        if overflows:
            given[0].grad[(-1,) * given[0].dim()] = torch.inf
        scaler.unscale_(self.optimizer)
        self._share_gradients()  # before a step that writes to them, as Nesterov's
        scaler.step(self.optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0**3 if overflows else 2.0**4)
        if not overflows:
            self._step_reference()
        self.zero_grad(True)

    @precondition(lambda self: self.name == "plain SGD" and self.path == "for-loop")
    @rule(seed=numbers)
    def sparse_step(self, seed):
        self._gradients(seed, 0)
        for p in self.parameters:
            if p.grad is not None and p.dim() == 2:
                p.grad = p.grad.to_sparse(1)
        self.optimizer.step()
        self._step_reference()
        self.zero_grad(True)

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)
        self.reference.zero_grad(set_to_none=to_none)
        assert all(p.grad is None or not p.grad.any() for p in self.parameters)

    # ----------------------------------------------------------------------------- parameters

    @precondition(lambda self: len(self.parameters) < 5 and self.name in ADDS_GROUPS)
    @rule(
        longer=st.booleans(),
        shape=st.sampled_from(SHAPES),
        layout=st.sampled_from(LAYOUTS),
        seed=numbers,
    )
    def add_param_group(self, longer, shape, layout, seed):
        format = OTHER[self.base] if longer and OTHER[self.base] in FORMATS else self.base
        self._new(format, shape, layout, seed)
        self.optimizer.add_param_group({"params": self.parameters[-1:], "lr": self._lr()})
        self.reference.add_param_group({"params": self.references[-1:], "lr": self._lr()})

    @rule(i=st.integers(0, 4))
    def freeze_or_thaw(self, i):
        p = self.parameters[i % len(self.parameters)]
        p.requires_grad_(not p.requires_grad)
        p.grad = self.references[i % len(self.parameters)].grad = None

    @rule(i=st.integers(0, 4), how=st.sampled_from(["data", "no_grad", "copy", "components"]))
    def write(self, i, how):
        """What trainers do to parameters by hand."""
        i %= len(self.parameters)
        p, q = self.parameters[i], self.references[i]
        q.data.mul_(0.75)
        if how == "data":
            p.data.mul_(0.75)
        elif how == "no_grad":
            with torch.no_grad():
                p.mul_(0.75)
        elif how == "copy":
            with torch.no_grad():
                p.copy_(mcf.as_expansion(exact(p) * 0.75, p.format))
        else:
            p.data = mcf.as_expansion(exact(p) * 0.75, p.format)
        self._allow(i)

    @rule(i=st.integers(0, 4))
    def tie(self, i):
        """Modules that share a parameter show it once."""
        shared = self.parameters[i % len(self.parameters)]
        module = nn.Module()
        module.a, module.b = shared, shared
        assert list(module.parameters()) == [shared] if shared.dim() == 0 else True
        assert len(list(module.parameters())) == 1
        copied = copy.deepcopy(module)
        assert copied.a is copied.b
        assert exact(copied.a).equal(exact(shared))

    # ----------------------------------------------------------------- copies and checkpoints

    def _replace(self, parameters, optimizer):
        self.parameters, self.optimizer = parameters, optimizer
        mcf.collage(self.optimizer, self.mode)

    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def copies(self, how):
        pair = self.parameters, self.optimizer
        old = [exact(p) for p in self.parameters]
        kept = [p.detach().clone() for p in self.parameters]
        if how == "deepcopy":
            parameters, optimizer = copy.deepcopy(pair)
        else:
            parameters, optimizer = pickle.loads(pickle.dumps(pair))
        with torch.no_grad():
            for p in self.parameters:
                p.zero_()  # of which copies see nothing
        assert all(exact(p).equal(x) for p, x in zip(parameters, old, strict=True))
        assert all(
            a.equal(b)
            for p, x in zip(parameters, kept, strict=True)
            for a, b in zip(p.components, x.components, strict=True)
        )
        for new, p in zip(parameters, self.parameters, strict=True):
            assert new.format is p.format
            assert new.requires_grad == p.requires_grad
        self._replace(parameters, optimizer)

    @rule(path=st.sampled_from(sorted(PATHS)), file=st.booleans())
    def resume(self, path, file):
        """From state dicts, in another path."""
        if path == "fused" and self.name not in FUSED:
            path = "foreach"
        if path == "foreach" and isinstance(self.lr, torch.Tensor):
            path = "for-loop"
        content = {"model": list(self.parameters), "optimizer": self.optimizer.state_dict()}
        if file:
            buffer = io.BytesIO()
            torch.save(content, buffer)
            buffer.seek(0)
            content = torch.load(buffer, weights_only=True)
        self.path = path
        parameters = []
        for p, x in zip(self.parameters, content["model"], strict=True):
            new = nn.Parameter(torch.full_like(p, 7.0), requires_grad=p.requires_grad)
            with torch.no_grad():
                new.copy_(x)
            parameters.append(new)
        self._resume(parameters, content["optimizer"])

    def _resume(self, parameters, state):
        groups = [list(group["params"]) for group in self.optimizer.param_groups]
        places = {id(p): i for i, p in enumerate(self.parameters)}
        first, *others = ([parameters[places[id(p)]] for p in group] for group in groups)
        optimizer = self._optimizer(first)
        for group in others:
            optimizer.add_param_group({"params": group})
        flags = PATHS[self.path]
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group.update({name: flags[name] for name in flags if name in group})
        self._replace(parameters, optimizer)

    @rule(mode=st.sampled_from(["plus", "full"]))
    def change_mode(self, mode):
        if mode != self.mode:  # states are rounded, or begin to be exact
            self.mode = mode
            mcf.collage(self.optimizer, mode)
            if mode == "full":
                for i, moved in enumerate(self.moved):
                    self.allowed[i] += 8 * moved * 2.0 ** (4 - self._bits())

    @precondition(lambda self: OTHER[self.base] in FORMATS)
    @rule()
    def change_format(self):
        """Parameters are converted, and their states are loaded."""
        state = self.optimizer.state_dict()
        parameters = []
        for i, p in enumerate(self.parameters):
            self._allow(i)
            self.formats[i] = OTHER[self.formats[i]]
            self._allow(i)
            new = mcf.as_expansion(p.detach(), FORMATS[self.formats[i]])
            parameters.append(nn.Parameter(new, requires_grad=p.requires_grad))
        self.base = OTHER[self.base]
        self._resume(parameters, state)

    # ----------------------------------------------------------------------------- invariants

    @invariant()
    def is_what_float64_says(self):
        for i, (p, q) in enumerate(
            zip(getattr(self, "parameters", ()), getattr(self, "references", ()), strict=True)
        ):
            assert isinstance(p, nn.Parameter)
            assert p.format.name == self.formats[i]
            assert p.shape == q.shape
            error = (exact(p) - q.detach()).abs()
            assert not error.numel() or error.max().item() <= self.allowed[i], (
                f"parameter {i}, {self.name}, {self.path}, {self.mode}: "
                f"{error.max().item():.3e} > {self.allowed[i]:.3e}"
            )
            assert_normalized(p)


def sequences(count):
    run_state_machine_as_test(
        Training,
        settings=settings(
            max_examples=count,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_sequences():
    sequences(30)  # the rest in `test_many_sequences`


@pytest.mark.slow
def test_many_sequences():
    sequences(1000)
