/* Graphs that were captured: how many nodes each has. A launch runs none of them. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include "stub.h"

struct CUgraphExec_st {
    long nodes;
};

cudaError_t cudaGraphCreate(cudaGraph_t *to, unsigned flags)
{
    *to = calloc(1, sizeof **to);
    return *to ? cudaSuccess : stub_failed(cudaErrorMemoryAllocation);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *to, size_t *count)
{
    if (to)
        return stub_failed(cudaErrorNotSupported); /* nodes are a number here */
    return *count = graph->nodes, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *to, cudaGraph_t graph, unsigned long long flags)
{
    *to = calloc(1, sizeof **to);
    if (!*to)
        return stub_failed(cudaErrorMemoryAllocation);
    (*to)->nodes = graph->nodes;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t *to, cudaGraph_t graph, unsigned long long flags)
{
    return cudaGraphInstantiate(to, graph, flags);
}
cudaError_t cudaGraphInstantiateWithParams(
    cudaGraphExec_t *to, cudaGraph_t graph, cudaGraphInstantiateParams *how)
{
    how->result_out = cudaGraphInstantiateSuccess;
    return cudaGraphInstantiate(to, graph, how->flags);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return free(graph), cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    int captured, error = stub_work(stream, graph->nodes, "cudaGraphLaunch", &captured);
    if (!captured) {
        stub_lock();
        stub_counted.graph_launches++;
        stub_counted.replayed += graph->nodes;
        stub_unlock();
        stub_report(GRAPH_LAUNCH, graph->nodes, "cudaGraphLaunch");
    }
    return error;
}
