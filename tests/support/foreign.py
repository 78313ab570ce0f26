"""Checkpoints as other programs lay them out, each of the same master weights and moments.

What a function writes holds what `MASTERS` and `MOMENTS` say, as exactly as its layout can.
"""

import contextlib
import dataclasses
import enum
import json
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

save_file = pytest.importorskip("safetensors.torch").save_file

ROOT = Path(__file__).parents[2]

SHAPES = {
    "embed.weight": (11, 6),
    "layers.0.weight": (6, 6),
    "layers.0.bias": (6,),
    "norm.weight": (6,),
}
STEPS = 7


class Model(nn.Module):
    """With the parameters of the checkpoints."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.norm = nn.RMSNorm(6)


def _values(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


MASTERS = _values(0)
MOMENTS = {
    "exp_avg": _values(1, 1e-3),
    "exp_avg_sq": {name: x.square() for name, x in _values(2, 1e-3).items()},
}


def groups(**more):
    hyperparameters = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return [{**hyperparameters, **more, "params": list(range(len(SHAPES)))}]


def states(**more):
    """By number; `more` are functions of the name of a parameter."""
    return {
        i: {
            **{key: x[name] for key, x in MOMENTS.items()},
            **{key: make(name) for key, make in more.items()},
        }
        for i, name in enumerate(SHAPES)
    }


def torch_file(folder):
    path = folder / "run.pt"
    optimizer = {
        "state": states(step=lambda name: torch.tensor(float(STEPS))),
        "param_groups": groups(),
    }
    scheduler = {"last_epoch": STEPS, "base_lrs": [3e-4]}
    torch.save({"model": MASTERS, "optimizer": optimizer, "scheduler": scheduler}, path)
    return path


def lightning(folder):
    path = folder / "last.ckpt"
    optimizer = {
        "state": states(step=lambda name: torch.tensor(float(STEPS))),
        "param_groups": groups(),
    }
    content = {"state_dict": MASTERS, "optimizer_states": [optimizer], "lr_schedulers": []}
    torch.save({**content, "epoch": 1, "global_step": STEPS}, path)
    return path


def transformers(folder):
    """A folder of the Trainer."""
    folder = folder / "checkpoint-7"
    folder.mkdir()
    save_file(MASTERS, folder / "model.safetensors", metadata={"format": "pt"})
    optimizer = {
        "state": states(step=lambda name: torch.tensor(float(STEPS))),
        "param_groups": groups(),
    }
    torch.save(optimizer, folder / "optimizer.pt")
    return folder


def shards(folder, suffix):
    """Weights alone, in several files and an index."""
    folder = folder / f"sharded{suffix}"
    folder.mkdir()
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    where = {}
    for i, (name, x) in enumerate(MASTERS.items(), 1):
        file = f"{stem}-{i:05}-of-{len(SHAPES):05}{suffix}"
        save = save_file if suffix == ".safetensors" else torch.save
        save({name: x}, folder / file)
        where[name] = file
    content = {"metadata": {"total_size": 4}, "weight_map": where}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(content))
    return folder


def safetensors_shards(folder):
    return shards(folder, ".safetensors")


def torch_shards(folder):
    return shards(folder, ".bin")


def deepspeed(folder, stage=2):
    """A universal checkpoint."""
    root = folder / "run"
    tag = root / "global_step7_universal"
    for name, x in MASTERS.items():
        of_name = tag / "zero" / name
        of_name.mkdir(parents=True)
        for key, values in {"fp32": MASTERS, **MOMENTS}.items():
            whole = {"param": values[name], "cat_dim": 0}
            torch.save(values[name].flatten() if stage == 3 else whole, of_name / f"{key}.pt")
        torch.save(STEPS, of_name / "step.pt")
        assert x.dtype == torch.float32
    if stage == 3:
        shapes = [{name: torch.Size(shape) for name, shape in SHAPES.items()}]
        path = tag / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        torch.save({"param_shapes": shapes, "module": {}}, path)
    (root / "latest_universal").write_text(tag.name)
    return root


def deepspeed_stage_3(folder):
    return deepspeed(folder, stage=3)


def zero(folder, stage=2, world=3, more=None):
    """ZeRO's own files: two groups, in one part for each process."""
    root = folder / "run"
    path = root / f"global_step{STEPS}"
    path.mkdir(parents=True)
    (root / "latest").write_text(path.name)
    names = [[n for n in SHAPES if (len(SHAPES[n]) > 1) == is_wide] for is_wide in (True, False)]
    names = [group for group in names if group]
    shapes = [{name: torch.Size(SHAPES[name]) for name in group} for group in names]
    parts = {
        key: [_parts([values[name] for name in group], stage, world) for group in names]
        for key, values in {"fp32": MASTERS, **MOMENTS}.items()
    }
    (options,) = groups()
    model = {
        "module": {name: x.bfloat16() for name, x in MASTERS.items()},
        "buffer_names": [],
        "param_shapes": shapes,
        "shared_params": {},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "ds_version": "0.19.6",
    } | (more or {})
    for rank in range(world):
        base = {
            "state": {
                i: {"step": torch.tensor(float(STEPS)), **{k: parts[k][i][rank] for k in MOMENTS}}
                for i in range(len(names))
            },
            "param_groups": [{**options, "params": [i]} for i in range(len(names))],
        }
        saved = {"partition_count": world, "overflow": False, "ds_version": "0.19.6"}
        masters = [parts["fp32"][i][rank] for i in range(len(names))]
        with deepspeed_classes() as (stage_of, scaler, fragment):
            saved |= {"zero_stage": stage_of(stage), "loss_scaler": scaler(1.0)}
            if stage == 3:
                saved |= {"optimizer_state_dict": base, "fp32_flat_groups": masters}
                empty = {name: torch.empty(0) for name in SHAPES}
                content = {**model, "module": {**model["module"], **empty}}
                torch.save(content, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            else:
                lean = [x[: _lean(names[i], rank, len(x), world)] for i, x in enumerate(masters)]
                saved |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": lean}
                saved |= {"param_slice_mappings": [{"norm.weight": fragment(3, 0)}]}
            file = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": saved, "ds_config": {"a": 1}}, path / file)
    if stage < 3:
        torch.save(model, path / "mp_rank_00_model_states.pt")
    return root


def _parts(values, stage, world):
    """Of each process: of all values in a row, or of each value."""
    rows = [x.flatten() for x in values]
    rows = rows if stage == 3 else [torch.cat(rows)]
    unit = world if stage == 3 else 2 * world
    rows = [torch.cat([x, torch.zeros(-len(x) % unit)]).view(world, -1) for x in rows]
    return list(torch.cat(rows, 1))


def _lean(names, rank, length, world):
    """How much of a part is no padding, which is cut off masters."""
    count = sum(torch.Size(SHAPES[name]).numel() for name in names)
    return min(length, max(0, count - rank * length))


@contextlib.contextmanager
def deepspeed_classes():
    """Classes that pickles name as DeepSpeed's, which is not there when they are read."""
    stages = {f"stage{i}": i for i in range(4)}
    scaler = {"__module__": "deepspeed.runtime.fp16.loss_scaler"}
    fragment = {"__module__": "deepspeed.utils.tensor_fragment"}
    made = (
        enum.IntEnum("ZeroStageEnum", stages, module="deepspeed.runtime.zero.config"),
        dataclasses.make_dataclass("DynamicLossScaler", ["cur_scale"], namespace=scaler),
        dataclasses.make_dataclass("fragment_address", ["numel", "start"], namespace=fragment),
    )
    fakes = {}
    for kind in made:
        parts = kind.__module__.split(".")
        for i in range(1, len(parts) + 1):
            fakes.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        setattr(fakes[kind.__module__], kind.__name__, kind)
    before = dict(sys.modules)
    sys.modules.update(fakes)
    try:
        yield made
    finally:
        for name in fakes:
            sys.modules.pop(name)
            if name in before:
                sys.modules[name] = before[name]


def zero_stage_1(folder):
    return zero(folder, stage=1, world=2)


def zero_stage_3(folder):
    return zero(folder, stage=3)


def megatron(folder, remainders=False, prefix=""):
    """A distributed checkpoint."""
    root = folder / "megatron"
    (root / "iter_0000007").mkdir(parents=True)
    state = {}
    for name, x in MASTERS.items():
        state[name], tail = split(x)
        if not remainders:
            state[name] = x.bfloat16()
        key = "param" if remainders else "fp32_param"
        state[f"{prefix}optimizer.state.{key}.{name}"] = tail if remainders else x
        for moment, values in MOMENTS.items():
            state[f"{prefix}optimizer.state.{moment}.{name}"] = values[name]
    state["rng_state"] = {"any": 1}
    save_distributed(state, root / "iter_0000007")
    (root / "latest_checkpointed_iteration.txt").write_text("7\n")
    return root


def save_distributed(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def torchtitan(folder, under=()):
    """The checkpoints of a run, with weights at the top or under a key."""
    root = folder / "checkpoint"
    (options,) = groups()
    names = options.pop("params") and list(SHAPES)
    step = {name: torch.tensor(float(STEPS)) for name in names}
    optimizer = {
        f"state.{name}.{key}": values[name]
        for key, values in {**MOMENTS, "step": step}.items()
        for name in names
    }
    optimizer |= {f"param_groups.{n}.{key}": x for n in names for key, x in options.items()}
    state = {"optimizer": optimizer, "lr_scheduler": {"last_epoch": STEPS}}
    state |= {"train_state": {"step": torch.tensor(STEPS)}, "dataloader": {"dp_rank_0": b"any"}}
    state |= {under[0]: MASTERS} if under else MASTERS
    save_distributed(state, root / f"step-{STEPS}")
    return root


def torchtitan_under_model(folder):
    return torchtitan(folder, under=("model",))


def distributed(folder):
    """What `get_state_dict` gives, in one object of a script's."""
    (options,) = groups()
    step = torch.tensor(float(STEPS))
    state = {
        name: {"step": step, **{key: x[name] for key, x in MOMENTS.items()}} for name in SHAPES
    }
    optimizer = {"state": state, "param_groups": [{**options, "params": list(SHAPES)}]}
    save_distributed({"app": {"model": MASTERS, "optim": optimizer}}, folder / "saved")
    return folder / "saved"


def megatron_remainders(folder):
    return megatron(folder, remainders=True, prefix="chained_0.")


def split(x):
    """Transformer Engine's, one number at a time."""
    leading, tails = [], []
    for bits in x.flatten().view(torch.int32).tolist():
        low = bits & 0xFFFF
        tail = low - 0x10000 if low >= 0x8000 else low
        high = (bits >> 16) + (tail < 0)
        leading.append((high + 0x8000) % 0x10000 - 0x8000)
        tails.append(tail)
    leading = torch.tensor(leading, dtype=torch.int16).view(torch.bfloat16)
    return leading.view(x.shape), torch.tensor(tails, dtype=torch.int16).view(x.shape)


def transformer_engine(folder, remainders=True):
    path = folder / "te.pt"
    pairs = {name: split(x) for name, x in MASTERS.items()}
    weights = {
        name: pair[0] if remainders else MASTERS[name].bfloat16() for name, pair in pairs.items()
    }
    optimizer = {
        "state": states(master_param=lambda name: pairs[name][1] if remainders else MASTERS[name]),
        "param_groups": groups(step=STEPS, bias_correction=True),
    }
    torch.save({"model": weights, "optimizer": optimizer}, path)
    return path


def transformer_engine_float32(folder):
    return transformer_engine(folder, remainders=False)


EXACT = {
    layout.__name__: layout
    for layout in (
        torch_file,
        lightning,
        transformers,
        safetensors_shards,
        torch_shards,
        deepspeed,
        deepspeed_stage_3,
        zero,
        zero_stage_1,
        zero_stage_3,
        megatron,
        megatron_remainders,
        torchtitan,
        torchtitan_under_model,
        distributed,
        transformer_engine,
        transformer_engine_float32,
    )
}
"""Layouts that hold the masters to the bit."""


def optimi(folder):
    """Weights and compensations of bfloat16."""
    path = folder / "optimi.pt"
    weights = {name: x.bfloat16() for name, x in MASTERS.items()}
    rest = {name: (x - weights[name].float()).bfloat16() for name, x in MASTERS.items()}
    state = states(kahan_comp=lambda name: rest[name])
    for values in state.values():
        values["exp_avg"] = values["exp_avg"].bfloat16()
        values["exp_avg_sq"] = values["exp_avg_sq"].bfloat16()
    optimizer = {
        "state": state,
        "param_groups": groups(step=torch.tensor(STEPS, dtype=torch.int32), kahan_sum=True),
    }
    torch.save({"model": weights, "optimizer": optimizer}, path)
    return path, weights, rest


def flashoptim(folder, bits, compressed):
    """Weights, corrections of some bits, and moments, in codes or not."""
    path = folder / "flashoptim.pt"
    weights = {name: x.bfloat16() for name, x in MASTERS.items()}
    most = {8: 127, 16: 32767}[bits]

    def errors(name):
        x, w = MASTERS[name], weights[name]
        half = torch.exp2(w.float().abs().log2().floor() - 8)
        e = ((x - w.float()) / half).clamp(-1, 1) * most
        e = e.sign() * (e.abs() + 0.5).floor()
        return e.to(torch.int16).view(torch.bfloat16) if bits == 16 else e.bfloat16()

    state = states(error_bits=errors, step=lambda name: torch.tensor(STEPS))
    if compressed:
        for values in state.values():
            for key in MOMENTS:
                codes, scales = _codes(values.pop(key), is_square=key == "exp_avg_sq")
                values[f"{key}::quantized"] = codes.bfloat16()
                values[f"{key}::scales"] = scales.view(torch.bfloat16)
    optimizer = {"state": state, "param_groups": groups(master_bytewidth=2 + bits // 8)}
    torch.save({"model": weights, "optimizer": optimizer}, path)
    return path


def _codes(x, is_square):
    x = x.sqrt() if is_square else x
    padded = torch.zeros(-(-x.numel() // 32) * 32)
    padded[: x.numel()] = x.flatten()
    scales = padded.view(-1, 32).abs().amax(1).half()
    share = padded.view(-1, 32) / scales.float()[:, None]
    share = share if is_square else 2 * share / (1 + share.abs())
    codes = (share * (255 if is_square else 127) + 0.5).floor()
    return codes.flatten()[: x.numel()].view(x.shape), scales
