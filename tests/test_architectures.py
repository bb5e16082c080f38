"""Named networks have the published numbers of parameters, and are found under the names that people write."""

import pytest

from vramcast.errors import UserError
from vramcast.jobs.architectures import ARCHITECTURES, find_architecture
from vramcast.jobs.families.external import build_external

pytest.importorskip("transformers")
PUBLISHED = {
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "tinyllama-1.1b": 1_100_048_384, "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552, "mistral-nemo": 12_247_782_400, "mistral-small-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256, "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
    "qwen2-0.5b": 494_032_768, "qwen2-1.5b": 1_543_714_304, "qwen2-7b": 7_615_616_512, "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176, "gemma-3-1b": 999_885_952, "phi-2": 2_779_683_840, "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080, "phi-4": 14_659_507_200, "phi-4-mini": 3_836_021_760,
    "deepseek-v2-lite": 15_706_484_224, "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672, "vit-base": 86_567_656, "vit-large": 304_326_632,
    "whisper-tiny": 37_760_640, "whisper-small": 241_734_912, "whisper-large-v3": 1_543_490_560,
    "whisper-base": 72_593_920, "whisper-medium": 763_857_920, "whisper-large": 1_543_304_960, "vit-huge": 632_045_800,
    "bert-base": 109_514_298, "bert-large": 335_174_458, "roberta-base": 124_697_433, "roberta-large": 355_412_057,
    "distilbert-base": 66_985_530, "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200, "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096,
    "bart-base": 139_420_416,
}  # fmt: skip
VISION_TOWER = 416_866_032
WITH_VISION = {"gemma-3-4b-text": 4_300_079_472, "gemma-3-12b-text": 12_187_325_040, "gemma-3-27b-text": 27_432_406_640}


def parameters(architecture, sizes):
    module, _ = build_external("hf", {"architecture": architecture, "config": sizes, "sequence": 8})
    return sum(item.numel() for item in module.parameters())


def counted(name):
    """Count the parameters; equal layers are built twice and thrice, and the others added."""
    architecture, sizes = ARCHITECTURES[name]
    layers = sizes.get("num_hidden_layers", 0)
    if layers < 4:
        return parameters(architecture, sizes)
    two, three = (parameters(architecture, {**sizes, "num_hidden_layers": count}) for count in (2, 3))
    return two + (layers - 2) * (three - two)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name):
    assert counted(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", WITH_VISION)
def test_the_text_part_of_a_network_with_vision(name):
    projector = 1152 * (ARCHITECTURES[name][1]["hidden_size"] + 1)
    assert counted(name) == WITH_VISION[name] - VISION_TOWER - projector


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-7b"), ("meta-llama/Llama-2-13b-chat-hf", "llama-13b"),
        ("unsloth/Llama-3.2-1B-Instruct", "llama-3.2-1b"), ("Qwen/Qwen2.5-7B-Instruct", "qwen2-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"), ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"), ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"), ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"), ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"), ("bert-base-uncased", "bert-base"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"), ("google/vit-base-patch16-224", "vit-base"),
    ],
)  # fmt: skip
def test_names_as_people_write_them(written, name):
    assert find_architecture(written) == ARCHITECTURES[name]


def test_an_unknown_name_suggests_a_known_one():
    with pytest.raises(UserError, match="qwen3-8b"):
        find_architecture("qwen3-9b")
