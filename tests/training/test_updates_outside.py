"""Updates that are written by hand outside of the step of an optimizer."""

import asyncio
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import mcftensor as mcf
from mcftensor.tensor import implicit_rounding
from support.helpers import exact

RIGHT = 0.99  # after a hundred updates of 1e-4 from one
UPDATE = 1e-4


@pytest.fixture
def lines():
    """What was seen of lines of code."""
    return implicit_rounding._lines


def by_copy(p, g):
    p.copy_(p - UPDATE * g)


def by_copy_of_data(p, g):
    p.data.copy_(p.data - UPDATE * g)


def by_index(p, g):
    p[...] = p - UPDATE * g


def by_slice(p, g):
    p[:] = p - UPDATE * g


def by_list(p, g):
    torch._foreach_copy_([p], [p - UPDATE * g])


def by_wide_gradients(p, g):
    p.copy_(p - UPDATE * g.float())


def by_wide_list(p, g):
    torch._foreach_copy_([p], torch._foreach_sub([p], [UPDATE * g.float()]))


def by_wide_choice(p, g):
    p.data[:] = torch.where(g > 0, p.data - UPDATE * g.double(), p.data)


def by_wide_rows(p, g):
    p[torch.arange(8)] = p[torch.arange(8)] - UPDATE * g.float()


def by_add(p, g):
    p.add_(g, alpha=-UPDATE)


def by_sub(p, g):
    p.sub_(UPDATE * g)


def by_data(p, g):
    p.data.sub_(UPDATE * g)


def by_operator(p, g):
    p -= UPDATE * g


def by_slice_in_place(p, g):
    p[:] -= UPDATE * g


def by_list_in_place(p, g):
    torch._foreach_add_([p], [g], alpha=-UPDATE)


def by_wide_values(p, g):
    p.copy_(p.float() - UPDATE * g)


LOSES = [by_copy, by_copy_of_data, by_index, by_slice, by_list]
LOSES += [by_wide_gradients, by_wide_list, by_wide_rows]
LOSES += [pytest.param(by_wide_choice, marks=pytest.mark.with_float64("the update is float64"))]
KEEPS = [by_add, by_sub, by_data, by_operator, by_slice_in_place, by_list_in_place, by_wide_values]


class By(Optimizer):
    """An optimizer that updates by a function."""

    def __init__(self, p, update):
        super().__init__([p], {})
        self.p, self.update = p, update

    @torch.no_grad()
    def step(self):
        self.update(self.p, self.p.grad)


def plain_loop(p, update):
    def run():
        with torch.no_grad():
            update(p, p.grad)

    return run


def in_a_hook(p, update):
    @torch.no_grad()
    def hook(p):
        update(p, p.grad)
        p.grad = None

    p.register_post_accumulate_grad_hook(hook)
    return lambda: p.sum().backward()


def in_a_thread(p, update):
    class Threaded(By):
        def step(self):
            def run():
                with torch.no_grad():
                    update(p, p.grad)

            with ThreadPoolExecutor(1) as pool:
                pool.submit(run).result()

    return Threaded(p, update).step


def in_a_coroutine(p, update):
    class Async(By):
        async def step(self):
            with torch.no_grad():
                update(self.p, self.p.grad)

    optimizer = Async(p, update)
    return lambda: asyncio.run(optimizer.step())


def in_a_generator(p, update):
    class Generating(By):
        def step(self):
            with torch.no_grad():
                update(self.p, self.p.grad)
            yield

    optimizer = Generating(p, update)
    return lambda: list(optimizer.step())


def in_a_step(p, update):
    return By(p, update).step


def in_a_method(p, update):
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.step = types.MethodType(lambda self: plain_loop(p, update)(), optimizer)
    return optimizer.step


def in_the_class(p, update):
    own = type("Own", (torch.optim.SGD,), {})
    own.step = lambda self: plain_loop(p, update)()
    optimizer = own([p], lr=0.1)
    return optimizer.step


OUTSIDE = [plain_loop, in_a_hook, in_a_thread, in_a_coroutine, in_a_generator]
INSIDE = [in_a_step, in_a_method, in_the_class]


def run(where, update, format=mcf.bf16x2):
    """The mean after a hundred updates, and the warnings that came."""
    p = nn.Parameter(mcf.as_expansion(torch.ones(8), format))
    step = where(p, update)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(100):
            if where is not in_a_hook:
                p.grad = torch.ones(8, dtype=p.dtype)
            step()
    return exact(p).mean().item(), found


