"""Cost of an answer from a layer table: `python -m benchmarks.performance.table_speed`.

Every question is about a table that was not asked about before: nothing of an earlier answer is reused. Times are of
the CPU, of one thread, because other work on the machine does not count in them.
"""

import statistics
import time
from dataclasses import replace

import torch

from vramcast.device.profiles import load_profile
from vramcast.jobs.analysis.layers import detailed_table
from vramcast.jobs.families.external import build_external
from vramcast.jobs.families.gpumemnet import spec_of_filename
from vramcast.jobs.job import table_of
from vramcast.jobs.spec import LayerTable
from vramcast.models.predictor import TABLES_ALONE, Predictor, Question
from vramcast.virtual_gpu.training.setup import TrainingSetup

_NETWORKS = ("resnet18", "resnet50", "mobilenetv3_small_050", "vit_tiny_patch16_224", "convnext_tiny", "vgg16",
             "swin_tiny_patch4_window7_224", "efficientnet_b0")  # fmt: skip
_PUBLISHED = "input:784_output:10_depth:{}_arch:pyramid_batch:64.out"
_BATCH, _REPEATS, _SINGLES = 256, 7, 300
_DEVICE = "a100_40gb"
_SETUPS = [TrainingSetup(batch_size=1 + index) for index in range(_BATCH)]


def _timm(name: str) -> LayerTable:
    network = {"name": name, "input_shape": [3, 224, 224], "num_classes": 1000}
    module, inputs = build_external("timm", network)
    return detailed_table(module, [torch.empty(2, *item.shape, device="meta") for item in inputs])


def _questions(tables: list[LayerTable], count: int) -> list[Question]:
    profile = load_profile(_DEVICE)
    return [
        Question.of_table("table", replace(tables[index % len(tables)]), _SETUPS[index], profile)
        for index in range(count)
    ]


def _rate(predictor: Predictor, tables: list[LayerTable]) -> float:
    """Return tables a second in batches, from the table to the answer: the median of several batches."""
    seconds = []
    for _ in range(_REPEATS):
        start = time.process_time()
        predictor.answers(_questions(tables, _BATCH))
        seconds.append(time.process_time() - start)
    return _BATCH / statistics.median(seconds)


def _one(predictor: Predictor, tables: list[LayerTable]) -> float:
    """Return the median of the seconds of one answer."""
    seconds = []
    for index in range(_SINGLES):
        start = time.process_time()
        predictor.answers(_questions([tables[index % len(tables)]], 1))
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def main() -> None:
    torch.set_num_threads(1)
    predictor = Predictor.load(TABLES_ALONE)
    groups = {
        "MLPs of GPUMemNet": [table_of(spec_of_filename(_PUBLISHED.format(depth))) for depth in range(2, 10)],
        "eight networks of timm": [_timm(name) for name in _NETWORKS],
    }
    print("| tables | layers, mean | one answer, median | tables a second in batches of 256 |")
    print("| --- | --- | --- | --- |")
    for name, tables in groups.items():
        layers = statistics.fmean(len(table.layers) for table in tables)
        print(f"| {name} | {layers:.0f} | {1e3 * _one(predictor, tables):.2f} ms | {_rate(predictor, tables):,.0f} |")


if __name__ == "__main__":
    main()
