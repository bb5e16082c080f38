"""Specs with names: those of the public sets, and those that the operator prepared."""

from collections.abc import Mapping
from pathlib import Path

from vramcast.errors import UserError
from vramcast.files.json_lines import numbered_lines, parse_object
from vramcast.jobs.families import FAMILIES, make_spec
from vramcast.jobs.families.gpumemnet import spec_of_filename
from vramcast.jobs.spec import Spec
from vramcast.jobs.targets import GPUMEMNET


def read_named_specs(path: Path | None) -> dict[str, Spec]:
    """Read JSON lines of {"name": ..., "spec": ...}. Specs of libraries are allowed, since the operator wrote them."""
    if path is None:
        return {}
    specs: dict[str, Spec] = {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"expected named specs in {path}, found: {error}; check --named-specs") from error
    for number, line in numbered_lines(data):
        try:
            entry = parse_object(line, "with a name and a spec")
            specs[str(entry["name"])] = _canonical(Spec.from_json(entry["spec"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'expected {{"name": ..., "spec": ...}} in line {number} of {path}, found: {error!r}; fix it'
            ) from error
    return specs


def _canonical(spec: Spec) -> Spec:
    """Return the form that the spec of a request gets, so that both are the same job."""
    return make_spec(spec.family, spec.network, spec.training) if spec.family in FAMILIES else spec


def spec_of_name(name: str, named_specs: Mapping[str, Spec]) -> Spec:
    """Return the spec with a name."""
    if name.startswith(GPUMEMNET):
        return spec_of_filename(name.removeprefix(GPUMEMNET))
    if name in named_specs:
        return named_specs[name]
    names = ", ".join(sorted(named_specs)[:20]) or "none"
    raise UserError(
        f"expected a file name of the public sets after '{GPUMEMNET}', or a network that the operator prepared "
        f"({names}), found {name[:100]!r}: send a spec, a layer table or features instead"
    )
