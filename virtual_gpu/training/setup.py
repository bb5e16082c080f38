"""How a network is trained: every option that decides memory, listed once for all interfaces."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from vramcast.errors import UserError, check_choice, check_count, check_flag, check_fraction
from vramcast.virtual_gpu.distributed.parallelism import STRATEGIES, Parallelism, parallelism_of, split_options
from vramcast.virtual_gpu.training.checkpointing_forms import (
    CHECKPOINTING_WORDS,
    CheckpointingForm,
    canonical_checkpointing,
    checkpointing_form,
)
from vramcast.virtual_gpu.training.finetuning_options import QUANTIZED, adapter_call, parse_pairs, quantization_call
from vramcast.virtual_gpu.training.loss_forms import canonical_kernels, canonical_loss_form, with_fused_loss

LOSSES = ("cross_entropy", "bce_with_logits", "bce", "mse", "own")
"""'own' is for networks that return their loss, as those of transformers do."""
IMPLEMENTATIONS = ("default", "foreach", "fused", "single", "in_backward")
"""'in_backward' updates each parameter as soon as its gradient is there."""
COMPILED = ("none", "blocks", "model")
MODES = ("training", "inference", "evaluation", "generate")
CACHES = ("dynamic", "static")
ZERO_GRAD = ("before_forward", "before_backward", "after_step")
DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPE_SYNONYMS: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@lru_cache(maxsize=1024)  # bounded, because clients of a service choose the texts
def parse_call(text: str) -> tuple[str, Mapping[str, Any]]:
    """Split 'SGD(momentum=0.9)' into its name and its keyword arguments."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, MappingProxyType({})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            arguments = {item.arg: ast.literal_eval(item.value) for item in node.keywords if item.arg}
            if len(arguments) == len(node.keywords):  # none twice, and no '**'
                return node.func.id, MappingProxyType(arguments)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: too deeply nested
        pass
    raise UserError(f"expected a name such as 'Adam' or 'SGD(momentum=0.9)', found {text!r}: write it like that")


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a call with sorted keyword arguments."""
    inner = ", ".join(f"{key}={arguments[key]!r}" for key in sorted(arguments))
    return f"{name}({inner})" if inner else name


def _parallelism(text: str, options: Mapping[str, Any] = MappingProxyType({})) -> Parallelism:
    name, arguments = parse_call(text)
    return parallelism_of(name, {**arguments, **options})


def parallel_text(text: str, options: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return one text for equal parallelism: a strategy with its options that are not defaults."""
    parallelism = _parallelism(text, options)
    return call_text(parallelism.strategy, parallelism.without_defaults())


