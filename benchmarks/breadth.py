"""How many known networks are classified without error: `python -m benchmarks.breadth [DIRECTORY]`, or `make breadth`.

Of timm, some networks of each of its modules, evenly chosen; of transformers, all whose sizes are known, built from
configs. What was done is kept, so that the run can be stopped and taken up again. Nothing is downloaded.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vramcast.dataset_builder.devices import DEFAULT_DEVICE, load_profile
from vramcast.dataset_builder.families.libraries import import_library
from vramcast.dataset_builder.jobs.architectures import ARCHITECTURES
from vramcast.dataset_builder.jobs.targets import Wanted, parse_target
from vramcast.dataset_builder.simulation.client import ChildInspection, TheirError
from vramcast.errors import UserError
from vramcast.models import load
from vramcast.models.questions import question_of

BATCH = 8
A_MODULE = 4
"""Networks of each module of timm."""
CHILD_LIFE = 40
"""Networks that one child process looks at: libraries keep some memory of each."""


def targets() -> Iterator[tuple[str, str]]:
    """(family, target): the names of each module of timm in order, evenly chosen; then those of transformers."""
    timm = import_library("timm")
    for module in sorted(timm.list_modules()):
        names = sorted(timm.list_models(module=module))
        chosen = (
            sorted({round(index * (len(names) - 1) / (A_MODULE - 1)) for index in range(A_MODULE)}) if names else []
        )
        yield from ((module, f"timm:{names[index]}") for index in chosen)
    yield from (("transformers", f"hf:{name}") for name in ARCHITECTURES)


def run(directory: Path) -> list[dict[str, Any]]:
    """Look at all of them that no earlier run has looked at."""
    directory.mkdir(parents=True, exist_ok=True)
    journal = directory / "networks.jsonl"
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    known = {item["target"] for item in done}
    left = [item for item in targets() if item[1] not in known]
    classifier, child, lived = load(), None, 0
    try:
        with journal.open("a") as file:
            for family, target in tqdm(left, unit="network", mininterval=1 if sys.stderr.isatty() else 30):
                wanted = Wanted(target=parse_target(target))
                if child is None or lived == CHILD_LIFE:
                    if child is not None:
                        child.close()
                    child, lived = ChildInspection(wanted), 0
                else:
                    child.turn_to(wanted)
                lived += 1
                found = {"family": family, "target": target, **_classified(classifier, child, target)}
                child = child if child.alive else None
                done.append(found)
                file.write(json.dumps(found) + "\n")
                file.flush()
    finally:
        if child is not None:
            child.close()
    return done


def _classified(classifier: Any, child: ChildInspection, target: str) -> dict[str, Any]:
    profile, start = load_profile(DEFAULT_DEVICE), time.perf_counter()
    try:
        findings = child.examine({"batch_size": BATCH}, [profile])
        answer = classifier.answers([question_of(target, findings, profile)])[0]
    except (UserError, TheirError) as error:
        return {"status": "error", "error": str(error), "seconds": time.perf_counter() - start}
    return {
        "status": "ok", "estimate_mib": answer.estimate_mib, "fits": answer.fits, "notes": list(answer.notes),
        "parameters": findings.table.parameters, "seconds": time.perf_counter() - start,
    }  # fmt: skip


def report(found: list[dict[str, Any]]) -> dict[str, Any]:
    parts = {"timm": [item for item in found if item["target"].startswith("timm:")],
             "transformers": [item for item in found if item["target"].startswith("hf:")]}  # fmt: skip
    figures = {
        name: {"networks": len(part), "families": len({item["family"] for item in part}),
               "classified": sum(item["status"] == "ok" for item in part)}
        for name, part in parts.items()
    }  # fmt: skip
    failed = [{"target": item["target"], "why": item["error"]} for item in found if item["status"] != "ok"]
    notes = Counter(note for item in found for note in item.get("notes", ()))
    share = sum(part["classified"] for part in figures.values()) / max(len(found), 1)
    return {"share": share, **figures, "failed": failed, "approximations": dict(notes.most_common())}


def to_markdown(figures: dict[str, Any]) -> str:
    lines = ["# Networks classified without error", "", f"{figures['share']:.1%} of all.", "",
             "| library | networks | families | classified |", "| --- | --- | --- | --- |"]  # fmt: skip
    for name in ("timm", "transformers"):
        part = figures[name]
        lines.append(f"| {name} | {part['networks']} | {part['families']} | {part['classified']} |")
    lines += ["", "## Failed", "", *(f"- `{item['target']}`: {item['why']}" for item in figures["failed"])]
    lines += [
        "",
        "## Approximations",
        "",
        *(f"- {count} x {note}" for note, count in figures["approximations"].items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/breadth")
    figures = report(run(directory))
    (directory / "report.json").write_text(json.dumps(figures, indent=1) + "\n")
    (directory / "report.md").write_text(to_markdown(figures))
    print(to_markdown(figures))


if __name__ == "__main__":
    main()
