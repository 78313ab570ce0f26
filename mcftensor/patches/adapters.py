"""Adapters of peft, and models of sentence-transformers, that are expansions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from mcftensor.patches.table import by_name, calls, row
from mcftensor.tensor.dtensor import format_of


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


@by_name
def _storing_terms(collect: Callable[[], Any], given: dict[str, Any]) -> Any:
    model: nn.Module = given["model"]
    if not any(format_of(p) for p in model.parameters()):
        return collect()
    state_dict = given.get("state_dict")
    given["state_dict"] = calls.from_terms(model.state_dict() if state_dict is None else state_dict)
    return calls.to_terms(collect())


@by_name
def _joining_terms(load: Callable[[], Any], given: dict[str, Any]) -> Any:
    given["peft_model_state_dict"] = calls.from_terms(given["peft_model_state_dict"])
    return load()


@by_name
def _telling_of_the_model(unload: Callable[[], Any], given: dict[str, Any]) -> Any:
    model = unload()
    if hasattr(model, "save_pretrained") and any(map(format_of, model.parameters())):
        calls.when_unloaded(model)
    return model


def _wherever_imported(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change a function also in modules of its package that have imported it by name."""

    def everywhere(found: Any) -> Any:
        changed = change(found)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "peft" and module is not None:
                for attribute, value in list(vars(module).items()):
                    if value is found:
                        setattr(module, attribute, changed)
        return changed

    return everywhere


row(
    "peft.tuners.tuners_utils.cast_adapter_dtype",
    why="When peft has loaded an adapter, it makes parameters of 16 bits anew in float32, and "
    "takes the dtype of an expansion for that of weights. The optimizer would step the old ones.",
    loss="peft replaces adapters that are expansions when it loads them, and the optimizer trains "
    "nothing; call load_adapter with autocast_adapter_dtype=False.",
    when="import peft.tuners.tuners_utils",
    releases="0.21",
    takes=("model",),
    change=_wherever_imported(_keeping_expansions),
)
row(
    "peft.utils.save_and_load.get_peft_model_state_dict",
    why="Files of adapters have names without that of the adapter, which peft cuts out at the end: "
    "names of terms would keep it, and their sums are no matrices, of which it warns.",
    loss="files of adapters name leading terms and tails differently; save with mcf.save_file.",
    when="import peft.utils.save_and_load",
    releases="0.21",
    takes=("model", "state_dict"),
    change=_wherever_imported(_storing_terms),
)
row(
    "peft.utils.save_and_load.set_peft_model_state_dict",
    why="It puts the adapter's name back into names that it knows, of which terms have none.",
    loss="peft loads adapters without their tails; load with mcf.load_file.",
    when="import peft.utils.save_and_load",
    releases="0.21",
    takes=("peft_model_state_dict",),
    change=_wherever_imported(_joining_terms),
)
row(
    "peft.tuners.tuners_utils.BaseTuner._unload_and_optionally_merge",
    why="Biases and whole modules that were trained beside adapters stay expansions in the model "
    "that `merge_and_unload` returns, whose `save_pretrained` stores plain tensors.",
    loss="save_pretrained of a merged model with expansions raises; call "
    "mcf.checkpoint.store_as_terms(merged) first.",
    when="import peft.tuners.tuners_utils",
    releases="0.21",
    takes=("self",),
    change=_telling_of_the_model,
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
                calls.when_resumed(module, str(folder / entry["path"]))


row(
    "sentence_transformers.base.trainer.BaseTrainer._load_from_checkpoint",
    why="The trainer of sentence-transformers resumes with a model that it makes of the folder, a "
    "plain one.",
    loss="trainings of sentence-transformers that are resumed go on without tails.",
    when="import sentence_transformers.base.trainer",
    releases="6.2",
    takes=("self", "checkpoint_path"),
    change=_loading_tails,
)
