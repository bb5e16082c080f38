"""The classifiers: an encoder, a network and a density over the gap, fitted by a loop that is given."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from vramcast.errors import UserError, check_amount, check_choice, check_count, check_probability
from vramcast.models.batch import Batch, Inputs
from vramcast.models.density import Mixture
from vramcast.models.encoding import Encoder
from vramcast.models.example import Example
from vramcast.models.features import TOKEN_NUMBERS, feature_set
from vramcast.models.fitting import PlainFitter
from vramcast.models.forecast import Forecast
from vramcast.models.forecaster import Forecaster
from vramcast.models.labels import center_and_spread, gap_labels
from vramcast.models.networks import MlpNetwork, TransformerNetwork
from vramcast.models.storage import State
from vramcast.virtual_gpu.records import from_mapping

NETWORKS = ("mlp", "transformer")


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """What a classifier is made of. All of it is shipped with the weights."""

    network: str = "mlp"
    features: str = "full"
    components: int = 3
    """Logistics of the density."""
    width: int = 64
    blocks: int = 2
    token_width: int = 32
    heads: int = 4
    layers: int = 2
    """Of the Transformer's encoder."""
    dropout: float = 0.1
    bucket_mib: int = 1000
    """The width at which accuracy is judged: the likelihood of the right bucket is part of the loss."""
    bucket_weight: float = 1.0
    """Of that part against the likelihood of the figure itself."""
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

    @property
    def reads_tokens(self) -> bool:
        """Whether the network reads the sequence of layers."""
        return self.network == "transformer"

    @property
    def encoding(self) -> tuple[str, bool, int]:
        """What decides how examples are encoded: settings that agree in this can share it."""
        return self.features, self.reads_tokens, self.bucket_mib


@dataclass(frozen=True)
class Prepared:
    """All of fitting that comes before the loop: scales, learned without the test examples, and tensors."""

    encoder: Encoder
    center: float
    spread: float
    train: Batch
    validation: Batch


@dataclass(frozen=True)
class Encoded:
    """Examples as tensors, and the scales that were learned from them."""

    encoder: Encoder
    rows: Batch

    @classmethod
    def of(cls, settings: NetworkSettings, examples: Sequence[Example]) -> Self:
        """Learn the scales and encode the examples."""
        encoder = Encoder.fit(examples, settings.features)
        return cls(encoder, make_batch(settings, encoder, examples))

    def parted(self, train: Tensor, validation: Tensor) -> Prepared:
        """Two parts of the examples, by their places."""
        rows = self.rows.select(train)
        return Prepared(self.encoder, *center_and_spread(rows.labels), rows, self.rows.select(validation))


def prepare(settings: NetworkSettings, train: Sequence[Example], validation: Sequence[Example]) -> Prepared:
    """Learn the scales from the training examples alone, and encode both."""
    if not train or not validation:
        raise UserError(
            f"expected training and validation examples, found {len(train)} and {len(validation)}: give some of both"
        )
    known = Encoded.of(settings, train)
    chosen_on = make_batch(settings, known.encoder, validation)
    return Prepared(known.encoder, *center_and_spread(known.rows.labels), known.rows, chosen_on)


def make_batch(settings: NetworkSettings, encoder: Encoder, examples: Sequence[Example]) -> Batch:
    """Examples with targets as tensors."""
    labels = gap_labels(examples, feature_set(settings.features), settings.bucket_mib)
    return Batch(encoder.inputs(examples, settings.reads_tokens), labels)


class Fitter(Protocol):
    """A training loop: changes `classifier.network_` so that `classifier.loss` falls."""

    def __call__(self, classifier: "NetworkClassifier", train: Batch, validation: Batch) -> None:
        """Fit the network to `train`; what is chosen, the epoch for one, is chosen on `validation`."""


