"""Weights on the hosts of several processes, held against expansions on the devices."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

import mcftensor as mcf
from support.helpers import assert_same_bits
from support.on_host import OPTIMIZERS, assert_follows, own
from support.ranks import on_ranks
from support.sharded import Network, by_blocks


def network():
    model = Network().bfloat16()
    del model.unused  # DistributedDataParallel waits for its gradients
    return model


def backward(model, step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(7, (3, 5), generator=generator)
    model(tokens).float().square().mean().backward()


def train(model, weights, optimizer, steps=range(4), clip=False):
    for step in steps:
        backward(model, step)
        if clip:
            clip_grad_norm_(weights.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    states = [{k: own(x) for k, x in optimizer.state[p].items()} for p in weights.parameters()]
    return [own(p.detach()) for p in weights.parameters()], states


def released(weights, optimizer):
    mcf.step_in_backward(weights, optimizer, bucket_bytes=0)


@pytest.mark.parametrize("way", ["plain", "clipped", "in backward", "accumulated"])
@pytest.mark.parametrize("optimizer", ["for-loop", "fused compact"])
@on_ranks(2)
def test_fully_shard(optimizer, way):
    found = []
    for on_host in (True, False):
        model = network()
        if on_host:
            weights = mcf.host.weights(by_blocks(model), mcf.bf16i16)
        else:
            weights = by_blocks(mcf.as_expansion(model, mcf.bf16i16))
        its = OPTIMIZERS[optimizer](weights.parameters())
        if way == "in backward":
            released(weights, its)
        if way == "accumulated":
            mcf.accumulate_gradients(weights)
            backward(model, 10)
        found.append(train(model, weights, its, clip=way == "clipped"))
        if on_host:
            assert all(p.to_local().shape[0] < p.shape[0] for p in weights.blocks.parameters())
            assert_follows(model, weights)
    assert_same_bits(*found)


@pytest.mark.parametrize("way", ["plain", "clipped", "in backward"])
@on_ranks(2)
def test_distributed_data_parallel(way):
    found = []
    for on_host in (True, False):
        model = network()
        if not on_host:
            mcf.as_expansion(model, mcf.bf16i16)
        parallel = DDP(model)
        weights = mcf.host.weights(parallel, mcf.bf16i16) if on_host else model
        its = OPTIMIZERS["fused compact"](weights.parameters())
        if way == "in backward":
            released(weights if on_host else parallel, its)
        found.append(train(parallel, weights, its, clip=way == "clipped"))
        if on_host:
            assert list(weights.state_dict()) == list(model.state_dict())
            assert_follows(model, weights)
    assert_same_bits(*found)


@on_ranks(2)
def test_states_of_shards_are_resumed():
    make = OPTIMIZERS["fused compact"]
    model = by_blocks(network())
    host = mcf.host.weights(model, mcf.bf16i8)
    optimizer = make(host.parameters())
    train(model, host, optimizer, range(2))
    saved = get_model_state_dict(host), optimizer.state_dict()
    saved = [
        torch.utils._pytree.tree_map(
            lambda x: x.clone() if x is not None and hasattr(x, "clone") else x, tree
        )
        for tree in saved
    ]
    expected = train(model, host, optimizer, range(2, 4))

    again = by_blocks(network())
    host = mcf.host.weights(again, mcf.bf16i8)
    optimizer = make(host.parameters())
    set_model_state_dict(host, saved[0])
    optimizer.load_state_dict(saved[1])
    assert_follows(again, host)
    assert_same_bits(train(again, host, optimizer, range(2, 4)), expected)


@on_ranks(2)
def test_offloaded_shards_are_copied_once_more():
    model = by_blocks(network(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    host = mcf.host.weights(model, mcf.bf16i16)
    found = train(model, host, OPTIMIZERS["fused compact"](host.parameters()))
    assert_follows(model, host)
    other = by_blocks(mcf.as_expansion(network(), mcf.bf16i16))
    assert_same_bits(found, train(other, other, OPTIMIZERS["fused compact"](other.parameters())))


@on_ranks(2)
def test_what_is_refused():
    model = network()
    with pytest.raises(ValueError, match="FullyShardedDataParallel keeps gradients"):
        mcf.host.weights(FullyShardedDataParallel(network(), device_id=torch.device("cpu")))
    with pytest.raises(ValueError, match="find_unused_parameters=True"):
        mcf.host.weights(DDP(network(), find_unused_parameters=True))
    with pytest.raises(ValueError, match="call it with the DistributedDataParallel itself"):
        mcf.host.weights(nn.Sequential(DDP(network())))
    mcf.host.weights(model)
    with pytest.raises(ValueError, match="call it with the DistributedDataParallel itself"):
        DDP(model)
