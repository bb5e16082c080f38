"""Count the known networks that are classified without error: `python -m benchmarks.breadth [DIRECTORY]`.

Classifies a few networks of each module of timm, and all networks of transformers whose sizes are known, built from
configs. Results are stored, so an interrupted run resumes. Nothing is downloaded. `make breadth` runs it.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vramcast.device.profiles import DEFAULT_DEVICE, load_profile
from vramcast.errors import UserError
from vramcast.jobs.architectures import ARCHITECTURES
from vramcast.jobs.families.libraries import import_library
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.models import load
from vramcast.models.predictor import Question
from vramcast.simulation.sandbox.client import ChildSimulator
from vramcast.simulation.sandbox.failures import NetworkError

BATCH = 8
PER_MODULE = 4
"""Networks of each module of timm, evenly spaced by name."""
CHILD_LIFE = 40
"""Networks per child process: libraries hold on to some memory of each."""


def targets() -> Iterator[tuple[str, str]]:
    """Yield (family, target): some names of each module of timm, then those of transformers."""
    timm = import_library("timm")
    for module in sorted(timm.list_modules()):
        names = sorted(timm.list_models(module=module))
        chosen = (
            sorted({round(index * (len(names) - 1) / (PER_MODULE - 1)) for index in range(PER_MODULE)}) if names else []
        )
        yield from ((module, f"timm:{names[index]}") for index in chosen)
    yield from (("transformers", f"hf:{name}") for name in ARCHITECTURES)


def run(directory: Path) -> list[dict[str, Any]]:
    """Classify all networks that no earlier run has classified."""
    directory.mkdir(parents=True, exist_ok=True)
    journal = directory / "networks.jsonl"
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    classified = {item["target"] for item in done}
    left = [item for item in targets() if item[1] not in classified]
    classifier, child, age = load(), None, 0
    try:
        with journal.open("a") as file:
            for family, target in tqdm(left, unit="network", mininterval=1 if sys.stderr.isatty() else 30):
                wanted = BuildRequest(target=parse_target(target))
                if child is None or age == CHILD_LIFE:
                    if child is not None:
                        child.close()
                    child, age = ChildSimulator(wanted), 0
                else:
                    child.build(wanted)
                age += 1
                result = {"family": family, "target": target, **_classified(classifier, child, target)}
                child = child if child.alive else None
                done.append(result)
                file.write(json.dumps(result) + "\n")
                file.flush()
    finally:
        if child is not None:
            child.close()
    return done


def _classified(classifier: Any, child: ChildSimulator, target: str) -> dict[str, Any]:
    profile, start = load_profile(DEFAULT_DEVICE), time.perf_counter()
    try:
        simulation = child.simulate({"batch_size": BATCH}, [profile])
        answer = classifier.answers([Question.of_simulation(target, simulation, profile)])[0]
    except (UserError, NetworkError) as error:
        return {"status": "error", "error": str(error), "seconds": time.perf_counter() - start}
    return {
        "status": "ok", "estimate_mib": answer.estimate_mib, "fits": answer.fits, "notes": list(answer.notes),
        "parameters": simulation.table.parameters, "seconds": time.perf_counter() - start,
    }  # fmt: skip


def report(results: list[dict[str, Any]]) -> dict[str, Any]:
    parts = {"timm": [item for item in results if item["target"].startswith("timm:")],
             "transformers": [item for item in results if item["target"].startswith("hf:")]}  # fmt: skip
    figures = {
        name: {"networks": len(part), "families": len({item["family"] for item in part}),
               "classified": sum(item["status"] == "ok" for item in part)}
        for name, part in parts.items()
    }  # fmt: skip
    failed = [{"target": item["target"], "why": item["error"]} for item in results if item["status"] != "ok"]
    notes = Counter(note for item in results for note in item.get("notes", ()))
    share = sum(part["classified"] for part in figures.values()) / max(len(results), 1)
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
