"""Pre-training as torchtitan does it: its own Trainer, configuration, checkpointing and FSDP2 on tokens of its length.

Usage: torchrun titan_train.py --model.flavor 8B ..., the options of torchtitan. It prints the peaks of its rank in GiB.
The tokenizer has the size of Llama 3's and no words; batches come from no dataset.
"""

import sys
from types import ModuleType

import torch

board = ModuleType("torch.utils.tensorboard")  # torchtitan imports it, and writes nothing to it by default
board.SummaryWriter = object
sys.modules[board.__name__] = board

import torchtitan.models.llama3  # noqa: E402, F401 - registers the network
from torchtitan.config_manager import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

STEPS = 3


class Tokenizer:
    """The number of words of Llama 3."""

    n_words = 128256
    eos_id = 0


class Batches:
    """A loader of random tokens without an end."""

    def __init__(self, job_config, **_):
        training = job_config.training
        self.shape = (training.local_batch_size, training.seq_len)

    def __iter__(self):
        while True:
            yield {"input": torch.randint(100, self.shape)}, torch.randint(100, self.shape)

    def state_dict(self):
        """Return nothing: batches have no place in a dataset."""
        return {}


def main():
    """Train for some steps and print the peaks."""
    specification = get_train_spec("llama3")
    specification.build_tokenizer_fn = lambda _: Tokenizer()
    specification.build_dataloader_fn = Batches
    config = ConfigManager().parse_args(["--model.name", "llama3", "--training.steps", str(STEPS), *sys.argv[1:]])
    Trainer(config).train()
    reserved, active = (torch.cuda.memory_stats()[f"{name}_bytes.all.peak"] / 2**30 for name in ("reserved", "active"))
    print(f"reserved {reserved:.2f} GiB, active {active:.2f} GiB")


main()
