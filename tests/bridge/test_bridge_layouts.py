"""Checkpoints of other programs: each layout is read to the bit, with its optimizer's states."""

import os
import pickle
import sys
import types

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import mcftensor as mcf
from mcftensor.bridge import deepspeed as of_deepspeed
from mcftensor.bridge import master_weights
from support import foreign, helpers


def assert_same_bits(x, y):
    """Of tensors by name, in any order."""
    helpers.assert_same_bits(in_order(x), in_order(y))


def in_order(tree):
    return {key: in_order(tree[key]) for key in sorted(tree)} if isinstance(tree, dict) else tree


def plain(state_dict):
    return {name: mcf.as_plain(x, torch.float32) for name, x in state_dict.items()}


def moments(optimizer, model):
    """By state and name, as float32."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        key: {
            names[id(p)]: mcf.as_plain(state[key], torch.float32)
            for p, state in optimizer.state.items()
        }
        for key in foreign.MOMENTS
    }


@pytest.mark.thinned(of=4)
@pytest.mark.parametrize("layout", foreign.EXACT)
def test_weights_and_back(layout, tmp_path):
    source = foreign.EXACT[layout](tmp_path)
    done = mcf.checkpoint.convert_checkpoint(source, tmp_path / "narrow", step=foreign.STEPS)
    assert done.lost == {}
    loaded = mcf.load_file(tmp_path / "narrow")
    assert {x.format for x in loaded.values()} == {mcf.bf16i16}
    assert_same_bits(plain(loaded), foreign.MASTERS)
    mcf.checkpoint.convert_checkpoint(tmp_path / "narrow", tmp_path / "wide", torch.float32)
    assert_same_bits(mcf.load_file(tmp_path / "wide"), foreign.MASTERS)
    assert_same_bits(mcf.load_file(source), foreign.MASTERS)


@pytest.mark.thinned(of=6)
@pytest.mark.parametrize("format", [None, mcf.bf16i16])
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(
    "layout", sorted(foreign.EXACT.keys() - {"safetensors_shards", "torch_shards"})
)
def test_states(layout, is_converted, format, tmp_path):
    source = foreign.EXACT[layout](tmp_path)
    if is_converted:
        mcf.checkpoint.convert_checkpoint(source, tmp_path / "converted", step=foreign.STEPS)
        source = tmp_path / "converted"
    model = mcf.as_expansion(foreign.Model(), format) if format else foreign.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1)
    assert mcf.load_file(source, model, optimizer=optimizer, step=foreign.STEPS) == ([], [])
    assert_same_bits(plain(model.state_dict()), foreign.MASTERS)
    assert_same_bits(moments(optimizer, model), foreign.MOMENTS)
    for p, state in optimizer.state.items():
        assert state["step"] == foreign.STEPS
        assert {getattr(state[key], "format", None) for key in foreign.MOMENTS} == {format}
        assert state["exp_avg"].shape == p.shape
    says_hyperparameters = not layout.startswith(("deepspeed", "megatron"))
    assert optimizer.param_groups[0]["lr"] == (3e-4 if says_hyperparameters else 1)
    assert (
        optimizer.param_groups[0].keys()
        == torch.optim.AdamW(model.parameters()).param_groups[0].keys()
    )
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    optimizer.step()


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("compressed", [False, True])
def test_flashoptim(bits, compressed, tmp_path):
    source = foreign.flashoptim(tmp_path, bits, compressed)
    mcf.checkpoint.convert_checkpoint(source, tmp_path / "converted")
    model = mcf.as_expansion(foreign.Model(), mcf.bf16i16)
    optimizer = torch.optim.AdamW(model.parameters())
    mcf.load_file(tmp_path / "converted", model, optimizer=optimizer)
    for name, x in plain(model.state_dict()).items():
        error = ((x - foreign.MASTERS[name]) / foreign.MASTERS[name]).abs().max()
        assert error < 2.0**-8 / (127 if bits == 8 else 32767)
        assert error > 0 or bits == 16
    for key, values in moments(optimizer, model).items():
        for name, x in values.items():
            expected = foreign.MOMENTS[key][name]
            assert (x - expected).abs().max() <= expected.abs().max() * (0.02 if compressed else 0)


def test_corrections_of_flashoptim_over_all_weights():
    """A correction is so many 127ths, or 32767ths, of half the distance to the next weight."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)
        x = x[x.isfinite()]
        magnitude = x.abs().double()
        next_one = (x.abs().view(torch.int16) + 1).view(dtype).double()
        ulp = torch.where(next_one.isfinite(), next_one - magnitude, torch.nan)
        for most, kind in ((127, torch.int8), (32767, torch.int16)):
            for e in (-most, -5, 0, 1, most):
                found = master_weights.corrected(x, torch.full(x.shape, e, dtype=kind)).double()
                expected = x.double() + e / most * ulp / 2
                tolerance = expected.abs() * 2.0**-23 + 2.0**-149
                known = ~expected.isnan() & (expected.abs() <= torch.finfo(torch.float32).max)
                assert ((found - expected).abs() <= tolerance)[known].all()


