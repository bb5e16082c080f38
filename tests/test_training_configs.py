"""Configurations as people write them become jobs; what they say and is not simulated is noted."""

import json
from pathlib import Path

import pytest

from vramcast.commands.classify.classify_command import main
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.commands.classify.training_configs import read_training_config
from vramcast.errors import UserError

FILES = Path(__file__).parent / "fixtures" / "training_configs"
TINY = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}  # fmt: skip


def request_of(name, **values):
    return ClassifyRequest.of({"config": str(FILES / name), **values})


def chosen(request):
    return {name: value for name, value in request.options.items() if value is not None}


def test_axolotl_with_a_quantised_base():
    request = request_of("axolotl_qlora.yml")
    assert request.target == "hf:meta-llama/Meta-Llama-3-8B" and request.input == ("4096",) and request.packed
    assert chosen(request) == {
        "batch_size": 2, "accumulate": 4, "optimizer": "paged_adamw_32bit", "dtype": "bf16", "autocast": "bf16",
        "checkpointing": True, "quantize": "nf4_dq(upcast=False)",
        "adapter": "lora(lora_dropout=0.05, r=32, target_modules='all-linear')",
    }  # fmt: skip
    assert any("flash-attention" in note for note in request.notes)


def test_axolotl_on_the_whole_network_notes_what_is_not_simulated():
    request = request_of("axolotl_full.yml")
    assert chosen(request) == {
        "batch_size": 1, "accumulate": 8, "optimizer": "adamw_8bit", "dtype": "bf16", "autocast": "bf16",
        "checkpointing": "offload", "liger": "fused_linear_cross_entropy",
    }  # fmt: skip
    assert not request.packed
    assert "deepspeed is ignored" in " ".join(request.notes) and "plug-ins" not in " ".join(request.notes)


def test_a_number_of_gpus_answers_the_note_about_deepspeed():
    request = request_of("axolotl_full.yml", parallel="zero1", world_size=4)
    assert request.options["parallel"] == "zero1(world_size=4)"
    words = " ".join(request.notes)
    assert "deepspeed" not in words and "offloaded checkpoints" in words and "Liger" in words
    assert request.options["checkpointing"] is True and request.options["liger"] is None


def test_llama_factory_with_a_quantised_base():
    request = request_of("llamafactory_lora.yaml")
    assert request.target == "hf:Qwen/Qwen2.5-7B-Instruct" and request.input == ("2048",) and not request.packed
    assert chosen(request) == {
        "batch_size": 1, "accumulate": 8, "optimizer": "adamw_torch_fused", "dtype": "bf16", "autocast": "bf16",
        "checkpointing": "reentrant", "quantize": "nf4_dq(upcast=False)", "liger": True,
        "adapter": "lora(r=16, target_modules='all-linear')",
    }  # fmt: skip
    assert any("optim is not set" in note for note in request.notes)


def test_llama_factory_on_the_whole_network_in_bf16():
    assert chosen(request_of("llamafactory_full.yaml")) == {
        "batch_size": 2, "accumulate": 1, "optimizer": "adamw_torch_fused", "dtype": "bf16", "checkpointing": False
    }  # fmt: skip


