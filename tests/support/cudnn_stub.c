/* A stub of cuDNN's backend interface, for tests of the code that calls it.
 *
 * The heuristics propose four configurations: an engine that rounds its inputs, one whose plan cannot be made, and two
 * good ones; the fallback proposes a third good one. The workspace of a plan is a sum that shows which tensor is in
 * which place: 1 x + 1000 y + 1000000 weight (in elements), times the number of the good configuration.
 * STUB_VERSION sets the version. A GPU of compute capability 6.6 aborts the process, one below 5.0 is refused. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CONVOLUTION = 1, ENGINE, CONFIG, HEURISTICS, PLAN, FORWARD = 10, WEIGHT, DATA, GRAPH = 15, TENSOR = 17, DEVICE = 38 };
enum { HEURISTICS_MODE = 200, HEURISTICS_GRAPH, HEURISTICS_RESULTS, HEURISTICS_DEVICE = 204, CONFIG_ENGINE = 300 };
enum { PLAN_CONFIG = 401, PLAN_WORKSPACE, PLAN_DEVICE = 407, GRAPH_OPERATIONS = 801, TENSOR_SHAPE = 902, TENSOR_STRIDE };
enum { ENGINE_NOTES = 1303, DEVICE_JSON = 2702 };
enum { BAD_PARAM = 2000, ARCH_MISMATCH = 3007 };

typedef struct { int name, type; int64_t count; void *data; } Attribute;
typedef struct Descriptor {
    int kind, finalized, attributes, number;
    struct Descriptor *source;
    Attribute attribute[16];
} Descriptor;

static char message[256] = "";

static int fail(int status, const char *text) {
    snprintf(message, sizeof message, "%s", text);
    return status;
}

static size_t size_of(int type) { return type == 24 ? 1 : type == 3 || type == 5 || type == 15 ? 8 : 4; }

static Attribute *find(Descriptor *item, int name) {
    for (int i = 0; i < item->attributes; i++)
        if (item->attribute[i].name == name) return &item->attribute[i];
    return NULL;
}

static Descriptor *part(Descriptor *item, int name) {
    Attribute *found = find(item, name);
    return found ? *(Descriptor **)found->data : NULL;
}

static int64_t elements(Descriptor *tensor) {
    Attribute *shape = find(tensor, TENSOR_SHAPE);
    int64_t product = 1;
    for (int i = 0; i < shape->count; i++) product *= ((int64_t *)shape->data)[i];
    return product;
}

size_t cudnnGetVersion(void) {
    const char *version = getenv("STUB_VERSION");
    return version ? strtoul(version, NULL, 10) : 91002;
}

void cudnnGetLastErrorString(char *text, size_t most) { snprintf(text, most, "%s", message); }

int cudnnBackendCreateDescriptor(int kind, Descriptor **item) {
    *item = calloc(1, sizeof(Descriptor));
    (*item)->kind = kind;
    return 0;
}

int cudnnBackendDestroyDescriptor(Descriptor *item) {
    for (int i = 0; i < item->attributes; i++) free(item->attribute[i].data);
    free(item);
    return 0;
}

int cudnnBackendSetAttribute(Descriptor *item, int name, int type, int64_t count, void *values) {
    if (item->finalized) return fail(BAD_PARAM, "set after finalize");
    Attribute *added = &item->attribute[item->attributes++];
    *added = (Attribute){name, type, count, malloc(count * size_of(type) + 1)};
    memcpy(added->data, values, count * size_of(type));
    ((char *)added->data)[count * size_of(type)] = 0;
    return 0;
}

static int device_version(Descriptor *device) {
    char *member = strstr(find(device, DEVICE_JSON)->data, "\"deviceVer\": ");
    return member ? atoi(member + strlen("\"deviceVer\": ")) : 0;
}

int cudnnBackendFinalize(Descriptor *item) {
    if (item->kind == DEVICE && device_version(item) < 500) return fail(ARCH_MISMATCH, "the GPU is too old");
    if (item->kind == HEURISTICS && device_version(part(item, HEURISTICS_DEVICE)) == 660) abort();
    if (item->kind == TENSOR && find(item, TENSOR_SHAPE)->count != find(item, TENSOR_STRIDE)->count)
        return fail(BAD_PARAM, "shape and strides differ in length");
    if (item->kind == PLAN && part(item, PLAN_CONFIG)->number == 1) return fail(BAD_PARAM, "no such plan");
    item->finalized = 1;
    return 0;
}

static int64_t workspace(Descriptor *plan) {
    Descriptor *config = part(plan, PLAN_CONFIG);
    Descriptor *operation = part(part(config->source, HEURISTICS_GRAPH), GRAPH_OPERATIONS);
    int first = operation->kind == FORWARD ? 700 : operation->kind == DATA ? 706 : 712;
    int64_t amounts[3];
    for (int i = 0; i < 3; i++) amounts[i] = elements(part(operation, first + 3 + i));
    return (config->number - 1) * (amounts[1] + 1000 * amounts[2] + 1000000 * amounts[0]);
}

int cudnnBackendGetAttribute(Descriptor *item, int name, int type, int64_t most, int64_t *count, void *values) {
    if (name == HEURISTICS_RESULTS) {
        int is_fallback = *(int *)find(item, HEURISTICS_MODE)->data == 2;
        *count = is_fallback ? 1 : 4;
        for (int i = 0; i < *count && i < most; i++) {
            ((Descriptor **)values)[i]->number = is_fallback ? 4 : i;
            ((Descriptor **)values)[i]->source = item;
        }
    } else if (name == CONFIG_ENGINE) {
        *count = 1;
        (*(Descriptor **)values)->number = item->number;
    } else if (name == ENGINE_NOTES) {
        *count = 1;
        *(int *)values = item->number == 0; /* 1: rounds its inputs; 0: tensor cores */
    } else if (name == PLAN_WORKSPACE) {
        *count = 1;
        *(int64_t *)values = workspace(item);
    } else {
        return fail(BAD_PARAM, "unknown attribute");
    }
    return 0;
}