def test_optimi(tmp_path):
    source, weights, rest = foreign.optimi(tmp_path)
    mcf.checkpoint.convert_checkpoint(source, tmp_path / "converted", mcf.bf16x2)
    for name, x in mcf.load_file(tmp_path / "converted").items():
        expected = weights[name].double() + rest[name].double()
        assert torch.equal(mcf.as_plain(x, torch.float64), expected)
    states = mcf.load_file(tmp_path / "converted" / "optimizer.safetensors")
    assert states["state.norm.weight.exp_avg"].dtype == torch.bfloat16
    assert "state.norm.weight.kahan_comp" not in states


def test_optimi_itself(tmp_path):
    optimi = pytest.importorskip("optimi")
    torch.manual_seed(0)
    model = foreign.Model().bfloat16()
    optimizer = optimi.AdamW(model.parameters(), lr=1e-3, triton=False)
    for _ in range(20):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "run.pt")
    loaded = mcf.load_file(tmp_path / "run.pt")
    for name, p in model.named_parameters():
        expected = p.detach().double() + optimizer.state[p]["kahan_comp"].double()
        assert torch.equal(mcf.as_plain(loaded[name], torch.float64), expected)


def test_transformers_itself(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "saved", max_shard_size="2KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    mcf.checkpoint.convert_checkpoint(tmp_path / "saved", tmp_path / "converted")
    other = mcf.as_expansion(transformers.GPT2LMHeadModel(config), mcf.bf16i16)
    assert mcf.load_file(tmp_path / "converted", other) == ([], [])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, mcf.as_plain(q, torch.float32))


def test_accelerate_itself(tmp_path):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = foreign.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    accelerator.save_state(tmp_path / "saved")
    other = mcf.as_expansion(foreign.Model(), mcf.bf16i16)
    loaded = torch.optim.AdamW(other.parameters())
    mcf.load_file(tmp_path / "saved", other, optimizer=loaded)
    assert loaded.param_groups[0]["lr"] == 0.3
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, mcf.as_plain(q, torch.float32))
        for key in foreign.MOMENTS:
            theirs = optimizer.optimizer.state[p][key]
            assert torch.equal(theirs, mcf.as_plain(loaded.state[q][key], torch.float32))


class TestMasters:
    def write(self, tmp_path, change):
        content = torch.load(foreign.transformer_engine_float32(tmp_path), weights_only=True)
        change(content)
        torch.save(content, tmp_path / "te.pt")
        return tmp_path / "te.pt"

    def test_of_another_step(self, tmp_path):
        def change(content):
            content["optimizer"]["state"][0]["master_param"] += 1

        with pytest.raises(
            mcf.errors.CheckpointError, match=r"66 of 66 elements of embed\.weight are not"
        ):
            mcf.load_file(self.write(tmp_path, change))

    def test_of_another_shape(self, tmp_path):
        def change(content):
            content["optimizer"]["state"][0]["master_param"] = torch.ones(3)

        with pytest.raises(
            mcf.errors.CheckpointError, match=r"embed.weight is of float32 and shape \(3,\)"
        ):
            mcf.load_file(self.write(tmp_path, change))

    def test_two_groups_need_names(self, tmp_path):
        def change(content):
            (group,) = content["optimizer"]["param_groups"]
            content["optimizer"]["param_groups"] = [
                {**group, "params": [0, 1]},
                {**group, "weight_decay": 0.0, "params": [2, 3]},
            ]
            state = content["optimizer"]["state"]
            state[0], state[1] = state[1], state[0]

        path = self.write(tmp_path, change)
        with pytest.raises(
            mcf.errors.CheckpointError, match="give parameters, their names in the order"
        ):
            mcf.load_file(path)
        names = ["layers.0.weight", "embed.weight", "layers.0.bias", "norm.weight"]
        assert_same_bits(mcf.load_file(path, parameters=names), foreign.MASTERS)
        with pytest.raises(mcf.errors.CheckpointError, match="belongs to another parameter"):
            mcf.load_file(path, parameters=list(foreign.SHAPES))

    def test_names_that_torch_keeps(self, tmp_path):
        def change(content):
            content["optimizer"]["param_groups"][0]["param_names"] = list(foreign.SHAPES)
            content["model"]["buffer"] = torch.ones(6)

        loaded = mcf.load_file(self.write(tmp_path, change))
        assert torch.equal(loaded.pop("buffer"), torch.ones(6))
        assert_same_bits(loaded, foreign.MASTERS)


