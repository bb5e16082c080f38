/* A libnvidia-ml.so.1 for tests: it says what a text file says, and reads that file anew at every call, so that
 * whoever writes the file plays the card. Its path is in NVML_STUB. Lines:
 *
 *   init CODE                                  what nvmlInit returns
 *   memory_v2 CODE                             what the second version of the memory query returns
 *   gpu UUID TOTAL USED RESERVED MIG CODE NAME MIG: 1 on, 0 off, -1 not supported; CODE: what queries of it return
 *   mig CARD UUID TOTAL USED NAME              an instance of the card of that index
 *   process UUID PID BYTES KIND                KIND: c computes, g draws; BYTES -1: not available
 *   process UUID PID BYTES c OWNER             there while the process OWNER lives, and its bytes are used
 *   processes UUID CODE                        what the process queries of it return
 *
 * Numbers of codes and the layout of structures are those of nvml.h.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 64
#define LENGTH 96

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef unsigned long long u64;
typedef struct { char uuid[LENGTH], name[LENGTH]; u64 total, used, reserved; int mig, code, processes, card; } Gpu;
typedef struct { char uuid[LENGTH]; unsigned pid; long long bytes; char kind; int owner; } Process;
typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } ProcessInfo;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;

static _Thread_local struct { int init, memory_v2, cards, gpus, processes; Gpu gpu[MOST]; Process process[MOST]; } now;

static Gpu *named(const char *uuid)
{
    for (int i = 0; i < now.gpus; i++)
        if (!strcmp(now.gpu[i].uuid, uuid))
            return &now.gpu[i];
    return NULL;
}

static void take(const char *line)
{
    Gpu gpu = {.card = -1, .mig = -1};
    Process process = {.owner = 0};
    char uuid[LENGTH];
    int code;
    if (sscanf(line, "init %d", &now.init) == 1 || sscanf(line, "memory_v2 %d", &now.memory_v2) == 1)
        return;
    if (sscanf(line, "gpu %95s %llu %llu %llu %d %d %95[^\n]", gpu.uuid, &gpu.total, &gpu.used, &gpu.reserved,
               &gpu.mig, &gpu.code, gpu.name) == 7) {
        now.gpu[now.gpus++] = gpu;
        now.cards++;
    } else if (sscanf(line, "mig %d %95s %llu %llu %95[^\n]", &gpu.card, gpu.uuid, &gpu.total, &gpu.used, gpu.name) == 5) {
        now.gpu[now.gpus++] = gpu;
    } else if (sscanf(line, "process %95s %u %lld %c %d", process.uuid, &process.pid, &process.bytes, &process.kind,
                      &process.owner) >= 4) {
        if (process.owner && kill(process.owner, 0) != 0)
            return;
        now.process[now.processes++] = process;
        if (process.owner && named(process.uuid))
            named(process.uuid)->used += process.bytes;
    } else if (sscanf(line, "processes %95s %d", uuid, &code) == 2 && named(uuid)) {
        named(uuid)->processes = code;
    }
}

static void look(void)
{
    char line[512];
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    memset(&now, 0, sizeof now);
    while (file && now.gpus < MOST && now.processes < MOST && fgets(line, sizeof line, file))
        take(line);
    if (file)
        fclose(file);
}

/* Handles are places in a table of UUIDs, for they outlive the state that they were made in. */
static char handles[MOST][LENGTH];

static void *handle_of(const Gpu *gpu)
{
    int i = 0;
    while (handles[i][0] && strcmp(handles[i], gpu->uuid))
        i++;
    strcpy(handles[i], gpu->uuid);
    return handles[i];
}

static int gpu_of(const void *handle, Gpu **gpu)
{
    look();
    *gpu = named(handle);
    return *gpu ? (*gpu)->code : INVALID_ARGUMENT;
}

static Gpu *card(int index, int instance)
{
    for (int i = 0, at = -1, inside = -1; i < now.gpus; i++) {
        at += now.gpu[i].card < 0;
        inside += now.gpu[i].card == index;
        if (instance < 0 ? now.gpu[i].card < 0 && at == index : now.gpu[i].card == index && inside == instance)
            return &now.gpu[i];
    }
    return NULL;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; look(); return now.init; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stub"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "555.42.06"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 12050; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { look(); *count = now.cards; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    look();
    Gpu *gpu = card(index, -1);
    if (!gpu)
        return INVALID_ARGUMENT;
    *handle = handle_of(gpu);
    return gpu->code;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    look();
    if (!named(uuid))
        return NOT_FOUND;
    *handle = handle_of(named(uuid));
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned length)
{
    Gpu *gpu;
    int code = gpu_of(handle, &gpu);
    if (code == SUCCESS)
        snprintf(text, length, "%s", gpu->uuid);
    return code;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned length)
{
    Gpu *gpu;
    int code = gpu_of(handle, &gpu);
    if (code == SUCCESS)
        snprintf(text, length, "%s", gpu->name);
    return code;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    Gpu *gpu;
    int code = gpu_of(handle, &gpu);
    if (code == SUCCESS && gpu->mig < 0)
        return NOT_SUPPORTED;
    if (code == SUCCESS)
        *current = *pending = gpu->mig;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { (void)handle; *count = 7; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance)
{
    Gpu *gpu;
    int code = gpu_of(handle, &gpu);
    if (code != SUCCESS)
        return code;
    for (int at = 0; at < now.cards; at++)
        if (card(at, -1) == gpu && card(at, index)) {
            *instance = handle_of(card(at, index));
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory)
{
    Gpu *gpu;
    int code = gpu_of(handle, &gpu);
    if (code == SUCCESS) /* the first version counts what is reserved among what is used */
        *memory = (Memory){gpu->total, gpu->total - gpu->used - gpu->reserved, gpu->used + gpu->reserved};
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory)
{
    Gpu *gpu;
    int code = gpu_of(handle, &gpu);
    if (code == SUCCESS)
        code = now.memory_v2;
    if (code == SUCCESS)
        *memory = (MemoryV2){memory->version, gpu->total, gpu->reserved, gpu->total - gpu->used - gpu->reserved, gpu->used};
    return code;
}

static int processes(void *handle, unsigned *count, ProcessInfo *infos, char kind)
{
    Gpu *gpu;
    unsigned found = 0, room = infos ? *count : 0;
    int code = gpu_of(handle, &gpu);
    if (code == SUCCESS)
        code = gpu->processes;
    if (code != SUCCESS)
        return code;
    for (int i = 0; i < now.processes; i++) {
        if (strcmp(now.process[i].uuid, gpu->uuid) || now.process[i].kind != kind)
            continue;
        if (found < room)
            infos[found] = (ProcessInfo){now.process[i].pid, (u64)now.process[i].bytes, -1u, -1u};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *infos)
{
    return processes(handle, count, infos, 'c');
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *infos)
{
    return processes(handle, count, infos, 'g');
}
