"""Specs that go by a name: those of the public sets, and those that the operator prepared."""

import json
from collections.abc import Mapping
from pathlib import Path

from vramcast.dataset_builder.families import FAMILIES, make_spec
from vramcast.dataset_builder.families.gpumemnet import spec_of_filename
from vramcast.dataset_builder.jobs.targets import GPUMEMNET
from vramcast.dataset_builder.schema import Spec
from vramcast.errors import UserError


def read_named_specs(path: Path | None) -> dict[str, Spec]:
    """JSON lines of {"name": ..., "spec": ...}; a spec may be of a library's network, since the operator wrote it."""
    if path is None:
        return {}
    known: dict[str, Spec] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"expected known networks in {path}, found: {error}; check --known") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found = json.loads(line)
                known[str(found["name"])] = _canonical(Spec.from_json(found["spec"]))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f'expected {{"name": ..., "spec": ...}} in line {number} of {path}, found: {error!r}; mend it'
                ) from error
    return known


def _canonical(spec: Spec) -> Spec:
    """In the form that a request's spec gets, so that both are one job."""
    return make_spec(spec.family, spec.network, spec.training) if spec.family in FAMILIES else spec


def spec_of_name(name: str, known: Mapping[str, Spec]) -> Spec:
    """The spec behind a name."""
    if name.startswith(GPUMEMNET):
        return spec_of_filename(name.removeprefix(GPUMEMNET))
    if name in known:
        return known[name]
    there = ", ".join(sorted(known)[:20]) or "none"
    raise UserError(
        f"expected a file name of the public sets after '{GPUMEMNET}', or a network that the operator prepared "
        f"({there}), found {name[:100]!r}: send a spec, a layer table or features instead"
    )
