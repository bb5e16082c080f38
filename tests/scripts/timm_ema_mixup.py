"""timm as its training script uses it: channels last, LAMB, mixup, an EMA of the weights, a loader stream."""

import timm
import timm.optim
import timm.scheduler
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, accuracy, random_seed

random_seed(42, 0)
device = torch.device("cuda:0")
torch.backends.cudnn.benchmark = True
model = timm.create_model("resnet18", pretrained=False, num_classes=100, drop_path_rate=0.05)
model = model.to(device=device, memory_format=torch.channels_last)
optimizer = timm.optim.create_optimizer_v2(model, opt="lamb", lr=5e-3, weight_decay=0.02)
ema = ModelEmaV3(model, decay=0.9998)
schedule, _ = timm.scheduler.create_scheduler_v2(optimizer, sched="cosine", num_epochs=10, updates_per_epoch=4)
mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=100)
criterion, scaler, losses = SoftTargetCrossEntropy().to(device), NativeScaler(), AverageMeter()
data = torch.utils.data.TensorDataset(
    torch.randint(0, 255, (64, 3, 128, 128), dtype=torch.uint8), torch.randint(0, 100, (64,))
)
loader = torch.utils.data.DataLoader(data, 16, shuffle=True, pin_memory=True, num_workers=1, persistent_workers=True)
mean = torch.tensor([123.7, 116.3, 103.5]).cuda().view(1, 3, 1, 1)
std = torch.tensor([58.4, 57.1, 57.4]).cuda().view(1, 3, 1, 1)
updates = 0
for epoch in range(2):
    model.train()
    for x, y in loader:
        with torch.cuda.stream(torch.cuda.Stream()):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            x = x.float().sub_(mean).div_(std)
        x, y = mixup(x, y)
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.amp.autocast(device_type=device.type, dtype=torch.float16):
            loss = criterion(model(x), y)
        losses.update(loss.item(), x.size(0))
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, clip_mode="norm", parameters=model.parameters())
        updates += 1
        ema.update(model, step=updates)
        torch.cuda.synchronize()
        schedule.step_update(updates, metric=losses.avg)
        print(f"loss {losses.val:.3f} reserved {torch.cuda.max_memory_reserved() / 2**20:.0f} MiB")
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            top1, top5 = accuracy(model(x.cuda().float()), y.cuda(), topk=(1, 5))
            break
    print("accuracy", top1.item(), top5.item())
