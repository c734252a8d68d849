"""The code that the plug-ins of vLLM and SGLang share: options, weights, products. It imports no engine.

An engine shards the tensors of a checkpoint over its ranks and loads them into parameters. From there on the
modules here take over: :mod:`.choice` says which layers are served, :mod:`.weights` checks what is loaded and
turns the parameters of a layer into the tensors that the operators read, and :mod:`.products` multiplies by
them.
"""
