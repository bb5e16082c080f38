"""Networks of timm and transformers, built from their names; `make breadth` classifies ten times as many."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.architectures import ARCHITECTURES, find_architecture
from vramcast.jobs.building import build_job
from vramcast.jobs.job import table_of
from vramcast.jobs.spec import Spec
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

A100 = load_profile("a100_40gb")
TIMM = {  # parameters as timm's own table of results has them, in millions
    "resnet18": 11.69, "vgg11": 132.86, "mobilenetv3_small_050": 1.59, "mnasnet_small": 2.03, "lcnet_050": 1.88,
    "tinynet_e": 2.04, "regnetx_002": 2.68, "repvgg_a0": 9.11, "selecsls42b": 32.46, "dla34": 15.74,
    "resnetv2_18": 11.69, "convnext_atto": 3.70, "poolformer_s12": 11.92, "vit_tiny_patch16_224": 5.72,
    "deit_tiny_distilled_patch16_224": 5.91, "mixer_s32_224": 19.10, "gmlp_ti16_224": 5.87, "levit_128s": 7.78,
    "mobilevit_xxs": 1.27, "edgenext_xx_small": 1.33, "pvt_v2_b0": 3.67, "botnet26t_256": 12.49, "ghostnet_050": 2.59,
}  # fmt: skip
SMALL_LAYERS = {"num_hidden_layers": 2}
HUGGING_FACE = {
    "bert-base": {**SMALL_LAYERS}, "roberta-base": {**SMALL_LAYERS}, "distilbert-base": {"n_layers": 2},
    "electra-base": {**SMALL_LAYERS}, "albert-base-v2": {**SMALL_LAYERS}, "gpt2": {"n_layer": 2},
    "llama-7b": {**SMALL_LAYERS}, "mistral-7b": {**SMALL_LAYERS}, "qwen2-0.5b": {**SMALL_LAYERS},
    "mixtral-8x7b": {**SMALL_LAYERS}, "t5-small": {"num_layers": 2, "num_decoder_layers": 2},
    "bart-base": {"encoder_layers": 2, "decoder_layers": 2}, "vit-base": {**SMALL_LAYERS},
    "whisper-tiny": {"encoder_layers": 2, "decoder_layers": 2}, "xlnet-base": {"n_layer": 2},
}  # fmt: skip


def needs(library):
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")


def examined(text, **arguments):
    job = build_job(BuildRequest(target=parse_target(text), arguments=arguments))
    return Simulator(job).simulate({"batch_size": 4}, [A100])


def failures(texts, check):
    errors = {}
    for text, (arguments, expected) in texts.items():
        try:
            check(examined(text, **arguments), expected)
        except Exception as error:  # report all failures at once
            errors[text] = f"{type(error).__name__}: {error}"
    return errors


def test_networks_of_timm_are_classified():
    needs("timm")

    def check(simulation, millions):
        assert simulation.peaks["a100_40gb"].bounded.status is Status.OK
        assert round(simulation.table.parameters / 1e6, 2) == millions
        assert simulation.family == "timm"

    assert failures({f"timm:{name}": ({}, millions) for name, millions in TIMM.items()}, check) == {}


def test_networks_of_transformers_are_classified():
    needs("transformers")

    def check(simulation, _):
        assert simulation.peaks["a100_40gb"].bounded.breakdown["parameters"] > 0
        assert simulation.training.loss == "own"

    assert failures({f"hf:{name}": (sizes, None) for name, sizes in HUGGING_FACE.items()}, check) == {}


def test_a_named_network_is_simulated_like_the_spec_of_a_row():
    needs("timm")
    network = {"name": "resnet18", "input_shape": [3, 224, 224], "num_classes": 1000}
    spec = Spec("timm", network, TrainingSetup(batch_size=4, optimizer="AdamW"))
    measured, simulation = VirtualBackend(A100).measure(spec).measurement, examined("timm:resnet18")
    assert replace(measured, seconds=None) == simulation.peaks["a100_40gb"].bounded
    assert table_of(spec) == simulation.table


def test_names_of_the_hub_are_recognised():
    assert find_architecture("meta-llama/Llama-2-70b-hf") == ARCHITECTURES["llama-70b"]
    assert find_architecture("google/vit-base-patch16-224") == ARCHITECTURES["vit-base"]
    assert find_architecture("bert-base-uncased") == ARCHITECTURES["bert-base"]
    with pytest.raises(UserError, match=r"download the config\.json"):
        find_architecture("somebody/else")


def test_a_config_file_names_its_class(tmp_path):
    needs("transformers")
    path = tmp_path / "config.json"
    path.write_text(
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2}'
    )
    assert examined(f"hf:{path}").table.parameters == 50257 * 64 + 1024 * 64 + (12 * 64 * 64 + 13 * 64) + 2 * 64