def with_shorthands(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move options such as `world_size` into the text of `parallel`, and `lora` into that of `adapter`."""
    options, others = split_options(values)
    lora = others.pop("lora", None)
    if lora is not None and lora is not False:
        if others.get("adapter") is not None:
            raise UserError(f"expected lora or adapter, found both: leave out adapter={others['adapter']!r}")
        others["adapter"] = adapter_text("lora" if lora is True else call_text("lora", _lora_arguments(lora)))
    if others.get("parallel") is not None:
        if not isinstance(others["parallel"], str):
            raise UserError(f"expected parallel to be a text, found {others['parallel']!r}: change it")
        others["parallel"] = parallel_text(others["parallel"], options)
    return others


def _lora_arguments(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, str | Mapping):
        raise UserError(f"expected lora such as 'r=16,targets=q_proj,v_proj', found {value!r}: write it like that")
    return parse_pairs(value) if isinstance(value, str) else value


def adapter_text(text: str) -> str:
    """Return one text for equal adapters: 'lora:r=16,targets=q_proj' is "lora(r=16, target_modules='q_proj')"."""
    return call_text(*adapter_call(text, parse_call))


def quantization_text(text: str) -> str:
    """Return one text for equal forms of quantised weights: 'NF4-dq' is 'nf4_dq'."""
    return call_text(*quantization_call(text, parse_call))


@dataclass(frozen=True)
class Option:
    """The definition of a training option, which the command line, the jobs file and the service read."""

    kind: str
    """'count', 'flag', 'choice', 'fraction', 'text', or 'form': a flag that also takes a text."""
    help: str
    choices: tuple[str, ...] = ()
    least: int = 1
    most: int = 2**24
    """The largest count that a service accepts."""
    bare: str | None = None
    """The choice that the bare option of the command line stands for."""
    from_network: bool = False
    """Whether the network decides it, so that the command line has no such option."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """The choices and their synonyms."""
        return (*self.choices, *(long for long, short in DTYPE_SYNONYMS.items() if short in self.choices))


_CONTIGUOUS = ("fsdp2", "hsdp")
"""Strategies that refuse parameters in channels-last layout (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""


_MOST_SAMPLES = 2**31 - 1
"""In a batch: kernels of CUDA count rows in 32 bits, and sizes beyond overflow torch's own counts."""


def _option(default: Any, kind: str, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(kind, text, **more)})


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How a network is trained, as far as it decides the memory. Equal setups are normalised to one form."""

    batch_size: int = field(metadata={"option": Option("count", "samples in a batch")})
    last_batch_size: int | None = _option(None, "count", "samples in the odd last batch of an epoch, if there is one")
    loss: str = _option("cross_entropy", "choice", "the loss", choices=LOSSES, from_network=True)
    optimizer: str = _option("Adam", "text", "a class of torch.optim, as in 'sgd(momentum=0.9)', or adamw_8bit")
    implementation: str = _option(
        "default", "choice", "implementation of the optimizer; default: the one that torch picks on CUDA",
        choices=IMPLEMENTATIONS,
    )  # fmt: skip
    dtype: str = _option("fp32", "choice", "dtype of parameters and inputs", choices=tuple(DTYPE_BYTES))
    autocast: str | None = _option(None, "choice", "mixed precision", choices=("bf16", "fp16"), bare="bf16")
    accumulate: int = _option(1, "count", "batches to one optimizer step", most=1024)
    checkpointing: bool | str = _option(
        False,
        "form",
        f"recompute blocks in the backward pass, in one of several forms: {', '.join(CHECKPOINTING_WORDS)}",
    )
    dry_run_batch_size: int | None = _option(None, "count", "batch size of forward passes before the training")
    dry_run_passes: int = _option(1, "count", "number of forward passes before the training", most=64)
    prefetched_batches: int = _option(
        0, "count", "batches that a loader puts on the device ahead of time", least=0, most=64
    )
    cudnn_benchmark: bool = _option(False, "flag", "set torch.backends.cudnn.benchmark")
    channels_last: bool = _option(False, "flag", "convert network and images to torch.channels_last")
    zero_grad: str = _option(
        "before_forward", "choice", "when gradients are dropped; before_backward holds old ones through the forward",
        choices=ZERO_GRAD,
    )  # fmt: skip
    parallel: str | None = _option(
        None, "text", f"a strategy for several GPUs, as in 'fsdp2(world_size=8)': {', '.join(STRATEGIES)}"
    )
    adapter: str | None = _option(
        None, "text", "train an adapter of peft on the frozen network, as in 'lora:r=16,targets=q_proj,v_proj' or ia3"
    )
    quantize: str | None = _option(
        None, "text", f"keep the frozen weights of linear layers quantised: {', '.join(QUANTIZED)}"
    )
    loss_form: str = _option(
        "default", "text", "the loss of a language model: default, upcast, chunked=N, or fused, which is Liger's"
    )
    liger: bool | str = _option(
        False,
        "form",
        "use Liger's kernels in a network of transformers: its default ones, or some as in rms_norm,rope",
    )
    compile: str = _option(
        "none", "choice", "what torch.compile compiles: blocks, each by itself, or the whole network (model)",
        choices=COMPILED, bare="model",
    )  # fmt: skip
    compile_loss: bool = _option(False, "flag", "compile the loss by torch.compile")
    memory_budget: float | None = _option(
        None, "fraction", "the activation_memory_budget of torch.compile: the part of activations that it may save"
    )
    mode: str = _option(
        "training", "choice", "what is run: evaluation computes the loss, inference does not", choices=MODES
    )
    new_tokens: int | None = _option(None, "count", "tokens that --mode generate adds to the prompt", most=2**20)
    cache: str | None = _option(
        None, "choice", "the key-value cache of --mode generate; default: the one of the library", choices=CACHES
    )

    def __post_init__(self) -> None:
        self._check_values()
        self._check_compiled()
        self._check_mode()
        self._normalise_optimizer()
        object.__setattr__(self, "checkpointing", canonical_checkpointing(self.checkpointing))
        self._normalise_loss()
        if self.implementation == "in_backward" and (self.accumulate > 1 or self.parallel or self.autocast == "fp16"):
            raise UserError(
                "expected one batch to a step, one GPU and no gradient scaler beside implementation=in_backward, found "
                "others: gradients are freed in the backward pass; leave it out"
            )
        if self.parallel is not None:
            object.__setattr__(self, "parallel", parallel_text(str(self.parallel)))
            if self.channels_last and _parallelism(self.parallel).strategy in _CONTIGUOUS:
                raise UserError(
                    f"expected no channels_last beside parallel={self.parallel}, found it: FSDP2 shards contiguous "
                    "parameters only; leave channels_last out, or use ddp or fsdp1"
                )
        if self.adapter is not None:
            object.__setattr__(self, "adapter", adapter_text(str(self.adapter)))
        if self.quantize is not None:
            object.__setattr__(self, "quantize", quantization_text(str(self.quantize)))
            if self.adapter is None and self.is_training:
                raise UserError(
                    f"expected an adapter beside quantize={self.quantize}, found none: quantised weights cannot be "
                    "trained; add --lora"
                )
        if self.dry_run_batch_size is None:
            object.__setattr__(self, "dry_run_passes", 1)

    def _check_values(self) -> None:
        """Raise if an option is not of its kind; replace synonyms."""
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if option.kind == "count":
                check_count(f"training.{name}", value, option.least, _MOST_SAMPLES if "batch_size" in name else None)
            elif option.kind == "flag":
                check_flag(f"training.{name}", value)
            elif option.kind == "choice":
                canonical = DTYPE_SYNONYMS.get(value, value) if isinstance(value, str) else value
                check_choice(f"training.{name}", canonical, option.choices)
                object.__setattr__(self, name, canonical)
            elif option.kind == "fraction":
                check_fraction(f"training.{name}", value)

    def _check_compiled(self) -> None:
        """Raise if an option of the compiler has nothing to act on."""
        if self.memory_budget is not None and self.compile == "none":
            raise UserError(
                f"expected compile=blocks or compile=model beside memory_budget={self.memory_budget}, found none: "
                "the budget is that of torch.compile; add --compile model"
            )

    def _check_mode(self) -> None:
        """Raise if an option belongs to another mode; without training there is no optimizer."""
        if self.mode != "generate" and (self.new_tokens or self.cache):
            name = "new_tokens" if self.new_tokens else "cache"
            raise UserError(
                f"expected mode=generate beside {name}={getattr(self, name)}, found mode={self.mode}: add --mode "
                "generate, or leave it out"
            )
        if self.is_training:
            return
        if self.mode == "generate" and self.new_tokens is None:
            raise UserError("expected new_tokens beside mode=generate, found none: add --new-tokens N")
        for name in _TRAINING_ALONE:
            if getattr(self, name) != OPTION_DEFAULTS[name]:
                raise UserError(
                    f"expected no {name}={getattr(self, name)} beside mode={self.mode}, found it: nothing is trained; "
                    "leave it out"
                )
        if self.optimizer not in _UNNAMED_OPTIMIZERS:
            raise UserError(
                f"expected no optimizer beside mode={self.mode}, found {self.optimizer}: nothing is trained; leave it "
                "out"
            )
        object.__setattr__(self, "optimizer", NO_OPTIMIZER)

    def _normalise_loss(self) -> None:
        """Move the fused form of the loss to the kernels of Liger, whose it is."""
        form, kernels = canonical_loss_form(self.loss_form), canonical_kernels(self.liger)
        if form == "fused":
            form, kernels = "default", with_fused_loss(kernels)
        object.__setattr__(self, "loss_form", form)
        object.__setattr__(self, "liger", kernels)
        if form != "default" and kernels:
            raise UserError(
                f"expected loss_form={form} or Liger's kernels, found both: Liger replaces the loss; leave one out"
            )
        if self.parallel is not None and self.needs_cuda:
            raise UserError(
                "expected one GPU beside Liger's kernels or offloaded checkpoints, found parallel="
                f"{self.parallel}: leave one out, or run your own script by vramcast run -- torchrun"
            )

    def _normalise_optimizer(self) -> None:
        """Move the arguments `fused` and `foreach` of the optimizer to `implementation`."""
        name, arguments = parse_call(str(self.optimizer))
        fused, foreach = arguments.get("fused"), arguments.get("foreach")
        if fused or foreach is not None:
            implementation = "fused" if fused else "foreach" if foreach else "single"
            if (fused and foreach) or self.implementation not in ("default", implementation):
                raise UserError(
                    f"expected one implementation of {name}, found {self.optimizer} with "
                    f"implementation={self.implementation}: drop one of them"
                )
            object.__setattr__(self, "implementation", implementation)
        rest = {key: value for key, value in arguments.items() if key not in ("fused", "foreach")}
        object.__setattr__(self, "optimizer", call_text(name, rest))

    @property
    def parallelism(self) -> Parallelism | None:
        """The strategy for several GPUs with its options, None for one GPU."""
        return None if self.parallel is None else _parallelism(self.parallel)

    @property
    def needs_trace(self) -> bool:
        """True if only a trace can follow the setup: several ranks, an adapter, other steps, another network."""
        return bool(self.traced_options)

    @property
    def traced_options(self) -> tuple[str, ...]:
        """The options that only a trace can follow, as in 'loss_form=upcast'."""
        used = {
            "parallel": self.parallel is not None,
            "adapter": self.adapter is not None,
            "implementation": self.implementation == "in_backward",
            "checkpointing": isinstance(self.checkpointing, str),
            "loss_form": self.loss_form != "default",
            "liger": bool(self.liger),
            "compile": self.compile != "none",
            "compile_loss": self.compile_loss,
            "mode": not self.is_training,
        }
        return tuple(f"{name}={getattr(self, name)}" for name, is_used in used.items() if is_used)

    @property
    def needs_cuda(self) -> bool:
        """True if the step must see its tensors on a CUDA device.

        Liger asks for it, offloading has two devices, and libraries choose kernels of inference by the device.
        """
        form = self.checkpointing_form
        return bool(self.liger) or not self.is_training or (form is not None and form.offload)

    @property
    def is_training(self) -> bool:
        """False if the network is only evaluated, or generates."""
        return self.mode == "training"

    @property
    def is_compiled(self) -> bool:
        """True if torch.compile compiles a part of the step."""
        return self.compile != "none" or self.compile_loss

    @property
    def checkpointing_form(self) -> CheckpointingForm | None:
        """The form of activation checkpointing, None without it."""
        return checkpointing_form(self.checkpointing)

    @property
    def without_rate(self) -> "TrainingSetup":
        """The same without the learning rate, which decides no memory: a sweep over it is one job."""
        name, arguments = parse_call(self.optimizer)
        rest = {key: value for key, value in arguments.items() if key != "lr"}
        return replace(self, optimizer=call_text(name, rest))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes of all steps, in the order in which training meets them."""
        sizes = (self.dry_run_batch_size, self.batch_size, self.last_batch_size)
        return tuple(dict.fromkeys(size for size in sizes if size is not None))


OPTIONS: Mapping[str, Option] = {item.name: item.metadata["option"] for item in fields(TrainingSetup)}
"""The options by name, in the order of their definition."""
OPTION_DEFAULTS: Mapping[str, Any] = {item.name: item.default for item in fields(TrainingSetup)}
_TRAINING_ALONE = (
    "implementation", "accumulate", "checkpointing", "dry_run_batch_size", "zero_grad", "parallel", "loss_form",
    "compile", "compile_loss",
)  # fmt: skip
"""Options that a run without training does not have, or that are not simulated there."""
NO_OPTIMIZER = "SGD"
"""Stands for none in the setup of a run without training: it has no state."""
_UNNAMED_OPTIMIZERS = ("Adam", "AdamW", NO_OPTIMIZER)
"""The defaults of setups and of requests."""
_OPTIONAL = {item.name for item in fields(TrainingSetup) if item.default is None}


def check_trained_whole(training: TrainingSetup) -> None:
    """Raise if a setup changes the network or what it saves, which a layer table cannot follow."""
    others = {"checkpointing": isinstance(training.checkpointing, str), "liger": bool(training.liger),
              "loss_form": training.loss_form != "default", "channels_last": training.channels_last,
              "compile": training.compile != "none", "compile_loss": training.compile_loss,
              "mode": not training.is_training}  # fmt: skip
    for name, is_used in others.items():
        if is_used:
            raise UserError(
                f"expected no {name}={getattr(training, name)} beside a layer table, found it: name the network itself"
            )
    if training.adapter is not None:
        raise UserError(
            f"expected no adapter beside a layer table, found {training.adapter}: name the network itself, or describe "
            "the layers of the adapter and the trainable shapes in the table"
        )