def test_how_deepspeed_had_divided_a_parameter(tmp_path, monkeypatch):
    """A class of its own stands in its files; it need not be installed."""
    source = foreign.deepspeed(tmp_path)
    (file,) = source.rglob("norm.weight/fp32.pt")
    name = "deepspeed.checkpoint.universal_checkpoint"
    module = types.ModuleType(name)
    module.SubparamShape = type("SubparamShape", (), {"__module__": name})
    shape = module.SubparamShape()
    shape.patterns, shape.shape, shape.partition_dim = ["norm"], ((3, 3),), 0
    with monkeypatch.context() as context:
        for part in ("deepspeed", "deepspeed.checkpoint", name):
            context.setitem(sys.modules, part, module)
        content = {"param": foreign.MASTERS["norm.weight"], "sub_param_shape": shape}
        torch.save(content, file)
    assert_same_bits(mcf.load_file(source), foreign.MASTERS)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("layout", ["megatron", "deepspeed", "torch_file", "transformers"])
def test_pickles_that_would_run_code(layout, tmp_path):
    source, exploded = foreign.EXACT[layout](tmp_path), tmp_path / "exploded"
    kinds = {"megatron": ".metadata", "deepspeed": "step.pt", "transformers": "optimizer.pt"}
    file = source if source.is_file() else next(source.rglob(kinds[layout]))
    if layout == "megatron":
        file.write_bytes(pickle.dumps(Bomb(exploded)))
    else:
        torch.save({"state": Bomb(exploded), "param_groups": []}, file)
    with pytest.raises(mcf.errors.CheckpointError):
        mcf.checkpoint.convert_checkpoint(source, tmp_path / "to", step=1)
    assert not exploded.exists()


class TestRefusals:
    def test_megatron_without_a_step(self, tmp_path):
        source = foreign.megatron(tmp_path)
        with pytest.raises(mcf.errors.CheckpointError, match="give step, which is the iteration"):
            mcf.checkpoint.convert_checkpoint(source, tmp_path / "converted")
        mcf.checkpoint.convert_checkpoint(source, tmp_path / "converted", optimizer=False)
        assert [f.name for f in (tmp_path / "converted").iterdir()] == ["model.safetensors"]

    def test_megatron_in_flat_parts(self, tmp_path):
        source = foreign.megatron(tmp_path, prefix="chained_1.")
        state = {"w": torch.ones(2, 3).bfloat16(), "optimizer.state.fp32_param.w": torch.ones(6)}
        foreign.save_distributed(state, source / "iter_0000007")
        with pytest.raises(mcf.errors.CheckpointError, match="--dist-ckpt-optim-fully-reshardable"):
            mcf.load_file(source)

    def test_flat_tensors_of_deepspeed_without_shapes(self, tmp_path):
        source = foreign.deepspeed_stage_3(tmp_path)
        (file,) = source.rglob("*_model_states.pt")
        file.unlink()
        with pytest.raises(
            mcf.errors.CheckpointError, match=r"is flat in .*, as ZeRO stage 3 leaves it"
        ):
            mcf.load_file(source)

    def test_two_optimizers(self, tmp_path):
        content = torch.load(foreign.torch_file(tmp_path), weights_only=True)
        torch.save({**content, "second": content["optimizer"]}, tmp_path / "two.pt")
        with pytest.raises(
            mcf.errors.CheckpointError, match="the states of 2 optimizers, optimizer, second"
        ):
            mcf.load_file(tmp_path / "two.pt")

    def test_a_folder_of_something_else(self, tmp_path):
        with pytest.raises(mcf.errors.CheckpointError, match="and is no checkpoint of DeepSpeed"):
            mcf.load_file(tmp_path)

    def test_no_states(self, tmp_path):
        model = foreign.Model()
        source = foreign.torch_shards(tmp_path)
        with pytest.raises(mcf.errors.CheckpointError, match="holds no states of an optimizer"):
            mcf.load_file(source, model, optimizer=torch.optim.AdamW(model.parameters()))