def test_training_arguments_beside_a_config_of_the_network(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / "training_args.json"
    path.write_text((FILES / "training_args.json").read_text())
    assert main(["--config", str(path), "--device", "rtx_4090", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["batch_size"] == 4 and answer["inputs"][0]["shape"] == [64] and answer["verdict"] == "fits"


def test_options_of_the_command_line_win():
    request = request_of("training_args.json", target="hf:gpt2", batch_size=16, lora="r=4,targets=c_attn")
    assert request.target == "hf:gpt2" and request.options["batch_size"] == 16
    assert request.options["adapter"] == "lora(r=4, target_modules=['c_attn'])"
    assert request_of("llamafactory_lora.yaml", adapter="ia3").options["adapter"] == "ia3"


@pytest.mark.parametrize(
    ("text", "checkpointing", "liger"),
    [
        ("base_model: gpt2\ngradient_checkpointing: true\n", True, None),
        ("base_model: gpt2\ngradient_checkpointing: true\nactivation_offloading: legacy\n", "offload", None),
        ("base_model: gpt2\ngradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: true}\n",
         "reentrant", None),
        ("base_model: gpt2\nplugins: [axolotl.integrations.liger.LigerPlugin, x.CutCrossEntropyPlugin]\n"
         "liger_rope: true\nliger_glu_activation: true\n", False, "glu,rope"),
        ("per_device_train_batch_size: 1\nmodel_name_or_path: gpt2\nuse_liger_kernel: true\n", False, True),
        ("per_device_train_batch_size: 1\nmodel_name_or_path: gpt2\nuse_liger_kernel: true\n"
         "liger_kernel_config: {rope: false, rms_norm: true}\n", False, "default,no_rope,rms_norm"),
        ("per_device_train_batch_size: 1\nmodel_name_or_path: gpt2\nuse_liger_kernel: true\n"
         "liger_kernel_config: {swiglu: false, mystery: true}\n", False, "default,no_swiglu"),
        ("per_device_train_batch_size: 1\nmodel_name_or_path: gpt2\nuse_liger_kernel: true\n"
         "liger_kernel_config: {}\n", False, True),
        ("model_name_or_path: gpt2\nactivation_checkpointing: true\n"
         "activation_checkpointing_kwargs: {every_n_layers: 2, offload: true}\n", "every_n_layers=2,offload", None),
        ("model_name_or_path: gpt2\nactivation_checkpointing: null\ngradient_checkpointing: true\n"
         "activation_checkpointing_kwargs: null\ngradient_checkpointing_kwargs: {use_reentrant: true}\n",
         "reentrant", None),
        ("model_name_or_path: gpt2\nactivation_checkpointing: false\ngradient_checkpointing: true\n", False, None),
        ("model_name_or_path: gpt2\ngradient_checkpointing: true\n"
         "gradient_checkpointing_kwargs: '{\"use_reentrant\": \"True\", \"every_n_layers\": \"2\"}'\n",
         "reentrant,every_n_layers=2", None),
        ("base_model: gpt2\ngradient_checkpointing: 'true'\n", True, None),
        ("base_model: gpt2\ngradient_checkpointing: 'False'\n", False, None),
        ("base_model: gpt2\ngradient_checkpointing: offload_disk\n", "offload", None),
        ("model_name_or_path: gpt2\nstage: sft\nuse_reentrant_gc: false\n", True, None),
        ("model_name_or_path: gpt2\nstage: sft\nuse_unsloth_gc: true\n", "reentrant,offload", None),
    ],
)  # fmt: skip
def test_forms_of_checkpointing_and_kernels_of_liger_are_read(tmp_path, text, checkpointing, liger):
    path = tmp_path / "run.yml"
    path.write_text(text)
    job = read_training_config(str(path))
    assert (job.values["checkpointing"], job.values["liger"]) == (checkpointing, liger)
    assert any("plug-ins" in note for note in job.notes) == ("CutCross" in text)


def test_offloading_without_checkpointing_is_noted(tmp_path):
    path = tmp_path / "run.yml"
    for text, noted in (("", True), ("gradient_checkpointing: true\n", False)):
        path.write_text(f"model_name_or_path: gpt2\nactivation_offloading: true\n{text}")
        notes = " ".join(read_training_config(str(path)).notes)
        assert ("activation_offloading without checkpointing" in notes) is noted


def test_several_gpus_take_back_offloading_alone(tmp_path):
    path = tmp_path / "run.yml"
    path.write_text(
        "model_name_or_path: gpt2\nactivation_checkpointing: true\n"
        "activation_checkpointing_kwargs: {use_reentrant: true, every_n_layers: 2, offload: true}\n"
    )
    job = read_training_config(str(path), several=True)
    assert job.values["checkpointing"] == "reentrant,every_n_layers=2"
    assert any("offloaded checkpoints" in note for note in job.notes)


def test_none_takes_back_a_form_of_a_file():
    request = request_of("axolotl_full.yml", liger="none", checkpointing="none")
    assert (request.options["liger"], request.options["checkpointing"]) == ("none", "none")


def test_a_local_folder_is_found_beside_the_file(tmp_path):
    (tmp_path / "network").mkdir()
    (tmp_path / "network" / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / "run.yml"
    path.write_text("base_model: network\nmicro_batch_size: 2\n")
    assert read_training_config(str(path)).values["target"] == f"hf:{tmp_path / 'network' / 'config.json'}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base_model: someone/unknown-9b\n", "download its config.json"),
        ("base_model: gpt2\nrl: dpo\n", "supervised fine-tuning"),
        ("base_model: gpt2\nadapter: llama-adapter\n", "lora or qlora"),
        ("base_model: gpt2\nmicro_batch_size: many\n", "whole number"),
        ("model_name_or_path: gpt2\nstage: dpo\n", "sft or pt"),
        ("model_name_or_path: gpt2\nfinetuning_type: freeze\n", "full or lora"),
        ("model_name_or_path: gpt2\nstage: sft\nquantization_bit: 4\nquantization_method: hqq\n", "by bitsandbytes"),
        ("learning_rate: 1.0e-4\n", "TrainingArguments"),
        ("model_name_or_path: gpt2\ngradient_checkpointing: true\ngradient_checkpointing_kwargs: '{x}'\n", "as JSON"),
        ("- a\n- b\n", "mapping of options"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "run.yml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_training_config(str(path))


def test_training_arguments_alone_need_a_target():
    with pytest.raises(UserError, match="target"):
        request_of("training_args.json")


def test_torch_compile_of_the_trainer_compiles_the_whole_network(tmp_path):
    path = tmp_path / "arguments.json"
    path.write_text('{"per_device_train_batch_size": 2, "torch_compile": true}')
    assert read_training_config(str(path)).values["compile"] == "model"
    path.write_text('{"per_device_train_batch_size": 2, "torch_compile": true, "torch_compile_backend": "ipex"}')
    job = read_training_config(str(path))
    assert "compile" not in job.values and any("ipex" in note for note in job.notes)
