"""A tokenizer and a dataset of random words, for the scripts that train language models."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast


def make_tokenizer():
    words = {f"w{i}": i for i in range(1000)} | {"[UNK]": 1000, "[PAD]": 1001, "</s>": 1002}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="</s>")


def text(index, shortest, longest):
    random_source = random.Random(index)
    return " ".join(f"w{random_source.randrange(1000)}" for _ in range(random_source.randint(shortest, longest)))


class RandomTexts(Dataset):
    def __init__(self, tokenizer, count, shortest, longest):
        self.tokenizer, self.count, self.lengths = tokenizer, count, (shortest, longest)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.tokenizer(text(index, *self.lengths), truncation=True, max_length=256)
