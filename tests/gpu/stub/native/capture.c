/* Streams and events. Work on a stream is done at once, that is not at all; while the stream is
   capturing it is counted in a graph. A capture follows CUDA's rules: other streams join
   by an event and have to come back by one, and what cannot be captured invalidates it. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include "stub.h"
#undef cudaStreamGetCaptureInfo
#undef cudaEventElapsedTime

enum { JOINED = 32, CAPTURES = 16 };

struct capture {
    unsigned long long id;
    struct CUgraph_st *graph;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    int invalid, streams;
    struct CUstream_st *joined[JOINED]; /* the first is where it began */
};
/* `seen` is a vector clock: how many nodes of each joined stream this one comes after. */
struct CUstream_st {
    struct capture *capture;
    int number, priority;
    long seen[JOINED];
};
struct CUevent_st {
    unsigned long long capture; /* in which it was recorded last; 0: in none */
    int recorded;
    long seen[JOINED];
};

static struct capture *captures[CAPTURES];
static unsigned long long last_id;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* NULL and the two small numbers are streams that every device has and that never capture. */
static struct capture *capture_of(cudaStream_t stream)
{
    return (size_t)stream < 16 ? NULL : stream->capture;
}

static struct capture *capture_by(unsigned long long id)
{
    for (int number = 0; id && number < CAPTURES; number++)
        if (captures[number] && captures[number]->id == id)
            return captures[number];
    return NULL;
}

static int invalidate(struct capture *capture, int error, const char *name)
{
    if (capture)
        capture->invalid = 1;
    pthread_mutex_unlock(&mutex);
    stub_lock();
    stub_counted.refused++;
    stub_unlock();
    stub_report(REFUSED, 0, name);
    return stub_failed(error);
}

static int add_nodes(cudaStream_t stream, long nodes)
{
    struct capture *capture = stream->capture;
    if (capture->invalid)
        return cudaErrorStreamCaptureInvalidated;
    capture->graph->nodes += nodes;
    stream->seen[stream->number] += nodes;
    return cudaSuccess;
}

int stub_work(void *stream, long nodes, const char *name, int *captured)
{
    int error = cudaSuccess;
    pthread_mutex_lock(&mutex);
    *captured = capture_of(stream) != NULL;
    if (*captured)
        error = add_nodes(stream, nodes);
    pthread_mutex_unlock(&mutex);
    if (*captured && !error) {
        stub_lock();
        stub_counted.captured += nodes;
        stub_unlock();
        stub_report(CAPTURED, 0, name);
    }
    return stub_failed(error);
}