class TestDistributed:
    @pytest.mark.parametrize("is_flat", [False, True])
    def test_what_torch_makes(self, is_flat, tmp_path):
        torch.manual_seed(0)
        model = foreign.Model()
        narrow, wide = (
            [p for p in model.parameters() if (p.dim() > 1) == is_wide] for is_wide in (False, True)
        )

        def optimizer_of(narrow, wide):
            groups = [{"params": narrow, "weight_decay": 0.0}, {"params": wide, "lr": 0.5}]
            return torch.optim.AdamW(groups, lr=0.25, betas=(0.5, 0.75))

        optimizer = optimizer_of(narrow, wide)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        content = {"optimizer": state, **get_model_state_dict(model)}
        foreign.save_distributed(content, tmp_path / "saved")
        mcf.checkpoint.convert_checkpoint(tmp_path / "saved", tmp_path / "converted")
        for source in ("saved", "converted"):
            other = mcf.as_expansion(foreign.Model(), mcf.bf16i16)
            parameters = list(other.parameters())
            loaded = optimizer_of(
                *([p for p in parameters if (p.dim() > 1) == is_wide] for is_wide in (False, True))
            )
            for group in loaded.param_groups:
                group.update(lr=7.0, weight_decay=7.0, betas=(0.1, 0.2))
            mcf.load_file(tmp_path / source, other, optimizer=loaded)
            assert_same_bits(plain(other.state_dict()), dict(model.state_dict()))
            for p, q in zip(model.parameters(), parameters, strict=True):
                for key, x in optimizer.state[p].items():
                    found = loaded.state[q][key]
                    assert torch.equal(mcf.as_plain(found, torch.float32), x)
            for ours, theirs in zip(loaded.param_groups, optimizer.param_groups, strict=True):
                assert [ours[k] for k in ("lr", "weight_decay", "betas")] == [
                    theirs[k] for k in ("lr", "weight_decay", "betas")
                ]

    def test_groups_that_are_one_here(self, tmp_path):
        source = foreign.torchtitan(tmp_path) / "step-7"
        content = {f"state.{name}.exp_avg": x for name, x in foreign.MOMENTS["exp_avg"].items()}
        content |= {
            f"param_groups.{name}.lr": 0.5 + (x.dim() > 1) for name, x in foreign.MASTERS.items()
        }
        foreign.save_distributed({"optimizer": content, **foreign.MASTERS}, source)
        model = foreign.Model()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(
            mcf.errors.CheckpointError, match="parameters of one group of the optimizer"
        ):
            mcf.load_file(source, model, optimizer=optimizer)

    def test_weights_alone(self, tmp_path):
        foreign.save_distributed(foreign.MASTERS, tmp_path / "saved")
        assert_same_bits(mcf.load_file(tmp_path / "saved"), foreign.MASTERS)

    def test_the_last_step_that_was_finished(self, tmp_path):
        source = foreign.torchtitan(tmp_path)
        foreign.save_distributed({"x": torch.ones(3)}, source / "step-10")
        assert_same_bits(mcf.load_file(source), {"x": torch.ones(3)})
        (source / "step-10" / ".metadata").unlink()
        assert_same_bits(mcf.load_file(source), foreign.MASTERS)

    def test_states_of_no_weight(self, tmp_path):
        state = {"optimizer": {"state.norm.exp_avg": torch.ones(6)}, **foreign.MASTERS}
        foreign.save_distributed(state, tmp_path / "saved")
        with pytest.raises(
            mcf.errors.CheckpointError, match="has states of norm, and no such weights"
        ):
            mcf.checkpoint.convert_checkpoint(tmp_path / "saved", tmp_path / "to")

    def test_no_weights(self, tmp_path):
        state = {"optimizer": {"state.w.exp_avg": torch.ones(6)}, "other": {"x": torch.ones(1)}}
        foreign.save_distributed(state, tmp_path / "saved")
        with pytest.raises(mcf.errors.CheckpointError, match="holds no weights"):
            mcf.load_file(tmp_path / "saved")


