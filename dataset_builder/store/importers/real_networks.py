"""The table of well-known networks that GPUMemNet, CARMA and AEGIS measured one after the other, on three stacks.

For validation alone: nothing may be fitted to these rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dataset_builder.schema import Measurement, Spec, Status, TrainingSetup
from dataset_builder.store.importers.layout import Label, Layout, Record, measured

_CITATION = "GPUMemNet, CARMA and AEGIS, E. Yousefzadeh-Asl-Miandoab et al., IT University of Copenhagen, CC BY 4.0"
_SUMMARY_BATCH = 2
"""torchsummary runs a batch of two through a network before it is trained."""

_VISION: Mapping[str, tuple[str, dict[str, Any]]] = {
    "vgg16": ("torchvision", {"name": "vgg16"}),
    "resnet50": ("torchvision", {"name": "resnet50"}),
    "mobilenet": ("torchvision", {"name": "mobilenet_v2"}),
    "efficientnet": ("torchvision", {"name": "efficientnet_b0"}),
    "inception": ("torchvision", {"name": "inception_v3", "arguments": {"aux_logits": False, "init_weights": False}}),
    "xception": ("timm", {"name": "xception"}),
}
_LANGUAGE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "BERT_base": ("BertForMaskedLM", {"vocab_size": 28996}),
    "BERT_large": (
        "BertForMaskedLM",
        {
            "vocab_size": 28996,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "xlnet_base": ("XLNetForSequenceClassification", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
    "xlnet_large": ("XLNetForSequenceClassification", {}),
    "gpt2_xl": ("GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
}
_TWO_GPUS = frozenset({"gpt2_large"})
"""Split over two cards by DataParallel: not a job of one."""


def _spec(record: Record) -> Spec | None:
    name, batch_size = record["model"], int(record["batch_size"])
    if name in _TWO_GPUS:
        return None
    if name in _VISION:
        library, network = _VISION[name]
        shape = [int(size) for size in record["input"].split("x")]
        training = TrainingSetup(batch_size=batch_size, optimizer="Adam", dry_run_batch_size=_SUMMARY_BATCH)
        return Spec(library, {**network, "input_shape": shape, "num_classes": int(float(record["classes"]))}, training)
    architecture, config = _LANGUAGE[name]
    network = {"architecture": architecture, "config": config, "sequence": int(record["input"].removeprefix("seq"))}
    # a forward pass, and one of modelsummary, before training
    training = TrainingSetup(
        batch_size=batch_size, optimizer="AdamW", loss="own", dry_run_batch_size=batch_size, dry_run_passes=2
    )
    return Spec("hf", network, training)


def _column(name: str) -> Callable[[Record, Spec], Measurement | None]:
    return lambda record, _: measured(record, Status.OK, column=name) if record.get(name) else None


LAYOUT = Layout(
    "real networks",
    frozenset({"model", "batch_size", "input", "classes", "actual_mib_2024", "carma2025_mib", "aegis2026_mib"}),
    _spec,
    (
        Label("a100_40gb_gpumemnet_2024", "2024", _column("actual_mib_2024")),
        Label("a100_40gb", "2025", _column("carma2025_mib")),
        Label("a100_40gb", "2026", _column("aegis2026_mib")),
        Label("rtx_2080ti", "2026", _column("rtx2080ti_mib")),
    ),
    _CITATION,
)
