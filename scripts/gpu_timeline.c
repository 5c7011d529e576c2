// Records when each kernel of a process begins and ends, also of those in CUDA graphs. The driver loads it from CUDA_INJECTION64_PATH;
// at exit it writes a line for each kernel to the file in GPU_TIMELINE_OUT: begin and end in ns, blocks, threads of a block, name.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4000000, BUFFER_BYTES = 8 << 20, NAME_BYTES = 96 };

struct record {
    uint64_t begin, end;
    int blocks, threads;
    char name[NAME_BYTES];
};

static struct record *records;
static size_t count;

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *size, size_t *most_records) {
    *size = BUFFER_BYTES;
    *buffer = aligned_alloc(8, BUFFER_BYTES);
    *most_records = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    CUpti_Activity *activity = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &activity) == CUPTI_SUCCESS) {
        if (activity->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || count == MOST) continue;
        // Later versions of the structure only add fields.
        const CUpti_ActivityKernel9 *kernel = (const CUpti_ActivityKernel9 *)activity;
        struct record *to = &records[count++];
        to->begin = kernel->start, to->end = kernel->end;
        to->blocks = kernel->gridX * kernel->gridY * kernel->gridZ, to->threads = kernel->blockX;
        strncpy(to->name, kernel->name ? kernel->name : "?", NAME_BYTES - 1);
    }
    free(buffer);
}

static int by_begin(const void *a, const void *b) {
    const struct record *left = a, *right = b;
    return (left->begin > right->begin) - (left->begin < right->begin);
}

static void write_records(void) {
    cuptiActivityFlushAll(1);
    if (count == MOST) fprintf(stderr, "warning: only the first %d kernels were recorded\n", MOST);
    qsort(records, count, sizeof *records, by_begin);
    FILE *out = fopen(getenv("GPU_TIMELINE_OUT"), "w");
    if (!out) return perror("GPU_TIMELINE_OUT");
    for (size_t i = 0; i < count; ++i) {
        const struct record *r = &records[i];
        fprintf(out, "%llu %llu %d %d %s\n", (unsigned long long)(r->begin - records[0].begin), (unsigned long long)(r->end - records[0].begin),
                r->blocks, r->threads, r->name);
    }
    fclose(out);
}

int InitializeInjection(void) {
    records = calloc(MOST, sizeof *records);
    if (!records || !getenv("GPU_TIMELINE_OUT")) return 0;
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    const CUptiResult result = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    if (result != CUPTI_SUCCESS) fprintf(stderr, "error: CUPTI records no kernels: code %d\n", result);
    atexit(write_records);
    return 1;
}
