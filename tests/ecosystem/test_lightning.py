"""Lightning's Trainer and Fabric train, save and resume expansions."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mcftensor as mcf
from support.helpers import all_terms, over_one, small_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator).bfloat16()
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


def make_optimizer(model, format=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return mcf.collage(optimizer, "plus") if format is None else optimizer


class Classifier(lightning.LightningModule):
    def __init__(self, format=None, sums=False):
        super().__init__()
        self.format = format
        self.model = mcf.as_expansion(small_model(), format)
        self.kinds = set()
        if sums:
            mcf.accumulate_gradients(self)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.model(x).float(), y)

    def on_before_optimizer_step(self, optimizer):
        self.kinds |= {type(p.grad) for p in self.parameters()}

    def configure_optimizers(self):
        optimizer = make_optimizer(self, self.format)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def trainer(folder, epochs=2, **options):
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        **options,
    )


def by_hand(format, epochs=2, accumulated=1):
    model = mcf.as_expansion(small_model(), format)
    optimizer = make_optimizer(model, format)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(epochs):
        for i, (x, y) in enumerate(batches(), 1):
            (F.cross_entropy(model(x).float(), y) / accumulated).backward()
            if i % accumulated == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return model


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
@pytest.mark.parametrize("accumulated", [1, 4])
@over_one
def test_training_is_that_of_a_loop_by_hand(tmp_path, format, precision, accumulated):
    module = Classifier(format)
    before = [x.clone() for x in all_terms(module)]
    trainer(tmp_path, precision=precision, accumulate_grad_batches=accumulated).fit(
        module, batches()
    )
    assert not all(map(torch.equal, all_terms(module), before))
    expected = by_hand(format, accumulated=accumulated)
    assert all(map(torch.equal, all_terms(module), all_terms(expected)))


@over_one
def test_sums_of_gradients(tmp_path, format):
    module = Classifier(format, sums=True)
    trainer(tmp_path, accumulate_grad_batches=4).fit(module, batches())
    assert module.kinds == {mcf.MCFTensor}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@over_one
def test_resuming(tmp_path, format):
    whole = Classifier(format)
    trainer(tmp_path / "whole", 3).fit(whole, batches())
    trainer(tmp_path / "first", 1).fit(Classifier(format), batches())
    second = Classifier(format)
    checkpoint = tmp_path / "first" / "last.ckpt"
    trainer(tmp_path / "first", 3).fit(second, batches(), ckpt_path=checkpoint)
    assert all(map(torch.equal, all_terms(second), all_terms(whole)))


def test_half_precision_is_refused(tmp_path):
    with pytest.raises(TypeError, match="as_plain"):
        trainer(tmp_path, precision="16-true").fit(Classifier(), batches())


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
@over_one
def test_fabric(tmp_path, format, precision):
    def prepared():
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        model = mcf.as_expansion(small_model(), format)
        return fabric, *fabric.setup(model, make_optimizer(model, format))

    def train(fabric, model, optimizer):
        for x, y in batches():
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x).float(), y))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()

    fabric, model, optimizer = prepared()
    train(fabric, model, optimizer)
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer)
    fabric, second, optimizer = prepared()
    fabric.load(tmp_path / "state.ckpt", {"model": second, "optimizer": optimizer})
    train(fabric, second, optimizer)
    assert all(map(torch.equal, all_terms(second), all_terms(model)))
    assert all(type(x) is torch.Tensor for x in all_terms(model))
