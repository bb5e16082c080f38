"""Compare workspaces of rules with those of the installed cuDNN, by precision and layout: no measurement is needed.

`VRAMCAST_CUDNN=DIR python -m benchmarks.study.layouts` traces known networks once for each precision and layout, and
simulates them on several GPUs, with the rules of each profile and with cuDNN's own execution plans (docs/devices.md).
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median

from tqdm import tqdm

from benchmarks.page import show
from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.device.profiles import load_profile
from vramcast.jobs.spec import Spec
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cudnn.library import installed_cudnn
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.training.setup import TrainingSetup

_STUDIED = (
    "resnet50", "resnext50_32x4d", "vgg16_bn", "densenet121", "efficientnet_b0", "mobilenetv3_large_100",
    "regnety_032", "convnext_tiny", "convnextv2_nano", "inception_v3", "xception41", "cspdarknet53", "hrnet_w18",
    "maxvit_tiny_tf_224", "edgenext_small", "repvgg_a2",
)  # fmt: skip
"""The principles were found with these."""
_OTHERS = (
    "resnet18", "wide_resnet50_2", "seresnet50", "dla34", "ghostnet_100", "mnasnet_100", "tf_efficientnetv2_s",
    "dm_nfnet_f0", "mixnet_s", "res2net50_26w_4s", "selecsls42b", "gernet_m", "mobilevit_s", "coatnet_0_rw_224",
    "poolformer_s12", "convnext_small",
)  # fmt: skip
_DEVICES = ("t4", "a100_40gb", "rtx_3060", "rtx_4090", "h100_80gb")
_PRECISIONS = (None, "fp16")
_BATCH = 32
Case = tuple[str, str | None, bool]


def errors_of(case: Case) -> dict[str, float]:
    """Return the relative difference of the rules' estimate from cuDNN's for one network, by device."""
    network, precision, channels_last = case
    training = TrainingSetup(batch_size=_BATCH, optimizer="SGD", autocast=precision, channels_last=channels_last)
    spec = Spec("timm", {"name": network, "num_classes": 1000, "input_shape": [3, 224, 224]}, training)
    release = installed_cudnn().release
    errors = {}
    for device in _DEVICES:
        profile = load_profile(device)
        trace = trace_spec(spec, profile.compute_capability)
        with_library = replace(profile, convolution=(), cudnn_release=release)
        rules, truth = (
            simulate(trace, item, AllocatorOptions()).reserved_bytes or 0 for item in (profile, with_library)
        )
        errors[device] = rules / truth - 1
    return errors


def table(results: dict[Case, dict[str, float]]) -> Iterator[str]:
    """Yield the lines of a table: median and mean of absolute differences, by precision, layout and device."""
    yield "| precision | layout | " + " | ".join(_DEVICES) + " |"
    yield "| --- | --- |" + " ---: |" * len(_DEVICES)
    for precision, channels_last in product(_PRECISIONS, (False, True)):
        chosen = [errors for (_, *kind), errors in results.items() if kind == [precision, channels_last]]
        figures = [[abs(errors[device]) for errors in chosen] for device in _DEVICES]
        cells = " | ".join(f"{median(item):.1%}, {fmean(item):.1%}" for item in figures)
        yield f"| {precision or 'fp32'} | {'channels last' if channels_last else 'NCHW'} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--studied", action="store_true", help="the networks that the principles were found with")
    parser.add_argument("--each", action="store_true", help="print the difference of each network, too")
    parser.add_argument("--page", type=Path, help="write the table into its marked part of this page")
    arguments = parser.parse_args()
    networks = _STUDIED if arguments.studied else _OTHERS
    cases = list(product(networks, _PRECISIONS, (False, True)))
    with ProcessPoolExecutor(arguments.workers) as pool:
        errors = list(tqdm(pool.map(errors_of, cases), total=len(cases), unit="network", mininterval=5))
    results = dict(zip(cases, errors, strict=True))
    print(f"{len(networks)} networks of timm, batch {_BATCH}: median and mean difference of the reserved memory")
    show(arguments.page, "study.layouts", "table", "\n".join(table(results)))
    if arguments.each:
        for case, by_device in results.items():
            print(*case, *(f"{device} {error:+.1%}" for device, error in by_device.items()))


if __name__ == "__main__":
    main()
