"""How many kernels, copies and fills a call launches: the nodes of its CUDA graph, counted by the driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

# Of CUgraphNodeType: kernels, copies, fills and host functions do work; a child graph has nodes of its own.
_WORKING, _CHILD = (0, 1, 2, 3), 4


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuGraphGetNodes.argtypes = [pointer, pointer, ctypes.POINTER(ctypes.c_size_t)]
    driver.cuGraphNodeGetType.argtypes = [pointer, ctypes.POINTER(ctypes.c_int)]
    driver.cuGraphChildGraphNodeGetGraph.argtypes = [pointer, ctypes.POINTER(pointer)]
    return driver


def count(call: Callable[[], object]) -> int:
    """The launches of one call, after one call that is not counted.

    Raises:
        RuntimeError: the call cannot be captured in a CUDA graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return _working_nodes(graph.raw_cuda_graph())


def _working_nodes(graph: int | None) -> int:
    """The nodes of a CUgraph that do work, those of child graphs included."""
    driver, size = _driver(), ctypes.c_size_t(0)
    _checked(driver.cuGraphGetNodes(graph, None, ctypes.byref(size)))
    nodes = (ctypes.c_void_p * size.value)()
    if size.value > 0:
        _checked(driver.cuGraphGetNodes(graph, nodes, ctypes.byref(size)))
    found = 0
    for node in nodes:
        kind = ctypes.c_int(-1)
        _checked(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value == _CHILD:
            child = ctypes.c_void_p()
            _checked(driver.cuGraphChildGraphNodeGetGraph(node, ctypes.byref(child)))
            found += _working_nodes(child.value)
        found += kind.value in _WORKING
    return found


def _checked(error: int) -> None:
    if error != 0:
        raise RuntimeError(f"the CUDA driver returned error {error} for a graph")
