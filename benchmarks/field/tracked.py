"""PyTorch's MemTracker as an estimator: two training steps under FakeTensorMode, on a sample of the rows."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from tqdm import tqdm

from vramcast.jobs.spec import Spec
from vramcast.jobs.subject import subject_of
from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import parse_call
from vramcast.virtual_gpu.training.step import loss_of, make_optimizer, random_inputs

STEPS = 2
"""The first step makes the optimizer's state."""


class Tracked(Formula):
    """Peak of the active bytes that MemTracker counts: no context, no cache, no workspace."""

    name = "mem_tracker"

    def __init__(self, mib_by_id: Mapping[str, float]) -> None:
        self.mib_by_id = mib_by_id

    def used_bytes(self, example: Example) -> float:
        return self.mib_by_id[example.id] * MIB


def in_sample(spec: Spec, one_in: int) -> bool:
    """Return whether a spec is in the sample; its id decides, so the sample does not depend on the split."""
    return int(spec.id, 16) % one_in == 0


def tracked_mib(spec: Spec, track: bool = True) -> tuple[float, float]:
    """Return MemTracker's peak and its CPU seconds; without tracking, only time a FakeTensor pass."""
    start, setup = time.process_time(), spec.training
    subject, inputs = subject_of(spec)
    name, arguments = parse_call(setup.optimizer)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _leave_meta(subject)
        shapes = [(item.shape, item.vocabulary) for item in inputs]
        batch = random_inputs(shapes, setup.batch_size, setup.dtype, "cpu")  # fake CUDA needs a CUDA build
        if not track:
            loss_of(setup.loss, subject(*batch)).backward()
            return 0.0, time.process_time() - start
        optimizer = make_optimizer(name, dict(arguments), "foreach", subject.parameters())
        tracker = MemTracker()
        tracker.track_external(subject, optimizer, *batch)
        with tracker:
            for _ in range(STEPS):
                tracker.reset_mod_stats()
                optimizer.zero_grad()
                loss_of(setup.loss, subject(*batch)).backward()
                optimizer.step()
        peak = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    return peak / MIB, time.process_time() - start


def _leave_meta(subject: nn.Module) -> None:
    """Replace parameters and buffers on meta by fake tensors on the CPU; shared ones stay shared."""
    moved: dict[int, Tensor] = {}
    for module in subject.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    if id(old) not in moved:
                        new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                        is_parameter = isinstance(old, nn.Parameter)
                        moved[id(old)] = nn.Parameter(new, old.requires_grad) if is_parameter else new
                    tensors[name] = moved[id(old)]


def _figure(spec: Spec) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        mib, seconds = tracked_mib(spec)
    except Exception as error:  # torch's modes raise errors of any type
        return {"id": spec.id, "error": f"{type(error).__name__}: {error}"[:200]}
    return {"id": spec.id, "mib": mib, "seconds": seconds}


def tracked_figures(specs: Iterable[Spec], journal: Path, workers: int) -> list[dict[str, Any]]:
    """Return a figure or an error for each spec. Results are cached per version of torch."""
    by_id = {spec.id: spec for spec in specs}
    path = journal / f"mem_tracker-{torch.__version__}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    cached = {item["id"]: item for item in _read(path)}
    missing = [spec for key, spec in by_id.items() if key not in cached]
    if missing:
        cached |= {item["id"]: item for item in _track(missing, path, workers)}
    return [cached[key] for key in by_id]


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the cached figures; skip a line truncated by an interrupt."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def _track(specs: Sequence[Spec], path: Path, workers: int) -> Iterable[dict[str, Any]]:
    interval = 0.5 if sys.stderr.isatty() else 30
    with get_context("spawn").Pool(workers) as pool, path.open("a") as file:
        figures = pool.imap_unordered(_figure, specs)
        for figure in tqdm(figures, total=len(specs), desc="MemTracker", unit="row", mininterval=interval):
            file.write(json.dumps(figure) + "\n")
            file.flush()
            yield figure
