"""Classifiers: an encoder, a network and a density over the gap, fitted by a given training loop."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from vramcast.errors import UserError, check_amount, check_choice, check_count, check_probability
from vramcast.models.estimators._base import SavedEstimator
from vramcast.models.estimators.batch import Batch, Inputs
from vramcast.models.estimators.density import Mixture
from vramcast.models.estimators.encoding import ExampleEncoder
from vramcast.models.estimators.fitting import PlainFitter
from vramcast.models.estimators.labels import PARTS, center_and_spread, gap_labels
from vramcast.models.estimators.mixture_distribution import MixtureDistribution
from vramcast.models.estimators.networks import TokenNetwork, VectorNetwork
from vramcast.models.example import Example
from vramcast.models.features import TOKEN_NUMBERS, feature_set
from vramcast.models.storage import State
from vramcast.virtual_gpu.canonical import from_mapping

NETWORKS = ("mlp", "transformer")


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The settings of a classifier, which are saved with the weights."""

    network: str = "mlp"
    features: str = "full"
    components: int = 3
    """Number of logistics in the density."""
    width: int = 64
    blocks: int = 2
    token_width: int = 32
    heads: int = 4
    layers: int = 2
    """Of the Transformer's encoder."""
    dropout: float = 0.1
    bucket_mib: int = 1000
    """Bucket width of the accuracy: the likelihood of the correct bucket is part of the loss."""
    bucket_weight: float = 1.0
    """Weight of that part relative to the likelihood of the label."""
    parts_weight: float = 0.0
    """Weight of the error in the parts of simulated peaks; 0 for a network that does not learn them."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("network", self.network, NETWORKS)
        feature_set(self.features)
        for name in ("components", "width", "blocks", "token_width", "heads", "layers", "bucket_mib"):
            check_count(name, getattr(self, name))
        check_count("seed", self.seed, least=0)
        check_probability("dropout", self.dropout)
        if self.token_width % self.heads:
            raise UserError(f"expected token_width % heads == 0, found {self.token_width} and {self.heads}: change one")
        check_amount("bucket_weight", self.bucket_weight)
        check_amount("parts_weight", self.parts_weight)

    @property
    def reads_tokens(self) -> bool:
        """True if the network reads the sequence of layers."""
        return self.network == "transformer"

    @property
    def encoding(self) -> tuple[str, bool, int]:
        """The settings that decide the encoding, which classifiers with equal ones can share."""
        return self.features, self.reads_tokens, self.bucket_mib


@dataclass(frozen=True)
class PreparedData:
    """Encoded training and validation examples, with the scales learned from the former."""

    encoder: ExampleEncoder
    center: float
    spread: float
    train: Batch
    validation: Batch


@dataclass(frozen=True)
class Encoded:
    """Examples as tensors, with the scales learned from them."""

    encoder: ExampleEncoder
    rows: Batch

    @classmethod
    def of(cls, settings: NetworkSettings, examples: Sequence[Example]) -> Self:
        """Learn the scales and encode the examples."""
        encoder = ExampleEncoder.fit(examples, settings.features)
        return cls(encoder, make_batch(settings, encoder, examples))

    def parted(self, train: Tensor, validation: Tensor) -> PreparedData:
        """Split the examples into two parts by index."""
        rows = self.rows.select(train)
        return PreparedData(self.encoder, *center_and_spread(rows.labels), rows, self.rows.select(validation))


def prepare(settings: NetworkSettings, train: Sequence[Example], validation: Sequence[Example]) -> PreparedData:
    """Learn the scales from the training examples, and encode both."""
    if not train or not validation:
        raise UserError(
            f"expected training and validation examples, found {len(train)} and {len(validation)}: give some of both"
        )
    encoded = Encoded.of(settings, train)
    chosen_on = make_batch(settings, encoded.encoder, validation)
    return PreparedData(encoded.encoder, *center_and_spread(encoded.rows.labels), encoded.rows, chosen_on)


def make_batch(settings: NetworkSettings, encoder: ExampleEncoder, examples: Sequence[Example]) -> Batch:
    """Encode labelled examples as tensors."""
    labels = gap_labels(examples, feature_set(settings.features), settings.bucket_mib)
    return Batch(encoder.inputs(examples, settings.reads_tokens), labels)


class Fitter(Protocol):
    """A training loop that minimises `classifier.loss` over `classifier.network_`."""

    def __call__(self, classifier: "NetworkClassifier", train: Batch, validation: Batch) -> None:
        """Fit the network to `train`, and choose the epoch on `validation`."""


class NetworkClassifier(SavedEstimator):
    """Predicts a density over the gap between the used memory and the reference."""

    kind: ClassVar[str] = "network"

    def __init__(self, settings: NetworkSettings | None = None, fitter: Fitter | None = None) -> None:
        self.settings = settings or NetworkSettings()
        self.fitter: Fitter = fitter or PlainFitter()
        self.name = self.settings.network

    encoder_: ExampleEncoder
    network_: nn.Module
    center_: float
    spread_: float

    @property
    def needs_simulation(self) -> bool:
        """True if its features need a simulated measurement."""
        return feature_set(self.settings.features).needs_simulation

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Learn scales and network; equal seeds give equal weights."""
        return self.fit_prepared(prepare(self.settings, train, validation))

    def fit_prepared(self, data: "PreparedData") -> Self:
        """Fit to encoded examples, of this classifier or of one with another seed."""
        self.encoder_, self.center_, self.spread_ = data.encoder, data.center, data.spread
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            self.network_ = _make_network(self.settings, self.encoder_)
            self.fitter(self, data.train, data.validation)
        self.network_.eval()
        return self

    def loss(self, batch: Batch) -> Tensor:
        """Return the negative log likelihood of labels and buckets; jobs that did not fit are censored."""
        outputs, labels = self.network_(batch.inputs), batch.labels
        gaps = self._mixture(outputs)
        above = gaps.log_survival(labels.lower)
        exact = torch.where(labels.fits, gaps.log_mass(labels.lower, labels.upper), above)
        bucket = torch.where(labels.fits, gaps.log_mass(labels.bucket_lower, labels.bucket_upper), above)
        loss = -(exact + self.settings.bucket_weight * bucket).mean()
        if self.settings.parts_weight:
            loss = loss + self.settings.parts_weight * _parts_loss(outputs[:, -len(PARTS) :], labels.parts)
        return loss

    def _mixture(self, outputs: Tensor) -> Mixture:
        """Return the density over the gap; further outputs are the parts."""
        count = Mixture.outputs_of(self.settings.components)
        return Mixture.of_outputs(outputs[:, :count], self.center_, self.spread_)

    def distribution(self, examples: Sequence[Example], risk: float | None = None) -> MixtureDistribution:
        """Return the mixtures that the network predicts, which bound nothing at a risk."""
        return self.distribution_of(self.encoder_.inputs(examples, self.settings.reads_tokens), examples)

    def distribution_of(self, inputs: Inputs, examples: Sequence[Example]) -> MixtureDistribution:
        """Return the distributions of encoded examples."""
        features = feature_set(self.settings.features)
        if self.network_.training:  # eval() visits every module
            self.network_.eval()
        with torch.inference_mode():
            gaps = self._mixture(self.network_(inputs))
            return MixtureDistribution.of_gaps(gaps, [features.reference_bytes(item) for item in examples], examples)

    def state(self) -> State:
        """Return settings, encoder and weights."""
        settings = {
            "network": asdict(self.settings),
            "encoder": self.encoder_.to_json(),
            "center": self.center_,
            "spread": self.spread_,
        }
        return State(settings, {name: value.numpy() for name, value in self.network_.state_dict().items()})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Restore a classifier with the default fitter."""
        classifier = cls(from_mapping(NetworkSettings, state.settings["network"], "the network's settings"))
        classifier.encoder_ = ExampleEncoder.from_json(state.settings["encoder"])
        classifier.center_, classifier.spread_ = state.settings["center"], state.settings["spread"]
        classifier.network_ = _make_network(classifier.settings, classifier.encoder_)
        _load_weights(classifier.network_, state.arrays)
        classifier.network_.eval()
        return classifier


_USUAL_PART = -1.0
"""The logarithm of a part over the reference that a network starts from."""


def _parts_loss(predicted: Tensor, parts: Tensor) -> Tensor:
    """Return the mean absolute error over the rows that have parts, quadratic near zero."""
    in_label = ~parts.isnan()
    errors = nn.functional.smooth_l1_loss(predicted, parts.nan_to_num(), reduction="none", beta=0.1)
    return (errors * in_label).sum() / in_label.sum().clamp(min=1)


def _make_network(settings: NetworkSettings, encoder: ExampleEncoder) -> nn.Module:
    parts = len(PARTS) if settings.parts_weight else 0
    outputs = Mixture.outputs_of(settings.components) + parts
    shared = {"inputs": encoder.width, "width": settings.width, "blocks": settings.blocks, "outputs": outputs}
    network: VectorNetwork | TokenNetwork
    if settings.network == "mlp":
        network = VectorNetwork(**shared, dropout=settings.dropout)
    else:
        network = TokenNetwork(
            **shared,
            dropout=settings.dropout,
            kinds=len(encoder.kinds),
            token_numbers=len(TOKEN_NUMBERS),
            token_width=settings.token_width,
            heads=settings.heads,
            layers=settings.layers,
        )
    network.body.start_at(torch.cat([Mixture.first_bias(settings.components), torch.full((parts,), _USUAL_PART)]))
    return network


def _load_weights(network: nn.Module, arrays: Mapping[str, Any]) -> None:
    weights = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError("expected the weights of the network in the settings, found others: train it again") from error
