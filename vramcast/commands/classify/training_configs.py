"""Training configurations that people have: TrainingArguments of transformers, LLaMA-Factory and axolotl, as jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramcast.commands.classify.config_forms import (
    DIGITS,
    axolotl_checkpointing,
    factory_checkpointing,
    has_other_plugins,
    liger_of,
    offloading_notes,
    trainer_checkpointing,
    without_device_pairs,
)
from vramcast.errors import UserError
from vramcast.jobs.architectures import find_architecture
from vramcast.jobs.targets import is_file, read_document

_OPTIMIZER = "adamw_torch_fused"
"""transformers/training_args.py, default_optim; before torch 2.8 it is adamw_torch, one copy of the parameters more."""
_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "model_max_length", "block_size")
"""Names of the sequence length: LLaMA-Factory's, TRL's new and old ones, and those of scripts of transformers."""
_UNSUPPORTED: Mapping[str, str] = {
    "use_unsloth": "Unsloth's kernels are not simulated: they take less memory",
    "auto_find_batch_size": "auto_find_batch_size is ignored: the batch size of the file is simulated",
    "flash_attention": "flash-attention is simulated as the kernel that torch's own attention chooses",
    "deepspeed": "deepspeed is ignored without the number of GPUs: add --world-size N and --parallel",
    "fsdp": "fsdp is ignored without the number of GPUs: add --world-size N and --parallel",
    "fsdp_config": "fsdp is ignored without the number of GPUs: add --world-size N and --parallel",
    "neftune_noise_alpha": "the noise of NEFTune is not simulated: it takes one more copy of the embedded tokens",
    "galore_rank": "GaLore is not simulated: its states take less memory",
    "use_galore": "GaLore is not simulated: its states take less memory",
    "use_badam": "BAdam is not simulated: it takes less memory",
}
"""Keys that change the memory, and what is assumed instead."""
_PARALLEL = ("deepspeed", "fsdp", "fsdp_config")


@dataclass
class ConfiguredJob:
    """The keys of a job that a configuration file gives."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_training_config(path: str, several: bool = False) -> ConfiguredJob:
    """Read a configuration file; `several` says that the number of GPUs is known from elsewhere."""
    config = read_document(path)
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise UserError(f"expected a mapping of options in {path}, found {type(config).__name__}: name another file")
    job = ConfiguredJob()
    if "base_model" in config:
        _read_axolotl(config, job)
    elif "per_device_train_batch_size" in config or "model_name_or_path" in config:
        _read_arguments(config, job)
    else:
        raise UserError(
            f"expected base_model (axolotl), model_name_or_path (LLaMA-Factory) or per_device_train_batch_size "
            f"(TrainingArguments) in {path}, found {sorted(config)[:8]}: name another file"
        )
    name = config.get("base_model") or config.get("model_name_or_path")
    target = _target(str(name) if name else None, Path(path).parent)
    if target is not None:
        job.values["target"] = target
    job.values["liger"] = liger_of(config) or None
    _read_compile(config, job)
    if has_other_plugins(config):
        job.notes.append("plug-ins of axolotl other than Liger's are not simulated: fused losses take less memory")
    job.notes += offloading_notes(config, job.values["checkpointing"])
    if several:
        job.notes += without_device_pairs(job.values)
    job.notes += dict.fromkeys(
        text for key, text in _UNSUPPORTED.items() if config.get(key) and not (several and key in _PARALLEL)
    )
    return job


def _read_compile(config: Mapping[str, Any], job: ConfiguredJob) -> None:
    """Read torch_compile of TrainingArguments and axolotl, which compiles the whole network."""
    if not config.get("torch_compile") and not config.get("torch_compile_backend"):
        return
    backend = config.get("torch_compile_backend") or "inductor"
    if backend != "inductor":
        job.notes.append(f"the backend {backend} of torch.compile is not simulated: the network runs as eager code")
        return
    job.values["compile"] = "model"
    if config.get("torch_compile_mode") in ("reduce-overhead", "max-autotune"):
        job.notes.append(f"CUDA graphs of {config['torch_compile_mode']} are not simulated: their pool takes more")


def _target(name: str | None, folder: Path) -> str | None:
    """Return the network: a folder with a config.json, a known name, or the config.json beside the file."""
    if name is None:
        beside = folder / "config.json"
        return f"hf:{beside}" if is_file(beside) else None
    for directory in (Path(name), folder / name):
        if is_file(directory / "config.json"):
            return f"hf:{directory / 'config.json'}"
    try:
        find_architecture(name)
    except UserError as error:
        raise UserError(
            f"expected a folder with a config.json or a known network, found {name!r}: download its config.json, "
            "and name hf:PATH as the target beside --config"
        ) from error
    return f"hf:{name}"


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, str) and DIGITS.fullmatch(value):  # '16' in quotes
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"expected {key} to be a whole number, found {value!r}: change it")
    return value


