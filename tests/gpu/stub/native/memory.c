/* Device memory: address ranges that nothing may touch. Host code that reads a device's pointer
   dies here as it would with a GPU. What is copied to the device is dropped, what is read from it
   is zeros: the results of kernels that never ran, the same in every run. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
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
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
struct stub_counts stub_counted;

void stub_lock(void) { pthread_mutex_lock(&mutex); }
void stub_unlock(void) { pthread_mutex_unlock(&mutex); }

void stub_counts(struct stub_counts *to)
{
    stub_lock();
    *to = stub_counted;
    stub_unlock();
}

void stub_reset(void)
{
    stub_lock();
    long held = stub_counted.held;
    memset(&stub_counted, 0, sizeof stub_counted);
    stub_counted.held = stub_counted.peak = held;
    stub_unlock();
}

size_t stub_memory(void)
{
    const char *gigabytes = getenv("STUB_MEM");
    return (size_t)((gigabytes ? atof(gigabytes) : 80.0) * (1 << 30));
}

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

int stub_hold(size_t bytes)
{
    stub_lock();
    int fits = stub_counted.held + bytes <= stub_memory();
    if (fits) {
        stub_counted.held += bytes;
        if (stub_counted.held > stub_counted.peak)
            stub_counted.peak = stub_counted.held;
    }
    stub_counted.allocations++;
    stub_unlock();
    return fits;
}

void stub_release(size_t bytes)
{
    stub_lock();
    stub_counted.held -= bytes;
    stub_unlock();
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

cudaError_t cudaMalloc(void **to, size_t bytes)
{
    *to = NULL;
    if (!stub_hold(bytes))
        return cudaErrorMemoryAllocation;
    *to = stub_reserve(bytes);
    if (!*to) {
        stub_release(bytes);
        return cudaErrorMemoryAllocation;
    }
    stub_remember(*to, bytes, ON_DEVICE);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **to, size_t bytes, unsigned flags)
{
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *to = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, how, -1, 0);
    if (*to == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    stub_remember(*to, bytes, PINNED);
    return cudaSuccess;
}

cudaError_t cudaFree(void *start)
{
    enum where where = NOWHERE;
    size_t bytes = stub_forget(start, &where);
    if (bytes)
        munmap(start, bytes);
    if (where == ON_DEVICE)
        stub_release(bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *start) { return cudaFree(start); }
cudaError_t cudaMallocAsync(void **to, size_t bytes, cudaStream_t s) { return cudaMalloc(to, bytes); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags)
{
    stub_remember(start, bytes, PINNED);
    return cudaSuccess;
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
    *left = *total - stub_counted.held;
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

static void copy(void *to, const void *from, size_t bytes)
{
    enum where target = stub_where(to), source = stub_where(from);
    if (source == ON_DEVICE && target != ON_DEVICE)
        memset(to, 0, bytes);
    else if (source != ON_DEVICE && target != ON_DEVICE)
        memmove(to, from, bytes);
    stub_lock();
    if (source == ON_DEVICE && target == ON_DEVICE) {
        stub_counted.on_device++;
    } else if (target == ON_DEVICE) {
        stub_counted.to_device++;
        stub_counted.bytes_to_device += bytes;
        stub_counted.pageable += source == NOWHERE;
    } else if (source == ON_DEVICE) {
        stub_counted.from_device++;
        stub_counted.bytes_from_device += bytes;
    }
    stub_unlock();
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    stub_wait();
    copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(
    void *to, int device, const void *from, int other, size_t bytes, cudaStream_t stream)
{
    copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(
    void *to, size_t pitch, const void *from, size_t other, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream)
{
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * pitch, (const char *)from + row * other, width);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    stub_launch();
    if (stub_where(to) != ON_DEVICE)
        memset(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    return cudaMemset(to, value, bytes);
}
