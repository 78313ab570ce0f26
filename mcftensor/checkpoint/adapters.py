"""Adapters of peft, and models of sentence-transformers, that are expansions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from mcftensor.checkpoint.loading import load_file
from mcftensor.checkpoint.module_hooks import store_as_terms
from mcftensor.checkpoint.state_dicts import as_terms, from_terms
from mcftensor.patches.table import by_name, patch, wherever_imported
from mcftensor.tensor.components import format_of


@patch(
    "peft.tuners.tuners_utils.cast_adapter_dtype",
    why="When peft loads an adapter, it copies 16-bit parameters to float32 and mistakes the "
    "dtype of an expansion for the dtype of its weights. The optimizer would keep stepping the "
    "old parameters.",
    loss="peft replaces expansion adapters when it loads them, and the optimizer trains nothing; "
    "call load_adapter with autocast_adapter_dtype=False.",
    when="import peft.tuners.tuners_utils",
    releases="0.21",
    takes=("model",),
)
@wherever_imported
@by_name
def _keeping_expansions(cast: Callable[[], None], given: dict[str, Any]) -> None:
    model: nn.Module = given["model"]
    kept = [
        (part, name, p)
        for part in model.modules()
        for name, p in part._parameters.items()
        if format_of(p) is not None
    ]
    cast()
    for part, name, p in kept:
        part._parameters[name] = p


@patch(
    "peft.utils.save_and_load.get_peft_model_state_dict",
    why="peft removes the adapter's name from the end of each key in a file of adapters. Keys of "
    "terms would keep the name, and peft would warn that their sums are not matrices.",
    loss="files of adapters name leading terms and tails differently; save with mcf.save_file.",
    when="import peft.utils.save_and_load",
    releases="0.21",
    takes=("model", "state_dict"),
)
@wherever_imported
@by_name
def _storing_terms(collect: Callable[[], Any], given: dict[str, Any]) -> Any:
    model: nn.Module = given["model"]
    if not any(format_of(p) for p in model.parameters()):
        return collect()
    state_dict = given.get("state_dict")
    given["state_dict"] = from_terms(model.state_dict() if state_dict is None else state_dict)
    return as_terms(collect(), sums=True)


@patch(
    "peft.utils.save_and_load.set_peft_model_state_dict",
    why="peft inserts the adapter's name into the keys that it knows, and it does not know the "
    "keys of terms.",
    loss="peft loads adapters without their tails; load with mcf.load_file.",
    when="import peft.utils.save_and_load",
    releases="0.21",
    takes=("peft_model_state_dict",),
)
@wherever_imported
@by_name
def _joining_terms(load: Callable[[], Any], given: dict[str, Any]) -> Any:
    given["peft_model_state_dict"] = from_terms(given["peft_model_state_dict"])
    return load()


@patch(
    "peft.tuners.tuners_utils.BaseTuner._unload_and_optionally_merge",
    why="Biases and whole modules trained together with adapters stay expansions in the model "
    "that `merge_and_unload` returns. The `save_pretrained` of that model stores plain tensors.",
    loss="save_pretrained of a merged model with expansions raises; call "
    "mcf.checkpoint.store_as_terms(merged) first.",
    when="import peft.tuners.tuners_utils",
    releases="0.21",
    takes=("self",),
)
@by_name
def _telling_of_the_model(unload: Callable[[], Any], given: dict[str, Any]) -> Any:
    model = unload()
    if hasattr(model, "save_pretrained") and any(map(format_of, model.parameters())):
        store_as_terms(model)
    return model


@patch(
    "sentence_transformers.base.trainer.BaseTrainer._load_from_checkpoint",
    why="The trainer of sentence-transformers resumes with a plain model that it builds from the "
    "folder.",
    loss="resumed trainings of sentence-transformers continue without tails.",
    when="import sentence_transformers.base.trainer",
    releases="6.2",
    takes=("self", "checkpoint_path"),
)
@by_name
def _loading_tails(load: Callable[[], None], given: dict[str, Any]) -> None:
    load()
    folder = Path(given["checkpoint_path"])
    model = getattr(given["self"].model, "_orig_mod", given["self"].model)
    entries = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    for entry, part in zip(entries, model.children(), strict=True):
        for module in part.modules():
            if hasattr(module, "save_pretrained") and any(map(format_of, module.parameters())):
                load_file(folder / entry["path"], module)