def test_older_files_of_megatron(tmp_path):
    folder = tmp_path / "iter_0000007"
    (folder / "mp_rank_00_001").mkdir(parents=True)
    torch.save({}, folder / "mp_rank_00_001" / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    for source in (tmp_path, folder):
        with pytest.raises(mcf.errors.CheckpointError, match="--ckpt-convert-format torch_dist"):
            mcf.checkpoint.convert_checkpoint(source, tmp_path / "to")


class TestZero:
    def change(self, source, pattern, change):
        """Write a file anew, as it would be."""
        for file in source.rglob(pattern):
            with torch.serialization.safe_globals(of_deepspeed._ALLOWED):
                content = torch.load(file, weights_only=True)
            change(content)
            content.get("optimizer_state_dict", {}).pop("loss_scaler", None)
            content.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)
            torch.save(content, file)

    @pytest.mark.thinned(of=2)
    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.parametrize("world", [1, 2, 5, 8])
    def test_numbers_of_processes(self, stage, world, tmp_path):
        source = foreign.zero(tmp_path, stage, world)
        assert_same_bits(mcf.load_file(source), foreign.MASTERS)
        assert_same_bits(mcf.load_file(source / "global_step7"), foreign.MASTERS)

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_what_is_not_trained(self, stage, tmp_path):
        frozen = torch.arange(6.0).view(2, 3)
        parts = [frozen.flatten()[2 * i :][:2] for i in range(3)]
        buffer = torch.tensor([3, 4])
        module = {name: x.bfloat16() for name, x in foreign.MASTERS.items()}
        module |= {"buffer": buffer, "head.weight": module["embed.weight"]}
        more = {"module": module, "buffer_names": ["buffer"]}
        more["shared_params"] = {"head.weight": "embed.weight"}
        if stage < 3:
            module["frozen"] = frozen
        if stage > 1:
            more["frozen_param_shapes"] = {"frozen": frozen.shape}
            more["frozen_param_fragments"] = {"frozen": frozen}
        source = foreign.zero(tmp_path, stage, more=more)
        if stage == 3:
            for i, part in enumerate(parts):

                def change(content, part=part):
                    content["frozen_param_fragments"] = {"frozen": part}

                self.change(source, f"*rank_{i}_mp*_model_states.pt", change)
        found = mcf.load_file(source)
        assert found["head.weight"] is found["embed.weight"]
        expected = {**foreign.MASTERS, "head.weight": found["embed.weight"]}
        assert_same_bits(found, {**expected, "frozen": frozen, "buffer": buffer})

    def test_a_part_that_is_missing(self, tmp_path):
        source = foreign.zero(tmp_path)
        (last,) = source.rglob("zero_pp_rank_2*")
        last.unlink()
        with pytest.raises(mcf.errors.CheckpointError, match="has 2 parts of 3 that were saved"):
            mcf.load_file(source)
        (first,) = source.rglob("zero_pp_rank_0*")
        first.unlink()
        with pytest.raises(mcf.errors.CheckpointError, match="lacks the part of process 0"):
            mcf.load_file(source)

    @pytest.mark.parametrize(
        "name",
        ["zero_pp_rank_0_mp_rank_01_optim_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt",
         "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    )  # fmt: skip
    def test_other_kinds_of_parallelism(self, name, tmp_path):
        source = foreign.zero(tmp_path)
        torch.save({}, source / "global_step7" / name)
        with pytest.raises(mcf.errors.CheckpointError, match=rf"{name}.*ds_to_universal\.py"):
            mcf.load_file(source)

    @pytest.mark.parametrize("stage", [2, 3])
    def test_shapes_of_another_model(self, stage, tmp_path):
        def change(content):
            content["param_shapes"][0]["embed.weight"] = torch.Size([11, 7])

        source = foreign.zero(tmp_path, stage)
        self.change(source, "*_model_states.pt", change)
        with pytest.raises(mcf.errors.CheckpointError, match=r"elements, and \d+ are there"):
            mcf.load_file(source)

    @pytest.mark.parametrize("world", [1, 3])
    def test_the_most_padding(self, world, tmp_path):
        """To a multiple of 2 world elements, 2 world - 1 are added at most."""
        shapes, parts = {"w": (2 * world + 1,)}, [torch.zeros(4)] * world
        places = of_deepspeed._places(tmp_path, shapes, parts, 2)
        assert sum(s.stop - s.start for s in places["w"].slices) == 2 * world + 1
        with pytest.raises(mcf.errors.CheckpointError, match="are there"):
            of_deepspeed._places(tmp_path, {"w": (2 * world,)}, parts, 2)

    def test_states_of_elastic_checkpoints(self, tmp_path):
        def change(content):
            content["optimizer_state_dict"]["base_optimizer_state"] = []

        source = foreign.zero(tmp_path)
        self.change(source, "*_optim_states.pt", change)
        assert_same_bits(mcf.load_file(source), foreign.MASTERS)
        with pytest.raises(mcf.errors.CheckpointError, match=r"elastic.*ds_to_universal\.py"):
            mcf.checkpoint.convert_checkpoint(source, tmp_path / "to")
