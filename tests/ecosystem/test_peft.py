"""Adapters of Hugging Face's peft train, resume, load and merge as expansions."""

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import cast_adapter_dtype
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

import mcftensor as mcf
from support.helpers import all_terms, exact, over_one
from support.tiny_gpt2 import CONFIG, counting

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def plain_base() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(CONFIG)


def adapted(base, format=None, **options) -> PeftModel:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, **options)
    return mcf.as_expansion(get_peft_model(base, lora), format)


def make_trainer(model, folder) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_steps=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=counting())


def trained(model) -> PeftModel:
    """A few steps, after which terms beyond the leading ones are not zero."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = torch.stack([row["input_ids"] for row in counting()[:4]])
    for _ in range(3):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adapters(model) -> dict[str, mcf.MCFTensor]:
    """By the names that files have."""
    return {
        name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad
    }


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(x, y)
        for name, p in expected.items()
        for x, y in zip(found[name].components, p.components, strict=True)
    )


@pytest.mark.thinned(of=2)
@over_one
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["ln_f"]}], ids=["lora", "with a norm"])
def test_resuming(tmp_path, format, more):
    """Parameters stay the objects that the optimizer steps, and all terms are those of a run that
    was not interrupted; no save and no load warns."""
    model, second = (adapted(plain_base(), format, **more) for _ in range(2))
    make_trainer(model, tmp_path).train()
    before = dict(second.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_trainer(second, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert all(before[name] is p for name, p in second.named_parameters())
    assert all(map(torch.equal, all_terms(second), all_terms(model)))


@pytest.mark.parametrize("safe", [True, False])
def test_what_is_saved(tmp_path, safe):
    """Names of terms are those of any file; another adapter's name does not matter."""
    model = trained(adapted(plain_base()))
    model.save_pretrained(tmp_path, safe_serialization=safe)
    expected = adapters(model)
    if safe:
        assert same(mcf.load_file(tmp_path / "adapter_model.safetensors"), expected)
    again = adapted(plain_base())
    again.load_adapter(str(tmp_path), "default", is_trainable=True)
    assert same(adapters(again), expected)
    again.load_adapter(str(tmp_path), "other")
    for name, p in again.named_parameters():
        if ".other" in name:
            assert p.dtype == torch.float32
            its = expected[name.replace(".other", "")]
            assert torch.equal(p, mcf.as_plain(its.detach(), torch.float32))


def test_merging_into_expansions_moves_them_by_products_of_16_bits():
    model = trained(adapted(mcf.as_expansion(plain_base())))
    layer = model.base_model.model.transformer.h[0].attn.c_attn
    before = exact(layer.base_layer.weight)
    a, b = (exact(x["default"].weight) for x in (layer.lora_A, layer.lora_B))
    expected = (b @ a * layer.scaling["default"]).T
    weight = model.merge_and_unload().transformer.h[0].attn.c_attn.weight
    assert weight.format == mcf.bf16x2
    assert (exact(weight) - before - expected).norm() < 2**-8 * expected.norm()


def test_plain_peft_reads_leading_terms(tmp_path):
    model = trained(adapted(plain_base()))
    model.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(plain_base(), str(tmp_path), is_trainable=True)
    for p in adapters(plain).values():
        assert type(p) is torch.nn.Parameter
        assert p.dtype == torch.float32


@pytest.mark.parametrize("base", ["plain", "expansions"])
def test_merging(tmp_path, base):
    model = plain_base() if base == "plain" else mcf.as_expansion(plain_base())
    model = trained(adapted(model))
    rows = torch.stack([row["input_ids"] for row in counting()[:4]])
    with torch.no_grad():
        expected = model(input_ids=rows).logits.float()
        merged = model.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        torch.testing.assert_close(
            merged(input_ids=rows).logits.float(), expected, atol=2e-2, rtol=0
        )
    merged.save_pretrained(tmp_path)
    found = mcf.load_file(tmp_path)
    for name, p in merged.named_parameters():
        if isinstance(p, mcf.MCFTensor):
            assert all(map(torch.equal, found[name].components, p.components))
        else:
            assert torch.equal(found[name], p)


@pytest.mark.parametrize("more", [{"modules_to_save": ["ln_f"]}, {"bias": "lora_only"}], ids=str)
def test_merging_beside_what_stays_an_expansion(tmp_path, more):
    merged = trained(adapted(plain_base(), **more)).merge_and_unload()
    own = {n: p for n, p in merged.named_parameters() if isinstance(p, mcf.MCFTensor)}
    assert own
    merged.save_pretrained(tmp_path)
    found = mcf.load_file(tmp_path)
    assert same({name: found[name] for name in own}, own)


def test_adapters_in_other_formats_are_cast_as_ever():
    model = get_peft_model(
        plain_base(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    ).bfloat16()
    layer = model.base_model.model.transformer.h[0].attn.c_attn
    mcf.as_expansion(layer.lora_A)
    cast_adapter_dtype(model, adapter_name="default")
    assert isinstance(layer.lora_A["default"].weight, mcf.MCFTensor)
    assert layer.lora_B["default"].weight.dtype == torch.float32
