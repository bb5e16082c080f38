"""Parallelism as an option: what is accepted, and one sentence for what is not."""

import pytest
from rank_traces import llama, mlp, rank_trace, rows, tokens
from torch import nn

from vramcast.errors import UserError
from vramcast.virtual_gpu.distributed.parallelism import Parallelism, parallelism_of


def test_degrees_of_a_strategy_follow_from_the_world_size() -> None:
    tensor, pipeline = (Parallelism(strategy=name, world_size=8) for name in ("tp", "pp"))
    assert (tensor.tensor, tensor.data, pipeline.pipeline, pipeline.data) == (8, 1, 8, 1)
    both = Parallelism(strategy="hsdp", world_size=16, nodes=2, tensor=2)
    assert (both.data, both.replicas) == (8, 2)


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("fsdp3", {"world_size": 8}, "expected parallel strategy to be one of .*found 'fsdp3'"),
        ("ddp", {}, "expected a world_size with parallel, found none"),
        ("ddp", {"world_size": 0}, "world_size to be a whole number from 1, found 0"),
        ("ddp", {"world_size": 8, "ranks": 1}, r"expected options of parallel out of .*found \['ranks'\]"),
        ("fsdp2", {"world_size": 8, "nodes": 3}, "expected a world size that 3 nodes divide, found 8"),
        ("fsdp2", {"world_size": 8, "tensor": 3}, "tensor x pipeline = 3 x 1 divides, found 8"),
        ("fsdp2", {"world_size": 8, "shard_after_forward": 3}, "true, false or a divisor of the 8 ranks"),
        ("ddp", {"world_size": 8, "offload": True}, "can be simulated with offload .*found ddp"),
        ("tp", {"world_size": 8, "wrap": "Block"}, "expected a strategy that wraps blocks .*found tp"),
        ("fsdp1", {"world_size": 8, "tensor": 2}, "expected tensor or pipeline degrees with fsdp2, found fsdp1"),
        ("fsdp2", {"world_size": 8, "tensor": 2, "pipeline": 2}, "a tensor or a pipeline degree, found both"),
        ("fsdp2", {"world_size": 8, "reduce_dtype": "int8"}, "reduce_dtype to be one of .*found 'int8'"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(strategy: str, options: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        parallelism_of(strategy, options)
    assert "\n" not in str(error.value)


def test_heads_that_the_degree_does_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"divides the 4 heads .*found 8"):
        rank_trace(llama, tokens(), "tp", world_size=8, training={"loss": "own"})


def test_features_that_the_degree_does_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"divides the 4 heads|divides the 64 features of .*q_proj, found 3"):
        rank_trace(llama, tokens(), "tp", world_size=3, training={"loss": "own"})


def test_a_network_without_layers_to_split_is_refused() -> None:
    with pytest.raises(UserError, match=r"expected a network with a tensor-parallel plan .*found Sequential"):
        rank_trace(mlp, rows(), "tp")


def test_a_class_to_wrap_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="wrap to name a class of the network, found GPTBlock: use one of Sequential"):
        rank_trace(mlp, rows(), "fsdp2", wrap="GPTBlock")


def test_a_pipeline_needs_layers_for_each_stage() -> None:
    with pytest.raises(UserError, match="found 2 layers for 4 stages"):
        rank_trace(llama, tokens(), "pp", training={"loss": "own"})
    with pytest.raises(UserError, match=r"expected an nn.Sequential or a decoder .*found Linear"):
        rank_trace(lambda: nn.Linear(4, 4), rows(4), "pp")
    with pytest.raises(UserError, match="3 microbatches divide, found 4"):
        rank_trace(mlp, rows(), "pp", microbatches=3)
