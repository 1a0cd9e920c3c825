/* Device memory: address ranges that nothing may touch. Host code that reads a device's pointer
   dies here as it would with a GPU. What is copied to the device is dropped, what is read from it
   is zeros: the results of kernels that never ran, the same in every run. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "stub.h"

struct range {
    char *start;
    size_t bytes;
    enum where where;
};

static struct range *ranges; /* ordered by start */
static size_t used, room;

void *stub_reserve(size_t bytes)
{
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *start = mmap(NULL, bytes ? bytes : 1, PROT_NONE, how, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

/* The first range that starts after `address`. */
static size_t after(const void *address)
{
    size_t low = 0, high = used;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start > (const char *)address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

void stub_remember(void *start, size_t bytes, enum where where)
{
    stub_lock();
    if (used == room) {
        room = room ? 2 * room : 1024;
        ranges = realloc(ranges, room * sizeof *ranges);
        if (!ranges)
            abort();
    }
    size_t place = after(start);
    memmove(ranges + place + 1, ranges + place, (used - place) * sizeof *ranges);
    ranges[place] = (struct range){start, bytes, where};
    used++;
    stub_unlock();
}

size_t stub_forget(void *start, enum where *where)
{
    stub_lock();
    size_t place = after(start), bytes = 0;
    if (place && ranges[place - 1].start == start) {
        bytes = ranges[place - 1].bytes;
        *where = ranges[place - 1].where;
        memmove(ranges + place - 1, ranges + place, (used - place) * sizeof *ranges);
        used--;
    }
    stub_unlock();
    return bytes;
}

enum where stub_where(const void *address)
{
    stub_lock();
    size_t place = after(address);
    enum where where = NOWHERE;
    if (place && (const char *)address < ranges[place - 1].start + ranges[place - 1].bytes)
        where = ranges[place - 1].where;
    stub_unlock();
    return where;
}

size_t stub_range(const void *address, void **start)
{
    stub_lock();
    size_t place = after(address), bytes = 0;
    if (place && (const char *)address < ranges[place - 1].start + ranges[place - 1].bytes) {
        *start = ranges[place - 1].start;
        bytes = ranges[place - 1].bytes;
    }
    stub_unlock();
    return bytes;
}

static int allocate(void **to, size_t bytes, const char *name)
{
    *to = NULL;
    if (!stub_hold(bytes, name))
        return stub_failed(cudaErrorMemoryAllocation);
    *to = stub_reserve(bytes);
    if (!*to) {
        stub_release(bytes);
        return stub_failed(cudaErrorMemoryAllocation);
    }
    stub_remember(*to, bytes, ON_DEVICE);
    return cudaSuccess;
}

static int release(void *start)
{
    enum where where = NOWHERE;
    size_t bytes = stub_forget(start, &where);
    if (bytes)
        munmap(start, bytes);
    if (where == ON_DEVICE)
        stub_release(bytes);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **to, size_t bytes)
{
    int refused = stub_unsafe("cudaMalloc");
    return refused ? refused : allocate(to, bytes, "cudaMalloc");
}

cudaError_t cudaFree(void *start)
{
    int refused = start ? stub_unsafe("cudaFree") : cudaSuccess;
    return refused ? refused : release(start);
}

cudaError_t cudaHostAlloc(void **to, size_t bytes, unsigned flags)
{
    int refused = stub_unsafe("cudaHostAlloc"), how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (refused)
        return refused;
    *to = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, how, -1, 0);
    if (*to == MAP_FAILED)
        return stub_failed(cudaErrorMemoryAllocation);
    stub_remember(*to, bytes, PINNED);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *start)
{
    int refused = stub_unsafe("cudaFreeHost");
    return refused ? refused : release(start);
}

cudaError_t cudaMallocAsync(void **to, size_t bytes, cudaStream_t stream)
{
    return allocate(to, bytes, "cudaMallocAsync");
}
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return release(start); }

cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags)
{
    int refused = stub_unsafe("cudaHostRegister");
    if (!refused)
        stub_remember(start, bytes, PINNED);
    return refused;
}

