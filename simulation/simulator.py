"""The simulator: traces a job as rarely as the devices allow and replays the trace on each of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from vramcast.errors import UserError
from vramcast.jobs.analysis.optimizers import OPTIMIZERS
from vramcast.jobs.batches import input_shapes, with_length
from vramcast.jobs.families import FAMILIES
from vramcast.jobs.families.script_jobs import script_subject
from vramcast.jobs.job import Job, ModuleJob, PreparedJob, SpecJob
from vramcast.jobs.network_files.description import NetworkDescription
from vramcast.jobs.optimizers import SPARSE, stand_in
from vramcast.jobs.script_spec import ScriptSpecJob
from vramcast.jobs.spec import LayerTable
from vramcast.jobs.subject import batch_in_channels_last, in_channels_last
from vramcast.simulation.emulated_job import EmulatedJob
from vramcast.simulation.library_versions import library_versions
from vramcast.simulation.replays import Replays, UnboundedReplay, curve_of, simulation_of
from vramcast.simulation.result import Curve, OrderPeaks, RankPeaks, Simulation
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.distributed.parallelism import RankGroup
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.replay.length_orders import SHORTEST, STEP_BATCHES, LengthOrders
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.replay.varying_lengths import VaryingRun
from vramcast.virtual_gpu.tracing.capability import RecordedCapability
from vramcast.virtual_gpu.tracing.meta_limits import META_LIMITS, is_limit_of_meta
from vramcast.virtual_gpu.tracing.session import trace_lengths, trace_training
from vramcast.virtual_gpu.tracing.trace import Trace, Use
from vramcast.virtual_gpu.training.setup import TrainingSetup, parse_call


class JobSimulator(Protocol):
    """Simulates one job under any training options, in this process or in a child process."""

    def simulate(self, options: Mapping[str, Any], profiles: Sequence[DeviceProfile]) -> Simulation:
        """Simulate the job on some devices."""

    def curve(self, options: Mapping[str, Any], profile: DeviceProfile) -> Curve:
        """Return the memory over time on a device."""

    def by_order(self, options: Mapping[str, Any], profile: DeviceProfile, orders: LengthOrders) -> OrderPeaks:
        """Return the peaks of runs whose batches come in these orders; the job's own sequences are the longest."""


_RankTraces = list[tuple[RankGroup, Trace]]


