"""Transformers: encoder (as in GPUMemNet), decoder-only, encoder-decoder."""

from dataclasses import dataclass
from typing import Any

from vramcast.errors import check_choice
from vramcast.jobs.families.shared_layers import activation, check_factors, dropout
from vramcast.jobs.plan import InputTensor, Node, Plan, chain, layer

KINDS = ("encoder", "decoder", "encoder_decoder")
NORMS = ("post", "pre")


@dataclass(frozen=True, kw_only=True)
class TransformerNetwork:
    """The factors of a Transformer."""

    kind: str
    vocabulary: int
    embedding_size: int
    layers: int
    """Encoder layers; an encoder-decoder has as many decoder layers."""
    heads: int
    feed_forward_size: int
    sequence_length: int
    num_classes: int = 2
    """Classes of the encoder's classifier; the other kinds predict the next token."""
    dropout: float = 0.1
    activation: str = "relu"
    norm: str = "post"

    def __post_init__(self) -> None:
        check_choice("network.kind", self.kind, KINDS)
        counts = ["vocabulary", "embedding_size", "layers", "heads", "feed_forward_size", "sequence_length"]
        check_factors(self, [*counts, "num_classes"], NORMS)


def unused(net: TransformerNetwork) -> set[str]:
    """Return the factors of the classifier, which only an encoder has, for other kinds."""
    return set() if net.kind == "encoder" else {"num_classes"}


def _torch_layer(net: TransformerNetwork, kind: str) -> Node:
    """Return an nn.TransformerEncoderLayer or nn.TransformerDecoderLayer."""
    args: dict[str, Any] = {
        "d_model": net.embedding_size,
        "nhead": net.heads,
        "dim_feedforward": net.feed_forward_size,
        "dropout": net.dropout,
        # torch takes two activations by name, others as a callable
        "activation": net.activation if net.activation in ("relu", "gelu") else activation(net.activation),
        "batch_first": True,
        "norm_first": net.norm == "pre",
    }
    return Node(kind, args)


def _causal_layer(net: TransformerNetwork) -> Node:
    """Return a GPT layer: causal attention, then feed-forward, each inside a residual."""
    size = net.embedding_size
    norm = layer("LayerNorm", normalized_shape=size)
    attention = [layer("CausalSelfAttention", size=size, heads=net.heads, dropout=net.dropout), *dropout(net.dropout)]
    feed_forward = [
        layer("Linear", in_features=size, out_features=net.feed_forward_size),
        activation(net.activation),
        layer("Linear", in_features=net.feed_forward_size, out_features=size),
        *dropout(net.dropout),
    ]
    steps = []
    for body in (attention, feed_forward):
        before, after = ([norm], []) if net.norm == "pre" else ([], [norm])
        steps += [Node("Residual", {}, (chain(*before, *body), layer("Identity"))), *after]
    return chain(*steps)


def _tokens(net: TransformerNetwork) -> tuple[Node, Node]:
    size = net.embedding_size
    embedding = layer("Embedding", num_embeddings=net.vocabulary, embedding_dim=size)
    return embedding, layer("LearnedPositions", length=net.sequence_length, size=size)


def _final_norm(net: TransformerNetwork) -> list[Node]:
    return [layer("LayerNorm", normalized_shape=net.embedding_size)] if net.norm == "pre" else []


def _encoder(net: TransformerNetwork) -> Node:
    layers = Node("Encoder", {}, (_torch_layer(net, "TransformerEncoderLayer"),) * net.layers)
    output = layer("Linear", in_features=net.embedding_size, out_features=net.num_classes)
    return chain(*_tokens(net), layers, *_final_norm(net), chain(layer("MeanOverSequence"), output))


def _decoder(net: TransformerNetwork) -> Node:
    output = layer("Linear", in_features=net.embedding_size, out_features=net.vocabulary)
    return chain(*_tokens(net), *[_causal_layer(net)] * net.layers, *_final_norm(net), output)


def _encoder_decoder(net: TransformerNetwork) -> Node:
    source = chain(*_tokens(net), *[_torch_layer(net, "TransformerEncoderLayer")] * net.layers, *_final_norm(net))
    layers = chain(*[_torch_layer(net, "TransformerDecoderLayer")] * net.layers)
    output = layer("Linear", in_features=net.embedding_size, out_features=net.vocabulary)
    return Node("EncoderDecoder", {}, (source, chain(*_tokens(net)), layers, chain(*_final_norm(net), output)))


def plan(net: TransformerNetwork) -> Plan:
    """Return token embedding, layers, and a head: a classifier for the encoder, next tokens for the others."""
    tokens = InputTensor((net.sequence_length,), net.vocabulary)
    root = {"encoder": _encoder, "decoder": _decoder, "encoder_decoder": _encoder_decoder}[net.kind](net)
    return Plan((tokens, tokens) if net.kind == "encoder_decoder" else (tokens,), root)
