"""Networks of public scripts: their sizes, and the first GPU of torch.nn.DataParallel."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.families.external import FirstReplica, build_external
from vramcast.jobs.families.script_networks import NETWORKS
from vramcast.jobs.recipes import recipes, spec_of_recipe
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.training.setup import TrainingSetup

GPT = {"architecture": "GPT2LMHeadModel", "config": {"n_embd": 32, "n_layer": 2, "n_head": 2}, "sequence": 16}


def needs(library: str) -> None:
    if find_spec(library) is None:  # importing it here would fail on a broken torchvision
        pytest.skip(f"needs {library}: pip install 'vramcast[timm,hf]'")


def parameters(module: nn.Module) -> int:
    return sum(item.numel() for item in module.parameters())


@pytest.mark.parametrize(
    ("recipe", "count"),
    [
        ("mnist", 1_199_882),  # as PyTorch's example counts them
        ("unet", 24_436_369 + 20 * (16 * 9 + 1)),  # segmentation_models_pytorch's with one class, and 20 more
    ],
)
def test_networks_of_scripts_have_the_published_number_of_parameters(recipe: str, count: int) -> None:
    needs("timm")
    spec = spec_of_recipe(recipe, 2)
    module, _ = build_external(spec.family, spec.network)
    assert parameters(module) == count


def test_the_unet_predicts_every_pixel() -> None:
    needs("timm")
    result = NETWORKS["unet_resnet34"](3)(torch.zeros(1, 3, 64, 64))
    assert result.logits.shape == (1, 3, 64, 64)
    assert result.loss.shape == ()


def test_the_dry_run_of_a_recipe_can_use_the_whole_batch() -> None:
    assert spec_of_recipe("BERT_base", 7).training.dry_run_batch_size == 7
    assert spec_of_recipe("vgg16", 7).training.dry_run_batch_size == 2
    assert spec_of_recipe("vgg16", 7, {"num_classes": 5}).network["num_classes"] == 5


def test_every_recipe_is_a_spec_of_a_family_that_can_be_built() -> None:
    families = {spec_of_recipe(name, 4).family for name in recipes()}
    assert families == {"torchvision", "timm", "hf", "script"}


@pytest.mark.parametrize(("family", "network"), [("script", {"name": "none", "num_classes": 2, "input_shape": [1]})])
def test_an_unknown_name_is_rejected(family: str, network: dict[str, object]) -> None:
    with pytest.raises(UserError, match="expected a network of"):
        build_external(family, network)
    with pytest.raises(UserError, match="expected a recipe of"):
        spec_of_recipe("none", 1)


def test_the_first_replica_computes_its_share_and_gathers_all_outputs() -> None:
    needs("transformers")
    torch.manual_seed(1)
    alone, inputs = build_external("hf", GPT, "cpu")
    alone.eval()
    batch = tuple(torch.randint(item.vocabulary or 2, (4, *item.shape)) for item in inputs)
    result = FirstReplica(alone, 2)(*batch)
    assert torch.equal(result.loss, alone(*(item[:2] for item in batch)).loss)
    assert result.rest["logits"].shape == (4, 16, alone.subject.config.vocab_size)
    keys, values = result.rest["past_key_values"][1]
    assert keys.shape == values.shape == (4, 2, 16, 16)
    result.loss.backward()
    assert all(item.grad is not None for item in alone.parameters())


def test_a_recipe_on_two_gpus_is_a_first_replica() -> None:
    needs("transformers")
    module, _ = build_external("hf", {**GPT, "cards": 2})
    assert isinstance(module, FirstReplica)


def test_token_types_cost_memory_in_every_layer_of_xlnet() -> None:
    needs("transformers")
    network = {
        "architecture": "XLNetForSequenceClassification",
        "config": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "vocab_size": 100},
        "sequence": 128,
    }
    setup = TrainingSetup(batch_size=8, loss="own", optimizer="AdamW")
    backend = VirtualBackend(load_profile("a100_40gb"))
    with_types, without = (
        backend.measure(Spec("hf", {**network, **more}, setup)).measurement.requested_bytes or 0
        for more in ({"token_types": True}, {})
    )
    assert with_types - without > 2 * 2 * 4 * 8 * 128 * 128  # two layers, a pair of fp32 for each pair of positions