class Simulator:
    """Simulates a job on the virtual GPU in this process.

    The job is traced once for all devices that run it alike, and the trace is replayed on each. Specs and most
    networks are traced on plain meta tensors, which is fast. Jobs that declare `runs_emulated`, training options that
    need CUDA, and networks that plain meta tensors cannot run (`META_LIMITS`) train on a virtual GPU that they see as
    CUDA.

    >>> from vramcast.device.profiles import load_profile
    >>> from vramcast.jobs.families import make_spec
    >>> from vramcast.jobs.job import SpecJob
    >>> from vramcast.virtual_gpu.training.setup import TrainingSetup
    >>> network = {"arch": "uniform", "input_features": 64, "output_features": 10, "depth": 2}
    >>> spec = make_spec("mlp", network, TrainingSetup(batch_size=8))
    >>> simulation = Simulator(SpecJob(spec)).simulate({}, [load_profile("a100_40gb")])
    >>> simulation.peaks["a100_40gb"].bounded.status
    <Status.OK: 'ok'>

    Known limits: values are not computed, so control flow that depends on data takes an assumed way, which is a note of
    the simulation. A run of many steps is not simulated, but those after which memory repeats. Under emulation the
    figures of all devices replay the kernels of the first.
    """

    def __init__(self, job: Job, allocator: AllocatorOptions | None = None) -> None:
        script = script_subject(job.spec) if isinstance(job, SpecJob) else None
        self.job: Job = ScriptSpecJob(job.spec, script) if isinstance(job, SpecJob) and script else job
        self.allocator = allocator or AllocatorOptions()
        self._table: LayerTable | None = None
        self._tabled: str | None = None
        self._options: Mapping[str, Any] | None = None
        self._training: TrainingSetup | None = None
        """The setup of the last options."""
        self._setup: TrainingSetup | None = None
        """The setup of the traces."""
        self._resolved: TrainingSetup | None = None
        self._facts: tuple[str, ...] = ()
        self._inputs: tuple[Mapping[str, Any], ...] = ()
        self._traced_with: Mapping[str, str] = {}
        self._traces: list[tuple[bool, RecordedCapability, _RankTraces]] = []
        self._replays = Replays(self.allocator)
        self._emulated: EmulatedJob | None = None

    def simulate(self, options: Mapping[str, Any], profiles: Sequence[DeviceProfile]) -> Simulation:
        """Simulate the job on some devices; the costs of layers are those on the first device.

        Raises:
            UserError: The options, or the network under them, cannot be trained.
            Exception: One of the network's own.
        """
        training = self._setup_of(options)
        job = self._emulated_job(training)
        if job is not None:
            return self._run_emulated(job, training, profiles)
        try:
            return self._simulate(training, profiles)
        except META_LIMITS as error:
            if not isinstance(self.job, ModuleJob) or not is_limit_of_meta(error):
                raise
            plain = replace(
                training, adapter=None, quantize=None, checkpointing=False, loss_form="default", compile="none",
                compile_loss=False, memory_budget=None,
            )  # fmt: skip
            if plain.needs_trace:
                raise
            return self._retry_emulated(self.job, training, profiles, error)

    def _retry_emulated(
        self, job: ModuleJob, training: TrainingSetup, profiles: Sequence[DeviceProfile], first: Exception
    ) -> Simulation:
        """Run a network that meta tensors could not run; if it fails here, too, the first error is its own."""
        try:
            self._emulated = EmulatedJob(job, training, profiles[0])
        except Exception as second:  # the first error is about the network as it was given
            if parse_call(training.optimizer)[0] == SPARSE and "dense gradients" in str(second):
                raise UserError(
                    f"expected a network whose gradients are all sparse beside {SPARSE}, found dense ones: make "
                    "its embeddings sparse=True, or name another optimizer"
                ) from second
            raise first from None
        return self._emulated.simulation(profiles)

    def _setup_of(self, options: Mapping[str, Any]) -> TrainingSetup:
        """Return the training setup of the options; questions about the same options come one after another."""
        if self._training is None or options != self._options:
            self._training, self._options = self.job.setup(options), dict(options)
        return self._training

    def _emulated_job(self, training: TrainingSetup) -> ModuleJob | None:
        """Return the job if it must train on a virtual GPU that it sees as CUDA, None if meta tensors are enough."""
        if not isinstance(self.job, ModuleJob):
            if training.needs_cuda:
                raise UserError(
                    "expected a network by its name or file beside liger, checkpointing=offload or a mode without "
                    "training, found a spec: name the network itself, or leave them out"
                )
            return None
        return self.job if self.job.runs_emulated or training.needs_cuda else None

    def _run_emulated(self, job: ModuleJob, training: TrainingSetup, profiles: Sequence[DeviceProfile]) -> Simulation:
        self._emulated = EmulatedJob(job, training, profiles[0])
        simulation = self._emulated.simulation(profiles)
        simulation = replace(simulation, family=job.family)
        if job.runs_emulated:
            self._table = simulation.table
        return simulation

    def _simulate(self, training: TrainingSetup, profiles: Sequence[DeviceProfile]) -> Simulation:
        self._emulated = None
        with self._spec_errors():
            self._use(training)
            if self._table is None or training.adapter != self._tabled:
                self._table, self._tabled = self.job.table(training), training.adapter
            ranks = {profile.name: self._largest_first(profile) for profile in profiles}
        return simulation_of(
            self._table,
            self._resolved or training,
            [(profile, ranks[profile.name][0][1]) for profile in profiles],
            self._replays,
            family=self.job.family,
            notes=self._facts,
            inputs=self._inputs,
            traced_with=self._traced_with,
            ranks=_rank_peaks(ranks[profiles[0].name]) if training.parallel else (),
        )

    def measure(self, options: Mapping[str, Any], profile: DeviceProfile) -> Measurement:
        """Simulate the job on one device, without its layers: one trace and one replay."""
        training = self._setup_of(options)
        job = self._emulated_job(training)
        if job is not None:
            simulation = self._run_emulated(job, training, [profile])
            measurement = simulation.peaks[profile.name].bounded
            return replace(measurement, notes=(*measurement.notes, *simulation.notes))
        self._use(training)
        ranks = self._trace(profile.compute_capability, owners=False)
        measurements = [simulate(trace, profile, self.allocator) for _, trace in ranks]
        return max(measurements, key=lambda item: (item.status is not Status.OK, item.reserved_bytes or 0))

    def table(self) -> LayerTable:
        """Return the layers of the network; those of a network that ran on a virtual GPU are of its first step."""
        return self._table or self.job.table()

    def describe(self, options: Mapping[str, Any]) -> NetworkDescription:
        """Return the layers and the training of the job after one forward pass: nothing is traced."""
        training = self._setup_of(options)
        with self._spec_errors():
            return NetworkDescription(self.job.details(training), training=training, family=self.job.family)

    def trace(self, options: Mapping[str, Any], compute_capability: float) -> Trace:
        """Trace the job (its first rank) for devices of a compute capability, without the owners of blocks."""
        self._use(self._setup_of(options))
        return self._trace(compute_capability, owners=False)[0][1]

    def curve(self, options: Mapping[str, Any], profile: DeviceProfile) -> Curve:
        """Return the memory over time on a device, unbounded where the job does not fit."""
        self._use(self._setup_of(options))
        trace = self._emulated.trace if self._emulated is not None else self._largest_first(profile)[0][1].trace
        return curve_of(trace, profile, self.allocator)

    def by_order(self, options: Mapping[str, Any], profile: DeviceProfile, orders: LengthOrders) -> OrderPeaks:
        """Trace steps of some lengths and replay the orders with them, the first also with expandable segments."""
        lengths = {length for order in orders.orders for length in order}
        if len(lengths) == 1 or max(lengths) < SHORTEST:
            return OrderPeaks(reason="all batches are equally long" if len(lengths) == 1 else "the batches are short")
        if self._emulated is not None:
            return OrderPeaks(reason="the network cannot be traced on meta tensors")
        try:
            trace, starts = self._trace_lengths(options, profile, orders)
            run = VaryingRun(trace, profile, starts, orders.traced)
        except Exception as error:  # the longest batch was traced, so the job has an answer without orders
            return OrderPeaks(reason=f"steps of other lengths cannot be replayed: {error}")
        reserved = tuple(run.reserved_bytes(order, orders.accumulate, self.allocator) for order in orders.orders)
        expandable = replace(self.allocator, expandable_segments=True)
        return OrderPeaks(reserved, run.reserved_bytes(orders.orders[0], orders.accumulate, expandable))

    def _trace_lengths(
        self, options: Mapping[str, Any], profile: DeviceProfile, orders: LengthOrders
    ) -> tuple[Trace, list[list[int]]]:
        setup = self._setup_of(options)
        setup = replace(setup, accumulate=min(setup.accumulate, STEP_BATCHES))
        job = self._prepared(setup)
        return trace_lengths(
            job.subject,
            lambda length: with_length(job.make_inputs(setup.batch_size), length),
            job.training,
            orders.traced,
            profile.compute_capability,
            job.make_optimizer,
        )

    @contextmanager
    def _spec_errors(self) -> Iterator[None]:
        """Turn an exception of a library into an error of the spec whose settings it rejects."""
        try:
            yield
        except Exception as error:
            if isinstance(error, UserError) or not isinstance(self.job, SpecJob) or self.job.family in FAMILIES:
                raise
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(
                f"expected a spec that {self.job.family} can build and train, found {message}; fix it"
            ) from error

    def _use(self, training: TrainingSetup) -> None:
        if training != self._setup:
            self._setup, self._traces, self._replays = training, [], Replays(self.allocator)

    def _prepared(self, setup: TrainingSetup) -> PreparedJob:
        return prepared(self.job, setup)

    def _trace(self, compute_capability: float, owners: bool = True) -> _RankTraces:
        """Return the trace of each distinct rank; one for a run on one GPU.

        A trace serves all devices whose compute capability leads to the same decisions.
        """
        alike = (
            traces
            for kind, capability, traces in self._traces
            if kind == owners and capability.decides_alike(compute_capability)
        )
        traces = next(alike, None)
        if traces is None:
            if self._setup is None:
                raise RuntimeError("there is no setup to trace")
            capability = RecordedCapability(compute_capability)
            job = self._prepared(self._setup)
            self._inputs = input_shapes(job.make_inputs(self._setup.batch_size))
            self._traced_with = library_versions(job.subject)
            if self._setup.parallel:
                traces = self._trace_ranks(job, capability)
                self._resolved = job.training
            else:
                trace = trace_training(
                    job.subject,
                    job.make_inputs,
                    job.training,
                    compute_capability=capability,
                    make_optimizer=job.make_optimizer,
                    owners=owners,
                )
                self._resolved = _with_known_optimizer(job, trace)
                traces = [(RankGroup(0, 1), trace)]
            places = self.job.places
            for _, trace in traces:
                trace.approximations = {
                    f"{phrase} (at {places[phrase]})" if phrase in places else phrase for phrase in trace.approximations
                } | set(job.assumptions)
            self._facts = job.facts
            self._traces.append((owners, capability, traces))
        return traces

    def _trace_ranks(self, first: PreparedJob, compute_capability: float) -> _RankTraces:
        """Trace one rank of each kind; each wraps a subject of its own."""
        from vramcast.virtual_gpu.distributed.distinct_ranks import distinct_ranks  # noqa: PLC0415 - slow to import
        from vramcast.virtual_gpu.distributed.rank_session import trace_rank  # noqa: PLC0415

        parallelism = first.training.parallelism
        if parallelism is None or self._setup is None:
            raise RuntimeError("there are no ranks to trace")
        traces: _RankTraces = []
        for group in distinct_ranks(first.subject, parallelism):
            job = self._prepared(self._setup) if traces else first
            trace = trace_rank(
                job.subject,
                job.make_inputs,
                job.training,
                parallelism,
                group.rank,
                compute_capability,
                job.make_optimizer,
            )
            traces.append((group, trace))
        return traces

    def _largest_first(self, profile: DeviceProfile) -> list[tuple[RankGroup, UnboundedReplay]]:
        """Replay each rank without a memory limit, the largest first."""
        traces = self._trace(profile.compute_capability)
        replays = [(group, self._replays.unbounded(trace, profile)) for group, trace in traces]
        return sorted(replays, key=lambda item: -item[1].replay.peak_reserved_bytes)