def _read_arguments(config: Mapping[str, Any], job: ConfiguredJob) -> None:
    """Read TrainingArguments, alone or with the arguments of LLaMA-Factory and of scripts of transformers."""
    factory = "finetuning_type" in config or "stage" in config
    stage = config.get("stage", "sft")
    if stage not in ("sft", "pt"):
        raise UserError(f"expected the stage sft or pt, found {stage!r}: its loss needs other networks beside this one")
    kind = config.get("finetuning_type", "lora" if factory else "full")
    if kind not in ("full", "lora"):
        raise UserError(f"expected the finetuning_type full or lora, found {kind!r}: change it, or use --adapter")
    values = job.values
    values["batch_size"] = _number(config, "per_device_train_batch_size", 8)
    values["accumulate"] = _number(config, "gradient_accumulation_steps", 1)
    values["optimizer"] = str(config.get("optim", _OPTIMIZER))
    if "optim" not in config:
        job.notes.append(f"optim is not set: taken as {_OPTIMIZER}, the Trainer's default with torch 2.8 or newer")
    values["checkpointing"] = factory_checkpointing(config) if factory else trainer_checkpointing(config)
    length = next((config[name] for name in _LENGTHS if config.get(name)), 2048 if factory else None)
    if length is not None:
        values["input"] = str(length)
    values["packed"] = bool(config.get("packing") or config.get("neat_packing") or stage == "pt")
    half = "bf16" if config.get("bf16") else "fp16" if config.get("fp16") else None
    values["autocast"] = half
    pure = bool(config.get("pure_bf16"))
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if pure:
        values |= {"dtype": "bf16", "autocast": None}
    elif factory:  # a frozen base is in 16 bits, trained parameters are in 32
        values["dtype"] = half if kind == "lora" and half else "fp32"
    elif named and named != "auto":
        values["dtype"] = named
    else:
        job.notes.append("parameters are taken to be in fp32: add --dtype bf16 if the network is loaded in bf16")
    if factory and kind == "lora":
        _read_lora_of_factory(config, values)


def _read_lora_of_factory(config: Mapping[str, Any], values: dict[str, Any]) -> None:
    names = _names(config, "lora_target") or ["all"]
    values["lora"] = _without_none(
        {
            "r": _number(config, "lora_rank", 8),
            "target_modules": "all-linear" if names == ["all"] else names,
            "lora_dropout": config.get("lora_dropout") or None,
            "modules_to_save": _names(config, "additional_target"),
            "use_dora": config.get("use_dora") or None,
        }
    )
    bits = config.get("quantization_bit")
    if bits is not None:
        method = str(config.get("quantization_method", "bnb")).lower()
        if method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
            raise UserError(
                f"expected 4 or 8 bits by bitsandbytes, found quantization_bit {bits} by {method}: name another form "
                "by --quantize"
            )
        double = "_dq" if config.get("double_quantization", True) else ""
        form = f"{config.get('quantization_type', 'nf4')}{double}" if bits == 4 else "int8"
        values["quantize"] = form if config.get("upcast_layernorm") else f"{form}(upcast=False)"


def _read_axolotl(config: Mapping[str, Any], job: ConfiguredJob) -> None:
    """Read a configuration of axolotl, which loads networks in the half precision that it trains with."""
    if config.get("rl"):
        raise UserError(f"expected supervised fine-tuning, found rl: {config['rl']!r}: its loss needs other networks")
    values = job.values
    values["batch_size"] = _number(config, "micro_batch_size", 1)
    values["accumulate"] = _number(config, "gradient_accumulation_steps", 1)
    values["input"] = str(_number(config, "sequence_len", 512))
    values["packed"] = bool(config.get("sample_packing"))
    values["checkpointing"] = axolotl_checkpointing(config)
    values["optimizer"] = str(config.get("optimizer", "adamw_torch_fused"))
    half = "bf16" if config.get("bf16", "auto") else "fp16" if config.get("fp16") else None
    values["dtype"], values["autocast"] = half or "fp32", half
    adapter = config.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise UserError(f"expected the adapter lora or qlora, found {adapter!r}: change it, or use --adapter")
    if adapter is None:
        return
    linear = config.get("lora_target_linear")
    values["lora"] = _without_none(
        {
            "r": _number(config, "lora_r", 8),
            "target_modules": "all-linear" if linear else _names(config, "lora_target_modules"),
            "lora_dropout": config.get("lora_dropout") or None,
            "modules_to_save": _names(config, "lora_modules_to_save"),
            "use_dora": config.get("peft_use_dora") or None,
        }
    )
    if config.get("load_in_4bit") or (adapter == "qlora" and not config.get("gptq")):
        values["quantize"] = "nf4_dq(upcast=False)" if config.get("flash_attention") else "nf4_dq"
    elif config.get("load_in_8bit"):
        values["quantize"] = "int8"
    elif config.get("gptq"):
        values["quantize"] = "gptq"


def _names(config: Mapping[str, Any], key: str) -> list[str] | None:
    """Return the names of modules under a key, a list or a text with commas; None if there are none."""
    value = config.get(key)
    names = value.split(",") if isinstance(value, str) else value if value is not None else []
    if not isinstance(names, list) or not all(isinstance(item, str) for item in names):
        raise UserError(
            f"expected {key} to be names of modules such as q_proj,v_proj, found {value!r}: write them like that"
        )
    return [item.strip() for item in names] if value else None


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
