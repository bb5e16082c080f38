"""Simulate jobs of the public table under other assumptions: `python -m benchmarks.collocation.assumptions`.

All figures are simulated. It takes a minute.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.collocation.tables import DEVICE
from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.device.profiles import load_profile
from vramcast.jobs.recipes import spec_of_recipe
from vramcast.virtual_gpu.allocator.sizes import MIB

TERABYTE_ROWS = [
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208, 11156, 122, 4, 970, 14,
    9994222, 7267859, 9946608, 415421, 12420, 101, 36,
]  # fmt: skip
"""Rows of Criteo's terabyte with at most ten million a table (facebookresearch/dlrm, --max-ind-range=10000000)."""
TERABYTE = {"rows": TERABYTE_ROWS, "bottom": [13, 512, 256, 64], "top": [512, 512, 256, 1]}
SPEED = {"rows": [1_000_000] * 8, "bottom": [512, 512, 64], "top": [1024, 1024, 1024, 1]}
"""The model with which the paper of DLRM measures speed."""
Options = Mapping[str, Any]
CASES: tuple[tuple[str, str, int, Options, Options], ...] = (
    ("DLRM, script for the terabyte", "dlrm", 32768, TERABYTE, {}),
    ("DLRM, script for the terabyte, no tables", "dlrm", 32768, {**TERABYTE, "rows": [1] * 26}, {}),
    ("DLRM, script for Kaggle", "dlrm", 32768, {}, {}),
    ("DLRM, script for Kaggle, no tables", "dlrm", 32768, {"rows": [1] * 26}, {}),
    ("DLRM, the paper's model for speed", "dlrm", 32768, SPEED, {}),
    ("DLRM, the paper's model for speed, no tables", "dlrm", 32768, {**SPEED, "rows": [1] * 8}, {}),
    ("U-Net, cudnn.benchmark", "unet", 8, {}, {}),
    ("U-Net", "unet", 8, {}, {"cudnn_benchmark": False}),
    ("XLNet base, 8 x 512 tokens", "xlnet_base", 8, {}, {}),
    ("XLNet large, 4 x 512 tokens", "xlnet_large", 4, {}, {}),
    ("XLNet large, 8 x 512 tokens", "xlnet_large", 8, {}, {}),
)
"""Name, recipe, batch size, and changes of the network and of its training."""


def lines() -> Iterator[str]:
    """Yield a table: memory on the device, without the allocator's cache, and with the largest trial of cuDNN."""
    yield "| job | on the device, MiB | without cache | with a trial |"
    yield "| --- | ---: | ---: | ---: |"
    backend = VirtualBackend(load_profile(DEVICE), tables=True)
    for name, recipe, batch_size, network, training in CASES:
        spec = spec_of_recipe(recipe, batch_size, network)
        measured = backend.measure(replace(spec, training=replace(spec.training, **training))).measurement
        used = (measured.device_used_bytes or 0) // MIB
        breakdown = {key: value // MIB for key, value in measured.breakdown.items()}
        trial = (measured.trial_bytes or 0) // MIB
        with_trial = f"{trial + breakdown['context']:,}" if trial else ""
        yield f"| {name} | {used:,} | {used - breakdown['allocator_cache']:,} | {with_trial} |"


def main() -> None:
    for line in lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