int stub_unsafe(const char *name)
{
    pthread_mutex_lock(&mutex);
    for (int number = 0; number < CAPTURES; number++) {
        struct capture *each = captures[number];
        if (!each || each->mode == cudaStreamCaptureModeRelaxed ||
            thread_mode == cudaStreamCaptureModeRelaxed)
            continue;
        int global = each->mode == cudaStreamCaptureModeGlobal &&
                     thread_mode == cudaStreamCaptureModeGlobal;
        if (global || pthread_equal(each->thread, pthread_self()))
            return invalidate(each, cudaErrorStreamCaptureUnsupported, name);
    }
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

int stub_refuse(void *stream, const char *name)
{
    pthread_mutex_lock(&mutex);
    return invalidate(capture_of(stream), cudaErrorStreamCaptureUnsupported, name);
}

int stub_capturing(void *stream) { return capture_of(stream) != NULL; }

/* Of a call that waits for one stream, or asks whether it is done. */
static int wait_for(cudaStream_t stream, const char *name)
{
    return capture_of(stream) ? stub_refuse(stream, name) : stub_unsafe(name);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned flags, int priority)
{
    *to = calloc(1, sizeof **to);
    if (!*to)
        return stub_failed(cudaErrorMemoryAllocation);
    (*to)->priority = priority;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned flags)
{
    return cudaStreamCreateWithPriority(to, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *to) { return cudaStreamCreateWithPriority(to, 0, 0); }
/* Its memory stays: a stream may be asked about after its end, and few are made. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *to)
{
    return *to = (size_t)stream < 16 ? 0 : stream->priority, cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return wait_for(stream, "cudaStreamQuery"); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    int refused = wait_for(stream, "cudaStreamSynchronize");
    if (!refused)
        stub_wait("cudaStreamSynchronize");
    return refused;
}

/* Refused while any stream of the device is capturing, whatever the mode. */
cudaError_t cudaDeviceSynchronize(void)
{
    pthread_mutex_lock(&mutex);
    for (int number = 0; number < CAPTURES; number++)
        if (captures[number])
            return invalidate(
                captures[number], cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
    pthread_mutex_unlock(&mutex);
    stub_wait("cudaDeviceSynchronize");
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *argument)
{
    int captured, error = stub_work(stream, 1, "cudaLaunchHostFunc", &captured);
    if (!captured)
        call(argument);
    return error;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

static int begin(cudaStream_t stream, struct CUgraph_st *graph, enum cudaStreamCaptureMode mode)
{
    int free_place = 0;
    if ((size_t)stream < 16)
        return stub_failed(cudaErrorStreamCaptureUnsupported);
    pthread_mutex_lock(&mutex);
    while (free_place < CAPTURES && captures[free_place])
        free_place++;
    struct capture *capture = calloc(1, sizeof *capture);
    if (stream->capture || free_place == CAPTURES || !capture || !graph) {
        free(capture);
        pthread_mutex_unlock(&mutex);
        return stub_failed(cudaErrorIllegalState);
    }
    *capture = (struct capture){++last_id, graph, mode, pthread_self(), 0, 1, {stream}};
    captures[free_place] = capture;
    stream->capture = capture;
    stream->number = 0;
    memset(stream->seen, 0, sizeof stream->seen);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    return begin(stream, calloc(1, sizeof(struct CUgraph_st)), mode);
}
cudaError_t cudaStreamBeginCaptureToGraph(
    cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *after,
    const cudaGraphEdgeData *edges, size_t count, enum cudaStreamCaptureMode mode)
{
    return begin(stream, graph, mode);
}

/* Whether every stream that joined came back to the first. */
static int joined(const struct capture *capture)
{
    for (int number = 1; number < capture->streams; number++)
        if (capture->joined[number]->seen[number] > capture->joined[0]->seen[number])
            return 0;
    return 1;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *to)
{
    *to = NULL;
    pthread_mutex_lock(&mutex);
    struct capture *capture = capture_of(stream);
    int error = !capture ? cudaErrorIllegalState
              : capture->joined[0] != stream ? cudaErrorStreamCaptureUnmatched
              : capture->mode != cudaStreamCaptureModeRelaxed &&
                        !pthread_equal(capture->thread, pthread_self())
                  ? cudaErrorStreamCaptureWrongThread : cudaSuccess;
    if (error) {
        if (capture)
            capture->invalid = 1;
        pthread_mutex_unlock(&mutex);
        return stub_failed(error);
    }
    error = capture->invalid    ? cudaErrorStreamCaptureInvalidated
          : !joined(capture)    ? cudaErrorStreamCaptureUnjoined
                                : cudaSuccess;
    if (!error)
        *to = capture->graph;
    for (int number = 0; number < capture->streams; number++)
        capture->joined[number]->capture = NULL;
    for (int number = 0; number < CAPTURES; number++)
        if (captures[number] == capture)
            captures[number] = NULL;
    free(capture);
    pthread_mutex_unlock(&mutex);
    stub_lock();
    stub_counted.captures += !error;
    stub_unlock();
    return stub_failed(error);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *to)
{
    struct capture *capture = capture_of(stream);
    *to = !capture           ? cudaStreamCaptureStatusNone
        : capture->invalid   ? cudaStreamCaptureStatusInvalidated
                             : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *to, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count)
{
    struct capture *capture = capture_of(stream);
    cudaStreamIsCapturing(stream, to);
    if (id)
        *id = capture ? capture->id : 0;
    if (graph)
        *graph = capture ? capture->graph : NULL;
    if (nodes)
        *nodes = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned flags)
{
    *to = calloc(1, sizeof **to);
    return *to ? cudaSuccess : stub_failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaEventCreate(cudaEvent_t *to) { return cudaEventCreateWithFlags(to, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    pthread_mutex_lock(&mutex);
    struct capture *capture = capture_of(stream);
    if (capture && flags == cudaEventRecordExternal) {
        add_nodes(stream, 1);
        capture = NULL;
    }
    event->recorded = 1;
    event->capture = capture ? capture->id : 0;
    if (capture)
        memcpy(event->seen, stream->seen, sizeof event->seen);
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

static int join(struct capture *capture, cudaStream_t stream)
{
    if ((size_t)stream < 16)
        return cudaErrorStreamCaptureImplicit;
    if (capture->streams == JOINED)
        return cudaErrorNotSupported;
    stream->capture = capture;
    stream->number = capture->streams;
    capture->joined[capture->streams++] = stream;
    memset(stream->seen, 0, sizeof stream->seen);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    pthread_mutex_lock(&mutex);
    struct capture *here = capture_of(stream), *there = capture_by(event->capture);
    int error = cudaSuccess;
    if (flags == cudaEventWaitExternal && here)
        error = add_nodes(stream, 1);
    else if (event->capture && !there)
        error = cudaErrorCapturedEvent;
    else if (here && !there && event->recorded)
        error = cudaErrorStreamCaptureIsolation;
    else if (here && there && here != there)
        error = cudaErrorStreamCaptureMerge;
    else if (there) {
        error = here ? cudaSuccess : join(there, stream);
        for (int number = 0; !error && number < JOINED; number++)
            if (event->seen[number] > stream->seen[number])
                stream->seen[number] = event->seen[number];
    }
    if (error)
        return invalidate(here ? here : there, error, "cudaStreamWaitEvent");
    pthread_mutex_unlock(&mutex);
    return cudaSuccess;
}

static int ask_event(cudaEvent_t event, const char *name)
{
    if (event->capture)
        return stub_failed(cudaErrorCapturedEvent);
    return stub_unsafe(name);
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return ask_event(event, "cudaEventQuery"); }
cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    int refused = ask_event(event, "cudaEventSynchronize");
    if (!refused)
        stub_wait("cudaEventSynchronize");
    return refused;
}
cudaError_t cudaEventElapsedTime(float *to, cudaEvent_t start, cudaEvent_t end)
{
    *to = 1.0f;
    return start->capture || end->capture ? stub_failed(cudaErrorCapturedEvent) : cudaSuccess;
}
