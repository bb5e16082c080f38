"""The virtual GPU as a script sees it: each test asserts a result, since a wrong device is silent."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.training.setup import TrainingSetup

A100 = load_profile("a100_40gb")
MIB = 2**20


@pytest.fixture
def gpu():
    with CudaEmulation(A100, options=AllocatorOptions()) as virtual:
        yield virtual


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10))

    def forward(self, x):
        return self.head(self.features(x))


def classified(batch_size, **training):
    """Return the peaks that `classify` finds for the network."""
    with torch.device("meta"):
        network = Net()
    setup = TrainingSetup(batch_size=batch_size, **training)
    trace = trace_training(network, lambda size: (torch.randn(size, 3, 64, 64, device="meta"),), setup)
    found = simulate(trace, A100, AllocatorOptions())
    return found.allocated_bytes, found.reserved_bytes


def train(make_optimizer, batch_size, steps=7, autocast=False):
    """Train as a user would, and return the peaks that torch.cuda reports."""
    network = Net().cuda()
    optimizer = make_optimizer(network.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=autocast)
    for _ in range(steps):
        x = torch.randn(batch_size, 3, 64, 64).to("cuda", non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            output = network(x)
            loss = F.cross_entropy(output, torch.randint(10, (batch_size,), device="cuda"))
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        last = loss.detach()  # kept for a log until the next step ends, as the loop of classify keeps it
        del x
    assert last.is_cuda
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize(
    ("name", "training"),
    [("Adam", {}), ("SGD", {"optimizer": "SGD(momentum=0.9)"}), ("AdamW", {"optimizer": "AdamW"})],
)
def test_a_plain_loop_takes_what_classify_says_to_the_byte(name, training):
    optimizers = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
    make = optimizers.get(name) or (lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
    with CudaEmulation(A100, options=AllocatorOptions()):
        live = train(make, 64)
    assert live == classified(64, **training)


def test_mixed_precision_with_a_scaler_takes_what_classify_says_to_the_byte():
    with CudaEmulation(A100, options=AllocatorOptions()):
        live = train(torch.optim.Adam, 64, autocast=True)
    assert live == classified(64, autocast="fp16")


def test_tensors_say_that_they_are_on_cuda(gpu):
    x = torch.randn(8, 16, device="cuda")
    assert x.device == torch.device("cuda:0") and x.is_cuda and not x.is_meta and not x.is_cpu and x.get_device() == 0
    assert torch.as_tensor([1.0], device="cuda:0").is_cuda and torch.zeros(3, device=0).is_cuda
    assert x.to("cpu").device.type == "cpu" and x.cpu().shape == (8, 16)
    assert torch.empty(3, device="meta").device.type == "meta" and torch.zeros(2).device.type == "cpu"
    assert x.to("meta").device.type == "meta"
    assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, torch.cuda.FloatTensor)
    assert torch.device(0) == torch.device("cuda", 0) and isinstance(x.device, torch.device)


def test_another_ordinal_is_refused(gpu):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(3).to(1)


def test_small_values_are_true(gpu):
    ids = torch.tensor([3, 9, 1]).cuda()
    assert ids.max().item() == 9 and (ids + 1).tolist() == [4, 10, 2] and ids.sum() == 13
    view = ids[1:]
    view.fill_(7)
    assert ids.tolist() == [3, 7, 7], "a view writes to its base"
    ids.masked_fill_(ids == 3, 0)
    assert view.tolist() == [7, 7] and ids[0].item() == 0
    lengths = torch.empty(2, dtype=torch.long, device="cuda")
    lengths[0], lengths[1] = 5, 6
    assert lengths.tolist() == [5, 6]
    assert torch.where(torch.tensor([1, 0, 1]).cuda() > 0)[0].tolist() == [0, 2]
    assert torch.unique(torch.tensor([3, 3, 1]).cuda()).tolist() == [1, 3]
    assert F.one_hot(torch.tensor([0, 2, 1]).cuda()).shape == (3, 3)
    assert F.one_hot(torch.tensor([0, 2, 1]).cuda()).is_cuda
    assert gpu.assumptions.all() == ()


def test_unknown_values_are_placeholders_with_the_line_that_read_them(gpu):
    x = torch.randn(80, 160, device="cuda")
    assert x.mean().item() == 1.0 and bool(x.sum() > 5) is False and int(x.argmax()) == 0
    found = gpu.assumptions.all()
    assert [item.phrase.split(" was")[0] for item in found] == [
        "an unknown float32 value", "an unknown bool value", "an unknown int64 value"
    ]  # fmt: skip
    assert all("test_cuda_emulation.py" in item.place for item in found)
    assert bool(torch.isfinite(x).all()) and not bool(torch.isnan(x).any())


def test_an_unknown_write_voids_all_views(gpu):
    ids = torch.tensor([3, 9, 1]).cuda()
    view = ids[1:]
    ids.copy_(torch.randn(3, 5000, device="cuda").argmax(1))
    assert view.tolist() == [0, 0] and len(gpu.assumptions.all()) == 1


def test_masks_select_what_they_are_assumed_to():
    for fraction, count in ((1.0, 800), (0.25, 200)):
        with CudaEmulation(A100, nonzero_fraction=fraction) as gpu:
            x = torch.randn(800, 1600, device="cuda")
            known = torch.arange(800).cuda() < 3
            assert x[known].shape == (3, 1600), "a mask whose values are known"
            mask = x[:, 0] > 0
            assert x[mask].shape == (count, 1600) and mask.nonzero().shape == (count, 1)
            assert x.masked_select(mask[:, None]).shape[0] == count
            assert sum(item.count for item in gpu.assumptions.all()) == 3


def test_deterministic_algorithms_interpolate_by_indices(gpu):
    # F.interpolate takes torch's decomposition then, which reads by _unsafe_index
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        images = torch.zeros(2, 3, 20, 30, device="cuda")
        larger = torch.nn.functional.interpolate(images, size=(50, 70), mode="bilinear")
    finally:
        torch.use_deterministic_algorithms(before)
    assert larger.shape == (2, 3, 50, 70) and larger.is_cuda


def test_moving_a_network_keeps_ties_and_optimizers(gpu):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    first.weight = second.weight
    network = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    network.cuda()
    assert first.weight is second.weight and optimizer.param_groups[0]["params"][0] is first.weight
    assert first.weight.is_cuda and first.weight.requires_grad and isinstance(first.weight, nn.Parameter)
    duplicate = copy.deepcopy(network)
    assert duplicate[0].weight.is_cuda and duplicate[0].weight is duplicate[1].weight
    network.half()
    assert first.weight.dtype == torch.float16
    network.cpu()
    assert first.weight.device.type == "cpu"


def test_gradients_move_along(gpu):
    network = nn.Linear(4, 4)
    network(torch.randn(2, 4)).sum().backward()
    network.cuda()
    assert network.weight.grad.is_cuda


def test_device_contexts_place_tensors(gpu):
    with torch.device("cuda"):
        network = nn.LSTM(4, 8, 2)
        assert torch.tensor([1]).is_cuda
    assert network.weight_ih_l0.is_cuda and network(torch.randn(5, 2, 4, device="cuda"))[0].is_cuda
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        large = nn.Linear(1024, 1024)
    assert large.weight.device.type == "meta" and torch.cuda.memory_allocated() == before
    large.to_empty(device="cuda")
    assert large.weight.is_cuda and torch.cuda.memory_allocated() - before == 4 * 1024 * 1024 + 4 * 1024
    torch.set_default_device("cuda")
    try:
        assert nn.Linear(3, 3).weight.is_cuda
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


def test_memory_figures_come_from_the_simulation(gpu):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_properties(0).total_memory == (40960 - 550) * MIB
    x = torch.empty(300, device="cuda")
    assert torch.cuda.memory_allocated() == 1536 and torch.cuda.memory_reserved() == 2 * MIB
    del x
    gc.collect()
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 1536
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0 and torch.cuda.memory_stats()["num_ooms"] == 0
    free, total = torch.cuda.mem_get_info()
    assert total == (40960 - 550) * MIB and free == total - 428 * MIB


def test_running_out_of_memory_raises_where_a_gpu_would_and_can_be_survived(gpu):
    held = torch.empty(30 * 1024 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 10\.00 GiB"):
        torch.empty(10 * 1024 * MIB, dtype=torch.uint8, device="cuda")
    del held
    assert torch.empty(10 * 1024 * MIB, dtype=torch.uint8, device="cuda").is_cuda
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 * 1024 * MIB, dtype=torch.uint8, device="cuda")


def test_storages_free_their_memory_when_resized(gpu):
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    x.untyped_storage().resize_(2 * MIB)
    assert torch.cuda.memory_allocated() == 2 * MIB
    del x
    assert torch.cuda.memory_allocated() == 0


def test_host_and_device_tensors_do_not_mix(gpu):
    with pytest.raises(RuntimeError, match="same device"):
        torch.randn(3, device="cuda") + torch.randn(3)
    with pytest.raises(RuntimeError, match="same device"):
        F.embedding(torch.tensor([1, 2]), torch.randn(5, 4, device="cuda"))
    assert (torch.randn(3, device="cuda") * torch.tensor(2.0)).is_cuda, "a scalar of the host may"
    assert torch.randn(3, 2, device="cuda")[torch.tensor([0, 2])].is_cuda, "so may an index"


def test_checkpoints_without_data_are_not_written(gpu, tmp_path):
    path = tmp_path / "real.pt"
    torch.save({"w": torch.ones(3)}, path)
    before = path.read_bytes()
    network = nn.Linear(4, 4).cuda()
    torch.save({"model": network.state_dict(), "epoch": 3}, path)
    assert path.read_bytes() == before and list(gpu.unwritten) == [str(path)]
    loaded = torch.load(path, map_location="cuda")
    assert loaded["epoch"] == 3 and loaded["model"]["weight"].is_cuda
    assert torch.load(path, map_location="cpu")["model"]["weight"].device.type == "cpu"
    network.load_state_dict(loaded["model"])
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer)["bias"].shape == (4,)


def test_real_checkpoints_are_loaded_to_the_device(gpu, tmp_path):
    path = tmp_path / "real.pt"
    torch.save({"w": torch.arange(3), "large": torch.ones(100, 1000)}, path)
    on_device = torch.load(path, map_location="cuda")
    assert on_device["w"].is_cuda and on_device["w"].tolist() == [0, 1, 2] and on_device["large"].is_cuda
    assert torch.load(path)["w"].device.type == "cpu"
    assert torch.load(path, map_location=lambda storage, place: storage.cuda())["w"].is_cuda


def test_threads_see_the_device(gpu):
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(3, device="cuda").device))
    thread.start()
    thread.join()
    assert found == [torch.device("cuda:0")]


def test_loaders_pin_memory_and_run_workers(gpu):
    data = torch.utils.data.TensorDataset(torch.arange(12), torch.randn(12, 4))
    loader = torch.utils.data.DataLoader(data, 4, num_workers=2, pin_memory=True)
    batches = [(ids.cuda(non_blocking=True), x.is_pinned()) for ids, x in loader]
    assert [ids.tolist() for ids, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(pinned for _, pinned in batches)


def test_large_parameters_take_no_memory_of_the_host(gpu):
    network = nn.Linear(40_000, 40_000, bias=False)
    assert network.weight.device.type == "cpu" and not network.weight.is_meta and torch.cuda.memory_allocated() == 0
    assert network.weight.std().item() == 1.0, "a placeholder"
    network.to("cuda", torch.bfloat16)
    assert network.weight.is_cuda and torch.cuda.memory_allocated() == 1526 * 2 * MIB
    state = {name: value.cpu() for name, value in network.state_dict().items()}
    assert state["weight"].device.type == "cpu" and state["weight"].shape == (40_000, 40_000)


def test_distributions_accept_their_arguments(gpu):
    logits = torch.randn(64, 6000, device="cuda")
    action = torch.distributions.Categorical(logits=logits).sample()
    assert action.shape == (64,) and action.is_cuda
    scale = F.softplus(logits)
    assert torch.distributions.Normal(logits, scale).log_prob(logits).shape == (64, 6000)


def test_checkpointing_under_autocast_keeps_dtypes(gpu):
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.ReLU()).cuda()
    x = torch.randn(8, 16, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = checkpoint(block, x, use_reentrant=False)
        z = checkpoint(block, y, use_reentrant=True)
    z.float().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32 and x.grad.is_cuda


@pytest.mark.parametrize(("name", "states"), [("SGD", 0), ("SparseAdam", 2), ("Adagrad", 1)])
def test_sparse_gradients_have_a_row_for_each_token(gpu, name, states):
    embedding = nn.Embedding(1000, 64, sparse=True).cuda()
    optimizer = getattr(torch.optim, name)(list(embedding.parameters()), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.randint(1000, (32, 8)).cuda()).pow(2).sum().backward()
        gradient = embedding.weight.grad
        assert gradient.layout is torch.sparse_coo and gradient.is_cuda and gradient._nnz() == 256
        optimizer.step()
        del gradient
    optimizer.zero_grad()
    gc.collect()
    weight = 4 * 64 * 1000
    assert torch.cuda.memory_allocated() == pytest.approx((1 + states) * weight, abs=4096)


def test_sparse_tensors_are_where_their_values_are(gpu):
    indices, values = torch.tensor([[0, 1], [1, 0]]).cuda(), torch.ones(2).cuda()
    sparse = torch.sparse_coo_tensor(indices, values, (2, 2))
    assert sparse.is_cuda and sparse.device.type == "cuda" and sparse.to_dense().is_cuda


def test_gradients_of_each_sample_by_torch_func_have_their_memory(gpu):
    network = nn.Linear(256, 512, bias=False).cuda()
    samples = torch.randn(64, 256, device="cuda")
    weights = {name: weight.detach() for name, weight in network.named_parameters()}

    def loss(values, sample):
        return torch.func.functional_call(network, values, (sample[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    per_sample(weights, samples)  # cuBLAS allocates its workspaces at the first call
    before = torch.cuda.memory_allocated()
    gradients = per_sample(weights, samples)
    assert gradients["weight"].shape == (64, 512, 256)
    assert torch.cuda.memory_allocated() - before == 64 * 512 * 256 * 4


def test_side_streams_have_memory_of_their_own(gpu):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    del x
    torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 4 * MIB, "the block of the side stream is not reused"
    event = torch.cuda.Event()
    event.record(stream)
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.synchronize()


def test_snapshots_have_the_format_of_torch(gpu, tmp_path):
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    path = tmp_path / "memory.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    snapshot = pickle.loads(path.read_bytes())
    assert x.is_cuda and snapshot["segments"][0]["total_size"] == 20 * MIB
    assert [item["action"] for item in snapshot["device_traces"][0]] == ["segment_alloc", "alloc"]
    assert snapshot["device_traces"][0][0]["frames"][-1]["filename"].endswith("test_cuda_emulation.py")
    from torch.cuda import _memory_viz

    assert "3.0MiB" in _memory_viz.segsum(snapshot)


def test_torch_is_as_it_was_afterwards():
    names = [(torch.Tensor, "to"), (torch.cuda, "is_available"), (torch, "device"), (torch, "save"), (torch, "empty")]
    before = [getattr(owner, name) for owner, name in names]
    with CudaEmulation(A100):
        assert torch.cuda.is_available()
    assert [getattr(owner, name) for owner, name in names] == before
    assert not torch.cuda.is_available() and "device" not in vars(torch.Tensor)


def test_a_script_reads_the_total_that_cuda_reports():
    # a real T4: 14,912 MiB, of 15,360 in nvidia-smi; the context is free memory that is missing
    t4 = load_profile("t4")
    with CudaEmulation(t4, options=AllocatorOptions()):
        free, total = torch.cuda.mem_get_info()
        cudart = torch.cuda.cudart().cudaMemGetInfo(0)
        assert total == torch.cuda.get_device_properties(0).total_memory == 14_912 * MIB
        assert cudart == (free, total) and total - free == t4.context_mib * MIB == 141 * MIB
        torch.cuda.set_per_process_memory_fraction(0.5)  # of the same total (CUDACachingAllocator, setMemoryFraction)
        held = torch.empty(14_912 // 2 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 14\.56 GiB"):
            torch.empty(2 * MIB, device="cuda", dtype=torch.uint8)
        assert held.is_cuda