@pytest.mark.thinned(of=12)
@pytest.mark.parametrize("update", LOSES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("where", OUTSIDE, ids=lambda x: x.__name__)
def test_copies_outside_of_a_step_lose_updates_and_warn_once(where, update):
    value, found = run(where, update)
    assert value > 0.999
    (warning,) = found
    assert warning.category is mcf.errors.RoundedWarning
    assert warning.filename == __file__
    assert warning.lineno == update.__code__.co_firstlineno + 1
    assert "p.add_(g, alpha=-lr)" in str(warning.message)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("update", [*LOSES, *KEEPS], ids=lambda x: x.__name__)
@pytest.mark.parametrize("where", INSIDE, ids=lambda x: x.__name__)
def test_all_of_them_are_right_within_a_step(where, update):
    value, found = run(where, update)
    assert value == pytest.approx(RIGHT, abs=1e-3)
    assert not found


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("update", KEEPS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("where", OUTSIDE, ids=lambda x: x.__name__)
def test_updates_in_place_are_right_everywhere(where, update):
    value, found = run(where, update)
    assert value == pytest.approx(RIGHT, abs=1e-3)
    assert not found


# The gradients of the others are scaled, or their leading term is no parameter.
@pytest.mark.parametrize("name", ["bf16x2", "bf16x3", "bf16i16", "bf16i8", "fp16x2", "fp32x2"])
def test_every_format_of_parameters(name):
    _, found = run(plain_loop, by_a_tiny_copy, mcf.Format.from_name(name))
    assert [x.category for x in found] == [mcf.errors.RoundedWarning]


@torch.no_grad()
def test_wide_results_of_leading_terms_that_are_loaded():
    layer = mcf.as_expansion(nn.Linear(4, 4))
    state = layer.state_dict()
    rounded = {name: x * torch.ones(x.shape) for name, x in state.items()}
    with pytest.warns(mcf.errors.RoundedWarning, match="computed from leading terms") as found:
        layer.load_state_dict(rounded)
    assert {x.filename for x in found} == {__file__}


@torch.no_grad()
def test_wide_results_are_copied_without_a_warning_where_nothing_is_erased():
    p = nn.Parameter(mcf.as_expansion(torch.ones(8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p.copy_(p * torch.full((8,), 0.5))


@torch.no_grad()
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_wide_joins_of_leading_terms(join):
    p = nn.Parameter(mcf.as_expansion(torch.randn(4, 4)))
    grown = join([p, torch.zeros(4, 4)])
    whole = nn.Parameter(mcf.as_expansion(torch.full(grown.shape, 0.1)))
    with pytest.warns(mcf.errors.RoundedWarning, match="computed from leading terms"):
        whole.copy_(grown)


def by_a_tiny_copy(p, g):
    p.copy_(p - 1e-9 * g)


@torch.no_grad()
def times(count, update):
    """Copy an update over a parameter that many times."""
    for _ in range(count):
        update()


@torch.no_grad()
def test_weights_of_all_sizes():
    torch.manual_seed(0)
    p = nn.Parameter(mcf.as_expansion(0.02 * torch.randn(300, 70)))
    with pytest.warns(mcf.errors.RoundedWarning, match="for the 4th time"):
        times(4, lambda: p.copy_(p - 1e-4 * torch.randn(300, 70).sign().bfloat16()))


@torch.no_grad()
def test_tails_that_steps_make_are_erased():
    p = nn.Parameter(mcf.as_expansion(torch.randn(64)))
    optimizer = torch.optim.SGD([p], lr=1e-4)

    def step_and_decay():
        p.grad = torch.ones(64, dtype=torch.bfloat16)
        optimizer.step()
        p.copy_(p - 1e-5 * p.compute_tensor)

    with pytest.warns(mcf.errors.RoundedWarning, match="erases"):
        times(4, step_and_decay)


@torch.no_grad()
def test_the_setting():
    p = nn.Parameter(mcf.as_expansion(torch.ones(3)))
    g = torch.ones(3, dtype=torch.bfloat16)
    with mcf.when_rounded("ignore"):
        times(9, lambda: p.copy_(p - 1e-4 * g))

    def update():
        p.copy_(p - 1e-4 * g)

    for _ in range(2):
        with (
            mcf.when_rounded("raise"),
            pytest.raises(mcf.errors.RoundedError, match=r"shape \(3,\)"),
        ):
            times(9, update)


# ------------------------------------------------------------------------- what is no update


def model_of(value=None):
    model = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 3))
    if value is not None:
        for p in model.parameters():
            nn.init.constant_(p, value)
    return model


def loaded(model, plain):
    model.load_state_dict(plain.state_dict())


def initialized(model, plain):
    for p in model.parameters():
        nn.init.ones_(p)
        nn.init.normal_(p)
        if p.dim() > 1:
            nn.init.orthogonal_(p)


def copied(model, plain):
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        p.copy_(q)


def rounded_on_purpose(model, plain):
    for p in model.parameters():
        p.copy_(p.bfloat16())


@pytest.mark.thinned(of=2)
@pytest.mark.parametrize("function", [loaded, initialized, copied, rounded_on_purpose])
@pytest.mark.parametrize("value", [None, 1.0])
@torch.no_grad()
def test_what_is_copied_once_is_no_update(function, value):
    for _ in range(6):
        plain = model_of(value).bfloat16()
        model = mcf.as_expansion(model_of(value).bfloat16())
        function(model, plain)


@torch.no_grad()
def test_loading_the_same_again_is_no_update():
    plain = model_of().bfloat16()
    model = mcf.as_expansion(model_of().bfloat16())
    for _ in range(8):
        model.load_state_dict(plain.state_dict())


@torch.no_grad()
def test_swaps_of_averages_are_no_updates():
    model = mcf.as_expansion(model_of().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    averages = [p.float() for p in model.parameters()]
    for _ in range(8):
        for p in model.parameters():
            p.grad = torch.randn_like(p.compute_tensor)
        optimizer.step()
        for p, average in zip(model.parameters(), averages, strict=True):
            average.lerp_(p.float(), 0.01)
        kept = [p.clone() for p in model.parameters()]
        for p, average in zip(model.parameters(), averages, strict=True):
            p.copy_(average)
        for p, own in zip(model.parameters(), kept, strict=True):
            p.copy_(own)


@torch.no_grad()
def test_large_changes_are_no_updates():
    p = nn.Parameter(mcf.as_expansion(torch.randn(64)))
    for _ in range(8):
        p.copy_(torch.randn(64))
        p.copy_(torch.where(torch.rand(64) < 0.1, 0, p.compute_tensor))


@torch.no_grad()
def test_a_line_is_looked_at_a_few_times(lines, monkeypatch):
    looks = []
    judge = implicit_rounding._is_small_update
    monkeypatch.setattr(
        implicit_rounding, "_is_small_update", lambda *args: looks.append(args) or judge(*args)
    )
    ps = [nn.Parameter(mcf.as_expansion(torch.randn(16))) for _ in range(30)]
    for _ in range(10):
        for p in ps:
            p.copy_(torch.randn(16))
    assert 0 < len(looks) < 12
    (line,) = lines.values()
    del p, ps, looks[:]
    assert line.memory is None


def decayed(x, times=1):
    """The idiom of updates in float32, with the cast back to the dtype of one term."""
    for _ in range(times):
        x.copy_((x.float() * (1 - 1e-3)).to(x.dtype))


@torch.no_grad()
@pytest.mark.parametrize("role", ["value", "parameter"])
@pytest.mark.parametrize("format", [mcf.bf16x2, mcf.bf16x3, mcf.bf16i16], ids=str)
def test_a_cast_to_the_dtype_warns_whatever_it_is_written_to(format, role):
    x = mcf.as_expansion(torch.ones(8), format)
    x = nn.Parameter(x) if role == "parameter" else x
    with pytest.warns(mcf.errors.RoundedWarning, match=rf"copied over a {role} in {format.name}"):
        decayed(x, 6)
    assert exact(x).mean().item() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):  # as the warning says
            x.copy_((mcf.as_plain(x, torch.float32) * (1 - 1e-3)).to(x.format))
    assert exact(x).mean().item() == pytest.approx(0.999**6, rel=2.0**-14)


def written(x, numbers):
    """Write numbers by one line; None is a decay by the cast."""
    for new in numbers:
        x.copy_((x.float() * (1 - 1e-3) if new is None else new).to(x.dtype))


@torch.no_grad()
@pytest.mark.parametrize("role", ["value", "parameter"])
def test_a_line_that_did_something_else_before(lines, role):
    x = mcf.as_expansion(torch.ones(8), mcf.bf16x2)
    x = nn.Parameter(x) if role == "parameter" else x
    numbers = [torch.rand(8) for _ in range(20)]
    with pytest.warns(mcf.errors.RoundedWarning, match="hardly differs"):
        written(x, numbers + [None] * 700)


@torch.no_grad()
@pytest.mark.parametrize("format", [mcf.mxfp8, mcf.ue5m3, mcf.fp32x2], ids=str)
def test_wide_results_into_values_are_no_casts(format):
    x = mcf.as_expansion(torch.ones(2, 32), format)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            x.copy_(mcf.as_plain(x, torch.float64) * (1 - 1e-3))
