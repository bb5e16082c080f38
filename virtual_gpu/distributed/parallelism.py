"""How a training run is spread over GPUs: every option that decides the memory of a rank, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vramcast.errors import UserError, check_choice, check_count, check_flag

NOT_DISTRIBUTED = object()
"""The result for an operator that runs on one GPU as on several."""
STRATEGIES: Mapping[str, str] = {
    "ddp": "DistributedDataParallel: each rank holds everything",
    "zero1": "ZeroRedundancyOptimizer under DDP: optimizer state is sharded",
    "zero2": "DeepSpeed ZeRO stage 2: gradients are sharded too (modelled)",
    "zero3": "DeepSpeed ZeRO stage 3: parameters are sharded too (modelled)",
    "fsdp1": "FullyShardedDataParallel with flat parameters",
    "fsdp2": "fully_shard: parameters, gradients and optimizer state are sharded",
    "hsdp": "fully_shard within a node, replicated across nodes",
    "tp": "tensor parallelism (DTensor)",
    "pp": "pipeline parallelism",
}
SHARDED = ("fsdp1", "fsdp2", "hsdp", "zero3")
"""Strategies that shard parameters and wrap blocks."""
MODELLED = ("zero2", "zero3")
"""Strategies whose library does not run here: its documented partitioning rules are modelled."""
OFFLOADING = ("fsdp2", "hsdp", "zero2", "zero3")
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """A strategy and its degrees. The defaults are those of accelerate and torchtitan.

    The batch size of a training setup is that of one rank; in a pipeline, that of one step of the pipeline.
    """

    strategy: str
    world_size: int
    nodes: int = 1
    shard_after_forward: bool | int = True
    """Free parameters after the forward pass (reshard_after_forward); a number reshards to that many ranks."""
    wrap: str | None = None
    """Classes of the modules that are sharded one by one, separated by commas; None: the repeated blocks."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    tensor: int = 1
    """Ranks that share each layer, within a sharded strategy."""
    pipeline: int = 1
    """Stages of the pipeline, within a sharded strategy."""
    microbatches: int | None = None
    """Parts of a pipeline's batch; None: one for each stage, or each sample if there are fewer."""
    schedule: str = "1f1b"
    reduce_dtype: str | None = None
    """Gradients are reduced in it; None: fp32 for fully_shard, the dtype of the parameters for the others."""

    def __post_init__(self) -> None:
        check_choice("parallel strategy", self.strategy, STRATEGIES)
        for name in ("world_size", "nodes", "tensor", "pipeline"):
            check_count(f"parallel {name}", getattr(self, name))
        if self.microbatches is not None:
            check_count("parallel microbatches", self.microbatches)
        check_flag("parallel offload", self.offload)
        check_choice("parallel schedule", self.schedule, SCHEDULES)
        check_choice("parallel reduce_dtype", self.reduce_dtype, (None, "fp32", "bf16", "fp16"))
        if self.wrap is not None and not isinstance(self.wrap, str):
            raise UserError(f"expected parallel wrap to be the name of a class, found {self.wrap!r}: change it")
        if not isinstance(self.shard_after_forward, bool):
            check_count("parallel shard_after_forward", self.shard_after_forward)
        if self.strategy == "tp":
            object.__setattr__(self, "tensor", self.world_size)
        if self.strategy == "pp":
            object.__setattr__(self, "pipeline", self.world_size)
        self._check_degrees()
        self._check_support()

    def _check_degrees(self) -> None:
        if self.world_size % self.nodes:
            raise UserError(
                f"expected a world size that {self.nodes} nodes divide, found {self.world_size}: change one of them"
            )
        if self.world_size % (self.tensor * self.pipeline):
            raise UserError(
                f"expected a world size that tensor x pipeline = {self.tensor} x {self.pipeline} divides, "
                f"found {self.world_size}: change one of them"
            )
        degree = self.shard_after_forward
        if not isinstance(degree, bool) and (degree < 2 or self.data % degree or degree == self.data):
            raise UserError(
                f"expected shard_after_forward to be true, false or a divisor of the {self.data} ranks that shard, "
                f"found {degree}: change it"
            )

    def _check_support(self) -> None:
        if self.offload and self.strategy not in OFFLOADING:
            raise UserError(
                f"expected a strategy that can be simulated with offload ({', '.join(OFFLOADING)}), "
                f"found {self.strategy}: leave offload out"
            )
        if self.wrap is not None and self.strategy not in SHARDED:
            raise UserError(
                f"expected a strategy that wraps blocks ({', '.join(SHARDED)}), found {self.strategy}: leave wrap out"
            )
        if (self.tensor > 1 and self.strategy not in ("tp", "fsdp2", "hsdp")) or (
            self.pipeline > 1 and self.strategy not in ("pp", "fsdp2")
        ):
            raise UserError(
                f"expected tensor or pipeline degrees with fsdp2, found {self.strategy}: change the strategy"
            )
        if self.tensor > 1 and self.pipeline > 1:
            raise UserError("expected a tensor or a pipeline degree, found both: leave one out")

    @property
    def data(self) -> int:
        """Return the number of ranks that share the batch: replicas and shards."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def replicas(self) -> int:
        """Return the number of replicas of the sharded state: the nodes for hsdp, else 1."""
        return self.nodes if self.strategy == "hsdp" else 1

    @property
    def wrap_names(self) -> tuple[str, ...]:
        """Return the classes to wrap."""
        return tuple(name.strip() for name in self.wrap.split(",") if name.strip()) if self.wrap else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the caveats that every answer must state."""
        if self.strategy not in MODELLED:
            return ()
        return (f"{self.strategy} is modelled by DeepSpeed's partitioning rules: its own code did not run",)

    def without_defaults(self) -> dict[str, Any]:
        """Return the options that differ from their default, without the strategy."""
        derived = {"tp": "tensor", "pp": "pipeline"}.get(self.strategy)
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("strategy", derived) and getattr(self, item.name) != item.default
        }


