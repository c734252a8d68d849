"""Entering fp4gemm into vLLM's table of quantization methods."""

from __future__ import annotations

from ..serving.options import Options
from ._process import current_device, log

__all__ = ["MINIMUM", "register"]

MINIMUM = (0, 32)  # the first vLLM whose classes the methods here were written for


def register() -> None:
    """Let vLLM serve NVFP4 through fp4gemm; again is harmless.

    Does nothing but log the reason where fp4gemm has no kernel for the device, where vLLM is older than
    0.32 or lacks a name that is used here, or where ``FP4GEMM_SERVING_ENABLED=0``. torch.cuda is not
    initialised, so vLLM may fork.

    Raises:
        TypeError, ValueError: an environment variable ``FP4GEMM_SERVING_*`` has no such value.
    """
    options = Options.read()
    if not options.enabled:
        log.info("fp4gemm: is disabled by FP4GEMM_SERVING_ENABLED=0")
        return
    import vllm

    version = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if len(version) == 2 and (0, 0) < version < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        log.warning(
            "fp4gemm: vLLM %s is installed, must be %s or newer to be served", vllm.__version__, wanted
        )
        return
    device = current_device()
    reason = device.reason()
    if reason is not None:
        log.warning("fp4gemm: serves no layer: %s", reason)
        return
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config
        from vllm.platforms import current_platform

        from ._configs import CONFIGS
        from ._fp4gemm import Fp4GemmConfig
    except ImportError as error:  # an exception would end vLLM, whatever it serves
        log.warning("fp4gemm: serves no layer: vLLM %s is not supported: %s", vllm.__version__, error)
        return

    for name, config in (*CONFIGS.items(), ("fp4gemm", Fp4GemmConfig)):
        register_quantization_config(name)(config)
        # vLLM adds names that are new to it to what the platform supports; on CPUs, ours run there too.
        supported = current_platform.supported_quantization
        if supported and name not in supported:
            supported.append(name)
    log.debug("fp4gemm: registered; %s", device.built())
