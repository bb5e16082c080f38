"""The networks: small, deaf to padding, and aware of the order of layers."""

import pytest
import torch
from synthetic_examples import cnn_spec, example_of, mlp_spec

from vramcast.models.estimators.batch import Inputs
from vramcast.models.estimators.classifiers import NetworkClassifier, NetworkSettings, make_batch
from vramcast.models.estimators.encoding import ExampleEncoder
from vramcast.models.estimators.networks.transformer import pooled, positions

EXAMPLES = [example_of(mlp_spec(width, depth)) for width in (64, 300) for depth in (1, 5)] + [
    example_of(cnn_spec(filters, 4)) for filters in (8, 24)
]


def fresh(network):
    def leave(classifier, train, validation):
        torch.nn.init.normal_(classifier.network_.body.last[1].weight)

    return NetworkClassifier(NetworkSettings(network=network), leave).fit(EXAMPLES, EXAMPLES)


@pytest.mark.parametrize("network", ["mlp", "transformer"])
def test_networks_are_small(network):
    count = sum(item.numel() for item in fresh(network).network_.parameters())
    assert 5_000 < count < 100_000


def test_padding_has_no_influence():
    classifier = fresh("transformer")
    inputs = classifier.encoder_.inputs(EXAMPLES, with_tokens=True)
    longer = Inputs(
        inputs.vector,
        torch.nn.functional.pad(inputs.kinds, (0, 7), value=2),
        torch.nn.functional.pad(inputs.tokens, (0, 0, 0, 7), value=9.0),
        torch.nn.functional.pad(inputs.padding, (0, 7), value=True),
    )
    for mode in (True, False):
        torch.manual_seed(0)
        classifier.network_.train(mode)
        for module in classifier.network_.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        with torch.no_grad():
            torch.testing.assert_close(classifier.network_(inputs), classifier.network_(longer), atol=1e-5, rtol=1e-4)


def test_an_example_alone_is_what_it_is_among_longer_ones():
    classifier = fresh("transformer")
    shortest = min(EXAMPLES, key=lambda item: len(item.layers))
    alone, among = classifier.predict_bytes([shortest])[0], classifier.predict_bytes(EXAMPLES)
    assert among[EXAMPLES.index(shortest)] == pytest.approx(alone, rel=1e-4)


def test_the_order_of_layers_matters():
    example = EXAMPLES[-1]
    turned = type(example)(**{**vars(example), "layers": tuple(reversed(example.layers))})
    classifier = fresh("transformer")
    assert classifier.predict_bytes([example])[0] != classifier.predict_bytes([turned])[0]


def test_pooling_leaves_padding_out():
    x = torch.tensor([[[1.0, -3.0], [3.0, -1.0], [100.0, 100.0]]])
    mean, most = pooled(x, torch.tensor([[False, False, True]]))
    assert mean.tolist() == [[2.0, -2.0]]
    assert most.tolist() == [[3.0, -1.0]]


def test_places_are_told_apart():
    found = positions(60, 32)
    distances = torch.cdist(found, found) + 10 * torch.eye(60)
    assert found.shape == (60, 32)
    assert float(distances.min()) > 0.5


def test_a_network_without_layers_has_an_answer():
    example = EXAMPLES[0]
    empty = type(example)(**{**vars(example), "layers": ()})
    encoder = ExampleEncoder.fit(EXAMPLES, "full")
    assert bool((~encoder.inputs([empty], with_tokens=True).padding).any())
    assert torch.tensor(fresh("transformer").predict_bytes([empty])).isnan().sum() == 0


def test_an_epoch_meets_every_example_once_among_others_of_its_length():
    classifier = fresh("transformer")
    examples = [example_of(cnn_spec(8, depth)) for depth in (1, 2, 3, 10, 11, 12)] * 8
    batch = make_batch(classifier.settings, classifier.encoder_, examples)
    parts = batch.shuffled(6)
    assert torch.cat(parts).sort().values.tolist() == list(range(48))
    lengths = (~batch.inputs.padding).sum(1).float()
    apart = torch.stack([lengths[part].std() for part in parts]).mean()
    assert float(apart) < 0.3 * float(lengths.std())
    assert [part.tolist() for part in parts] != [part.tolist() for part in batch.shuffled(6)]