def prepared(job: Job, setup: TrainingSetup) -> PreparedJob:
    """Prepare a job, and convert it to channels-last layout if the setup says so."""
    made = job.prepare(setup)
    if not setup.channels_last:
        return made
    return replace(
        made,
        subject=in_channels_last(made.subject),
        make_inputs=lambda size: batch_in_channels_last(made.make_inputs(size)),
    )


def _rank_peaks(ranks: Sequence[tuple[RankGroup, UnboundedReplay]]) -> tuple[RankPeaks, ...]:
    return tuple(
        RankPeaks(group.rank, group.count, item.replay.peak_allocated_bytes, item.replay.peak_reserved_bytes)
        for group, item in ranks
    )


def _with_known_optimizer(prepared: PreparedJob, trace: Trace) -> TrainingSetup:
    """Replace an optimizer that estimators do not know by the one of torch.optim with about as much state."""
    if parse_call(prepared.training.optimizer)[0] in OPTIMIZERS:
        return prepared.training
    dead = {block for block, size in trace.events if size == FREE}
    state_bytes = sum(
        size for block, size in trace.events
        if size != FREE and trace.uses[block] == Use.OPTIMIZER_STATE and trace.owners[block] and block not in dead
    )  # fmt: skip
    trainable = sum(item.numel() * item.element_size() for item in prepared.subject.parameters() if item.requires_grad)
    return replace(prepared.training, optimizer=stand_in(state_bytes, trainable))
