"""Reads the JSON that Keras writes of a network (`to_json`, or config.json of a .keras file): layers and their sizes.

Keras is not imported, and nothing in the file is looked up by its name: a layer that is not listed is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any

from vramcast.errors import UserError, suggestion
from vramcast.jobs.network_files.keras_layers import (
    ACTIVATIONS,
    MERGES,
    RULES,
    Settings,
    Shape,
    Sized,
    attention,
    merged,
)
from vramcast.jobs.network_files.limits import (
    check_operations,
    checked_shape,
    list_of,
    mapping_of,
    shown,
    text_of,
)
from vramcast.jobs.network_files.table_builder import Operation, Parameter, TableBuilder
from vramcast.jobs.spec import LayerTable

_NETWORKS = ("Sequential", "Functional", "Model")
_DEEPEST = 8
"""Networks inside of networks."""
_PREPROCESSING = ("Resizing", "CenterCrop", "RandomFlip", "RandomRotation", "RandomZoom", "RandomCrop",
                  "RandomTranslation", "RandomContrast", "RandomBrightness")  # fmt: skip
"""Layers that change images before the network, on the CPU or without a gradient."""


def is_keras_network(value: Any) -> bool:
    """Return whether a JSON value is a network as Keras writes it."""
    return isinstance(value, Mapping) and "class_name" in value and isinstance(value.get("config"), Mapping)


def read_keras(value: Any, inputs: tuple[Shape, ...] = ()) -> LayerTable:
    """Return the layer table; `inputs` are shapes without the batch for a network that does not state its own."""
    try:
        reader = _Reader(inputs)
        reader.network(mapping_of(value, "the network"), [], "", 0)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"expected a network as Keras' to_json writes it, found one without {shown(str(error))}: write it again"
        ) from error
    return reader.builder.finish(())


@dataclass(frozen=True)
class _Value:
    name: str
    shape: Shape


class _Reader:
    def __init__(self, inputs: tuple[Shape, ...]) -> None:
        self.builder = TableBuilder(1)
        self._inputs = list(inputs)
        self._made = 0
        self._layers = 0

    def network(self, value: Mapping[str, Any], outer: list[_Value], prefix: str, depth: int) -> list[_Value]:
        """Add the layers of a network; `outer` are its inputs if it is inside of another one."""
        kind = text_of(value["class_name"], "a class of Keras")
        if depth > _DEEPEST:
            raise UserError(f"expected at most {_DEEPEST} networks inside of each other, found more: flatten them")
        if kind not in _NETWORKS:
            raise UserError(
                f"expected a Sequential or functional network of Keras, found {shown(kind)}: a class of one's own "
                "holds its graph in code; name path/to/file.py:function"
            )
        config = mapping_of(value["config"], "the config")
        layers = list_of(config["layers"], "layers")
        self._layers += len(layers)
        check_operations(self._layers, "the network")
        if kind == "Sequential":
            return self._sequential(value, config, layers, outer, prefix, depth)
        return self._functional(config, layers, outer, prefix, depth)

    def _sequential(
        self, value: Settings, config: Settings, layers: list[Any], outer: list[_Value], prefix: str, depth: int
    ) -> list[_Value]:
        values = outer
        for place, item in enumerate(layers):
            layer = mapping_of(item, "a layer")
            settings = mapping_of(layer["config"], "the config of a layer")
            if layer["class_name"] == "InputLayer":
                values = values or [self._input(settings)]
                continue
            if not values and layer["class_name"] not in _NETWORKS:
                built = mapping_of(value.get("build_config") or {}, "build_config").get("input_shape")
                own = settings.get("batch_input_shape") or config.get("build_input_shape") or built
                values = [self._input({"batch_shape": own})]
            values = self._layer(layer, settings, values, f"{prefix}{settings.get('name', place)}", depth)
        return values

    def _functional(
        self, config: Settings, layers: list[Any], outer: list[_Value], prefix: str, depth: int
    ) -> list[_Value]:
        """Add the layers in the order of their data; a layer whose inputs never come is part of a circle."""
        outputs: dict[tuple[str, int], list[_Value]] = {}
        named = {text_of(item.get("name") or item["config"]["name"], "a layer's name"): item for item in layers}
        if len(named) != len(layers):
            raise UserError("expected layers with different names, found equal ones: rename them")
        waiting = [
            (name, place, _histories(node))
            for name, item in named.items()
            for place, node in enumerate(list_of(item.get("inbound_nodes") or [], "inbound_nodes"))
        ]
        check_operations(sum(1 + len(histories) for _, _, histories in waiting) + len(layers), "the network")
        own = iter(outer)
        for name, item in named.items():
            if item["class_name"] == "InputLayer":
                outputs[name, 0] = [next(own, None) or self._input(mapping_of(item["config"], "an input"))]
        for name, place, histories in _in_order(waiting, outputs):
            item = named[name]
            inputs = [
                outputs[layer, node][min(tensor, len(outputs[layer, node]) - 1)] for layer, node, tensor in histories
            ]
            settings = mapping_of(item["config"], "the config of a layer")
            outputs[name, place] = self._layer(item, settings, inputs, f"{prefix}{name}", depth)
        return [
            outputs[key[0], key[1]][0] for key in _ends(config.get("output_layers")) if (key[0], key[1]) in outputs
        ] or [next(reversed(outputs.values()))[0]]

    def _input(self, settings: Settings) -> _Value:
        shape = settings.get("batch_shape") or settings.get("batch_input_shape")
        sizes = list(shape[1:]) if isinstance(shape, list) and shape else None
        if self._inputs:
            sizes = list(self._inputs.pop(0))
        if sizes is None or None in sizes:
            raise UserError(
                f"expected an input of known sizes, found {shown(sizes or 'none')}: give its shape without the batch"
            )
        value = _Value(self._new(), checked_shape(sizes, "the input", least=1))
        dtype = settings.get("dtype")
        self.builder.add_input(value.name, (1, *value.shape), dtype if isinstance(dtype, str) else "float32")
        return value

    def _new(self) -> str:
        self._made += 1
        return str(self._made)

    def _layer(
        self, layer: Mapping[str, Any], settings: Settings, inputs: list[_Value], name: str, depth: int
    ) -> list[_Value]:
        """Add one layer and its activation, and return its outputs."""
        kind = text_of(layer["class_name"], "a class of Keras")
        text_of(name, "a layer's name")
        if kind in _NETWORKS:
            return self.network(layer, inputs, f"{name}.", depth + 1)
        if kind in _PREPROCESSING and kind not in ("Resizing", "CenterCrop", "RandomCrop"):
            return inputs
        if kind == "Activation":
            return [self._activation(settings.get("activation"), inputs[0], name)]
        frozen = settings.get("trainable") is False
        output = self._add(name, _sized(kind, settings, inputs), inputs, frozen)
        activation = settings.get("activation")
        recurrent = kind in ("LSTM", "GRU", "SimpleRNN")
        if activation not in (None, "linear") and not recurrent:
            output = self._activation(activation, output, f"{name}.activation")
        return [output]

    def _activation(self, activation: Any, value: _Value, name: str) -> _Value:
        if isinstance(activation, Mapping):  # an activation with settings of its own
            inner = mapping_of(activation.get("config") or {}, "an activation")
            activation = activation.get("class_name") if "class_name" in activation else inner.get("name")
        if activation == "linear":
            return value
        text = str(activation).lower()
        kind, formula = ACTIVATIONS.get(text, ("activation", "silu"))
        return self._add(name, Sized(kind, formula, value.shape), [value], frozen=True)

    def _add(self, name: str, sized: Sized, inputs: list[_Value], frozen: bool) -> _Value:
        output = _Value(self._new(), checked_shape(sized.output, name))
        own = [Parameter(f"{name}.{place}", checked_shape(shape, name), not frozen)
               for place, shape in enumerate(sized.weights)]  # fmt: skip
        window = {"kernel": sized.kernel, "stride": sized.stride} if sized.kernel else {}
        channels_first = (
            output.shape if not _is_image(sized.kind, output.shape) else (output.shape[-1], *output.shape[:-1])
        )
        self.builder.add(
            Operation(
                name=name,
                kind=sized.kind,
                formula=sized.formula,
                reads=[item.name for item in inputs],
                writes=output.name,
                shape=(1, *channels_first),
                module=sized.kind[:1].isupper(),
                fresh=sized.fresh,
                recorded=sized.fresh,
                parameters=own,
                window=window | ({"groups": sized.groups} if sized.groups else {}),
            )
        )
        return output


def _is_image(kind: str, shape: Shape) -> bool:
    """Return whether the channels of an output come last where torch has them first."""
    return len(shape) in (3, 4) or kind in ("Conv1d", "ConvTranspose1d", "MaxPool1d", "AvgPool1d")


def _sized(kind: str, settings: Settings, inputs: list[_Value]) -> Sized:
    shapes = [item.shape for item in inputs]
    if not shapes:
        raise UserError(f"expected an input of the layer {shown(kind)}, found none: write the network again")
    if kind in MERGES:
        return merged(kind, settings, shapes)
    if kind == "MultiHeadAttention":
        return attention(settings, shapes[0], shapes[min(1, len(shapes) - 1)])
    if kind in ("Bidirectional", "TimeDistributed"):
        return _wrapped(kind, settings, shapes[0], inputs[0].name)
    if kind in ("Resizing", "CenterCrop", "RandomCrop"):
        sides = [settings.get("height"), settings.get("width")]
        return Sized("interpolate", "interpolate", checked_shape([*sides, shapes[0][-1]], "a resized image", least=1))
    rule = RULES.get(kind)
    if rule is None:
        what = "holds code" if kind == "Lambda" else suggestion(kind, RULES, "name path/to/file.py:function instead")
        raise UserError(f"expected layers of Keras whose sizes are known, found {shown(kind)}: {what}")
    return rule(settings, shapes[0])


def _wrapped(kind: str, settings: Settings, shape: Shape, name: str) -> Sized:
    inner = mapping_of(settings["layer"], "the wrapped layer")
    own = mapping_of(inner["config"], "the config of the wrapped layer")
    inner_kind = text_of(inner["class_name"], "a class of Keras")
    if inner_kind in ("Bidirectional", "TimeDistributed", *_NETWORKS):
        raise UserError(f"expected a plain layer in {kind}, found {shown(inner_kind)}: name path/to/file.py:function")
    if kind == "TimeDistributed":
        sized = _sized(inner_kind, own, [_Value(name, shape[1:])])
        return replace(sized, output=(shape[0], *sized.output))
    sized = _sized(inner_kind, own, [_Value(name, shape)])
    doubled = settings.get("merge_mode", "concat") == "concat"
    output = (*sized.output[:-1], 2 * sized.output[-1]) if doubled else sized.output
    return replace(sized, output=output, weights=sized.weights * 2)


_History = tuple[str, int, int]


def _histories(node: Any) -> list[_History]:
    """Return layer, call and output of each input of a call, in the form of Keras 3 or of Keras 2."""
    if isinstance(node, list):
        return [(item[0], item[1], item[2]) for item in node if isinstance(item, list) and len(item) >= 3]
    positional = list(_keras_tensors(mapping_of(node, "a call").get("args"), 0))
    return positional + list(_keras_tensors(node.get("kwargs"), 0))


def _keras_tensors(value: Any, depth: int) -> Iterator[_History]:
    if depth > _DEEPEST:
        raise UserError("expected calls with plain arguments, found deeply nested ones: write the network again")
    if isinstance(value, Mapping):
        if value.get("class_name") == "__keras_tensor__":
            layer, node, tensor = value["config"]["keras_history"]
            yield layer, node, tensor
        else:
            for item in value.values():
                yield from _keras_tensors(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _keras_tensors(item, depth + 1)


_Call = tuple[str, int, list[_History]]


def _in_order(waiting: list[_Call], done: Mapping[tuple[str, int], Any]) -> Iterator[_Call]:
    """Yield calls after those that they read, else in the order of the file; `done` holds what was seen before."""
    readers: dict[tuple[str, int], list[int]] = {}
    missing: list[int] = []
    ready: list[int] = []
    for index, (_, _, histories) in enumerate(waiting):
        open_keys = {(layer, node) for layer, node, _ in histories} - done.keys()
        missing.append(len(open_keys))
        for key in open_keys:
            readers.setdefault(key, []).append(index)
        if not open_keys:
            ready.append(index)
    heapify(ready)
    count = 0
    while ready:
        index = heappop(ready)
        count += 1
        yield waiting[index]
        for reader in readers.get(waiting[index][:2], ()):
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    if count < len(waiting):
        name = next(item[0] for item, number in zip(waiting, missing, strict=True) if number)
        raise UserError(
            f"expected layers that follow each other, found {shown(name)} in a circle or without inputs: fix it"
        )


def _ends(value: Any) -> list[tuple[str, int]]:
    """Return the output layers: one, or a list of them."""
    items = value if isinstance(value, list) else []
    items = [items] if items and isinstance(items[0], str) else items
    return [(item[0], item[1]) for item in items if isinstance(item, list) and len(item) >= 2]
