"""litgpt's own fine-tuning (`litgpt.finetune`) of a network without weights, on batches of chosen lengths.

Usage: python litgpt_finetune.py PARAMETERS, a JSON object.
"""

import importlib
import tempfile
from pathlib import Path

import litgpt
import torch
from common import keep_inputs, parameters, write_figures
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.data.base import get_sft_collate_fn
from litgpt.utils import save_config
from torch.utils.data import DataLoader

STEPS, ACCUMULATED, PROMPT = 2, 2, 40
ABSENT = (
    "check_valid_checkpoint_dir", "load_checkpoint", "copy_config_files", "save_hyperparameters", "save_prompt_style",
    "merge_lora", "save_lora_checkpoint", "save_adapter_checkpoint", "save_adapter_v2_checkpoint",
)  # fmt: skip
"""Functions that read or write files of a checkpoint."""


def main():
    """Fine-tune for some steps and write the figures that the script would print."""
    job = parameters()
    if job["keeps_inputs"]:
        keep_inputs()
    if job["first_generation"]:
        restore_first_generation()
    script = importlib.import_module(f"litgpt.finetune.{job['method']}")
    for name in ABSENT:
        setattr(script, name, lambda *_, **__: None)
    script.Tokenizer = Tokenizer
    directory = checkpoint(job["network"])
    script.auto_download_checkpoint = lambda **_: directory
    options = {"quantize": job["quantize"]} if job["quantize"] else {}
    train = TrainArgs(
        global_batch_size=ACCUMULATED * job["batch_size"], micro_batch_size=job["batch_size"], epochs=1,
        max_steps=STEPS, max_seq_length=job["cap"], lr_warmup_steps=1,
    )  # fmt: skip
    script.setup(
        checkpoint_dir=directory, out_dir=Path(tempfile.mkdtemp()), precision="bf16-true", devices=1,
        data=Samples(job), train=train, eval=EvalArgs(interval=1000, max_new_tokens=2, max_iters=2), **options,
        **job["options"],
    )  # fmt: skip
    write_figures(job)


class Tokenizer:
    """Encodes a prompt without a vocabulary."""

    eos_id = 2

    def __init__(self, *_, **__):
        pass

    def encode(self, _, device=None, **__):
        """Return the tokens of a prompt."""
        return torch.ones(PROMPT, dtype=torch.int, device=device)

    def decode(self, _):
        """Return no text."""
        return ""


class Samples(DataModule):
    """Samples of chosen lengths, in this order."""

    def __init__(self, job):
        super().__init__()
        self.batch_size, self.lengths = job["batch_size"], job["lengths"]
        self.cap = job["cap"] or -1
        self.prompt_style = litgpt.prompts.Default()

    def connect(self, **_):
        """Need nothing from the script."""

    def _loader(self, lengths):
        rows = [torch.ones(length, dtype=torch.long) for length in lengths for _ in range(self.batch_size)]
        samples = [{"input_ids": row, "labels": row} for row in rows]
        return DataLoader(samples, batch_size=self.batch_size, collate_fn=get_sft_collate_fn(self.cap))

    def train_dataloader(self):
        """Return the batches of the training."""
        return self._loader(self.lengths)

    def val_dataloader(self):
        """Return the batches of the evaluation."""
        return self._loader(self.lengths[1:3])


def checkpoint(name):
    """Return a directory that has the configuration of a network and no weights."""
    directory = Path(tempfile.mkdtemp()) / name
    directory.mkdir()
    save_config(litgpt.Config.from_name(name), directory)
    return directory


def restore_first_generation():
    """Scale norms in fp32 and cast the result, as lit-gpt did in 2023."""

    def forward(self, x):
        exact = x.float()
        normed = exact * torch.rsqrt(torch.mean(exact * exact, dim=self.dim, keepdim=True) + self.eps)
        return (self.weight * normed).to(x.dtype)

    litgpt.model.RMSNorm.forward = forward


main()
