"""The runs of xMem on an RTX 3060, an RTX 4060 and an A100.

A label is the rise of the memory in use since a first sample, so it holds no context. For CNNs, that sample was taken
while the weights were copied: the need lies in a band above the label, and the label of a row is its upper end.
"""

from collections.abc import Callable, Mapping, Sequence

from vramcast.dataset_builder.store.importers.layout import Layout, MeasuredColumn, Record
from vramcast.dataset_builder.store.importers.xmem_networks import CLASSIFIERS, IMAGE, LANGUAGE_NETWORKS
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.measurement import VARYING, Measurement, Status
from vramcast.virtual_gpu.training.setup import TrainingSetup

CITATION = "xMem, J. Shi et al., Middleware 2025, MIT"
_CNN = "CNN"
_TOKENS = 128
_LEAST_FULL_BATCH = 13
"""The longest text of a smaller batch is often shorter than `_TOKENS`."""
_ZERO_GRAD: Mapping[str, str] = {"0": "after_step", "1": "before_backward", "2": "after_step"}
"""By xMem's mode: 0 is before the batch is copied, which is the same for the allocator as the end of the last step."""
_DEFAULT_MODES: Mapping[str, str] = {_CNN: "1", "Transformer": "2"}


def _spec(record: Record) -> Spec:
    kind, name = record["kind"], record["model"]
    training = TrainingSetup(
        batch_size=int(record["batch_size"]),
        optimizer=record["optimizer"],
        zero_grad=_ZERO_GRAD[record["zero_grad_mode"] or _DEFAULT_MODES[kind]],
        loss="cross_entropy" if kind == _CNN else "own",
    )
    if kind == _CNN:
        classifier = CLASSIFIERS[_known(name, CLASSIFIERS)]
        images = {"name": classifier.name, "input_shape": list(IMAGE), "num_classes": classifier.num_classes}
        return Spec("torchvision", images, training)
    language = LANGUAGE_NETWORKS[_known(_short(name), LANGUAGE_NETWORKS)]
    network = {"architecture": language.architecture, "config": dict(language.config), "sequence": _TOKENS}
    return Spec("hf", network, training)


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _known(name: str, names: Mapping[str, object]) -> str:
    if name not in names:
        raise ValueError(f"the network {name!r}, which is none of {sorted(names)}")
    return name


def _column(gpu: str) -> Callable[[Record, Spec], Measurement | None]:
    return lambda record, _: _measurement(record) if record["gpu"].startswith(gpu) else None


def _measurement(record: Record) -> Measurement:
    status, evidence = Status.OK, None
    if record["real_oom"] == "true":
        status, evidence = Status.OOM, "the run ran out of memory; the value is the level that it reached"
    label_bytes = int(record["ground_bytes"])
    if record["kind"] != _CNN:
        return Measurement(status=status, device_used_bytes=label_bytes, evidence=evidence)
    classifier = CLASSIFIERS[record["model"]]
    return Measurement(
        status=status,
        device_used_bytes=label_bytes + 4 * classifier.parameters,
        least_used_bytes=label_bytes + classifier.least_missing_mib * MIB,
        evidence=evidence,
    )


def _notes(records: Sequence[Record]) -> dict[int, str]:
    return {index: VARYING for index, record in enumerate(records) if _varies(record)}


def _varies(record: Record) -> bool:
    if record["kind"] == _CNN or int(record["batch_size"]) >= _LEAST_FULL_BATCH:
        return False
    return not LANGUAGE_NETWORKS[_short(record["model"])].always_padded


LAYOUT = Layout(
    "xMem",
    frozenset({"kind", "model", "optimizer", "batch_size", "gpu", "ground_bytes", "real_oom", "zero_grad_mode"}),
    _spec,
    (
        MeasuredColumn("rtx_3060_xmem_2025", "2025", _column("RTX 3060")),
        MeasuredColumn("rtx_4060_xmem_2025", "2025", _column("RTX 4060")),
        MeasuredColumn("a100_40gb_xmem_2025", "2025", _column("A100")),
    ),
    CITATION,
    _notes,
)
