"""The page of `vramcast classify`: plain text, with colours if the terminal has them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vramcast.commands.wrapping import wrapped
from vramcast.models.advice.strategies import StrategyAnswer
from vramcast.models.advice.suggestions import Suggestion
from vramcast.models.answer import (
    FITS,
    INCOMPLETE,
    TIGHT,
    TOO_LARGE,
    Answer,
    shown_inputs,
    shown_risk,
    shown_size,
    shown_versions,
)
from vramcast.models.value_search import LARGEST
from vramcast.simulation.result import LayerCost
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import TrainingSetup

_PARTS: Mapping[str, tuple[str, str, str]] = {
    "parameters": ("parameters", "#", "34"),
    "gradients": ("gradients", "G", "36"),
    "optimizer_state": ("optimizer", "O", "35"),
    "activations": ("activations", "=", "32"),
    "temporaries": ("temporaries", "~", "33"),
    "workspace": ("library workspaces", "w", "31"),
    "inputs": ("inputs", "i", "37"),
    "allocator_cache": ("allocator cache", ".", "90"),
    "context": ("CUDA context and libraries", "c", "94"),
}
"""Parts of the breakdown: name, mark without colours, and colour (ECMA-48, SGR)."""
_VERDICTS = {FITS: "32", TIGHT: "33", TOO_LARGE: "31", INCOMPLETE: "33"}
_LAYERS = 10
_NARROW, _WIDE = 60, 120


@dataclass(frozen=True)
class Page:
    """The contents of the page for one job."""

    answer: Answer
    title: str
    """Of the device."""
    training: TrainingSetup | None = None
    costs: Sequence[LayerCost] = ()
    devices: Sequence[Answer] = ()
    """The answer for each known device."""
    suggestions: Sequence[Suggestion] = field(default=())
    strategies: Sequence[StrategyAnswer] = ()
    """For a run on several GPUs."""


def render_page(page: Page, width: int = 100, colours: bool = False) -> str:
    """Return the page as text."""
    paint = _Paint(colours)
    width = min(max(width, _NARROW), _WIDE)
    parts = [
        _head(page, paint),
        _bar(page.answer, width, paint),
        _layers(page, width),
        _ranks(page),
        _strategies(page, paint),
        _devices(page, paint),
        _batch(page.answer),
        _lengths(page.answer, width),
        _advice(page, width, paint),
        _notes(page.answer, width),
    ]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


class _Paint:
    def __init__(self, colours: bool) -> None:
        self.colours = colours

    def __call__(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self.colours else text


def _head(page: Page, paint: _Paint) -> Iterator[str]:
    answer = page.answer
    yield f"{answer.target}, {_setup(page)}, on {page.title}"
    if answer.inputs:
        yield f"input {shown_inputs(answer.inputs)}, traced with {shown_versions(answer.traced_with)}"
    yield ""
    verdict = paint(answer.verdict.upper(), f"1;{_VERDICTS[answer.verdict]}")
    yield f"  {verdict}: about {shown_size(answer.estimate_mib)} of the device's {shown_size(answer.capacity_mib)}"
    bucket = answer.bucket
    bounds = (
        f"{bucket.lower_mib / 1024:.3g} to {bucket.upper_mib / 1024:.3g} GiB"
        if bucket.upper_mib is not None
        else f"more than {shown_size(bucket.lower_mib)}"
    )
    yield f"  likeliest bucket  {bounds}, probability {bucket.probability:.0%}"
    yield f"  safe to reserve   {shown_size(answer.safe_mib)}, {shown_risk(answer)}"
    if not answer.missing:
        yield f"  out of memory     {_chance(answer.oom_probability)}"
    if answer.allocated_mib is not None and answer.reserved_mib is not None:
        allocated, reserved = shown_size(answer.allocated_mib), shown_size(answer.reserved_mib)
        yield f"  simulated peaks   {allocated} allocated, {reserved} reserved by torch"
    if answer.out_of_distribution:
        yield "  unlike the training examples: the figures are those of the simulation, with a wide margin"


def _setup(page: Page) -> str:
    training = page.training
    if training is None:
        return f"batch {page.answer.batch_size}"
    extras = [
        training.implementation if training.implementation != "default" else "",
        f"autocast {training.autocast}" if training.autocast else "",
        "channels last" if training.channels_last else "",
        _form("checkpointing", training.checkpointing),
        _form("Liger", training.liger),
        f"{training.loss_form} loss" if training.loss_form != "default" else "",
        training.adapter or "",
        f"base in {training.quantize}" if training.quantize else "",
        f"{training.accumulate} batches a step" if training.accumulate > 1 else "",
        f"each of {training.parallel}" if training.parallel else "",
    ]
    run = training.optimizer if training.is_training else _run_of(training)
    return ", ".join([f"batch {training.batch_size}", run, training.dtype, *filter(None, extras)])


def _run_of(training: TrainingSetup) -> str:
    """Name the run of a network that is not trained."""
    cache = f", {training.cache} cache" if training.cache else ""
    return f"generation of {training.new_tokens} tokens{cache}" if training.new_tokens else training.mode


def _form(name: str, value: bool | str) -> str:
    return f"{name} ({value})" if isinstance(value, str) else name if value else ""


def _chance(probability: float) -> str:
    if probability < 0.001:
        return "less than 0.1 %"
    return "more than 99.9 %" if probability > 0.999 else f"{probability:.1%}"


def _bar(answer: Answer, width: int, paint: _Paint) -> Iterator[str]:
    """Draw the memory at the peak by use; the largest remainders get the cells that rounding leaves."""
    total = sum(answer.breakdown_mib.values())
    if not total:
        return
    yield f"At the peak ({shown_size(total)}, simulated)"
    shares = {name: (width - 4) * value / total for name, value in answer.breakdown_mib.items()}
    cells = {name: int(share) for name, share in shares.items()}
    for name in sorted(shares, key=lambda key: cells[key] - shares[key])[: width - 4 - sum(cells.values())]:
        cells[name] += 1
    marks = ((_PARTS.get(name, (name, "?", "0")), count) for name, count in cells.items())
    yield "  " + "".join(paint(("█" if paint.colours else mark) * count, colour) for (_, mark, colour), count in marks)
    for name, value in sorted(answer.breakdown_mib.items(), key=lambda item: -item[1]):
        if value / total >= 0.001:
            label, mark, colour = _PARTS.get(name, (name, "?", "0"))
            shown = paint("█" if paint.colours else mark, colour)
            yield f"  {shown} {label:27} {shown_size(value):>11}  {value / total:6.1%}"


def _layers(page: Page, width: int) -> Iterator[str]:
    costs = page.costs[:_LAYERS]
    if not costs:
        return
    trained = page.training is None or page.training.is_training
    parts = "parameters, gradients, optimizer state and activations" if trained else "parameters and activations"
    yield f"The costliest layers at the peak, with their {parts}"
    room = max(width - 44, 20)
    for cost in costs:
        name = cost.name if len(cost.name) <= room else "…" + cost.name[1 - room :]
        yield f"  {name:{room}} {cost.kind[:24]:24} {shown_size(cost.total_bytes / MIB):>12}"


def _ranks(page: Page) -> Iterator[str]:
    if not page.answer.ranks:
        return
    yield "Simulated peaks of the ranks, without the CUDA context and NCCL; the figures above are those of the first"
    for item in page.answer.ranks:
        alike = f" and {item['count'] - 1} like it" if item["count"] > 1 else ""
        allocated, reserved = shown_size(item["allocated_mib"]), shown_size(item["reserved_mib"])
        name = f"rank {item['rank']}{alike}"
        yield f"  {name:28} {allocated:>11} allocated {reserved:>11} reserved"


def _strategies(page: Page, paint: _Paint) -> Iterator[str]:
    if not page.strategies:
        return
    yield f"{'Strategy':34} {'GPUs':>5} {'estimate':>11} {'safe':>11}"
    for item in page.strategies:
        if item.smallest:
            yield f"The least number of these GPUs that fits: {item.world_size}, with {item.change}"
            continue
        answer = item.answer
        figures = f"{item.world_size:>5} {shown_size(answer.estimate_mib):>11} {shown_size(answer.safe_mib):>11}"
        yield f"  {item.change:32} {figures}  {paint(answer.verdict, _VERDICTS[answer.verdict])}"


def _devices(page: Page, paint: _Paint) -> Iterator[str]:
    if not page.devices:
        return
    yield f"{'Device':16} {'has':>10} {'estimate':>11} {'safe':>11}"
    for item in page.devices:
        figures = (
            f"{shown_size(item.capacity_mib):>10} {shown_size(item.estimate_mib):>11} {shown_size(item.safe_mib):>11}"
        )
        yield f"  {item.device:14} {figures}  {paint(item.verdict, _VERDICTS[item.verdict])}"


def _batch(answer: Answer) -> Iterator[str]:
    if answer.max_batch_size is None:
        return
    if answer.max_batch_size >= LARGEST - LARGEST // 100:
        yield f"All batches up to {answer.max_batch_size}, the largest that is tried, fit this device safely."
    elif answer.max_batch_size:
        yield f"The largest batch that fits this device safely: {answer.max_batch_size}"
    else:
        yield "No batch fits this device safely, not even one sample."


def _lengths(answer: Answer, width: int) -> Iterator[str]:
    lengths = answer.lengths
    if not lengths:
        return
    share = 100 * lengths["fitting_share"]
    fits = f"up to {lengths['longest_fitting']} tokens" if share else "not even the shortest"
    text = (
        f"Of {lengths['batches']} batches, padded to their longest sample, {share:.4g} % fit this device safely "
        f"({fits}). Half of them have at most {lengths['p50']} tokens, 90 % {lengths['p90']}, 99 % {lengths['p99']}, "
        f"all {lengths['longest']}{'.' if 'orders' in lengths else '; the figures above are those of the longest.'}"
    )
    yield from wrapped(text, width)
    if "orders" in lengths:
        yield from wrapped(_orders(lengths), width)


def _orders(lengths: Mapping[str, float]) -> str:
    """Say how far the cache grows if batches of all lengths come in random orders."""
    longest, least, most = (lengths.get(f"{name}_reserved_mib", 0.0) for name in ("longest", "least", "most"))
    out = f"{lengths['orders_out_of_memory']} of them run out of memory" if lengths["orders_out_of_memory"] else ""
    text = f"In {lengths['orders']} random orders of these batches, "
    if most:
        text += f"the allocator reserves {shown_size(least)} to {shown_size(most)}{', and ' + out if out else ''}; "
    else:
        text += f"{out}; "
    text += f"for the longest alone it is {shown_size(longest)}, which the other figures of this page count."
    expandable = lengths.get("expandable_reserved_mib", most)
    if expandable < least:
        text += f" PYTORCH_ALLOC_CONF=expandable_segments:True would reserve {shown_size(expandable)}."
    return text


def _advice(page: Page, width: int, paint: _Paint) -> Iterator[str]:
    if not page.suggestions:
        return
    room = min(max(len(item.change) for item in page.suggestions), max(width - 46, 30))
    enough = [item for item in page.suggestions if item.answer.verdict == FITS]
    if enough:
        yield "Changes that make it fit, the least costly first, each simulated and estimated"
        yield from _changes(enough, room, paint)
    if len(enough) < len(page.suggestions):
        title = "Not enough" if enough else "Changes that reduce the memory"
        yield f"{title}, each simulated and estimated"
        yield from _changes([item for item in page.suggestions if item not in enough], room, paint)


def _changes(items: Sequence[Suggestion], room: int, paint: _Paint) -> Iterator[str]:
    for item in items:
        answer = item.answer
        figures = f"{shown_size(answer.estimate_mib):>11}, safe {shown_size(answer.safe_mib):>11}"
        *above, last = wrapped(item.change, room)
        yield from (f"  {line}" for line in above)
        yield f"  {last:{room}} {figures}  {paint(answer.verdict, _VERDICTS[answer.verdict])}"


def _notes(answer: Answer, width: int) -> Iterator[str]:
    source = f"Estimated by {answer.checkpoint} for {answer.profile}; {answer.seconds:.1f} s. Nothing was measured."
    for text in (source, *(f"note: {note}" for note in answer.notes)):
        yield from wrapped(text, width, subsequent_indent="  ")