@dataclass(frozen=True)
class RankGroup:
    """Ranks with the same memory, by one of them."""

    rank: int
    count: int


PARALLEL_OPTIONS: Mapping[str, str] = {
    "world_size": "number of GPUs of the whole run",
    "nodes": "number of machines; hsdp replicates across them",
    "shard_after_forward": "free parameters after the forward pass: true, false, or a number of ranks to reshard to",
    "wrap": "classes of modules that are sharded one by one, separated by commas",
    "offload": "keep parameters, gradients and optimizer state in host memory",
    "tensor": "ranks that share each layer, with fsdp2",
    "pipeline": "stages of the pipeline, with fsdp2",
    "microbatches": "parts of a pipeline's batch",
    "schedule": "schedule of a pipeline: 1f1b or gpipe",
    "reduce_dtype": "dtype in which gradients are reduced",
}
"""Options beside the strategy, with their help."""


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of parallelism and others; raise UserError for the former without a strategy."""
    chosen = {name: values[name] for name in PARALLEL_OPTIONS if values.get(name) is not None}
    if chosen and values.get("parallel") is None:
        raise UserError(f"expected parallel with {', '.join(chosen)}, found none: name a strategy, such as fsdp2")
    return chosen, {name: value for name, value in values.items() if name not in PARALLEL_OPTIONS}


def parallelism_of(strategy: str, options: Mapping[str, Any]) -> Parallelism:
    """Build a parallelism from a strategy and its options; raise UserError for unknown ones."""
    check_choice("parallel strategy", strategy, STRATEGIES)
    names = {item.name for item in fields(Parallelism)} - {"strategy"}
    unknown = sorted(options.keys() - names)
    if unknown:
        raise UserError(f"expected options of parallel out of {sorted(names)}, found {unknown}: remove or rename them")
    if "world_size" not in options:
        raise UserError("expected a world_size with parallel, found none: add the number of GPUs")
    return Parallelism(strategy=strategy, **options)
