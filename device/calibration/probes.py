"""Probes: single convolutions whose workspace is measured, each in one direction.

A probe varies what conditions of rules depend on: direction, channels, batch, image size, kernel, groups, positions.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vramcast.virtual_gpu.tracing.trace import ConvolutionCall

DIRECTIONS = ("forward", "data", "weight")
_KERNELS = (1, 1, 2, 3, 3, 3, 4, 5, 7)
_SMALLEST = 8
_MOST_CHANNELS = 2048
_MOST_SIZE = 256
_MOST_BATCH = 64
_MOST_ELEMENTS = 2**24
"""Limit for each tensor: 64 MiB, so that a GPU measures a probe in milliseconds."""
_CHANNELS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 44, 47, 64, 90, 96, 128, 181, 256, 257, 362, 512, 724, 1024, 1448, 2048)
_SIZES = (1, 2, 4, 7, 8, 12, 14, 16, 20, 24, 28, 32, 48, 56, 64, 112, 128, 224)
_FIELDS = {"samples": "batch"}
"""Fields of a probe that are named otherwise than the feature of its call."""
_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32, 64)


@dataclass(frozen=True)
class Probe:
    """One call of a convolution over square images."""

    direction: str
    batch: int
    inputs: int
    """Input channels of a group."""
    outputs: int
    size: int
    kernel: int
    groups: int = 1

    @cached_property
    def call(self) -> ConvolutionCall:
        """The call that a trace would record."""
        side = self.size + 2 * (self.kernel // 2) - self.kernel + 1
        return ConvolutionCall(
            direction=self.direction,
            x=(self.batch, self.inputs * self.groups, self.size, self.size),
            weight=(self.outputs, self.inputs, self.kernel, self.kernel),
            y=(self.batch, self.outputs, side, side),
            stride=(1, 1),
            groups=self.groups,
            padding=(self.kernel // 2, self.kernel // 2),
        )

    @property
    def is_valid(self) -> bool:
        """True if torch accepts the convolution and it is small enough to be measured quickly."""
        positions = self.batch * self.size**2
        weights = self.outputs * self.inputs * self.kernel**2
        largest = max(positions * max(self.inputs * self.groups, self.outputs), weights)
        whole = self.outputs % self.groups == 0 and self.size + 2 * (self.kernel // 2) >= self.kernel
        return whole and min(self.inputs, self.outputs, self.size, self.batch) >= 1 and largest <= _MOST_ELEMENTS


def design(count: int, seed: int) -> list[Probe]:
    """Return the first probes: convolutions with values of short ladders, each in all directions."""
    source = random.Random(seed)  # noqa: S311 - a sample, no secret
    probes: dict[Probe, None] = {}
    while len(probes) < count:
        probe = _draw(source, lambda ladder, _: source.choice(ladder))
        if probe.is_valid:
            probes.update(dict.fromkeys(replace(probe, direction=name) for name in DIRECTIONS))
    return list(probes)


def sweeps() -> list[Probe]:
    """Return probes along the channels, for bands of channels that are too narrow for a ladder.

    The other channels are fewer in some and more in others.
    """
    return [
        Probe(direction, size=8, kernel=kernel, **{"batch": 8, "inputs": others, "outputs": others, axis: channels})
        for direction in DIRECTIONS
        for kernel, others in ((1, 96), (3, 96), (2, _MOST_CHANNELS))
        for axis in ("inputs", "outputs")
        for channels in range(_SMALLEST, _MOST_CHANNELS + 1, _SMALLEST)
    ]


def random_probes(count: int, source: random.Random) -> list[Probe]:
    """Return probes with arbitrary values, which rules are checked on."""
    drawn = (_draw(source, lambda _, most: _anywhere(source, most)) for _ in itertools.count())
    return list(itertools.islice((probe for probe in drawn if probe.is_valid), count))


def _draw(source: random.Random, pick: Callable[[tuple[int, ...], int], int]) -> Probe:
    """Draw a convolution: half of them ordinary, the others grouped, depthwise, or the first of a network."""
    inputs, outputs = pick(_CHANNELS, _MOST_CHANNELS), pick(_CHANNELS, _MOST_CHANNELS)
    groups = 1
    kind = source.choice(("ordinary",) * 6 + ("first", "grouped", "grouped", "depthwise"))
    if kind == "first":
        inputs = source.randint(1, 4)
    elif kind == "grouped":
        groups, inputs = 2 ** source.randint(1, 6), min(inputs, 64)
        outputs = groups * max(1, outputs // groups)
    elif kind == "depthwise":
        groups, outputs, inputs = max(2, inputs), max(2, inputs) * source.choice((1, 1, 2)), 1
    return Probe(
        direction=source.choice(DIRECTIONS),
        batch=pick(_BATCHES, _MOST_BATCH),
        inputs=inputs,
        outputs=outputs,
        size=pick(_SIZES, _MOST_SIZE),
        kernel=source.choice(_KERNELS),
        groups=groups,
    )


def _anywhere(source: random.Random, most: int) -> int:
    """Return a number between 1 and `most`, log-uniform; half of the larger ones are multiples of eight."""
    value = min(most, round(2 ** source.uniform(0, most.bit_length())))
    return value // _SMALLEST * _SMALLEST if value > _SMALLEST and source.random() < 0.5 else value


def neighbours(probe: Probe) -> Iterator[Probe]:
    """Yield the probe in other directions, and with each number changed a little and a lot."""
    for direction in DIRECTIONS:
        yield from _valid(probe, direction=direction)
    for name in ("batch", "inputs", "outputs", "size"):
        value = getattr(probe, name)
        for other in (value // 2, value - 1, value + 1, value + value // 2, value * 2):
            yield from _valid(probe, **{name: other})
    for kernel in sorted(set(_KERNELS)):
        yield from _valid(probe, kernel=kernel)


def moved(probe: Probe, feature: str, value: float) -> Iterator[Probe]:
    """Yield the probe with another value of a feature that a condition limits, as far as one exists."""
    number = int(value)
    if feature == "channels":
        larger = "outputs" if probe.outputs >= probe.inputs else "inputs"
        bounded = {name: min(getattr(probe, name), number) for name in ("inputs", "outputs")}
        yield from _valid(probe, **{**bounded, larger: number})
    elif feature == "tiles":
        columns = -(-probe.inputs * probe.kernel**2 // 128)
        yield from _valid(probe, outputs=128 * (number // columns))
        yield from _valid(probe, outputs=128, inputs=128 * number // probe.kernel**2)
    else:
        yield from _valid(probe, **{_FIELDS.get(feature, feature): number})


def _valid(probe: Probe, **changes: int | str) -> Iterator[Probe]:
    changed = replace(probe, **changes)  # type: ignore[arg-type]
    if changed.groups > 1 and changed.outputs % changed.groups:
        changed = replace(changed, outputs=max(1, changed.outputs // changed.groups) * changed.groups)
    if changed != probe and changed.is_valid:
        yield changed


Measure = Callable[[Sequence[Probe]], Mapping[Probe, int]]
"""Returns the workspace of each probe in bytes, without those that could not be measured."""
