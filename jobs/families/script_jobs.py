"""Networks of public scripts that meta tensors cannot run: sparse gradients, or shapes that vary from step to step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from vramcast.jobs.families.dlrm import Dlrm, criteo_batches
from vramcast.jobs.families.external import build_external
from vramcast.jobs.families.mask_rcnn import MaskRcnn, coco_batches
from vramcast.jobs.families.padded_lines import padded_batches
from vramcast.jobs.spec import Spec

LENGTHS_VARY = "the lengths of batches vary: some batches with assumed lengths were traced, the longest among them"


@dataclass(frozen=True)
class ScriptSubject:
    """A network and its batches, to be trained for some steps on a virtual GPU that it sees as CUDA."""

    make: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    """Yields any number of batches of a size."""
    steps: int = 5
    nonzero_fraction: float = 1.0
    """The part of its places that a mask with unknown values selects."""
    notes: tuple[str, ...] = ()


def _dlrm(network: Mapping[str, Any]) -> ScriptSubject:
    rows, bottom, top = network["rows"], network["bottom"], network["top"]
    return ScriptSubject(partial(Dlrm, rows, bottom, top), partial(criteo_batches, dense=bottom[0], tables=len(rows)))


def _mask_rcnn(network: Mapping[str, Any]) -> ScriptSubject:
    steps, seed = int(network["steps"]), int(network.get("seed", 0))
    return ScriptSubject(
        partial(MaskRcnn, network["num_classes"], seed),
        partial(coco_batches, seed=seed),
        steps,
        nonzero_fraction=0.25,  # each of the four maps of the pyramid gets a quarter of the RoIs
        notes=(f"the shapes of batches vary: {steps} batches with assumed sizes of COCO's images were traced",),
    )


def _padded_lines(network: Mapping[str, Any]) -> ScriptSubject:
    """Return a network of transformers that is trained on lines, each batch as long as its longest line."""
    inputs = len(build_external("hf", network)[1]) - 1  # without the labels
    return ScriptSubject(
        lambda: build_external("hf", network)[0],
        partial(padded_batches, inputs=inputs, longest=network["sequence"], seed=int(network.get("seed", 0))),
        int(network["steps"]),
        notes=(LENGTHS_VARY,),
    )


_SCRIPTS: Mapping[str, Callable[[Mapping[str, Any]], ScriptSubject]] = {
    "dlrm": _dlrm,
    "mask_rcnn": _mask_rcnn,
    "padded_lines": _padded_lines,
}


def script_subject(spec: Spec) -> ScriptSubject | None:
    """Return the script of a spec that needs a virtual GPU, None for all other specs."""
    make = _SCRIPTS.get(str(spec.network.get("name"))) if spec.family == "script" else None
    return make(spec.network) if make else None
