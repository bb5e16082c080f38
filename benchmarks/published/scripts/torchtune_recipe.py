"""torchtune's own recipes on one GPU, of a network without weights, on batches of a chosen length.

Usage: python torchtune_recipe.py PARAMETERS, a JSON object.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import torch
import torchtune
from common import parameters, write_figures
from omegaconf import OmegaConf
from torchtune.data import padded_collate_packed
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE

BATCHES = 3
RECIPES = {"full": "FullFinetuneRecipeSingleDevice", "lora": "LoRAFinetuneRecipeSingleDevice"}


def main():
    """Train for some steps and write the figures that the recipe would log."""
    job = parameters()
    torch.nn.Module.load_state_dict = lambda *_, **__: ([], [])  # there are no weights to load
    Llama3ScaledRoPE.apply_scaling = lambda _, freqs, *__: freqs  # it reads values, which decide no shape
    module = recipe_module(f"{job['recipe']}_finetune_single_device")
    module.validate_missing_and_unexpected_for_lora = lambda *_, **__: None
    recipe_class = getattr(module, RECIPES[job["recipe"]])
    recipe_class.load_checkpoint = lambda *_, **__: {"model": {}}
    recipe_class.save_checkpoint = lambda *_, **__: None
    recipe_class._setup_data = lambda *_, **__: (SimpleNamespace(set_epoch=lambda _: None), loader(job))
    values = configuration(job)
    recipe = recipe_class(cfg=values)
    recipe.setup(cfg=values)
    peaks = logged_peaks(module.training)
    recipe.train()
    write_figures(job, **{name: max(item[name] for item in peaks) for name in peaks[0]})


def logged_peaks(training):
    """Return a list that gets the peaks of each step: the recipe resets them when it logs them."""
    original, peaks = training.get_memory_stats, []

    def read(*args, **kwargs):
        peaks.append({
            "allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved(),
            "active_bytes": torch.cuda.memory_stats()["active_bytes.all.peak"],
        })  # fmt: skip
        return original(*args, **kwargs)

    training.get_memory_stats = read
    return peaks


def recipe_module(name):
    """Import a recipe by its file: torchtune ships them, but not as a package."""
    path = Path(torchtune.__file__).parent.parent / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(job):
    """Return the configuration of a recipe; the job has what differs between rows."""
    common = {
        "device": "cuda", "dtype": "bf16", "seed": 1, "shuffle": False, "output_dir": "/tmp", "compile": False,
        "resume_from_checkpoint": False, "save_adapter_weights_only": False, "max_steps_per_epoch": None, "epochs": 1,
        "log_peak_memory_stats": True, "log_every_n_steps": 1, "dataset": {"packed": job["packed"]},
        "checkpointer": {"model_type": "LLAMA2"}, "tokenizer": {"_component_": "types.SimpleNamespace"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
        "optimizer_in_bwd": False, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    if job["recipe"] == "lora":
        schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        common["lr_scheduler"] = {"_component_": schedule, "num_warmup_steps": 1}
    return OmegaConf.create({**common, **job["configuration"], "batch_size": job["batch_size"]})


def loader(job):
    """Return batches on the host as torchtune's collators make them."""
    shape = (job["batch_size"], job["length"])
    if job["packed"]:
        row = {
            "tokens": torch.ones(shape[1], dtype=torch.long), "labels": torch.ones(shape[1], dtype=torch.long),
            "input_pos": torch.arange(shape[1]), "seq_lens": torch.tensor([shape[1]]),
        }  # fmt: skip
        return [padded_collate_packed([row] * shape[0]) for _ in range(BATCHES)]
    return [{name: torch.ones(shape, dtype=torch.long) for name in ("tokens", "labels")} for _ in range(BATCHES)]


main()