class NetworkClassifier(Forecaster):
    """Predicts a density over the gap between what a job uses and what is computed for it."""

    kind: ClassVar[str] = "network"

    def __init__(self, settings: NetworkSettings | None = None, fitter: Fitter | None = None) -> None:
        self.settings = settings or NetworkSettings()
        self.fitter: Fitter = fitter or PlainFitter()
        self.name = self.settings.network

    encoder_: Encoder
    network_: nn.Module
    center_: float
    spread_: float

    @property
    def needs_simulation(self) -> bool:
        """Whether its features need a simulated measurement."""
        return feature_set(self.settings.features).needs_simulation

    def fit(self, train: Sequence[Example], validation: Sequence[Example]) -> Self:
        """Learn scales from the training examples, and then the network; equal seeds give equal weights."""
        return self.fit_prepared(prepare(self.settings, train, validation))

    def fit_prepared(self, data: "Prepared") -> Self:
        """Fit to examples that are encoded already: by this classifier, or by one that differs in its seed alone."""
        self.encoder_, self.center_, self.spread_ = data.encoder, data.center, data.spread
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            self.network_ = _make_network(self.settings, self.encoder_)
            self.fitter(self, data.train, data.validation)
        self.network_.eval()
        return self

    def loss(self, batch: Batch) -> Tensor:
        """Minus the likelihood of what was measured, and of its bucket. What did not fit is known from below only."""
        gaps, labels = Mixture.of_outputs(self.network_(batch.inputs), self.center_, self.spread_), batch.labels
        above = gaps.log_survival(labels.lower)
        exact = torch.where(labels.fits, gaps.log_mass(labels.lower, labels.upper), above)
        bucket = torch.where(labels.fits, gaps.log_mass(labels.bucket_lower, labels.bucket_upper), above)
        return -(exact + self.settings.bucket_weight * bucket).mean()

    def forecast(self, examples: Sequence[Example]) -> Forecast:
        """The distribution of the memory of each example."""
        return self.forecast_inputs(self.encoder_.inputs(examples, self.settings.reads_tokens), examples)

    def forecast_inputs(self, inputs: Inputs, examples: Sequence[Example]) -> Forecast:
        """The same of examples that are encoded already."""
        features = feature_set(self.settings.features)
        self.network_.eval()
        with torch.inference_mode():
            gaps = Mixture.of_outputs(self.network_(inputs), self.center_, self.spread_)
            return Forecast.of_gaps(gaps, [features.reference_bytes(example) for example in examples], examples)

    def state(self) -> State:
        """Settings, encoder and weights."""
        settings = {
            "network": asdict(self.settings),
            "encoder": self.encoder_.to_json(),
            "center": self.center_,
            "spread": self.spread_,
        }
        return State(settings, {name: value.numpy() for name, value in self.network_.state_dict().items()})

    @classmethod
    def from_state(cls, state: State) -> Self:
        """A classifier as it was; its fitter is the default one."""
        found = cls(from_mapping(NetworkSettings, state.settings["network"], "the network's settings"))
        found.encoder_ = Encoder.from_json(state.settings["encoder"])
        found.center_, found.spread_ = state.settings["center"], state.settings["spread"]
        found.network_ = _make_network(found.settings, found.encoder_)
        _load_weights(found.network_, state.arrays)
        found.network_.eval()
        return found


def _make_network(settings: NetworkSettings, encoder: Encoder) -> nn.Module:
    outputs = Mixture.outputs_of(settings.components)
    shared = {"inputs": encoder.width, "width": settings.width, "blocks": settings.blocks, "outputs": outputs}
    network: MlpNetwork | TransformerNetwork
    if settings.network == "mlp":
        network = MlpNetwork(**shared, dropout=settings.dropout)
    else:
        network = TransformerNetwork(
            **shared,
            dropout=settings.dropout,
            kinds=len(encoder.kinds),
            token_numbers=len(TOKEN_NUMBERS),
            token_width=settings.token_width,
            heads=settings.heads,
            layers=settings.layers,
        )
    network.body.start_at(Mixture.first_bias(settings.components))
    return network


def _load_weights(network: nn.Module, arrays: Mapping[str, Any]) -> None:
    weights = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError("expected the weights of the network in the settings, found others: train it anew") from error