cudaError_t cudaHostUnregister(void *start)
{
    enum where where;
    stub_forget(start, &where);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total)
{
    *total = stub_memory();
    *left = stub_left();
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *address)
{
    enum where where = stub_where(address);
    memset(to, 0, sizeof *to);
    to->type = where == ON_DEVICE ? cudaMemoryTypeDevice
             : where == PINNED    ? cudaMemoryTypeHost
                                  : cudaMemoryTypeUnregistered;
    to->devicePointer = where == NOWHERE ? NULL : (void *)address;
    to->hostPointer = where == ON_DEVICE ? NULL : (void *)address;
    return cudaSuccess;
}

static void count(enum where target, enum where source, long bytes, const char *name)
{
    int to_device = target == ON_DEVICE, from_device = source == ON_DEVICE;
    int pageable = to_device != from_device && (target == NOWHERE || source == NOWHERE);
    stub_lock();
    if (to_device && from_device) {
        stub_counted.on_device++;
    } else if (to_device) {
        stub_counted.to_device++;
        stub_counted.bytes_to_device += bytes;
        stub_counted.pageable += pageable;
    } else if (from_device) {
        stub_counted.from_device++;
        stub_counted.bytes_from_device += bytes;
        stub_counted.pageable_from_device += pageable;
    }
    stub_unlock();
    if (to_device != from_device)
        stub_report(to_device ? TO_DEVICE : FROM_DEVICE, bytes, name);
    if (pageable)
        stub_report(PAGEABLE, bytes, name);
}

/* Rows of `width` bytes that lie so far apart. */
struct plane {
    char *start;
    size_t pitch;
};

static int copy(
    struct plane to, struct plane from, size_t width, size_t height, void *stream, const char *name)
{
    enum where target = stub_where(to.start), source = stub_where(from.start);
    int captured;
    if (stub_capturing(stream) && (target == NOWHERE || source == NOWHERE))
        return stub_refuse(stream, name); /* the graph cannot hold memory that is not pinned */
    int error = stub_work(stream, 1, name, &captured);
    if (captured)
        return error;
    for (size_t row = 0; row < height && target != ON_DEVICE; row++) {
        char *start = to.start + row * to.pitch;
        if (source == ON_DEVICE)
            memset(start, 0, width);
        else
            memmove(start, from.start + row * from.pitch, width);
    }
    count(target, source, width * height, name);
    return cudaSuccess;
}

static int copy_flat(void *to, const void *from, size_t bytes, void *stream, const char *name)
{
    return copy((struct plane){to}, (struct plane){(char *)from}, bytes, 1, stream, name);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    int refused = stub_unsafe("cudaMemcpy");
    if (refused)
        return refused;
    stub_wait("cudaMemcpy");
    return copy_flat(to, from, bytes, NULL, "cudaMemcpy");
}

cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    return copy_flat(to, from, bytes, stream, "cudaMemcpyAsync");
}

cudaError_t cudaMemcpyPeerAsync(
    void *to, int device, const void *from, int other, size_t bytes, cudaStream_t stream)
{
    return copy_flat(to, from, bytes, stream, "cudaMemcpyPeerAsync");
}

cudaError_t cudaMemcpy2DAsync(
    void *to, size_t pitch, const void *from, size_t other, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream)
{
    struct plane target = {to, pitch}, source = {(char *)from, other};
    return copy(target, source, width, height, stream, "cudaMemcpy2DAsync");
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    if (stub_where(to) != ON_DEVICE && !stub_capturing(stream))
        memset(to, value, bytes);
    return stub_launch(stream, "memset");
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    int refused = stub_unsafe("cudaMemset");
    return refused ? refused : cudaMemsetAsync(to, value, bytes, NULL);
}
