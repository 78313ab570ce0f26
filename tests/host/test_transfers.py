"""Copies between a device and the host, on streams that are as late as they may be."""

import contextlib
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mcftensor as mcf
from mcftensor.host import transfers
from mcftensor.host.host_weights import HostWeights
from mcftensor.host.transfers import Link
from support.helpers import assert_same_bits
from support.on_host import (
    OPTIMIZERS,
    accumulated,
    assert_follows,
    left,
    network,
    plainly,
    trained,
)
from support.pretended import pretended

DEVICE = torch.device("cpu")


class Stream:
    """Work that runs when somebody waits for it, and no sooner."""

    def __init__(self, device=DEVICE):
        self.work = []
        self.done = 0
        self.lock = threading.RLock()
        self.mode = Late(self)

    def run(self, until=None):
        with self.lock:
            while self.done < (len(self.work) if until is None else until):
                self.work[self.done]()
                self.done += 1

    def wait_stream(self, other):
        self.work.append(other.run)

    def __enter__(self):
        self.mode.__enter__()

    def __exit__(self, *error):
        self.mode.__exit__(*error)


class Late(TorchDispatchMode):
    """Copies within the context of a stream become its work."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source, is_late = args
        assert is_late
        world.fail_in -= 1
        if world.fail_in == 0:
            raise torch.OutOfMemoryError("of the device")
        self.stream.work.append(lambda: target.copy_(source))
        return target


class Event:
    """A point in a stream."""

    def __init__(self, device):
        self.point = None

    def record(self, stream):
        self.point = stream, len(stream.work)

    def synchronize(self):
        if self.point:
            stream, until = self.point
            stream.run(until)


world = SimpleNamespace(fail_in=-1)


@pytest.fixture
def device(monkeypatch):
    """A device whose memory is that of the CPU, with one stream that computes at once."""
    world.fail_in, world.pinned, world.recorded = -1, 0, []
    world.current = current = Stream()
    monkeypatch.setattr(current, "wait_stream", lambda stream: stream.run(), raising=False)

    def empty(size, *, dtype, device, pin_memory):
        assert pin_memory
        world.pinned += size
        return torch.full((size,), 255, dtype=dtype)

    names = {"uint8": torch.uint8, "device": torch.device, "empty_strided": torch.empty_strided}
    accelerator = SimpleNamespace(current_stream=lambda device: current)
    monkeypatch.setattr(
        transfers,
        "torch",
        SimpleNamespace(Stream=Stream, Event=Event, empty=empty, accelerator=accelerator, **names),
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: world.recorded.append(x.data_ptr())
    )

    def link(self, device):
        if device not in self._links:
            self._links[device] = Link(device, self._staging_bytes)
        return self._links[device]

    monkeypatch.setattr(HostWeights, "_link", link)
    return world


SHAPES = [(), (0,), (3,), (64, 3), (1000,), (7, 5, 3)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("staging_bytes", [1, 1000, 1 << 20])
def test_gradients_go_down(device, staging_bytes):
    link = Link(DEVICE, staging_bytes)
    assert device.pinned <= max(staging_bytes, 2 * transfers.SLOTS * 16)
    with ThreadPoolExecutor(1) as worker:
        found = []
        for shape, dtype in itertools.product(SHAPES, DTYPES):
            x = torch.randn(shape).to(dtype)
            if x.dim() == 3:
                x = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # dense, in another order
            made = link.down(x, worker.submit)
            assert x.data_ptr() in device.recorded
            found.append(worker.submit(lambda x=x, made=made: torch.equal(x, made)))
        assert all(job.result() for job in found)


@pytest.mark.parametrize("staging_bytes", [1, 1000, 1 << 20])
def test_weights_go_up(device, staging_bytes):
    link = Link(DEVICE, staging_bytes)
    target, read = torch.zeros(1000), []
    device.current.work.append(lambda: read.append(target.clone()))  # it computes with it before
    x = torch.randn(1000)
    expected = x.clone()
    link.wait_before()
    link.up(x, target)
    x.fill_(torch.nan)  # the host steps again
    link.wait_after()
    assert torch.equal(target, expected)
    assert not read[0].any()


@pytest.mark.parametrize(
    "options", [{}, {"released": 0}, {"released": 1 << 22}, {"accumulate": True}], ids=str
)
@pytest.mark.parametrize("staging_bytes", [256, 1 << 22])
def test_bits_are_those_of_one_memory(device, monkeypatch, staging_bytes, options):
    make = mcf.host.weights
    monkeypatch.setattr(mcf.host, "weights", lambda *x: make(*x, staging_bytes=staging_bytes))
    way = accumulated if options.get("accumulate") else plainly
    for optimizer in OPTIMIZERS.values():
        model, host, its = trained(True, mcf.bf16i8, optimizer, way, 4, **options)
        _, expansions, other = trained(False, mcf.bf16i8, optimizer, way, 4, **options)
        assert_same_bits(left(host, its), left(expansions, other))
        assert_follows(model, host)


@pytest.mark.parametrize("copy", range(1, 15))
@pytest.mark.parametrize("released", [None, 0], ids=["together", "in backward"])
def test_a_device_without_memory_loses_nothing(device, copy, released):
    """A copy that raises comes out of backward, or of the step; the next pass makes up for it."""
    model = network()
    host = mcf.host.weights(model, mcf.bf16i8)
    optimizer = OPTIMIZERS["fused compact"](host.parameters())
    if released is not None:
        mcf.step_in_backward(host, optimizer, bucket_bytes=released)
    device.fail_in = copy
    with pytest.raises(RuntimeError, match="of the device"):
        plainly(model, host, optimizer, 0)
    model.zero_grad()
    optimizer.zero_grad()
    if released is not None:
        optimizer.step()  # ends the iteration
    for step in range(1, 3):
        plainly(model, host, optimizer, step)
        assert_follows(model, host)


class Pageable(transfers._Slot):
    """As a slot, without pinned memory."""

    def __init__(self, size, device):
        self._memory = torch.empty(size, dtype=torch.uint8)
        self.event = MagicMock()


class Inline:
    """An executor without a thread, since a device is pretended in one thread alone."""

    def __init__(self, *unused):
        pass

    def submit(self, function):
        done = Future()
        try:
            done.set_result(function())
        except RuntimeError as error:
            done.set_exception(error)
        return done

    def shutdown(self):
        pass


def test_no_operand_lies_elsewhere(monkeypatch):
    """On CUDA that is pretended; the host waits for the gradients, by the events of the link."""
    monkeypatch.setattr("mcftensor.host.host_weights.ThreadPoolExecutor", Inline)
    found = []
    for where in ("cpu", "cuda"):
        with pretended(where) if where == "cuda" else contextlib.nullcontext() as pretence:
            if pretence:
                streams = type(torch.accelerator.current_stream(None))  # in order, at once
                monkeypatch.setattr(torch, "Stream", streams)
                monkeypatch.setattr(transfers, "_Slot", Pageable)
                monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
            model = network().to(where)
            host = mcf.host.weights(model, mcf.bf16i8)
            optimizer = OPTIMIZERS["fused compact"](host.parameters())
            for step in range(3):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
                model(x.to(where)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model[0].weight[0] = 1.0
            host.state_dict()
            found.append({n: h.detach() for n, h in host.named_parameters() if h.requires_grad})
            assert {h.device.type for h in found[-1].values()} == {"cpu"}
            if pretence:
                assert pretence.waits <= READING
    assert_same_bits(*found)


READING = {
    "host/host_weights.py _to_host",  # when the weights are made
    "host/host_weights.py _take_over",  # what somebody has written on the device
    "patches/distributed.py _converted",  # which `model.to` asks for
}
"""Where the host waits for the device other than by the events of a link."""
